"""The definitions that this data set holds: one entry of a table each.

An entry says the geometry and the routing; name, interface, reference, workloads and the packed
solutions' layers follow from it. Names, axes, inputs and their order are those of the data set
that flashinfer-bench's authors publish.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.common.command_line import UsageError
from scripts.common.project import DEFINITION, OP_TYPE

DEEPSEEK_V3 = "deepseek_v3"
"""Routing: sigmoid scores, chosen with a bias among the best groups, over their sum."""
RENORMALIZE = "renormalize"
"""Routing: a softmax over the largest logits; all experts are local, and there is no factor."""


@dataclass(frozen=True)
class MoeDefinition:
    """An FP8 block-scale mixture-of-experts layer.

    Attributes:
        model: whose layer it is, in words.
        tags: of flashinfer-bench.
        short: what names of packed solutions end with; empty for the definition that they are
            named without.
        num_experts: of the whole layer.
        num_local_experts: held by this rank.
        hidden_size, intermediate_size: multiples of 128.
        n_group, topk_group, top_k: of the routing.
        routed_scaling_factor: of its workloads.
        routing: of `moe_fp8.layer.problem.ROUTINGS`.
        tokens: of the workloads that are of our own; empty where they stand for captured ones.
        logits_mean, logits_std: moments of the workloads' router logits.
    """

    model: str
    tags: tuple[str, ...]
    short: str
    num_experts: int
    num_local_experts: int
    hidden_size: int
    intermediate_size: int
    n_group: int
    topk_group: int
    top_k: int
    routed_scaling_factor: float
    routing: str = DEEPSEEK_V3
    tokens: tuple[int, ...] = ()
    logits_mean: float = -1.6706
    logits_std: float = 0.6560

    @property
    def name(self) -> str:
        """As in the public data set."""
        routing = f"ds_routing_topk{self.top_k}_ng{self.n_group}_kg{self.topk_group}"
        if self.routing == RENORMALIZE:
            routing = f"renorm_topk{self.top_k}"
        sizes = f"e{self.num_local_experts}_h{self.hidden_size}_i{self.intermediate_size}"
        return f"moe_fp8_block_scale_{routing}_{sizes}"

    @property
    def path(self) -> Path:
        """Of its JSON below a data set's root."""
        return Path("definitions") / OP_TYPE / f"{self.name}.json"

    @property
    def shape(self) -> dict[str, Any]:
        """The arguments of `moe_fp8.layer.problem.MoeShape`."""
        names = ("num_experts", "num_local_experts", "hidden_size", "intermediate_size")
        return {
            name: getattr(self, name)
            for name in (*names, "n_group", "topk_group", "top_k", "routing")
        }

    def packed_name(self, solution: str) -> str:
        """Of a solution packed for this definition: no two of a data set share a name."""
        return f"{solution}_{self.short}" if self.short else solution


OWN_TOKENS = (1, 7, 16, 64, 256, 1024, 4096, 8192)
"""Of workloads that stand for no captured ones."""


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
        n_group=1,
        topk_group=1,
        top_k=top_k,
        routed_scaling_factor=1.0,
        routing=RENORMALIZE,
        tokens=OWN_TOKENS,
        logits_mean=0.0,
        logits_std=1.0,
    )


TABLE = (
    MoeDefinition(
        model="DeepSeek-V3/R1 on one rank of eight-way expert parallelism",
        tags=("model:deepseek-v3", "model:deepseek-r1"),
        short="",
        num_experts=256,
        num_local_experts=32,
        hidden_size=7168,
        intermediate_size=2048,
        n_group=8,
        topk_group=4,
        top_k=8,
        routed_scaling_factor=2.5,
    ),
    MoeDefinition(
        model="Kimi-K2 on one rank of eight-way expert parallelism",
        tags=("model:kimi-k2",),
        short="kimi_k2",
        num_experts=384,
        num_local_experts=48,
        hidden_size=7168,
        intermediate_size=2048,
        n_group=1,
        topk_group=1,
        top_k=8,
        routed_scaling_factor=2.827,
        tokens=OWN_TOKENS,
    ),
    qwen3("Qwen3-235B-A22B", "qwen3_235b", 4096, 1536, 8),
    qwen3("Qwen3-30B-A3B", "qwen3_30b", 2048, 768, 8),
    qwen3("Qwen3-Next-80B-A3B", "qwen3_next", 2048, 512, 10),
)
DEFINITIONS = {definition.name: definition for definition in TABLE}
DEFAULT = DEFINITIONS[DEFINITION]
"""The one that programs take without --definition."""


def full_name(name: str) -> str:
    """The name of the definition that is called so in short; another name as it is."""
    return next((d.name for d in TABLE if name and name == d.short), name)


def find(name: str) -> MoeDefinition:
    """By its name, or by the short one.

    Raises:
        UsageError: there is none; the message lists those that there are.
    """
    found = DEFINITIONS.get(full_name(name))
    if found is not None:
        return found
    known = ", ".join(f"{d.name} ({d.short})" if d.short else d.name for d in TABLE)
    raise UsageError(f"no definition {name!r}; there are: {known}")
