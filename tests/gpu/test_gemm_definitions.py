"""The solutions of the grouped GEMMs alone at their true geometry, against the reference model."""

import importlib.util
from collections.abc import Callable

import pytest
import torch
from deepseek import STAGE_COSINE, STAGE_DIFF, random_fp8
from moe_fp8 import reference
from moe_fp8.baselines import deepgemm_contiguous, deepgemm_masked
from moe_fp8.gemms import contiguous, masked
from moe_fp8.ladder.steps import batched_rows
from moe_fp8.reference import flat_rows

from scripts.common.definitions import GEMMS, MASKED, GemmDefinition
from scripts.common.metrics import calc_diff, cosine

RESERVED = 256
"""Rows of an expert in the masked layout."""
ROWS = {  # of the first experts; the others have none
    "one row": (0, 0, 1),
    "odd": (0, 1, 17, 129, 0, 3, 65),
    "few": (3, 2, 5, 1) * 8,
    "many": (42, 76, 13, 31) * 8,
    "full": (RESERVED, 1, 200, 128) * 8,
    "none": (0,),
}
every_rows = pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
OURS = {"contiguous": contiguous, "masked": masked}
PEERS = {"contiguous": deepgemm_contiguous, "masked": deepgemm_masked}


@pytest.fixture(scope="module", params=GEMMS, ids=lambda d: d.short)
def definition(request) -> GemmDefinition:
    return request.param


@pytest.fixture(scope="module")
def make_inputs(definition) -> Callable[[tuple[int, ...]], list]:
    """Weights once a definition, values as flashinfer-bench draws them; NaN in rows of nobody."""
    e, n, k = definition.experts, definition.n, definition.k
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*dims: int) -> torch.Tensor:
        return torch.randn(dims, generator=generator, device="cuda")

    weights = [random_fp8(generator, e, n, k), normal(e, n // 128, k // 128)]

    def make(rows: tuple[int, ...]) -> list:
        counts = torch.tensor(rows + (0,) * (e - len(rows)), dtype=torch.int32, device="cuda")
        if definition.rows != MASKED:
            m_indptr = torch.zeros(e + 1, dtype=torch.int32, device="cuda")
            torch.cumsum(counts, 0, dtype=torch.int32, out=m_indptr[1:])
            total = sum(rows)
            return [random_fp8(generator, total, k), normal(k // 128, total), *weights, m_indptr]
        a, a_scale = random_fp8(generator, e, RESERVED, k), normal(e, k // 128, RESERVED)
        empty = torch.arange(RESERVED, device="cuda") >= counts.unsqueeze(1)
        a.view(torch.uint8)[empty] = 0x7F
        a_scale.transpose(1, 2)[empty] = torch.nan
        expected = -(-sum(rows) // max(1, sum(r > 0 for r in rows)))
        return [a, a_scale, *weights, counts, expected]

    return make


def new_output(definition: GemmDefinition, inputs: list) -> torch.Tensor:
    dims = (*inputs[0].shape[:-1], definition.n)
    return torch.full(dims, torch.nan, dtype=torch.bfloat16, device="cuda")


def wanted_of(definition: GemmDefinition, inputs: list) -> torch.Tensor:
    a, a_scale, b, b_scale, rows = inputs[:5]
    wanted = new_output(definition, inputs).zero_()
    if definition.rows != MASKED:
        reference.grouped_gemm(a, a_scale, b, b_scale, wanted, flat_rows(rows))
        return wanted
    scales = a_scale.transpose(0, 1).flatten(1)
    expert_rows = batched_rows(rows, RESERVED)
    reference.grouped_gemm(a.flatten(0, 1), scales, b, b_scale, wanted.flatten(0, 1), expert_rows)
    return wanted


def check(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.isfinite().all()
    assert torch.equal(got.ne(0).any(-1), wanted.ne(0).any(-1)), "the rows that are not zero"
    alike = cosine(got, wanted), calc_diff(got, wanted)
    assert alike[0] > STAGE_COSINE and alike[1] < STAGE_DIFF, alike


@every_rows
def test_ours(rows, definition, make_inputs):
    inputs, run = make_inputs(rows), OURS[definition.rows].run
    got, again = new_output(definition, inputs), new_output(definition, inputs)
    run(*inputs, got)
    check(got, wanted_of(definition, inputs))
    run(*inputs, again)
    assert torch.equal(got, again), "from run to run"


def test_the_host_waits_for_nothing(definition, make_inputs):
    """A captured call serves other rows of the same number."""
    inputs, run = make_inputs((40, 9, 0, 16)), OURS[definition.rows].run
    other = make_inputs((16, 0, 9, 40))
    output = new_output(definition, inputs)
    run(*inputs, output)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(*inputs, output)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(*inputs, output)
    for mine, theirs in zip(inputs, other, strict=True):
        if isinstance(mine, torch.Tensor) and mine is not theirs:
            mine.copy_(theirs)
    output.fill_(torch.nan)
    graph.replay()
    check(output, wanted_of(definition, other))


@pytest.mark.parametrize("rows", [r for n, r in ROWS.items() if n != "none"], ids=str)
def test_peers(rows, definition, make_inputs):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not on this GPU")
    if importlib.util.find_spec("deep_gemm") is None:
        pytest.skip("deep_gemm is not installed")
    inputs = make_inputs(rows)
    got = new_output(definition, inputs)
    PEERS[definition.rows].run(*inputs, got)
    check(got, wanted_of(definition, inputs))
