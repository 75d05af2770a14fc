"""A run of flashinfer-bench's Benchmark: its settings, results kept workload by workload,
interrupts, progress; and the measurements that follow it on a GPU."""

import logging
import logging.handlers
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from threading import Event, Thread
from types import FrameType
from typing import Any

import torch
from flashinfer_bench.bench import Benchmark, BenchmarkConfig
from flashinfer_bench.data import Solution, Trace, TraceSet

from scripts.common import environment
from scripts.common.command_line import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_USAGE,
    UsageError,
    os_error,
    say,
)
from scripts.common.definitions import DEFAULT, MoeDefinition
from scripts.common.progress import Progress, duration
from scripts.common.project import ROOT
from scripts.common.text import number
from scripts.data.dataset import load_tensors, ours, tokens
from scripts.data.records import TIMING, TOLERANCE
from scripts.measure import cpu_bench
from scripts.measure.plan import Plan
from scripts.measure.runs import NotKept, Run, find_run, new_run, record_of, settings_hash
from scripts.pack.availability import NEEDS_GPU

GPU_ITERATIONS, CPU_ITERATIONS = 50, 1
TRIALS, TRIALS_OF_LARGE = 3, 1


@dataclass
class Outcome:
    """How measuring went: `status` where it did not get to its end."""

    status: int = EXIT_OK
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0


def configuration(args: Namespace, on_gpu: bool) -> BenchmarkConfig:
    """The options as flashinfer-bench takes them."""
    trials = args.trials or (TRIALS_OF_LARGE if args.definition.large else TRIALS)
    return BenchmarkConfig(
        warmup_runs=args.warmup,
        iterations=args.iterations or (GPU_ITERATIONS if on_gpu else CPU_ITERATIONS),
        num_trials=trials if on_gpu else 1,
        rtol=args.rtol,
        atol=args.atol,
        required_matched_ratio=args.matched_ratio,
        timeout_seconds=args.timeout,
        use_isolated_runner=args.isolated,
    )


def open_run(args: Namespace, plan: Plan, config: BenchmarkConfig, on_gpu: bool) -> Run:
    """A new run, or the one to resume, ready to take results."""
    timing = cpu_bench.TIMING
    if on_gpu:
        timing = (
            f"flashinfer-bench {environment.versions()['flashinfer-bench']}, CUDA events, mean of "
            f"{config.iterations} calls x {config.num_trials} trials, L2 cleared"
        )
    tolerance = (
        f"rtol {config.rtol:g}, atol {config.atol:g}, "
        f"matched ratio {config.required_matched_ratio:g}"
    )
    settings: dict[str, Any] = dict(
        configuration={k: v for k, v in vars(config).items() if k != "log_dir"},
        timing=timing,
        dataset="." if ours(args.local) else str(args.local.resolve()),
        seed=args.seed,
    )
    place: dict[str, Any] = dict(hardware=plan.hardware, environment=environment.capture())
    if args.resume:
        run = find_run(args.traces, None if args.resume is True else args.resume)
        run.check_same(**place, definition=args.definition.name, **settings)
        keys = ("command", "environment", "seconds")
        earlier = {k: run.info[k] for k in keys if k in run.info}
        run.info["earlier"] = [*run.info.get("earlier", []), earlier]
    else:
        run = new_run(args.traces, plan.hardware)
    run.begin(
        hashes={s.name: s.hash() for s in plan.solutions},
        libs={**environment.versions(), TIMING: timing, TOLERANCE: tolerance},
        settings=settings_hash(settings),
    )
    run.save_info(
        definition=args.definition.name,
        command=sys.argv[1:],
        **place,
        **settings,
        peers={**run.info.get("peers", {}), **plan.peers},
        # Without a GPU it is no news of each peer that it needs one.
        skipped={n: why for n, why in plan.skipped.items() if on_gpu or why != NEEDS_GPU},
        finished=False,
    )
    return run


