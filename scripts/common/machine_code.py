"""Digests of machine code.

A digest tells a move of sources from a change of machine code. It covers the PTX of a compiled host
function's kernels, and the launches in its MLIR: grid, cluster, shared memory and TMA descriptors
are not in PTX. The names of entries, which follow from the Python sources, become numbers. The
compiler's output depends on its version, so digests are compared only if versions match. A peer's
digest covers its Triton kernels, as text without docstrings and comments. Python around compiled
functions is not covered: the tests cover it.
"""

import ast
import functools
import hashlib
import importlib.metadata
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scripts.common.program import RESULTS_DIR

DIGESTS = "kernels.json"
"""The file of digests in a record's directory, and in `results/` that of the present sources. Its
`hashes` are of sources that gave these digests: several of a solution, separated by spaces, where
the record's rows were measured with several."""
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
        if was not in then["hashes"].get(solution, "").split():
            continue
        if solution in then["triton"]:
            if then["triton"][solution] == triton_digest(sources):
                return True
        elif then["versions"] == now["versions"] and kernels(then) == kernels(now):
            return True
    return False
