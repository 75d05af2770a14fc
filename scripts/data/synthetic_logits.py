"""Router logits drawn from a small model, the same bits on every machine.

The only source of randomness is the raw output of Philox4x64-10 under a key given directly: no
seeding and no distribution of NumPy's. All up to the last affine map is integer arithmetic; the map
and the rounding use only +, *, / and sqrt, which IEEE 754 rounds exactly. One transcendental
function remains, the exp behind the routing margin; logits lie on a coarse grid, so margins take
separate values, and a draw with one close to the threshold is not used (see `margin_gap`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from scripts.common.definitions import DEEPSEEK_V3, DEFAULT, RENORMALIZE, MoeDefinition

MOMENTS = {DEEPSEEK_V3: (-1.6706, 0.6560), RENORMALIZE: (0.0, 1.0)}
"""Mean and standard deviation of the logits, by routing: those of the captured ones. For
renormalised routing none are known."""
LOW_BIAS, HIGH_BIAS = 4.9375, 4.96875  # the two values of the captured bias

# Experts whose captured bias is the high one.
HIGH_BIAS_EXPERTS = (
    *(3, 6, 7, 9, 10, 11, 16, 17, 18, 23, 30, 31, 36, 37, 41, 42, 43, 44, 46, 47, 48, 49, 54, 55),
    *(56, 58, 61, 62, 63, 66, 67, 68, 69, 72, 74, 75, 79, 80, 81, 82, 83, 84, 87, 90, 92, 96, 100),
    *(101, 102, 104, 105, 108, 109, 110, 112, 114, 119, 120, 123, 125, 126, 127, 131, 136, 147),
    *(151, 152, 153, 154, 157, 159, 167, 170, 171, 174, 183, 185, 195, 196, 197, 200, 203, 214),
    *(216, 217, 219, 222, 223, 226, 230, 231, 234, 235, 236, 237, 238, 240, 241, 242, 243, 253),
)

# A choice must have at least this margin. The excess over 1e-4 covers the rounding of a kernel
# that evaluates sigmoid + bias and the sum of two of them in float32 (ulp of 10: 9.5e-7).
MIN_MARGIN = 1.05e-4

# Standard deviation of `_normals`: twice a sum of 8 uniforms on 0..65535.
_UNIT = 2.0 * math.sqrt(8 * (65536**2 - 1) / 12)
_NOISE_STRENGTH = 1024  # every other strength is relative to this

# Streams of one seed. Stream _NOISE + n is the n-th draw of the noise, n > 0 for redrawn rows.
_EXPERT, _GROUP, _TOKEN, _REQUEST, _MEMBER, _REQUEST_GROUP, _NOISE = 0, 1, 2, 3, 4, 5, 16
_BIAS = 6  # of the seed 0, which no workload has


@dataclass(frozen=True)
class LogitModel:
    """Parameters of one workload's logits. Strengths are standard deviations in 1/1024 of the noise
    that is drawn for every (token, expert). `local` is a shift in the same unit."""

    seed: int
    expert: int = 0  # popularity of experts, the same for all tokens
    group: int = 0  # popularity of groups
    local: int = 0  # shift of the experts of this rank
    token: int = 0  # level of a token, the same for all experts
    request: int = 0  # pattern over experts shared by the tokens of a request
    request_group: int = 0  # pattern over groups shared by the tokens of a request
    requests: int = 1  # number of requests in the batch


def routing_bias(definition: MoeDefinition = DEFAULT) -> np.ndarray:
    """Return the bias [num_experts], float32 values that bfloat16 represents exactly.

    It is the captured one. Where none is known, each expert has one of its two values by chance.
    """
    if definition is DEFAULT:
        high = np.isin(np.arange(definition.num_experts), HIGH_BIAS_EXPERTS)
    else:
        high = _raw(0, _BIAS, definition.num_experts) % np.uint64(2) == 1
    return np.where(high, np.float32(HIGH_BIAS), np.float32(LOW_BIAS))


def round_to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Round to the nearest bfloat16 value, ties to even, as float32. x: finite float32."""
    bits = x.view(np.uint32)
    bits = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(
        0xFFFF0000
    )
    return bits.view(np.float32)


def _raw(seed: int, stream: int, count: int) -> np.ndarray:
    key = np.array([seed, stream], dtype=np.uint64)
    return np.random.Philox(key=key).random_raw(count)


