"""Pack each generation into one self-contained flashinfer-bench Solution JSON.

A generation is a file of solutions/moe_fp8 with a literal SOLUTION at its top level. Its packed
form is solutions/<author>/<op_type>/<definition>/<name>.json: the closure of its relative imports
and an entry file that loads them, the same bytes on every machine. A SOLUTION with "routings" or
"rows" is packed for further definitions, too: docs/adding-a-solution.md.
"""

from pathlib import Path

from scripts.common.command_line import EXIT_OK, parser, run_main
from scripts.programs.options import add_options


def main(argv: list[str] | None = None) -> int:
    arguments = parser(__doc__)
    add = arguments.add_argument
    add("names", nargs="*", help="solutions (or their files) to pack; all")
    add_options(arguments, "definition")
    add("--output", type=Path, metavar="DIR", help="directory of the JSON files")
    add("--list", action="store_true", help="only list the generations")
    args = arguments.parse_args(argv)

    from scripts.pack import pack

    if args.list:
        for generation in pack.generations(definition=args.definition):
            print(f"{generation.name}  {generation.path.name}")
    else:
        for path in pack.write_packed(args.names, args.output, definition=args.definition):
            print(f"{path}  {path.stat().st_size / 1024:.0f} KiB")
    return EXIT_OK


if __name__ == "__main__":
    run_main(main)
