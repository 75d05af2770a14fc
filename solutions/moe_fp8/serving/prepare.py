"""Compile every kernel of a layer before it is needed, so that no call waits for the compiler.

    from moe_fp8 import experts, prepare

    prepare(experts, ids, weights, x, w13, w13_scale, w2, w2_scale, tokens=8192)

A kernel takes seconds to compile, and another number of tokens may need another kernel: six to ten
kernels serve all numbers. As many processes as there are cores compile the kernels that are not on
disk.
"""

import bisect
import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ..api import call_of
from ..cache import NOT_KEPT, KernelCache, cache_dir
from ..call import CHUNK_TOKENS, LARGEST_OFFSET, BatchedInputs, Inputs, MoeInputs, some_tokens
from ..kernels import architectures
from ..layer import FusedLayer, make_call

PACKAGE = __name__.removesuffix(".serving.prepare")
MAIN = f"""
import importlib.util, sys
sys.path[:] = filter(None, sys.path)
file = {str(Path(__file__).resolve().parents[1] / "__init__.py")!r}
spec = importlib.util.spec_from_file_location({PACKAGE!r}, file)
sys.modules[{PACKAGE!r}] = package = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
from {__name__} import main
main()
"""
"""The program of `in_processes`. It imports nothing from the working directory, and this package
from its file: the directory may have another name than the package."""
PR_SET_PDEATHSIG = 1
"""Linux's option of `prctl`: the signal that a process gets when the one that started it ends."""
Geometry = tuple[Any, ...]
"""The arguments of `compile_fused`: they decide a kernel."""


def prepare(
    function: Callable[..., torch.Tensor],
    *arguments: Any,
    tokens: int = CHUNK_TOKENS,
    **options: Any,
) -> int:
    """Load or compile all kernels for calls like this one with 1 to `tokens` tokens.

    Afterwards no such call compiles or loads a kernel, and a CUDA graph can capture one without an
    ordinary call before it. Kernels in the cache on disk are loaded. The others are compiled in
    parallel and stored there; if several processes prepare at once, one compiles. A progress bar
    shows the compilations on a terminal. CPU tensors need no kernels.

    Args:
        function: `fused_moe`, `experts` or `batched_experts`.
        *arguments: the positional arguments of a call with at least one token. Later calls must
            have their types, layouts and sizes; their values do not matter.
        tokens: the most tokens of a call; for `batched_experts` the largest `expected_m`, with any
            number of rows.
        **options: the other arguments of the call.

    Returns:
        The number of compiled kernels.

    Raises:
        TypeError: `function` is another one, or does not take the arguments.
        ValueError: an argument is wrong; the message names it.
        ImportError: CuTe DSL or tvm-ffi is missing, or its version is not served.
    """
    layer, inputs, out = call_of(function, *arguments, **options)
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise ValueError(f"tokens={tokens!r}: expected a positive integer")
    if not out.numel():
        raise ValueError("expected the arguments of a call with at least one token, got none")
    architectures.has_kernels(out.device)  # raises for an unsupported GPU
    tokens, gpu = min(tokens, CHUNK_TOKENS), out.get_device()
    if not out.is_cuda or tokens <= layer.prepared.get(gpu, 0):
        return 0
    kernels = list_geometries(
        layer, tokens, architectures.of_device(out.device), architectures.num_sms(out.device)
    )
    with architectures.on_device(out.device):
        compiled = compile_all(kernels)
        # The first launch of a kernel loads its machine code to the GPU.
        one = without_pairs(inputs)
        one_output = torch.empty_like(one[2], dtype=torch.bfloat16)
        for shape, *configs, _, _, form in kernels:
            make_call(1, out.device, shape, layer.terms, configs, form)(one, one_output)
    layer.prepared[gpu] = tokens
    return compiled


def list_geometries(
    layer: FusedLayer, tokens: int, architecture: architectures.Architecture, num_sms: int
) -> list[Geometry]:
    """List the kernels of a layer's calls with 1 to `tokens` tokens on a GPU of this kind."""
    choose = partial(layer.choose_configs, architecture=architecture)
    return [
        (layer.shape, *configs, num_sms, architecture.target, layer.actual_form)
        for configs in all_configs(choose, tokens)
    ]


