"""Compile every kernel of a layer before it is needed, so that no call waits for the compiler.

    from moe_fp8 import experts, prepare

    prepare(experts, ids, weights, x, w13, w13_scale, w2, w2_scale, tokens=8192)

A kernel takes seconds to compile, and another number of tokens may need another one: six to nine
serve all of them. Those that are not on disk are compiled by as many processes as there are cores.
"""

import bisect
import contextlib
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ..api import call_of
from ..cache import KernelCache, cache_dir
from ..call import CHUNK_TOKENS, LARGEST_OFFSET, BatchedInputs, Inputs, MoeInputs, some_tokens
from ..kernels import architectures
from ..layer import fused_geometry, make_call

PARENT = Path(__file__).resolve().parents[2]
"""The directory that this package can be imported from."""
MAIN = f"import sys; sys.path[:] = filter(None, sys.path); from {__name__} import main; main()"
"""The program of `in_processes`, which imports nothing that lies in the working directory."""
Geometry = tuple[Any, ...]
"""Arguments of `compile_fused`, which decide a kernel."""


def prepare(
    function: Callable[..., torch.Tensor],
    *arguments: Any,
    tokens: int = CHUNK_TOKENS,
    **options: Any,
) -> int:
    """Make ready all kernels that a call like this one needs with 1 to `tokens` tokens.

    Afterwards no such call compiles or loads anything, and a CUDA graph can capture one without an
    ordinary call before it. Kernels that the cache on disk has are loaded, the others are compiled
    in parallel and kept there; of several processes that prepare at once, one compiles. A progress
    bar shows the compilations on a terminal. On CPU tensors there is nothing to do.

    Args:
        function: `fused_moe`, `experts` or `batched_experts`.
        *arguments, **options: of a call with at least one token, whose types, layouts and sizes are
            those of the calls to come. Nothing is computed of their values.
        tokens: the most that a call will have; of `batched_experts` the largest `expected_m`, while
            calls may have any number of rows.

    Returns:
        How many kernels were compiled.

    Raises:
        ValueError: an argument is wrong; the message names it.
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
    configs = all_configs(partial(layer.chosen, device=out.device), tokens)
    form = layer.usual_form
    with architectures.on_device(out.device):
        compiled = compile_all(
            [fused_geometry(out.device, layer.shape, pair, form) for pair in configs]
        )
        # A kernel's machine code is brought to the GPU when it is launched for the first time.
        one = without_pairs(inputs)
        one_output = torch.empty_like(one[2], dtype=torch.bfloat16)
        for pair in configs:
            make_call(1, out.device, layer.shape, layer.terms, pair, form)(one, one_output)
    layer.prepared[gpu] = tokens
    return compiled


def all_configs(chosen: Callable[[int], Any], tokens: int) -> list[Any]:
    """What is chosen for 1 to `tokens` tokens, each once, where nothing is chosen for tokens
    between those that get one and the same."""
    configs: list[Any] = []
    first = 1
    while first <= tokens:
        configs.append(chosen(first))
        rest = range(first, tokens + 1)
        first += bisect.bisect(rest, False, key=lambda t: chosen(t) != configs[-1])
    return configs


def without_pairs(inputs: Inputs) -> Inputs:
    """The first token, or place of every expert, with none of its experts here."""
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
    """Compile those that are not on disk, load all; return how many were compiled."""
    from ..kernels.fused import compile_fused

    compiled = len(missing(geometries))
    directory = cache_dir()
    if compiled > 1 and cores() > 1 and directory is not None:
        with contextlib.suppress(OSError):  # of a directory that is not used
            with KernelCache(directory).lock("prepare"):  # the others find what is made here
                left = missing(geometries)
                compiled = len(left)
                if left:
                    in_processes(left)
    for geometry in geometries:  # compiles what no process could
        compile_fused(*geometry)
    return compiled


def missing(geometries: Sequence[Geometry]) -> list[Geometry]:
    """Those that neither this process nor the disk has."""
    from ..kernels.compile import is_kept
    from ..kernels.fused import compile_fused, describe_fused

    return [
        geometry
        for geometry in geometries
        if geometry not in compile_fused.functions and not is_kept(*describe_fused(*geometry))
    ]


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_processes(geometries: Sequence[Geometry]) -> None:
    """Compile them into the cache on disk, side by side: the compiler takes one thread."""
    path = os.pathsep.join(filter(None, [str(PARENT), os.environ.get("PYTHONPATH")]))
    # Not forks of this process, which may use CUDA, but of one that imports the compiler once.
    subprocess.run(
        [sys.executable, "-c", MAIN],
        input=pickle.dumps(geometries),
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.DEVNULL,
    )


def main() -> None:
    """The process of `in_processes`."""
    geometries = pickle.load(sys.stdin.buffer)
    from ..kernels import fused  # noqa: F401  # the workers are forks: they import nothing more

    forks = multiprocessing.get_context("fork")
    workers = min(cores(), len(geometries))
    with ProcessPoolExecutor(workers, forks, initializer=end_with_parent) as pool:
        done = pool.map(compile_one, geometries)
        for _ in tqdm(done, "moe_fp8: compiling kernels", len(geometries), unit="kernel"):
            pass


def end_with_parent() -> None:
    """Let a worker end where the process of its pool is killed: it would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def compile_one(geometry: Geometry) -> None:
    from ..kernels.fused import compile_fused

    compile_fused(*geometry)
