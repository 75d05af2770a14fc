"""Check the solutions against the reference and rank them by speed-up.

Packs the solutions, makes the workloads' tensors, runs flashinfer-bench's own Benchmark on the GPUs
of this machine and prints the ranking. Every run has its traces in a directory of its own under
runs/, with environment, settings and hashes of the solutions in run.json. Ctrl-C stores and ranks
the results so far. --resume goes on, on the same machine with the same settings. Solutions that
cannot run here are left out, and the ranking says why.

Without a GPU the solutions run on the small workloads: as their reference model, and on the
smallest by the kernels for a Hopper GPU, in the emulator of PTX. Their outputs are checked, and the
recorded rankings of GPUs (results/) are shown. No time is reported.
"""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.common import options
from scripts.common.program import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    RUNS_DIR,
    UsageError,
    duration,
    input_path,
    output_path,
    parser,
    positive,
    run_main,
    say,
    share,
    whole,
)

if TYPE_CHECKING:
    from scripts.measuring.harness import Run


# Settings of the MLSys 2026 contest's flashinfer-bench (the starter kit's EVALUATION.md).
CONTEST = dict(rtol=0.3, atol=1.0, matched_ratio=0.9, isolated=True, timeout=300)


def parse_arguments() -> argparse.Namespace:
    arguments = parser(__doc__)
    add = arguments.add_argument
    for add_shared in (
        options.local, options.solutions, options.workloads, options.definition,
        options.max_tokens, options.seed, options.cpu,
    ):  # fmt: skip
        add_shared(arguments)
    add("--against", metavar="NAME", help="add the speed relative to a solution")
    text = "without a GPU, or with --cpu, emulate the kernels for this target"
    add("--emulate", choices=("sm_90a", "sm_100a", "none"), default="sm_90a", help=text)
    add("--iterations", type=whole(1), default=50, help="timed calls a trial, on a GPU")
    add("--warmup", type=whole(0), default=10, help="calls before the timed ones")
    text = "each with new random inputs (default: 3, of large definitions 1)"
    add("--trials", type=whole(1), help=text)
    add("--rtol", type=positive, default=0.2, help="relative tolerance")
    add("--atol", type=positive, default=0.1, help="absolute tolerance")
    add("--matched-ratio", type=share, default=0.85, help="share of values within tolerance")
    add("--timeout", type=whole(1), default=300, help="seconds for a solution on a workload")
    add("--isolated", action="store_true", help="a new process for each solution and workload")
    text = "as --rtol 0.3 --atol 1 --matched-ratio 0.9 --isolated --timeout 300"
    add("--contest", action="store_true", help=f"{text}, but for what is given")
    text = "without the passes for roofline, accuracy, device times and bits (run.py measure)"
    add("--only-harness", action="store_true", help=text)
    add("--traces", type=output_path, default=RUNS_DIR, metavar="DIR", help="where runs are kept")
    text = "go on with this run's directory (default: with the latest run)"
    add("--resume", nargs="?", type=input_path, const=True, metavar="RUN", help=text)
    add("--no-report", action="store_true", help="do not write the HTML report of the run")
    if arguments.parse_args().contest:
        arguments.set_defaults(**CONTEST)
    return arguments.parse_args()


def run_to_resume(parent: Path, wanted: Path | None) -> Path:
    """Return the directory of a run: the wanted one, or the latest. Raises UsageError."""
    runs = [wanted] if wanted else sorted(info.parent for info in parent.glob("*/run.json"))
    if not runs or not (runs[-1] / "run.json").is_file():
        raise UsageError(f"no run to resume in {wanted or parent}")
    return runs[-1]


def main() -> int:
    args = parse_arguments()
    if args.resume:
        args.resume = run_to_resume(args.traces, None if args.resume is True else args.resume)
    # The reference allocates 5.6 GB anew for every call; in huge pages that takes half the time.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

    import torch

    from scripts.measuring import cases, harness

    on_gpu = torch.cuda.is_available() and not args.cpu
    if args.against and args.solutions:
        args.solutions = list(dict.fromkeys([*args.solutions, args.against]))
    chosen = cases.choose(
        args.local,
        on_gpu,
        solutions=args.solutions,
        workloads=args.workloads,
        max_tokens=args.max_tokens,
        run_foreign=args.run_foreign,
        definition=args.definition,
    )
    if args.against:
        options.one_name((s.name for s in chosen.solutions), args.against, "--against")
    every = chosen.trace_set.workloads[args.definition.name]
    left = [f"T={cases.tokens(t.workload)}" for t in every if t not in chosen.workloads]
    if left and not (args.workloads or args.max_tokens):  # else the user left them out
        say(f"not run: {len(left)} workloads ({', '.join(left)})")
    config = harness.configuration(args, on_gpu)
    with harness.open_run(args, chosen, config, on_gpu) as run:
        interrupted = harness.measure(args, chosen, config, run, on_gpu)
        status = conclude(args, run)
    return EXIT_INTERRUPTED if interrupted else status


def conclude(args: argparse.Namespace, run: "Run") -> int:
    """Rank the results and write the report. Return the exit status."""
    from scripts.publishing import pages
    from scripts.publishing.pages import print_rankings, without_gpu
    from scripts.publishing.rankings import rankings, recorded_runs

    errors, ranked = run.info["errors"], rankings(run.results(), against=args.against)
    for error in errors:
        say(f"error: {error}")
    if not ranked:
        say("nothing was measured")
        return EXIT_FAILED
    on_cpu = all(r.cpu for r in ranked)
    recorded = recorded_runs(definition=args.definition.name) if on_cpu else []
    print("\n" + (without_gpu(ranked, recorded) if on_cpu else print_rankings(ranked)))
    say(f"\n{duration(run.info['seconds'])}; traces: {run.traces}")
    if not args.no_report:
        try:
            say(f"report: {pages.write(run.directory)}")
        except UsageError as error:  # packages for the report are missing
            say(str(error))
    return EXIT_FAILED if errors or any(r.failed for r in ranked) else EXIT_OK


if __name__ == "__main__":
    run_main(main)
