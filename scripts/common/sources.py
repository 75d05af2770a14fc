"""Our solutions as they are packed, their hashes, the machines that can run a solution, and digests
of machine code.

A generation is a file of solutions/moe_fp8 with a literal SOLUTION at its top level. Its packed
form is the closure of its relative imports and an entry file that loads them, the same bytes on
every machine. A solution's hash is flashinfer-bench's own, over its packed sources. Every trace has
it, and so have rows that name a solution's sources.
"""

import ast
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import string
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from moe_fp8.closure import PACKAGE, ClosureError, import_closure

from scripts.common.definitions import DEFAULT, MOE, MoeDefinition
from scripts.common.options import select_names
from scripts.common.program import (
    BASELINES,
    PACKAGE_DIR,
    PACKED_DIR,
    PREFIX,
    RESULTS_DIR,
    ROOT,
    Failure,
    UsageError,
    short_name,
    write_file,
)

if TYPE_CHECKING:
    from flashinfer_bench.data import Solution
    from packaging.requirements import Requirement

HOPPER = ["NVIDIA_H100", "NVIDIA_H200"]
BLACKWELL = ["NVIDIA_B200", "NVIDIA_GB200", "NVIDIA_B300", "NVIDIA_GB300"]
DEFAULTS = {
    "author": "moe-fp8-cutedsl",
    "language": "python",
    "target_hardware": [*HOPPER, *BLACKWELL],
    "dependencies": ["torch", "nvidia-cutlass-dsl>=4.6.2,<4.9", "apache-tvm-ffi"],
}
"""Fields that SOLUTION may leave out: those of the solutions on this project's own kernels."""
KEYS = {"name", *DEFAULTS, "routings", "clamps"}

ENTRY_FILE = "main.py"
ENTRY = string.Template('''\
"""The solution $name: `run` of $where, however this file is loaded.

flashinfer-bench imports an entry file as a module of a package, FlashInfer's Trace Apply and
SOL-ExecBench as a top-level module, which has no relative imports. So the package beside this file
is loaded from here, under a name of its own: several solutions can be loaded in one process.
"""

import hashlib
import importlib
import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent / "$package"


def load_package() -> str:
    """Load the package in ROOT; its name, which no other sources and no other place have."""
    digest = hashlib.sha256(os.fsencode(ROOT))
    for path in sorted(ROOT.rglob("*.py")):
        digest.update(b"\\0" + os.fsencode(path.relative_to(ROOT)) + b"\\0" + path.read_bytes())
    name = f"${package}_{digest.hexdigest()[:16]}"
    if __package__:  # who unloads the package around this file unloads these modules with it
        name = f"{__package__}.{name}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            name, ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
        )
        package = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(package)
        except BaseException:
            del sys.modules[name]
            raise
    return name


$run
''')
"""The entry file of a packed solution. Its text is hashed with the sources: a change changes every
hash."""
RUN = 'run = importlib.import_module(f"{load_package()}.$module").run'
RUN_AT_SHAPE = """\
PACKAGE = load_package()
shape = importlib.import_module(f"{PACKAGE}.shape").MoeShape(
$shape)
run_of = importlib.import_module(f"{PACKAGE}.ladder.adapter").run_of
run = run_of(importlib.import_module(f"{PACKAGE}.$module").layer_at(shape), shape)"""
ADAPTER = Path("ladder", "adapter.py")
"""The file of `run_of`, which only the entry file of a solution at a shape imports."""


class PackError(Failure):
    """A generation that cannot be packed, with the file and the reason."""


@dataclass(frozen=True)
class Generation:
    """A generation file and its literals."""

    path: Path
    root: Path
    metadata: dict[str, Any]
    description: str
    definition: MoeDefinition = DEFAULT

    @property
    def name(self) -> str:
        return self.definition.packed_name(str(self.metadata["name"]))

    @property
    def path_below(self) -> Path:
        """The path of its packed form below a data set's solutions/."""
        definition = self.definition
        folder = Path(self.metadata["author"]) / definition.op_type / definition.name
        return folder / f"{self.name}.json"


