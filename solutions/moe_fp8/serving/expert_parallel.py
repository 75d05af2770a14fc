"""The whole layer on several GPUs: each rank has some of the experts and some of the tokens.

Without a DeepEP buffer a token's parts are added in float32, in the order of the ranks. A
reduce-scatter would move as many bytes, but add in bfloat16 and in an order of its own.
"""

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..api import call_of, fused_moe, refuse_gradients
from ..call import MoeInputs, check_real
from ..kernels import architectures
from ..reference import quantise_rows
from ..routing import route
from ..shape import BLOCK, MoeShape

if TYPE_CHECKING:
    import deep_ep

# torch 2.13 renamed `all_gather_into_tensor`.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

DEEP_EP_BYTES = 32
"""Divisor of a packed token's bytes: DeepEP copies each half of a token in 16-byte pieces."""

Exchanged = tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]
"""The packed tokens that this rank computes, and a function that returns each token's part to the
token's rank and adds the parts: `[n, H]` bfloat16 to `[t, H]` bfloat16."""


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
    """Compute `fused_moe` for this rank's tokens over the experts of all ranks.

    Rank r has experts `r * L ... r * L + L - 1`. Without a buffer all ranks have equally many
    tokens, and two collective operations move them. With a DeepEP buffer a token goes only to the
    ranks of its experts, ranks may have different numbers of tokens, and the host waits for the
    number of tokens that this rank receives. A rank may have no tokens (not tried with DeepEP).

    Every rank first checks its arguments. Then the ranks exchange a hash to agree that all
    arguments are right. If the group has a CPU backend ("cpu:gloo,cuda:nccl"), the exchange runs on
    the CPU and waits for the other ranks' hosts; else ("nccl") it runs on the GPU and the host
    waits for the GPU.

    Arguments that are not listed are those of `fused_moe`. The weights, their scales and
    `gate_first` are of this rank's L experts. Numbers and options are equal on all ranks.

    Args:
        routing_logits: `[t, E]` of this rank's t tokens; E is L times the ranks.
        routing_bias: equal on all ranks. This is not checked.
        hidden_states: `[t, H]` of this rank. bfloat16 tokens are quantised before the exchange.
        group: a process group, else the default group.
        buffer: a DeepEP buffer over the same group, see `deep_ep_buffer`. Its `dispatch` and
            `combine` for high throughput are called.

    Returns:
        `[t, H]` bfloat16.

    Raises:
        ValueError: an argument is wrong on a rank, or must be equal on all ranks and is not. No
            token was exchanged. Every rank raises the same error; its message names the argument
            and the rank.
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
        # The routing does not depend on an expert's width.
        shape = MoeShape(experts, experts, hidden, BLOCK, n_group, topk_group, top_k)
        chosen = _experts_of(logits, routing_bias, shape)
        received, returned = _to_ranks_of(chosen, packed, experts, buffer)
    logits, x, x_scale = _unpacked(received, experts, hidden)
    options |= {"local_expert_offset": rank * local, "routed_scaling_factor": routed_scaling_factor}
    return returned(fused_moe(logits, routing_bias, x, x_scale, *inputs[4:8], **options))


def deep_ep_buffer(
    experts: int, hidden: int, group: dist.ProcessGroup | None = None
) -> "deep_ep.Buffer":
    """Return a DeepEP buffer for `expert_parallel_moe`, on one host's GPUs.

    Call its `destroy()` before the group is destroyed.

    Args:
        experts: E, the experts of all ranks.
        hidden: H, the width of a token.
        group: a process group, else the default group.

    Raises:
        ImportError: DeepEP is not installed.
    """
    import deep_ep

    ranks = dist.get_world_size(group)
    widest = max(_padded(sum(_widths(experts, hidden))), 2 * hidden)  # dispatch, combine
    configs = deep_ep.Buffer.get_dispatch_config(ranks), deep_ep.Buffer.get_combine_config(ranks)
    needed = max(config.get_nvl_buffer_size_hint(widest, ranks) for config in configs)
    return deep_ep.Buffer(group or dist.group.WORLD, needed, explicitly_destroy=True)


def _checked(
    inputs: MoeInputs, options: dict[str, Any], ranks: int, buffer: Any
) -> dict[str, Any] | str:
    """Return the values that must be equal on all ranks, or, if an argument is wrong, a message."""
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
    """Raise the same ValueError on every rank unless all results of `_checked` are right and equal.

    Every rank makes the same collective calls, whatever its result, so that none waits for a rank
    that has raised. The first call exchanges a hash. The second one exchanges the results, unless
    all are right and equal. The first is an all-to-all: gloo's all-gather is a ring and takes twice
    as long with 8 ranks.
    """
    ranks = dist.get_world_size(group)
    gpu = x.device if getattr(x, "is_cuda", False) else "cuda"
    device = "cpu" if "cpu:" in dist.get_backend_config(group) else gpu
    digest = hashlib.sha256(repr(mine).encode()).digest()[:8]
    sent = torch.tensor(ranks * [int.from_bytes(digest, "little", signed=True)], device=device)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    if isinstance(mine, dict) and torch.equal(received, sent):
        return
    results: list[Any] = [None] * ranks
    dist.all_gather_object(results, mine, group=group)
    for rank, result in enumerate(results):
        if isinstance(result, str):
            raise ValueError(f"rank {rank}: {result}")
    for name in results[0]:
        values = [repr(result[name]) for result in results]
        if len(set(values)) > 1:
            raise ValueError(
                f"{name}: expected the same on every rank, got {', '.join(values)} "
                f"on ranks 0 to {ranks - 1}"
            )


def _to_all_ranks(packed: torch.Tensor, group: dist.ProcessGroup | None) -> Exchanged:
    """Exchange tokens by an all-gather, and parts by an all-to-all."""
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
    """Exchange tokens and parts by DeepEP. It takes the packed bytes as bfloat16 values."""
    rank_tokens, _, expert_tokens, in_rank, _ = buffer.get_dispatch_layout(chosen, experts)
    width = packed.shape[1]
    padded = torch.nn.functional.pad(packed, (0, _padded(width) - width))
    received, _, _, _, handle, _ = buffer.dispatch(
        padded.view(torch.bfloat16),
        num_tokens_per_rank=rank_tokens,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=expert_tokens,
    )
    rows = received.view(torch.uint8)[:, :width]
    return rows, lambda partial: buffer.combine(partial, handle)[0]


def _experts_of(logits: torch.Tensor, bias: torch.Tensor | None, shape: MoeShape) -> torch.Tensor:
    """Return the experts of every token, `[t, top_k]` int64. The layer's routing runs as if all
    experts were local, and a pair's row tells its expert."""
    nothing = logits.new_empty(0)
    inputs = MoeInputs._make((logits, bias, *6 * (nothing,), 0, 1.0))
    rows = route(inputs, shape, with_tokens=False)
    return torch.searchsorted(rows.m_indptr, rows.pair_row, right=True) - 1


