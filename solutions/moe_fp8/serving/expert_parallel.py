"""The whole layer on several GPUs: a rank has its share of the experts and its share of the tokens.

A token's parts are added in the order of the ranks, in float32: what a reduce-scatter would do in
bfloat16, in an order of its own, for as many bytes.
"""

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..api import call_of, fused_moe, refuse_gradients
from ..call import BLOCK, MoeInputs, MoeShape, check_real
from ..kernels import architectures
from ..ladder import steps
from ..reference import quantise_rows

if TYPE_CHECKING:
    import deep_ep

# torch 2.13 gave it another name.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

DEEP_EP_BYTES = 32
"""What DeepEP copies a token's halves in multiples of, twice."""

Exchanged = tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]
"""The packed tokens that this rank computes, and what brings its part of each back to the token's
rank and adds them: from `[n, H]` bfloat16 to `[t, H]` bfloat16."""


def expert_parallel_moe(
    routing_logits: torch.Tensor,
    routing_bias: torch.Tensor | None,
    hidden_states: torch.Tensor,
    hidden_states_scale: torch.Tensor | None,
    gemm1_weights: torch.Tensor,
    gemm1_weights_scale: torch.Tensor,
    gemm2_weights: torch.Tensor,
    gemm2_weights_scale: torch.Tensor,
    *,
    routed_scaling_factor: float = 1.0,
    n_group: int = 8,
    topk_group: int = 4,
    top_k: int = 8,
    gate_first: bool = False,
    accurate: bool = False,
    swiglu_limit: float | None = None,
    swiglu_alpha: float = 1.0,
    swiglu_beta: float = 0.0,
    ue8m0: bool = False,
    group: dist.ProcessGroup | None = None,
    buffer: "deep_ep.Buffer | None" = None,
) -> torch.Tensor:
    """`fused_moe` of this rank's tokens over the experts of all ranks.

    Rank r has experts `r * L ... r * L + L - 1`. Without a buffer every rank has as many tokens as
    every other one, and two collective operations move them. With a buffer of DeepEP a token goes
    to the ranks of its experts alone, ranks may have different numbers of tokens, and the host
    waits for the number that this rank receives. A rank may have no tokens.

    Before that every rank checks its arguments, and the ranks exchange a number to learn that all
    of them are right: on the CPU if the group has a backend for it ("cpu:gloo,cuda:nccl"), which
    waits for the other ranks' hosts; else ("nccl") on the GPU, which the host then waits for.

    Args:
        routing_logits, hidden_states, hidden_states_scale: of this rank's t tokens, as in
            `fused_moe`; E is L times the ranks. Tokens in bfloat16 are quantised before they are
            exchanged.
        routing_bias: as in `fused_moe`, the same on every rank, which is not checked.
        gemm1_weights, gemm1_weights_scale, gemm2_weights, gemm2_weights_scale, gate_first: of this
            rank's L experts, as in `fused_moe`.
        routed_scaling_factor, n_group, topk_group, top_k, accurate, swiglu_limit, swiglu_alpha,
            swiglu_beta, ue8m0: as in `fused_moe`, the same on every rank.
        group: of processes, else the default one.
        buffer: of DeepEP, over the same group, see `deep_ep_buffer`: its `dispatch` and `combine`
            for high throughput are called.

    Returns:
        `[t, H]` bfloat16.

    Raises:
        ValueError: an argument is wrong on a rank, or differs between ranks where it must not. No
            token was exchanged. The same error is raised on every rank; its message names the
            argument and the rank.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    inputs = MoeInputs._make((
        routing_logits, routing_bias, hidden_states, hidden_states_scale,
        gemm1_weights, gemm1_weights_scale, gemm2_weights, gemm2_weights_scale,
        0, routed_scaling_factor,  # the offset follows from the rank
    ))  # fmt: skip
    options: dict[str, Any] = {
        "n_group": n_group,
        "topk_group": topk_group,
        "top_k": top_k,
        "gate_first": gate_first,
        "accurate": accurate,
        "swiglu_limit": swiglu_limit,
        "swiglu_alpha": swiglu_alpha,
        "swiglu_beta": swiglu_beta,
        "ue8m0": ue8m0,
    }
    _agree(_checked(inputs, options, ranks, buffer), hidden_states, group)
    local, experts, hidden = gemm1_weights.shape[0], routing_logits.shape[1], hidden_states.shape[1]
    logits, x, x_scale = routing_logits.float(), hidden_states, hidden_states_scale
    if x_scale is None:
        x, x_scale = quantise_rows(x, ue8m0)
    packed = _packed(logits, x, x_scale)
    if buffer is None:
        received, returned = _to_all_ranks(packed, group)
    else:
        # The width of an expert is nothing to the routing.
        shape = MoeShape(experts, experts, hidden, BLOCK, n_group, topk_group, top_k)
        chosen = _experts_of(logits, routing_bias, shape)
        received, returned = _to_ranks_of(chosen, packed, experts, buffer)
    logits, x, x_scale = _unpacked(received, experts, hidden)
    options |= {"local_expert_offset": rank * local, "routed_scaling_factor": routed_scaling_factor}
    return returned(fused_moe(logits, routing_bias, x, x_scale, *inputs[4:8], **options))


def deep_ep_buffer(
    experts: int, hidden: int, group: dist.ProcessGroup | None = None
) -> "deep_ep.Buffer":
    """A buffer for `expert_parallel_moe` with E experts and width H, on the GPUs of one host.

    `destroy()` it before the group.

    Raises:
        ImportError: DeepEP is not installed.
    """
    import deep_ep

    ranks = dist.get_world_size(group)
    widest = max(_padded(sum(_widths(experts, hidden))), 2 * hidden)  # there, and back
    configs = deep_ep.Buffer.get_dispatch_config(ranks), deep_ep.Buffer.get_combine_config(ranks)
    needed = max(config.get_nvl_buffer_size_hint(widest, ranks) for config in configs)
    return deep_ep.Buffer(group or dist.group.WORLD, needed, explicitly_destroy=True)


def _checked(
    inputs: MoeInputs, options: dict[str, Any], ranks: int, buffer: Any
) -> dict[str, Any] | str:
    """What must be the same on every rank, or, if an argument is wrong here, what is wrong."""
    try:
        refuse_gradients(inputs, None)
        layer, _, output = call_of(fused_moe, *inputs[:8], **options)
        experts, local = layer.shape.num_experts, layer.shape.num_local_experts
        if experts != ranks * local:
            raise ValueError(
                f"routing_logits: expected {ranks * local} experts, {local} of each of {ranks} "
                f"ranks, got {experts} (gemm1_weights: {local} experts)"
            )
        check_real("routed_scaling_factor", inputs.routed_scaling_factor)
        buffer_ranks = ranks if buffer is None else getattr(buffer, "group_size", buffer)
        if buffer_ranks != ranks:
            raise ValueError(f"buffer: expected DeepEP's of {ranks} ranks, got {buffer_ranks!r}")
        architectures.has_kernels(output.device)  # raises for an unsupported GPU
    except ValueError as error:
        return str(error)
    except Exception as error:  # else the other ranks would wait for this one
        return f"{type(error).__name__}: {error}"
    return {
        "buffer is None": buffer is None,
        "hidden_states.shape[0]": len(output) if buffer is None else None,
        "hidden_states.shape[1]": layer.shape.hidden_size,
        "hidden_states.is_cuda": output.is_cuda,
        "routing_logits.shape[1]": experts,
        "gemm2_weights.shape[2]": layer.shape.intermediate_size,
        **{name: int(options[name]) for name in ("n_group", "topk_group", "top_k")},
        "routed_scaling_factor": float(inputs.routed_scaling_factor),
        **{name: options[name] for name in ("accurate", "ue8m0")},
        **{f"swiglu_{name}": value for name, value in vars(layer.shape.swiglu).items()},
    }


def _agree(mine: dict[str, Any] | str, x: Any, group: dist.ProcessGroup | None) -> None:
    """Raise the same ValueError on every rank unless what `_checked` found is right and the same.

    Every rank makes the same collective calls whatever it found, so that none waits for one that
    has raised: one of a hash, and, unless all are right and equal, one of what was found. The first
    is an all-to-all: gloo's all-gather is a ring and takes twice as long with 8 ranks.
    """
    ranks = dist.get_world_size(group)
    on_gpu = x.device if getattr(x, "is_cuda", False) else "cuda"
    device = "cpu" if "cpu:" in dist.get_backend_config(group) else on_gpu
    digest = hashlib.sha256(repr(mine).encode()).digest()[:8]
    hashed = torch.tensor(ranks * [int.from_bytes(digest, "little", signed=True)], device=device)
    hashes = torch.empty_like(hashed)
    dist.all_to_all_single(hashes, hashed, group=group)
    if isinstance(mine, dict) and torch.equal(hashes, hashed):
        return
    found: list[Any] = [None] * ranks
    dist.all_gather_object(found, mine, group=group)
    for rank, wrong in enumerate(found):
        if isinstance(wrong, str):
            raise ValueError(f"rank {rank}: {wrong}")
    for name in found[0]:
        values = [repr(of_rank[name]) for of_rank in found]
        if len(set(values)) > 1:
            raise ValueError(
                f"{name}: expected the same on every rank, got {', '.join(values)} "
                f"on ranks 0 to {ranks - 1}"
            )


def _to_all_ranks(packed: torch.Tensor, group: dist.ProcessGroup | None) -> Exchanged:
    """By an all-gather, and back by an all-to-all."""
    ranks, tokens = dist.get_world_size(group), packed.shape[0]
    gathered = packed.new_empty(ranks * tokens, packed.shape[1])
    _all_gather(gathered, packed, group=group)

    def returned(partial: torch.Tensor) -> torch.Tensor:
        parts = torch.empty_like(partial)
        dist.all_to_all_single(parts, partial, group=group)
        first, *others = parts.view(ranks, tokens, partial.shape[1])
        total = first.float()
        for part in others:
            total += part
        return total.bfloat16()

    return gathered, returned


def _to_ranks_of(
    chosen: torch.Tensor, packed: torch.Tensor, experts: int, buffer: "deep_ep.Buffer"
) -> Exchanged:
    """By DeepEP, whose values are bfloat16, or FP8 with a scale for 128: here, any two bytes."""
    of_rank, _, of_expert, in_rank, _ = buffer.get_dispatch_layout(chosen, experts)
    width = packed.shape[1]
    padded = torch.nn.functional.pad(packed, (0, _padded(width) - width))
    received, _, _, _, handle, _ = buffer.dispatch(
        padded.view(torch.bfloat16),
        num_tokens_per_rank=of_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=of_expert,
    )
    rows = received.view(torch.uint8)[:, :width]
    return rows, lambda partial: buffer.combine(partial, handle)[0]


def _experts_of(logits: torch.Tensor, bias: torch.Tensor | None, shape: MoeShape) -> torch.Tensor:
    """`[t, top_k]` int64: of every token, by the routing of the layer as if all experts were here,
    which numbers the pairs by expert."""
    nothing = logits.new_empty(0)
    inputs = MoeInputs._make((logits, bias, *6 * (nothing,), 0, 1.0))
    rows = steps.route(inputs, shape, with_tokens=False)
    return torch.searchsorted(rows.m_indptr, rows.pair_row, right=True) - 1


def _widths(experts: int, hidden: int) -> list[int]:
    """Bytes of a token's logits, values and scales."""
    return [4 * experts, hidden, hidden // BLOCK * 4]


def _padded(width: int) -> int:
    """Bytes of a token as DeepEP copies them."""
    return width + -width % DEEP_EP_BYTES


def _packed(logits: torch.Tensor, x: torch.Tensor, x_scale: torch.Tensor) -> torch.Tensor:
    """Logits, values and scales of every token side by side: `[t, 4 E + H + H/32]` uint8."""
    # A copy of a single token's scales, too, which may lie apart.
    by_token = x_scale.t().clone(memory_format=torch.contiguous_format)
    parts = zip((logits, x, by_token), _widths(logits.shape[1], x.shape[1]), strict=True)
    # As bytes by way of one dimension: without a token the strides of two may be anything.
    flat = [part.reshape(-1).view(torch.uint8).view(len(part), width) for part, width in parts]
    return torch.cat(flat, dim=1)


def _unpacked(
    packed: torch.Tensor, experts: int, hidden: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The parts of `_packed`."""
    logits, x, x_scale = packed.split(_widths(experts, hidden), dim=1)
    return (
        logits.contiguous().view(torch.float32),
        # A copy of a single token too: behind the logits its address is a multiple of 4 alone.
        x.clone(memory_format=torch.contiguous_format).view(torch.float8_e4m3fn),
        x_scale.contiguous().view(torch.float32).t().clone(memory_format=torch.contiguous_format),
    )
