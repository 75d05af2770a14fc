"""The layer as serving engines call it: bfloat16 tokens, chosen experts, quantisation in the call.

`moe_fp8.experts` and the engines' own functions take chosen experts. All are timed behind the same
routing, one launch of the Triton peers. Solutions that take FP8 are timed behind a quantiser of one
launch. The engines' weights have gate above up, as in all forms of `experts` but one.

The FP8 forms of ours show the cost of quantisation, of the gate-above-up order and of token-major
scales. A peer that reorders its weights in every call has a second line with weights that were
reordered once, as a server would do.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from flashinfer_bench.compile import BuilderRegistry
from moe_fp8 import experts, fused_moe
from moe_fp8.call import BLOCK, MoeInputs, MoeShape
from moe_fp8.reference import quantise_rows

from scripts.common.command_line import UsageError
from scripts.common.definitions import MoeDefinition
from scripts.common.project import FUSED
from scripts.common.text import error_line
from scripts.measure import times
from scripts.measure.calls import Chosen, Labels
from scripts.measure.timing import FAILURES, Returning, Timed

FP8_MAX = tl.constexpr(448.0)
Weights = tuple[torch.Tensor, ...]
"""w13 and its scales, w2 and its scales."""
Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""An engine's function of ids, weights and tokens."""


# --- the launches before a call -------------------------------------------------------------------


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise the tokens like `quantise_rows`, in one launch."""
    tokens, hidden = x.shape
    q = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scale = torch.empty((hidden // BLOCK, tokens), dtype=torch.float32, device=x.device)
    blocks = hidden // BLOCK
    places = triton.next_power_of_2(blocks)
    _quantise[(tokens,)](x, q, scale, tokens, BLOCKS=blocks, PLACES=places, SIZE=BLOCK)
    return q, scale


@triton.jit(do_not_specialize=["tokens"])
def _quantise(x, q, scales, tokens, BLOCKS: tl.constexpr, PLACES: tl.constexpr, SIZE: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, PLACES)
    at = token * BLOCKS * SIZE + block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    inside = (block < BLOCKS)[:, None]
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.max(tl.abs(values), 1) / FP8_MAX
    scale = tl.where(scale == 0.0, 1.0, scale)
    scaled = tl.clamp(values / scale[:, None], -FP8_MAX, FP8_MAX)
    tl.store(q + at, scaled.to(q.dtype.element_ty), mask=inside)
    tl.store(scales + block.to(tl.int64) * tokens + token, scale, mask=block < BLOCKS)


def choose(
    logits: torch.Tensor, bias: torch.Tensor, offset: int, factor: float, shape: MoeShape
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids of all the layer's experts, and the weights."""
    from moe_fp8.baselines.triton_stages import new_routed, route

    routed = new_routed(len(logits), shape, logits.device)
    route(logits, bias, factor, offset, shape, routed)
    return routed.ids, routed.weights


# --- the engines ----------------------------------------------------------------------------------


def vllm_experts(weights: Weights, places: torch.Tensor) -> Experts:
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    w13, w13_scale, w2, w2_scale = weights
    options: dict[str, Any] = dict(
        global_num_experts=len(places),
        expert_map=places,
        quant_config=fp8_w8a8_moe_quant_config(w13_scale, w2_scale, block_shape=[BLOCK, BLOCK]),
    )
    return lambda ids, topk_weights, x: fused_experts(x, w13, w2, topk_weights, ids, **options)


