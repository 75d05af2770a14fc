"""The forms of an export (docs/submit.md): the files of each, by path.

trace: the files that a pull request to the flashinfer-trace data set adds. apply: these and the
definition, for flashinfer_bench.apply. flashinfer: definitions and solutions for FlashInfer's Trace
Apply (`trace_apply`).
"""

import json
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from scripts.common import files
from scripts.common.command_line import UsageError, say
from scripts.common.definitions import DEFAULT, Entry
from scripts.common.project import DEFINITION, OP_TYPE, ROOT
from scripts.data.results import TIMING, TOLERANCE
from scripts.data.traces import finite, read_results
from scripts.pack.pack import Generation, generations, pack, select, validate
from scripts.submit import evidence, trace_apply

if TYPE_CHECKING:
    from flashinfer_bench.data import Definition, Solution

Files = dict[str, str]
"""Texts by path."""


@dataclass(frozen=True)
class Export:
    """A packed solution, under the author's name of the submission, and the traces that back it."""

    generation: Generation
    content: dict[str, Any]  # the Solution JSON
    traces: tuple[dict[str, Any], ...] = ()  # JSON of the traces that back it

    @property
    def name(self) -> str:
        return str(self.content["name"])

    @property
    def solution(self) -> "Solution":
        from flashinfer_bench.data import Solution

        return Solution.model_validate(self.content)


Exports = Sequence[Export]


def export_of(generation: Generation, author: str | None = None) -> Export:
    """Pack the generation, with `author` or the author in its file. The author is no part of
    flashinfer-bench's hash. Raises PackError."""
    content = json.loads(pack(generation))
    return Export(generation, content | ({"author": author} if author else {}))


def to_json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


# --- the layout of a data set ---------------------------------------------------------------------


def trace_files(exports: Exports, definition: "Definition") -> Files:
    texts: Files = {}
    for export in exports:
        below = f"{export.content['author']}/{OP_TYPE}/{DEFINITION}"
        texts[f"solutions/{below}/{export.name}.json"] = to_json(export.content)
        lines = (json.dumps(finite(trace)) + "\n" for trace in export.traces)
        texts[f"traces/{below}.jsonl"] = texts.get(f"traces/{below}.jsonl", "") + "".join(lines)
    return texts


def apply_files(exports: Exports, definition: "Definition") -> Files:
    path = f"definitions/{OP_TYPE}/{DEFINITION}.json"
    own = {path: to_json(definition.model_dump(mode="json"))}
    return own | trace_files(exports, definition)


def one_for_all(exports: Exports) -> list[Export]:
    """Return the solution that is fastest in the mean of the workloads that back all of them: a
    token's output must not depend on the fastest solution at a batch's size. Raises UsageError:
    there is no such workload, or clocks and tolerances differ."""
    traces = [trace for export in exports for trace in export.traces]
    libs = [trace["evaluation"]["environment"]["libs"] for trace in traces]
    ways = {(lib.get(TIMING), lib.get(TOLERANCE)) for lib in libs}
    shared = set.intersection(
        *({trace["workload"]["uuid"] for trace in export.traces} for export in exports)
    )
    if len(ways) > 1 or not shared:
        raise UsageError(
            "the traces of these solutions are of several clocks or tolerances, or of no workload "
            "in common: name one run, or one solution"
        )

    def score(export: Export) -> float:
        backing = (trace for trace in export.traces if trace["workload"]["uuid"] in shared)
        results = (trace["evaluation"]["performance"] for trace in backing)
        return sum(math.log(result["speedup_factor"]) for result in results)

    return [max(exports, key=score)]


def flashinfer_files(exports: Exports, definition: "Definition") -> Files:
    (export,) = exports
    contents = trace_apply.files(export.content, export.generation.definition, definition)
    return {path: to_json(content) for path, content in contents.items()}


# --- all forms ------------------------------------------------------------------------------------


class ExportForm(NamedTuple):
    """A form of an export."""

    help: str
    files: "Callable[[Exports, Definition], Files]"
    several: str | None = None  # argparse's nargs of its solutions; None: one


APPLY, FLASHINFER = "apply", "flashinfer"
FORMS = {
    "trace": ExportForm("a pull request to the flashinfer-trace data set", trace_files, "+"),
    APPLY: ExportForm("a data set for flashinfer_bench.apply", apply_files, "*"),
    FLASHINFER: ExportForm("a folder for FlashInfer's Trace Apply", flashinfer_files),
}


def collect(
    names: Sequence[str],
    author: str | None,
    results: Sequence[Path],
    definition: Entry = DEFAULT,
    **options: Any,
) -> list[Export]:
    """Return the solutions with their evidence among the results; without names, those that have
    some. `options` are those of `evidence.back`. Raises Refused, PackError, UsageError."""
    chosen = select(generations(definition=definition), [Path(name).name for name in names])
    frame = read_results(results, definition.name)
    exports, refused = [], []
    for generation in chosen:
        export = export_of(generation, author)
        try:
            traces, remark = evidence.back(export.solution, frame, **options)
        except evidence.Refused as error:
            if names:
                raise
            refused.append(str(error))
            continue
        exports.append(replace(export, traces=traces))
        say(remark)
    if not exports:
        raise evidence.Refused("\n".join(refused))
    for why in refused:
        say(why.splitlines()[0].rstrip(":"))
    return exports


def write(
    form: ExportForm, output: Path, exports: Sequence[Export], definition: "Definition"
) -> list[str]:
    """Write the tree and build its solutions as flashinfer-bench does, which FlashInfer's way
    resembles. Return its files. A solution that does not build leaves nothing. Raises PackError;
    UsageError: `output` has files, which could be mixed up."""
    here = output.resolve() == Path.cwd()  # replacing it would leave shells in the old directory
    if here or (output.exists() and (not output.is_dir() or any(output.iterdir()))):
        raise UsageError(f"{output} is there already: name a new directory")
    output.parent.mkdir(parents=True, exist_ok=True)
    tree = form.files(exports, definition)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as directory:
        folder = Path(directory) / output.name
        for name, content in tree.items():
            files.write(folder / name, content)
        for path in folder.glob("solutions/**/*.json"):
            name = json.loads(path.read_bytes())["definition"]
            own = [*folder.glob(f"definitions/*/{name}.json"), ROOT / DEFAULT.path]
            validate(path.read_bytes(), own[0])
        folder.replace(output)
    return list(tree)
