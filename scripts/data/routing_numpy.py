"""Expert choice of the definitions in NumPy, and the statistics of a routing.

The generator needs routing without torch, and in float64: whether a choice has a margin must not
depend on which correctly working kernel looks at it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scripts.common.definitions import DEFAULT, MoeDefinition


def route(
    logits: np.ndarray, bias: np.ndarray | None, definition: MoeDefinition = DEFAULT
) -> tuple[np.ndarray, np.ndarray]:
    """Chosen experts [T, top_k], ascending, and the margin [T] that each token's choice hangs on.

    The margin is the smaller of two distances: from the last group kept to the first one dropped
    (sums of two scores) and from the last expert kept to the first one dropped. Without a bias the
    scores are the logits themselves.
    """
    tokens, experts = logits.shape
    groups, kept_groups = definition.n_group, definition.topk_group
    size = experts // groups
    score = logits.astype(np.float64)
    if bias is not None:
        score = 1.0 / (1.0 + np.exp(-score)) + bias.astype(np.float64)
    grouped = score.reshape(tokens, groups, size)

    group_score = np.partition(grouped, (size - 2, size - 1), axis=-1)[..., -2:].sum(axis=-1)
    order = np.argsort(group_score, axis=-1, kind="stable")
    kept = np.sort(order[:, -kept_groups:], axis=-1)  # [T, kept_groups]
    group_margin = np.full(tokens, np.inf)
    if kept_groups < groups:
        rank = np.take_along_axis(group_score, order, axis=-1)
        group_margin = rank[:, -kept_groups] - rank[:, -kept_groups - 1]

    candidates = np.take_along_axis(grouped, kept[:, :, None], axis=1)
    candidates = candidates.reshape(tokens, kept_groups * size)
    last = kept_groups * size - definition.top_k
    order = np.argpartition(candidates, (last - 1, last), axis=-1)
    picked = np.sort(order[:, last:], axis=-1)
    ids = np.take_along_axis(kept, picked // size, axis=1) * size + picked % size
    edge = np.take_along_axis(candidates, order[:, last - 1 : last + 1], axis=1)
    return ids, np.minimum(group_margin, edge[:, 1] - edge[:, 0])


@dataclass(frozen=True)
class RoutingCounts:
    """What one rank sees of a routing."""

    pairs: int  # (token, local expert) pairs
    hit: int  # tokens with at least one local expert
    active: int  # local experts with at least one token
    max: int  # rows of the fullest local expert


def count_local(
    ids: np.ndarray, local_expert_offset: int, definition: MoeDefinition = DEFAULT
) -> RoutingCounts:
    experts = definition.num_local_experts
    local = ids - local_expert_offset
    is_local = (local >= 0) & (local < experts)
    rows = np.bincount(local[is_local], minlength=experts)
    return RoutingCounts(
        pairs=int(is_local.sum()),
        hit=int(is_local.any(axis=1).sum()),
        active=int((rows > 0).sum()),
        max=int(rows.max()),
    )
