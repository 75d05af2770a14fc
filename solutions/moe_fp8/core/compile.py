"""Compiled kernels, kept on disk so that a new process does not compile again.

An entry is a directory named by everything that decides the machine code: the kernel's class and
parameters, the sources it was written in, the versions of the DSL and of TVM-FFI, the target. It
holds the object file and its digest; it appears by one atomic rename, so it is whole or absent,
and an object whose digest does not match is dropped and built again.
"""

import functools
import hashlib
import importlib.metadata
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream
from filelock import FileLock

from .closure import import_closure

CACHE_VARIABLE = "MOE_FP8_CACHE_DIR"
ENTRY_POINT = "launch"
OBJECT, DIGEST = "kernel.o", "sha256"
PACKAGE_ROOT = Path(__file__).resolve().parents[1]


def cache_dir() -> Path | None:
    """Where compiled kernels are kept: `$MOE_FP8_CACHE_DIR`, else under the user's cache directory.

    None (nothing is kept) when the variable is set to the empty string.
    """
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen is not None:
        return Path(chosen) if chosen else None
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / PACKAGE_ROOT.name / "kernels"


def compiled(kernel: Any, parameters: tuple, fake_arguments: Callable[[], tuple], arch: str) -> Any:
    """The compiled host function of a kernel object, from disk when it is there.

    Args:
        kernel: object whose `__call__` is the jitted host function; its last argument is the
            stream, which the compiled function takes from the caller's environment.
        parameters: everything besides the sources that the machine code depends on; its `repr`
            must identify it.
        fake_arguments: makes the symbolic arguments; called only when something is compiled.
        arch: target, `sm_90a` for example.

    Returns:
        A TVM-FFI function of the host function's arguments without the stream.
    """

    def build() -> Any:
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        options = f"--enable-tvm-ffi --gpu-arch={arch}"
        return cute.compile(kernel, *fake_arguments(), stream, options=options)

    directory = cache_dir()
    if directory is None:
        return build()
    module = sys.modules[type(kernel).__module__].__file__
    assert module is not None
    name = type(kernel).__name__
    described = (name, parameters, arch, _versions(), _source_digest(Path(module)))
    entry = directory / f"{name}-{hashlib.sha256(repr(described).encode()).hexdigest()[:32]}"
    function = _load(entry)
    if function is not None:
        return function
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # One process compiles, the others wait and load.
        with FileLock(f"{entry}.lock"):
            function = _load(entry)
            if function is None:
                function = build()
                _store(function, entry)
    except OSError as error:
        warnings.warn(
            f"compiled kernels cannot be kept in {directory} ({error}); set {CACHE_VARIABLE} "
            "to a writable directory",
            RuntimeWarning,
            stacklevel=2,
        )
        function = function or build()
    return function


def _load(entry: Path) -> Any | None:
    """The function in a cache entry; None when there is none, or it is damaged (then dropped)."""
    try:
        expected = (entry / DIGEST).read_text()
        content = (entry / OBJECT).read_bytes()
    except (OSError, UnicodeDecodeError):
        expected, content = "", b""
    if content and hashlib.sha256(content).hexdigest() == expected:
        module = cute.runtime.load_module(str(entry / OBJECT), enable_tvm_ffi=True)
        function = getattr(module, ENTRY_POINT)
        _MODULES[entry] = module
        return function
    shutil.rmtree(entry, ignore_errors=True)
    return None


_MODULES: dict[Path, Any] = {}
"""Loaded modules: the code of a function lives as long as its module."""


def _store(function: Any, entry: Path) -> None:
    """Put a compiled function where `_load` finds it."""
    draft = Path(tempfile.mkdtemp(prefix=f".{entry.name}-", dir=entry.parent))
    try:
        function.export_to_c(str(draft / OBJECT), function_name=ENTRY_POINT)
        digest = hashlib.sha256((draft / OBJECT).read_bytes()).hexdigest()
        (draft / DIGEST).write_text(digest)
        os.rename(draft, entry)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@functools.cache
def _versions() -> tuple[str, ...]:
    packages = ("nvidia-cutlass-dsl", "apache-tvm-ffi")
    return tuple(f"{package}=={importlib.metadata.version(package)}" for package in packages)


@functools.cache
def _source_digest(module: Path) -> str:
    """Digest of a kernel's module and of all it imports from this package."""
    digest = hashlib.sha256()
    for path in import_closure(module, PACKAGE_ROOT):
        digest.update(path.relative_to(PACKAGE_ROOT).as_posix().encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()
