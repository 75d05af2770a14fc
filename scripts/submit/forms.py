"""The forms of an export (docs/submit.md): the files of each, by path.

trace: what a pull request to the flashinfer-trace data set adds.
apply: that and the definition, for flashinfer_bench.apply.
flashinfer: definitions and solutions for FlashInfer's Trace Apply (`trace_apply`).
sol: a problem of NVIDIA's SOL-ExecBench with a solution, whose `spec` differs from
flashinfer-bench's.
kernels: the source of a kernel without compiled parts for Hugging Face's kernels.
"""

import json
import math
import string
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from moe_fp8.closure import PACKAGE
from packaging.utils import canonicalize_name

from scripts.common import files
from scripts.common.command_line import UsageError, say
from scripts.common.definitions import DEFAULT, Entry
from scripts.common.project import DEFINITION, OP_TYPE, ROOT
from scripts.data.results import TIMING, TOLERANCE
from scripts.data.traces import finite, read_results
from scripts.pack.availability import capability_of, requirements
from scripts.pack.pack import (
    ENTRY_FILE,
    Generation,
    PackError,
    generations,
    pack,
    select,
    validate,
)
from scripts.submit import evidence, trace_apply

if TYPE_CHECKING:
    from flashinfer_bench.data import Definition, Solution

Files = dict[str, str]
"""Texts by path."""


@dataclass(frozen=True)
class Export:
    """A packed solution, under the author's name that it is submitted by, and what backs it."""

    generation: Generation
    content: dict[str, Any]  # the Solution JSON
    traces: tuple[dict[str, Any], ...] = ()  # the JSON of those that back it

    @property
    def name(self) -> str:
        return str(self.content["name"])

    @property
    def solution(self) -> "Solution":
        from flashinfer_bench.data import Solution

        return Solution.model_validate(self.content)

    @property
    def package(self) -> Files:
        """The sources but for the entry file, by their paths below the package's folder."""
        return {
            source["path"].removeprefix(f"{PACKAGE}/"): source["content"]
            for source in self.content["sources"]
            if source["path"] != ENTRY_FILE
        }


Exports = Sequence[Export]


def export_of(generation: Generation, author: str | None = None) -> Export:
    """The generation packed, by `author` or by who stands in its file. The author is no part of
    flashinfer-bench's hash. Raises PackError."""
    content = json.loads(pack(generation))
    return Export(generation, content | ({"author": author} if author else {}))


def to_json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def to_toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Of strings, numbers, booleans and lists of strings, which are the same in JSON."""
    return "\n".join(
        f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in of.items())
        for name, of in tables.items()
    )


# --- the layout of a data set ---------------------------------------------------------------------


def trace_files(exports: Exports, definition: "Definition") -> Files:
    made: Files = {}
    for export in exports:
        below = f"{export.content['author']}/{OP_TYPE}/{DEFINITION}"
        made[f"solutions/{below}/{export.name}.json"] = to_json(export.content)
        lines = (json.dumps(finite(trace)) + "\n" for trace in export.traces)
        made[f"traces/{below}.jsonl"] = made.get(f"traces/{below}.jsonl", "") + "".join(lines)
    return made


def apply_files(exports: Exports, definition: "Definition") -> Files:
    path = f"definitions/{OP_TYPE}/{DEFINITION}.json"
    own = {path: to_json(definition.model_dump(mode="json"))}
    return own | trace_files(exports, definition)


def one_for_all(exports: Exports) -> list[Export]:
    """Of all the fastest in the mean of the workloads that back each of them: what a token gets
    must not depend on which solution happened to be faster at a batch's size. Raises UsageError:
    there is no such workload, or clocks and tolerances differ."""
    traces = [trace for export in exports for trace in export.traces]
    libs = [trace["evaluation"]["environment"]["libs"] for trace in traces]
    ways = {(of.get(TIMING), of.get(TOLERANCE)) for of in libs}
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
    made = trace_apply.files(export.content, export.generation.definition, definition)
    return {path: to_json(content) for path, content in made.items()}


# --- SOL-ExecBench and Hugging Face's kernels -----------------------------------------------------

B200 = "B200"
SOL_DEFINITION = f"020_{DEFINITION}"
"""The definition's name in its data set, part FlashInfer-Bench."""
LIBRARIES = {
    "torch": ("pytorch", "torch"),
    "nvidia-cutlass-dsl": ("cute_dsl", "cutlass"),
    "triton": ("triton", "triton"),
    "apache-tvm-ffi": (),
    "filelock": (),
}
"""Of SOL-ExecBench, by what is installed: (language, dependency). It depends on apache-tvm-ffi
itself, and torch on filelock: they are there and have no names among its libraries."""
GENERAL, CUDA = "general", "general.cuda"
DEPENDENCIES = {
    "torch": (),
    "filelock": (),
    "triton": (),
    "apache-tvm-ffi": (GENERAL, "tvm-ffi"),
    "nvidia-cutlass-dsl": (CUDA, "nvidia-cutlass-dsl"),
}
"""Those that kernels allows, by what is installed: (table of build.toml, name there). torch is
always there, with filelock and, for CUDA, triton."""


def translated(
    export: Export, known: Mapping[str, tuple[str, ...]], where: str
) -> list[tuple[str, ...]]:
    """What `known` has for the solution's requirements, by their canonical names. Raises PackError:
    one of them is not known there."""
    names = [canonicalize_name(r.name) for r in requirements(export.solution)]
    if absent := [name for name in names if name not in known]:
        raise PackError(f"{export.name} needs {', '.join(absent)}, which {where} does not have")
    return [known[name] for name in names if known[name]]


