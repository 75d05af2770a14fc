"""Connects the DSL's compiled host code to the emulator.

The DSL's JIT links host code to a runtime library that exports `_cuda*` symbols. CUTE_DSL_LIBS
names the emulator's core instead; its `_cuda*` symbols call back into this module. The PTX of a
kernel is found by the digest of the fat binary in the same compiled module, because two
compilations may use one kernel name.
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

from . import build, engine, fakecuda, noise
from .engine import EmulationError
from .memory import Range, ranges


class _Kernel(NamedTuple):
    ptx: str
    name: str


ptx_transform: Callable[[str], str] | None = None
"""Edits a module's PTX before every launch, to break a kernel on purpose."""

_ptx_of_image: dict[str, str] = {}  # digest of a fat binary -> PTX text
_handles: dict[int, Any] = {}
_last_error: BaseException | None = None
_installed = False


# --- callbacks of the core ----------------------------------------------------------------------


def _guarded(failure: int) -> Callable:
    """Return a decorator that returns `failure` instead of raising.

    An exception cannot pass through compiled host code: `raising_own_errors` raises it later.
    """

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
            "no PTX is known for this device image: compile it, or export it, after "
            "ptxemu.install(), which comes before cutlass is imported"
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
    engine.settle()
    return 0


def _on_alloc(address: int, size: int) -> None:
    """Register memory of cudaMalloc; with size 0, withdraw memory of cudaFree."""
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


# --- calls of compiled host code ----------------------------------------------------------------


@contextlib.contextmanager
def raising_own_errors() -> Iterator[None]:
    """Call compiled host code in this context.

    All launches have run when the context ends. It raises the emulator's own error instead of the
    host code's.
    """
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


def _taking_cpu_tensors(function: Callable) -> Callable:
    """Return a function compiled with TVM-FFI that takes CPU tensors instead of CUDA tensors."""

    @functools.wraps(function, updated=())
    def call(*args, **kwargs):
        tokens: list = []
        try:
            args = fakecuda.to_device(args, tokens)
            kwargs = fakecuda.to_device(kwargs, tokens)
            with raising_own_errors():
                return function(*args, **kwargs)
        finally:
            for token in tokens:
                ranges.pop(token, None)

    return call


# --- compiled functions on disk -----------------------------------------------------------------

KEPT, PTX, IMAGES = ".ptxemu", "kernels.ptx", "images.json"
"""Ending of the file with an exported function's PTX, beside the object file, and its members."""


