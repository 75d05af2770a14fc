"""The calls of a layer on any number of tokens: solutions, and calls as serving engines make them.

A solution gets the definition's inputs. An engine has bfloat16 tokens, chooses experts and
quantises in the call. `moe_fp8.experts` and the engines' own functions take chosen experts. All are
timed behind the same routing, one launch of the Triton peers. Solutions that take FP8 are timed
behind a quantiser of one launch. The engines' weights have gate above up, as in all forms of
`experts` but one; FlashInfer's have up above gate.

The FP8 forms of ours show the cost of quantisation, of the gate-above-up order and of token-major
scales. A peer that reorders its weights in every call has a second line with weights that were
reordered once, as a server would do.

`Channels` are calls on weights with a scale for each channel, beside the same weights in blocks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from flashinfer_bench.compile import BuilderRegistry
from flashinfer_bench.data import Definition, Solution
from moe_fp8 import experts, fused_moe
from moe_fp8.call import MoeInputs
from moe_fp8.reference import choose_experts, quantise_rows
from moe_fp8.shape import BLOCK, MoeShape

from scripts.common.definitions import DSV3_TP8, SHARED, MoeDefinition, build_definition
from scripts.common.options import matches, select_names
from scripts.common.packer import generations, pack
from scripts.common.program import FUSED, PREFIX, UsageError, error_line
from scripts.measuring import cases, layers
from scripts.measuring.accuracy import LARGEST_DIFF
from scripts.measuring.cases import Problems, definition_of
from scripts.measuring.clock import FAILURES, Rates, Returning, Timed, timed
from scripts.measuring.layers import Subjects
from scripts.publishing.rows import Writer

TOKENS = tuple(2**i for i in range(15))
PEERS = ("humming_moe", "triton_moe", "deepgemm_moe", "hpc_ops_moe")
FLASHINFER = "flashinfer_cutlass_moe"
"""Not one of `PEERS`: it takes bfloat16 tokens, so an engine calls `flashinfer_experts`."""
SOLUTIONS = (*(PREFIX + name for name in ("fused", "fused_hifi", "flat")), *PEERS, FLASHINFER)


# --- a layer's solutions --------------------------------------------------------------------------


class Chosen(NamedTuple):
    """The solutions of a layer that can be called. Their names are those of the default layer."""

    definition: Definition
    solutions: dict[str, Solution]
    fields: dict[str, dict[str, Any]]  # of each one's rows: if it is a peer, and the sources
    skipped: dict[str, str]  # why a solution or an engine's function is left out


def choose(
    layer: MoeDefinition, wanted: Sequence[str], local: Path, run_foreign: bool = False
) -> Chosen:
    """Return the wanted solutions that are packed for the layer; see `cases.choose`."""
    packed_for = DSV3_TP8 if layer is SHARED else layer
    names = {packed_for.packed_name(name): name for name in wanted}
    skipped = {}
    if layer.short:
        there = {g.name: g for g in generations(definition=packed_for)}
        select_names([*(g.name for g in generations()), *there], wanted)  # refuses unknown ones
        lacking = {n for n in names if not any(matches(name, [n]) for name in there)}
        skipped = {names.pop(n): "is not packed for the layer" for n in lacking}
        if not names:
            raise UsageError(f"none of {', '.join(wanted)} is packed for {layer.name}")
    chosen = cases.choose(
        local,
        True,
        solutions=list(names),
        run_foreign=run_foreign,
        max_tokens=1,  # the workloads are not run
        definition=packed_for,
    )

    def plain(solution: Solution) -> str:
        return solution.name.removesuffix(f"_{packed_for.short}")

    def place(solution: Solution) -> int:
        return next(i for i, name in enumerate(names) if matches(solution.name, [name]))

    ordered = sorted(chosen.solutions, key=place)
    definition, solutions = definition_of(chosen.trace_set), ordered
    if layer is SHARED:
        definition = Definition(**build_definition(SHARED))
        again = (pack(replace(there[s.name], definition=SHARED)) for s in ordered)
        solutions = [Solution.model_validate_json(text) for text in again]
    return Chosen(
        definition,
        dict(zip(map(plain, ordered), solutions, strict=True)),
        {
            plain(s): {"peer": chosen.peers[s.name], "solution": s.name, "hash": s.hash()}
            for s in ordered
        },
        skipped | chosen.skipped,
    )


def arguments(definition: Definition, inputs: MoeInputs) -> list[Any]:
    """Return the inputs in the definition's order."""
    return [getattr(inputs, name) for name in definition.inputs]