def sol_files(exports: Exports, definition: "Definition") -> Files:
    """A folder that it evaluates; its workloads are bare lines. Raises PackError for libraries that
    it has not."""
    (export,) = exports
    content, libraries = export.content, translated(export, LIBRARIES, "SOL-ExecBench")
    on_b200 = capability_of(B200) in map(capability_of, content["spec"]["target_hardware"])
    spec = {
        "languages": [name for name, _ in libraries if name != "pytorch"] or ["pytorch"],
        "target_hardware": [B200, "LOCAL"] if on_b200 else ["LOCAL"],
        "entry_point": content["spec"]["entry_point"],
        "dependencies": [name for _, name in libraries],
        "destination_passing_style": content["spec"]["destination_passing_style"],
    }
    problem = definition.model_dump(mode="json", exclude={"tags", "constraints"})
    return {
        "definition.json": to_json({**problem, "name": SOL_DEFINITION}),
        "workload.jsonl": "".join(json.dumps(t["workload"]) + "\n" for t in export.traces),
        "solution.json": to_json({**content, "definition": SOL_DEFINITION, "spec": spec}),
    }


LICENSE = "Apache-2.0"
TEMPLATES = Path(__file__).parent / "kernels"


def kernels_files(exports: Exports, definition: "Definition") -> Files:
    """The repository. Raises PackError for a dependency that kernels does not allow."""
    (export,) = exports
    kernel, content = export.name.lower().replace("_", "-"), export.content
    depends = translated(export, DEPENDENCIES, "the list of kernels")
    general, cuda = ([name for where, name in depends if where == t] for t in (GENERAL, CUDA))
    capabilities = [capability_of(name) for name in content["spec"]["target_hardware"]]
    archs = sorted({f"{c[0]}.{c[1]}" for c in capabilities if c is not None})
    tables: dict[str, dict[str, Any]] = {
        GENERAL: {
            "name": kernel,
            "version": 1,
            "edition": 5,
            "license": LICENSE,
            "backends": ["cuda"],
            **({"python-depends": general} if general else {}),
        },
        **({CUDA: {"python-depends": cuda}} if cuda else {}),
        # With an underscore: kernels 0.17.2 refuses the dash that its page of build.toml shows.
        "torch-noarch": {"cuda_capabilities": archs} if None not in capabilities else {},
    }
    card = string.Template((TEMPLATES / "CARD.md").read_text(encoding="utf-8")).substitute(
        license=LICENSE.lower(),
        kernel=kernel,
        description=content["description"],
        definition=content["definition"],
        needs=" ".join(f"'{name}'" for name in content["spec"]["dependencies"]),
    )
    where = export.generation.path.relative_to(export.generation.root)
    module = ".".join(where.with_suffix("").parts)
    exported = f'from .{PACKAGE}.{module} import run\n\n__all__ = ["run"]\n'
    below = f"torch-ext/{kernel.replace('-', '_')}"
    return {
        "build.toml": to_toml(tables),
        "flake.nix": (TEMPLATES / "flake.nix").read_text(encoding="utf-8"),
        "CARD.md": card,
        f"{below}/__init__.py": f"{content['description']!r}\n\n{exported}",
        **{f"{below}/{PACKAGE}/{path}": text for path, text in export.package.items()},
    }


# --- all forms ------------------------------------------------------------------------------------


class ExportForm(NamedTuple):
    """A form of an export."""

    help: str
    files: "Callable[[Exports, Definition], Files]"
    several: str | None = None  # how many solutions it takes, as argparse says it; None: one


APPLY, FLASHINFER = "apply", "flashinfer"
FORMS = {
    "trace": ExportForm("a pull request to the flashinfer-trace data set", trace_files, "+"),
    "sol": ExportForm("a problem with its solution for NVIDIA's SOL-ExecBench", sol_files),
    "kernels": ExportForm("the source of a package for Hugging Face's kernels", kernels_files),
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
    """The solutions with their evidence among the results; where none was named, those that have
    some. `options` are those of `evidence.back`. Raises Refused, PackError, UsageError."""
    chosen = select(generations(definition=definition), [Path(name).name for name in names])
    found = read_results(results, definition.name)
    exports, refused = [], []
    for generation in chosen:
        export = export_of(generation, author)
        try:
            traces, said = evidence.back(export.solution, found, **options)
        except evidence.Refused as error:
            if names:
                raise
            refused.append(str(error))
            continue
        exports.append(replace(export, traces=traces))
        say(said)
    if not exports:
        raise evidence.Refused("\n".join(refused))
    for why in refused:
        say(why.splitlines()[0].rstrip(":"))
    return exports


def write(form: ExportForm, output: Path, exports: Sequence[Export], of: "Definition") -> list[str]:
    """Write the tree and build its solutions as flashinfer-bench does, to which FlashInfer's way is
    alike; its files. What does not build leaves nothing. Raises PackError, and UsageError where
    `output` holds something: it could be mixed up."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"{output} is there already: name a new or an empty directory")
    output.parent.mkdir(parents=True, exist_ok=True)
    tree = form.files(exports, of)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as directory:
        made = Path(directory) / output.name
        for name, content in tree.items():
            files.write(made / name, content)
        for path in made.glob("solutions/**/*.json"):
            name = json.loads(path.read_bytes())["definition"]
            own = [*made.glob(f"definitions/*/{name}.json"), ROOT / DEFAULT.path]
            validate(path.read_bytes(), own[0])
        made.replace(output)
    return list(tree)
