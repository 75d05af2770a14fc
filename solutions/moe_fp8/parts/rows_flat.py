"""Rows without padding, boundaries known to the device alone: no host sync."""

from ..core.layout import FlatRows
from ..core.pipeline import Choose, PlacedRows, round_up
from ..core.problem import MoeShape
from ..core.routing import GroupedRows


def place_flat(grouped: GroupedRows, shape: MoeShape, choose: Choose) -> PlacedRows:
    """Rows stay in the order that the routing numbered them in.

    The host knows T only. It allocates for the most rows that T tokens can have here, and picks
    the configs for the rows that an expert gets when all are equally popular.
    """
    tokens, top_k = grouped.pair_row.shape
    h, i = shape.hidden_size, shape.intermediate_size
    rows_per_expert = max(1.0, tokens * top_k / shape.num_experts)
    return PlacedRows(
        rows=round_up(tokens * min(top_k, shape.num_local_experts), 4),
        layout=FlatRows(grouped.m_indptr),
        pair_row=grouped.pair_row,
        weights=grouped.weights,
        m_indptr=grouped.m_indptr,
        config1=choose(rows_per_expert, 2 * i, h),
        config2=choose(rows_per_expert, h, i),
    )
