"""What the other definitions need, compiled at their geometries for both architectures."""

import pytest
from markers import more
from moe_fp8.kernels import operations as kernels
from moe_fp8.kernels.architectures import BLACKWELL, HOPPER
from moe_fp8.kernels.batched import compile_batched_gemm
from moe_fp8.problem import MoeShape
from test_compile import compiled_code, resources  # noqa: F401

from scripts.common.definitions import GEMMS, MASKED, MOE

ROWS = {  # of an expert
    "kimi_k2": (8, 8),
    "kimi_k2_e384": (128, 128),
    "qwen3_235b": (128, 8),
    "qwen3_30b": (8, 128),
    "qwen3_next": (8, 8),
}
CASES = [
    (definition, architecture, rows, terms)
    for definition in MOE[1:]
    for architecture, rows, terms in zip(
        (HOPPER, BLACKWELL), ROWS[definition.short], (2, 1), strict=True
    )
]


@pytest.mark.parametrize(
    ("definition", "architecture", "rows", "terms"),
    [*CASES[:1], *more(*CASES[1:])],
    ids=[f"{d.short}-{a.target}-{rows} rows-{terms} terms" for d, a, rows, terms in CASES],
)
def test_fused(definition, architecture, rows, terms, compiled_code, tmp_path):  # noqa: F811
    """With what the heuristic picks for few or for many rows."""
    shape = MoeShape(**definition.shape)
    tokens = rows * shape.num_experts // shape.top_k
    first, second = architecture.choose_layer(tokens, shape, terms)
    ptx, cubin = compiled_code(
        kernels.compile_fused, shape, first, second, 132, architecture.target
    )
    assert first.swap_ab == (rows == 8)
    # Two ways to route, the permute where rows are not gathered, two GEMMs and the combine.
    assert ptx.count(".entry") == (6 if first.swap_ab else 7)
    if architecture is HOPPER:
        assert resources(cubin, tmp_path)["frame"] == 0, "spills"


@pytest.mark.parametrize(
    "definition", [d for d in GEMMS if d.rows == MASKED], ids=lambda d: d.short
)
@pytest.mark.parametrize("architecture", [HOPPER, *more(BLACKWELL)], ids=lambda a: a.target)
@pytest.mark.parametrize("expected_m", [1, *more(29)])
def test_batched_gemm(expected_m, architecture, definition, compiled_code, tmp_path):  # noqa: F811
    n, k, target = definition.n, definition.k, architecture.target
    config = architecture.choose(expected_m, n, k)
    ptx, cubin = compiled_code(compile_batched_gemm, config, n, k, definition.experts, target)
    assert ptx.count(".entry") == 2
    if architecture is HOPPER:
        assert resources(cubin, tmp_path)["frame"] == 0, "spills"
