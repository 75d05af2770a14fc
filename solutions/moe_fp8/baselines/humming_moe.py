"""Humming's kernels on MXFP4 weights and FP8 tokens, assembled as vLLM's layer on Hopper.

Humming (package humming-kernels) is vLLM's first choice for MXFP4 on Hopper. Its GEMMs read four
bits, make FP8 values of them in registers and gather the rows themselves (its layout `indexed`).
Its `process_input` quantises the tokens in blocks of 128, and between the GEMMs clamps, activates
and quantises. Triton kernels sort the pairs by expert, two launches, and combine the rows
(`triton_stages`). The tiles are those of Humming's heuristic for the number of pairs.

Its `prepare_and_transform_humming_tensors` re-orders weights when a call brings others than the
last one (`four_bits.weights.Prepared`), which takes no part in the ranking. The time by
flashinfer-bench includes two reads of all weights, which tell that they are the last ones.

Humming compiles a kernel for each new shape and tile, by NVRTC or nvcc (`HUMMING_COMPILER`), and
caches it on disk (`HUMMING_CACHE_DIR`).
"""

import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..call import BLOCK, MoeShape, RoutedInputs, bounded_offset
from ..four_bits.weights import Prepared, Weights, check
from .per_stream import PerStream
from .requirement import require
from .supported import SM90, on_its_device, require_gpu

SOLUTION = {
    "name": "humming_moe",
    "target_hardware": ["NVIDIA_H100", "NVIDIA_H200"],
    "dependencies": ["torch", "triton", "humming-kernels>=0.1.20"],
    "routings": ["given"],
    "clamps": True,
}

REQUIREMENT = "humming-kernels>=0.1.20"

LAYOUT = "indexed"
LOCKS = 2048
"""Number of int32 that Humming's own layer allocates for stream-K."""
MANY_WAVES = 2
"""Waves of pairs, one a multiprocessor, above which a rank's activation skips pairs of others, as
vLLM does."""


def activation(limit: float | None) -> dict[str, Any]:
    """Return Humming's options for SwiGLU of gate `a` and up `b`."""
    gate, up = "a", "b"
    if limit is not None:
        gate, up = f"fminf(a, {limit}f)", f"fmaxf(fminf(b, {limit}f), -{limit}f)"
    text = f"({gate}) / (1.f + expf(-({gate}))) * ({up})"
    return {"activation_type": "binary_split", "activation_impl": text}


class Sorted(NamedTuple):
    """The pairs sorted by expert for one GEMM: an expert's pairs fill whole tiles."""

    sorted_ids: torch.Tensor  # [R] int32, pairs; T * top_k where there is none
    expert_ids: torch.Tensor  # [R / tile] int32
    num_tokens_padded: torch.Tensor  # [1] int32, the rows in use


class Buffers(NamedTuple):
    q: torch.Tensor  # [T, H] float8_e4m3fn
    q_scale: torch.Tensor  # [T, H/128] float32
    g: torch.Tensor  # [P, 2I] bfloat16, a row for each of the P pairs
    c: torch.Tensor  # [P, I] float8_e4m3fn
    c_scale: torch.Tensor  # [P, I/128] float32
    o: torch.Tensor  # [P, H] bfloat16
    pair_row: torch.Tensor  # [T, top_k] int32, -1 where the pair's expert is not local
    rank: torch.Tensor  # [P] int32, among the pairs of its expert
    counts: torch.Tensor  # [L] int32
    locks: torch.Tensor
    sorted: dict[int, Sorted]  # by the rows of a tile


