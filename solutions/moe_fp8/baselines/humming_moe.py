"""Humming's kernels on FP8 tokens and FP8 block-scale or MXFP4 weights, assembled as vLLM's layer.

Humming (package humming-kernels) is vLLM's first choice for MXFP4 on Hopper, and one of its choices
for FP8 in blocks. Its GEMMs take rows in one of two layouts. In the layout `indexed` they gather
the rows themselves. For the layout `grouped_contiguous`, vLLM's with expert parallelism, the tokens
are copied to the rows before. MXFP4 weights become FP8 in registers. Its `process_input` quantises
bfloat16 tokens in blocks of 128, and between the GEMMs clamps, activates and quantises. Triton
kernels route, sort the pairs by expert (`triton_pairs`), and combine the rows (`triton_stages`).
The tiles are those of Humming's heuristic for the number of pairs, or faster ones (`FASTER`).

Its `prepare_and_transform_humming_tensors` re-orders weights when a call brings others than the
last one (`four_bits.weights.Prepared`), which takes no part in the ranking. The time by
flashinfer-bench includes two reads of all weights, which tell that they are the last ones.

Humming compiles a kernel for each new shape and tile, by NVRTC or nvcc (`HUMMING_COMPILER`), and
caches it on disk (`HUMMING_CACHE_DIR`).
"""

import json
import math
from typing import Any, NamedTuple

import torch

from ..call import MoeInputs, RoutedInputs, bounded_offset, check_call
from ..four_bits.weights import Prepared, Weights, check
from ..ladder.adapter import run_of
from ..shape import BLOCK, DEEPSEEK_V3, MoeShape
from .per_stream import PerStream
from .requirement import require
from .shared import Tables, new_tables, route
from .supported import SM90, on_its_device, require_gpu

SOLUTION = {
    "name": "humming_moe",
    "target_hardware": ["NVIDIA_H100", "NVIDIA_H200"],
    "dependencies": ["torch", "triton", "humming-kernels>=0.1.20"],
    "routings": ["deepseek_v3", "renormalize", "given"],
    "clamps": True,
}

REQUIREMENT = "humming-kernels>=0.1.20"

INDEXED = "indexed"
GROUPED = "grouped_contiguous"
LOCKS = 2048
"""Number of int32 that Humming's own layer allocates for stream-K."""
MANY_WAVES = 2
"""Waves of pairs, one a multiprocessor, above which a rank's activation skips pairs of others, as
vLLM does."""


