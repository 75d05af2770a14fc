"""Compiles kernels, each once: remembered by the process and kept on disk."""

import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64, Uint8
from cutlass._mlir import ir
from cutlass.cute.runtime import load_module, make_fake_stream, make_fake_tensor

from ..cache import KernelCache, cache_dir
from ..closure import import_closure

ENTRY_POINT = "launch"
PACKAGE_ROOT = Path(__file__).resolve().parents[1]
COMPILE_OPTIONS = "--enable-tvm-ffi --gpu-arch={arch}"
DSL_PREFIX = "CUTE_DSL_"
"""Prefix of the environment variables that the DSL reads; some of them change its output."""
WITHOUT_EFFECT = re.compile(
    f"{DSL_PREFIX}(LOG_|JIT_|CACHE_DIR|NO_CACHE|DISABLE_FILE_CACHING|(SHOW|FILTER)_STACKTRACE)"
)
"""The variables of this prefix that change no code: SGLang sets two of them in its processes."""
HOST_CPUS = {"x86_64": ("x86-64", "+sse2"), "aarch64": ("generic", "+neon")}
"""The oldest CPU of a machine in LLVM's words, and a feature that it has. LLVM would take the CPU
that it runs on, and the host code of a file would not run on an older one."""

DSL_TYPES = {
    torch.float32: Float32,
    torch.bfloat16: BFloat16,
    torch.float8_e4m3fn: Float8E4M3FN,
    torch.int32: Int32,
    torch.int64: Int64,
    torch.float8_e8m0fnu: Uint8,
}
"""The compiler's types by torch's. Exponents alone (e8m0) are passed as bytes."""


@dataclass(frozen=True)
class Extent:
    """A size that is known only when the kernel is called. Equal names are equal sizes."""

    name: str
    divisor: int = 1


@dataclass(frozen=True)
class Tensor:
    """A tensor argument, row-major unless `strides` are given."""

    dtype: Any
    shape: tuple[int | Extent, ...]
    align: int = 16  # bytes that its address is a multiple of
    strides: tuple[int | Extent, ...] | None = None


@dataclass(frozen=True)
class Scalar:
    """A scalar argument."""

    dtype: Any


Argument = Tensor | Scalar | None
"""An argument that is None here is None in every call."""

_lock = threading.Lock()
"""The DSL's compiler is not thread-safe."""
_modules: list[Any] = []
"""Loaded modules: the code of a function lives as long as its module."""


class CompiledOnce:
    """Cache of the functions that `make` compiles, by its arguments. One thread at a time compiles.

    Within a stream capture no kernel may be compiled or loaded: a call with new arguments raises a
    RuntimeError.
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
                    "a kernel that the call needs is not loaded yet, and a stream capture is "
                    "under way: before it, warm up by a call with as many tokens"
                )
            with _lock:
                function = self.functions.get(arguments)
                if function is None:
                    function = self.functions[arguments] = self.make(*arguments)
        return function


def compiled(kernel: type, parameters: tuple, arguments: Sequence[Argument], arch: str) -> Any:
    """Return the compiled host function of a kernel. Load it if it is on disk (`is_on_disk`).

    Args:
        kernel: class whose `__call__` is the jitted host function; its last argument is the stream.
        parameters: the constructor's, identified by their `repr`.
        arguments: those of the returned TVM-FFI function. It takes the caller's stream itself.
        arch: target, `sm_90a` for example.
    """

    def build() -> Any:
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        options = COMPILE_OPTIONS.format(arch=arch)
        return cute.compile(kernel(*parameters), *fakes(arguments), stream, options=options)

    directory = cache_dir()
    if directory is None:
        return build()
    cache = KernelCache(directory, _load, _export)
    return cache.get(description(kernel, parameters, arguments, arch), build)


def is_on_disk(kernel: type, parameters: tuple, arguments: Sequence[Argument], arch: str) -> bool:
    """Return True if `compiled` would find the function on disk."""
    directory = cache_dir()
    return directory is not None and KernelCache(directory).has(
        description(kernel, parameters, arguments, arch)
    )


def description(
    kernel: type, parameters: tuple, arguments: Sequence[Argument], arch: str
) -> dict[str, str]:
    """Return everything that the machine code of a kernel depends on, by name."""
    return {
        # Without its module: the package's own name differs from one packed solution to the next.
        "kernel": kernel.__name__,
        "parameters": repr(parameters),
        "arguments": repr(tuple(arguments)),
        "options": COMPILE_OPTIONS.format(arch=arch),
        "host": platform.machine(),
        "environment": repr(sorted(environment().items())),
        "versions": ", ".join(_versions()),
        "toolkit": repr(getattr(cutlass, "CUDA_VERSION", None)),
        # This file too: it turns the descriptions of the arguments into those of the compiler.
        "sources": _source_digest(_source(kernel), Path(__file__)),
    }


def environment() -> dict[str, str]:
    """Return the environment variables that may change the DSL's output."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(DSL_PREFIX) and not WITHOUT_EFFECT.match(name)
    }


def fakes(arguments: Sequence[Argument]) -> list[Any]:
    """Return the compiler's stand-ins for real arguments."""
    extents: dict[Extent, Any] = {}
    stand_ins: list[Any] = []

    def size_of(size: int | Extent) -> Any:
        if isinstance(size, int):
            return size
        if size not in extents:
            extents[size] = cute.sym_int64(divisibility=size.divisor)
        return extents[size]

    for argument in arguments:
        if not isinstance(argument, Tensor):
            stand_ins.append(None if argument is None else argument.dtype(0))
            continue
        shape = [size_of(size) for size in argument.shape]
        stride: list[Any] = [1]
        for size in reversed(shape[1:]):
            stride.insert(0, size if stride[0] == 1 else stride[0] * size)
        if argument.strides is not None:
            stride = [size_of(size) for size in argument.strides]
        stand_ins.append(
            make_fake_tensor(
                argument.dtype, tuple(shape), tuple(stride), assumed_align=argument.align
            )
        )
    return stand_ins


def _load(path: Path) -> Any:
    module = load_module(str(path), enable_tvm_ffi=True)
    _modules.append(module)
    return getattr(module, ENTRY_POINT)


def _export(function: Any, path: Path) -> None:
    """Write a function as an object file for every CPU of this machine's kind."""
    cpu, feature = HOST_CPUS[platform.machine()]
    parse = ir.Attribute.parse  # type: ignore[attr-defined]
    with function.ir_module.context:
        attributes = {
            "target_cpu": parse(f'"{cpu}"'),
            # Without it LLVM adds the features of its own CPU.
            "target_features": parse(f'#llvm.target_features<["{feature}"]>'),
        }
        for operation in function.ir_module.body.operations:
            if operation.operation.name == "llvm.func":
                for name, value in attributes.items():
                    operation.operation.attributes[name] = value
    function.export_to_c(str(path), function_name=ENTRY_POINT)


@functools.cache
def _versions() -> tuple[str, ...]:
    packages = ("nvidia-cutlass-dsl", "apache-tvm-ffi")
    return tuple(f"{package}=={importlib.metadata.version(package)}" for package in packages)


def _source(cls: type) -> Path:
    """Return the file that defines a class."""
    file = sys.modules[cls.__module__].__file__
    assert file is not None
    return Path(file)


@functools.cache
def _source_digest(*modules: Path) -> str:
    """Return a digest of these modules and of all they import from this package."""
    digest = hashlib.sha256()
    for path in import_closure(PACKAGE_ROOT, *modules):
        digest.update(path.relative_to(PACKAGE_ROOT).as_posix().encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()
