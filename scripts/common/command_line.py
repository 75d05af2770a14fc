"""What the command-line programs share: options, errors, exit statuses and progress.

Imports nothing but the standard library, so that `--help` answers at once.
"""

import argparse
import contextlib
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from scripts.common.project import ROOT
from scripts.common.text import printable

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_CODES = (
    "exit status: 0 everything selected passed, 1 something failed, "
    "2 usage or environment, 130 interrupted, 143 the same by SIGTERM"
)
ENDING = (signal.SIGINT, signal.SIGTERM)
"""What ends a program: Ctrl-C, and what a job gets at its limit, which is treated alike."""


class UsageError(Exception):
    """Something the user can put right: reported as one line, exit status 2."""


class Failure(Exception):
    """Something failed that no other call would put right: reported as one line, exit status 1."""


def say(text: str) -> None:
    """Print lines that are no results to stderr, unprintable characters escaped."""
    print("\n".join(map(printable, text.split("\n"))), file=sys.stderr, flush=True)


def note(text: str) -> None:
    """A line about the step under way."""
    say(f"        {text}")


def run_main(main: Callable[[], int]) -> None:
    """Call `main` and exit with its status; a Failure becomes one line and status 1, a UsageError
    or a file that cannot be read or written one line and status 2. Where `main` says that it was
    interrupted, the status is of the signal that did it."""
    try:
        status = main()
        sys.stdout.flush()  # here, where a reader that is gone is no error
    except (Failure, UsageError) as error:
        say(f"error: {error}")
        status = EXIT_FAILED if isinstance(error, Failure) else EXIT_USAGE
    except KeyboardInterrupt:
        say("interrupted")
        status = EXIT_INTERRUPTED
    except BrokenPipeError:  # `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still to come
        status = EXIT_OK
    except OSError as error:
        say(f"error: {os_error(error)}")
        status = EXIT_USAGE
    sys.exit(exit_status(interrupted_by) if status == EXIT_INTERRUPTED else status)


interrupted_by: int = signal.SIGINT


def exit_status(signal_number: int) -> int:
    """Of a program that a signal ended, as a shell has it."""
    return 128 + signal_number


def interrupt(number: int, frame: FrameType | None) -> None:
    """Either of ENDING: KeyboardInterrupt in `main`, but the end at once before `main` has begun
    and while it imports. An exception that is thrown into an import comes out as another one, is
    swallowed, or ends the process where C++ code has no place for it."""
    global interrupted_by
    interrupted_by = number
    stack = [frame.f_code for frame, _ in traceback.walk_stack(frame)]
    imports = any(code.co_filename.startswith("<frozen importlib") for code in stack)
    if run_main.__code__ in stack and not imports:
        raise KeyboardInterrupt
    os.write(2, b"interrupted\n")
    os._exit(exit_status(number))


def leave_ending_to_parent() -> None:
    """For a process that this program started, which ends it by SIGKILL. ENDING may reach all of
    them: what one of them made of it would be taken for its result."""
    for each in ENDING:
        signal.signal(each, signal.SIG_IGN)


started = getattr(sys.modules["__main__"], "__file__", None)
# Of our programs alone; one that is started with a signal ignored goes on ignoring it.
if started and ROOT / "scripts" in Path(started).resolve().parents:
    for each in ENDING:
        if signal.getsignal(each) != signal.SIG_IGN:
            signal.signal(each, interrupt)
    if os.name == "posix":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # run.py blocks it


def os_error(error: OSError) -> str:
    """What the system said, and of which file."""
    if error.filename is None or error.strerror is None:
        return str(error)
    return f"{error.filename}: {error.strerror}"


def parser(doc: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        description=doc, epilog=EXIT_CODES, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def number(
    kind: Callable[[str], Any], what: str, fits: Callable[[Any], bool]
) -> Callable[[str], Any]:
    """The type of an option: what `kind` makes of its text, if it fits."""

    def parse(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if fits(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is no {what}")

    return parse


def whole(least: int) -> Callable[[str], int]:
    return number(int, f"whole number of at least {least}", lambda n: least <= n < 2**63)


positive = number(float, "finite number above 0", lambda x: 0 < x < math.inf)
share = number(float, "number above 0 and at most 1", lambda x: 0 < x <= 1)


# --- progress -----------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """`4.2 s`, `1 min 05 s` or `2 h 03 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


T = TypeVar("T")


def steps(
    items: Sequence[T],
    text: Callable[[T], str] = str,
    weight: Callable[[T], float] = lambda item: 1.0,
) -> Iterator[T]:
    """The items one after the other, each announced as a line on stderr, which a terminal and a log
    both show well. What remains is extrapolated by weight, not by number: a workload of 14107
    tokens takes far longer than one of 7."""
    whole, done, start = sum(map(weight, items)), 0.0, time.monotonic()
    for number, item in enumerate(items, 1):
        elapsed = time.monotonic() - start
        line = f"[{number:>{len(str(len(items)))}}/{len(items)}] {text(item)}"
        line += f"   elapsed {duration(elapsed)}"
        if done:
            line += f", remaining about {duration(elapsed * (whole - done) / done)}"
        say(line)
        yield item
        done += weight(item)
