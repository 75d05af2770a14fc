"""A run of flashinfer-bench's Benchmark: directory, settings, results stored workload by workload,
Ctrl-C, progress, and the measurements that follow it on a GPU.

A run's directory holds traces.jsonl, written as results come, run.json with the settings, which are
those of all its results, and rows.jsonl of the measurements that follow. Every trace is stamped
with its timing, its tolerance, the run, and the hash of the solution's source. Only this stamp
decides if a resumed run still has to measure a pair. run.json names the sources of what has been
measured, never of what is still to be measured.
"""

import contextlib
import itertools
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
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from filelock import FileLock, Timeout
from flashinfer_bench.bench import Benchmark, BenchmarkConfig
from flashinfer_bench.data import Solution, Trace, TraceSet

from scripts.common import environment, program
from scripts.common.machine import NEEDS_GPU
from scripts.common.program import (
    DEFINITION,
    ENDING,
    UsageError,
    exit_status,
    note,
    say,
    slug,
    steps,
)
from scripts.measuring import emulate
from scripts.measuring.cases import Plan, is_this_data_set, load_tensors, named, tokens
from scripts.measuring.clock import HARNESS_CLOCK
from scripts.publishing import rows
from scripts.publishing.rows import EMULATED, HASH, INVALID, RUN, TIMING, TOLERANCE, failure_reason

TRIALS, TRIALS_OF_LARGE = 3, 1
SLOW_HOST_MS = 0.01
"""Time that a host adds to every solution of a workload, above which the workload is repeated."""
MOST_REPEATS = 2
LOST = "Baseline handle not found"
"""flashinfer-bench's error for the solutions that follow one which has ended their worker process:
but for the first of them it looks for the reference's outputs in the worker that ended."""


# --- the directory of a run -----------------------------------------------------------------------


class Run:
    """One run. No other program can use its directory before this context ends."""

    def __init__(self, directory: Path, info: environment.RunInfo | None = None):
        """`info` is the run.json of a run to resume."""
        self.directory = directory
        self.traces = directory / "traces.jsonl"
        self.info: dict[str, Any] = dict(info or {})
        self.libs: dict[str, str] = {}
        """The stamp of the next traces, without the hashes of the solutions."""
        self.hashes: dict[str, str] = {}
        self._lock = FileLock(directory / ".run.lock")
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise UsageError(f"{directory}: another program is measuring for this run") from None

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def save_info(self, **fields: Any) -> None:
        self.info.update(fields)
        program.write_json(self.directory / "run.json", self.info)

    def go_on(self, environment_now: dict[str, Any], **now: Any) -> None:
        """Move what run.json says of the earlier parts to `earlier`. Raises UsageError if machine,
        packages or settings differ: old and new results would not be comparable."""
        then = self.info
        changed = environment.differences(then.get("environment", {}), environment_now)
        changed += [
            f"{key} {then.get(key)!r} then, {value!r} now"
            for key, value in now.items()
            if then.get(key) != value
        ]
        if changed:
            raise UsageError(
                f"{self.directory} cannot be resumed, start a new run:\n  " + "\n  ".join(changed)
            )
        part = {k: then[k] for k in ("command", "environment", "seconds") if k in then}
        then["earlier"] = [*then.get("earlier", []), part]

    def results(self) -> pd.DataFrame:
        paths = [self.traces] if self.traces.is_file() else []
        return rows.read_results(paths, self.info.get("definition", DEFINITION))

    def done(self) -> dict[tuple[str, str], Any]:
        """Return the last result of each (uuid, solution) that has the present sources."""
        return {
            (r.uuid, r.solution): r
            for r in self.results().itertuples()
            if r.status != INVALID and r.hash == self.hashes.get(r.solution)
        }

    def store(self, results: Sequence[Trace]) -> list[Trace]:
        """Store results, and return them stamped. Raises OSError; earlier results stay."""
        stamped = []
        for trace in results:  # copies: flashinfer-bench's traces may share their parts
            evaluation = trace.evaluation
            assert trace.solution is not None and evaluation is not None
            machine = evaluation.environment
            libs = {**machine.libs, **self.libs, HASH: self.hashes[trace.solution]}
            if EMULATED in libs:
                libs[TIMING] = machine.libs[TIMING]
            updated = evaluation.model_copy(
                update={"environment": machine.model_copy(update={"libs": libs})}
            )
            stamped.append(trace.model_copy(update={"evaluation": updated}))
        rows.append_traces(self.traces, stamped)
        measured = {t.solution: self.hashes[str(t.solution)] for t in stamped}
        self.save_info(solutions={**self.info.get("solutions", {}), **measured})
        return stamped


