"""An independent oracle, written plainly: one token, one expert, one block at a time, in NumPy.

It shares no code with the package: FP8 and bfloat16 are decoded and rounded here from their
definitions, sums are float64, and routing is sorting of Python lists.
"""

from dataclasses import dataclass

import numpy as np
import torch
from moe_fp8.call import MoeInputs
from moe_fp8.shape import MoeShape

BLOCK = 128
TINY = MoeShape(num_experts=16, num_local_experts=4, hidden_size=256, intermediate_size=128,
                n_group=4, topk_group=2, top_k=3)  # fmt: skip
RENORMALIZE = MoeShape(num_experts=24, num_local_experts=24, hidden_size=256,
                       intermediate_size=384, n_group=1, topk_group=1, top_k=5,
                       routing="renormalize")  # fmt: skip


def decode_e4m3(byte: int) -> float:
    """Value of a float8_e4m3fn bit pattern: 1 sign, 4 exponent (bias 7), 3 mantissa bits."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte >> 3) & 0xF, byte & 0x7
    if exponent == 0xF and mantissa == 0x7:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


E4M3 = np.array([decode_e4m3(byte) for byte in range(256)])
POSITIVE = E4M3[:127]  # ascending, the last bit of the index is the last mantissa bit


def encode_e4m3(value: float) -> int:
    """Bit pattern of the nearest float8_e4m3fn, ties to even, saturating."""
    magnitude = min(abs(value), 448.0)
    above = int(np.searchsorted(POSITIVE, magnitude))
    below = max(above - 1, 0)
    to_above, to_below = POSITIVE[above] - magnitude, magnitude - POSITIVE[below]
    if to_above == to_below:
        byte = above if above % 2 == 0 else below
    else:
        byte = above if to_above < to_below else below
    return byte | (0x80 if np.signbit(value) else 0)


def round_bf16(x: np.ndarray) -> np.ndarray:
    """Nearest bfloat16, ties to even, as float64."""
    bits = np.asarray(x, dtype=np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.astype(np.uint32).view(np.float32).astype(np.float64)


def fp8_values(x: torch.Tensor) -> np.ndarray:
    return E4M3[x.view(torch.uint8).numpy()]


@dataclass
class TokenRoute:
    weights: dict[int, float]  # by expert, ascending
    margin: float  # by how much the closest choice was decided


def route_token(logits: list[float], bias: list[float], scaling: float, shape: MoeShape):
    if shape.routing == "renormalize":
        ranked = sorted(range(shape.num_experts), key=lambda e: -logits[e])
        experts, rest = ranked[: shape.top_k], ranked[shape.top_k :]
        margin = logits[experts[-1]] - logits[rest[0]] if rest else float("inf")
        powers = {e: np.exp(logits[e] - logits[experts[0]]) for e in sorted(experts)}
        return TokenRoute(
            {e: float(p / sum(powers.values())) * scaling for e, p in powers.items()}, margin
        )
    with np.errstate(over="ignore"):
        s = (1 / (1 + np.exp(-np.array(logits)))).tolist()
    biased = [a + b for a, b in zip(s, bias, strict=True)]
    size = shape.num_experts // shape.n_group
    groups = [list(range(g * size, (g + 1) * size)) for g in range(shape.n_group)]
    score = [sum(sorted((biased[e] for e in group), reverse=True)[:2]) for group in groups]
    margin = float("inf")

    def best(candidates: list[int], key: list[float], count: int) -> list[int]:
        nonlocal margin
        ranked = sorted(candidates, key=lambda c: -key[c])
        if count < len(ranked):
            margin = min(margin, key[ranked[count - 1]] - key[ranked[count]])
        return ranked[:count]

    kept_groups = best(list(range(shape.n_group)), score, shape.topk_group)
    experts = best([e for g in kept_groups for e in groups[g]], biased, shape.top_k)
    total = sum(s[e] for e in experts) + 1e-20
    return TokenRoute({e: s[e] / total * scaling for e in sorted(experts)}, margin)


def route(logits: torch.Tensor, bias: torch.Tensor | None, scaling: float, shape: MoeShape):
    bias_values = bias.float().tolist() if bias is not None else []
    return [route_token(row, bias_values, scaling, shape) for row in logits.tolist()]


def rows_by_expert(routes: list[TokenRoute], offset: int, shape: MoeShape) -> list[list[int]]:
    """Tokens of each local expert, ascending."""
    return [
        [t for t, r in enumerate(routes) if expert in r.weights]
        for expert in range(offset, offset + shape.num_local_experts)
    ]


def gemm(a: np.ndarray, a_scale: np.ndarray, b: np.ndarray, b_scale: np.ndarray) -> np.ndarray:
    """a [m, K] with scales [K/128, m]; b [N, K] with scales [N/128, K/128] -> bfloat16 values."""
    k_blocks, m = a_scale.shape
    out = np.zeros((m, b.shape[0]))
    for n_block in range(b.shape[0] // BLOCK):
        n = slice(n_block * BLOCK, (n_block + 1) * BLOCK)
        for kb in range(k_blocks):
            k = slice(kb * BLOCK, (kb + 1) * BLOCK)
            scale = a_scale[kb][:, None] * b_scale[n_block, kb]
            out[:, n] += scale * (a[:, k] @ b[n, k].T)
    return round_bf16(out)


def swiglu_quant(g: np.ndarray, limit: float = np.inf) -> tuple[np.ndarray, np.ndarray]:
    """g [m, 2I] -> FP8 bit patterns [m, I] and scales [I/128, m]."""
    m, intermediate = g.shape[0], g.shape[1] // 2
    up, gate = g[:, :intermediate].clip(-limit, limit), g[:, intermediate:].clip(max=limit)
    with np.errstate(over="ignore"):
        c = gate / (1 + np.exp(-gate)) * up
    q = np.zeros((m, intermediate), dtype=np.uint8)
    scales = np.ones((intermediate // BLOCK, m))
    for row in range(m):
        for block in range(intermediate // BLOCK):
            columns = slice(block * BLOCK, (block + 1) * BLOCK)
            amax = np.abs(c[row, columns]).max()
            if amax > 0:
                scales[block, row] = np.float32(amax) / np.float32(448)
            q[row, columns] = [encode_e4m3(x / scales[block, row]) for x in c[row, columns]]
    return q, scales


def layer(inputs: MoeInputs, shape: MoeShape) -> np.ndarray:
    """Output [T, H], unrounded."""
    x, x_scale = fp8_values(inputs.hidden_states), inputs.hidden_states_scale.double().numpy()
    scaling = float(inputs.routed_scaling_factor)
    routes = route(inputs.routing_logits, inputs.routing_bias, scaling, shape)
    offset = int(inputs.local_expert_offset)
    output = np.zeros(x.shape)
    for local, tokens in enumerate(rows_by_expert(routes, offset, shape)):
        if not tokens:
            continue
        g = gemm(
            x[tokens],
            x_scale[:, tokens],
            fp8_values(inputs.gemm1_weights[local]),
            inputs.gemm1_weights_scale[local].double().numpy(),
        )
        q, q_scale = swiglu_quant(g, shape.swiglu.limit or np.inf)
        o = gemm(
            E4M3[q],
            q_scale,
            fp8_values(inputs.gemm2_weights[local]),
            inputs.gemm2_weights_scale[local].double().numpy(),
        )
        for row, token in enumerate(tokens):
            output[token] += routes[token].weights[offset + local] * o[row]
    return output


def experts(
    pairs: list[list[tuple[int, float]]],
    x: torch.Tensor,
    x_scale: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
) -> np.ndarray:
    """Output [T, H], unrounded, of each token's local experts and their weights; up rows first."""
    output = np.zeros(x.shape)
    for token, of_token in enumerate(pairs):
        for expert, weight in of_token:
            g = gemm(
                fp8_values(x[token : token + 1]),
                x_scale[:, token : token + 1].double().numpy(),
                fp8_values(w13[expert]),
                w13_scale[expert].double().numpy(),
            )
            q, q_scale = swiglu_quant(g)
            o = gemm(E4M3[q], q_scale, fp8_values(w2[expert]), w2_scale[expert].double().numpy())
            output[token] += weight * o[0]
    return output