def given_experts(layer: MoeDefinition, inputs: MoeInputs) -> Timed:
    """Prepare a call of `moe_fp8.experts` on the experts that the logits choose, routed before."""
    logits, bias, x, x_scale, *weights = inputs[:8]
    shape, factor = MoeShape(**layer.shape), float(inputs.routed_scaling_factor)
    ids, topk_weights = choose_experts(logits, bias, factor, shape)
    offset = int(inputs.local_expert_offset)

    def run(ids: Any, topk_weights: Any, x: Any, x_scale: Any, out: Any) -> None:
        more: dict[str, Any] = dict(local_expert_offset=offset, num_experts=layer.num_experts)
        experts(ids, topk_weights, x, *weights, x_scale=x_scale, gate_first=False, **more, out=out)

    return Timed(
        run, [ids.int(), topk_weights, x, x_scale, torch.empty_like(x, dtype=torch.bfloat16)]
    )


def of_solutions(
    layer: MoeDefinition, chosen: Chosen, inputs: MoeInputs
) -> tuple[MoeInputs, Subjects]:
    """Return the inputs for the reference, and the calls of a layer's solutions; with a shared
    expert, of `moe_fp8.experts` too."""
    ordered = arguments(chosen.definition, inputs)
    subjects: Subjects = {
        name: (partial(timed, chosen.definition, solution, ordered, "cuda"), chosen.fields[name])
        for name, solution in chosen.solutions.items()
    }
    if layer is SHARED:
        subjects["experts"] = partial(given_experts, layer, inputs), {"peer": False}
    return inputs, subjects


# --- the launches before a call -------------------------------------------------------------------

FP8_MAX = tl.constexpr(448.0)
Weights = tuple[torch.Tensor, ...]
"""w13 and its scales, w2 and its scales."""
Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""An engine's function of ids, weights and tokens."""
MakeExperts = Callable[[Weights, torch.Tensor], Experts]
"""Its maker, from the layer's weights and each expert's place among the local ones."""


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


