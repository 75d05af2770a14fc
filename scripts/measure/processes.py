"""Processes that work side by side, none of which outlives what started them."""

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

from moe_fp8.serving.prepare import end_with_parent

from scripts.common.command_line import leave_ending_to_parent


def _begin(begin: Callable[..., None] | None, *arguments: Any) -> None:
    leave_ending_to_parent()
    end_with_parent()  # which SIGKILL may end, or a signal while it imports
    if begin is not None:
        begin(*arguments)


@contextmanager
def process_pool(
    count: int, method: str, begin: Callable[..., None] | None = None, *arguments: Any
) -> Iterator[ProcessPoolExecutor]:
    """So many processes, started by `method` of multiprocessing; each calls `begin` with the
    arguments first. With the block they end, and what is not done by then is not done any more."""
    context = multiprocessing.get_context(method)
    pool = ProcessPoolExecutor(count, context, _begin, (begin, *arguments))
    try:
        yield pool
    finally:
        for process in multiprocessing.active_children():
            process.kill()
        pool.shutdown(cancel_futures=True)
