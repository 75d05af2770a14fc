"""Parallel processes, none of which outlives the process that started them, and their progress."""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

from moe_fp8.serving.prepare import end_with

from scripts.common.program import leave_ending_to_parent, progress, ticking


def _begin(parent: int, begin: Callable[..., None] | None, *arguments: Any) -> None:
    leave_ending_to_parent()
    end_with(parent)  # which may end by SIGKILL, or by a signal while it imports
    if begin is not None:
        begin(*arguments)


@contextmanager
def process_pool(
    count: int, method: str, begin: Callable[..., None] | None = None, *arguments: Any
) -> Iterator[ProcessPoolExecutor]:
    """Start `count` processes by `method` of multiprocessing. Each calls `begin` with the arguments
    first. The end of the block kills them and drops unfinished work."""
    context = multiprocessing.get_context(method)
    pool = ProcessPoolExecutor(count, context, _begin, (os.getpid(), begin, *arguments))
    try:
        yield pool
    finally:
        for process in multiprocessing.active_children():
            process.kill()
        pool.shutdown(cancel_futures=True)


class Tasks(ExitStack):
    """A progress bar of a pool's tasks: it counts those that have ended and names those that run.
    The remaining time follows from the tasks that have ended, from the first `add` on."""

    def __init__(self, what: str, count: int, workers: int):
        super().__init__()
        self.what, self.workers = what, workers
        self._names: dict[Future, str] = {}
        """Unfinished tasks in the order in which they were added."""
        self._shown = self.enter_context(progress(count))
        self.enter_context(ticking(self._shown))
        self.callback(self._names.clear)  # a task that an interruption ends has no result
        self._show(0)

    def add(
        self, future: Future, name: str, say_result: Callable[[str, Future], None] | None = None
    ) -> Future:
        """Show a task. `say_result` gets its name and it when it has ended, in the pool's thread:
        the program's own may be computing."""

        def ended(future: Future) -> None:
            if self._names.pop(future, None) is not None:
                if say_result is not None:
                    say_result(name, future)
                self._show(1)

        if not self._shown.n and not self._names:
            self._shown.reset()
        self._names[future] = name
        future.add_done_callback(ended)
        self._show(0)
        return future

    def expect_less(self, count: int) -> None:
        self._shown.total -= count

    def _show(self, ended: int) -> None:
        done, names = int(self._shown.n) + ended, [*self._names.values()][: self.workers]
        now = ", ".join(name if len(name) < 50 else f"{name[:47]}..." for name in names)
        self._shown.set_description_str(f"{self.what} {done}/{self._shown.total}", refresh=False)
        self._shown.set_postfix_str(f"now {now}" if now else "", refresh=False)
        self._shown.update(ended)
