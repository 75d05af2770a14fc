"""Connects the DSL's compiled host code to the emulator.

The DSL's JIT links host code to a runtime library that exports `_cuda*` symbols. CUTE_DSL_LIBS
points it to the emulator's core instead, whose `_cuda*` symbols call back into this module. The PTX
of a kernel is found through the fat binary that is embedded beside it in the compiled module, so
that two compilations with one kernel name are not mixed up.
"""

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import json
import os
import sys
import tempfile
import traceback
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import build, noise


class EmulationError(RuntimeError):
    """The kernel did what hardware would not survive, or what the emulator does not model."""


class Range(NamedTuple):
    """Memory that kernels may use; `keep` is an object that must live as long."""

    first: int
    end: int
    label: str
    keep: Any


class _Kernel(NamedTuple):
    ptx: str
    name: str


arch = "sm_90a"
multiprocessors = 4
ranges: dict[Any, Range] = {}
reports: list = []
"""One `engine.Report` a launch."""
ptx_transform: Callable[[str], str] | None = None
"""Applied to a module's PTX before every launch: breaks a kernel on purpose."""

_ptx_of_image: dict[str, str] = {}  # digest of a fat binary -> PTX text
_handles: dict[int, Any] = {}
_last_error: BaseException | None = None
_installed = False


@functools.cache
def lib() -> ctypes.CDLL:
    """The core, built if it is not there yet."""
    library = ctypes.CDLL(str(build.library()))
    library.ptxemu_set_callbacks(*_CALLBACKS)
    return library


# --- memory that kernels may use ----------------------------------------------------------------


def register_range(first: int, size: int, label: str, keep: Any = None) -> object:
    """Declare `size` bytes as legal for kernels; returns the key to take them out of `ranges`."""
    token = object()
    ranges[token] = Range(first, first + size, label, keep)
    return token


def register_tensor(tensor: torch.Tensor, keep: bool = True) -> object:
    """Declare the memory that a CPU tensor spans as legal for kernels."""
    span = 0
    if tensor.numel():
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        span = (last + 1) * tensor.element_size()
    label = f"tensor {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    return register_range(tensor.data_ptr(), span, label, tensor if keep else None)


# --- what the compiled host code calls ----------------------------------------------------------


def _guarded(failure: int) -> Callable:
    """No exception may pass through the host code: it is kept for `raising_own_errors`."""

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def wrapper(*args):
            global _last_error
            try:
                return function(*args)
            except BaseException as error:
                _last_error = error
                if isinstance(error, EmulationError):
                    print(f"ptxemu: {error}", file=sys.stderr)
                else:
                    traceback.print_exc()
                return failure

        return wrapper

    return decorate


@contextlib.contextmanager
def raising_own_errors() -> Iterator[None]:
    """Around a call of compiled host code: what it launched has run when it returns, and what went
    wrong below it is what is raised."""
    from . import engine

    global _last_error
    _last_error = None
    try:
        yield
        engine.settle()
    except Exception as error:
        engine.abandon()
        if _last_error is not None and error is not _last_error:
            raise _last_error from error
        raise


def _handle_of(value: Any) -> int:
    handle = 16 * (len(_handles) + 1)
    _handles[handle] = value
    return handle


FAT_BINARY = 0xBA55ED50


@_guarded(0)
def _on_load(image: int) -> int:
    magic = ctypes.c_uint32.from_address(image).value
    if magic != FAT_BINARY:
        raise EmulationError(f"unexpected device image, magic {magic:#x}")
    header = ctypes.c_uint16.from_address(image + 6).value
    size = ctypes.c_uint64.from_address(image + 8).value
    digest = hashlib.sha1(ctypes.string_at(image, header + size)).hexdigest()
    if digest not in _ptx_of_image:
        raise EmulationError(
            "no PTX is known for this device image; call ptxemu.install() before importing cutlass"
        )
    return _handle_of(_ptx_of_image[digest])


