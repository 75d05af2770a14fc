"""The definitions of this data set.

definitions/<op type>/<name>.json holds the axes, inputs, reference and tags of a definition. The
parts that programs need are read here. flashinfer-bench's schema has no field for the short name
and the workloads' purpose, which stand in the tables below.

Names, axes and inputs, and their order, are those of the data set that flashinfer-bench's authors
publish.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from scripts.common.program import DEFINITION, OP_TYPE, ROOT, UsageError

DEEPSEEK_V3 = "deepseek_v3"
"""Routing: sigmoid scores, normalised by their sum. A bias chooses experts in the best groups."""
RENORMALIZE = "renormalize"
"""Routing: a softmax over the largest logits. All experts are local, and there is no factor."""
GIVEN = "given"
"""No routing: the experts of a token and their weights are inputs."""

ROUTINGS = {"_renorm_": RENORMALIZE, "_given_": GIVEN}
"""By a part of a definition's name."""

BLOCK = 128
"""Columns of a token, and rows and columns of a weight, that share a scale."""
GROUP = 32
"""Columns of an MXFP4 weight's row that share a power of two."""
LARGE = 8 * 2**30
"""Bytes of weights above which a definition is large: three trials of 2 GB fit an H200, one of
17."""


@dataclass(frozen=True)
class MoeDefinition:
    """A mixture-of-experts layer with FP8 block-scale or MXFP4 weights."""

    name: str
    short: str  # the end of packed solutions' names; empty for the default definition
    tokens: tuple[int, ...]  # of our own workloads; empty if they stand for captured ones
    routed_scaling_factor: float  # of its workloads
    num_experts: int  # of the whole layer
    num_local_experts: int  # held by this rank
    hidden_size: int  # a multiple of 128, like the next
    intermediate_size: int
    n_group: int
    topk_group: int
    top_k: int
    routing: str
    swiglu_limit: float | None = None  # clamps SwiGLU's gate from above and its up on both sides
    mxfp4: bool = False  # weights are MXFP4 as in a checkpoint, and tokens bfloat16

    op_type: ClassVar[str] = OP_TYPE
    """flashinfer-bench's op type: the folder of the definition and of its workloads."""

    @property
    def path(self) -> Path:
        """The path of its JSON below a data set's root."""
        return Path("definitions") / self.op_type / f"{self.name}.json"

    def packed_name(self, solution: str) -> str:
        """Return the name of a solution packed for this definition, unique in a data set."""
        end = f"_{self.short}" if self.short else ""
        return solution if solution.endswith(end) else solution + end

    @property
    def large(self) -> bool:
        """True if the weights are large. For one trial flashinfer-bench has up to five copies of
        them, and the draws of FP8 ones as float32."""
        return self.num_local_experts * weight_bytes(self) > LARGE

    @property
    def shape(self) -> dict[str, Any]:
        """The arguments of `moe_fp8.shape.MoeShape`."""
        sizes = ("num_experts", "num_local_experts", "hidden_size", "intermediate_size")
        routing = ("n_group", "topk_group", "top_k", "routing")
        swiglu = {} if self.swiglu_limit is None else {"swiglu": (self.swiglu_limit,)}
        return {name: getattr(self, name) for name in sizes + routing} | swiglu

    @property
    def gemms(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(N, K) of the weights of both GEMMs."""
        hidden, inner = self.hidden_size, self.intermediate_size
        return (2 * inner, hidden), (hidden, inner)

    @property
    def expert_weights(self) -> int:
        """The number of values in one expert's weights."""
        return sum(n * k for n, k in self.gemms)

    @property
    def packed_shape(self) -> dict[str, Any] | None:
        """The shape, except for the default definition, which the solutions are written for."""
        return self.shape if self.short else None

    def takes(self, solution: Mapping[str, Any]) -> bool:
        """True if the solution is packed for this definition: its routing is one of `routings`,
        without which a solution is for the default definition alone. A clamped SwiGLU also needs
        `clamps`."""
        clamps = self.swiglu_limit is None or solution.get("clamps")
        default = () if self.short else (self.routing,)
        return bool(clamps) and self.routing in solution.get("routings", default)


def read(definition: Path) -> dict[str, Any]:
    """Return the JSON of a definition of this data set."""
    content: dict[str, Any] = json.loads((ROOT / definition).read_text(encoding="utf-8"))
    return content


def moe(
    name: str, short: str, tokens: tuple[int, ...], routed_scaling_factor: float = 1.0
) -> MoeDefinition:
    """Return a layer. Groups, SwiGLU's limit and the default layer's `top_k` are no axes: they are
    parsed from the name. All but the limit are in the public names."""
    specs = read(Path("definitions") / OP_TYPE / f"{name}.json")["axes"]
    sizes = {axis: spec["value"] for axis, spec in specs.items() if "value" in spec}
    of_name = {key: int(value) for key, value in re.findall(r"_(topk|ng|kg|limit)(\d+)", name)}
    return MoeDefinition(
        name=name,
        short=short,
        tokens=tokens,
        routed_scaling_factor=routed_scaling_factor,
        num_experts=sizes.get("num_experts", sizes["num_local_experts"]),
        num_local_experts=sizes["num_local_experts"],
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["intermediate_size"],
        n_group=of_name.get("ng", 1),
        topk_group=of_name.get("kg", 1),
        top_k=of_name["topk"],
        routing=next((r for mark, r in ROUTINGS.items() if mark in name), DEEPSEEK_V3),
        swiglu_limit=float(of_name["limit"]) if "limit" in of_name else None,
        mxfp4="_mxfp4_" in name,
    )


OWN_TOKENS = (1, 7, 16, 64, 256, 1024, 4096, 8192)
"""Tokens of the workloads that stand for no captured ones."""
MODEL_TOKENS = (1, 8, 64, 512, 4096)
"""Tokens of the workloads of models that are measured against the peers."""
MXFP4_TOKENS = (1, 4, 16, 64, 256, 512, 1024, 4096)
"""Tokens of the workloads of layers with MXFP4 weights: those at which docs/notes/w4a8.md compares
kernels."""

DEFAULT = moe(DEFINITION, "", (), 2.5)
"""The definition that programs use without --definition."""
DSV3_TP8 = moe(
    "moe_fp8_block_scale_ds_routing_topk8_ng8_kg4_e256_h7168_i256", "dsv3_tp8", MODEL_TOKENS, 2.5
)
KIMI = "moe_fp8_block_scale_ds_routing_topk8_ng1_kg1_e{}_h7168_i2048"
MINIMAX = "moe_fp8_block_scale_ds_routing_topk8_ng1_kg1_e{}_h3072_i1536"
GLM = "moe_fp8_block_scale_ds_routing_topk8_ng1_kg1_e32_h6144_i2048"
DEEPSEEK_V4 = "moe_mxfp4_given_topk6_e{}_h{}_i{}_limit10"
QWEN = "moe_fp8_block_scale_renorm_topk{}_e128_h{}_i{}"
MOE = (
    DEFAULT,
    moe(KIMI.format(48), "kimi_k2", OWN_TOKENS, 2.827),
    moe(KIMI.format(384), "kimi_k2_e384", OWN_TOKENS, 2.827),
    moe(QWEN.format(8, 4096, 1536), "qwen3_235b", OWN_TOKENS),
    moe(QWEN.format(8, 2048, 768), "qwen3_30b", OWN_TOKENS),
    moe(QWEN.format(10, 2048, 512), "qwen3_next", OWN_TOKENS),
    DSV3_TP8,
    moe(GLM, "glm5", MODEL_TOKENS, 2.5),
    moe(MINIMAX.format(256), "minimax_m2", MODEL_TOKENS),
    moe(MINIMAX.format(32), "minimax_m2_ep8", MODEL_TOKENS),
    moe(KIMI.format(96), "kimi_k2_ep4", MODEL_TOKENS, 2.827),
    moe(f"{GLM}_limit10", "glm5_limit10", OWN_TOKENS, 2.5),
    moe(DEEPSEEK_V4.format(256, 4096, 2048), "v4_flash", MXFP4_TOKENS, 1.5),
    moe(DEEPSEEK_V4.format(48, 7168, 3072), "v4_pro", MXFP4_TOKENS, 2.5),
)
SHARED = replace(
    DSV3_TP8,
    name="moe_fp8_block_scale_ds_routing_topk9_ng1_kg1_e257_h7168_i256",
    short="dsv3_tp8_shared",
    routed_scaling_factor=DSV3_TP8.routed_scaling_factor + 1.0,
    num_experts=DSV3_TP8.num_experts + 1,
    num_local_experts=DSV3_TP8.num_local_experts + 1,
    n_group=1,
    topk_group=1,
    top_k=DSV3_TP8.top_k + 1,
)
"""The layer that engines call when they fuse the shared expert: the last expert gets every token,
with a weight of 1. No grouped routing chooses like this, so the layer is in no data set, and its
logits are made for given experts (`measuring.cases.SharedProblems`)."""
MODELS = (*(definition for definition in MOE if definition.tokens == MODEL_TOKENS), SHARED)
"""Layers of docs/models.md, which a record measures at these token counts."""
DEFINITIONS = {definition.name: definition for definition in MOE}
FP8 = tuple(definition for definition in MOE if not definition.mxfp4)
MXFP4 = tuple(definition for definition in MOE if definition.mxfp4)


def build_definition(layer: MoeDefinition) -> dict[str, Any]:
    """Return the JSON of a layer that is in no data set: DSV3_TP8's with the layer's sizes."""
    layer_json = read(DSV3_TP8.path) | {"name": layer.name}
    (gemm1_out, hidden), (_, inner) = layer.gemms
    sizes = {axis: value for axis, value in layer.shape.items() if axis in layer_json["axes"]}
    blocks = {"hidden": hidden, "intermediate": inner, "gemm1_out": gemm1_out}
    sizes |= {f"num_{side}_blocks": size // BLOCK for side, size in blocks.items()}
    for axis, value in (sizes | {"gemm1_out_size": gemm1_out}).items():
        layer_json["axes"][axis]["value"] = value
    for name in ("n_group", "topk_group", "top_k"):
        constant = f"{name.upper()} = "
        changed = re.sub(
            f"(?m)^{constant}.*", f"{constant}{layer.shape[name]}", layer_json["reference"]
        )
        layer_json["reference"] = changed
    return layer_json


def size_of(axes: Mapping[str, Any]) -> int:
    """Return the number that lists a workload with these axes: its tokens, the T of the tables; 0
    for another operation's workload."""
    return int(axes.get("seq_len", 0))


def select(
    sizes: Mapping[str, int], selectors: Sequence[str], max_tokens: int | None = None
) -> list[str]:
    """Return the workloads (uuids, of these token counts) that a selector names by T (`901` or
    `T=901`) or by the beginning of the uuid, in their order, or all without selectors. `max_tokens`
    is a further limit. Raises UsageError: a selector names none, or none is left."""

    def chooses(selector: str, uuid: str) -> bool:
        number = selector[2:] if selector.upper().startswith("T=") else selector
        if number.isdigit() and (number != selector or int(number) in sizes.values()):
            return int(number) == sizes[uuid]
        return uuid.startswith(selector.lower())

    if unused := [s for s in selectors if not any(chooses(s, uuid) for uuid in sizes)]:
        raise UsageError(
            f"no workload matches {', '.join(unused)} (a token count or the beginning of a uuid)"
        )
    named = [u for u in sizes if not selectors or any(chooses(s, u) for s in selectors)]
    if chosen := [u for u in named if max_tokens is None or sizes[u] <= max_tokens]:
        return chosen
    raise UsageError("no workload is left by this selection")


def full_name(name: str) -> str:
    """Return the full name for a short one, and any other name unchanged."""
    return next((d.name for d in MOE if name and name == d.short), name)


def find(name: str) -> MoeDefinition:
    """Return a definition by its name or short name. Raises UsageError, with all names."""
    if (full := full_name(name)) in DEFINITIONS:
        return DEFINITIONS[full]
    known = ", ".join(f"{d.name} ({d.short})" if d.short else d.name for d in MOE)
    raise UsageError(f"no definition {name!r}; there are: {known}")


def find_layer(name: str) -> MoeDefinition:
    """Return a definition like `find`, or the layer that is in no data set."""
    return SHARED if name in (SHARED.short, SHARED.name) else find(name)


# --- the roofline: the least time of a call on a GPU, from rates measured there -------------------


def weight_bytes(layer: MoeDefinition = DEFAULT) -> int:
    """Return the bytes of one expert's weights and scales."""
    if layer.mxfp4:
        return layer.expert_weights // 2 + layer.expert_weights // GROUP
    return layer.expert_weights + 4 * layer.expert_weights // BLOCK**2


def pair_flops(layer: MoeDefinition = DEFAULT) -> int:
    """Return the FLOPs of a token at one of its experts."""
    return 2 * layer.expert_weights


def bandwidth(rates: Mapping[str, float]) -> float:
    """Return the best bytes a second of memory: of a large read or a copy, whichever is faster."""
    return max(rates["read_bytes_per_s"], rates["copy_bytes_per_s"])


def roofline_ms(
    case: Mapping[str, Any],
    rates: Mapping[str, float],
    read_ms: float | None,
    layer: MoeDefinition = DEFAULT,
) -> tuple[float, float]:
    """Return the milliseconds of reading, and of the FLOPs. The roofline is the larger one.

    Args:
        case: `tokens`, `hit` (tokens with a local expert), `active` (experts with rows), `pairs`.
        read_ms: the measured time of reading the weights; None: bytes over bandwidth.
    """
    h = layer.hidden_size
    flops_ms = 1e3 * case["pairs"] * pair_flops(layer) / rates["fp8_flops_per_s"]
    if read_ms is not None:
        return read_ms, flops_ms
    token, choice = h + 4 * h // BLOCK, 4 * layer.num_experts  # FP8 and scales; logits
    if layer.mxfp4:
        token, choice = 2 * h, 8 * layer.top_k  # bfloat16; ids and weights
    size = case["active"] * weight_bytes(layer) + case["hit"] * token
    size += case["tokens"] * (choice + 2 * h)  # and output
    return 1e3 * size / bandwidth(rates), flops_ms


def stepwise_ms(
    case: Mapping[str, Any], rates: Mapping[str, float], layer: MoeDefinition = DEFAULT
) -> float:
    """Return the milliseconds of two GEMMs and a combine, each at its own roofline, if all their
    operands and results go through memory. To the bytes of `roofline_ms` this adds the FP8
    intermediate and a bfloat16 row of every pair, written and read. It is no bound, since L2 caches
    some of them."""
    h, i = layer.hidden_size, layer.intermediate_size
    tokens, hit, active, pairs = (case[name] for name in ("tokens", "hit", "active", "pairs"))
    logits, x = 4 * tokens * layer.num_experts, hit * (h + 4 * h // BLOCK)
    inner, rows = pairs * (i + 4 * i // BLOCK), 2 * pairs * h
    total = 1e3 * (logits + rows + 2 * tokens * h) / bandwidth(rates)  # of the combine
    for (n, k), moved in zip(layer.gemms, (x + inner, inner + rows), strict=True):
        size = gemm_bytes(active, 0, n, k) + moved
        flops_ms = 1e3 * gemm_flops(pairs, n, k) / rates["fp8_flops_per_s"]
        total += max(1e3 * size / bandwidth(rates), flops_ms)
    return float(total)


def gemm_flops(pairs: Any, n: Any, k: Any) -> Any:
    """Return the FLOPs of a grouped GEMM on `pairs` rows; for numbers or series."""
    return 2.0 * pairs * n * k


def gemm_bytes(active: Any, pairs: Any, n: Any, k: Any) -> Any:
    """Return the bytes of the active experts' operands, read once, and of the output, written
    once."""
    weights = n * k + 4 * n * k / BLOCK**2
    return active * weights + pairs * (k + 4 * k / BLOCK + 2 * n)
