"""A run as an HTML page, a ranking in the terminal, or the generated blocks of README and docs.

python3 run.py report                                  # the page of the latest run of bench
python3 run.py report results/nvidia-h200/2026-11-29   # of a recorded one
python3 run.py report --text results/nvidia-h200/2026-11-29 --by device
python3 run.py report --pages --check                  # fails if a page and its record disagree

--text ranks flashinfer-bench trace files (JSON lines) or directories of them, ours or anyone's.
There is one ranking for each machine, timing method and tolerance. If a solution was measured with
several sources, the last one counts. If a pair of solution and workload was measured several times,
the latest result counts. A remark says what is left out. run.json beside the traces says which
solutions are ours and which a peer's, and which could not run there and why.
"""

import json

from scripts.common import program
from scripts.common.definitions import full_name
from scripts.common.program import (
    DEFINITION,
    EXIT_FAILED,
    EXIT_OK,
    UsageError,
    input_path,
    output_file,
    parser,
    run_main,
)

PAGE, TEXT, PAGES = "a page", "--text", "--pages"


def main(argv: list[str] | None = None) -> int:
    arguments = parser(__doc__)
    add = arguments.add_argument
    text = "a run's directory; with --text any trace files, directories of them, or data sets "
    text += "(default: the latest run)"
    paths = add("paths", nargs="*", type=input_path, metavar="RUN", help=text)
    mode = arguments.add_mutually_exclusive_group()
    mode.add_argument("--text", action="store_true", help="print the ranking")
    mode.add_argument("--pages", action="store_true", help="write README.md and docs/results.md")
    text = "clock that orders the ranking"
    by = add("--by", choices=("harness", "device"), default="harness", help=text)
    text = "solutions that count as peers, * allowed (default: run.json's, else all without "
    text += "cutedsl_)"
    peers = add("--peers", nargs="+", default=[], metavar="NAME", help=text)
    page = arguments.add_argument_group("a page")
    text = "where the page is written (default: report.html beside the run, a record's in runs/)"
    out = page.add_argument("--out", type=output_file, metavar="FILE", help=text)
    group = arguments.add_argument_group("with --text")
    text = "anyone's, not only ours (default: that of the run)"
    of_text = [
        group.add_argument("--definition", type=full_name, metavar="NAME", help=text),
        group.add_argument(
            "--against", metavar="NAME", help="add the speed relative to a solution"
        ),
        group.add_argument("--markdown", action="store_true", help="print Markdown"),
        group.add_argument(
            "--json", type=output_file, metavar="FILE", help="write all figures there"
        ),
    ]
    group = arguments.add_argument_group("with --pages")
    text = "the record to take (default: the README's)"
    of_pages = [
        group.add_argument("--check", action="store_true", help="write nothing; fail if stale"),
        group.add_argument("--record", type=input_path, metavar="DIR", help=text),
    ]
    args = arguments.parse_args(argv)
    chosen = PAGES if args.pages else TEXT if args.text else PAGE
    taken = {PAGE: [paths, by, peers, out], TEXT: [paths, by, peers, *of_text], PAGES: of_pages}
    for option in {*taken[PAGE], *of_text, *of_pages} - {*taken[chosen]}:
        if getattr(args, option.dest) != option.default and getattr(args, option.dest):
            name = (option.option_strings or ["RUN"])[0]
            arguments.error(f"{name}: not with {chosen}")
    if chosen == PAGE and len(args.paths) > 1:
        arguments.error("a page has one RUN")

    from scripts.publishing import pages, rankings, rows

    if chosen == PAGES:
        lines = pages.publish(args.check, args.record)
        list(map(print, lines))
        return EXIT_FAILED if args.check and lines else EXIT_OK
    if chosen == PAGE:
        directory = rankings.find_run(args.paths[0] if args.paths else None)
        written = pages.write(directory, args.out, args.peers, args.by)
        print(f"{written}  {written.stat().st_size / 1024:.0f} KiB")
        return EXIT_OK
    traces = rows.trace_files(args.paths or [rankings.find_run(None)])
    known = rows.run_info(traces[0]) if traces else {}
    results = rows.read_results(traces, args.definition or known.get("definition", DEFINITION))
    ranked = rankings.rankings(results, args.against, args.peers, args.by)
    if not ranked:
        raise UsageError(f"no results in {', '.join(map(str, args.paths or traces))}")
    print(pages.print_rankings(ranked, args.markdown))
    if args.json:
        program.write_file(
            args.json, json.dumps([rankings.to_json(r) for r in ranked], indent=1) + "\n"
        )
    return EXIT_FAILED if any(r.failed for r in ranked) else EXIT_OK


if __name__ == "__main__":
    run_main(main)
