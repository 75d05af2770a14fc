"""Check the solutions against the reference and rank them by speed-up.

Packs the solutions, makes the workloads' tensors, runs flashinfer-bench's own Benchmark on the GPUs
of this machine and prints the ranking. Every run keeps its traces, in flashinfer-bench's format, in
a directory of its own under traces/, with run.json beside them: environment, settings, hashes of
the solutions; every trace says itself of which source and settings it is. Ctrl-C keeps and ranks
what was measured; --resume goes on, on the same machine with the same settings. A solution that
cannot run here (another GPU, a package that is not installed) is left out, and the ranking says
why.

Without a GPU the same packed solutions run as their torch model on the CPU, on the small workloads:
outputs are checked, the times are CPU times and no GPU figure is reported.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.benchmark.gpu_bench import record_of, run_on_gpu, weight
from scripts.benchmark.runs import NotKept, Run, find_run, new_run, settings_hash
from scripts.common import environment, files
from scripts.common.command_line import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_USAGE,
    UsageError,
    os_error,
    parser,
    positive,
    run_main,
    say,
    share,
    whole,
)
from scripts.common.progress import Progress, duration
from scripts.common.project import DEFINITION, ROOT, TRACES_DIR
from scripts.common.text import text_table
from scripts.ranking.rank_tables import print_rankings
from scripts.ranking.ranking import CLOCKS, Clock, rankings
from scripts.ranking.traces import TIMING, TOLERANCE, read_records
from scripts.solutions.availability import (
    NEEDS_GPU,
    is_peer,
    other_versions,
    own_hashes,
    say_skipped,
    split_available,
    split_foreign,
    this_machine,
)
from scripts.solutions.pack import PackError
from scripts.workloads.dataset import (
    load_with_ours,
    make_missing_workloads,
    ours,
    say_whose_reference,
    select_solutions,
    select_workloads,
    tokens,
)

if TYPE_CHECKING:
    from flashinfer_bench.bench import BenchmarkConfig
    from flashinfer_bench.data import Solution, Trace, TraceSet

CPU_MAX_TOKENS = 16
GPU_ITERATIONS, CPU_ITERATIONS = 50, 3


@dataclass
class Outcome:
    """How measuring went: `status` where it did not get to its end."""

    status: int = EXIT_OK
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0


def parse_arguments() -> argparse.Namespace:
    arguments = parser(__doc__)
    add = arguments.add_argument
    add(
        "--local",
        type=Path,
        default=ROOT,
        metavar="PATH",
        help="another data set: its workloads, with our solutions; the reference of its definition "
        "is run; nothing is written to it",
    )
    add(
        "--solutions",
        nargs="+",
        default=[],
        metavar="NAME",
        help="names, * allowed; all of ours. One that is the data set's own runs where its whole "
        "name is given",
    )
    add("--run-foreign", action="store_true", help="run all solutions of the data set, too")
    add(
        "--workloads",
        nargs="+",
        default=[],
        metavar="T|UUID",
        help="token counts or beginnings of uuids; all (on the CPU: the small ones)",
    )
    add("--max-tokens", type=whole(1), metavar="T", help="only workloads up to T tokens")
    add("--list", action="store_true", help="list solutions and workloads and stop")
    add("--iterations", type=whole(1), help="timed calls a trial (50; on the CPU at most 3)")
    add("--warmup", type=whole(0), default=10, help="calls before the timed ones (10)")
    add("--trials", type=whole(1), default=3, help="trials, each with new random inputs (3)")
    add("--rtol", type=positive, default=0.2, help="relative tolerance (0.2)")
    add("--atol", type=positive, default=0.1, help="absolute tolerance (0.1)")
    add("--matched-ratio", type=share, default=0.85, help="share of values within tolerance (0.85)")
    add("--timeout", type=whole(1), default=300, help="seconds for a solution on a workload (300)")
    add("--isolated", action="store_true", help="a new process for each solution and workload")
    add("--cpu", action="store_true", help="run the torch model on the CPU though a GPU is there")
    add("--seed", type=whole(0), default=2026, help="of the CPU's inputs and of the later passes")
    add("--no-accuracy", action="store_true", help="skip the pass that adds the accuracy columns")
    add("--no-device-time", action="store_true", help="skip the pass that adds the device's times")
    add("--traces", type=Path, default=TRACES_DIR, metavar="DIR", help="where runs are kept")
    add(
        "--store-in-dataset",
        action="store_true",
        help="also append the traces to the data set's own, as flashinfer-bench run does",
    )
    add(
        "--resume",
        nargs="?",
        type=Path,
        const=True,
        metavar="RUN",
        help="go on with this run's directory, or with the latest run",
    )
    add("--against", metavar="NAME", help="add the speed relative to a solution to the ranking")
    add("--peers", nargs="+", default=[], metavar="PATTERN", help="names that count as peers")
    add("--by", choices=CLOCKS, default="harness", help="clock by which the ranking is ordered")
    add("--no-report", action="store_true", help="do not write the HTML report of the run")
    add("--markdown", type=Path, metavar="FILE", help="also write the ranking as Markdown")
    add("--json", type=Path, metavar="FILE", help="also write the ranking as JSON")
    return arguments.parse_args()


@dataclass(frozen=True)
class Plan:
    """What is to be measured, and what is not and why."""

    on_gpu: bool
    hardware: str
    trace_set: "TraceSet"
    solutions: "list[Solution]"
    workloads: "list[Trace]"
    skipped: dict[str, str]
    peers: dict[str, bool]
    foreign: bool
    """Whether code of the data set's own solutions is run."""


