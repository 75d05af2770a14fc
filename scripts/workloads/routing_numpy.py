"""Expert choice of the definition in NumPy, and the statistics of a routing.

The generator needs routing without torch, and in float64: whether a choice has a margin must not
depend on which correctly working kernel looks at it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

N_GROUP = 8
TOPK_GROUP = 4
TOP_K = 8
NUM_LOCAL_EXPERTS = 32


def route(logits: np.ndarray, bias: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Chosen experts [T, 8], ascending, and the margin [T] that the choice of each token hangs on.

    The margin is the smaller of two distances: from the last group kept to the first one dropped
    (sums of two scores) and from the last expert kept to the first one dropped.
    """
    tokens, experts = logits.shape
    size = experts // N_GROUP
    score = 1.0 / (1.0 + np.exp(-logits.astype(np.float64))) + bias.astype(np.float64)
    grouped = score.reshape(tokens, N_GROUP, size)

    group_score = np.partition(grouped, (size - 2, size - 1), axis=-1)[..., -2:].sum(axis=-1)
    order = np.argsort(group_score, axis=-1, kind="stable")
    kept = np.sort(order[:, -TOPK_GROUP:], axis=-1)  # [T, 4]
    rank = np.take_along_axis(group_score, order, axis=-1)
    group_margin = rank[:, -TOPK_GROUP] - rank[:, -TOPK_GROUP - 1]

    candidates = np.take_along_axis(grouped, kept[:, :, None], axis=1)
    candidates = candidates.reshape(tokens, TOPK_GROUP * size)
    last = TOPK_GROUP * size - TOP_K
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


def count_local(ids: np.ndarray, local_expert_offset: int) -> RoutingCounts:
    local = ids - local_expert_offset
    is_local = (local >= 0) & (local < NUM_LOCAL_EXPERTS)
    rows = np.bincount(local[is_local], minlength=NUM_LOCAL_EXPERTS)
    return RoutingCounts(
        pairs=int(is_local.sum()),
        hit=int(is_local.any(axis=1).sum()),
        active=int((rows > 0).sum()),
        max=int(rows.max()),
    )