def tile(rows: int, columns: int, ctas: int, **options: Any) -> dict[str, Any]:
    """Return a kernel's options: a tile of tokens by weight rows, CTAs of a multiprocessor."""
    shapes = {"block_shape": (rows, columns, 128), "warp_shape": (rows, columns // 8, 128)}
    return {**shapes, "num_ctas_per_sm": ctas, "use_stream_k": False, **options}


class Faster(NamedTuple):
    """A layout and changes of the heuristic's options that are faster for some numbers of pairs."""

    packed: bool
    least: float  # expected pairs of a local expert, from `least` on and below `below`
    below: float
    layout: str
    options: dict[str, Any]


FASTER = (
    Faster(False, 0.2, 2.3, INDEXED, {"use_stream_k": False}),
    Faster(False, 42, 60, INDEXED, tile(64, 256, ctas=1)),
    Faster(False, 60, 75, GROUPED, {}),
    Faster(False, 75, 110, INDEXED, tile(64, 256, ctas=1)),
    Faster(False, 110, 150, GROUPED, {"use_stream_k": False}),
    Faster(False, 350, 400, GROUPED, {}),
    Faster(True, 0, 0.045, INDEXED, tile(8, 128, ctas=2)),
    Faster(True, 4.5, 9, INDEXED, tile(16, 256, ctas=2)),
    Faster(True, 42, 72, INDEXED, tile(64, 256, ctas=1, wgmma_use_late_as=True)),
)
"""Kernels that Humming's tuner samples, measured on an H200 (docs/notes/baselines.md)."""


def activation(limit: float | None, gate_first: bool) -> dict[str, Any]:
    """Return Humming's options for SwiGLU. Its `a` is a row's first half."""
    gate, up = ("a", "b") if gate_first else ("b", "a")
    if limit is not None:
        gate, up = f"fminf({gate}, {limit}f)", f"fmaxf(fminf({up}, {limit}f), -{limit}f)"
    text = f"({gate}) / (1.f + expf(-({gate}))) * ({up})"
    return {"activation_type": "binary_split", "activation_impl": text}


def weight_schema(packed: bool) -> Any:
    """Return Humming's description of the weights, MXFP4 or FP8."""
    schema = require("humming.schema", REQUIREMENT)
    if packed:
        return schema.Mxfp4WeightSchema().to_humming_schema(torch.bfloat16)
    dtypes = require("humming.dtypes", REQUIREMENT)
    return schema.HummingWeightSchema(
        b_dtype=dtypes.float8e4m3,
        bs_dtype=dtypes.float32,
        weight_scale_type="block",
        weight_scale_group_size=BLOCK,
        weight_scale_group_size_n=BLOCK,
    )


def transformed(
    weight: torch.Tensor, scale: torch.Tensor, packed: bool
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the configuration of a GEMM on FP8 tokens, and its weights `[E, N, bytes]` and scales
    in Humming's order, by the name that Humming gives them."""
    dtypes = require("humming.dtypes", REQUIREMENT)
    schema = require("humming.schema", REQUIREMENT)
    experts, n, columns = weight.shape
    values, scale_dtype = (2, torch.float8_e8m0fnu) if packed else (1, torch.float32)
    tensors = {"weight": weight.view(torch.int32), "weight_scale": scale.view(scale_dtype)}
    transform = require("humming.transform", REQUIREMENT)
    config, ready = transform.prepare_and_transform_humming_tensors(
        tensors=tensors,
        shape_n=n,
        shape_k=values * columns,
        weight_schema=weight_schema(packed),
        input_schema=schema.HummingInputSchema(
            a_dtype=dtypes.float8e4m3,
            input_scale_group_size=BLOCK,
            input_scale_dtype=dtypes.float32,
            input_quant_mode="dynamic_group",
        ),
        num_experts=experts,
        torch_dtype=torch.bfloat16,
        device=weight.device,
    )
    return config, {name: tensor for name, tensor in ready.items() if tensor is not None}


def tuning(config: Any, layout: str, pairs: int, device: torch.device) -> dict[str, Any]:
    """Return the heuristic's choice of a kernel for the expected local pairs."""
    choose = require("humming.tune", REQUIREMENT).get_heuristics_config
    return choose(config, shape_m=pairs, gemm_type=layout, device=device)


class Sorted(NamedTuple):
    """The pairs sorted by expert for one GEMM: an expert's pairs fill whole tiles."""

    sorted_ids: torch.Tensor  # [S] int32, pairs; T * top_k where there is none
    expert_ids: torch.Tensor  # [S / tile] int32
    num_tokens_padded: torch.Tensor  # [1] int32, the rows in use


class Plan(NamedTuple):
    """The kernels for a number of tokens."""

    layout: str
    tiles: tuple[int, int]  # rows of a tile of both GEMMs
    tunings: tuple[str, str]  # of both GEMMs, as JSON


class Buffers(NamedTuple):
    """Tables, and tensors of R rows: one for each of the P pairs, or one for each pair with a local
    expert in the layout `grouped_contiguous`."""

    tables: Tables
    q: torch.Tensor  # [T or R, H] float8_e4m3fn; no columns where GEMM1 gathers the call's tokens
    q_scale: torch.Tensor  # [T or R, H/128] float32
    g: torch.Tensor  # [R, 2I] bfloat16
    c: torch.Tensor  # [R, I] float8_e4m3fn
    c_scale: torch.Tensor  # [R, I/128] float32
    o: torch.Tensor  # [R, H] bfloat16
    locks: torch.Tensor
    sorted: dict[int, Sorted]  # by the rows of a tile


@PerStream
def buffers(
    tokens: int, layout: str, tiles: tuple[int, int], shape: MoeShape, device: torch.device
) -> Buffers:
    """Return buffers for a number of tokens, and for the rows of both GEMMs' tiles."""
    from .triton_stages import row_bound

    def new(*dims: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(dims, dtype=dtype, device=device)

    h, i, experts = shape.hidden_size, shape.intermediate_size, shape.num_local_experts
    bf16, f32, fp8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
    grouped, gathers = layout == GROUPED, layout == INDEXED and shape.routing != "given"
    pairs = tokens * shape.top_k
    rows = row_bound(tokens, shape) if grouped else pairs
    sizes = {tile: -(-min(pairs + experts * (tile - 1), pairs * tile) // tile) for tile in tiles}
    return Buffers(
        new_tables(tokens, rows if grouped else 0, shape, device),
        new(rows if grouped else tokens, 0 if gathers else h, dtype=fp8),
        new(rows if grouped else tokens, h // BLOCK, dtype=f32),
        new(rows, 2 * i, dtype=bf16),
        new(rows, i, dtype=fp8), new(rows, i // BLOCK, dtype=f32),
        new(rows, h, dtype=bf16),
        new(LOCKS).zero_(),
        {} if grouped else {t: Sorted(new(n * t), new(n), new(1)) for t, n in sizes.items()},
    )  # fmt: skip


class HummingLayer:
    """The MoE layer on Humming's kernels. With the routing `given` its weights are MXFP4."""

    def __init__(self, shape: MoeShape):
        self.shape = shape
        self.packed = shape.routing == "given"
        self.activation = activation(shape.swiglu.limit, gate_first=self.packed)
        self.configs: list[Any] = []  # of both GEMMs, from the preparation
        self.names: list[list[str]] = []  # of the prepared tensors of each
        self.plans: dict[int, Plan] = {}  # by the number of tokens
        self.prepared = Prepared(self.prepare)

    def prepare(self, w13, w13_scale, w2, w2_scale) -> Weights:
        """Return the tensors of both GEMMs in Humming's order."""
        self.configs, self.names, self.plans = [], [], {}
        made: list[torch.Tensor] = []
        for weight, scale in ((w13, w13_scale), (w2, w2_scale)):
            config, ready = transformed(weight, scale, self.packed)
            self.configs.append(config)
            self.names.append(list(ready))
            made += ready.values()
        return tuple(made)

    def expected_pairs(self, tokens: int) -> int:
        """Return the local pairs with even routing, by which Humming chooses its kernels."""
        share = self.shape.num_local_experts / self.shape.num_experts
        return max(1, math.ceil(tokens * self.shape.top_k * share))

    def plan(self, tokens: int, device: torch.device) -> Plan:
        """Return the layout, and the tunings of both GEMMs: the heuristic's or faster ones."""
        if tokens not in self.plans:
            pairs = self.expected_pairs(tokens)
            each = pairs / self.shape.num_local_experts
            layout, options = INDEXED, {}
            for faster in FASTER:
                if faster.packed == self.packed and faster.least <= each < faster.below:
                    layout, options = faster.layout, faster.options
            first, second = (
                tuning(config, layout, pairs, device) | options for config in self.configs
            )
            tiles = first["block_shape"][0], second["block_shape"][0]
            self.plans[tokens] = Plan(layout, tiles, (json.dumps(first), json.dumps(second)))
        return self.plans[tokens]

    @torch.no_grad()
    @on_its_device
    def __call__(self, inputs: MoeInputs | RoutedInputs, output: torch.Tensor) -> None:
        """Write the layer's output.

        Raises:
            ValueError: an argument is wrong.
            RuntimeError: the GPU is not supported, or a package is not installed.
        """
        shape, device = self.shape, output.device
        if isinstance(inputs, RoutedInputs):
            tokens = check(inputs, output, shape)
        else:
            tokens = check_call(inputs, output, shape)
        require_gpu(device, SM90)
        library = require("humming.forward", REQUIREMENT)
        require("triton", "triton")
        if tokens == 0:
            return
        from . import triton_stages as stages
        from .triton_pairs import Scales, count_pairs, sort_pairs

        tensors = self.prepared(inputs[4:8])
        split = len(self.names[0])
        weights = [
            dict(zip(names, part, strict=True))
            for names, part in zip(self.names, (tensors[:split], tensors[split:]), strict=True)
        ]
        layout, tiles, tunings = self.plan(tokens, device)
        b = buffers(tokens, layout, tiles, shape, device)
        (routed, rows), grouped = b.tables, layout == GROUPED
        offset, pairs = bounded_offset(int(inputs.local_expert_offset)), self.expected_pairs(tokens)
        compute = json.dumps({"gemm_type": layout})

        def multiply(gemm: int, x, scale, out) -> None:
            where = b.sorted[tiles[gemm]]._asdict() if not grouped else {}
            library.humming_forward(
                self.configs[gemm], x, **weights[gemm], input_scale=scale, outputs=out, **where,
                expert_layout=rows.m_indptr if grouped else None, locks=b.locks,
                valid_shape_m=pairs, top_k=1 if grouped or gemm else shape.top_k,
                tuning_config=tunings[gemm], compute_config=compute,
            )  # fmt: skip

        def process(gemm: int, x, out, scale, **options: Any) -> None:
            library.may_process_input(
                self.configs[gemm], inputs=x, outputs=out, group_scales=scale, **options
            )

        x, scales = b.q, None
        if isinstance(inputs, RoutedInputs):
            routed = routed._replace(ids=inputs.topk_ids, weights=inputs.topk_weights)
            count_pairs(routed, offset)
            process(0, inputs.x, b.q, b.q_scale)
        else:
            route(inputs, shape, routed)
            source, source_scale = inputs.hidden_states, inputs.hidden_states_scale
            if grouped:
                stages.place(routed, offset, rows)
                stages.scatter(source, source_scale, rows, b.q, b.q_scale)
            else:
                x, scales = source, Scales(source_scale, b.q_scale)
        options: dict[str, Any] = {}
        if grouped:
            options = {"num_valid_tokens": rows.m_indptr[-1:]}
        else:
            sort_pairs(routed, offset, rows.pair_row, b.sorted, scales)
            of_a_rank = shape.num_local_experts < shape.num_experts
            if of_a_rank and len(b.g) > MANY_WAVES * stages.processors(device):
                options = {"layout": "scatter", "scatter_idx": rows.pair_row.view(-1, 1)}

        multiply(0, x, b.q_scale, b.g)
        process(1, b.g, b.c, b.c_scale, **self.activation, **options)
        multiply(1, b.c, b.c_scale, b.o)
        stages.combine(b.o, routed.weights, rows, output)


layer_at = HummingLayer
run = run_of(HummingLayer(DEEPSEEK_V3))
