"""Rank solutions by the traces of benchmark runs, ours or anyone's.

Reads flashinfer-bench trace files (JSON lines) or directories of them. There is one ranking for
each machine, timing method and tolerance. If a solution was measured with several sources, the last
one counts. If a pair of solution and workload was measured several times, the latest result counts.
A remark says what is left out.

run.json beside the traces is used too: it says which solutions are ours and which a peer's, and
which could not run there and why.
"""

from pathlib import Path

from scripts.common import files
from scripts.common.command_line import EXIT_FAILED, EXIT_OK, UsageError, parser, run_main
from scripts.common.definitions import full_name
from scripts.common.project import DEFINITION, RESULTS_DIR, TRACES_DIR
from scripts.programs.options import add_options


def main(argv: list[str] | None = None) -> int:
    arguments = parser(__doc__)
    add = arguments.add_argument
    add(
        "paths",
        nargs="*",
        type=Path,
        help="trace files, directories of them, or data sets; the runs of bench",
    )
    add_options(
        arguments, "solutions", "definition", "against", "peers", "by", "markdown", "json",
        solutions={"help": "names, * allowed; all. Paths stand before it, or after --"},
        definition={"type": full_name, "default": DEFINITION},  # anyone's, not only ours
    )  # fmt: skip
    add("--hardware", metavar="TEXT", help="only machines whose name has TEXT")
    args = arguments.parse_args(argv)

    from scripts.data.traces import read_results
    from scripts.table.rank_text import print_rankings
    from scripts.table.rankings import rankings

    paths = args.paths or [TRACES_DIR]
    if not args.paths and not any(TRACES_DIR.rglob("*.jsonl")):
        hint = f"run.py bench makes one; run.py rank {RESULTS_DIR} ranks what is recorded"
        raise UsageError(f"no run in {TRACES_DIR}: {hint}")
    results = read_results(paths, args.definition)
    ranked = rankings(results, args.solutions, args.hardware, args.against, args.peers, by=args.by)
    if not ranked:
        raise UsageError(f"no results in {', '.join(map(str, paths))}")
    print(print_rankings(ranked, "markdown" if args.markdown else "text"))
    if args.json:
        files.write(args.json, print_rankings(ranked, "json") + "\n")
    return EXIT_FAILED if any(r.failed for r in ranked) else EXIT_OK


if __name__ == "__main__":
    run_main(main)