def read_generation(path: Path, root: Path) -> Generation | None:
    """Return the generation in the file, or None if it has no SOLUTION. Nothing is imported."""
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    literals = {
        ast.unparse(target): node.value
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    }
    if "SOLUTION" not in literals:
        return None
    where = path.relative_to(root).as_posix()
    try:
        metadata = dict(ast.literal_eval(literals["SOLUTION"]))
    except (ValueError, TypeError):
        raise PackError(f"{where}: SOLUTION must be a literal dict") from None
    if "name" not in metadata or (unknown := sorted(metadata.keys() - KEYS)):
        wrong = f"has unknown {unknown}" if "name" in metadata else "lacks 'name'"
        raise PackError(f"{where}: SOLUTION {wrong}")
    description = ast.get_docstring(tree)
    if not description:
        raise PackError(f"{where}: no module docstring, which is the solution's description")
    return Generation(path, root, DEFAULTS | metadata, description)


def every_generation(root: Path = PACKAGE_DIR) -> list[Generation]:
    """Return the generations under `root` for all definitions that they are packed for; within a
    definition, in the order of the file names."""
    read = (read_generation(path, root) for path in sorted(root.rglob("*.py")))
    of_all_files = [generation for generation in read if generation is not None]
    files = dict[str, str]()
    for generation in of_all_files:
        if generation.name in files:
            both = f"{files[generation.name]} and {generation.path.name}"
            raise PackError(f"the name {generation.name} is used by {both}")
        files[generation.name] = generation.path.name
    return [
        replace(generation, definition=definition)
        for definition in MOE
        for generation in of_all_files
        if definition.takes(generation.metadata)
    ]


@functools.cache
def shipped() -> frozenset[str]:
    """Return the names of all solutions of the present sources."""
    return frozenset(generation.name for generation in every_generation())


def generations(root: Path = PACKAGE_DIR, definition: MoeDefinition = DEFAULT) -> list[Generation]:
    """Return the generations of one definition."""
    return [g for g in every_generation(root) if g.definition == definition]


def entry_file(name: str, where: Path, shape: dict[str, Any] | None) -> str:
    """Return the source of an entry file whose `run` is that of the module at `where` in the
    package beside it; with a `shape`, the `run` of its layer at that shape."""
    lines = "".join(f"    {key}={value!r},\n" for key, value in (shape or {}).items())
    run = string.Template(RUN_AT_SHAPE if shape else RUN)
    module = ".".join(where.with_suffix("").parts)
    return ENTRY.substitute(
        name=name,
        where=f"{PACKAGE}/{where.as_posix()}",
        package=PACKAGE,
        run=run.safe_substitute(module=module, shape=lines),
    )


def pack(generation: Generation) -> bytes:
    """Return the bytes of the generation's Solution JSON."""
    root, definition = generation.root, generation.definition
    shape = definition.packed_shape
    try:
        files = import_closure(root, generation.path, *([root / ADAPTER] if shape else []))
    except ClosureError as error:
        raise PackError(f"{generation.name}: {error}") from None
    metadata, where = generation.metadata, generation.path.relative_to(root)
    sources = [
        {
            "path": f"{PACKAGE}/{path.relative_to(root.resolve()).as_posix()}",
            "content": path.read_bytes().decode("utf-8").replace("\r\n", "\n"),
        }
        for path in files
    ]
    empty = [source["path"] for source in sources if not source["content"].strip()]
    if empty:
        raise PackError(f"{generation.name}: empty source files are not allowed: {empty}")
    solution = {
        "name": generation.name,
        "definition": definition.name,
        "author": metadata["author"],
        "description": generation.description,
        "spec": {
            "language": metadata["language"],
            "target_hardware": list(metadata["target_hardware"]),
            "entry_point": f"{ENTRY_FILE}::run",
            "dependencies": list(metadata["dependencies"]),
            "destination_passing_style": True,
        },
        "sources": [
            {"path": ENTRY_FILE, "content": entry_file(generation.name, where, shape)},
            *sources,
        ],
    }
    return (json.dumps(solution, indent=2, ensure_ascii=False) + "\n").encode()


def select(candidates: Sequence[Generation], names: Sequence[str]) -> list[Generation]:
    """Return the generations whose solutions are named, or all without names. Raises UsageError."""
    chosen = select_names((g.name for g in candidates), names)
    return [g for g in candidates if g.name in chosen]


