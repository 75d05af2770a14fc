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

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.common.command_line import (
    EXIT_FAILED,
    EXIT_OK,
    UsageError,
    parser,
    run_main,
    say,
)
from scripts.common.project import DEFINITION, ROOT, TRACES_DIR
from scripts.data.dataset import load, ours
from scripts.pack.pack import PackError, generations, select
from scripts.submit import (
    apply_tree,
    evidence,
    hf_kernels,
    sol_execbench,
    starter_kit,
    trace_apply,
    trace_tree,
)
from scripts.submit.export import Export, export_of, new_tree, write_all

if TYPE_CHECKING:
    from flashinfer_bench.data import Definition, Trace

TRACE, KIT, SOL, KERNELS = "trace", "kit", "sol", "kernels"
APPLY, FLASHINFER = "apply", "flashinfer"
FORMS = {
    TRACE: "solutions and traces for the flashinfer-trace data set",
    KIT: "config.toml and sources for the flashinfer-bench starter kit",
    SOL: "solution.json for NVIDIA's SOL-ExecBench",
    KERNELS: "the source of a package for Hugging Face's kernels",
    APPLY: "a data set for flashinfer_bench.apply",
    FLASHINFER: "a folder for FlashInfer's Trace Apply",
}
SEVERAL = {TRACE: "+", APPLY: "*"}
"""Forms of any number of solutions."""


def parse_arguments() -> argparse.Namespace:
    arguments = parser(__doc__)
    forms = arguments.add_subparsers(dest="form", required=True, metavar="FORM")
    for form, said in FORMS.items():
        add = forms.add_parser(form, help=said, description=said).add_argument
        if form in SEVERAL:
            which = "names of solutions or files" + ("; all" if form == APPLY else "")
            add("solutions", nargs=SEVERAL[form], metavar="SOLUTION", help=which)
        else:
            add("solutions", nargs=1, metavar="SOLUTION", help="name of a solution or of its file")
        add("--gpu", required=True, metavar="NAME", help="the GPU of the traces: 'H200'")
        add("--output", type=Path, required=True, metavar="DIR", help="a new directory")
        add(
            "--results",
            nargs="+",
            type=Path,
            default=[TRACES_DIR],
            metavar="PATH",
            help="trace files, runs, records or data sets; this repository's traces/",
        )
        add("--author", metavar="NAME", help="submit under this name instead of the solution's")
        add(
            "--local",
            type=Path,
            default=ROOT,
            metavar="PATH",
            help="the data set whose workloads must have passed; this repository",
        )
        add(
            "--other-sources",
            action="store_true",
            help="take traces that were measured with other sources than are exported",
        )
    return arguments.parse_args()


def collect(args: argparse.Namespace, workloads: "Sequence[Trace]") -> list[Export]:
    """The solutions with their evidence; where none was named, those that have some. Raises
    Refused, PackError, UsageError."""
    chosen = select(generations(), [Path(name).name for name in args.solutions])
    found = evidence.read(args.results)
    exports, refused = [], []
    for generation in chosen:
        export = export_of(generation, args.author)
        try:
            backed = evidence.back(
                export.solution,
                workloads,
                found,
                args.gpu,
                other_sources=args.other_sources,
                synthetic=ours(args.local),
                every=args.form != APPLY,
            )
        except evidence.Refused as error:
            if args.solutions:
                raise
            refused.append(str(error))
            continue
        exports.append(replace(export, evidence=backed))
        say("\n".join([str(backed), *backed.remarks]))
    if not exports:
        raise evidence.Refused("\n".join(refused))
    for why in refused:
        say(why.splitlines()[0].rstrip(":"))
    return exports


def write(
    form: str, output: Path, exports: Sequence[Export], definition: "Definition"
) -> list[str]:
    """Write the tree and check it; its files. Raises PackError, UsageError."""
    with new_tree(output) as root:
        if form == TRACE:
            made = trace_tree.files(exports)
        elif form == APPLY:
            made = apply_tree.files(exports, definition)
        elif form == FLASHINFER:
            made = trace_apply.files(exports[0], definition)
        else:
            module = {KIT: starter_kit, SOL: sol_execbench, KERNELS: hf_kernels}[form]
            made = module.files(exports[0])
        write_all(root, made)
        if form == TRACE:
            trace_tree.check(root, exports)
        elif form == APPLY:
            apply_tree.check(root, exports)
        elif form == FLASHINFER:
            trace_apply.check(exports[0])
        elif form == KIT:
            starter_kit.check(root, exports[0])
    return list(made)


def main() -> int:
    args = parse_arguments()
    try:
        data_set = load(args.local)[0]
        workloads = data_set.workloads[DEFINITION]
        if not workloads:
            raise UsageError(f"{args.local} has no workloads of {DEFINITION}")
        exports = collect(args, workloads)
        for name in write(args.form, args.output, exports, data_set.definitions[DEFINITION]):
            print(args.output / name)
        if args.form == APPLY:
            say(apply_tree.choices(exports))
    except (PackError, evidence.Refused) as error:
        say(f"error: {error}")
        return EXIT_FAILED
    return EXIT_OK


if __name__ == "__main__":
    run_main(main)
