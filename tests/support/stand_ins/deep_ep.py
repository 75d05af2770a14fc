"""The part of DeepEP 1.2.1 that `expert_parallel_moe` calls, over gloo on the CPU.

The types and shapes of the arguments are the package's. Tokens are received in the order of the
ranks, and sums are made in float32 in that order.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass
class Config:
    sms: int

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, ranks: int) -> int:
        return self.sms * hidden_bytes * ranks


class Buffer:
    def __init__(self, group, num_nvl_bytes=0, explicitly_destroy=False):
        self.group, self.group_size = group, dist.get_world_size(group)
        assert num_nvl_bytes > 0 and explicitly_destroy

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config(20)

    get_combine_config = get_dispatch_config

    def destroy(self) -> None:
        self.group = None

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int):
        assert topk_idx.dtype == torch.int64 and topk_idx.is_contiguous() and topk_idx.dim() == 2
        tokens = torch.arange(topk_idx.shape[0]).unsqueeze(1)
        chosen = torch.zeros(topk_idx.shape[0], num_experts, dtype=torch.bool)
        chosen[tokens, topk_idx] = True
        in_rank = chosen.unflatten(1, (self.group_size, num_experts // self.group_size)).any(dim=-1)
        return in_rank.sum(0).int(), None, chosen.sum(0).int(), in_rank, None

    def dispatch(self, x, *, num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert):
        assert x.dtype == torch.bfloat16 and x.is_contiguous() and x.shape[1] * 2 % 32 == 0
        assert bool((is_token_in_rank.sum(0) == num_tokens_per_rank).all())
        assert num_tokens_per_expert.numel() % self.group_size == 0
        sent = num_tokens_per_rank.long()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        rank, token = is_token_in_rank.t().nonzero(as_tuple=True)
        rows = x.new_empty(int(received.sum()), x.shape[1])
        self._exchange(rows, x[token], received, sent)
        handle = token, sent.tolist(), received.tolist(), x.shape[0]
        return rows, None, None, num_tokens_per_expert.tolist(), handle, None

    def combine(self, x, handle):
        token, sent, received, tokens = handle
        assert x.dtype == torch.bfloat16 and x.is_contiguous() and x.shape[0] == sum(received)
        parts = x.new_empty(sum(sent), x.shape[1])
        self._exchange(parts, x, torch.tensor(sent), torch.tensor(received))
        total = torch.zeros(tokens, x.shape[1])
        for of_rank, part in zip(token.split(sent), parts.split(sent), strict=True):
            total[of_rank] += part.float()
        return total.bfloat16(), None, None

    def _exchange(self, to, source, received, sent):
        to_bytes, source_bytes = to.view(torch.uint8), source.contiguous().view(torch.uint8)
        dist.all_to_all_single(
            to_bytes, source_bytes, received.tolist(), sent.tolist(), group=self.group
        )
