"""Rows without padding, boundaries known to the device alone: no host sync."""

import math

from ..core.config import GemmConfig
from ..core.layout import FlatRows
from ..core.pipeline import Choose, PlacedRows, round_up
from ..core.problem import MoeShape
from ..core.routing import GroupedRows


def expected_rows(tokens: int, shape: MoeShape) -> float:
    """Rows of an expert that has any, when every token chooses among equally popular experts.

    With x rows an expert on average, the share of experts without one is about exp(-x). Real
    traffic prefers some experts, so that those with rows have more: 3.9 where this says 2.7 (T=80).
    """
    mean = tokens * shape.top_k / shape.num_experts
    return mean / -math.expm1(-mean)


def flat_configs(tokens: int, shape: MoeShape, choose: Choose) -> tuple[GemmConfig, GemmConfig]:
    """Of both GEMMs, from what the host knows: the number of tokens, at least one."""
    rows = expected_rows(tokens, shape)
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
        layout=FlatRows(grouped.m_indptr),
        pair_row=grouped.pair_row,
        weights=grouped.weights,
        m_indptr=grouped.m_indptr,
        config1=config1,
        config2=config2,
    )
