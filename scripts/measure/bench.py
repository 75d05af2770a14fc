"""A run of flashinfer-bench's benchmark, and the measurements that follow it on a GPU."""

import shlex
import subprocess
import sys
from argparse import Namespace
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import torch
from flashinfer_bench.bench import BenchmarkConfig
from flashinfer_bench.data import Trace

from scripts.common import environment
from scripts.common.command_line import EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, os_error, say
from scripts.common.definitions import DEFAULT, MoeDefinition
from scripts.common.progress import Progress
from scripts.common.project import ROOT
from scripts.data.dataset import ours, tokens
from scripts.data.records import TIMING, TOLERANCE
from scripts.measure import cpu_bench
from scripts.measure.gpu_bench import run_on_gpu, weight
from scripts.measure.plan import Plan
from scripts.measure.runs import NotKept, Run, find_run, new_run, settings_hash
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