def all_configs(choose: Callable[[int], Any], tokens: int) -> list[Any]:
    """Return the different results of `choose` for 1 to `tokens` tokens. Equal results must be
    neighbours: a binary search finds where the next one begins."""
    configs: list[Any] = []
    first = 1
    while first <= tokens:
        configs.append(choose(first))
        rest = range(first, tokens + 1)
        first += bisect.bisect(rest, False, key=lambda t: choose(t) != configs[-1])
    return configs


def without_pairs(inputs: Inputs) -> Inputs:
    """Return the inputs of one token (of one row of every expert) without a local expert."""
    if isinstance(inputs, BatchedInputs):
        x, scale = inputs.x[:, :1].contiguous(), inputs.x_scale
        if scale is not None:
            scale = scale[:, :1].contiguous()
        none = torch.zeros_like(inputs.num_tokens)
        return inputs._replace(num_tokens=none, x=x, x_scale=scale)
    one = some_tokens(inputs, slice(1))
    if isinstance(one, MoeInputs):
        return one._replace(local_expert_offset=LARGEST_OFFSET)
    return one._replace(topk_ids=torch.full_like(one.topk_ids, -1), local_expert_offset=0)


def compile_all(geometries: Sequence[Geometry]) -> int:
    """Compile the kernels that are not on disk, load all; return the number of compiled ones."""
    from ..kernels.fused import compile_fused

    compiled = len(missing(geometries))
    directory = cache_dir()
    if compiled > 1 and cores() > 1 and directory is not None:
        with contextlib.suppress(OSError):  # the directory cannot be used
            with KernelCache(directory).lock("prepare"):  # one process compiles for all
                left = missing(geometries)
                compiled = len(left)
                if left:
                    in_processes(left)
    for geometry in geometries:  # loads, and compiles what is still missing
        compile_fused(*geometry)
    return compiled


def missing(geometries: Sequence[Geometry]) -> list[Geometry]:
    """Return the kernels that neither this process nor the disk has."""
    from ..kernels.compile import is_on_disk
    from ..kernels.fused import compile_fused, describe_fused

    return [
        geometry
        for geometry in geometries
        if geometry not in compile_fused.functions and not is_on_disk(*describe_fused(*geometry))
    ]


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_processes(geometries: Sequence[Geometry]) -> None:
    """Compile into the cache on disk in parallel processes: the compiler uses one thread."""
    # A new process imports the compiler once and forks. This process may use CUDA, so it must not.
    subprocess.run(
        [sys.executable, "-c", MAIN],
        input=pickle.dumps((os.getpid(), geometries)),
        stdout=subprocess.DEVNULL,
    )


def main() -> None:
    """Compile the kernels that `in_processes` sends, until one cannot be stored."""
    parent, geometries = pickle.load(sys.stdin.buffer)
    end_with(parent)
    from ..kernels import fused  # noqa: F401  # once, before the workers fork

    forks = multiprocessing.get_context("fork")
    workers = min(cores(), len(geometries))
    try:
        with ProcessPoolExecutor(workers, forks, end_with, (os.getpid(),)) as pool:
            done = pool.map(compile_one, geometries)
            for _ in tqdm(done, "moe_fp8: compiling kernels", len(geometries), unit="kernel"):
                pass
    except RuntimeWarning as error:
        sys.exit(f"moe_fp8: {error}")


def end_with(parent: int) -> None:
    """Let Linux kill this process when `parent`, which started it, ends. A thread of its own would
    end it late: the compiler holds Python's lock for seconds."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before
        os._exit(1)


def compile_one(geometry: Geometry) -> None:
    """Compile a kernel in a worker. Raises RuntimeWarning: it cannot be stored."""
    from ..kernels.fused import compile_fused

    with warnings.catch_warnings():
        warnings.filterwarnings("error", NOT_KEPT, RuntimeWarning)
        compile_fused(*geometry)
