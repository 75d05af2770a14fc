"""Experts on tokens that lie by expert: `moe_fp8.batched_experts` against DeepGEMM's masked GEMMs
with a SwiGLU-and-quantise kernel between them, as vLLM and SGLang run them.

The masked GEMMs are those of sgl-deep-gemm. The kernel between them is the engine's own if the
engine is installed: vLLM's `persistent_masked_m_silu_mul_quant` or SGLang's
`per_token_group_quant`. sgl-deep-gemm has no such kernel. sgl_kernel 0.4.3 has none that writes the
float32 scales that Hopper's GEMMs read: its masked kernel writes packed exponents only. So a Triton
kernel in this file is measured too, which needs neither engine.
"""

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from moe_fp8 import batched_experts
from moe_fp8.baselines.deepgemm_device import RECIPE, REQUIREMENT
from moe_fp8.baselines.requirement import require
from moe_fp8.reference import calc_diff
from moe_fp8.shape import BLOCK

from scripts.common.definitions import bandwidth, gemm_bytes, gemm_flops
from scripts.common.program import UsageError, error_line
from scripts.measuring.accuracy import LARGEST_DIFF, in_float32
from scripts.measuring.clock import FAILURES, Rates, Timed, device_times, figures
from scripts.publishing.rows import Writer

HIDDEN, WIDTH = 7168, 2048
"""Sizes of DeepSeek-V3 and of Kimi-K2."""
EXPERTS = (8, 16, 32, 64)
"""Numbers of local experts."""
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Tokens of an expert."""
PLACES = 1024
"""Rows reserved for an expert, as by DeepEP for 8 ranks of 128 tokens each."""
FP8, BF16, F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
FP8_MAX = tl.constexpr(448.0)


class Weights(NamedTuple):
    """Values and scales of all experts, one scale for 128 x 128 values."""

    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor

    def of(self, experts: int) -> "Weights":
        return Weights(*(tensor[:experts] for tensor in self))


class Case(NamedTuple):
    """Tokens of each expert, and the weights."""

    x: torch.Tensor  # [E, PLACES, H]
    x_scale: torch.Tensor  # [E, PLACES, H/128], strides as DeepEP's
    counts: torch.Tensor  # [E]
    expected: int  # tokens of an expert, the host's guess
    weights: Weights

    @property
    def there(self) -> torch.Tensor:
        """[E, PLACES]: true where the row is a token."""
        places = torch.arange(self.x.shape[1], device=self.x.device)
        return places < self.counts.unsqueeze(1)


def random(generator: torch.Generator, *size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw FP8 matrices `[E, rows, columns]`, one expert after the other, and their scales."""
    experts, rows, columns = size
    device = generator.device
    values = torch.empty(size, dtype=FP8, device=device)
    for matrix in values:
        drawn = torch.randn(rows, columns, generator=generator, device=device)
        matrix.copy_(drawn.clamp_(-2, 2))
    blocks = experts, rows // BLOCK, columns // BLOCK
    scale = 0.5 + torch.rand(blocks, generator=generator, device=device)
    return values, scale / columns**0.5


def make_weights(experts: int, seed: int, device: str = "cuda") -> Weights:
    generator = torch.Generator(device).manual_seed(seed)
    first = random(generator, experts, 2 * WIDTH, HIDDEN)
    return Weights(*first, *random(generator, experts, HIDDEN, WIDTH))


def uneven_rows(mean: int, experts: int, seed: int) -> tuple[int, ...]:
    """Draw row counts with about this mean: pairs are drawn one by one among experts whose
    popularity spreads as in the larger workloads (the fullest expert has about twice the mean)."""
    generator = Random(seed)
    popularity = [generator.gammavariate(8.0, 1.0) for _ in range(experts)]
    drawn = generator.choices(range(experts), popularity, k=mean * experts)
    return tuple(drawn.count(e) for e in range(experts))


