"""The definitions that this data set holds: one entry of a table each.

There are two kinds: a mixture-of-experts layer, whose entry says the geometry and the routing, and
a grouped GEMM, whose entry says the weights' shape and where the rows lie; name, interface,
reference, workloads and the packed solutions follow from it. The layers' names, axes, inputs and
their order are those of the data set that flashinfer-bench's authors publish. Names of the
contiguous GEMMs are as proposed for it, the rest of theirs is our own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from scripts.common.command_line import UsageError
from scripts.common.project import DEFINITION, OP_TYPE

DEEPSEEK_V3 = "deepseek_v3"
"""Routing: sigmoid scores, chosen with a bias among the best groups, over their sum."""
RENORMALIZE = "renormalize"
"""Routing: a softmax over the largest logits; all experts are local, and there is no factor."""

CONTIGUOUS = "contiguous"
"""Rows of a grouped GEMM: `[rows, K]`, those of an expert after those of the one before."""
MASKED = "masked"
"""Rows of a grouped GEMM: `[experts, max_rows, K]`, as many of an expert's as a count says."""

FLASHINFER_API = "fi_api:flashinfer.fused_moe.trtllm_fp8_block_scale_moe"

LARGE = 8 * 2**30
"""Bytes of weights above which a definition is: with 2 GB three trials fit an H200, with 17 one."""


@dataclass(frozen=True)
class Entry:
    """What all definitions have."""

    model: str  # whose layer it is, in words
    tags: tuple[str, ...]  # the models, as flashinfer-bench tags them
    short: str  # what names of packed solutions end with; empty for the default definition

    op_type: ClassVar[str]
    """flashinfer-bench's: the folder of the definition and of its workloads."""

    @property
    def all_tags(self) -> tuple[str, ...]:
        """With those that follow from the rest."""
        return self.tags

    @property
    def large(self) -> bool:
        """Whether flashinfer-bench needs nearly all of a GPU's memory for one trial."""
        return False

    @property
    def packed_shape(self) -> dict[str, Any] | None:
        """What a packed solution's layer is made for, where `run` needs to be told."""
        return None

    @property
    def name(self) -> str:
        """Of the definition."""
        raise NotImplementedError

    @property
    def path(self) -> Path:
        """Of its JSON below a data set's root."""
        return Path("definitions") / self.op_type / f"{self.name}.json"

    def takes(self, solution: Mapping[str, Any]) -> bool:
        """Whether a solution with these literals is packed for the definition."""
        raise NotImplementedError

    def packed_name(self, solution: str) -> str:
        """Of a solution packed for this definition: no two of a data set share a name."""
        return f"{solution}_{self.short}" if self.short else solution


