"""Makes a GPU seem present to CuTe DSL scripts.

"cuda" tensors become CPU tensors. The few driver and runtime calls that scripts and the DSL make
from Python are answered here. Nothing in this module executes device code.
"""

import contextlib
import ctypes
import types
import weakref
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from . import noise
from .memory import Range, ranges, register_tensor

ALIGNMENT = 256
"""Alignment in bytes of the addresses that cudaMalloc returns."""
CUDA_DEVICE = (2, 0)  # kDLCUDA, device 0

_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype = ctypes.c_void_p
_get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_get_name = ctypes.pythonapi.PyCapsule_GetName
_get_name.restype = ctypes.c_char_p
_get_name.argtypes = [ctypes.py_object]


class CudaCapsule:
    """DLPack exporter that presents a CPU tensor as a tensor of CUDA device 0."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor.detach()

    def __dlpack__(self, **_: Any) -> Any:
        capsule = self.tensor.__dlpack__()
        name = _get_name(capsule)
        # DLManagedTensorVersioned has 32 bytes of other fields before its DLTensor.
        tensor = _get_pointer(capsule, name) + (32 if name == b"dltensor_versioned" else 0)
        for i, value in enumerate(CUDA_DEVICE):
            ctypes.c_int32.from_address(tensor + 8 + 4 * i).value = value
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA_DEVICE


def to_device(argument: Any, tokens: list) -> Any:
    """Present CPU tensors, also in tuples, lists and dicts, as CUDA tensors that kernels may use.

    The keys of their memory in `memory.ranges` are appended to `tokens`.
    """
    if isinstance(argument, torch.Tensor):
        tokens.append(register_tensor(argument))
        return CudaCapsule(argument)
    if type(argument) in (tuple, list):
        return type(argument)(to_device(a, tokens) for a in argument)
    if type(argument) is dict:
        return {key: to_device(value, tokens) for key, value in argument.items()}
    return argument


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same tensor at an address with the alignment of a CUDA allocation."""
    if tensor.data_ptr() % ALIGNMENT == 0 or tensor.numel() == 0 or tensor.storage_offset():
        return tensor
    size = tensor.untyped_storage().nbytes()
    with torch._C.DisableTorchFunction():  # the caller fills the memory
        raw = torch.empty(size + ALIGNMENT, dtype=torch.uint8)
    start = -raw.data_ptr() % ALIGNMENT
    moved = raw[start : start + size].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
    if tensor.dtype.itemsize > 1:
        moved.copy_(tensor)
    else:
        moved.view(torch.uint8).copy_(tensor.view(torch.uint8))
    return moved


def _register_storage(tensor: torch.Tensor) -> None:
    """Let kernels use a tensor for as long as its storage lives."""
    with torch._C.DisableTorchFunction():
        key = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
        if any(r.keep == key for r in ranges.values() if isinstance(r.keep, tuple)):
            return
        token = register_tensor(tensor, keep=False)
        ranges[token] = ranges[token]._replace(keep=key)
        weakref.finalize(tensor.untyped_storage(), ranges.pop, token, None)