def random_fp8(rng: np.random.Generator, *dims: int) -> torch.Tensor:
    """Normal values clamped to +-2, rounded to FP8; drawn by byte, which is fast enough for GBs."""
    quantiles = torch.special.ndtri((torch.arange(256, dtype=torch.float64) + 0.5) / 256)
    table = quantiles.clamp(-2, 2).float().to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    out = np.empty(dims, dtype=np.uint8)
    for row in out.reshape(-1, dims[-1] * (dims[-2] if len(dims) > 2 else 1)):
        draw = np.frombuffer(rng.bytes(row.size), dtype=np.uint8)
        np.take(table, draw, out=row)
    return torch.from_numpy(out).view(torch.float8_e4m3fn)


def random_normal(rng: np.random.Generator, *dims: int) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(dims, dtype=np.float32))


def random_weights(shape: MoeShape, seed: int = 0) -> dict[str, torch.Tensor]:
    """Draw weights as flashinfer-bench does: normal FP8 values and scales, some negative."""
    rng = np.random.default_rng(seed)
    e, h, i = shape.num_local_experts, shape.hidden_size, shape.intermediate_size
    return {
        "gemm1_weights": random_fp8(rng, e, 2 * i, h),
        "gemm1_weights_scale": random_normal(rng, e, 2 * i // BLOCK, h // BLOCK),
        "gemm2_weights": random_fp8(rng, e, h, i),
        "gemm2_weights_scale": random_normal(rng, e, h // BLOCK, i // BLOCK),
    }


def random_inputs(
    shape: MoeShape,
    tokens: int,
    offset: int = 0,
    seed: int = 0,
    weights: dict[str, torch.Tensor] | None = None,
    favourite: int | None = None,
) -> MoeInputs:
    """Random inputs whose routing hangs on no margin below 1e-5.

    `favourite` is an expert that every token chooses.
    """
    rng = np.random.default_rng(seed)
    bias = random_normal(rng, shape.num_experts).bfloat16()
    if favourite is not None:
        bias[favourite] = 8.0
    bias_values = bias.float().tolist()

    def draw() -> torch.Tensor:
        logits = random_normal(rng, shape.num_experts)
        if favourite is not None and not shape.has_bias:
            logits[favourite] = 8.0
        return logits.to(shape.logits_dtype)

    logits = torch.empty(tokens, shape.num_experts, dtype=shape.logits_dtype)
    for t in range(tokens):
        logits[t] = draw()
        while route_token(logits[t].tolist(), bias_values, 1.0, shape).margin < 1e-5:
            logits[t] = draw()
    return MoeInputs(
        routing_logits=logits,
        routing_bias=bias if shape.has_bias else None,
        hidden_states=random_fp8(rng, tokens, shape.hidden_size),
        hidden_states_scale=random_normal(rng, shape.hidden_size // BLOCK, tokens),
        **(weights if weights is not None else random_weights(shape, seed)),
        local_expert_offset=offset,
        routed_scaling_factor=2.5 if shape.has_bias else 1.0,
    )
