"""Jobs that may hang or take the GPU with them, each in a process of its own: as many at once as
compile side by side, one after the other on the GPU. One that hangs is ended, and named.

Imports no DSL: a child may have to put the emulator in place first.
"""

import contextlib
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

from scripts.common.command_line import leave_ending_to_parent, say
from scripts.common.text import error_line

COMPILE_LIMIT_S = 300.0
MOST_PROCESSES = 12
COMPILED = "compiled"
Row = dict[str, Any]
Prepare = Callable[..., Callable[[], Any]]
"""Compiles a job for a target, emulated or not, and returns what runs it: a function whose result
can be sent from process to process."""


class WrongError(Exception):
    """A job gives another result than it should; the message says how far off."""


def _child(pipe: Connection, prepare: Prepare, job: Any) -> None:
    """Compile, say so, wait for the turn on the GPU, run."""
    leave_ending_to_parent()
    started = time.monotonic()
    try:
        run = prepare(job)
        pipe.send(COMPILED)
        pipe.recv()
        compiled, started = time.monotonic() - started, time.monotonic()
        said = {"status": "passed", "output": run(), "compiled_s": round(compiled, 1)}
    except WrongError as error:
        said = {"status": "wrong", "error": str(error)}
    except BaseException as error:
        said = {"status": "error", "error": error_line(error)[:500]}
    pipe.send(said | {"seconds": round(time.monotonic() - started, 1)})


@dataclass
class _Child:
    job: Any
    process: Any
    pipe: Connection
    until: float
    phase: str = "compiling"

    def heard(self) -> Row | None:
        """What it says of its job; None: that it has compiled it."""
        try:
            said = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(10)
            return {"status": "died", "error": f"{self.phase}, exit code {self.process.exitcode}"}
        if said == COMPILED:
            self.phase, self.until = "waiting", math.inf
            return None
        return said

    def end(self) -> None:
        self.process.kill()
        self.process.join(30)  # a kernel that hangs ends with its process, not at once
        self.pipe.close()


def outcomes(
    todo: Sequence[Any], prepare: Prepare, target: str, emulated: bool, limit_s: float
) -> Iterator[Row]:
    """What became of each job, as they end: `status` is passed, wrong, error, died or hangs.

    Args:
        prepare: see `Prepare`.
        limit_s: how long a compiled job may run.
    """
    # A process that has used the GPU cannot be forked; without one, nothing is imported anew.
    context: Any = multiprocessing.get_context("fork" if emulated else "spawn")
    workers = min(os.cpu_count() or 1, MOST_PROCESSES)
    compile_it = partial(prepare, target=target, emulated=emulated)
    left, children, ended = list(reversed(todo)), list[_Child](), 0

    def begin(job: Any) -> _Child:
        ours, its = context.Pipe()
        process = context.Process(target=_child, args=(its, compile_it, job), daemon=True)
        process.start()
        its.close()
        return _Child(job, process, ours, time.monotonic() + COMPILE_LIMIT_S)

    try:
        while left or children:
            while left and len(children) < workers:
                children.append(begin(left.pop()))
            if all(child.phase != "running" for child in children):
                for child in [child for child in children if child.phase == "waiting"][:1]:
                    with contextlib.suppress(OSError):  # it died: its pipe says so
                        child.pipe.send("run")
                    child.phase, child.until = "running", time.monotonic() + limit_s
            patience = max(0.0, min(child.until for child in children) - time.monotonic())
            spoke = wait([c.pipe for c in children], None if math.isinf(patience) else patience)
            for child in list(children):
                if child.pipe in spoke:
                    said = child.heard()
                elif time.monotonic() >= child.until:
                    said = {"status": "hangs", "error": f"{child.phase}, ended after its limit"}
                else:
                    continue
                if said is not None:
                    children.remove(child)
                    child.end()
                    ended += 1
                    say(f"[{ended}/{len(todo)}] {said['status']}: {child.job}")
                    yield {"job": str(child.job), **said}
    finally:
        for child in children:
            child.end()
