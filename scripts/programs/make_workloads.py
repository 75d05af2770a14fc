"""Make the tensors of the workloads from the committed spec.

    python3 run.py make_workloads                    make all blobs under the repository root
    python3 run.py make_workloads --definition kimi_k2 --specs   write its spec and workload file

A blob that already has the content of the spec is left alone, and so is one that this program did
not write (the captured tensors of the official data set, for instance). --specs is for definitions
whose workloads stand for no captured ones.
"""

from pathlib import Path

from scripts.common.command_line import EXIT_OK, Failure, UsageError, parser, run_main
from scripts.common.project import ROOT
from scripts.programs.options import add_options


def main(argv: list[str] | None = None) -> int:
    arguments = parser(__doc__)
    add = arguments.add_argument
    add("--root", type=Path, default=ROOT, metavar="DIR", help="data set root")
    add_options(
        arguments, "definition", "workloads", "max-tokens",
        workloads={"default": None, "metavar": "UUID", "help": "only these (or prefixes)"},
    )  # fmt: skip
    add("--specs", action="store_true", help="write the spec and the workload file anew")
    args = arguments.parse_args(argv)

    from scripts.data import workload_specs

    definition = args.definition
    if args.specs:
        if not definition.tokens:
            raise UsageError(f"--specs: {definition.name} has captured workloads")
        for path in workload_specs.write_specs(workload_specs.own_specs(definition), args.root):
            print(path)
        return EXIT_OK
    try:
        workload_specs.make_workloads(args.root, args.workloads, args.max_tokens, definition)
    except RuntimeError as error:
        raise Failure(str(error)) from None
    return EXIT_OK


if __name__ == "__main__":
    run_main(main)
