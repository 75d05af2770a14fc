"""Parallel processes, none of which outlives the process that started them."""

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

from moe_fp8.serving.prepare import end_with_parent

from scripts.common.program import leave_ending_to_parent


def _begin(begin: Callable[..., None] | None, *arguments: Any) -> None:
    leave_ending_to_parent()
    end_with_parent()  # the parent may end by SIGKILL, or by a signal while it imports
    if begin is not None:
        begin(*arguments)


@contextmanager
def process_pool(
    count: int, method: str, begin: Callable[..., None] | None = None, *arguments: Any
) -> Iterator[ProcessPoolExecutor]:
    """Start `count` processes by `method` of multiprocessing. Each calls `begin` with the arguments
    first. The end of the block kills them and drops unfinished work."""
    context = multiprocessing.get_context(method)
    pool = ProcessPoolExecutor(count, context, _begin, (begin, *arguments))
    try:
        yield pool
    finally:
        for process in multiprocessing.active_children():
            process.kill()
        pool.shutdown(cancel_futures=True)
