"""Other libraries' grouped GEMMs in torch on the CPU, for tests of programs that measure them."""

from types import ModuleType

import torch
from moe_fp8 import reference


def one_expert(a, a_scale, b, b_scale, out) -> None:
    """`out = a @ b.T` with block scales, for the rows of one expert; scales `[rows, K/128]`."""
    alone = torch.tensor([[0], [len(a)]])
    reference.grouped_gemm(a, a_scale.t(), b.unsqueeze(0), b_scale.unsqueeze(0), out, alone)


def sgl_kernel() -> ModuleType:
    def fp8_blockwise_scaled_grouped_mm(out, *rest):
        a, b, a_scale, b_scale, stride_a, stride_b, stride_out = rest[5:12]
        sizes, offsets = rest[14], rest[15]
        assert a.is_contiguous() and a_scale.is_contiguous() and b.stride(1) == 1
        for e, ((m, n, k), begin) in enumerate(zip(sizes.tolist(), offsets.tolist(), strict=True)):
            assert (k, n) == tuple(b[e].shape) and int(stride_out[e]) == n
            assert int(stride_a[e]) == int(stride_b[e]) == k
            rows = slice(begin, begin + m)
            one_expert(a[rows], a_scale[rows], b[e].t(), b_scale[e].t(), out[rows])

    return module("sgl_kernel", fp8_blockwise_scaled_grouped_mm)


def deep_gemm() -> ModuleType:
    def check_scale(scale) -> None:
        assert scale.dtype == torch.float32 and scale.stride(-2) == 1
        assert scale.stride(-1) % 4 == 0  # TMA

    def m_grouped_fp8_fp4_gemm_nt_masked(a, b, d, masked_m, expected_m, recipe):
        (a, a_scale), (b, b_scale) = a, b
        check_scale(a_scale)
        assert recipe == (1, 128, 128) and expected_m >= 1 and a.shape[1] % 128 == 0
        assert masked_m.is_contiguous() and masked_m.dtype == torch.int32
        for e, rows in enumerate(masked_m.tolist()):
            one_expert(a[e, :rows], a_scale[e, :rows], b[e], b_scale[e], d[e, :rows])

    def m_grouped_fp8_fp4_gemm_nt_contiguous(a, b, d, grouped_layout, recipe):
        (a, a_scale), (b, b_scale) = a, b
        check_scale(a_scale)
        assert recipe == (1, 128, 128) and len(a) % 128 == 0
        for begin in range(0, len(a), 128):
            tile = slice(begin, begin + 128)
            experts = set(grouped_layout[tile].tolist())
            expert = int(grouped_layout[begin])
            assert experts <= {expert, -1}
            if expert >= 0:
                one_expert(a[tile], a_scale[tile], b[expert], b_scale[expert], d[tile])

    return module(
        "deep_gemm", m_grouped_fp8_fp4_gemm_nt_masked, m_grouped_fp8_fp4_gemm_nt_contiguous
    )


def module(name: str, *functions) -> ModuleType:
    stand_in = ModuleType(name)
    for function in functions:
        setattr(stand_in, function.__name__, function)
    return stand_in