def measure(
    args: Namespace, plan: Plan, config: BenchmarkConfig, run: Run, on_gpu: bool
) -> Outcome:
    """Measure what the run has no results of; every workload's results are kept at once."""
    done = run.done()
    pairs = [
        (t, left)
        for t in plan.workloads
        if (left := [s for s in plan.solutions if (t.workload.uuid, s.name) not in done])
    ]
    names = ", ".join(s.name for s in plan.solutions)
    say(f"{plan.hardware if on_gpu else f'CPU ({plan.hardware})'}: {names}")
    say(f"{len(pairs)} workloads to run, results in {run.directory}")
    if not on_gpu:
        reason = "as asked (--cpu)" if torch.cuda.is_available() else "no GPU is visible"
        say(f"{reason}: the solutions run as their torch model on the CPU; no GPU time is measured")

    def store(results: list[Trace]) -> None:
        stamped = run.store(results)
        if args.store_in_dataset and not ours(args.local):
            plan.trace_set.add_traces(stamped)

    progress = Progress(len(pairs), sum(weight(tokens(t.workload)) for t, _ in pairs))
    outcome = Outcome()
    try:
        if on_gpu:
            outcome.errors = run_on_gpu(
                plan.trace_set, pairs, config, store, progress, args.definition.large
            )
        else:
            cpu_bench.run(plan.trace_set, pairs, config, args.seed, store, progress)
        run.save_info(finished=True, errors=outcome.errors)
        if on_gpu:
            add_measurements(run, args, plan.foreign)
    except KeyboardInterrupt:
        outcome.status = EXIT_INTERRUPTED
        say("interrupted; what was measured is kept")
    except NotKept as error:
        outcome.status = EXIT_USAGE
        outcome.errors.append(str(error))
    finally:
        outcome.seconds = progress.elapsed()
        ended = datetime.now(timezone.utc).isoformat(timespec="seconds")
        try:
            run.save_info(seconds=outcome.seconds, ended=ended, gpus_after=environment.gpus())
        except OSError as error:
            outcome.status = outcome.status or EXIT_USAGE
            outcome.errors.append(os_error(error))
    return outcome


def add_measurements(run: Run, args: Namespace, foreign: bool) -> None:
    """What `check` measures, each in a process of its own: it must not inherit a GPU context that a
    failed solution left broken, nor the memory that the baselines hold here. Code of the data
    set's own solutions is run again where it was asked for. The floors are the first definition's,
    and the bits those of a layer's tokens."""
    options = ["--local", str(args.local), "--run", str(run.directory), "--seed", str(args.seed)]
    options += ["--run-foreign"] if foreign else []
    if args.definition is not DEFAULT:
        options += ["--definition", args.definition.name]
    wanted = {
        "floors": args.definition is DEFAULT,
        "accuracy": not args.no_accuracy,
        "device": not args.no_device_time,
        "bits": not args.no_invariance and isinstance(args.definition, MoeDefinition),
    }
    for name in (name for name, asked_for in wanted.items() if asked_for):
        arguments = ["--only", name, *options]
        command = [sys.executable, str(ROOT / "scripts/programs/check.py"), *arguments]
        # Their tables are in the ranking and the report.
        if subprocess.run(command, stdout=subprocess.DEVNULL).returncode != 0:
            missing = [*arguments, *(["--missing"] if name == "device" else [])]
            again = f"run.py check {shlex.join(missing)}"
            say(f"check --only {name} failed; its figures are incomplete: {again}")


# --- on a GPU -------------------------------------------------------------------------------------


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
    logger = logging.getLogger("flashinfer_bench")
    handler = logging.handlers.BufferingHandler(sys.maxsize)
    handler.setLevel(logging.ERROR)
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
            handler.flush()  # forgets what was said of the workload before
            why = ""
            with (
                finish_before_interrupt() as interrupted,
                announce(Path(config.log_dir), names, progress),
            ):
                try:
                    # flashinfer-bench gives the GPU up after three workloads that cannot be read.
                    load_tensors(one, workload)
                    results = benchmark.run_all(dump_traces=False).traces.get(trace.definition, [])
                except UsageError as error:
                    results, why = [], str(error)
                except SystemExit as error:  # the reference runs in this process
                    said = f"calls sys.exit({error.code})"
                    results, why = [], f"the reference of {trace.definition} {said}"
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
                logged = [line.getMessage() for line in handler.buffer]
                why = why or (logged[-1] if logged else "no result")
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
