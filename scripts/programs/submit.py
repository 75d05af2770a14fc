"""Export solutions: for a pull request, or for a program that calls them.

    trace       the tree of a pull request to the flashinfer-trace data set: solutions and traces
    apply       a data set for flashinfer_bench.apply: one solution, or the fastest of each T
    flashinfer  a folder for FlashInfer's Trace Apply: a solution in place of FlashInfer's function

A solution is exported only if traces (--results: records, runs, data sets) back it: it must have
passed on every workload of the data set, on the named GPU, with the exported sources. Otherwise it
is refused, and the workloads without such a trace are listed. For `apply` any workloads will do. Of
several solutions the fastest is taken, and without a name the fastest of all that have traces.
"""

import re
from pathlib import Path

from scripts.common.command_line import EXIT_OK, UsageError, option_type, parser, run_main
from scripts.common.definitions import DEFAULT
from scripts.common.project import ROOT, TRACES_DIR
from scripts.data.dataset import load, ours
from scripts.programs.options import add_options
from scripts.submit.forms import APPLY, FLASHINFER, FORMS, collect, one_for_all, write

FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
AUTHOR = option_type(
    str, "folder's name of letters, digits and . _ -", lambda s: bool(FOLDER.fullmatch(s))
)


def main(argv: list[str] | None = None) -> int:
    arguments = parser(__doc__)
    forms = arguments.add_subparsers(dest="form", required=True, metavar="FORM")
    for name, form in FORMS.items():
        options = forms.add_parser(name, help=form.help, description=form.help)
        add = options.add_argument
        which = "name of a solution or of its file" if form.several is None else "names"
        which += "; all" if form.several == "*" else ""
        add("solutions", nargs=form.several or 1, metavar="SOLUTION", help=which)
        add("--gpu", required=True, metavar="NAME", help="the GPU of the traces: 'H200'")
        add("--output", type=Path, required=True, metavar="DIR", help="a new directory")
        text = "trace files, runs, records or data sets; this repository's traces/"
        add("--results", nargs="+", type=Path, default=[TRACES_DIR], metavar="PATH", help=text)
        text = "submit under this name instead of the solution's"
        add("--author", type=AUTHOR, metavar="NAME", help=text)
        text = "the data set whose workloads must have passed; this repository"
        add("--local", type=Path, default=ROOT, metavar="PATH", help=text)
        text = "take traces that were measured with other sources than are exported"
        add("--other-sources", action="store_true", help=text)
        if name == APPLY:
            add("--mix", action="store_true", help="for each T the fastest; bits depend on T then")
        if name == FLASHINFER:
            add_options(options, "definition")
    arguments.set_defaults(definition=DEFAULT)
    args = arguments.parse_args(argv)
    definition = args.definition
    data_set = load(args.local, definition)[0]
    workloads = data_set.workloads[definition.name]
    if not workloads:
        raise UsageError(f"{args.local} has no workloads of {definition.name}")
    exports = collect(
        args.solutions,
        args.author,
        args.results,
        definition=definition,
        workloads=workloads,
        gpu=args.gpu,
        other_sources=args.other_sources,
        synthetic=ours(args.local),
        every=args.form != APPLY,
    )
    if args.form == APPLY and not args.mix:
        exports = one_for_all(exports)
    for name in write(
        FORMS[args.form], args.output, exports, data_set.definitions[definition.name]
    ):
        print(args.output / name)
    return EXIT_OK


if __name__ == "__main__":
    run_main(main)
