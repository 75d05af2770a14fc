"""The GEMM comparison off the GPU: what it parses, and that every peer gets the same problem."""

import dataclasses
import enum
import sys
import types

import gemm_bench
import pytest
import torch
from common import UsageError
from moe_fp8.core import model
from moe_fp8.core.metrics import calc_diff

CPU = torch.device("cpu")
BLOCK = gemm_bench.BLOCK


class Order(enum.Enum):
    ROWS = 1
    COLUMNS = 2


@dataclasses.dataclass(frozen=True)
class Config:
    tile_m: int = 128
    swap: bool = False
    cluster: tuple = (1, 1)
    order: Order = Order.ROWS

    def __post_init__(self) -> None:
        if self.tile_m > 256:
            raise ValueError("tile_m too large")


def test_configs_are_parsed_by_the_fields_of_the_dataclass() -> None:
    parsed = gemm_bench.parse_config("tile_m=64, swap=true,cluster=2x1,order=COLUMNS", Config)
    assert parsed == Config(64, True, (2, 1), Order.COLUMNS)
    assert gemm_bench.parse_config("", Config) == Config()


@pytest.mark.parametrize("text", ["tile_k=1", "tile_m", "tile_m=x", "swap=2", "tile_m=512"])
def test_a_bad_config_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="--config"):
        gemm_bench.parse_config(text, Config)


def test_the_kernels_own_config_is_accepted() -> None:
    from moe_fp8.core.config import GemmConfig

    assert gemm_bench.parse_config("tile_m=64,stages=4", GemmConfig) == GemmConfig(
        tile_m=64, stages=4
    )


def test_work_of_a_problem() -> None:
    problem = gemm_bench.Problem(experts=8, rows=128, n=4096, k=7168)
    assert problem.flops == 2 * 8 * 128 * 4096 * 7168
    weights, tokens, out = 8 * 4096 * 7168, 8 * 128 * 7168, 8 * 128 * 4096 * 2
    scales = 4 * (weights / BLOCK**2 + tokens / BLOCK)
    assert problem.bytes == weights + tokens + out + scales
    assert gemm_bench.Problem(8, 130, 128, 128).max_rows == 256


def dequantised(a, a_scale, b, b_scale):
    """A [M, K] with scales [M, K/128] and B [N, K] with [N/128, K/128], in float32."""
    a = a.float() * a_scale.repeat_interleave(BLOCK, 1)
    b = b.float() * b_scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return a @ b.t()


def deepgemm_contiguous(a, b, d, grouped_layout, recipe):
    """What DeepGEMM documents: row i belongs to the expert grouped_layout[i], -1 is padding."""
    assert recipe == (1, BLOCK, BLOCK) and grouped_layout.dtype == torch.int32
    (a, a_scale), (b, b_scale) = a, b
    assert a_scale.stride(0) == 1 and a_scale.stride(1) % 4 == 0  # rows contiguous, 16 bytes
    for e in range(len(b)):
        rows = (grouped_layout == e).nonzero()[:, 0]
        assert rows[0] % BLOCK == 0
        d[rows] = dequantised(
            a.view(torch.uint8)[rows].view(a.dtype), a_scale[rows], b[e], b_scale[e]
        ).bfloat16()


def deepgemm_masked(a, b, d, masked_m, expected_m, recipe):
    (a, a_scale), (b, b_scale) = a, b
    assert recipe == (1, BLOCK, BLOCK) and masked_m.dtype == torch.int32
    assert a_scale.stride(1) == 1 and a_scale.stride(2) == a.shape[1]
    assert a_scale.stride(0) == a.shape[1] * a_scale.shape[2]
    for e, m in enumerate(masked_m.tolist()):
        assert m == expected_m
        d[e, :m] = dequantised(a[e, :m], a_scale[e, :m], b[e], b_scale[e]).bfloat16()


def sgl_grouped_mm(output, *arguments):
    """What SGLang passes: B and its scales with K before N, expert offsets, sizes [E, 3]."""
    a, b, a_scale, b_scale, stride_a, stride_b, stride_c = arguments[5:12]
    sizes, offsets = arguments[14], arguments[15]
    assert all(p.dtype == torch.int64 and p.shape == (len(b),) for p in arguments[:5])
    assert stride_a.tolist() == [a.shape[1]] * len(b) == stride_b.tolist()
    assert stride_c.tolist() == [output.shape[1]] * len(b)
    assert a_scale.is_contiguous() and a.is_contiguous()
    for e, ((m, n, k), begin) in enumerate(zip(sizes.tolist(), offsets.tolist(), strict=True)):
        assert (k, n) == tuple(b[e].shape)
        rows = slice(begin, begin + m)
        output[rows] = dequantised(a[rows], a_scale[rows], b[e].t(), b_scale[e].t()).bfloat16()


@pytest.fixture
def peers(monkeypatch):
    deep_gemm = types.ModuleType("deep_gemm")
    deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous = deepgemm_contiguous
    deep_gemm.m_grouped_fp8_fp4_gemm_nt_masked = deepgemm_masked
    sgl_kernel = types.ModuleType("sgl_kernel")
    sgl_kernel.fp8_blockwise_scaled_grouped_mm = sgl_grouped_mm
    monkeypatch.setitem(sys.modules, "deep_gemm", deep_gemm)
    monkeypatch.setitem(sys.modules, "sgl_kernel", sgl_kernel)
    return gemm_bench.deepgemm_variants() + gemm_bench.sgl_variants()


@pytest.mark.parametrize("rows", [128, 17, 200])
def test_every_peer_is_given_the_problem_of_the_model(peers, rows: int) -> None:
    problem = gemm_bench.Problem(experts=3, rows=rows, n=256, k=384)
    x = gemm_bench.Operands(problem, CPU, seed=1)
    model.grouped_gemm(x.a, x.a_scale, x.b, x.b_scale, x.out, x.layout, None)
    expected = x.out[x.valid].clone()
    assert len(peers) == 3
    for variant in peers:
        call = variant.prepare(x)
        call.poison()
        call.launch()
        result = call.result()
        assert result.shape == (3 * rows, 256), variant.name
        assert calc_diff(result, expected) < 1e-5, variant.name


def test_a_peer_that_is_not_there_is_said_and_skipped(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "sgl_kernel", None)
    variants = gemm_bench.collect_variants(["default", "tile_m=64"], ["sgl"])
    assert [v.name for v in variants] == ["ours default", "ours tile_m=64"]
    assert "sgl: not measured" in capsys.readouterr().err


def test_a_wrong_or_failed_variant_is_a_row_with_the_reason() -> None:
    row = {"experts": 8, "rows": 128, "n": 256, "k": 256, "variant": "x", "error": "wrong: ..."}
    cells = gemm_bench.table_row(row)
    assert len(cells) == len(gemm_bench.HEADER) and "wrong: ..." in cells


def test_shapes() -> None:
    assert gemm_bench.shape("4096x7168") == (4096, 7168)
    for text in ("4096", "100x128", "0x128", "axb"):
        with pytest.raises(UsageError):
            gemm_bench.shape(text)
