"""The grouped GEMMs alone: their references, the solutions, what these refuse, the peers."""

import sys

import fake_libraries
import pytest
import torch
from markers import more
from moe_fp8.call import DEEPSEEK_V3
from moe_fp8.gemms import contiguous, masked
from test_definitions import reference as reference_of

from scripts.common.definitions import CONTIGUOUS, GEMMS, MASKED
from scripts.common.metrics import calc_diff
from scripts.measure import gemm_problems

ROWS = (0, 1, 17, 129, 0, 3)
EXPERTS, N, K, MAX_ROWS = len(ROWS), 256, 384, 256
"""References and solutions take every size from their arguments."""
REFERENCE = {d.rows: reference_of(d) for d in GEMMS}
RUN = {CONTIGUOUS: contiguous.run, MASKED: masked.run}
every_layout = pytest.mark.parametrize("layout", [CONTIGUOUS, MASKED])
every_rows = pytest.mark.parametrize("rows", [ROWS, (0, 0), (1,), (0, 130)], ids=str)


def test_shapes_are_the_layers() -> None:
    assert {(d.n, d.k) for d in GEMMS} == set(gemm_problems.LAYER_SHAPES.values())


def fp8(generator: torch.Generator, *dims: int) -> torch.Tensor:
    return torch.randn(dims, generator=generator).clamp_(-2, 2).to(torch.float8_e4m3fn)


