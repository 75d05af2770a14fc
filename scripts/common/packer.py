"""The generations, and our solutions as they are packed.

A generation is a file of solutions/moe_fp8 with a literal SOLUTION at its top level. Its packed
form is the closure of its relative imports and an entry file that loads them, the same bytes on
every machine.
"""

import ast
import functools
import json
import os
import string
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from moe_fp8.closure import PACKAGE, ClosureError, import_closure

from scripts.common.definitions import DEFAULT, MOE, MoeDefinition
from scripts.common.options import select_names
from scripts.common.program import (
    PACKAGE_DIR,
    PACKED_DIR,
    ROOT,
    Failure,
    UsageError,
    write_file,
)

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