def listing(
    every: "Sequence[Solution]", reasons: dict[str, str], workloads: "Sequence[Trace]"
) -> str:
    listed = [[s.name, s.author, reasons.get(s.name, "yes")] for s in every]
    rows = [[str(tokens(t.workload)), t.workload.uuid] for t in workloads]
    return (
        text_table(["solution", "author", "runs here"], listed, left=3)
        + "\n\n"
        + text_table(["T", "workload"], rows, left=0)
    )


def make_plan(args: argparse.Namespace) -> Plan | None:
    """What the arguments choose; None where they only ask for the list, which is printed."""
    import torch
    from flashinfer_bench.utils import hardware_from_device

    on_gpu = torch.cuda.is_available() and not args.cpu
    machine = this_machine(on_gpu)
    trace_set, packed = load_with_ours(args.local)
    own = own_hashes(packed)
    every = trace_set.solutions[DEFINITION]
    workloads = trace_set.workloads[DEFINITION]

    def runnable(chosen: "Sequence[Solution]") -> "tuple[list[Solution], dict[str, str]]":
        """What may and can run, and for the rest the reason."""
        may, foreign = split_foreign(chosen, packed, args.solutions, args.run_foreign)
        can, skipped = split_available(may, machine, own)
        return can, {**foreign, **skipped}

    if args.list:
        print(listing(every, runnable(every)[1], workloads))
        return None
    if not on_gpu and not args.workloads and args.max_tokens is None:
        args.max_tokens = CPU_MAX_TOKENS
    say_whose_reference(args.local)
    solutions, skipped = runnable(select_solutions(every, args.solutions))
    chosen = select_workloads(workloads, args.workloads, args.max_tokens)
    for remark in other_versions(solutions, machine):
        say(remark)
    if not solutions:
        raise UsageError("no solution can run here:\n  " + say_skipped(skipped, "\n  "))
    make_missing_workloads(args.local, chosen)
    if skipped:
        say(f"left out: {say_skipped(skipped)}")
    left = [f"T={tokens(t.workload)}" for t in workloads if t not in chosen]
    if left:
        say(f"not run: {len(left)} workloads ({', '.join(left)})")
    ours = {s.hash() for s in packed}
    return Plan(
        on_gpu=on_gpu,
        hardware=hardware_from_device("cuda:0" if on_gpu else "cpu"),
        trace_set=trace_set,
        solutions=solutions,
        workloads=chosen,
        # Without a GPU that the others need one is no news of each.
        skipped={n: why for n, why in skipped.items() if on_gpu or why != NEEDS_GPU},
        peers={s.name: is_peer(s, own) for s in every},
        foreign=any(s.hash() not in ours for s in solutions),
    )


def configuration(args: argparse.Namespace, on_gpu: bool) -> "BenchmarkConfig":
    from flashinfer_bench.bench import BenchmarkConfig

    return BenchmarkConfig(
        warmup_runs=args.warmup,
        iterations=args.iterations or (GPU_ITERATIONS if on_gpu else CPU_ITERATIONS),
        num_trials=args.trials if on_gpu else 1,
        rtol=args.rtol,
        atol=args.atol,
        required_matched_ratio=args.matched_ratio,
        timeout_seconds=args.timeout,
        use_isolated_runner=args.isolated,
    )


def open_run(args: argparse.Namespace, plan: Plan, config: "BenchmarkConfig") -> Run:
    """A new run, or the one to resume, ready to take results."""
    from scripts.benchmark import cpu_bench

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
        run.check_same(**place, **settings)
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
        definition=DEFINITION,
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

    from scripts.benchmark import cpu_bench

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
            outcome.errors = run_on_gpu(plan.trace_set, pairs, config, store, progress)
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
    args = parse_arguments()
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
    records = read_records([run.traces]) if run.traces.is_file() else []
    records += [record_of(t, str(run.traces)) for t in run.unsaved]
    if not records:
        say("nothing was measured")
    by: Clock = args.by if any(r.device for r in records) else "harness"
    ranked = rankings(records, against=args.against, peers=args.peers, by=by)
    if ranked:
        print("\n" + print_rankings(ranked))
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


def add_measurements(run: Run, args: argparse.Namespace, foreign: bool) -> None:
    """The floors, the accuracy and the device times, in processes of their own: they must not
    inherit a GPU context that a failed solution left broken, nor the memory that the baselines hold
    here. Code of the data set's own solutions is run again where it was asked for."""
    local = ["--local", str(args.local)]
    again = [*local, "--run", str(run.directory), "--seed", str(args.seed)]
    again += ["--run-foreign"] if foreign else []
    passes = {"floors": [*local, "--json", str(run.directory / "floors.json")]}
    if not args.no_accuracy:
        passes["accuracy"] = again
    if not args.no_device_time:
        passes["device_time"] = again
    for name, arguments in passes.items():
        script = Path(__file__).with_name(f"{name}.py")
        out = subprocess.DEVNULL if name == "floors" else None
        result = subprocess.run([sys.executable, str(script), *arguments], stdout=out)
        if result.returncode != 0:
            say(f"{script.name} failed; its figures are incomplete")


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