def sglang_experts(weights: Weights, places: torch.Tensor) -> Experts:
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
    from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe import fused_experts
    from sglang.srt.layers.moe.topk import StandardTopKOutput
    from sglang.srt.runtime_context import get_context, get_parallel
    from sglang.srt.server_args import ServerArgs

    # A server sets these before its first layer. SGLang up to 0.5.20 has the group in a variable.
    get_context().set_server_args(ServerArgs(model_path="dummy"))
    parallel_state._TP = SimpleNamespace(world_size=1)
    if hasattr(get_parallel(), "override_permanently"):
        get_parallel().override_permanently(tp_group=parallel_state._TP)
    w13, w13_scale, w2, w2_scale = weights
    config = MoeRunnerConfig(num_experts=len(places), num_local_experts=len(w13), inplace=False)
    options: dict[str, Any] = dict(
        use_fp8_w8a8=True, w1_scale=w13_scale, w2_scale=w2_scale, block_shape=[BLOCK, BLOCK]
    )

    def run(ids: torch.Tensor, topk_weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        local = places.index_select(0, ids.view(-1)).view_as(ids)  # -1 elsewhere
        return fused_experts(
            x, w13, w2, StandardTopKOutput(topk_weights, local, None), config, **options
        )

    return run


ENGINES = {"vllm fused_experts": vllm_experts, "sglang fused_experts": sglang_experts}


# --- peers with prepared weights ------------------------------------------------------------------


def prepared_mega_moe(inputs: MoeInputs) -> Callable[[MoeInputs, torch.Tensor], None]:
    from moe_fp8.baselines import deepgemm_mega_moe as peer

    weights = peer.own_weights(peer.SHAPE, inputs.hidden_states.device)
    peer.interleave_weights(inputs, weights)
    return lambda call_inputs, out: peer.call_prepared(call_inputs, out, weights)


PREPARED = {"deepgemm_mega_moe": prepared_mega_moe}
"""Makers of calls with prepared weights, by the solution's name."""


# --- the calls ------------------------------------------------------------------------------------


class Engines:
    """The calls on any number of tokens.

    Attributes:
        skipped: reasons why engines' functions cannot be called, by their names.
    """

    def __init__(self, layer: MoeDefinition, chosen: Chosen):
        """`chosen` are the peers, and `fused` for the sources that our forms run."""
        build, labels = BuilderRegistry.get_instance().build, chosen.labels
        peers = {name: s for name, s in chosen.solutions.items() if labels[name]["peer"]}
        self.runnables = {f"{n} + quantiser": build(chosen.definition, s) for n, s in peers.items()}
        self.labels = {f"{name} + quantiser": labels[name] for name in peers}
        self.prepared = {f"{name} prepared + quantiser": name for name in peers if name in PREPARED}
        self.with_prepared: dict[str, Callable[[MoeInputs, torch.Tensor], None]] = {}
        self.labels |= {line: labels[name] for line, name in self.prepared.items()}
        others = [name for name in labels if not labels[name]["peer"] and name != FUSED]
        if others:
            raise UsageError(f"{others[0]}: of ours, only {FUSED} is called as engines would")
        self.own = labels.get(FUSED, {"peer": False})
        self.skipped = dict(chosen.skipped)
        self.shape = MoeShape(**layer.shape)
        self.experts: dict[int, dict[str, Experts]] = {}
        self.gate_first: Weights = ()

    def experts_of(self, offset: int) -> dict[str, Experts]:
        """Return the engines' functions on the local experts from `offset` on."""
        if offset not in self.experts:
            places = torch.full((self.shape.num_experts,), -1, dtype=torch.int32)
            local = len(self.gate_first[0])
            places[offset : offset + local] = torch.arange(local, dtype=torch.int32)
            places = places.to(self.gate_first[0].device)
            self.experts[offset] = {}
            for name, make in ENGINES.items():
                try:
                    self.experts[offset][name] = make(self.gate_first, places)
                except FAILURES as error:
                    self.skipped[name] = error_line(error)
        return self.experts[offset]

    def __call__(self, drawn: MoeInputs) -> tuple[MoeInputs, times.Calls, Labels]:
        """See `calls.Calls`."""
        x = drawn.hidden_states.to(torch.bfloat16)
        q, scale = quantise_rows(x)
        inputs = drawn._replace(hidden_states=q, hidden_states_scale=scale)
        logits, bias, _, _, *weights = inputs[:8]
        assert bias is not None  # the definition has one
        offset, factor = int(drawn.local_expert_offset), float(drawn.routed_scaling_factor)
        shape, chosen_by = self.shape, (bias, offset, factor, self.shape)
        if not self.gate_first:
            first = [torch.cat(w.view(torch.uint8).chunk(2, 1)[::-1], 1) for w in weights[:2]]
            swapped = [b.view(w.dtype) for b, w in zip(first, weights[:2], strict=True)]
            self.gate_first = (*swapped, *weights[2:])

        # Each of the functions below takes logits, tokens, scales and the output.
        def layer(logits: Any, x: Any, scale: Any, out: Any) -> None:
            options: dict[str, Any] = dict(local_expert_offset=offset, routed_scaling_factor=factor)
            options |= {name: getattr(shape, name) for name in ("n_group", "topk_group", "top_k")}
            fused_moe(logits, bias, x, scale, *weights, **options, out=out)

        def ours(gate_first: bool, logits: Any, x: Any, scale: Any, out: Any) -> None:
            own = self.gate_first if gate_first else weights
            options: dict[str, Any] = dict(
                local_expert_offset=offset, num_experts=shape.num_experts, out=out
            )
            routed = choose(logits, *chosen_by)
            experts(*routed, x, *own, x_scale=scale, gate_first=gate_first, **options)

        def of_solution(run: Any) -> Any:
            rest = [*weights, drawn.local_expert_offset, drawn.routed_scaling_factor]
            return lambda logits, x, scale, out: run(logits, bias, *quantise(x), *rest, out)

        def of_prepared(run: Any) -> Any:
            def call(logits: Any, x: Any, _: Any, out: Any) -> None:
                q, scale = quantise(x)
                run(inputs._replace(routing_logits=logits, hidden_states=q,
                                    hidden_states_scale=scale), out)  # fmt: skip

            return call

        def of_engine(run: Experts) -> Any:
            return lambda logits, x, *_: run(*choose(logits, *chosen_by), x)

        token_major = scale.t().contiguous().t()
        runs: dict[str, tuple[Any, Any, Any]] = {
            "experts bf16": (partial(ours, True), x, None),
            "fused_moe bf16": (layer, x, None),
            "fused_moe fp8": (layer, q, scale),
            "experts fp8": (partial(ours, True), q, scale),
            "experts fp8 up first": (partial(ours, False), q, scale),
            "experts fp8 token-major": (partial(ours, True), q, token_major),
        }
        others = {name: (of_solution(run), x, None) for name, run in self.runnables.items()}
        if not self.with_prepared:
            self.with_prepared = {line: PREPARED[n](inputs) for line, n in self.prepared.items()}
        others |= {line: (of_prepared(run), x, None) for line, run in self.with_prepared.items()}
        theirs = self.experts_of(offset)
        others |= {name: (of_engine(run), x, None) for name, run in theirs.items()}
        labels = dict.fromkeys(runs, self.own) | dict.fromkeys(theirs, {"peer": True}) | self.labels

        def prepare(name: str) -> Timed:
            kind = Returning if name in theirs else Timed
            run, *tokens = (runs | others)[name]
            return kind(run, [logits, *tokens, torch.empty_like(x)])

        return inputs, {name: partial(prepare, name) for name in runs | others}, labels