class CudaMeansCpu(TorchFunctionMode):
    """Puts "cuda" tensors into aligned CPU memory that kernels may use.

    Uninitialised tensors of either device begin with random bytes.
    """

    def __torch_function__(self, function, kinds, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(function, "__name__", "")
        if name == "_scaled_mm":
            return _scaled_mm(*args, **kwargs)
        if name == "cuda":
            function, args, kwargs = torch.Tensor.to, (args[0], "cuda"), {}
        moved = _is_cuda(kwargs.get("device")) or any(map(_is_cuda, args))
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        args = tuple("cpu" if _is_cuda(a) else a for a in args)
        out = function(*args, **kwargs)
        if name in noise.EMPTY and isinstance(out, torch.Tensor):
            noise.fill_storage(out)
        if not moved or not isinstance(out, torch.Tensor) or not noise.has_memory(out):
            return out
        if name in ("to", "cuda") and out is args[0]:
            out = out.clone()  # a copy on a device never aliases the host's tensor
        out = _aligned(out)
        _register_storage(out)
        return out


FP4_VALUES = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def _scaled_mm(a, b, scale_a, scale_b, bias=None, scale_result=None, out_dtype=None, **_):
    """Replace `torch._scaled_mm` with block scales, the reference in NVIDIA's examples."""
    table = torch.tensor(FP4_VALUES + [-v for v in FP4_VALUES])

    def values(t):
        if t.dtype != torch.float4_e2m1fn_x2:
            return t.float()
        u = t.view(torch.uint8).long()
        return torch.stack([table[u & 15], table[u >> 4]], -1).flatten(-2)

    def scaled(t, scale):
        rows, columns = t.shape
        vector = 32 if scale_a.dtype == torch.float8_e8m0fnu else 16
        blocks = -(-columns // vector)
        scale = scale.float() if scale.dtype != torch.uint8 else scale
        scale = scale.reshape(-(-rows // 128), -(-blocks // 4), 32, 4, 4).permute(0, 3, 2, 1, 4)
        scale = scale.reshape(-(-rows // 128) * 128, -1)[:rows, :blocks]
        return t * scale.repeat_interleave(vector, 1)[:, :columns]

    return (scaled(values(a), scale_a) @ scaled(values(b.t()), scale_b).t()).to(out_dtype)


def _benchmark(function, *_, kernel_arguments=None, **__) -> float:
    """Run the kernel once if there are arguments, because some examples check its result."""
    if kernel_arguments is not None:
        function(*kernel_arguments.args, **kernel_arguments.kwargs)
    return 1.0  # us


class _Event:
    def __init__(self, *_: Any, **__: Any):
        pass

    def record(self, *_: Any) -> None:
        pass

    synchronize = wait = record

    def elapsed_time(self, other: "_Event") -> float:
        return 1.0


class _Stream:
    cuda_stream = 0
    device = torch.device("cpu")

    def synchronize(self) -> None:
        pass

    def wait_stream(self, other: "_Stream") -> None:
        pass


def _allocate(size: int, stream: int) -> int:
    """Return an address that kernels may use. A launch keeps the memory until the launch has run,
    even if the address is freed earlier."""
    memory = _aligned(torch.zeros(size, dtype=torch.uint8))
    address = memory.data_ptr()
    noise.fill(address, size)
    ranges[address] = Range(address, address + size, "allocation", memory)
    return address


def install(target: str, sm_count: int) -> None:
    """Patch torch.cuda, cuda.bindings and the DSL's helpers.

    Args:
        target: the architecture of the GPU that seems present, such as sm_90a.
        sm_count: its number of multiprocessors.
    """
    major = 9 if target.startswith("sm_9") else 10
    CudaMeansCpu().__enter__()
    torch.compiler.set_stance("force_eager")  # the compiler needs the functions of a true GPU
    _patch_torch(major, sm_count)
    _patch_bindings(major, sm_count)
    _patch_dsl(sm_count)


def _patch_torch(major: int, sm_count: int) -> None:
    properties = types.SimpleNamespace(
        name="ptxemu",
        major=major,
        minor=0,
        multi_processor_count=sm_count,
        total_memory=16 << 30,
        max_threads_per_multi_processor=2048,
    )
    patches: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "synchronize": lambda *a, **k: None,
        "current_stream": lambda *a, **k: _Stream(),
        "default_stream": lambda *a, **k: _Stream(),
        "Stream": lambda *a, **k: _Stream(),
        "stream": lambda s: contextlib.nullcontext(),
        "Event": _Event,
        "empty_cache": lambda: None,
        "manual_seed": lambda seed: None,
        "get_device_capability": lambda *a: (major, 0),
        "get_device_properties": lambda *a: properties,
        "get_device_name": lambda *a: properties.name,
        "set_device": lambda *a: None,
        "init": lambda: None,
    }
    for name, value in patches.items():
        setattr(torch.cuda, name, value)
    # `caching_allocator_alloc` and `caching_allocator_delete` call these; a CPU build has neither.
    patches = {
        "_cuda_getCurrentRawStream": lambda device: 0,
        "_cuda_cudaCachingAllocator_raw_alloc": _allocate,
        "_cuda_cudaCachingAllocator_raw_delete": ranges.pop,
    }
    for name, value in patches.items():
        setattr(torch._C, name, value)


def _patch_bindings(major: int, sm_count: int) -> None:
    from cuda.bindings import driver, runtime

    def answers(module, ok, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(module, name, lambda *a, answer=value: (ok, answer))

    def nothing(module, ok, names: str) -> None:
        for name in names.split():
            setattr(module, name, lambda *a: (ok,))

    attribute = driver.CUdevice_attribute
    attributes = {
        attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: major,
        attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: 0,
        attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: sm_count,
        attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: 232448,
        attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: 233472,
    }
    success = driver.CUresult.CUDA_SUCCESS
    answers(
        driver,
        success,
        {
            "cuDeviceGetCount": 1,
            "cuDeviceGet": driver.CUdevice(0),
            "cuCtxGetCurrent": driver.CUcontext(0),
            "cuCtxCreate": driver.CUcontext(0),
            "cuCtxGetDevice": driver.CUdevice(0),
            "cuDevicePrimaryCtxRetain": driver.CUcontext(0),
            "cuDeviceGetName": b"ptxemu",
            "cuDriverGetVersion": 13010,
            "cuStreamCreate": driver.CUstream(0),
            "cuEventCreate": driver.CUevent(0),
            "cuEventElapsedTime": 1.0,
        },
    )
    driver.cuDeviceGetAttribute = lambda asked, device=0: (success, attributes.get(asked, 1))
    nothing(
        driver,
        success,
        "cuInit cuStreamSynchronize cuCtxSetCurrent cuCtxSynchronize cuCtxDestroy "
        "cuDevicePrimaryCtxRelease cuStreamDestroy cuEventRecord cuEventSynchronize "
        "cuEventDestroy cuLibraryUnload",
    )
    success = runtime.cudaError_t.cudaSuccess
    answers(runtime, success, {"cudaGetDeviceCount": 1, "cudaGetDevice": 0})
    nothing(runtime, success, "cudaLibraryUnload cudaDeviceSynchronize cudaStreamSynchronize")


def _patch_dsl(sm_count: int) -> None:
    import cutlass.cute.testing
    import cutlass.testing
    import cutlass.utils
    from cutlass.cute import runtime
    from cutlass.cutlass_dsl import CuTeDSL

    dsl: Any = CuTeDSL
    dsl._runtime_can_run_compiled = lambda self, runtime_arch, compiled_arch: True
    hardware: Any = cutlass.utils.HardwareInfo
    hardware.__init__ = lambda self, device_id=0: None
    hardware.get_max_active_clusters = lambda self, n, stream=None: max(1, sm_count // n)
    hardware.get_device_multiprocessor_count = lambda self: sm_count
    hardware.get_l2_cache_size_in_bytes = lambda self: 64 << 20
    module: Any
    for module in (cutlass.testing, cutlass.cute.testing):
        module.benchmark = _benchmark
    tensor_class: Any = runtime._Tensor
    initialise = tensor_class.__init__

    def of_cuda_tensor(self, tensor, *args, **kwargs):
        if isinstance(tensor, torch.Tensor):
            _register_storage(tensor)
            tensor = CudaCapsule(tensor)
        initialise(self, tensor, *args, **kwargs)

    tensor_class.__init__ = of_cuda_tensor
