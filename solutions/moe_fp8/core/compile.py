"""Compiles kernels, each once: remembered by the process and kept on disk."""

import functools
import hashlib
import importlib.metadata
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cutlass.cute as cute
import torch
from cutlass.cute.runtime import load_module, make_fake_stream, make_fake_tensor

from .closure import import_closure
from .kernel_cache import KernelCache, cache_dir

ENTRY_POINT = "launch"
PACKAGE_ROOT = Path(__file__).resolve().parents[1]
OPTIONS = "--enable-tvm-ffi --gpu-arch={arch}"
DSL_VARIABLES = "CUTE_DSL_"
"""Beginning of the environment variables that the DSL reads; some of them change its output."""


@dataclass(frozen=True)
class Extent:
    """A size that is known only when the kernel is called; the same name is the same size."""

    name: str
    divisor: int = 1


@dataclass(frozen=True)
class Tensor:
    """A row-major tensor argument: element type, shape, bytes that its address is a multiple of."""

    dtype: Any
    shape: tuple[int | Extent, ...]
    align: int = 16

    def __repr__(self) -> str:
        return f"Tensor({self.dtype.__name__}, {self.shape}, align={self.align})"


@dataclass(frozen=True)
class Scalar:
    """A scalar argument."""

    dtype: Any

    def __repr__(self) -> str:
        return f"Scalar({self.dtype.__name__})"


_lock = threading.Lock()
"""The DSL's compiler is not made for two threads of a process."""
_modules: list[Any] = []
"""Loaded modules: the code of a function lives as long as its module."""


class CompiledOnce:
    """Remembers what a function compiled for which arguments; of several threads one compiles.

    Raises, when called:
        RuntimeError: nothing is compiled for these arguments yet and the current stream is being
            captured: neither compiling nor loading a kernel may happen within a capture.
    """

    def __init__(self, make: Callable[..., Any]):
        functools.update_wrapper(self, make)
        self.make = make
        self.functions: dict[tuple, Any] = {}

    def __call__(self, *arguments: Any) -> Any:
        function = self.functions.get(arguments)
        if function is None:
            if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "a kernel that the call needs is not compiled yet, and a stream capture is "
                    "under way: before it, warm up by a call with as many tokens"
                )
            with _lock:
                function = self.functions.get(arguments)
                if function is None:
                    function = self.functions[arguments] = self.make(*arguments)
        return function


def compiled(
    kernel: type, parameters: tuple, arguments: Sequence[Tensor | Scalar], arch: str
) -> Any:
    """The compiled host function of a kernel, from disk where it is there.

    Args:
        kernel: class whose `__call__` is the jitted host function; its last argument is the
            stream, which the compiled function takes from the caller's environment.
        parameters: the constructor's arguments; their `repr` must identify them.
        arguments: those of the host function before the stream.
        arch: target, `sm_90a` for example.

    Returns:
        A TVM-FFI function of the host function's arguments without the stream.
    """

    def build() -> Any:
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        options = OPTIONS.format(arch=arch)
        return cute.compile(kernel(*parameters), *fakes(arguments), stream, options=options)

    directory = cache_dir()
    if directory is None:
        return build()
    cache = KernelCache(directory, _load, _export)
    return cache.get(made_of(kernel, parameters, arguments, arch), build)


def made_of(
    kernel: type, parameters: tuple, arguments: Sequence[Tensor | Scalar], arch: str
) -> dict[str, str]:
    """Everything that the machine code of a kernel depends on, by name."""
    source = sys.modules[kernel.__module__].__file__
    assert source is not None
    return {
        "kernel": kernel.__name__,
        "parameters": repr(parameters),
        "arguments": repr(tuple(arguments)),
        "options": OPTIONS.format(arch=arch),
        "environment": repr(
            sorted(item for item in os.environ.items() if item[0].startswith(DSL_VARIABLES))
        ),
        "versions": ", ".join(_versions()),
        # This file too: it makes the arguments that the compiler sees of their descriptions.
        "sources": _source_digest(Path(source), Path(__file__)),
    }


def fakes(arguments: Sequence[Tensor | Scalar]) -> list[Any]:
    """What the compiler is given in place of real arguments."""
    extents: dict[Extent, Any] = {}
    made: list[Any] = []
    for argument in arguments:
        if isinstance(argument, Scalar):
            made.append(argument.dtype(0))
            continue
        shape = []
        for size in argument.shape:
            if isinstance(size, Extent) and size not in extents:
                extents[size] = cute.sym_int64(divisibility=size.divisor)
            shape.append(extents[size] if isinstance(size, Extent) else size)
        stride: list[Any] = [1]
        for size in reversed(shape[1:]):
            stride.insert(0, size if stride[0] == 1 else stride[0] * size)
        made.append(
            make_fake_tensor(
                argument.dtype, tuple(shape), tuple(stride), assumed_align=argument.align
            )
        )
    return made


def _load(path: Path) -> Any:
    module = load_module(str(path), enable_tvm_ffi=True)
    _modules.append(module)
    return getattr(module, ENTRY_POINT)


def _export(function: Any, path: Path) -> None:
    function.export_to_c(str(path), function_name=ENTRY_POINT)


@functools.cache
def _versions() -> tuple[str, ...]:
    packages = ("nvidia-cutlass-dsl", "apache-tvm-ffi")
    return tuple(f"{package}=={importlib.metadata.version(package)}" for package in packages)


@functools.cache
def _source_digest(*modules: Path) -> str:
    """Digest of these modules and of all they import from this package."""
    digest = hashlib.sha256()
    for path in sorted({p for module in modules for p in import_closure(module, PACKAGE_ROOT)}):
        digest.update(path.relative_to(PACKAGE_ROOT).as_posix().encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()