def _widths(experts: int, hidden: int) -> list[int]:
    """Return the bytes of a token's logits, values and scales."""
    return [4 * experts, hidden, hidden // BLOCK * 4]


def _padded(width: int) -> int:
    """Return the bytes of a token that DeepEP copies."""
    return width + -width % DEEP_EP_BYTES


def _packed(logits: torch.Tensor, x: torch.Tensor, x_scale: torch.Tensor) -> torch.Tensor:
    """Return each token's logits, values and scales as one row: `[t, 4 E + H + H/32]` uint8."""
    # Copies a single token's scales, too: they may have gaps.
    by_token = x_scale.t().clone(memory_format=torch.contiguous_format)
    parts = zip((logits, x, by_token), _widths(logits.shape[1], x.shape[1]), strict=True)
    # View as bytes in one dimension: a matrix without tokens may have strides that `view` refuses.
    flat = [part.reshape(-1).view(torch.uint8).view(len(part), width) for part, width in parts]
    return torch.cat(flat, dim=1)


def _unpacked(
    packed: torch.Tensor, experts: int, hidden: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the arguments of `_packed`."""
    logits, x, x_scale = packed.split(_widths(experts, hidden), dim=1)
    return (
        logits.contiguous().view(torch.float32),
        # Copies a single token, too: behind the logits its address is only a multiple of 4.
        x.clone(memory_format=torch.contiguous_format).view(torch.float8_e4m3fn),
        x_scale.contiguous().view(torch.float32).t().clone(memory_format=torch.contiguous_format),
    )
