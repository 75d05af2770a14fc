"""One self-contained HTML page of a run: ranking, latency against the roofline, GEMMs.

python3 run.py report                                  # the latest run of bench
python3 run.py report results/nvidia-h200/2026-11-25   # a recorded one
"""

from pathlib import Path

from scripts.common.command_line import EXIT_OK, parser, run_main
from scripts.programs.options import add_options


def main(argv: list[str] | None = None) -> int:
    arguments = parser(__doc__)
    arguments.add_argument("run", nargs="?", type=Path, help="directory of a run; the latest run")
    arguments.add_argument("--out", type=Path, metavar="FILE", help="report.html of the directory")
    add_options(arguments, "peers", "by")
    args = arguments.parse_args(argv)

    from scripts.report import report
    from scripts.table.recorded import find_run

    out = report.write(find_run(args.run), args.out, args.peers, args.by)
    print(f"{out}  {out.stat().st_size / 1024:.0f} KiB")
    return EXIT_OK


if __name__ == "__main__":
    run_main(main)