@_guarded(0)
def _on_get_kernel(library: int, name: bytes) -> int:
    return _handle_of(_Kernel(_handles[library], name.decode()))


class _Dim3(ctypes.Structure):
    _fields_ = [("x", ctypes.c_uint32), ("y", ctypes.c_uint32), ("z", ctypes.c_uint32)]

    def __iter__(self) -> Iterator[int]:
        return iter((self.x, self.y, self.z))


class _Attribute(ctypes.Structure):
    """cudaLaunchAttribute."""

    _fields_ = [
        ("id", ctypes.c_int32),
        ("pad", ctypes.c_char * 4),
        ("value", ctypes.c_uint32 * 16),
    ]


class _Config(ctypes.Structure):
    """cudaLaunchConfig_t."""

    _fields_ = [
        ("grid", _Dim3),
        ("block", _Dim3),
        ("smem", ctypes.c_uint64),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint32),
    ]


ATTRIBUTE_CLUSTER = 4  # cudaLaunchAttributeClusterDimension
ATTRIBUTE_PROGRAMMATIC = 6  # cudaLaunchAttributeProgrammaticStreamSerialization
LAUNCH_FAILURE = 719  # cudaErrorLaunchFailure


@_guarded(LAUNCH_FAILURE)
def _on_launch(handle: int, config_address: int, arguments: int) -> int:
    from . import engine

    kernel = _handles[handle]
    ptx = ptx_transform(kernel.ptx) if ptx_transform else kernel.ptx
    config = _Config.from_address(config_address)
    attributes = {a.id: tuple(a.value) for a in config.attributes[: config.count]}
    cluster = attributes.get(ATTRIBUTE_CLUSTER, (1, 1, 1))[:3]
    programmatic = bool(attributes.get(ATTRIBUTE_PROGRAMMATIC, (0,))[0])
    parameters = ctypes.cast(arguments, ctypes.POINTER(ctypes.c_size_t))
    grid, block = tuple(config.grid), tuple(config.block)
    engine.launch(ptx, kernel.name, grid, block, cluster, config.smem, parameters, programmatic)
    return 0


@_guarded(LAUNCH_FAILURE)
def _on_settle() -> int:
    from . import engine

    engine.settle()
    return 0


def _on_alloc(address: int, size: int) -> None:
    """Of cudaMalloc, and with size 0 of cudaFree."""
    if size:
        noise.fill(address, size)
        ranges[address] = Range(address, address + size, "cudaMalloc", None)
    else:
        ranges.pop(address, None)


_CALLBACKS = (
    ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(_on_launch),
    ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(_on_load),
    ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(_on_get_kernel),
    ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint64)(_on_alloc),
    ctypes.CFUNCTYPE(ctypes.c_int)(_on_settle),
)


# --- compiled functions on disk -----------------------------------------------------------------

OBJECT, PTX, IMAGES = "function.o", "kernels.ptx", "images.json"
ENTRY_POINT = "launch"


def export(function: Any, path: Path) -> None:
    """Write a function that was compiled with TVM-FFI, and its PTX, into one file for `load`."""
    with tempfile.TemporaryDirectory() as directory:
        code = Path(directory) / OBJECT
        function.export_to_c(str(code), function_name=ENTRY_POINT)
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
            file.write(code, OBJECT)
            file.writestr(PTX, function.artifacts.PTX)
            file.writestr(IMAGES, json.dumps(_images(function)))


def load(path: Path) -> Callable:
    """The function in a file that `export` wrote; it takes CPU tensors as a compiled one does."""
    from cutlass.cute.runtime import load_module

    from . import fakecuda

    with zipfile.ZipFile(path) as file, tempfile.TemporaryDirectory() as directory:
        ptx = file.read(PTX).decode()
        _ptx_of_image.update(dict.fromkeys(json.loads(file.read(IMAGES)), ptx))
        module = load_module(file.extract(OBJECT, directory), enable_tvm_ffi=True)
    _modules.append(module)
    return fakecuda.taking_cpu_tensors(getattr(module, ENTRY_POINT))


