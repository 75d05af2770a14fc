"""Make the tensors of the workloads from the committed spec, or compare with the capture.

    python3 run.py make_workloads                    make all blobs under the repository root
    python3 run.py make_workloads --definition kimi_k2   those of another definition
    python3 run.py make_workloads --max-tokens 100   only those of small workloads
    python3 run.py make_workloads --table            captured against synthesised, made afresh
    python3 run.py make_workloads --definition kimi_k2 --specs   write its spec and workload file

A blob that already has the content of the spec is left alone, and so is one that this program did
not write (the captured tensors of the official data set, for instance). --specs is for definitions
whose workloads stand for no captured ones.
"""

from pathlib import Path

from scripts.common.command_line import EXIT_FAILED, EXIT_OK, UsageError, parser, run_main, say
from scripts.common.definitions import MoeDefinition
from scripts.common.project import ROOT
from scripts.programs.options import add_options


def main(argv: list[str] | None = None) -> int:
    arguments = parser(__doc__)
    add = arguments.add_argument
    add("--root", type=Path, default=ROOT, metavar="DIR", help="data set root")
    add_options(
        arguments, "definition", "workloads", "max-tokens", "markdown",
        workloads={"default": None, "metavar": "UUID", "help": "only these (or prefixes)"},
    )  # fmt: skip
    add("--quiet", action="store_true", help="show no progress")
    add("--table", action="store_true", help="compare instead of making files")
    add("--specs", action="store_true", help="write the spec and the workload file anew")
    args = arguments.parse_args(argv)

    from scripts.data import workload_specs

    definition = args.definition
    try:
        if args.specs:
            if not definition.tokens:
                raise UsageError(f"--specs: {definition.name} has captured workloads")
            for path in workload_specs.write_specs(workload_specs.own_specs(definition), args.root):
                print(path)
        elif args.table or args.markdown:
            if not isinstance(definition, MoeDefinition):
                raise UsageError("--table: only a layer's workloads are drawn")
            specs = workload_specs.load_specs(ROOT / workload_specs.spec_path(definition))
            chosen = workload_specs.select(specs, args.workloads, args.max_tokens)
            print(workload_specs.captured_table(chosen, args.markdown))
        else:
            workload_specs.make_workloads(
                args.root, args.workloads, args.max_tokens, not args.quiet, definition
            )
    except ValueError as error:
        raise UsageError(str(error)) from None
    except RuntimeError as error:
        say(f"error: {error}")
        return EXIT_FAILED
    return EXIT_OK


if __name__ == "__main__":
    run_main(main)