def new_run(parent: Path, hardware: str) -> Run:
    """Make a run in a directory of its own, even if two programs start one at the same time."""
    name = f"{datetime.now():%Y%m%d-%H%M%S}-{slug(hardware)[:40]}"
    parent.mkdir(parents=True, exist_ok=True)
    directory, number = parent / name, 1
    while True:
        try:
            directory.mkdir()
            return Run(directory)
        except FileExistsError:
            number += 1
            directory = parent / f"{name}-{number}"


def resumed(directory: Path) -> Run:
    """Return a run that is to go on."""
    return Run(directory, environment.read_json(directory / "run.json", environment.RunInfo))


# --- a run ------------------------------------------------------------------------------------


def configuration(args: Namespace, on_gpu: bool) -> BenchmarkConfig:
    trials = args.trials or (TRIALS_OF_LARGE if args.definition.large else TRIALS)
    return BenchmarkConfig(
        warmup_runs=args.warmup,
        iterations=args.iterations if on_gpu else 1,
        num_trials=trials if on_gpu else 1,
        rtol=args.rtol,
        atol=args.atol,
        required_matched_ratio=args.matched_ratio,
        timeout_seconds=args.timeout,
        use_isolated_runner=args.isolated,
    )


def open_run(args: Namespace, plan: Plan, config: BenchmarkConfig, on_gpu: bool) -> Run:
    """Return a new run, or the one to resume, ready to take results."""
    timing = emulate.MODEL
    if on_gpu:
        timing = (
            f"flashinfer-bench {environment.versions()['flashinfer-bench']}, {HARNESS_CLOCK} of "
            f"{config.iterations} calls x {config.num_trials} trials, L2 cleared; repeated where "
            "the host slowed every solution"
        )
    tolerance = (
        f"rtol {config.rtol:g}, atol {config.atol:g}, "
        f"matched ratio {config.required_matched_ratio:g}"
    )
    facts: dict[str, Any] = dict(
        configuration={k: v for k, v in vars(config).items() if k != "log_dir"},
        timing=timing,
        dataset="." if is_this_data_set(args.local) else str(args.local.resolve()),
        seed=args.seed,
        emulate=None if on_gpu else args.emulate,
        hardware=plan.hardware,
        definition=args.definition.name,
    )
    captured = environment.capture()
    if args.resume:
        run = resumed(args.resume)
        run.go_on(captured, **facts)
    else:
        run = new_run(args.traces, plan.hardware)
    run.hashes = {s.name: s.hash() for s in plan.solutions}
    part = len(run.info.get("earlier", [])) + 1
    run.libs = {
        **environment.versions(),
        TIMING: timing,
        TOLERANCE: tolerance,
        RUN: f"{run.directory.name}, part {part}",
    }
    run.save_info(
        **facts,
        environment=captured,
        command=sys.argv[1:],
        peers={**run.info.get("peers", {}), **plan.peers},
        # Without a GPU, every peer would be listed as needing one.
        skipped={n: why for n, why in plan.skipped.items() if on_gpu or why != NEEDS_GPU},
        finished=False,
        errors=[],
    )
    return run


