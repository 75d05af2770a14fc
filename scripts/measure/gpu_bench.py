"""Driving flashinfer-bench's Benchmark: results kept workload by workload, interrupts, progress."""

import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from types import FrameType

import torch
from flashinfer_bench.bench import Benchmark, BenchmarkConfig
from flashinfer_bench.data import Solution, Trace, TraceSet

from scripts.common.command_line import EXIT_INTERRUPTED, UsageError, say
from scripts.common.progress import Progress, duration
from scripts.common.text import number
from scripts.data.dataset import load_tensors, tokens
from scripts.measure.runs import record_of


def run_on_gpu(
    trace_set: TraceSet,
    pairs: Sequence[tuple[Trace, list[Solution]]],
    config: BenchmarkConfig,
    store: Callable[[list[Trace]], None],
    progress: Progress,
    large: bool = False,
) -> list[str]:
    """flashinfer-bench's Benchmark, one workload at a time on one set of worker processes, so that
    every workload's results are kept as soon as they are there. Returns what went wrong.

    With `large` every workload has worker processes of its own: theirs, as long as they live, hold
    the inputs that they were given last, which this process then cannot free.
    """
    messages: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger = logging.getLogger("flashinfer_bench")
    handler = Collect(level=logging.ERROR)
    logger.addHandler(handler)
    logger.propagate = False

    errors = []
    one = TraceSet(root=trace_set.root, definitions=trace_set.definitions)

    def begin() -> Benchmark:
        with ignored_interrupts():  # which the worker processes inherit
            return Benchmark(one, config)

    benchmark = begin()
    try:
        for i, (trace, solutions) in enumerate(pairs):
            if large and i:
                end(benchmark)
                benchmark = begin()
            workload = trace.workload
            names = [s.name for s in solutions]
            progress.step(f"T={tokens(workload)} ({workload.uuid[:8]}): {len(names)} solutions")
            one.workloads = {trace.definition: [trace]}
            one.solutions = {trace.definition: solutions}
            messages.clear()
            with (
                finish_before_interrupt() as interrupted,
                announce(Path(config.log_dir), names, progress),
            ):
                try:
                    results = evaluated(benchmark, one, trace)
                except UsageError as error:
                    results = []
                    messages.append(str(error))
            if interrupted.is_set():  # a failure may be the interrupt's doing; --resume will tell
                results = [r for r in results if record_of(r).passed]
            store(results)
            for record in map(record_of, results):
                said = f": {record.reason}" if record.reason else ""
                if record.passed:
                    said = f" {number(record.speedup)}x {number(record.latency_ms, '.4f')} ms"
                progress.note(f"{record.solution}: {record.status}{said}")
            missing = {s.name for s in solutions} - {r.solution for r in results}
            if missing and not interrupted.is_set():
                why = messages[-1] if messages else "no result"
                errors.append(f"T={tokens(workload)} ({workload.uuid}): {sorted(missing)}: {why}")
                progress.note(errors[-1])
            progress.finish(weight(tokens(workload)))
            if interrupted.is_set():
                raise KeyboardInterrupt
    finally:
        end(benchmark)
        logger.removeHandler(handler)
        logger.propagate = True
    return errors


def evaluated(benchmark: Benchmark, trace_set: TraceSet, trace: Trace) -> list[Trace]:
    """The results of its one workload.

    Raises:
        UsageError: the workload cannot be read (flashinfer-bench would give the GPU up after three
            of them), or its reference, which runs in this process, calls sys.exit.
    """
    load_tensors(trace_set, trace.workload)
    try:
        return benchmark.run_all(dump_traces=False).traces.get(trace.definition, [])
    except SystemExit as error:
        raise UsageError(
            f"the reference of {trace.definition} calls sys.exit({error.code})"
        ) from None


def end(benchmark: Benchmark) -> None:
    """Its worker processes, and what this one still held for them."""
    benchmark.close()
    if torch.cuda.is_initialized():
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


@contextmanager
def ignored_interrupts() -> Iterator[None]:
    """Ctrl-C reaches every process of the terminal; those started here leave it to this one."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def finish_before_interrupt() -> Iterator[Event]:
    """The first Ctrl-C sets the event and nothing else, so that the workload under way is finished
    and kept; flashinfer-bench would evaluate its remaining solutions anyway and then drop them all.
    The second one ends the process."""
    interrupted = Event()

    def handle(signal_number: int, frame: FrameType | None) -> None:
        if interrupted.is_set():
            for child in multiprocessing.active_children():
                child.terminate()
            say("stopped; `run.py rank` shows what was kept")
            os._exit(EXIT_INTERRUPTED)
        interrupted.set()
        say("finishing this workload; Ctrl-C again stops at once")

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def announce(log_dir: Path, names: Sequence[str], progress: Progress) -> Iterator[None]:
    """A line for each solution when its evaluation begins. flashinfer-bench hands over the results
    of a workload all at once, but its worker opens the log file `<solution>_<time>.log` before
    each."""
    begin, over = time.time(), Event()

    def watch() -> None:
        seen: set[str] = set()
        while not over.wait(0.25):
            for path in log_dir.glob("*.log"):
                name, _, stamp = path.stem.rpartition("_")
                if name in names and name not in seen and float(stamp) >= begin:
                    seen.add(name)
                    spent = duration(progress.elapsed())
                    progress.note(f"running {name} ({len(seen)} of {len(names)}), elapsed {spent}")

    thread = Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def weight(length: int) -> float:
    """Roughly how long a workload takes: the reference's fixed cost, then its tokens."""
    return 1 + length / 4000