_modules: list[Any] = []
"""Loaded modules: the code of a function lives as long as its module."""


# --- installation -------------------------------------------------------------------------------


def _images(compiled: Any) -> list[str]:
    """Digests of the fat binaries in a function that was just compiled."""
    found = []
    for operation in (op.operation for op in compiled.ir_module.body.operations):
        if operation.name != "llvm.mlir.global":
            continue
        if operation.attributes["sym_name"].value.endswith("_binary"):
            blob = operation.attributes["value"].value_bytes
            size = int.from_bytes(blob[6:8], "little") + int.from_bytes(blob[8:16], "little")
            found.append(hashlib.sha1(blob[:size]).hexdigest())
    return found


def _remember_ptx(compiled: Any) -> None:
    """Which PTX belongs to the fat binaries of a function that was just compiled."""
    artifacts = compiled.artifacts
    if artifacts is not None and compiled.ir_module is not None and artifacts.PTX:
        _ptx_of_image.update(dict.fromkeys(_images(compiled), artifacts.PTX))


def install(target: str = "sm_90a", sm_count: int = 4) -> None:
    """Make the DSL run kernels here. Once a process, before anything imports the DSL.

    Args:
        target: what is compiled for where `--gpu-arch` does not say it.
        sm_count: the multiprocessors that schedulers are told of; a GPU's 132 or 148 launches the
            same CTAs as there.

    Raises:
        RuntimeError: the DSL has been imported already.
        build.NoCompiler, build.BuildError: the core must be built and cannot be.
    """
    global _installed, arch, multiprocessors
    if _installed:
        return
    if "cutlass" in sys.modules:
        raise RuntimeError("ptxemu.install() must run before cutlass is imported")
    arch, multiprocessors = target, sm_count
    lib()
    os.environ["CUTE_DSL_LIBS"] = os.pathsep.join(map(str, [build.library(), *_runtimes()]))
    os.environ["CUTE_DSL_KEEP"] = "ptx"
    # The PTX is read back from where the DSL dumps it, under the kernel's name, which may be that
    # of many kernels: a directory of this process's own, whatever it inherited.
    os.environ["CUTE_DSL_DUMP_DIR"] = _dump_directory().name
    os.environ["CUTE_DSL_DISABLE_FILE_CACHING"] = "1"
    os.environ.setdefault("CUTE_DSL_ARCH", target)

    from . import fakecuda

    fakecuda.install()
    from cutlass.base_dsl.jit_executor import JitExecutor
    from cutlass.cutlass_dsl.cuda_jit_executor import CudaDialectJitCompiledFunction

    # The DSL has read it. It differs from process to process, and what keeps compiled functions may
    # take the DSL's variables for a part of what they are made of.
    del os.environ["CUTE_DSL_DUMP_DIR"]
    compiled: Any = CudaDialectJitCompiledFunction
    initialise = compiled.__init__

    def remembering(self, *args, **kwargs):
        initialise(self, *args, **kwargs)
        _remember_ptx(self)

    compiled.__init__ = remembering
    executor: Any
    for executor in (compiled, JitExecutor):
        executor.run_compiled_program = _reporting(executor.run_compiled_program)
    _installed = True


def _runtimes() -> list[Path]:
    """The DSL's own runtimes, one a CUDA version. Before 4.8 the DSL puts that which it chooses in
    front of CUTE_DSL_LIBS, ahead of the core, unless it is named there already."""
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    roots = spec.submodule_search_locations if spec else None
    return [so for r in roots or [] for so in Path(r).glob("cu*/lib/libcute_dsl_runtime.so")]


@functools.cache
def _dump_directory() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="ptxemu_", ignore_cleanup_errors=True)


def _reporting(run: Callable) -> Callable:
    @functools.wraps(run)
    def wrapper(self, arguments):
        with raising_own_errors():
            return run(self, arguments)

    return wrapper
