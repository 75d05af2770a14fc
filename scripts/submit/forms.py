"""The forms of an export (docs/submit.md): the files of each, and its check by flashinfer-bench.

trace: what a pull request to the flashinfer-trace data set adds.
apply: that and the definition, for flashinfer_bench.apply.
flashinfer: definitions and solutions for FlashInfer's Trace Apply (`trace_apply`).
kit: config.toml and one folder of sources for a copy of the flashinfer-bench starter kit, which
packs the files of the one folder that belongs to the language, none below it.
sol: a problem of NVIDIA's SOL-ExecBench with a solution, whose `spec` differs from
flashinfer-bench's.
kernels: the source of a kernel without compiled parts for Hugging Face's kernels.
"""

import json
import math
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from moe_fp8.closure import PACKAGE
from packaging.utils import canonicalize_name

from scripts.common.command_line import UsageError, say
from scripts.common.definitions import DEFAULT, Entry
from scripts.common.project import DEFINITION, OP_TYPE
from scripts.data.traces import finite, read_evaluations
from scripts.pack.availability import capability_of, requirements
from scripts.pack.pack import (
    ENTRY_FILE,
    Generation,
    PackError,
    entry_file,
    generations,
    pack,
    private_build_cache,
    select,
    validate,
)
from scripts.submit import evidence, trace_apply
from scripts.submit.flatten import FlattenError, flat_name, flatten

if TYPE_CHECKING:
    from flashinfer_bench.data import Definition, Solution

BASELINE = "baseline"
"""The author whose solution of a definition all others are compared with by `report summary`."""
PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Names that are folders' and files' names too."""


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
    def module(self) -> str:
        """The generation's module below the package, dotted."""
        where = self.generation.path.relative_to(self.generation.root)
        return ".".join(where.with_suffix("").parts)

    @property
    def package(self) -> dict[str, str]:
        """The sources but for the entry file, by their paths below the package's folder."""
        return {
            source["path"].removeprefix(f"{PACKAGE}/"): source["content"]
            for source in self.content["sources"]
            if source["path"] != ENTRY_FILE
        }


def export_of(generation: Generation, author: str | None = None) -> Export:
    """The generation packed, by `author` or by who stands in its file. The author is no part of
    flashinfer-bench's hash. Raises PackError, UsageError."""
    content = json.loads(pack(generation))
    content["author"] = author or content["author"]
    for key in ("name", "author"):
        if not PLAIN.fullmatch(content[key]):
            raise UsageError(f"{key} {content[key]!r}: letters, digits and . _ - are expected")
    return Export(generation, content)


def to_json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


# --- the layout of a data set ---------------------------------------------------------------------

TOKEN_AXIS = "seq_len"


def trace_files(exports: Sequence[Export]) -> dict[str, str]:
    made: dict[str, str] = {}
    for export in exports:
        below = f"{export.content['author']}/{OP_TYPE}/{DEFINITION}"
        made[f"solutions/{below}/{export.name}.json"] = to_json(export.content)
        lines = (json.dumps(finite(trace)) + "\n" for trace in export.traces)
        made[f"traces/{below}.jsonl"] = made.get(f"traces/{below}.jsonl", "") + "".join(lines)
    return made


def check_trace(root: Path, exports: Sequence[Export]) -> None:
    """Load the tree as flashinfer-bench does and compare it with what was meant; build every
    solution. Raises PackError."""
    from flashinfer_bench.data import TraceSet

    try:
        tree = TraceSet.from_path(str(root))
    except ValueError as error:
        raise PackError(f"flashinfer-bench does not take the tree: {error}") from None
    there = {definition: {s.name: s for s in of} for definition, of in tree.solutions.items()}
    found = there.get(DEFINITION, {})
    if set(there) != {DEFINITION} or set(found) != {e.name for e in exports}:
        raise PackError(f"the tree holds other solutions: {there}")
    for export in exports:
        if found[export.name].hash() != export.solution.hash():
            raise PackError(f"{export.name} does not come back as it was written")
        wanted = [trace["workload"]["uuid"] for trace in export.traces]
        traces = [t for t in tree.traces[DEFINITION] if t.solution == export.name]
        passed = [t.workload.uuid for t in traces if t.is_successful()]
        if len(traces) != len(wanted) or passed != wanted:
            raise PackError(f"{export.name}: {len(passed)} of {len(wanted)} traces come back")
        validate(found[export.name].model_dump_json().encode())