def _normals(seed: int, stream: int, *shape: int) -> np.ndarray:
    """Draw integers of mean 0 and standard deviation _UNIT, near normal (excess kurtosis -0.15)."""
    words = _raw(seed, stream, 2 * math.prod(shape))
    total = np.zeros(words.size, dtype=np.int64)
    for shift in (0, 16, 32, 48):
        total += ((words >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.int64)
    return (2 * (total[0::2] + total[1::2]) - 8 * 65535).reshape(shape)


def _systematic_part(
    model: LogitModel, tokens: int, local_expert_offset: int, definition: MoeDefinition
) -> np.ndarray:
    """Return everything but the noise, int64 [T, num_experts] in units of _UNIT / 1024."""
    experts, group_count = definition.num_experts, definition.n_group
    per_expert = model.expert * _normals(model.seed, _EXPERT, experts)
    per_group = model.group * _normals(model.seed, _GROUP, group_count)
    per_expert += np.repeat(per_group, experts // group_count)
    first = max(local_expert_offset, 0)
    last = max(local_expert_offset + definition.num_local_experts, 0)
    per_expert[first:last] += model.local * round(_UNIT)
    part = np.broadcast_to(per_expert, (tokens, experts)).copy()
    if model.token:
        part += model.token * _normals(model.seed, _TOKEN, tokens)[:, None]
    if model.request or model.request_group:
        pattern = model.request * _normals(model.seed, _REQUEST, model.requests, experts)
        groups = _normals(model.seed, _REQUEST_GROUP, model.requests, group_count)
        pattern += np.repeat(model.request_group * groups, experts // group_count, axis=1)
        member = _raw(model.seed, _MEMBER, tokens) % np.uint64(model.requests)
        part += pattern[member.astype(np.int64)]
    return part


def _to_moments(z: np.ndarray, std: float) -> tuple[float, float]:
    """Return the offset and factor that bring z, int64, to mean 0 and a standard deviation."""
    total = sum(int(row) for row in z.sum(axis=1))
    # Shifted so that a row's sum of squares stays below 2**63.
    shift = max(0, int(np.abs(z).max()).bit_length() - 27)
    coarse = z >> shift
    first = sum(int(row) for row in coarse.sum(axis=1))
    second = sum(int(row) for row in (coarse * coarse).sum(axis=1))
    variance = Fraction(second, z.size) - Fraction(first, z.size) ** 2
    factor = std / (math.sqrt(float(variance)) * (1 << shift))
    return float(Fraction(total, z.size)), factor


@dataclass(frozen=True)
class Draw:
    logits: np.ndarray  # float32 [T, num_experts], exact in bfloat16
    ids: np.ndarray  # [T, top_k] chosen experts, ascending
    redrawn: int  # rows drawn again, counted once per draw
    margin_gap: float  # distance from the threshold to the nearest margin, also of redrawn rows


def draw_logits(
    model: LogitModel, tokens: int, local_expert_offset: int, definition: MoeDefinition = DEFAULT
) -> Draw:
    experts = definition.num_experts
    mean, std = MOMENTS[definition.routing]
    bias = None if definition.routing == RENORMALIZE else routing_bias(definition)
    part = _systematic_part(model, tokens, local_expert_offset, definition)

    def finish(rows: np.ndarray, noise: np.ndarray) -> np.ndarray:
        z = (part[rows] + _NOISE_STRENGTH * noise).astype(np.float64)
        z -= offset
        z *= factor
        z += mean
        return round_to_bfloat16(z.astype(np.float32))

    # The map to the moments is that of the first draw. If it followed the redrawn rows, every
    # redraw would move all other rows.
    noise = _normals(model.seed, _NOISE, tokens, experts)
    offset, factor = _to_moments(part + _NOISE_STRENGTH * noise, std)
    rows = np.arange(tokens)
    logits = finish(rows, noise)
    ids, margin = route(logits, bias, definition)
    gap = float(np.abs(margin - MIN_MARGIN).min())
    redrawn = 0
    for attempt in range(1, 1000):
        rows = np.flatnonzero(margin < MIN_MARGIN)
        if rows.size == 0:
            break
        redrawn += rows.size
        logits[rows] = finish(rows, _normals(model.seed, _NOISE + attempt, rows.size, experts))
        ids[rows], margin[rows] = route(logits[rows], bias, definition)
        gap = min(gap, float(np.abs(margin[rows] - MIN_MARGIN).min()))
    else:
        raise RuntimeError(f"no draw of {model} leaves every token a margin of {MIN_MARGIN}")
    return Draw(logits, ids, redrawn, gap)


# --- the routing of logits ------------------------------------------------------------------------
# In NumPy and float64: the margin of a choice must not depend on the kernel that computes it.


def route(
    logits: np.ndarray, bias: np.ndarray | None, definition: MoeDefinition = DEFAULT
) -> tuple[np.ndarray, np.ndarray]:
    """Return the chosen experts [T, top_k], ascending, and the margin [T] of each token's choice.

    The margin is the smaller of two distances: from the last selected group to the first dropped
    one (sums of two scores), and from the last selected expert to the first dropped one. Without a
    bias the scores are the logits themselves.
    """
    groups, topk_group, top_k = definition.n_group, definition.topk_group, definition.top_k
    score = logits.astype(np.float64)
    if bias is not None:
        score = 1.0 / (1.0 + np.exp(-score)) + bias.astype(np.float64)
    margin = np.full(len(score), np.inf)
    if topk_group < groups:
        grouped = score.reshape(len(score), groups, -1)
        group_score = np.sort(grouped, axis=-1)[..., -2:].sum(axis=-1)
        ranked = np.sort(group_score, axis=-1)
        last_selected = ranked[:, -topk_group]
        margin = last_selected - ranked[:, -topk_group - 1]
        dropped = group_score < last_selected[:, None]
        score = np.where(dropped[..., None], -np.inf, grouped).reshape(score.shape)
    order = np.argsort(score, axis=-1)
    ranked = np.take_along_axis(score, order, axis=-1)
    return (
        np.sort(order[:, -top_k:], axis=-1),
        np.minimum(margin, ranked[:, -top_k] - ranked[:, -top_k - 1]),
    )


def count_local(
    ids: np.ndarray, local_expert_offset: int, definition: MoeDefinition = DEFAULT
) -> dict[str, int]:
    """Count what one rank has of a routing: (token, local expert) pairs, tokens with a local
    expert, local experts with a token, and the rows of the fullest expert."""
    rows = local_rows(ids, local_expert_offset, definition.num_local_experts)
    local = ids - local_expert_offset
    hit = ((local >= 0) & (local < definition.num_local_experts)).any(axis=1)
    counts = {"pairs": rows.sum(), "hit": hit.sum(), "active": (rows > 0).sum(), "max": rows.max()}
    return {name: int(count) for name, count in counts.items()}


def local_rows(ids: np.ndarray, local_expert_offset: int, experts: int) -> np.ndarray:
    """Return the number of rows of each expert of a rank."""
    local = ids - local_expert_offset
    return np.bincount(local[(local >= 0) & (local < experts)], minlength=experts)
