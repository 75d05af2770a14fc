"""The fused layer as it ships: DeepSeek-V3's geometry, the configs and the CTAs of a whole GPU."""

import pytest
import torch
from markers import more
from moe_fp8 import reference
from moe_fp8.call import MoeInputs, MoeShape
from moe_fp8.kernels import architectures
from moe_fp8.layer import make_call
from problems import fp8, use_target

from scripts.common.metrics import calc_diff

SHAPE = MoeShape()
MULTIPROCESSORS = {"sm_90a": 132, "sm_100a": 148}
OFFSET, CHOSEN = 32, (3, 17, 18)
"""First local expert; the local ones that every token chooses. The other weights stay zeros, which
nobody touches: pages that take no memory."""


def inputs_of(tokens: int) -> MoeInputs:
    torch.manual_seed(tokens)
    e, h, i = SHAPE.num_local_experts, SHAPE.hidden_size, SHAPE.intermediate_size
    bias = torch.zeros(SHAPE.num_experts)
    bias[[OFFSET + expert for expert in CHOSEN]] = 2.0
    w13, w2 = (torch.zeros(e, *of, dtype=torch.float8_e4m3fn) for of in ((2 * i, h), (h, i)))
    for expert in CHOSEN:
        w13[expert], w2[expert] = fp8(2 * i, h), fp8(h, i)
    return MoeInputs(
        torch.randn(tokens, SHAPE.num_experts), bias.bfloat16(),
        fp8(tokens, h), torch.randn(h // 128, tokens),
        w13, torch.randn(e, 2 * i // 128, h // 128),
        w2, torch.randn(e, h // 128, i // 128), OFFSET, 2.5,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("target", "tokens", "terms", "schedule"),
    [
        ("sm_90a", 3, 1, "eager"),
        ("sm_90a", 5, 1, "lazy"),
        *more(
            ("sm_90a", 3, 2, "eager"),
            ("sm_90a", 12, 1, "eager"),
            ("sm_90a", 12, 1, "lazy"),
            ("sm_100a", 3, 1, "eager"),
            ("sm_100a", 12, 1, "lazy"),
        ),
    ],
)
def test_as_the_model(target, tokens, terms, schedule, emulator, monkeypatch):
    """GEMM2 takes tiles on demand while GEMM1 still runs, with 5 tokens and more."""
    use_target(monkeypatch, target)
    monkeypatch.setattr(architectures, "num_sms", lambda device: MULTIPROCESSORS[target])
    emulator.options.poison_races = True  # boxes with rows of the next expert, still written
    emulator.options.mode, emulator.options.dependents = schedule, "early"
    emulator.options.max_instructions = 40_000_000  # who asks for rows seldom does so in vain
    inputs = inputs_of(tokens)
    wanted, out = (
        torch.full((tokens, SHAPE.hidden_size), torch.nan, dtype=torch.bfloat16) for _ in range(2)
    )
    reference.fused(inputs, wanted, SHAPE, terms=terms)
    make_call(tokens, out.device, SHAPE, terms)(inputs, out)
    assert calc_diff(out, wanted) < 1e-7
    assert out.isfinite().all() and (wanted.abs().sum(dim=1) > 0).all()
    assert [report.hazards for report in emulator.reports] == 4 * [[]]