def definition_files(definition: "Definition") -> dict[str, str]:
    path = f"definitions/{OP_TYPE}/{DEFINITION}.json"
    return {path: to_json(definition.model_dump(mode="json"))}


def apply_files(exports: Sequence[Export], definition: "Definition") -> dict[str, str]:
    return {**definition_files(definition), **trace_files(exports)}


def one_for_all(exports: Sequence[Export]) -> list[Export]:
    """Of those with the most token counts the fastest in the mean of all: what a token gets must
    not depend on which solution happened to be faster at a batch's size."""

    def score(export: Export) -> tuple[int, float]:
        speedups = [t["evaluation"]["performance"]["speedup_factor"] for t in export.traces]
        return len(speedups), sum(math.log(speedup) for speedup in speedups)

    return [max(exports, key=score)]


def fastest(exports: Sequence[Export]) -> dict[int, str]:
    """Of each token count the solution that apply is to take."""
    best: dict[int, tuple[str, float]] = {}
    for export in exports:
        for trace in export.traces:
            length = trace["workload"]["axes"][TOKEN_AXIS]
            speedup = trace["evaluation"]["performance"]["speedup_factor"]
            if length not in best or speedup > best[length][1]:
                best[length] = export.name, speedup
    return {length: name for length, (name, _) in sorted(best.items())}


def check_apply(root: Path, exports: Sequence[Export]) -> None:
    """As `check_trace`, and whether apply's own table chooses the fastest. Raises PackError."""
    from flashinfer_bench.apply import ApplyConfig, ApplyConfigRegistry
    from flashinfer_bench.apply.key import ApplyKey
    from flashinfer_bench.apply.table import ApplyTable
    from flashinfer_bench.data import TraceSet

    check_trace(root, exports)
    config = ApplyConfig(max_atol=math.inf, max_rtol=math.inf, aot_ratio=0.0)
    with private_build_cache():  # where a table is kept, too
        table = ApplyTable.load_or_build(
            TraceSet.from_path(str(root)), ApplyConfigRegistry(default=config)
        )
    for length, name in fastest(exports).items():
        found = table.match_solution(DEFINITION, ApplyKey(axes=((TOKEN_AXIS, length),)))
        if found != name:
            raise PackError(f"apply would take {found} at T={length}, the fastest is {name}")


def flashinfer_files(export: Export, definition: "Definition") -> dict[str, str]:
    made = trace_apply.files(export.content, export.generation.definition, definition)
    return {path: to_json(content) for path, content in made.items()}


def check_flashinfer(root: Path, exports: Sequence[Export]) -> None:
    """Build the solutions as flashinfer-bench does, to which FlashInfer's way is alike. Raises
    PackError."""
    for path in root.glob("solutions/**/*.json"):
        content = path.read_bytes()
        (of,) = root.glob(f"definitions/*/{json.loads(content)['definition']}.json")
        validate(content, of)


# --- the starter kit ------------------------------------------------------------------------------

LANGUAGE = "triton"
KIT_ENTRY_FILE = "kernel.py"
KIT_ENTRY_POINT = f"{KIT_ENTRY_FILE}::run"
KIT_FOLDER = f"solution/{LANGUAGE}"


