"""Write the flashinfer-bench definitions of the table in scripts/common/definitions.py.

python3 run.py make_definition            write definitions/<op type>/<definition>.json, all of them
python3 run.py make_definition --check    exit 1 when a committed file is out of date
"""

from pathlib import Path

from scripts.common import files
from scripts.common.command_line import EXIT_FAILED, EXIT_OK, parser, run_main, say
from scripts.common.definitions import TABLE
from scripts.common.project import ROOT
from scripts.data.interfaces import definition_text


def main(argv: list[str] | None = None) -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--root", type=Path, default=ROOT, metavar="DIR", help="data set root")
    arguments.add_argument("--check", action="store_true", help="compare only, write nothing")
    args = arguments.parse_args(argv)
    status = EXIT_OK
    for definition in TABLE:
        path, text = args.root / definition.path, definition_text(definition)
        if not args.check:
            files.write(path, text)
            print(path)
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            say(f"{path} is out of date: run `python3 run.py make_definition`")
            status = EXIT_FAILED
    return status


if __name__ == "__main__":
    run_main(main)
