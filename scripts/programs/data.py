"""Make the tensors of the workloads from the committed specs.

    python3 run.py data                                 all workloads of the default definition
    python3 run.py data --definition NAME --specs       write spec and workload file of a definition

A file of tensors that already has the content of the spec is left alone, and so is one that this
program did not write (for instance a captured tensor of the official data set). --specs is for
definitions whose workloads stand for no captured ones.
"""

from pathlib import Path

from scripts.common.command_line import EXIT_OK, UsageError, parser, run_main
from scripts.common.project import ROOT
from scripts.programs.options import add_options


def main(argv: list[str] | None = None) -> int:
    arguments = parser(__doc__)
    add_options(arguments, "definition", "workloads", "max-tokens")
    add = arguments.add_argument
    add("--root", type=Path, default=ROOT, metavar="DIR", help="where they are written")
    add("--specs", action="store_true", help="write the spec and the workload file anew")
    args = arguments.parse_args(argv)

    from scripts.data import workload_specs
    from scripts.data.dataset import load, select_workloads

    definition = args.definition
    if args.specs:
        if args.workloads or args.max_tokens:
            raise UsageError("--specs: of all workloads; leave --workloads and --max-tokens out")
        if not definition.tokens:
            raise UsageError(f"--specs: {definition.name} has captured workloads")
        specs = workload_specs.own_specs(definition)
        print(*workload_specs.write_specs(specs, args.root), sep="\n")
    else:
        every = load(ROOT, definition)[0].workloads[definition.name]
        chosen = select_workloads(every, args.workloads, args.max_tokens)
        workload_specs.make_workloads(args.root, [t.workload.uuid for t in chosen], definition)
    return EXIT_OK


if __name__ == "__main__":
    run_main(main)