def kit_files(export: Export) -> dict[str, str]:
    """The files to put into a copy of the kit. Raises PackError."""
    try:
        flat = flatten(export.package, reserved=KIT_ENTRY_FILE)
    except FlattenError as error:
        raise PackError(f"{export.name}: {error}") from None
    module = flat_name(tuple(export.module.split(".")))
    flat[KIT_ENTRY_FILE] = entry_file(export.name, where=f"{module}.py", module=module)
    # A basic string of TOML is one of JSON.
    text = {key: json.dumps(export.content[key]) for key in ("name", "definition", "author")}
    config = (
        "[solution]\n"
        + "".join(f"{key} = {value}\n" for key, value in text.items())
        + f'\n[build]\nlanguage = "{LANGUAGE}"\nentry_point = "{KIT_ENTRY_POINT}"\n'
        + "destination_passing_style = true\n"
    )
    return {"config.toml": config, **{f"{KIT_FOLDER}/{n}": flat[n] for n in sorted(flat)}}


def check_kit(root: Path, exports: Sequence[Export]) -> None:
    """Pack the folder as the kit does and build what comes of it. Raises PackError."""
    from flashinfer_bench.agents import pack_solution_from_files
    from flashinfer_bench.data import BuildSpec

    (export,) = exports
    made = {Path(name).name for name in kit_files(export) if name.startswith(KIT_FOLDER)}
    solution = pack_solution_from_files(
        path=str(root / KIT_FOLDER),
        spec=BuildSpec(
            language="python",  # type: ignore[arg-type] # the same builder, without Triton
            target_hardware=["cuda"],
            entry_point=KIT_ENTRY_POINT,
        ),
        name=export.name,
        definition=export.content["definition"],
        author=export.content["author"],
    )
    if {source.path for source in solution.sources} != made:
        raise PackError(f"{export.name}: the kit's packer would not take all files")
    validate(solution.model_dump_json().encode())


# --- SOL-ExecBench and Hugging Face's kernels -----------------------------------------------------

Known = TypeVar("Known")


def translated(export: Export, known: Mapping[str, Known], where: str) -> list[Known]:
    """What `known` has for each of the solution's requirements, by their canonical names. Raises
    PackError: one of them is not known there."""
    names = [canonicalize_name(r.name) for r in requirements(export.solution)]
    if absent := [name for name in names if name not in known]:
        raise PackError(f"{export.name} needs {', '.join(absent)}, which {where} does not have")
    return [known[name] for name in names]


B200, LOCAL = "B200", "LOCAL"

# By what is installed: (language, dependency). SOL-ExecBench depends on apache-tvm-ffi itself, and
# torch on filelock: they are there and have no names among its libraries.
LIBRARIES: dict[str, tuple[str, str]] = {
    "torch": ("pytorch", "torch"),
    "nvidia-cutlass-dsl": ("cute_dsl", "cutlass"),
    "triton": ("triton", "triton"),
    "apache-tvm-ffi": ("", ""),
    "filelock": ("", ""),
}


SOL_DEFINITION = f"020_{DEFINITION}"
"""The definition's name in its data set, part FlashInfer-Bench."""


def sol_files(export: Export, definition: "Definition") -> dict[str, str]:
    """A folder that it evaluates; its workloads are bare lines. Raises PackError for libraries that
    it has not."""
    problem = definition.model_dump(mode="json", exclude={"tags", "constraints"})
    lines = (json.dumps(trace["workload"]) + "\n" for trace in export.traces)
    return {
        "definition.json": to_json({**problem, "name": SOL_DEFINITION}),
        "workload.jsonl": "".join(lines),
        "solution.json": to_json(sol_solution(export)),
    }


def within(exports: Sequence[Export]) -> str:
    """How near to the reference the measured outputs were, for tolerances that are asked for."""
    (export,) = exports
    correctness = [trace["evaluation"]["correctness"] for trace in export.traces]
    ratios = [(c.get("extra") or {}).get("matched_ratios") or {} for c in correctness]
    worst = {name: min(r.get(name, 0.0) for r in ratios) for name in ratios[0]}
    said = ", ".join(f"{ratio:.4f} within {name}" for name, ratio in worst.items())
    return (
        f"{export.name}: matched at worst {said or 'unknown'} (rtol/atol); SOL-ExecBench asks for "
        "0.99, within 0.01/0.01 where a workload has no tolerance of its own"
    )