def arguments(layout: str, rows: tuple[int, ...] = ROWS) -> list:
    """Return the inputs in the definition's order; unused reserved rows hold NaN."""
    generator = torch.Generator().manual_seed(sum(rows))

    def normal(*dims: int) -> torch.Tensor:
        return torch.randn(dims, generator=generator)

    weights = [fp8(generator, len(rows), N, K), normal(len(rows), N // 128, K // 128)]
    counts = torch.tensor(rows, dtype=torch.int32)
    if layout == CONTIGUOUS:
        ends = counts.cumsum(0, dtype=torch.int32)
        m_indptr = torch.cat([ends.new_zeros(1), ends])
        return [fp8(generator, sum(rows), K), normal(K // 128, sum(rows)), *weights, m_indptr]
    a, a_scale = fp8(generator, len(rows), MAX_ROWS, K), normal(len(rows), K // 128, MAX_ROWS)
    reserved = torch.arange(MAX_ROWS) >= counts.unsqueeze(1)
    a.view(torch.uint8)[reserved] = 0x7F  # NaN
    a_scale.transpose(1, 2)[reserved] = torch.nan
    return [a, a_scale, *weights, counts, 25]


def new_output(inputs: list) -> torch.Tensor:
    return torch.full((*inputs[0].shape[:-1], N), torch.nan, dtype=torch.bfloat16)


def dequantised(layout: str, inputs: list) -> torch.Tensor:
    """Compute in float64, one expert after the other."""
    a, a_scale, b, b_scale, rows = inputs[:5]
    x = a.double() * a_scale.transpose(-1, -2).double().repeat_interleave(128, -1)
    w = b.double() * b_scale.double().repeat_interleave(128, -1).repeat_interleave(128, -2)
    wanted = torch.zeros(*a.shape[:-1], N, dtype=torch.float64)
    for expert in range(len(b)):
        if layout == CONTIGUOUS:
            own: tuple = (slice(int(rows[expert]), int(rows[expert + 1])),)
        else:
            own = expert, slice(int(rows[expert]))
        wanted[own] = x[own] @ w[expert].T
    return wanted


@every_rows
@every_layout
def test_reference_is_the_product_of_dequantised_values(layout, rows) -> None:
    inputs = arguments(layout, rows)
    got, wanted = REFERENCE[layout](*inputs), dequantised(layout, inputs)
    assert got.dtype == torch.bfloat16 and got.shape == wanted.shape
    assert bool((wanted != 0).any()) == (sum(rows) > 0)
    torch.testing.assert_close(got.double(), wanted, rtol=2**-8, atol=1e-4)


def is_right(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Within a rounding of bfloat16, and the same rows zero."""
    same_rows = torch.equal(got.ne(0).any(-1), wanted.ne(0).any(-1))
    return bool(got.isfinite().all()) and same_rows and calc_diff(got, wanted) < 1e-6


@every_rows
@every_layout
def test_ours_against_the_reference(layout, rows) -> None:
    inputs = arguments(layout, rows)
    output = new_output(inputs)
    RUN[layout](*inputs, output)
    assert is_right(output, REFERENCE[layout](*inputs))


WRONG = {
    "a": [lambda x: x.float(), lambda x: x[..., :-128], lambda x: x.unsqueeze(0), lambda x: None],
    "a_scale": [lambda x: x.half(), lambda x: x[..., :-1], lambda x: x.transpose(-1, -2)],
    "b": [lambda x: x[0], lambda x: x[:, :-1], lambda x: x.view(torch.int8), lambda x: 3],
    "b_scale": [lambda x: x[:-1], lambda x: x.to("meta"), lambda x: x.double()],
    "rows": [lambda x: x.long(), lambda x: x[1:], lambda x: x.tolist()],
    "out": [lambda x: x.float(), lambda x: x[..., :-1], lambda x: x.transpose(-1, -2)],
}


@every_layout
@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(layout, name) -> None:
    inputs = arguments(layout)
    place = -1 if name == "out" else list(WRONG).index(name)
    argument = {"rows": "m_indptr" if layout == CONTIGUOUS else "masked_m"}.get(name, name)
    for wrong in WRONG[name]:
        given = [*inputs, new_output(inputs)]
        given[place] = wrong(given[place])
        with pytest.raises(ValueError, match=f"^{argument}: expected .*, got "):
            RUN[layout](*given)
        assert given[-1] is None or bool(given[-1].isnan().all()), "nothing was written"


def test_wrong_rows_of_the_masked_layout_are_named() -> None:
    inputs = arguments(MASKED)
    given = [*inputs, new_output(inputs)]
    for wrong in (2.5, None, True, torch.tensor(3)):
        given[5] = wrong
        with pytest.raises(ValueError, match="^expected_m: expected an integer, got "):
            masked.run(*given)
    a, out = given[0][:, :100].contiguous(), given[-1][:, :100].contiguous()
    with pytest.raises(ValueError, match="^a: expected max_rows a multiple of 128, got 100"):
        masked.run(a, *given[1:5], 3, out)


@pytest.mark.parametrize("expected", [-5, 0, 1, 10**6])
def test_the_expected_rows_change_nothing(expected) -> None:
    inputs = arguments(MASKED)
    outputs = [new_output(inputs) for _ in range(2)]
    masked.run(*inputs, outputs[0])
    masked.run(*inputs[:5], expected, outputs[1])
    assert torch.equal(*outputs)


@pytest.mark.parametrize("rows", [(0, 0), *more((ROWS,))], ids=str)
@every_layout
def test_peers_on_a_stand_in_for_the_library(layout, rows, monkeypatch) -> None:
    """Triton in its interpreter; the masked stand-in stores whole tiles, as the real kernel."""
    pytest.importorskip("triton", reason="triton is not installed")
    from moe_fp8.baselines import deepgemm_contiguous, deepgemm_masked

    library = fake_libraries.deep_gemm(DEEPSEEK_V3)
    masked = library.m_grouped_fp8_fp4_gemm_nt_masked

    def whole_tiles(a, b, d, masked_m, **rest) -> None:
        for expert, count in enumerate(masked_m.tolist()):
            d[expert, count : -(-count // 64) * 64] = torch.nan
        masked(a, b, d, masked_m, **rest)

    monkeypatch.setattr(library, "m_grouped_fp8_fp4_gemm_nt_masked", whole_tiles)
    monkeypatch.setitem(sys.modules, "deep_gemm", library)
    module = deepgemm_contiguous if layout == CONTIGUOUS else deepgemm_masked
    monkeypatch.setattr(module, "require_gpu", lambda device, capabilities: None)
    monkeypatch.setattr(module, "require_first_device", lambda device: None)
    inputs = arguments(layout, rows)
    output = new_output(inputs)
    if layout == MASKED:
        output.zero_()  # rows of no tile; what the real kernel leaves there is not known either
        output[:, 64:].fill_(torch.nan)
    module.run(*inputs, output)
    assert is_right(output, REFERENCE[layout](*inputs))
