"""Tencent's hpc-ops: its FP8 block-scaled grouped GEMM, with Triton for the stages around it.

Both GEMMs are `group_gemm_blockwise_fp8` of the package hpc-ops. Routing, scatter, SwiGLU + FP8 and
combine are one Triton launch each (`triton_stages`). No host sync; buffers are reused until T
changes.

The package's call of the whole layer, `fuse_moe_blockwise`, is not used. It needs gate rows first
in the first projection, the definition has them second, and a solution gets the weights anew in
every call: each call would move 0.94 GB to swap them. The package exposes three parts of that call.
The GEMM is used. The gather belongs to its per-tensor layer and does not copy the tokens' scales.
The reduction writes a new tensor, which would have to be copied. Triton's stages do neither.

Rows: the library chooses a tile of 8 to 64 rows by an expert's mean rows, an argument. It reads an
expert's token scales at the number of tiles before the expert. Every expert begins at a multiple of
the tile, so rows and scales lie at the same place. With few rows an expert the library writes a
list of tiles on the device, into memory that the caller passes.
"""

from dataclasses import dataclass

import torch

from ..call import MoeInputs
from ..ladder.adapter import run_of
from ..shape import DEEPSEEK_V3, MoeShape
from .per_stream import PerStream
from .shared import Buffers, Tables, begin, new_buffers, new_tables, route
from .supported import SM90, on_its_device

SOLUTION = {
    "name": "hpc_ops_moe",
    "target_hardware": ["NVIDIA_H100", "NVIDIA_H200"],
    "dependencies": [
        "torch",
        "triton",
        "hpc-ops@git+https://github.com/Tencent/hpc-ops@6e2ecede9d6d47b2e680e839cc7ad7422bc8d88b",
    ],
    "routings": ["deepseek_v3", "renormalize"],
}

REQUIREMENT = SOLUTION["dependencies"][-1]

LISTED_MEAN = 8
"""Most mean rows of an expert with which the library can use a list of tiles."""
TILES = ((8, 8), (16, 16), (32, 32), (48, 48), (64, 64), (96, 48), (128, 32), (144, 48))
"""(most mean rows of an expert, rows of the library's tile)."""
LARGEST_TILE = 64
TILE_N = 128
TASK = 4
"""Number of int32 per tile in the list."""
DESCRIPTORS = 2 * 128 // 4
"""Number of int32 in an expert's two TMA descriptors."""
MOST_EXPERTS = 256
"""The library numbers tiles by 32 threads with 8 experts each. With more experts it reads past the
rows."""


def mean_rows(tokens: int, shape: MoeShape) -> int:
    """Return an expert's rows with even routing, the number that the library's layer passes."""
    return tokens * shape.top_k // shape.num_experts


def tile_rows(mean: int) -> int:
    return next((tile for most, tile in TILES if mean <= most), LARGEST_TILE)


@PerStream
def buffers(
    tokens: int, shape: MoeShape, device: torch.device
) -> tuple[Tables, Buffers, torch.Tensor | None]:
    """Return tables and buffers for a number of tokens, and room for the list of tiles of either
    GEMM, `[waves, multiprocessors, 4]` int32."""
    from .triton_stages import processors, row_bound

    mean = mean_rows(tokens, shape)
    tile = tile_rows(mean)
    bound = row_bound(tokens, shape, tile)
    tasks = None
    if mean <= LISTED_MEAN:
        ctas = processors(device)
        # Room for the most tokens with a list. The library derives a launch's shared memory limit
        # from this room, and another thread's call with fewer tokens would lower the limit.
        most = ((LISTED_MEAN + 1) * shape.num_experts - 1) // shape.top_k
        columns = -(-max(2 * shape.intermediate_size, shape.hidden_size) // TILE_N)
        tiles = row_bound(most, shape, tile) // tile * columns
        # After the last tile the list has one end mark per CTA.
        waves = -(-tiles // ctas) + 1
        tasks = torch.empty((waves, ctas, TASK), dtype=torch.int32, device=device)
    tables = new_tables(tokens, bound, shape, device)
    return tables, new_buffers((bound,), shape, device), tasks


@dataclass(eq=False)
class HpcOpsLayer:
    """The MoE layer on hpc-ops' grouped GEMM."""

    shape: MoeShape = DEEPSEEK_V3

    @torch.inference_mode()
    @on_its_device
    def __call__(self, inputs: MoeInputs, output: torch.Tensor) -> None:
        """Write the layer's output.

        Raises:
            ValueError: an argument is wrong.
            RuntimeError: the GPU or so many experts are not supported, or a package is not
                installed.
        """
        shape = self.shape
        tokens, hpc = begin(inputs, output, shape, SM90, "hpc", REQUIREMENT)
        if shape.num_local_experts > MOST_EXPERTS:
            raise RuntimeError(
                f"num_local_experts={shape.num_local_experts}: hpc-ops has at most {MOST_EXPERTS}"
            )
        if tokens == 0:
            return
        from . import triton_stages as stages

        (routed, rows), (a, a_scale, g, q, q_scale, o), tasks = buffers(
            tokens, shape, output.device
        )
        mean = mean_rows(tokens, shape)
        counts, starts = rows.counts[0], rows.m_indptr

        def multiply(a, a_scale, b, b_scale, out) -> None:
            hpc.group_gemm_blockwise_fp8(
                a,
                b,
                counts,
                starts,
                a_scale.t(),
                b_scale,
                num_seq_per_group_avg=mean,
                output=out,
                task_map_workspace=tasks,
            )

        route(inputs, shape, routed)
        offset = int(inputs.local_expert_offset)
        stages.place(routed, offset, rows, align=tile_rows(mean))
        if tasks is None:
            # Without a list the kernel divides by the number of tiles. So if there is no pair, the
            # first expert gets one row of any content. Nothing reads its result.
            counts[:1].add_(starts[-1:] == 0)

        stages.scatter(inputs.hidden_states, inputs.hidden_states_scale, rows, a, a_scale)
        multiply(a, a_scale, inputs.gemm1_weights, inputs.gemm1_weights_scale, g)

        stages.swiglu_quant(g, q, q_scale, rows)

        # Both GEMMs would allocate their TMA descriptors at one address. Without a list they do not
        # acquire the new descriptors: in a replay the second GEMM used those of the first. This
        # allocation blocks the address until the second GEMM is launched.
        blocked = counts.new_empty(len(counts) * DESCRIPTORS) if tasks is None else None
        multiply(q, q_scale, inputs.gemm2_weights, inputs.gemm2_weights_scale, o)
        del blocked

        stages.combine(o, routed.weights, rows, output)


layer_at = HpcOpsLayer
run = run_of(HpcOpsLayer())
