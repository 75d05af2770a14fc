"""Small grouped GEMM problems and layers' inputs, made the way flashinfer-bench draws them; the
fused layer's output."""

import itertools
from typing import Any, NamedTuple

import torch
from moe_fp8 import reference
from moe_fp8.call import BatchedInputs, Form, MoeInputs, MoeShape, RoutedInputs
from moe_fp8.kernels import architectures
from moe_fp8.ladder.steps import batched_rows
from moe_fp8.layer import make_call
from moe_fp8.reference import flat_rows
from ptxemu import options

FP8 = torch.float8_e4m3fn
UNTOUCHED = -7.0


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
    total = -(-ends[-1] // 4) * 4
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
) -> Gemm:
    """A problem with NaN in rows of no expert; `exact` draws small integers and powers of two, for
    which float32 arithmetic in any order is exact."""
    torch.manual_seed(sum(rows) + n + k)
    experts = len(rows)
    expert_rows, starts, total = place(rows, max_rows, layout)
    if exact:
        a = torch.randint(-2, 3, (total, k)).float().to(FP8)
        b = torch.randint(-2, 3, (experts, n, k)).float().to(FP8)
        a_scale = 2.0 ** torch.randint(-2, 3, (k // 128, total)) * (-1) ** torch.arange(total)
        b_scale = 2.0 ** torch.randint(-2, 3, (experts, n // 128, k // 128))
    else:
        a, b = fp8(total, k), fp8(experts, n, k)
        a_scale, b_scale = torch.randn(k // 128, total), torch.randn(experts, n // 128, k // 128)
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


def fused_output(
    inputs: MoeInputs | RoutedInputs | BatchedInputs,
    shape: MoeShape,
    configs: tuple[Any, Any],
    form: Form | None = None,
    fill: float = torch.nan,
    poison: bool = True,
) -> torch.Tensor:
    """Return the output that the fused layer writes over `fill`.

    The TMA boxes of a GEMM2 on demand include rows of other experts, which may still be written
    and which it does not use: without `poison` they are hazards.
    """
    out = torch.full(inputs[2].shape, fill, dtype=torch.bfloat16)
    options.poison_races = poison and configs[1].dynamic
    tokens, terms = out.shape[-2], configs[1].terms
    make_call(tokens, out.device, shape, terms, configs, form)(inputs, out)
    return out