def measure(args: Namespace, plan: Plan, config: BenchmarkConfig, run: Run, on_gpu: bool) -> bool:
    """Measure the pairs that the run has no results of. Results are stored as they come, errors in
    run.json. Return True if Ctrl-C ended it. Raises OSError: the disk is full."""
    names = ", ".join(s.name for s in plan.solutions)
    say(f"{plan.hardware if on_gpu else f'CPU ({plan.hardware})'}: {names}")
    emulation = None
    if not on_gpu:
        reason = "as asked (--cpu)" if torch.cuda.is_available() else "no GPU is visible"
        model = "the solutions run as their reference model on the CPU; no GPU time is measured"
        say(f"{reason}: {model}")
    if not on_gpu and args.emulate != emulate.NONE:
        say("looks for the emulator; on a machine that has none it is compiled, in some 20 s")
        if why := emulate.why_not():
            say(f"no kernel is emulated: {why}")
        else:
            asked_for = args.workloads or args.max_tokens
            most = emulate.MOST_TOKENS_ASKED_FOR if asked_for else emulate.MOST_TOKENS
            say(
                f"up to T={most} also by the kernels for {args.emulate}, instruction by instruction"
            )
            emulation = emulate.Emulation(args.emulate, most)
    done = run.done()

    def lacks(trace: Trace, solution: Solution) -> bool:
        """True if the run has no result. A result of the torch model counts as none if the kernels
        are to be emulated now: then there was no compiler, or fewer workloads were emulated."""
        last = done.get((trace.workload.uuid, solution.name))
        awaits = emulation is not None and emulation.awaits(trace)
        return last is None or (awaits and last.passed and not last.emulated)

    pairs = [(t, [s for s in plan.solutions if lacks(t, s)]) for t in plan.workloads]
    pairs = [(trace, solutions) for trace, solutions in pairs if solutions]
    say(f"{len(pairs)} workloads to run, results in {run.directory}")

    interrupted, start = False, time.monotonic()
    try:
        if on_gpu:
            large = args.definition.large
            errors = run_on_gpu(plan.trace_set, pairs, config, run.store, large)
            run.save_info(finished=True, errors=errors)
            if not args.only_harness:
                add_measurements(run, args, plan.foreign)
                repeat_slow_workloads(run, plan, config, large)
        else:
            emulate.run(plan.trace_set, pairs, config, args.seed, run.store, emulation)
            run.save_info(finished=True)
    except KeyboardInterrupt:
        interrupted = True
        kept = len(run.results())
        say("interrupted" + f"; {kept} results are kept" * (kept > 0))
    ended = datetime.now(timezone.utc).isoformat(timespec="seconds")
    run.save_info(seconds=time.monotonic() - start, ended=ended, gpus_after=environment.gpus())
    return interrupted


def add_measurements(run: Run, args: Namespace, foreign: bool) -> None:
    """Measure roofline, accuracy, device times and bits, each in a process of its own. A process
    must not inherit a GPU context that a failed solution broke, nor the memory that the baselines
    hold here. Code of the data set's own solutions is run again only if the user asked for it."""
    options = ["--local", str(args.local), "--run", str(run.directory), "--seed", str(args.seed)]
    options += ["--definition", args.definition.name]
    for what in ("roofline", "times", "bits"):
        arguments = [what, *options, *["--run-foreign"] * (foreign and what != "roofline")]
        command = [sys.executable, "-m", "scripts.measure", *arguments]
        # The tables that these programs print are in the ranking and the report.
        if subprocess.run(command, stdout=subprocess.DEVNULL).returncode != 0:
            again = f"run.py measure {shlex.join(arguments)}"
            say(f"measure {what} failed; its figures are incomplete: {again}")


def repeat_slow_workloads(run: Run, plan: Plan, config: BenchmarkConfig, large: bool) -> None:
    """Run all solutions again on each workload that a slow host has lengthened. The last results
    count, faster or not."""
    for _ in range(MOST_REPEATS):
        slow = slow_workloads(run.results())
        pairs = [(t, plan.solutions) for t in plan.workloads if t.workload.uuid in slow]
        if not pairs:
            return
        say(f"the host was slow: {len(pairs)} workloads again")
        errors = run_on_gpu(plan.trace_set, pairs, config, run.store, large)
        run.save_info(errors=[*run.info["errors"], *errors])


def slow_workloads(results: pd.DataFrame) -> set[str]:
    """Return the uuids of the workloads on which every solution's time by the harness exceeds its
    device time by SLOW_HOST_MS more than it does on that solution's median workload."""
    last = results.drop_duplicates(["uuid", "solution"], keep="last")
    last = last[last.passed & last.device.notna()]
    host = (last.harness - last.device).astype(float)
    more = host - host.groupby(last.solution).transform("median")
    least = more.groupby(last.uuid).min()
    return {str(uuid) for uuid in least[least > SLOW_HOST_MS].index}


# --- on a GPU -------------------------------------------------------------------------------------


