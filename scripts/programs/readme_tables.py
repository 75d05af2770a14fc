"""The figures of the README and the docs from recorded runs: tables, sentences, and pictures.

python3 run.py readme_tables --check              # fails if a page and its record disagree
python3 run.py readme_tables                      # writes pages and pictures anew
python3 run.py readme_tables --record results/nvidia-h200/2026-12-24
"""

from pathlib import Path

from scripts.common.command_line import EXIT_FAILED, EXIT_OK, parser, run_main


def main(argv: list[str] | None = None) -> int:
    arguments = parser(__doc__)
    arguments.add_argument(
        "--record", type=Path, metavar="DIR", help="the record to take in place of the README's"
    )
    arguments.add_argument("--check", action="store_true", help="write nothing; fail if stale")
    args = arguments.parse_args(argv)

    from scripts.report import generated

    passages = generated.read_pages(args.record)
    problems: list[str] = []
    if args.check:
        problems = [
            line
            for page, text, recorded in passages
            for line in generated.stale(text, recorded, page)
        ]
    else:
        list(map(print, generated.write(passages)))
    list(map(print, problems))
    return EXIT_FAILED if problems else EXIT_OK


if __name__ == "__main__":
    run_main(main)