def route(
    logits: torch.Tensor, bias: torch.Tensor, offset: int, factor: float, shape: MoeShape
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids of all the layer's experts, and the weights."""
    from moe_fp8.baselines.triton_stages import new_routed
    from moe_fp8.baselines.triton_stages import route as launch

    routed = new_routed(len(logits), shape, logits.device)
    launch(logits, bias, factor, offset, shape, routed)
    return routed.ids, routed.weights


# --- the engines ----------------------------------------------------------------------------------


def with_halves_swapped(w13: torch.Tensor) -> torch.Tensor:
    """Return w13 or its scales with rows of gate and of up in each other's place."""
    first, second = w13.view(torch.uint8).chunk(2, 1)  # torch.cat takes no FP8
    return torch.cat([second, first], 1).view(w13.dtype)


def is_per_channel(weights: Weights) -> bool:
    w13, w13_scale, *_ = weights
    return w13_scale.shape[1] == w13.shape[1]


VLLM_PER_CHANNEL: dict[str, Any] = dict(per_act_token_quant=True, per_out_ch_quant=True)


def vllm_experts(weights: Weights, places: torch.Tensor) -> Experts:
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    w13, w13_scale, w2, w2_scale = weights
    form: dict[str, Any] = dict(block_shape=[BLOCK, BLOCK])
    if is_per_channel(weights):
        form = VLLM_PER_CHANNEL
    options: dict[str, Any] = dict(
        global_num_experts=len(places),
        expert_map=places,
        quant_config=fp8_w8a8_moe_quant_config(w13_scale, w2_scale, **form),
    )
    return lambda ids, topk_weights, x: fused_experts(x, w13, w2, topk_weights, ids, **options)


def vllm_cutlass_experts(weights: Weights, places: torch.Tensor) -> Experts:
    """vLLM's CUTLASS kernel, which takes weights with a scale for each channel."""
    import vllm.model_executor.layers.fused_moe.modular_kernel as modular
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import (
        FusedMoEConfig,
        FusedMoEParallelConfig,
        RoutingMethodType,
        fp8_w8a8_moe_quant_config,
    )
    from vllm.model_executor.layers.fused_moe.experts.cutlass_moe import CutlassExpertsFp8
    from vllm.model_executor.layers.fused_moe.prepare_finalize import no_dp_ep
    from vllm.v1.worker.workspace import init_workspace_manager

    w13, w13_scale, w2, w2_scale = weights
    local, hidden, intermediate = w2.shape
    init_workspace_manager(w13.device)
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(w13.device.type))):
        config = FusedMoEConfig(
            num_experts=len(places),
            experts_per_token=1,  # not read: the call's ids tell
            hidden_dim=hidden,
            intermediate_size=intermediate,
            num_local_experts=local,
            num_logical_experts=len(places),
            activation=MoEActivation.SILU,
            device=w13.device,
            routing_method=RoutingMethodType.DeepSeekV3,
            moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
            in_dtype=torch.bfloat16,
        )
        quantised = fp8_w8a8_moe_quant_config(w13_scale, w2_scale, **VLLM_PER_CHANNEL)
        kernel = modular.FusedMoEKernel(
            no_dp_ep.MoEPrepareAndFinalizeNoDPEPModular(), CutlassExpertsFp8(config, quantised)
        )

    def run(ids: torch.Tensor, topk_weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return kernel.apply(
            x, w13, w2, topk_weights, ids, activation=MoEActivation.SILU,
            global_num_experts=len(places), expert_map=places, apply_router_weight_on_input=False,
            shared_experts=None, shared_experts_input=None,
        )  # fmt: skip

    return run


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
    options: dict[str, Any] = dict(use_fp8_w8a8=True, w1_scale=w13_scale, w2_scale=w2_scale)
    per_channel = is_per_channel(weights)
    options |= dict(per_channel_quant=True) if per_channel else dict(block_shape=[BLOCK, BLOCK])

    def run(ids: torch.Tensor, topk_weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        local = places.index_select(0, ids.view(-1)).view_as(ids)  # -1 elsewhere
        return fused_experts(
            x, w13, w2, StandardTopKOutput(topk_weights, local, None), config, **options
        )

    return run


def flashinfer_experts(weights: Weights, places: torch.Tensor) -> Experts:
    """FlashInfer's CUTLASS kernel. Its weights have up above gate. The local experts are those of
    one rank."""
    from flashinfer.fused_moe import cutlass_fused_moe

    w13, w13_scale, w2, w2_scale = weights
    options: dict[str, Any] = dict(
        quant_scales=[w13_scale, w2_scale],
        ep_size=len(places) // len(w13),
        ep_rank=int((places == 0).nonzero()) // len(w13),
        use_deepseek_fp8_block_scale=True,
    )

    def run(ids: torch.Tensor, topk_weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(x)
        cutlass_fused_moe(x, ids, topk_weights, w13, w2, torch.bfloat16, output=output, **options)
        return output

    return run


UP_FIRST = "flashinfer cutlass_fused_moe"
"""The engines' function that takes weights in the definition's order, up above gate."""
ENGINES = {
    "vllm fused_experts": vllm_experts,
    "sglang fused_experts": sglang_experts,
    UP_FIRST: flashinfer_experts,
}
CHANNEL_ENGINES = {
    "vllm fused_experts": vllm_experts,
    "vllm cutlass experts": vllm_cutlass_experts,
    "sglang fused_experts": sglang_experts,
}


# --- calls as engines make them -------------------------------------------------------------------


class Engines:
    """The calls on any number of tokens. `chosen` are the peers, and `fused` for the sources that
    our forms run. Engines' functions that cannot be called are added to `chosen.skipped`."""

    def __init__(self, layer: MoeDefinition, chosen: Chosen):
        peers = {name: s for name, s in chosen.solutions.items() if chosen.fields[name]["peer"]}
        if others := [name for name in chosen.solutions if name not in peers and name != FUSED]:
            raise UsageError(f"{others[0]}: of ours, only {FUSED} is called as engines would")
        build = BuilderRegistry.get_instance().build
        self.chosen, self.shape = chosen, MoeShape(**layer.shape)
        self.peers = {name: build(chosen.definition, s) for name, s in peers.items()}
        self.experts: dict[int, dict[str, Experts]] = {}
        self.gate_first: Weights = ()
        self.up_first: Weights = ()

    def experts_of(self, offset: int, makers: Mapping[str, MakeExperts]) -> dict[str, Experts]:
        """Return the engines' functions on the local experts from `offset` on."""
        if offset not in self.experts:
            places = torch.full((self.shape.num_experts,), -1, dtype=torch.int32)
            local = len(self.gate_first[0])
            places[offset : offset + local] = torch.arange(local, dtype=torch.int32)
            places = places.to(self.gate_first[0].device)
            self.experts[offset] = {}
            for name, make in makers.items():
                weights = self.up_first if name == UP_FIRST else self.gate_first
                try:
                    self.experts[offset][name] = make(weights, places)
                except FAILURES as error:
                    self.chosen.skipped[name] = error_line(error)
        return self.experts[offset]

    def __call__(self, drawn: MoeInputs) -> tuple[MoeInputs, Subjects]:
        """Return the inputs for the reference, and the calls."""
        x = drawn.hidden_states.to(torch.bfloat16)
        q, scale = quantise_rows(x)
        inputs = drawn._replace(hidden_states=q, hidden_states_scale=scale)
        logits, bias, _, _, *weights = inputs[:8]
        assert bias is not None  # the definition has one
        offset, factor = int(drawn.local_expert_offset), float(drawn.routed_scaling_factor)
        shape = self.shape
        if not self.gate_first:
            self.gate_first = (*map(with_halves_swapped, weights[:2]), *weights[2:])
            self.up_first = tuple(weights)
        subjects: Subjects = {}

        # `run` takes logits, tokens, scales and the output.
        def add(
            name: str, fields: Any, run: Any, tokens: Any = x, scale: Any = None, kind: Any = Timed
        ) -> None:
            arguments = logits, tokens, scale
            subjects[name] = (lambda: kind(run, [*arguments, torch.empty_like(x)])), fields

        def layer(logits: Any, x: Any, scale: Any, out: Any) -> None:
            options: dict[str, Any] = dict(local_expert_offset=offset, routed_scaling_factor=factor)
            options |= {name: getattr(shape, name) for name in ("n_group", "topk_group", "top_k")}
            fused_moe(logits, bias, x, scale, *weights, **options, out=out)

        def routed(logits: Any) -> tuple[torch.Tensor, torch.Tensor]:
            return route(logits, bias, offset, factor, shape)

        def ours(gate_first: bool, logits: Any, x: Any, scale: Any, out: Any) -> None:
            own = self.gate_first if gate_first else weights
            options: dict[str, Any] = dict(
                local_expert_offset=offset, num_experts=shape.num_experts, out=out
            )
            experts(*routed(logits), x, *own, x_scale=scale, gate_first=gate_first, **options)

        def solution(run: Any, logits: Any, x: Any, _: Any, out: Any) -> None:
            rest = [*weights, drawn.local_expert_offset, drawn.routed_scaling_factor]
            run(logits, bias, *quantise(x), *rest, out)

        def engine(run: Experts, logits: Any, x: Any, *_: Any) -> torch.Tensor:
            return run(*routed(logits), x)

        own, fields = self.chosen.fields.get(FUSED, {"peer": False}), self.chosen.fields
        add("experts bf16", own, partial(ours, True))
        add("fused_moe bf16", own, layer)
        add("fused_moe fp8", own, layer, q, scale)
        add("experts fp8", own, partial(ours, True), q, scale)
        add("experts fp8 up first", own, partial(ours, False), q, scale)
        token_major = scale.t().contiguous().t()
        add("experts fp8 token-major", own, partial(ours, True), q, token_major)
        for name, run in self.peers.items():
            add(f"{name} + quantiser", fields[name], partial(solution, run))
        for name, function in self.experts_of(offset, ENGINES).items():
            add(name, {"peer": True}, partial(engine, function), kind=Returning)
        return inputs, subjects


class Channels(Engines):
    """Calls of experts with a weight scale for each channel, beside the same weights in blocks.

    The blocks of a row get one scale, so that both forms are the same layer, and one reference
    serves both. Tokens are FP8 values in bfloat16: the reference has no error of its own quantiser.
    """

    def __call__(self, drawn: MoeInputs) -> tuple[MoeInputs, Subjects]:
        """Return the inputs for the reference, and the calls."""
        w13, w2 = drawn.gemm1_weights, drawn.gemm2_weights
        drawn_scales = drawn.gemm1_weights_scale, drawn.gemm2_weights_scale
        of_rows = [scale[..., :1] for scale in drawn_scales]  # [E, N/128, 1]
        channels = [scale.repeat_interleave(BLOCK, dim=1) for scale in of_rows]  # [E, N, 1]
        blocks = [
            rows.expand_as(scale).contiguous()
            for rows, scale in zip(of_rows, drawn_scales, strict=True)
        ]
        inputs = drawn._replace(
            hidden_states_scale=torch.ones_like(drawn.hidden_states_scale),
            gemm1_weights_scale=blocks[0],
            gemm2_weights_scale=blocks[1],
        )
        if not self.gate_first:
            first, first_scale = map(with_halves_swapped, (w13, channels[0]))
            self.gate_first = (first, first_scale, w2, channels[1])
        x, logits, bias = drawn.hidden_states.to(torch.bfloat16), inputs[0], inputs[1]
        assert bias is not None  # the definition has one
        offset, factor = int(drawn.local_expert_offset), float(drawn.routed_scaling_factor)
        shape = self.shape

        def routed(logits: Any) -> tuple[torch.Tensor, torch.Tensor]:
            return route(logits, bias, offset, factor, shape)

        def ours(scales: Any, accurate: bool, logits: Any, x: Any, out: Any) -> None:
            options: dict[str, Any] = dict(
                local_expert_offset=offset, num_experts=shape.num_experts, accurate=accurate
            )
            weights = w13, scales[0], w2, scales[1]
            experts(*routed(logits), x, *weights, gate_first=False, **options, out=out)

        def engine(run: Experts, logits: Any, x: Any, _: Any) -> torch.Tensor:
            return run(*routed(logits), x)

        own = self.chosen.fields.get(FUSED, {"peer": False})
        calls: dict[str, tuple[Any, Any, Any]] = {
            "experts per channel": (partial(ours, channels, False), own, Timed),
            "experts in blocks": (partial(ours, blocks, False), own, Timed),
            "experts per channel, accurate": (partial(ours, channels, True), own, Timed),
        }
        for name, function in self.experts_of(offset, CHANNEL_ENGINES).items():
            calls[f"{name} per channel"] = partial(engine, function), {"peer": True}, Returning
        return inputs, {
            name: (partial(kind, run, [logits, x, torch.empty_like(x)]), fields)
            for name, (run, fields, kind) in calls.items()
        }


# --- the measurement ------------------------------------------------------------------------------


def measure(
    writer: Writer,
    layer: MoeDefinition,
    problems: Problems,
    calls: Callable[[MoeInputs], tuple[MoeInputs, Subjects]],
    length: int,
    rates: Rates,
    repeats: int,
) -> None:
    """Write the rows of the calls on `length` tokens. `calls` returns the inputs for the reference,
    and the calls."""
    torch.cuda.empty_cache()  # buffers of the previous length have other sizes
    drawn, routing = problems.of(length)
    h = problems.histogram(drawn)
    inputs, subjects = calls(drawn)
    definition = problems.inputs.definition
    case = {"definition": layer.short or layer.name, **h.counts(), "routing": routing}
    least = layers.least_ms(h, rates, repeats, layer)
    ordered = arguments(definition, inputs)
    layers.measure_calls(writer, case, definition, ordered, subjects, repeats, least, LARGEST_DIFF)
