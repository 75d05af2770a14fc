"""The grouped GEMM on packed MXFP4 weights: the bits of the FP8 GEMM on the same values."""

import pytest
import torch
from markers import backends, more
from moe_fp8 import from_mxfp4, pack_mxfp4
from moe_fp8.kernels.configs import GemmConfigSm90 as Sm90
from moe_fp8.kernels.configs import Schedule
from moe_fp8.kernels.grouped_gemm import compile_grouped_gemm
from mxfp4_values import drawn
from problems import FP8, UNTOUCHED, place

pytestmark = backends("emulator")
IN_REGISTERS = [
    Sm90(tile_m=8, tile_n=256, swap_ab=True, packed=True, stages=3),
    Sm90(tile_m=8, tile_n=256, swap_ab=True, packed=True, ctas=2),
    Sm90(tile_m=24, tile_n=256, swap_ab=True, packed=True, ctas=2, schedule=Schedule.DYNAMIC),
    Sm90(tile_m=64, tile_n=256, swap_ab=True, packed=True, stages=2),
    Sm90(tile_m=16, tile_n=256, swap_ab=True, packed=True, terms=2, ctas=2),
]
CONVERTED = [
    Sm90(packed=True, stages=3),
    Sm90(tile_m=64, packed=True, cluster_n=2, overlap=True, stages=3),
    Sm90(packed=True, cluster_n=2, schedule=Schedule.DYNAMIC, stages=2),
]
ROWS = (0, 1, 17, 64, 65, 130)


@pytest.mark.parametrize("k", [256, *more(128, 640)])
@pytest.mark.parametrize("span", [11, 14])
@pytest.mark.parametrize("config", [*IN_REGISTERS, *CONVERTED], ids=str)
def test_packed_weights_give_the_bits_of_fp8_weights(config, span, k, mode, emulator):
    n, experts = 384, len(ROWS)
    packed, exponents = drawn(experts, n, k, span=span)
    b, b_scale = from_mxfp4(packed, exponents)
    blocks, scale, _ = pack_mxfp4(packed, exponents)
    assert torch.equal(scale, b_scale)
    expert_rows, _, total = place(ROWS, 0, "flat")
    a = torch.randn(total, config.terms * k).clamp_(-2, 2).to(FP8)
    a_scale = torch.randn(k // 128, total)
    outs = []
    for each, weights in ((Sm90(tile_m=64, terms=config.terms), b), (config, blocks)):
        out = torch.full((total, n), UNTOUCHED, dtype=torch.bfloat16)
        function = compile_grouped_gemm(each, n, k, experts, "sm_90a")
        counter = torch.zeros(1, dtype=torch.int32)
        ctas = 4 * each.cluster_size
        function(a, a_scale, weights, b_scale, out, expert_rows, counter, ctas)
        assert emulator.reports[-1].hazards == []
        outs.append(out)
    assert torch.equal(*outs)