# --- the packed files -----------------------------------------------------------------------------


def validate(packed: bytes, definition: Path = ROOT / DEFAULT.path) -> None:
    """Load the JSON as flashinfer-bench does and build it for the definition in that file, which
    imports its entry point. It is built in a directory of its own: cleaning up the shared one could
    remove the sources of a benchmark that runs at the same time."""
    from flashinfer_bench.compile import BuilderRegistry
    from flashinfer_bench.compile.builder import BuildError
    from flashinfer_bench.compile.builders import PythonBuilder, TritonBuilder
    from flashinfer_bench.data import Definition, Solution, load_json_file

    solution = Solution.model_validate_json(packed)
    registry = BuilderRegistry([b() for b in (TritonBuilder, PythonBuilder) if b.is_available()])
    with (
        tempfile.TemporaryDirectory(prefix="pack-") as directory,
        mock.patch.dict(os.environ, FIB_CACHE_PATH=directory),
    ):
        try:
            registry.build(load_json_file(Definition, definition), solution)
        except BuildError as error:
            raise PackError(f"{solution.name}: {error}") from error
        finally:
            registry.cleanup()


def is_ours(path: Path) -> bool:
    """True if the file is a solution that was packed under its name."""
    return f"The solution {path.stem}: `run` of ".encode() in path.read_bytes()


def write_packed(
    names: Sequence[str] = (),
    output: Path | None = None,
    root: Path = PACKAGE_DIR,
    build: bool = True,
    definition: MoeDefinition = DEFAULT,
) -> list[Path]:
    """Pack the named generations (all by default) into `output`. Return the paths of their JSON
    files.

    The default output is where flashinfer-bench looks for them. From there packed files are removed
    that no present generation has in that place: flashinfer-bench would run them, too, or refuse
    two solutions of one name. Up-to-date files are left alone. Files that were not packed are kept,
    except empty ones, which a crash leaves.

    Raises:
        PackError: a generation cannot be packed.
        UsageError: no generation has a name, or another file has a solution's path.
        OSError: the output cannot be written.
    """
    every = every_generation(root)
    packed: dict[Path, bytes] = {}
    for g in select([g for g in every if g.definition == definition], names):
        path = output / f"{g.name}.json" if output else PACKED_DIR / g.path_below
        if path.is_file() and path.stat().st_size and not is_ours(path):
            other = ", or name another --output" if output else ""
            raise UsageError(f"{path} is no solution of ours: move it{other}")
        packed[path] = pack(g)
    for path, content in packed.items():
        if not path.is_file() or path.read_bytes() != content:
            if build:
                validate(content, ROOT / definition.path)
            write_file(path, content)
    known = {PACKED_DIR / g.path_below for g in every}
    for path in () if output else PACKED_DIR.rglob("*.json"):
        if path not in known and is_ours(path):
            path.unlink(missing_ok=True)
    return list(packed)


# --- sources that have changed since a measurement ------------------------------------------------


@functools.cache
def packed(definition: MoeDefinition = DEFAULT) -> "dict[str, Solution]":
    """Return every solution of a definition as it would be packed now."""
    from flashinfer_bench.data import Solution

    try:
        return {
            g.name: Solution.model_validate_json(pack(g))
            for g in generations(definition=definition)
        }
    except (PackError, SyntaxError) as error:
        raise UsageError(f"the present sources cannot be packed: {error}") from None


def current(definition: MoeDefinition = DEFAULT) -> dict[str, str]:
    """Return the hash of every solution of a definition as it would be packed now."""
    return {name: solution.hash() for name, solution in packed(definition).items()}


