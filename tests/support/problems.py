"""Small grouped GEMM problems and layers' inputs, made the way flashinfer-bench draws them; configs
of the fused layer and its output."""

import dataclasses
import itertools
from typing import Any, NamedTuple

import torch
from moe_fp8 import reference
from moe_fp8.call import BatchedInputs, MoeInputs, RoutedInputs
from moe_fp8.kernels import architectures
from moe_fp8.kernels.configs import GemmConfigSm90 as Sm90
from moe_fp8.kernels.configs import GemmConfigSm100 as Sm100
from moe_fp8.kernels.configs import Schedule
from moe_fp8.ladder.steps import batched_rows
from moe_fp8.layer import make_call
from moe_fp8.reference import flat_rows, route
from moe_fp8.shape import Form, MoeShape
from ptxemu import MODES, options

FP8 = torch.float8_e4m3fn
UNTOUCHED = -7.0
SHAPE = MoeShape(num_experts=16, num_local_experts=5, hidden_size=384, intermediate_size=256,
                 n_group=4, topk_group=2, top_k=3)  # fmt: skip

HOPPER = {
    name: (first.with_swiglu(1), second)
    for name, (first, second) in {
        "8 swapped": 2 * (Sm90(tile_m=8, swap_ab=True, cluster_n=2, stages=3),),
        "8 swapped, early": (
            Sm90(tile_m=8, swap_ab=True, cluster_n=2, stages=3, schedule=Schedule.WHOLE_WAVES),
            Sm90(tile_m=8, swap_ab=True, stages=3, schedule=Schedule.DYNAMIC),
        ),
        "32 swapped": 2 * (Sm90(tile_m=32, swap_ab=True, cluster_n=2, stages=3),),
        "64 overlapped": 2 * (Sm90(tile_m=64, cluster_n=2, overlap=True),),
        "128": 2 * (Sm90(cluster_n=2),),
        "192 on demand": (
            Sm90(tile_m=192, cluster_n=2, stages=3, schedule=Schedule.DYNAMIC, unroll=True),
            Sm90(tile_m=192, cluster_n=1, stages=2, schedule=Schedule.DYNAMIC, unroll=True),
        ),
    }.items()
}
BLACKWELL = {
    "16 swapped": Sm100(tile_m=16, swap_ab=True, stages=3),
    "32 swapped": Sm100(tile_m=32, swap_ab=True, schedule=Schedule.DYNAMIC),
    "64 swapped": Sm100(tile_m=64, swap_ab=True),
    "16 swapped in pairs": Sm100(tile_m=16, swap_ab=True, stages=3),
    "32 swapped in pairs": Sm100(tile_m=32, swap_ab=True, schedule=Schedule.DYNAMIC),
    "128": Sm100(),
    "256 on demand": Sm100(tile_n=256, schedule=Schedule.DYNAMIC),
    "256 by two CTAs": Sm100(tile_n=256, cluster_m=2, mma_ctas=2, schedule=Schedule.DYNAMIC),
}

GATHERED = ("word", "choose", "number", "gemm1", "gemm2", "combine")
PERMUTED = (*GATHERED[:3], "permute", *GATHERED[3:])
"""The kernels of a call, in order."""
OVERWRITTEN = r"launch 4, .* writes .* launch 3, .* asynchronous copy read"
"""A hazard: GEMM2 writes rows that GEMM1 reads."""
TOLERANCE = {1: 1e-4, 2: 1e-7}
"""calc_diff to the model, by terms: a value that is another FP8 number there counts for one term's
rounding, of the second term on top for less than a sixteenth of it."""


def use_target(monkeypatch, target: str) -> None:
    """Make `target` what all kernels are compiled for, and by whose rules configs are chosen."""
    architecture = architectures.of_target(target)
    monkeypatch.setattr(architectures, "of_device", lambda device: architecture)


class Gemm(NamedTuple):
    """A grouped GEMM and its expected output."""

    a: torch.Tensor
    a_scale: torch.Tensor
    b: torch.Tensor
    b_scale: torch.Tensor
    expert_rows: torch.Tensor
    expected: torch.Tensor

    def output(self) -> torch.Tensor:
        """A fresh output whose rows show whether they were written."""
        return torch.full_like(self.expected, UNTOUCHED)