def _keeping_ptx(export: Callable) -> Callable:
    """Return the DSL's `export_to_c`, which also writes the PTX for `_finding_ptx`."""

    @functools.wraps(export)
    def export_to_c(self, path: str, *args, **kwargs):
        export(self, path, *args, **kwargs)
        with zipfile.ZipFile(path + KEPT, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
            file.writestr(PTX, self.artifacts.PTX)
            file.writestr(IMAGES, json.dumps(_images(self)))

    return export_to_c


def _finding_ptx(load: Callable) -> Callable:
    """Return the DSL's `load_module` for files of `_keeping_ptx`."""

    @functools.wraps(load)
    def load_module(path: str, *, enable_tvm_ffi: bool = False):
        if Path(path + KEPT).exists():
            with zipfile.ZipFile(path + KEPT) as file:
                ptx = file.read(PTX).decode()
                _ptx_of_image.update(dict.fromkeys(json.loads(file.read(IMAGES)), ptx))
        module = load(path, enable_tvm_ffi=enable_tvm_ffi)
        return _Module(module) if enable_tvm_ffi else module

    return load_module


class _Module:
    """A loaded module whose functions take CPU tensors, as compiled functions do."""

    def __init__(self, module: Any):
        self._module = module

    def __getattr__(self, name: str) -> Callable:
        return _taking_cpu_tensors(getattr(self._module, name))


def _images(compiled: Any) -> list[str]:
    """Return the digests of the fat binaries in a function that was just compiled."""
    digests = []
    for operation in (op.operation for op in compiled.ir_module.body.operations):
        if operation.name != "llvm.mlir.global":
            continue
        if operation.attributes["sym_name"].value.endswith("_binary"):
            blob = operation.attributes["value"].value_bytes
            size = int.from_bytes(blob[6:8], "little") + int.from_bytes(blob[8:16], "little")
            digests.append(hashlib.sha1(blob[:size]).hexdigest())
    return digests


# --- installation -------------------------------------------------------------------------------


def is_installed() -> bool:
    """Return True if this process's kernels run here."""
    return _installed


def install(target: str = "sm_90a", sm_count: int = 4) -> None:
    """Make the DSL run kernels here. Call it once a process, before anything imports the DSL.

    Args:
        target: the architecture to compile for where `--gpu-arch` names none.
        sm_count: the number of multiprocessors that schedulers see. A GPU's 132 or 148 launches the
            same CTAs as on that GPU.

    Raises:
        RuntimeError: the DSL has been imported already.
        build.NoCompiler, build.BuildError: the core cannot be built.
    """
    global _installed
    if _installed:
        return
    if "cutlass" in sys.modules:
        raise RuntimeError("ptxemu.install() must run before cutlass is imported")
    engine.lib().ptxemu_set_callbacks(*_CALLBACKS)
    os.environ["CUTE_DSL_LIBS"] = os.pathsep.join(map(str, [build.library(), *_runtimes()]))
    os.environ["CUTE_DSL_KEEP"] = "ptx"
    # The DSL dumps a kernel's PTX under the kernel's name, which many kernels may share, and reads
    # it back: each process needs a directory of its own, whatever it inherited.
    os.environ["CUTE_DSL_DUMP_DIR"] = _dump_directory().name
    os.environ["CUTE_DSL_DISABLE_FILE_CACHING"] = "1"
    os.environ.setdefault("CUTE_DSL_ARCH", target)
    # For caches of compiled functions that hash the DSL's variables.
    os.environ["CUTE_DSL_PTXEMU"] = build.modules_digest()

    fakecuda.install(target, sm_count)
    import cutlass.cute.runtime
    from cutlass.base_dsl.jit_executor import JitExecutor
    from cutlass.cutlass_dsl import tvm_ffi_provider
    from cutlass.cutlass_dsl.cuda_jit_executor import CudaDialectJitCompiledFunction

    # The DSL has read the variable. It differs from process to process: no such cache would find
    # anything.
    del os.environ["CUTE_DSL_DUMP_DIR"]
    compiled: Any = CudaDialectJitCompiledFunction
    initialise = compiled.__init__

    def remembering(self, *args, **kwargs):
        initialise(self, *args, **kwargs)
        if self.artifacts is not None and self.ir_module is not None and self.artifacts.PTX:
            _ptx_of_image.update(dict.fromkeys(_images(self), self.artifacts.PTX))

    compiled.__init__ = remembering
    executor: Any
    for executor in (compiled, JitExecutor):
        executor.run_compiled_program = raising_own_errors()(executor.run_compiled_program)
    function_class: Any
    for function_class in (
        tvm_ffi_provider.TVMFFIJitCompiledFunction,
        tvm_ffi_provider.TVMFFIJitCompiledFunctionWithKwargs,
    ):
        function_class.__call__ = _taking_cpu_tensors(function_class.__call__)
        function_class.export_to_c = _keeping_ptx(function_class.export_to_c)
    runtime: Any = cutlass.cute.runtime
    runtime.load_module = _finding_ptx(runtime.load_module)
    _installed = True


def _runtimes() -> list[Path]:
    """Return the DSL's own runtimes, one a CUDA version.

    Before 4.8 the DSL puts one of them in front of CUTE_DSL_LIBS, ahead of the core, unless
    CUTE_DSL_LIBS already names it.
    """
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    roots = spec.submodule_search_locations if spec else None
    return [so for r in roots or [] for so in Path(r).glob("cu*/lib/libcute_dsl_runtime.so")]


@functools.cache
def _dump_directory() -> tempfile.TemporaryDirectory:
    """Return a directory that lives as long as the process."""
    return tempfile.TemporaryDirectory(prefix="ptxemu_", ignore_cleanup_errors=True)