def sol_solution(export: Export) -> dict[str, Any]:
    """The Solution as SOL-ExecBench has it. Raises PackError for libraries that it has not."""
    libraries = translated(export, LIBRARIES, "SOL-ExecBench")
    languages = [language for language, _ in libraries if language not in ("", "pytorch")]
    spec = export.content["spec"]
    on_b200 = capability_of(B200) in [capability_of(name) for name in spec["target_hardware"]]
    return {
        **{key: export.content[key] for key in ("name", "author", "description")},
        "definition": SOL_DEFINITION,
        "spec": {
            "languages": languages or ["pytorch"],
            "target_hardware": [B200, LOCAL] if on_b200 else [LOCAL],
            "entry_point": spec["entry_point"],
            "dependencies": [name for _, name in libraries if name],
            "destination_passing_style": spec["destination_passing_style"],
        },
        "sources": export.content["sources"],
    }


KERNEL_NAME = re.compile(r"[a-z][-a-z0-9]*[a-z0-9]")
LICENSE = "Apache-2.0"

# By what is installed: (table of build.toml, name there), of the dependencies that kernels allows.
# torch is always there, with filelock and, for CUDA, triton.
GENERAL, CUDA = "general", "general.cuda"
DEPENDENCIES: dict[str, tuple[str, str]] = {
    "torch": ("", ""),
    "filelock": ("", ""),
    "triton": ("", ""),
    "apache-tvm-ffi": (GENERAL, "tvm-ffi"),
    "nvidia-cutlass-dsl": (CUDA, "nvidia-cutlass-dsl"),
}

FLAKE = """\
{
  inputs.kernel-builder.url = "github:huggingface/kernels";

  outputs =
    { self, kernel-builder, ... }:
    kernel-builder.lib.genKernelFlakeOutputs {
      path = ./.;
      inherit self;
    };
}
"""
CARD = """\
---
library_name: kernels
license: {license}
---

# {kernel}

{description}

`run(...)` takes the inputs of flashinfer-bench's definition `{definition}` in its
order, then the output to write. It was measured with, and needs: `pip install {needs}`.

```python
from kernels import get_kernel

run = get_kernel("ORG/{kernel}", version=1, trust_remote_code=True).run
```
"""


def build_toml(export: Export, kernel: str) -> str:
    """Raises PackError for a dependency that kernels does not allow."""
    depends = [d for d in translated(export, DEPENDENCIES, "the list of kernels") if all(d)]
    general, cuda = ([name for where, name in depends if where == t] for t in (GENERAL, CUDA))
    capabilities = [capability_of(name) for name in export.content["spec"]["target_hardware"]]
    archs = sorted({f"{c[0]}.{c[1]}" for c in capabilities if c is not None})
    lines = [
        f"[{GENERAL}]",
        f"name = {json.dumps(kernel)}",
        "version = 1",
        "edition = 5",
        f"license = {json.dumps(LICENSE)}",
        'backends = ["cuda"]',
        *([f"python-depends = {json.dumps(general)}"] if general else []),
        *(["", f"[{CUDA}]", f"python-depends = {json.dumps(cuda)}"] if cuda else []),
        "",
        "[torch-noarch]",
    ]  # strings and lists of strings are the same in JSON and in TOML
    if archs and None not in capabilities:
        # With an underscore: kernels 0.17.2 refuses the dash that its page of build.toml shows.
        lines.append(f"cuda_capabilities = {json.dumps(archs)}")
    return "\n".join(lines) + "\n"