def make_case(weights: Weights, tokens: int, seed: int, uneven: bool = False) -> Case:
    """Draw `tokens` tokens for each expert; with `uneven`, on average (see `uneven_rows`)."""
    experts, device = len(weights.w13), weights.w13.device
    generator = torch.Generator(device).manual_seed(seed + tokens)
    x = torch.empty(experts, PLACES, HIDDEN, dtype=FP8, device=device)
    for of_expert in x:
        of_expert.copy_(torch.randn(PLACES, HIDDEN, generator=generator, device=device))
    size = experts, HIDDEN // BLOCK, PLACES
    scale = 0.5 + torch.rand(size, generator=generator, device=device)
    rows = uneven_rows(tokens, experts, seed) if uneven else (tokens,) * experts
    if max(rows) > PLACES:
        raise UsageError(f"{max(rows)} tokens of an expert: expected at most {PLACES}")
    counts = torch.tensor(rows, dtype=torch.int32, device=device)
    return Case(x, scale.transpose(1, 2), counts, tokens, weights)


def reference(case: Case) -> torch.Tensor:
    """Return `[sum of the counts, H]` in float32, without quantisation between the GEMMs."""
    there = case.there
    ids = there.nonzero()[:, :1]
    x = case.x.view(torch.uint8)[there].view(FP8)  # torch does not index float8
    scale = case.x_scale[there].t()
    return in_float32(ids, torch.ones_like(ids), x, *case.weights, x_scale=scale)


# --- the peer -------------------------------------------------------------------------------------

Between = Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
"""A function of gate and up `[E, R, 2 I]` bfloat16, the counts and the expected count: returns FP8
`[E, R, I]` and scales."""