@dataclass(frozen=True)
class MoeDefinition(Entry):
    """An FP8 block-scale mixture-of-experts layer."""

    num_experts: int  # of the whole layer
    num_local_experts: int  # held by this rank
    hidden_size: int  # a multiple of 128, as the next
    intermediate_size: int
    top_k: int
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0  # of its workloads
    routing: str = DEEPSEEK_V3
    tokens: tuple[int, ...] = ()  # of our own workloads; empty where they stand for captured ones
    logits_mean: float = -1.6706  # moments of the workloads' router logits
    logits_std: float = 0.6560

    op_type = OP_TYPE

    @property
    def name(self) -> str:
        """As in the public data set."""
        routing = f"ds_routing_topk{self.top_k}_ng{self.n_group}_kg{self.topk_group}"
        if self.routing == RENORMALIZE:
            routing = f"renorm_topk{self.top_k}"
        sizes = f"e{self.num_local_experts}_h{self.hidden_size}_i{self.intermediate_size}"
        return f"moe_fp8_block_scale_{routing}_{sizes}"

    @property
    def all_tags(self) -> tuple[str, ...]:
        """As in the public data set: the ranks, the function of FlashInfer that takes these inputs,
        and that the reference is verified, where the public one of the same name gives the same."""
        ranks = self.num_experts // self.num_local_experts
        return (
            *self.tags,
            *([f"ep:{ranks}"] if ranks > 1 else []),
            *([FLASHINFER_API] if self.routing == DEEPSEEK_V3 else []),
            *([] if self.short else ["status:verified"]),
        )

    @property
    def large(self) -> bool:
        """By its FP8 weights, of which flashinfer-bench holds up to five copies for one trial and
        what it draws them in as float32."""
        return self.num_local_experts * self.expert_weights > LARGE

    @property
    def shape(self) -> dict[str, Any]:
        """The arguments of `moe_fp8.problem.MoeShape`."""
        sizes = ("num_experts", "num_local_experts", "hidden_size", "intermediate_size")
        routing = ("n_group", "topk_group", "top_k", "routing")
        return {name: getattr(self, name) for name in sizes + routing}

    @property
    def gemms(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(N, K) of the weights of both GEMMs."""
        hidden, inner = self.hidden_size, self.intermediate_size
        return (2 * inner, hidden), (hidden, inner)

    @property
    def expert_weights(self) -> int:
        """Values of one expert."""
        return sum(n * k for n, k in self.gemms)

    @property
    def packed_shape(self) -> dict[str, Any] | None:
        """Of all but the definition that the solutions are written for."""
        return self.shape if self.short else None

    def takes(self, solution: Mapping[str, Any]) -> bool:
        """Every layer at the default geometry, elsewhere those that say that they have the
        routing."""
        if "rows" in solution:
            return False
        return not self.short or self.routing in solution.get("routings", ())


@dataclass(frozen=True)
class GemmDefinition(Entry):
    """One of the two grouped GEMMs of the first layer of the table, alone."""

    experts: int  # that have weights
    n: int  # of an expert's weights [n, k], multiples of 128
    k: int
    rows: str  # `CONTIGUOUS` or `MASKED`
    tokens: tuple[int, ...]  # of the layer's workloads whose rows its own have

    op_type = "grouped_gemm"

    @property
    def name(self) -> str:
        """As proposed for the public data set."""
        masked = "masked_" if self.rows == MASKED else ""
        return f"grouped_gemm_{masked}fp8_e{self.experts}_n{self.n}_k{self.k}"

    def takes(self, solution: Mapping[str, Any]) -> bool:
        """Those that say that they take rows in this layout."""
        return solution.get("rows") == self.rows


OWN_TOKENS = (1, 7, 16, 64, 256, 1024, 4096, 8192)
"""Of workloads that stand for no captured ones."""
MODEL_TOKENS = (1, 8, 64, 512, 4096)
"""The same, of the models that are measured against the peers."""


def kimi_k2(
    model: str, short: str, num_local_experts: int, tokens: tuple[int, ...] = OWN_TOKENS
) -> MoeDefinition:
    """384 experts, of which so many are here."""
    return MoeDefinition(
        model=model,
        tags=("model:kimi-k2",),
        short=short,
        num_experts=384,
        num_local_experts=num_local_experts,
        hidden_size=7168,
        intermediate_size=2048,
        top_k=8,
        routed_scaling_factor=2.827,
        tokens=tokens,
    )


def minimax_m2(model: str, short: str, num_local_experts: int) -> MoeDefinition:
    """256 experts, of which so many are here. The model has no factor."""
    return MoeDefinition(
        model=model,
        tags=("model:minimax-m2",),
        short=short,
        num_experts=256,
        num_local_experts=num_local_experts,
        hidden_size=3072,
        intermediate_size=1536,
        top_k=8,
        tokens=MODEL_TOKENS,
    )


def qwen3(
    model: str, short: str, hidden_size: int, intermediate_size: int, top_k: int
) -> MoeDefinition:
    """128 experts, all of them here. Nothing is known of captured logits: they are normal."""
    return MoeDefinition(
        model=model,
        tags=(f"model:{model.lower()}",),
        short=short,
        num_experts=128,
        num_local_experts=128,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        top_k=top_k,
        routing=RENORMALIZE,
        tokens=OWN_TOKENS,
        logits_mean=0.0,
        logits_std=1.0,
    )


MOE = (
    MoeDefinition(
        model="DeepSeek-V3/R1 on one rank of eight-way expert parallelism",
        tags=("model:deepseek-v3", "model:deepseek-r1"),
        short="",
        num_experts=256,
        num_local_experts=32,
        hidden_size=7168,
        intermediate_size=2048,
        top_k=8,
        n_group=8,
        topk_group=4,
        routed_scaling_factor=2.5,
    ),
    kimi_k2("Kimi-K2 on one rank of eight-way expert parallelism", "kimi_k2", 48),
    kimi_k2("Kimi-K2 with all experts on one GPU", "kimi_k2_e384", 384),
    qwen3("Qwen3-235B-A22B", "qwen3_235b", 4096, 1536, 8),
    qwen3("Qwen3-30B-A3B", "qwen3_30b", 2048, 768, 8),
    qwen3("Qwen3-Next-80B-A3B", "qwen3_next", 2048, 512, 10),
    MoeDefinition(
        model="DeepSeek-V3/R1 on one rank of eight-way tensor parallelism",
        tags=("model:deepseek-v3", "model:deepseek-r1"),
        short="dsv3_tp8",
        num_experts=256,
        num_local_experts=256,
        hidden_size=7168,
        intermediate_size=256,
        top_k=8,
        n_group=8,
        topk_group=4,
        routed_scaling_factor=2.5,
        tokens=MODEL_TOKENS,
    ),
    MoeDefinition(
        model="GLM-5 on one rank of eight-way expert parallelism",
        tags=("model:glm-5",),
        short="glm5",
        num_experts=256,
        num_local_experts=32,
        hidden_size=6144,
        intermediate_size=2048,
        top_k=8,
        routed_scaling_factor=2.5,
        tokens=MODEL_TOKENS,
    ),
    minimax_m2("MiniMax-M2 with all experts on one GPU", "minimax_m2", 256),
    minimax_m2("MiniMax-M2 on one rank of eight-way expert parallelism", "minimax_m2_ep8", 32),
    kimi_k2("Kimi-K2 on one rank of four-way expert parallelism", "kimi_k2_ep4", 96, MODEL_TOKENS),
)
DEFAULT = MOE[0]
"""The one that programs take without --definition."""
assert DEFAULT.name == DEFINITION
DSV3_TP8 = next(d for d in MOE if d.short == "dsv3_tp8")
SHARED = replace(
    DSV3_TP8,
    model=f"{DSV3_TP8.model}, the shared expert fused",
    short="dsv3_tp8_shared",
    num_experts=DSV3_TP8.num_experts + 1,
    num_local_experts=DSV3_TP8.num_local_experts + 1,
    top_k=DSV3_TP8.top_k + 1,
    n_group=1,
    topk_group=1,
    routed_scaling_factor=DSV3_TP8.routed_scaling_factor + 1.0,
)
"""What engines call where they fuse the shared expert: it is the last one, of every token, with a
weight of 1. No routing of groups chooses so: in no data set, and logits are made for given experts
(`measure.sweep.SharedProblems`)."""
MODELS = (*(definition for definition in MOE if definition.tokens == MODEL_TOKENS), SHARED)
"""Layers of docs/models.md, which a record has at these token counts."""

GEMM_TOKENS = (1, 7, 16, 32, 55, 80, 901, 14107)
MASKED_TOKENS = 901
"""Up to here a grouped GEMM has masked workloads: that is the layout of few rows."""
GEMMS = tuple(
    GemmDefinition(
        model=DEFAULT.model,
        tags=DEFAULT.tags,
        short=short + ("_masked" if rows == MASKED else ""),
        experts=DEFAULT.num_local_experts,
        n=n,
        k=k,
        rows=rows,
        tokens=tuple(t for t in GEMM_TOKENS if rows == CONTIGUOUS or t <= MASKED_TOKENS),
    )
    for rows in (CONTIGUOUS, MASKED)
    for short, (n, k) in zip(("gemm1", "gemm2"), DEFAULT.gemms, strict=True)
)
"""Both GEMMs of the default layer in both layouts."""
TABLE: tuple[MoeDefinition | GemmDefinition, ...] = (*MOE, *GEMMS)
DEFINITIONS = {definition.name: definition for definition in TABLE}


def size_of(axes: Mapping[str, Any]) -> int:
    """The number that a workload with these axes is chosen and listed by, the T of the tables: its
    tokens, or the rows of a grouped GEMM (masked: those reserved for an expert); 0 where it has
    none of them."""
    sizes = ("seq_len", "total_rows", "max_rows")
    return next((int(axes[axis]) for axis in sizes if axis in axes), 0)


def full_name(name: str) -> str:
    """The name of the definition that is called so in short; another name as it is."""
    return next((d.name for d in TABLE if name and name == d.short), name)


def find_layer(name: str) -> MoeDefinition:
    """A layer, as `find` does; also the one that is in no data set."""
    found = SHARED if name in (SHARED.short, SHARED.name) else find(name)
    if isinstance(found, MoeDefinition):
        return found
    raise UsageError(f"{found.name} is a grouped GEMM; expected a layer")


def find(name: str) -> MoeDefinition | GemmDefinition:
    """By its name, or by the short one. Raises UsageError: there is none; the message lists those
    that there are."""
    found = DEFINITIONS.get(full_name(name))
    if found is not None:
        return found
    known = ", ".join(f"{d.name} ({d.short})" if d.short else d.name for d in TABLE)
    raise UsageError(f"no definition {name!r}; there are: {known}")