def fp8(*shape: int) -> torch.Tensor:
    return torch.randn(shape).clamp_(-2, 2).to(FP8)


def place(rows: tuple[int, ...], max_rows: int, layout: str) -> tuple[torch.Tensor, list[int], int]:
    """(expert_rows, first row of each expert, rows in all) of a way to lay rows out."""
    if layout == "batched":
        counts = torch.tensor(rows, dtype=torch.int32)
        starts = [e * max_rows for e in range(len(rows))]
        return batched_rows(counts, max_rows), starts, len(rows) * max_rows
    step = 1 if layout == "flat" else 8
    ends = list(itertools.accumulate(-(-count // step) * step for count in rows))
    starts = [0, *ends[:-1]]
    total = -(-ends[-1] // 4) * 4 + 4
    if layout == "flat":
        return flat_rows(torch.tensor([0, *ends], dtype=torch.int32)), starts, total
    own_ends = [start + count for start, count in zip(starts, rows, strict=True)]
    return torch.tensor([starts, own_ends], dtype=torch.int32), starts, total


def gemm(
    rows: tuple[int, ...],
    n: int,
    k: int,
    max_rows: int,
    exact: bool = False,
    layout: str = "batched",
    per_channel: bool = False,
) -> Gemm:
    """A problem with NaN in rows of no expert; `exact` draws small integers and powers of two, for
    which float32 arithmetic in any order is exact. `per_channel`: scales for rows of B."""
    torch.manual_seed(sum(rows) + n + k)
    experts = len(rows)
    expert_rows, starts, total = place(rows, max_rows, layout)
    scales = (experts, n, 1) if per_channel else (experts, n // 128, k // 128)
    if exact:
        a = torch.randint(-2, 3, (total, k)).float().to(FP8)
        b = torch.randint(-2, 3, (experts, n, k)).float().to(FP8)
        a_scale = 2.0 ** torch.randint(-2, 3, (k // 128, total)) * (-1) ** torch.arange(total)
        b_scale = 2.0 ** torch.randint(-2, 3, scales)
    else:
        a, b = fp8(total, k), fp8(experts, n, k)
        a_scale, b_scale = torch.randn(k // 128, total), torch.randn(scales)
    padding = torch.ones(total, dtype=torch.bool)
    for start, count in zip(starts, rows, strict=True):
        padding[start : start + count] = False
    a.view(torch.uint8)[padding] = 0x7F  # NaN
    a_scale[:, padding] = torch.nan
    expected = torch.full((total, n), UNTOUCHED, dtype=torch.bfloat16)
    reference.grouped_gemm(a, a_scale, b, b_scale, expected, expert_rows)
    return Gemm(a, a_scale, b, b_scale, expert_rows, expected)


def layer_inputs(
    shape: MoeShape, tokens: int, bias: torch.Tensor | None, offset: int, scaling: float
) -> MoeInputs:
    torch.manual_seed(tokens)
    e, h, i = shape.num_local_experts, shape.hidden_size, shape.intermediate_size
    return MoeInputs(
        torch.randn(tokens, shape.num_experts).to(shape.logits_dtype), bias,
        fp8(tokens, h), torch.randn(h // 128, tokens),
        fp8(e, 2 * i, h), torch.randn(e, 2 * i // 128, h // 128),
        fp8(e, h, i), torch.randn(e, h // 128, i // 128), offset, scaling,
    )  # fmt: skip


def by_model(
    inputs: MoeInputs | RoutedInputs, shape: MoeShape, terms: int = 1, gate_first: bool = False
) -> torch.Tensor:
    """Return the reference model's output."""
    tokens = inputs[2]
    out = torch.full(tokens.shape, torch.nan, dtype=torch.bfloat16, device=tokens.device)
    reference.fused(inputs, out, shape, terms, gate_first)
    return out


def configs_of(target: str, name: str, terms: int = 1) -> tuple[Any, Any]:
    """Return the configs of both GEMMs by a name of HOPPER or BLACKWELL; of "192 gathered" GEMM1
    gathers its rows."""
    if target == "sm_90a":
        first, second = HOPPER[name.replace("gathered", "on demand")]
        first = dataclasses.replace(first.with_swiglu(terms), gathers="gathered" in name)
    else:
        second = BLACKWELL[name]
        first = second.with_swiglu(terms, "pairs" in name)
    return first, dataclasses.replace(second, terms=terms)


def inputs_of(tokens: int, offset: int) -> MoeInputs:
    bias = torch.zeros(SHAPE.num_experts)
    bias[7] = 2.0  # one full expert, others with a few rows or none
    return layer_inputs(SHAPE, tokens, bias.bfloat16(), offset, 2.5)


def odd_tokens(tokens: int, hidden: int) -> torch.Tensor:
    """Blocks of every magnitude, of zeros of both signs, with a NaN, with infinities; of some the
    largest value is 448 times a power of two."""
    torch.manual_seed(tokens)
    x = torch.randn(tokens, hidden).bfloat16()
    blocks = x.view(-1, 128)
    blocks[8::14, 9] = 28.0
    exponents = torch.linspace(-133, 127, len(blocks))
    blocks *= torch.exp2(exponents.round()).bfloat16().unsqueeze(1)
    blocks.nan_to_num_(posinf=1e38, neginf=-1e38)
    blocks[::7] = 0
    blocks[::14, ::2] = -0.0
    blocks[1::7, 5] = -0.0
    blocks[3, 17], blocks[4, 18], blocks[5, 19] = torch.nan, torch.inf, -torch.inf
    return x


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if the bits are equal; any NaN equals any other."""
    a32, b32 = a.float(), b.float()
    numbers = torch.equal(a32.isnan(), b32.isnan())
    ours, theirs = (x.nan_to_num(nan=0.0) for x in (a32, b32))
    return numbers and torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


def fused_output(
    inputs: MoeInputs | RoutedInputs | BatchedInputs,
    shape: MoeShape,
    configs: tuple[Any, Any] | None,
    form: Form | None = None,
    fill: float = torch.nan,
    poison: bool = True,
) -> torch.Tensor:
    """Return the output that the fused layer writes over `fill`.

    The TMA boxes of a GEMM2 on demand include rows of other experts, which may still be written
    and which it does not use: without `poison` they are hazards.
    """
    out = torch.full(inputs[2].shape, fill, dtype=torch.bfloat16, device=inputs[2].device)
    options.poison_races = poison and configs is not None and configs[1].dynamic
    tokens, terms = out.shape[-2], configs[1].terms if configs else 1
    make_call(tokens, out.device, shape, terms, configs, form)(inputs, out)
    return out


def fused_output_of(
    inputs: MoeInputs, name: str, terms: int = 1, poison: bool = True, target: str = "sm_90a"
) -> torch.Tensor:
    return fused_output(inputs, SHAPE, configs_of(target, name, terms), poison=poison)


def few_local_rows() -> MoeInputs:
    """Return inputs with so few rows that GEMM2 writes none that GEMM1 reads."""
    inputs = inputs_of(41, 9)
    assert 0 < int(route(inputs, SHAPE).m_indptr[-1]) < 41 * SHAPE.top_k // 3
    return inputs


def with_local_rows(tokens: int, rows: int) -> MoeInputs:
    """The first tokens choose experts of this rank alone, one what is left of the rows, the others
    none."""
    inputs = inputs_of(tokens, 4)
    logits = inputs.routing_logits.clone()
    local, left = divmod(rows, SHAPE.top_k)
    logits[:local, 4:7] += 20.0
    logits[local:, 4:9] -= 20.0
    if left:
        logits[local, 9 - left : 12 - left] = 20.0  # of experts 4 to 8, and of the same groups
    inputs = inputs._replace(routing_logits=logits, routing_bias=torch.zeros_like(inputs[1]))
    assert int(route(inputs, SHAPE).m_indptr[-1]) == rows
    return inputs


def messages(inputs: MoeInputs, emulator) -> set[str]:
    """Return the messages of all hazards in all modes, those of other experts' rows included."""
    seen = set()
    for emulator.options.mode in MODES:
        del emulator.reports[:]
        fused_output_of(inputs, "192 on demand", poison=False)
        seen |= {hazard["message"] for report in emulator.reports for hazard in report.hazards}
    return seen
