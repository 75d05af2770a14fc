"""Compiled kernels with their PTX on disk, beside the emulator's own library.

Each lies under the key of the kernel cache, which is everything that its machine code depends on;
the key also covers the emulator, and of a kernel that a test defines the tests and the package.
"""

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path

from ptxemu import build

TESTS = Path(__file__).parents[1]


@functools.cache
def kernels() -> Path:
    return build.library().parent / "kernels"


def contents(directory: Path) -> bytes:
    """Digest of all modules below a directory."""
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*.py")):
        digest.update(f"{path.relative_to(directory)}\0".encode() + path.read_bytes() + b"\0")
    return digest.digest()


def use(monkeypatch) -> None:
    """Look for what the package compiles in this directory, and keep it there."""
    from moe_fp8 import cache
    from moe_fp8.kernels import compile

    digest_of: Callable[..., str] = compile._source_digest

    def source_digest(*modules: Path) -> str:
        root = compile.PACKAGE_ROOT
        if all(path.is_relative_to(root) for path in modules):
            return digest_of(*modules)
        return hashlib.sha256(contents(root) + contents(TESTS)).hexdigest()

    monkeypatch.setenv(cache.CACHE_VARIABLE, str(kernels()))
    monkeypatch.setattr(compile, "_source_digest", source_digest)
