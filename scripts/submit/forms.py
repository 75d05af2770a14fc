"""The forms of an export: which solutions are backed, the files of each form, and their check."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.common.command_line import say
from scripts.pack.pack import generations, select
from scripts.submit import evidence, packages, trees
from scripts.submit.export import Export, export_of, new_tree, write_all

if TYPE_CHECKING:
    from flashinfer_bench.data import Definition, Trace


@dataclass(frozen=True)
class Form:
    """A form of an export.

    Attributes:
        help: what it is.
        files: makes the files of the solutions, which are of a definition, by their paths.
        check: whether what was written to a directory is right; raises PackError.
        several: how many solutions it takes, as argparse says it; None: one.
    """

    help: str
    files: "Callable[[Sequence[Export], Definition], Mapping[str, str]]"
    check: Callable[[Path, Sequence[Export]], None] = lambda root, exports: None
    several: str | None = None


APPLY = "apply"
FORMS = {
    "trace": Form(
        "solutions and traces for the flashinfer-trace data set",
        lambda exports, _: trees.trace_files(exports),
        trees.check_trace,
        several="+",
    ),
    "kit": Form(
        "config.toml and sources for the flashinfer-bench starter kit",
        lambda exports, _: packages.kit_files(*exports),
        lambda root, exports: packages.check_kit(root, *exports),
    ),
    "sol": Form(
        "solution.json for NVIDIA's SOL-ExecBench",
        lambda exports, _: packages.sol_files(*exports),
    ),
    "kernels": Form(
        "the source of a package for Hugging Face's kernels",
        lambda exports, _: packages.kernels_files(*exports),
    ),
    APPLY: Form(
        "a data set for flashinfer_bench.apply", trees.apply_files, trees.check_apply, several="*"
    ),
    "flashinfer": Form(
        "a folder for FlashInfer's Trace Apply",
        lambda exports, definition: trees.flashinfer_files(exports[0], definition),
        lambda root, exports: trees.check_flashinfer(*exports),
    ),
}


def collect(
    names: Sequence[str],
    author: str | None,
    gpu: str,
    results: Sequence[Path],
    workloads: "Sequence[Trace]",
    other_sources: bool = False,
    synthetic: bool = True,
    every: bool = True,
) -> list[Export]:
    """The solutions with their evidence among the results; where none was named, those that have
    some. See `evidence.back` for the options. Raises Refused, PackError, UsageError."""
    chosen = select(generations(), [Path(name).name for name in names])
    found = evidence.read(results)
    exports, refused = [], []
    for generation in chosen:
        export = export_of(generation, author)
        try:
            backed = evidence.back(
                export.solution, workloads, found, gpu, other_sources, synthetic, every
            )
        except evidence.Refused as error:
            if names:
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


def write(form: Form, output: Path, exports: Sequence[Export], of: "Definition") -> list[str]:
    """Write the tree and check it; its files. Raises PackError, UsageError."""
    with new_tree(output) as root:
        made = form.files(exports, of)
        write_all(root, made)
        form.check(root, exports)
    return list(made)