def run_on_gpu(
    trace_set: TraceSet,
    pairs: Sequence[tuple[Trace, list[Solution]]],
    config: BenchmarkConfig,
    store: Callable[[list[Trace]], object],
    large: bool = False,
) -> list[str]:
    """Run flashinfer-bench's Benchmark one workload at a time on one set of worker processes, so
    that results are stored after every workload. Return the errors.

    With `large` every workload has new worker processes: a worker holds its last inputs as long as
    it lives, and this process cannot free them.

    The first Ctrl-C or SIGTERM lets the current workload finish: flashinfer-bench would evaluate
    its remaining solutions anyway and then drop all results. The second one ends the process.
    """
    interrupted: list[int] = []

    def interrupt(number: int, _: object) -> None:
        if interrupted:
            for child in multiprocessing.active_children():
                child.terminate()
            say("stopped; `run.py report --text` shows what was kept")
            os._exit(exit_status(number))
        interrupted.append(number)
        say("finishing this workload; Ctrl-C again stops at once")

    errors = []
    announced = steps(
        pairs,
        lambda pair: f"{named(pair[0].workload)}: {len(pair[1])} solutions",
        lambda pair: 1 + tokens(pair[0].workload) / 4000,  # the reference's fixed cost, then tokens
    )
    one = TraceSet(root=trace_set.root, definitions=trace_set.definitions)
    for size in [1] * len(pairs) if large else [len(pairs)]:
        # Ctrl-C reaches every process of the terminal: the workers must ignore it. They must not
        # ignore SIGTERM, or flashinfer-bench could not end them.
        with on_signals(signal.SIG_IGN, signal.SIGINT):
            benchmark = Benchmark(one, config)
        try:
            for trace, solutions in itertools.islice(announced, size):
                one.workloads = {trace.definition: [trace]}
                one.solutions = {trace.definition: solutions}
                with on_signals(interrupt, *ENDING):
                    results, why = evaluate(benchmark, one, trace)
                if interrupted:  # the signal may be why a solution failed; --resume tries it again
                    results = [t for t in results if t.is_successful()]
                store(results)
                for result in results:
                    evaluation = result.evaluation
                    assert evaluation is not None
                    if figures := evaluation.performance:
                        text = f" {figures.speedup_factor:.2f}x {figures.latency_ms:.4f} ms"
                    else:
                        text = f": {failure_reason(evaluation)}"
                    note(f"{result.solution}: {evaluation.status.value}{text}")
                if interrupted:
                    signal.raise_signal(interrupted[0])  # now with the program's usual handler
                if missing := sorted({s.name for s in solutions} - {t.solution for t in results}):
                    errors.append(f"{named(trace.workload)}: {', '.join(missing)}: {why}")
                    note(errors[-1])
        finally:
            benchmark.close()
            if torch.cuda.is_initialized():  # frees memory shared with the workers
                torch.cuda.ipc_collect()
                torch.cuda.empty_cache()
    return errors


def lost(results: Sequence[Trace]) -> set[str]:
    """Return the solutions that failed because another one ended the worker process."""
    return {t.solution for t in results if t.solution and t.evaluation and LOST in t.evaluation.log}


def evaluate(benchmark: Benchmark, one: TraceSet, trace: Trace) -> tuple[list[Trace], str]:
    """Return the results of a workload, and the reason why some solutions have none. Solutions that
    are `lost` run again."""
    logger = logging.getLogger("flashinfer_bench")
    handler = logging.handlers.BufferingHandler(sys.maxsize)
    handler.setLevel(logging.ERROR)
    logger.addHandler(handler)
    logger.propagate = False
    try:
        # Fail here: flashinfer-bench gives up the GPU after three unreadable workloads.
        load_tensors(one, trace.workload)
        definition, solutions = trace.definition, one.solutions[trace.definition]
        results = benchmark.run_all(dump_traces=False).traces.get(definition, [])
        while 0 < len(names := lost(results)) < len(solutions):
            solutions = [s for s in solutions if s.name in names]
            one.solutions = {definition: solutions}
            results = [t for t in results if t.solution not in names]
            results += benchmark.run_all(dump_traces=False).traces.get(definition, [])
        logged = [line.getMessage() for line in handler.buffer]
        return results, logged[-1] if logged else "no result"
    except UsageError as error:
        return [], str(error)
    except SystemExit as error:  # the reference runs in this process
        return [], f"the reference of {trace.definition} calls sys.exit({error.code})"
    finally:
        logger.removeHandler(handler)
        logger.propagate = True


@contextlib.contextmanager
def on_signals(handler: Any, *signals: signal.Signals) -> Iterator[None]:
    """Install `handler` for signals that are not ignored. Child processes inherit ignored
    signals."""
    before = {each: old for each in signals if (old := signal.getsignal(each)) != signal.SIG_IGN}
    for each in before:
        signal.signal(each, handler)
    try:
        yield
    finally:
        for each, old in before.items():
            signal.signal(each, old)