@PerStream
def buffers(tokens: int, tiles: tuple[int, ...], shape: MoeShape, device: torch.device) -> Buffers:
    """Return buffers for a number of tokens and the rows of both GEMMs' tiles."""

    def new(*dims: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(dims, dtype=dtype, device=device)

    h, i, pairs, experts = (
        shape.hidden_size, shape.intermediate_size, tokens * shape.top_k, shape.num_local_experts,
    )  # fmt: skip
    bf16, f32, fp8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
    rows = {tile: -(-min(pairs + experts * (tile - 1), pairs * tile) // tile) for tile in tiles}
    return Buffers(
        new(tokens, h, dtype=fp8), new(tokens, h // BLOCK, dtype=f32),
        new(pairs, 2 * i, dtype=bf16),
        new(pairs, i, dtype=fp8), new(pairs, i // BLOCK, dtype=f32),
        new(pairs, h, dtype=bf16),
        new(tokens, shape.top_k), new(pairs), new(experts), new(LOCKS).zero_(),
        {tile: Sorted(new(n * tile), new(n), new(1)) for tile, n in rows.items()},
    )  # fmt: skip


class HummingLayer:
    """The MoE layer on Humming's kernels."""

    def __init__(self, shape: MoeShape):
        self.shape = shape
        self.configs: list[Any] = []  # of both GEMMs, from the preparation
        self.names: list[list[str]] = []  # of the prepared tensors of each
        self.tunings: dict[int, list[dict[str, Any]]] = {}  # of both GEMMs, by the expected pairs
        self.prepared = Prepared(self.prepare)

    def prepare(self, w13, w13_scale, w2, w2_scale) -> Weights:
        """Return the tensors of both GEMMs in Humming's order."""
        dtypes = require("humming.dtypes", REQUIREMENT)
        schema = require("humming.schema", REQUIREMENT)
        transform = require("humming.transform", REQUIREMENT)
        options: dict[str, Any] = dict(
            weight_schema=schema.Mxfp4WeightSchema().to_humming_schema(torch.bfloat16),
            input_schema=schema.HummingInputSchema(
                a_dtype=dtypes.float8e4m3,
                input_scale_group_size=BLOCK,
                input_scale_dtype=dtypes.float32,
                input_quant_mode="dynamic_group",
            ),
            num_experts=self.shape.num_local_experts,
            torch_dtype=torch.bfloat16,
            device=w13.device,
        )
        self.configs, self.names, self.tunings = [], [], {}
        made: list[torch.Tensor] = []
        for weight, scale in ((w13, w13_scale), (w2, w2_scale)):
            tensors = {
                "weight": weight.view(torch.int32),
                "weight_scale": scale.view(torch.float8_e8m0fnu),
            }
            config, ready = transform.prepare_and_transform_humming_tensors(
                tensors=tensors, shape_n=weight.shape[1], shape_k=2 * weight.shape[2], **options
            )
            ready = {name: tensor for name, tensor in ready.items() if tensor is not None}
            self.configs.append(config)
            self.names.append(list(ready))
            made += ready.values()
        return tuple(made)

    def tuned(self, pairs: int, device: torch.device) -> list[dict[str, Any]]:
        """Return the heuristic's tunings of both GEMMs for the expected local pairs."""
        if pairs not in self.tunings:
            choose = require("humming.tune", REQUIREMENT).get_heuristics_config
            self.tunings[pairs] = [
                choose(config, shape_m=pairs, gemm_type=LAYOUT, device=device)
                for config in self.configs
            ]
        return self.tunings[pairs]

    @torch.no_grad()
    @on_its_device
    def __call__(self, inputs: RoutedInputs, output: torch.Tensor) -> None:
        """Write the layer's output.

        Raises:
            ValueError: an argument is wrong.
            RuntimeError: the GPU is not supported, or a package is not installed.
        """
        shape, tokens = self.shape, check(inputs, output, self.shape)
        require_gpu(output.device, SM90)
        library = require("humming.forward", REQUIREMENT)
        require("triton", "triton")
        if tokens == 0:
            return
        from .triton_pairs import sort_pairs
        from .triton_stages import combine, new_rows, processors

        tensors = self.prepared(inputs[4:8])
        split = len(self.names[0])
        weights = [
            dict(zip(names, part, strict=True))
            for names, part in zip(self.names, (tensors[:split], tensors[split:]), strict=True)
        ]
        share = shape.num_local_experts / shape.num_experts
        pairs = max(1, math.ceil(tokens * shape.top_k * share))
        tunings = self.tuned(pairs, output.device)
        tiles = [tuning["block_shape"][0] for tuning in tunings]
        b = buffers(tokens, tuple(sorted(set(tiles))), shape, output.device)
        sort_pairs(inputs.topk_ids, bounded_offset(int(inputs.local_expert_offset)), b)

        def multiply(gemm: int, x, scale, out) -> None:
            library.humming_forward(
                self.configs[gemm], x, **weights[gemm], input_scale=scale, outputs=out,
                **b.sorted[tiles[gemm]]._asdict(), locks=b.locks, valid_shape_m=pairs,
                top_k=shape.top_k if gemm == 0 else 1, tuning_config=json.dumps(tunings[gemm]),
                compute_config=json.dumps({"gemm_type": LAYOUT}),
            )  # fmt: skip

        def process(gemm: int, x, out, scale, **options: Any) -> None:
            library.may_process_input(
                self.configs[gemm], inputs=x, outputs=out, group_scales=scale, **options
            )

        process(0, inputs.x, b.q, b.q_scale)
        multiply(0, b.q, b.q_scale, b.g)
        options = activation(shape.swiglu.limit)
        if share < 1 and len(b.g) > MANY_WAVES * processors(output.device):
            options |= {"layout": "scatter", "scatter_idx": b.pair_row.view(-1, 1)}
        process(1, b.g, b.c, b.c_scale, **options)
        multiply(1, b.c, b.c_scale, b.o)
        rows = new_rows(0, 0, shape, output.device, b.counts.view(1, -1))
        combine(b.o, inputs.topk_weights, rows._replace(pair_row=b.pair_row), output)


layer_at: Callable[[MoeShape], HummingLayer] = HummingLayer