def kernels_files(export: Export) -> dict[str, str]:
    """The repository. Raises PackError."""
    kernel, content = export.name.lower().replace("_", "-"), export.content
    if not KERNEL_NAME.fullmatch(kernel):
        raise PackError(f"{export.name}: kernels allows small letters, digits and dashes only")
    card = CARD.format(
        license=LICENSE.lower(),
        kernel=kernel,
        description=content["description"],
        definition=content["definition"],
        needs=" ".join(f"'{name}'" for name in content["spec"]["dependencies"]),
    )
    exported = f'from .{PACKAGE}.{export.module} import run\n\n__all__ = ["run"]\n'
    below = f"torch-ext/{kernel.replace('-', '_')}"
    return {
        "build.toml": build_toml(export, kernel),
        "flake.nix": FLAKE,
        "CARD.md": card,
        f"{below}/__init__.py": f"{content['description']!r}\n\n{exported}",
        **{f"{below}/{PACKAGE}/{path}": text for path, text in export.package.items()},
    }


# --- all forms ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """A form of an export."""

    help: str
    files: "Callable[[Sequence[Export], Definition], Mapping[str, str]]"  # of a tree, by path
    # Whether what was written to a directory is right; raises PackError.
    check: Callable[[Path, Sequence[Export]], None] = lambda root, exports: None
    several: str | None = None  # how many solutions it takes, as argparse says it; None: one
    said: Callable[[Sequence[Export]], str] = lambda exports: ""  # at the end, of what was written


TRACE, APPLY, FLASHINFER = "trace", "apply", "flashinfer"
FORMS = {
    TRACE: Form(
        "solutions and traces for the flashinfer-trace data set",
        lambda exports, _: trace_files(exports),
        check_trace,
        several="+",
    ),
    "kit": Form(
        "config.toml and sources for the flashinfer-bench starter kit",
        lambda exports, _: kit_files(*exports),
        check_kit,
    ),
    "sol": Form(
        "a problem with its solution for NVIDIA's SOL-ExecBench",
        lambda exports, definition: sol_files(exports[0], definition),
        said=within,
    ),
    "kernels": Form(
        "the source of a package for Hugging Face's kernels",
        lambda exports, _: kernels_files(*exports),
    ),
    APPLY: Form(
        "a data set for flashinfer_bench.apply",
        apply_files,
        check_apply,
        several="*",
        said=lambda exports: ", ".join(f"T={t}: {name}" for t, name in fastest(exports).items()),
    ),
    FLASHINFER: Form(
        "a folder for FlashInfer's Trace Apply",
        lambda exports, definition: flashinfer_files(exports[0], definition),
        check_flashinfer,
    ),
}


def collect(
    names: Sequence[str],
    author: str | None,
    results: Sequence[Path],
    definition: Entry = DEFAULT,
    baseline: str | None = None,
    **options: Any,
) -> list[Export]:
    """The solutions with their evidence among the results; where none was named, those that have
    some. One of them is the data set's baseline, on request. `options` are those of
    `evidence.back`. Raises Refused, PackError, UsageError."""
    chosen = select(generations(definition=definition), [Path(name).name for name in names])
    first = [g.name for g in select(chosen, [Path(baseline).name])] if baseline else []
    found = read_evaluations(results, definition.name)
    exports, refused = [], []
    for generation in chosen:
        export = export_of(generation, BASELINE if generation.name in first else author)
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


def write_all(root: Path, files: Mapping[str, str]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8", newline="\n")


def write(form: Form, output: Path, exports: Sequence[Export], of: "Definition") -> list[str]:
    """Write the tree and check it; its files. What is not right leaves nothing. Raises PackError,
    and UsageError where `output` holds something: it could be mixed up."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"{output} is there already: name a new or an empty directory")
    output.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        made.chmod(0o755)  # mkdtemp's are for their maker alone
        files = form.files(exports, of)
        write_all(made, files)
        form.check(made, exports)
        made.replace(output)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return list(files)
