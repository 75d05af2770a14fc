"""What a run of bench measures: its options, and the solutions and workloads that they choose."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.common.command_line import (
    UsageError,
    parser,
    positive,
    say,
    share,
    whole,
)
from scripts.common.definitions import DEFAULT, find
from scripts.common.project import ROOT, TRACES_DIR
from scripts.common.text import text_table
from scripts.data.dataset import (
    make_missing_workloads,
    say_whose_reference,
    select_solutions,
    select_workloads,
    tokens,
)
from scripts.data.records import CLOCKS
from scripts.measure.cpu_bench import max_size
from scripts.pack.availability import (
    NEEDS_GPU,
    is_peer,
    other_versions,
    own_hashes,
    say_skipped,
    split_available,
    split_foreign,
    this_machine,
)
from scripts.pack.packed import load_with_ours

if TYPE_CHECKING:
    from flashinfer_bench.bench import BenchmarkConfig
    from flashinfer_bench.data import Solution, Trace, TraceSet

GPU_ITERATIONS, CPU_ITERATIONS = 50, 1
TRIALS, TRIALS_OF_LARGE = 3, 1
# What the contest of MLSys 2026 runs flashinfer-bench with (the starter kit's EVALUATION.md).
CONTEST = dict(rtol=0.3, atol=1.0, matched_ratio=0.9, isolated=True, timeout=300)


class Contest(argparse.Action):
    """Sets the options above as if they had been given here: one that comes later wins."""

    def __init__(self, **options: Any):
        super().__init__(nargs=0, **options)

    def __call__(self, parser: Any, namespace: argparse.Namespace, *_: Any) -> None:
        vars(namespace).update(CONTEST)


def parse_arguments(doc: str | None = None) -> argparse.Namespace:
    arguments = parser(doc)
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
    add(
        "--definition",
        type=find,
        default=DEFAULT,
        metavar="NAME",
        help="another definition, by its name or the one in its solutions' names (docs/dataset.md)",
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
    add("--iterations", type=whole(1), help="timed calls a trial (50; on the CPU 1)")
    add("--warmup", type=whole(0), default=10, help="calls before the timed ones (10)")
    add(
        "--trials",
        type=whole(1),
        help="trials, each with new random inputs (3; of a definition that is large 1)",
    )
    add("--rtol", type=positive, default=0.2, help="relative tolerance (0.2)")
    add("--atol", type=positive, default=0.1, help="absolute tolerance (0.1)")
    add("--matched-ratio", type=share, default=0.85, help="share of values within tolerance (0.85)")
    add("--timeout", type=whole(1), default=300, help="seconds for a solution on a workload (300)")
    add("--isolated", action="store_true", help="a new process for each solution and workload")
    add(
        "--contest",
        action=Contest,
        default=argparse.SUPPRESS,
        help="the contest's settings: --rtol 0.3 --atol 1 --matched-ratio 0.9 --isolated "
        "--timeout 300",
    )
    add("--cpu", action="store_true", help="run the torch model on the CPU though a GPU is there")
    add("--seed", type=whole(0), default=2026, help="of the CPU's inputs and of the later passes")
    add("--no-accuracy", action="store_true", help="skip the pass that adds the accuracy columns")
    add("--no-device-time", action="store_true", help="skip the pass that adds the device's times")
    add("--no-invariance", action="store_true", help="skip the pass that compares bits")
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
    trace_set, packed = load_with_ours(args.local, args.definition)
    own = own_hashes(packed)
    every = trace_set.solutions[args.definition.name]
    workloads = trace_set.workloads[args.definition.name]

    def runnable(chosen: "Sequence[Solution]") -> "tuple[list[Solution], dict[str, str]]":
        """What may and can run, and for the rest the reason."""
        may, foreign = split_foreign(chosen, packed, args.solutions, args.run_foreign)
        can, skipped = split_available(may, machine, own)
        return can, {**foreign, **skipped}

    if args.list:
        print(listing(every, runnable(every)[1], workloads))
        return None
    if not on_gpu and not args.workloads and args.max_tokens is None:
        args.max_tokens = max_size(args.definition)
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