def by_triton(g: torch.Tensor, counts: torch.Tensor, expected: int):
    experts, places, both = g.shape
    width, blocks = both // 2, both // 2 // BLOCK
    q = torch.empty(experts, places, width, dtype=FP8, device=g.device)
    scale = torch.empty(experts, blocks, places, dtype=F32, device=g.device)
    # One program per expected row. Programs loop over rows, so any number of them is correct.
    _swiglu_quant[(experts, min(places, expected), blocks // 4)](
        g, q, scale, counts, places, WIDTH=width, BLOCKS=4, SIZE=BLOCK, num_warps=4
    )
    return q, scale.transpose(1, 2)


@triton.jit(do_not_specialize=["places"])
def _swiglu_quant(
    g, q, scales, counts, places, WIDTH: tl.constexpr, BLOCKS: tl.constexpr, SIZE: tl.constexpr
):
    expert = tl.program_id(0).to(tl.int64)
    block = tl.program_id(2) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    end = tl.load(counts + expert)
    for row in range(tl.program_id(1), end, tl.num_programs(1)):
        at = expert * places + row
        gate = tl.load(g + at * 2 * WIDTH + column).to(tl.float32)
        up = tl.load(g + at * 2 * WIDTH + WIDTH + column).to(tl.float32)
        c = gate / (1.0 + tl.exp(-gate)) * up
        scale = tl.maximum(tl.max(tl.abs(c), 1), 1e-10) / FP8_MAX
        scaled = tl.clamp(c / scale[:, None], -FP8_MAX, FP8_MAX)
        tl.store(q + at * WIDTH + column, scaled.to(q.dtype.element_ty))
        tl.store(scales + (expert * (WIDTH // SIZE) + block) * places + row, scale)


def vllms() -> Between:
    from vllm.model_executor.layers.fused_moe.experts import batched_deep_gemm_moe as module

    return lambda g, counts, _: module.persistent_masked_m_silu_mul_quant(g, counts)


def sglangs() -> Between:
    from sglang.kernels.ops.quantization.per_token_group_quant import per_token_group_quant

    options: dict[str, Any] = {"group_size": BLOCK, "fuse_silu_and_mul": True}
    options |= {"column_major_scales": True, "scale_ue8m0": False}
    return lambda g, counts, expected: per_token_group_quant(
        g, masked_m=counts, expected_m=expected, **options
    )


BETWEEN: dict[str, Callable[[], Between]] = {
    "deepgemm + vLLM's": vllms,
    "deepgemm + SGLang's": sglangs,
    "deepgemm + Triton": lambda: by_triton,
}


def peer(case: Case, g: torch.Tensor, between: Between, out: torch.Tensor) -> None:
    multiply = partial(
        require("deep_gemm", REQUIREMENT).m_grouped_fp8_fp4_gemm_nt_masked,
        masked_m=case.counts, expected_m=case.expected, recipe=RECIPE,
    )  # fmt: skip
    w13, w13_scale, w2, w2_scale = case.weights
    multiply((case.x, case.x_scale), (w13, w13_scale), g)
    multiply(between(g, case.counts, case.expected), (w2, w2_scale), out)


def ours(case: Case, x: torch.Tensor, scale: torch.Tensor | None, out: torch.Tensor) -> None:
    options: dict[str, Any] = {"x_scale": scale, "expected_m": case.expected, "out": out}
    batched_experts(x, case.counts, *case.weights, **options)


# --- measuring ------------------------------------------------------------------------------------

FROM_BF16 = "batched_experts bf16"
"""Tokens without scales: the values of the FP8 tokens, quantised by the call."""


def measure(into: Writer, case: Case, rates: Rates, repeats: int) -> None:
    """Check the calls, which share an output, then time the correct ones in turns. Write a row for
    each."""
    counts = case.counts.tolist()
    labels = {"experts": len(counts), "rows": case.expected, "fullest": max(counts)}
    gemms = (2 * WIDTH, HIDDEN), (HIDDEN, WIDTH)
    read = sum(gemm_bytes(sum(map(bool, counts)), 0, n, k) for n, k in gemms)
    flops = sum(gemm_flops(sum(counts), n, k) for n, k in gemms)
    least_s = max(read / bandwidth(rates), flops / rates["fp8_flops_per_s"])
    new = partial(torch.empty, dtype=BF16, device=case.x.device)
    g, out, unscaled = new(*case.x.shape[:2], 2 * WIDTH), new(case.x.shape), case.x.to(BF16)

    def prepared(run: Any, *arguments: Any) -> Timed:
        return Timed(partial(run, case, *arguments), [out], rows=case.there)

    prepare: dict[str, Callable[[], Timed]] = {
        "batched_experts fp8": partial(prepared, ours, case.x, case.x_scale),
        FROM_BF16: partial(prepared, ours, unscaled, None),
    }
    for name, load in BETWEEN.items():
        prepare[name] = partial(lambda load: prepared(peer, g, load()), load)
    correct, row_of = {}, {}
    for name in prepare:
        is_peer = name in BETWEEN
        try:
            correct[name], difference = checked(case, name, prepare[name])
            row_of[name] = {"peer": is_peer, "clock": "device", "calc_diff": difference}
        except ImportError as error:
            into.add(labels, name, peer=is_peer, not_tried=error_line(error))
        except FAILURES as error:
            into.add(labels, name, peer=is_peer, error=error_line(error))
    for name, times in device_times(correct, repeats).items():
        into.add(labels, name, **row_of[name], roofline=1e6 * least_s, **figures(times, "us"))


def checked(case: Case, name: str, prepare: Callable[[], Timed]) -> tuple[Timed, float]:
    """Return the call, after one run, and its calc_diff. Raises RuntimeError: a wrong output."""
    call = prepare()
    call.poison()
    call()
    if name == FROM_BF16:
        case = case._replace(x_scale=torch.ones_like(case.x_scale))
    difference = calc_diff(call.result(), reference(case))
    if not difference <= LARGEST_DIFF:  # also true for NaN
        raise RuntimeError(f"calc_diff {difference:.1e} to the reference")
    return call, difference
