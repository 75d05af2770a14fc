"""Rank solutions by the traces of benchmark runs, ours or anyone's.

Reads flashinfer-bench trace files (JSON lines) or directories of them. There is one ranking a
machine, timing method and tolerance: what differs in these is never ranked against each other;
where there are several rankings, a last table puts their figures side by side. Of a solution that
was measured with several sources the last one counts, and of a pair of solution and workload that
was measured several times the latest result; what is left out for that is said.

What run.json beside the traces says is used too: who wrote a solution (ours or a peer), and which
solutions could not run there and why.
"""

import sys
from pathlib import Path

from scripts.common import files
from scripts.common.command_line import EXIT_FAILED, EXIT_OK, UsageError, names, parser, run_main
from scripts.common.definitions import full_name
from scripts.common.project import DEFINITION, RESULTS_DIR, TRACES_DIR
from scripts.table.rank_text import print_rankings
from scripts.table.ranking import CLOCKS
from scripts.table.rankings import rankings
from scripts.table.traces import read_records


def own_runs() -> list[Path]:
    """Where bench keeps its runs. Raises UsageError where there are none, naming a record."""
    if not any(TRACES_DIR.rglob("*.jsonl")):
        records = sorted(RESULTS_DIR.glob("*/*"), key=lambda path: (path.name, path))
        raise UsageError(
            f"no run in {TRACES_DIR}: run.py bench makes one; what is recorded is ranked by "
            f"run.py rank {(records or [RESULTS_DIR])[-1]}"
        )
    return [TRACES_DIR]


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument(
        "paths",
        nargs="*",
        type=Path,
        help="trace files, directories of them, or data sets; the runs of bench",
    )
    arguments.add_argument(
        "--solutions",
        action="extend",
        type=names,
        default=[],
        metavar="NAME,...",
        help="names, * allowed; all",
    )
    arguments.add_argument("--hardware", metavar="TEXT", help="only machines whose name has TEXT")
    arguments.add_argument("--against", metavar="NAME", help="add the speed relative to a solution")
    arguments.add_argument(
        "--peers",
        action="extend",
        type=names,
        default=[],
        metavar="NAME,...",
        help="names that count as peers, * allowed; all that are not this project's",
    )
    arguments.add_argument(
        "--by",
        choices=CLOCKS,
        default="harness",
        help="order by the speed-up of the harness's times (default) or by the device's times",
    )
    arguments.add_argument(
        "--definition",
        type=full_name,
        default=DEFINITION,
        metavar="NAME",
        help="definition to rank, whether it is one of ours or not",
    )
    style = arguments.add_mutually_exclusive_group()
    style.add_argument("--markdown", action="store_true", help="print Markdown")
    style.add_argument("--json", action="store_true", help="print JSON")
    arguments.add_argument("--output", type=Path, metavar="FILE", help="write there instead")
    args = arguments.parse_args()

    paths = args.paths or own_runs()
    records = read_records(paths, args.definition)
    ranked = rankings(records, args.solutions, args.hardware, args.against, args.peers, by=args.by)
    if not ranked:
        raise UsageError(f"no results in {', '.join(map(str, paths))}")
    name = "json" if args.json else "markdown" if args.markdown else "text"
    text = print_rankings(ranked, name)
    if args.output:
        files.write(args.output, text + "\n")
    else:
        print(text)
    if len(ranked) > 1:
        said = "machines, timing methods or tolerances, one table each"
        print(f"{len(ranked)} {said}", file=sys.stderr)
    return EXIT_FAILED if any(r.failures() for r in ranked) else EXIT_OK


if __name__ == "__main__":
    run_main(main)
