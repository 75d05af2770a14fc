"""Check the solutions against the reference and rank them by speed-up.

Packs the solutions, makes the workloads' tensors, runs flashinfer-bench's own Benchmark on the GPUs
of this machine and prints the ranking. Every run keeps its traces, in flashinfer-bench's format, in
a directory of its own under traces/, with run.json beside them: environment, settings, hashes of
the solutions; every trace says itself of which source and settings it is. Ctrl-C keeps and ranks
what was measured; --resume goes on, on the same machine with the same settings. A solution that
cannot run here (another GPU, a package that is not installed) is left out, and the ranking says
why.

Without a GPU the same packed solutions run as their torch model on the CPU, on the small workloads:
their outputs are checked, and beside that stand the recorded rankings of GPUs (results/), with
whether the sources have changed since. The times of the model are kept in the traces alone.
"""

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.common import environment, files
from scripts.common.command_line import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_USAGE,
    UsageError,
    os_error,
    run_main,
    say,
)
from scripts.common.definitions import DEFAULT, MoeDefinition
from scripts.common.progress import Progress, duration
from scripts.data.dataset import (
    ours,
    tokens,
)
from scripts.data.records import TIMING, TOLERANCE, Clock
from scripts.data.traces import read_records
from scripts.measure.gpu_bench import record_of, run_on_gpu, weight
from scripts.measure.plan import Plan, configuration, make_plan, parse_arguments
from scripts.measure.runs import NotKept, Run, find_run, new_run, settings_hash
from scripts.pack.pack import PackError
from scripts.table.rank_text import print_rankings
from scripts.table.rankings import Ranking, rankings

if TYPE_CHECKING:
    from flashinfer_bench.bench import BenchmarkConfig
    from flashinfer_bench.data import Trace


@dataclass
class Outcome:
    """How measuring went: `status` where it did not get to its end."""

    status: int = EXIT_OK
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0


def open_run(args: argparse.Namespace, plan: Plan, config: "BenchmarkConfig") -> Run:
    """A new run, or the one to resume, ready to take results."""
    from scripts.measure import cpu_bench

    timing = cpu_bench.TIMING
    if plan.on_gpu:
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
        skipped=plan.skipped,
        finished=False,
    )
    return run


def measure(args: argparse.Namespace, plan: Plan, config: "BenchmarkConfig", run: Run) -> Outcome:
    """Measure what the run has no results of; every workload's results are kept at once."""
    import torch

    from scripts.measure import cpu_bench

    done = run.done()
    pairs = [
        (t, left)
        for t in plan.workloads
        if (left := [s for s in plan.solutions if (t.workload.uuid, s.name) not in done])
    ]
    names = ", ".join(s.name for s in plan.solutions)
    say(f"{plan.hardware if plan.on_gpu else f'CPU ({plan.hardware})'}: {names}")
    say(f"{len(pairs)} workloads to run, results in {run.directory}")
    if not plan.on_gpu:
        reason = "as asked (--cpu)" if torch.cuda.is_available() else "no GPU is visible"
        say(f"{reason}: the solutions run as their torch model on the CPU; no GPU time is measured")

    def store(results: "list[Trace]") -> None:
        stamped = run.store(results)
        if args.store_in_dataset and not ours(args.local):
            plan.trace_set.add_traces(stamped)

    progress = Progress(len(pairs), sum(weight(tokens(t.workload)) for t, _ in pairs))
    outcome = Outcome()
    try:
        if plan.on_gpu:
            outcome.errors = run_on_gpu(
                plan.trace_set, pairs, config, store, progress, args.definition.large
            )
        else:
            cpu_bench.run(plan.trace_set, pairs, config, args.seed, store, progress)
        run.save_info(finished=True, errors=outcome.errors)
        if plan.on_gpu:
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


def main() -> int:
    args = parse_arguments(__doc__)
    # The reference allocates 5.6 GB anew for every call; in huge pages that takes half the time.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    try:
        plan = make_plan(args)
    except PackError as error:
        say(f"error: {error}")
        return EXIT_FAILED
    if plan is None:
        return EXIT_OK
    config = configuration(args, plan.on_gpu)
    with open_run(args, plan, config) as run:
        outcome = measure(args, plan, config, run)
        return conclude(args, run, outcome)


def conclude(args: argparse.Namespace, run: Run, outcome: Outcome) -> int:
    """Rank what was measured, kept or not; the exit status."""
    records = read_records([run.traces], args.definition.name) if run.traces.is_file() else []
    records += [record_of(t, str(run.traces)) for t in run.unsaved]
    if not records:
        say("nothing was measured")
    by: Clock = args.by if any(r.device for r in records) else "harness"
    ranked = rankings(records, against=args.against, peers=args.peers, by=by)
    on_cpu = all(r.cpu for r in ranked)
    if ranked:
        name = args.definition.name
        print("\n" + (what_is_known(ranked, name) if on_cpu else print_rankings(ranked)))
    for error in outcome.errors:
        say(f"error: {error}")
    failed = not ranked or outcome.errors or any(r.failures() for r in ranked)
    status = outcome.status or (EXIT_FAILED if failed else EXIT_OK)
    if not ranked:
        return status
    for path, style in ((args.markdown, "markdown"), (args.json, "json")):
        if path:
            files.write(path, print_rankings(ranked, style) + "\n")
    say(f"\n{duration(outcome.seconds)}; traces: {run.traces}")
    if not args.no_report and not run.unsaved:
        write_report(run, args.peers)
    return status


def what_is_known(ranked: Sequence[Ranking], definition: str = DEFAULT.name) -> str:
    """Of a run on the CPU: its outputs, and the recorded rankings of GPUs instead of its times."""
    from scripts.table.rank_text import without_gpu
    from scripts.table.recorded import recorded_runs

    return without_gpu(ranked, recorded_runs(definition=definition))


def add_measurements(run: Run, args: argparse.Namespace, foreign: bool) -> None:
    """The floors, the accuracy, the device times and the bits, in processes of their own: they must
    not inherit a GPU context that a failed solution left broken, nor the memory that the baselines
    hold here. Code of the data set's own solutions is run again where it was asked for. The floors
    are the first definition's, and the bits those of a layer's tokens."""
    local = ["--local", str(args.local)]
    again = [*local, "--run", str(run.directory), "--seed", str(args.seed)]
    again += ["--run-foreign"] if foreign else []
    passes = {}
    if args.definition is DEFAULT:
        passes["floors"] = [*local, "--json", str(run.directory / "floors.json")]
    else:
        again += ["--definition", args.definition.name]
    if not args.no_accuracy:
        passes["accuracy"] = again
    if not args.no_device_time:
        passes["device_time"] = again
    if not args.no_invariance and isinstance(args.definition, MoeDefinition):
        passes["invariance"] = again
    for name, arguments in passes.items():
        script = Path(__file__).with_name(f"{name}.py")
        # Their tables are in the ranking and the report.
        out = subprocess.DEVNULL if name in ("floors", "invariance") else None
        result = subprocess.run([sys.executable, str(script), *arguments], stdout=out)
        if result.returncode != 0:
            said = f"{script.name} failed; its figures are incomplete"
            if name == "device_time":
                said += f": run.py {name} {shlex.join([*arguments, '--missing'])}"
            say(said)


def write_report(run: Run, peers: list[str]) -> None:
    """The HTML page of the run, or one line that says why there is none."""
    from scripts.report import report

    try:
        say(f"report: {report.write(run.directory, peers=peers)}")
    except UsageError as error:
        say(str(error))
    except OSError as error:
        say(f"no report: {os_error(error)}")


if __name__ == "__main__":
    run_main(main)