def remark(hashes: Mapping[str, Collection[str]], what: str = "this run") -> str:
    """Return sentences that name our solutions with other sources now than were measured, and those
    whose measured sources are not known; empty if there are none."""
    now = dict(current())
    for other in MOE[1:]:
        if any(name.endswith(f"_{other.short}") for name in hashes):
            now |= current(other)
    ours = {
        name: set(was) for name, was in hashes.items() if name in now or name.startswith(PREFIX)
    }
    unknown = _names(n for n, was in ours.items() if "" in was)
    others = [
        n for n, was in ours.items() if "" not in was and not all(as_measured(n, w) for w in was)
    ]
    changed = _names(others)
    sentences = []
    if len(others) > 1 and len(others) == len(hashes):
        sentences.append(f"Since {what} the sources of all {len(others)} solutions have changed.")
    elif changed:
        noun, verb = ("source", "has") if len(changed) == 1 else ("sources", "have")
        sentences.append(f"Since {what} the {noun} of {_list(changed)} {verb} changed.")
    if unknown:
        sentences.append(f"It is not known which sources of {_list(unknown)} were measured.")
    return " ".join(sentences)


def as_measured(name: str, was: str) -> bool:
    """True if a solution's present sources have the hash `was`, or give the machine code that those
    with the hash gave. Only such measurements count as the present solution's."""
    for definition in MOE:
        if solution := packed(definition).get(name):
            texts = [source.content for source in solution.sources]
            return was == current(definition).get(name) or unchanged(name, was, texts)
    return False


def _names(solutions: Iterable[str]) -> list[str]:
    """Return short names; solutions of several definitions once, as their sources are the same."""
    of_another = re.compile(f"_({'|'.join(other.short for other in MOE[1:])})$")
    return list(dict.fromkeys(of_another.sub("", short_name(name)) for name in solutions))


def _list(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def changed_since(rows: Any, name: str) -> str:
    """Return the `remark` on a measurement of `rows`, on the solutions whose sources its rows
    name."""
    hashes = rows.hashes(name)
    return remark({solution: {was} for solution, was in hashes.items()}, "this measurement")


# --- digests of machine code ----------------------------------------------------------------------

# A digest tells a move of sources from a change of machine code. It covers the PTX of a compiled
# host function's kernels, and the launches in its MLIR: grid, cluster, shared memory and TMA
# descriptors are not in PTX. The names of entries, which follow from the Python sources, become
# numbers. The compiler's output depends on its version, so digests are compared only if versions
# match. A peer's digest covers its Triton kernels, as text without docstrings and comments. Python
# around compiled functions is not covered: the tests cover it.

DIGESTS = "kernels.json"
"""The file of digests in a record's directory, and in `results/` that of the present sources."""
MEASURED = "sm_90a"
"""The target of the GPUs that have records."""


def compiler_versions() -> dict[str, str]:
    """Return the versions that decide the compiler's output."""
    import cutlass

    return {
        "nvidia-cutlass-dsl": importlib.metadata.version("nvidia-cutlass-dsl"),
        "toolkit": str(getattr(cutlass, "CUDA_VERSION", None)),
    }


def triton_digest(sources: Iterable[str]) -> str:
    """Return a digest of the Triton kernels in the text of some modules, wherever they lie."""
    kernels = []
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and "jit" in map(_last_name, node.decorator_list):
                if ast.get_docstring(node) is not None:
                    del node.body[0]
                kernels.append(ast.unparse(node))
    return hashlib.sha256("\n\n".join(sorted(kernels)).encode()).hexdigest()[:16]


def _last_name(node: ast.expr) -> str:
    """Return `jit` for `jit`, `triton.jit` and calls of both."""
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def digest(ptx: str, mlir: str) -> str:
    """Return `<PTX>-<launches>`, each 16 hexadecimal digits."""
    names = re.findall(r"\.(?:entry|func)\s+(?:\([^)]*\)\s*)?([\w$]+)", ptx)
    names += re.findall(r"func\.func @(cutlass[\w$]+)", mlir)
    texts = normalised_ptx(ptx, names), launches(mlir, names)
    return "-".join(hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts)


def normalised_ptx(ptx: str, names: list[str]) -> str:
    """Return PTX without comments, version and blank lines, and with numbers for names."""
    ptx = re.sub(r"[ \t]*//[^\n]*|^\s*\.(?:loc|file|version)\b.*", "", ptx, flags=re.M)
    return re.sub(r"\n\s*\n+", "\n", _numbered(ptx, names))


def launches(mlir: str, names: list[str]) -> str:
    """Return the host function, with its types written out, and each kernel's shared memory."""
    types = dict(re.findall(r"^(![\w$]+) = (.*)$", mlir, flags=re.M))
    # Longest first: some names begin like others.
    alias = re.compile("|".join(map(re.escape, sorted(types, key=len, reverse=True))) or "$^")

    def resolved(text: str) -> str:
        return alias.sub(lambda match: resolved(types[match[0]]), text)

    host = mlir[mlir.index("func.func @cutlass") :]
    shared = re.findall(
        r"cuda\.kernel @([\w$]+)|memref\.alloca\(\).*: (!memref_smem\w*)$", mlir, re.M
    )
    lines = [kernel or re.sub(r".*\"(.*)\">", r"\1", types[memory]) for kernel, memory in shared]
    return _numbered("\n".join([resolved(host), *lines]), names)


def _numbered(text: str, names: list[str]) -> str:
    longest_first = sorted(names, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, longest_first)))
    return pattern.sub(lambda match: f"name{names.index(match[0])}", text)


