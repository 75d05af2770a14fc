"""Export solutions: a pull request, a contest, a benchmark, a package, a program that calls them.

    trace       the tree of a pull request to the flashinfer-trace data set: solutions and traces
    kit         config.toml and sources for a copy of the flashinfer-bench starter kit
    sol         solution.json for NVIDIA's SOL-ExecBench
    kernels     the source of a package for Hugging Face's kernels
    apply       a data set for flashinfer_bench.apply, which calls the fastest solution for a T
    flashinfer  a folder for FlashInfer's Trace Apply: a solution in place of FlashInfer's function

A solution is exported only where traces (--results: records, runs, data sets) back it: passed on
every workload of the data set, on the GPU that is named, measured with the sources that are
exported. Otherwise it is refused, and the workloads that lack are listed. For `apply` any workloads
will do, and without a name all solutions are taken that have some.
"""

from pathlib import Path

from scripts.common.command_line import EXIT_OK, UsageError, parser, run_main, say
from scripts.common.project import DEFINITION, ROOT, TRACES_DIR
from scripts.data.dataset import load, ours
from scripts.submit.forms import APPLY, FORMS, collect, fastest, write


def main(argv: list[str] | None = None) -> int:
    arguments = parser(__doc__)
    forms = arguments.add_subparsers(dest="form", required=True, metavar="FORM")
    for name, form in FORMS.items():
        add = forms.add_parser(name, help=form.help, description=form.help).add_argument
        which = "name of a solution or of its file" if form.several is None else "names"
        which += "; all" if form.several == "*" else ""
        add("solutions", nargs=form.several or 1, metavar="SOLUTION", help=which)
        add("--gpu", required=True, metavar="NAME", help="the GPU of the traces: 'H200'")
        add("--output", type=Path, required=True, metavar="DIR", help="a new directory")
        said = "trace files, runs, records or data sets; this repository's traces/"
        add("--results", nargs="+", type=Path, default=[TRACES_DIR], metavar="PATH", help=said)
        add("--author", metavar="NAME", help="submit under this name instead of the solution's")
        said = "the data set whose workloads must have passed; this repository"
        add("--local", type=Path, default=ROOT, metavar="PATH", help=said)
        said = "take traces that were measured with other sources than are exported"
        add("--other-sources", action="store_true", help=said)
    args = arguments.parse_args(argv)
    data_set = load(args.local)[0]
    if not data_set.workloads[DEFINITION]:
        raise UsageError(f"{args.local} has no workloads of {DEFINITION}")
    exports = collect(
        args.solutions,
        args.author,
        args.results,
        workloads=data_set.workloads[DEFINITION],
        gpu=args.gpu,
        other_sources=args.other_sources,
        synthetic=ours(args.local),
        every=args.form != APPLY,
    )
    definition = data_set.definitions[DEFINITION]
    for name in write(FORMS[args.form], args.output, exports, definition):
        print(args.output / name)
    if args.form == APPLY:
        say(", ".join(f"T={length}: {name}" for length, name in fastest(exports).items()))
    return EXIT_OK


if __name__ == "__main__":
    run_main(main)
