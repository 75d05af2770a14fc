"""Progress of long work, with the time that remains."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from scripts.common.command_line import say


def duration(seconds: float) -> str:
    """`4.2 s`, `1 min 05 s` or `2 h 03 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


class Progress:
    """Progress of long work as lines on stderr, which a terminal and a log both show well.

    The remaining time is extrapolated by weight of the steps, not by their number: a workload of
    14107 tokens takes far longer than one of 7.
    """

    def __init__(self, total: int, weight: float = 0.0):
        self.total = total
        self.weight = weight or float(total)
        self.done = 0
        self.done_weight = 0.0
        self.start = time.monotonic()

    def elapsed(self) -> float:
        return time.monotonic() - self.start

    def step(self, text: str) -> None:
        """Announce the step that begins now."""
        elapsed = self.elapsed()
        number = f"{self.done + 1:>{len(str(self.total))}}/{self.total}"
        line = f"[{number}] {text}   elapsed {duration(elapsed)}"
        if self.done_weight > 0:
            remaining = elapsed * (self.weight - self.done_weight) / self.done_weight
            line += f", remaining about {duration(remaining)}"
        say(line)

    def note(self, text: str) -> None:
        """A line about the step under way."""
        say(" " * (2 * len(str(self.total)) + 4) + text)

    def finish(self, weight: float = 1.0) -> None:
        """The step announced last is over."""
        self.done += 1
        self.done_weight += weight


T = TypeVar("T")


def steps(
    items: Sequence[T],
    text: Callable[[T], str] = str,
    weight: Callable[[T], float] = lambda item: 1.0,
) -> Iterator[T]:
    """The items one after the other, each announced as a step of its weight."""
    progress = Progress(len(items), sum(map(weight, items)))
    for item in items:
        progress.step(text(item))
        yield item
        progress.finish(weight(item))