def write_digests(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")


@functools.cache
def read_digests(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def unchanged(solution: str, was: str, sources: Iterable[str], results: Path = RESULTS_DIR) -> bool:
    """True if a record has the digests of a solution's kernels for sources with the hash `was`, and
    the kernels of its present sources have equal digests."""
    now = read_digests(results / DIGESTS)

    def kernels(content: dict[str, Any]) -> dict[str, str]:
        names = content["kernels"][solution]
        return {n: content["digests"][n] for n in names if n.startswith(MEASURED)}

    for then in map(read_digests, results.glob(f"*/*/{DIGESTS}")):
        if then["hashes"].get(solution) != was:
            continue
        if solution in then["triton"]:
            if then["triton"][solution] == triton_digest(sources):
                return True
        elif then["versions"] == now["versions"] and kernels(then) == kernels(now):
            return True
    return False


# --- the solutions that can run on a machine ------------------------------------------------------

# `spec.target_hardware` names GPUs, and `spec.dependencies` lists pip requirements. Both are free
# text in flashinfer-bench, and other people's data sets write them in their own ways. Only text
# that is understood can refuse a solution. An unknown name never does.

Capability = tuple[int, int]
"""Compute capability of a GPU: (9, 0) is sm_90."""

NEEDS_GPU = "needs a GPU"
UNSUPPORTED = "unsupported on"
NOT_INSTALLED = "not installed: pip install"
FOREIGN = "code of the data set, which runs only where --solutions names it or with --run-foreign"

GPUS: dict[Capability, str] = {
    (7, 0): "v100",
    (7, 5): "t4",
    (8, 0): "a100 a800 a30",
    (8, 6): "a10 a40 3090",
    (8, 9): "l4 l20 l40 l40s 4090",
    (9, 0): "h20 h100 h200 h800 gh200 hopper",
    (10, 0): "b100 b200 gb200",
    (10, 3): "b300 gb300",
    (12, 0): "5090",
}
CAPABILITIES = {word: capability for capability, words in GPUS.items() for word in words.split()}
"""Capabilities by the model's word in a GPU's name: 'NVIDIA H100 80GB HBM3' is an h100."""

# Solutions list these besides pip packages. This module does not check for them.
TOOLCHAINS = {"cuda", "cuda-toolkit", "nvcc", "cutlass", "cudnn", "python", "gcc", "g++"}


@dataclass(frozen=True)
class Machine:
    """The GPU's compute capability, None without a GPU, and the packages: they decide."""

    capability: Capability | None
    version: Callable[[str], str | None]


def installed_version(name: str) -> str | None:
    """Return the version of a distribution; '' if only a module of that name exists; else None."""
    from packaging.utils import canonicalize_name

    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        module = canonicalize_name(name).replace("-", "_")
        return "" if importlib.util.find_spec(module) else None


def this_machine(use_gpu: bool = True) -> Machine:
    """Return the present machine, on request as if it had no GPU."""
    import torch

    on_gpu = use_gpu and torch.cuda.is_available()
    return Machine(torch.cuda.get_device_capability(0) if on_gpu else None, installed_version)


def capability_of(name: str) -> Capability | None:
    """Return the compute capability of a GPU by name, or of 'sm_90' itself; None if not known."""
    for word in re.findall(r"[a-z0-9]+", name.lower().replace("sm_", "sm")):
        if word in CAPABILITIES:
            return CAPABILITIES[word]
        if number := re.fullmatch(r"sm(\d+)(\d)[af]?", word):
            return int(number[1]), int(number[2])
    return None


def requirements(solution: "Solution") -> "list[Requirement]":
    """Return the pip requirements among the solution's dependencies."""
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name

    wanted = []
    for text in solution.spec.dependencies:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        applies = requirement.marker is None or requirement.marker.evaluate()
        if applies and canonicalize_name(requirement.name) not in TOOLCHAINS:
            wanted.append(requirement)
    return wanted


def why_not(solution: "Solution", machine: Machine) -> str | None:
    """Return why the solution cannot run on the machine's GPU, in one line; None if it can."""
    if machine.capability is None:
        return NEEDS_GPU
    wanted = [capability_of(name) for name in solution.spec.target_hardware]
    known = sorted({capability for capability in wanted if capability is not None})
    if known and None not in wanted and machine.capability not in known:
        here, *there = (f"{major}{minor}" for major, minor in (machine.capability, *known))
        return f"{UNSUPPORTED} sm_{here} (needs sm_{'/'.join(there)})"
    absent = [str(r) for r in requirements(solution) if machine.version(r.name) is None]
    return f"{NOT_INSTALLED} {shlex.join(absent)}" if absent else None


def other_versions(solutions: "Iterable[Solution]", machine: Machine) -> list[str]:
    """Return remarks on packages whose version does not meet solutions' requirements."""
    asked: dict[str, list[str]] = {}
    for solution in solutions:
        for requirement in requirements(solution):
            version = machine.version(requirement.name)
            if version and not requirement.specifier.contains(version, prereleases=True):
                remark = f"{requirement.name} {version} is installed, {requirement} asked for"
                asked.setdefault(remark, []).append(solution.name)
    return [f"{remark} by {', '.join(names)}" for remark, names in asked.items()]


def own_hashes(packed: "Iterable[Solution]") -> frozenset[str]:
    """Return the hashes of this checkout's packed solutions that do not use others' kernels."""
    theirs = f"{PACKAGE}/{BASELINES}/"
    return frozenset(
        s.hash() for s in packed if not any(source.path.startswith(theirs) for source in s.sources)
    )


def is_peer(solution: "Solution", own: Collection[str]) -> bool:
    """True if the solution is someone else's, or ours on someone else's kernels: not among `own`,
    whoever its author field names."""
    return solution.hash() not in own


def split_available(
    solutions: "Sequence[Solution]", machine: Machine, own: Collection[str]
) -> "tuple[list[Solution], dict[str, str]]":
    """Return the solutions that can run here, and for each of the others the reason.

    On the CPU our `own` solutions run as their reference model. The others are GPU code.
    """
    gpu = machine.capability is not None
    return _split(solutions, lambda s: why_not(s, machine) if gpu or is_peer(s, own) else None)


def split_foreign(
    solutions: "Sequence[Solution]",
    packed: "Sequence[Solution]",
    named: Collection[str],
    run_foreign: bool,
) -> "tuple[list[Solution], dict[str, str]]":
    """Return the solutions whose code may run, and for each of the others the reason.

    Solutions that this checkout packs, known by their hashes, may run. Asking for a data set is not
    asking for the code of its solutions: these run only if their whole names are given, or all of
    them with --run-foreign.
    """
    ours = {s.hash() for s in packed}
    whole = set(named) - {short_name(s.name) for s in packed}  # `fused` is ours, not their `fused`
    return _split(
        solutions, lambda s: None if run_foreign or s.name in whole or s.hash() in ours else FOREIGN
    )


def _split(
    solutions: "Sequence[Solution]", reason: "Callable[[Solution], str | None]"
) -> "tuple[list[Solution], dict[str, str]]":
    """Return the solutions without a `reason` against them, and the reasons of the others."""
    reasons = {s.name: why for s in solutions if (why := reason(s))}
    return [s for s in solutions if not reason(s)], reasons
