"""Flat rows: `[rows, K]` in expert order with the boundaries on the device, and no host sync.

What: the rows of all experts follow each other without a gap. The kernels read the boundaries
`m_indptr` on the device; a tile that reaches past an expert's end stores only its own rows.
Buffers are sized by the most rows that T tokens can have, grids are persistent, and every launch
follows from T alone, so the whole call can be captured in a CUDA graph for any routing.

Why: v3's host waits for the routing to know how many rows to pad to. Until the answer is there
it launches nothing, and then the GPU waits for it. Nor is there a padded row left to compute.

Expected gain over v3: one round trip between host and GPU a call, and the activation of the
padded rows; most at small T, where the host is what a call waits for.
"""

from typing import Any

from .layer.calls import run_of
from .layer.pipeline import Choose, PlacedLayer, PlacedRows
from .layer.rows import flat_rows
from .numerics import round_up
from .problem import GroupedRows, MoeShape, expected_rows

SOLUTION = {
    "name": "cutedsl_moe_fp8_flat",
    "routings": ["deepseek_v3", "renormalize"],
    "clamps": True,
}


def flat_configs(tokens: int, shape: MoeShape, choose: Choose) -> tuple[Any, Any]:
    """Of both GEMMs, from what the host knows: the number of tokens, at least one."""
    rows = expected_rows(tokens * shape.top_k, shape.num_experts)
    h, i = shape.hidden_size, shape.intermediate_size
    return choose(rows, 2 * i, h), choose(rows, h, i)


def place_flat(grouped: GroupedRows, shape: MoeShape, choose: Choose) -> PlacedRows:
    """Rows stay in the order that the routing numbered them in.

    The host knows T only. It allocates for the most rows that T tokens can have here.
    """
    tokens, top_k = grouped.pair_row.shape
    config1, config2 = flat_configs(tokens, shape, choose)
    return PlacedRows(
        rows=round_up(tokens * min(top_k, shape.num_local_experts), 4),
        expert_rows=flat_rows(grouped.m_indptr),
        pair_row=grouped.pair_row,
        weights=grouped.weights,
        m_indptr=grouped.m_indptr,
        config1=config1,
        config2=config2,
    )


LAYER = PlacedLayer(place_flat)
run = run_of(LAYER)
