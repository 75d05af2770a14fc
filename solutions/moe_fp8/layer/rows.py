"""Where each expert's rows lie in a grouped GEMM's row operand: `expert_rows`.

Every layout is one `[2, E]` int32 tensor on the device: expert e owns rows
`[expert_rows[0, e], expert_rows[1, e])`. Experts come in order and do not overlap; rows of no
expert are padding: a kernel may load them, but their content (NaN included) reaches no result and
they are never written. An expert starts

  batched   at `e * max_rows`: an `[E, max_rows, K]` buffer           (DeepGEMM: masked)
  aligned   at a multiple of the GEMM's tile height, a gap before it  (DeepGEMM: contiguous)
  flat      where the one before ends, anywhere: `m_indptr`           (DeepGEMM: psum)
"""

import torch


def flat_rows(m_indptr: torch.Tensor) -> torch.Tensor:
    """`expert_rows` of boundaries `[E + 1]` int32, which it views: no launch, no copy."""
    return m_indptr.as_strided((2, m_indptr.shape[0] - 1), (1, 1))


def batched_rows(rows_per_expert: torch.Tensor, max_rows: int) -> torch.Tensor:
    """`expert_rows` of `[E]` int32 row counts with `max_rows` rows reserved for every expert."""
    expert_rows = rows_per_expert.new_empty((2, rows_per_expert.shape[0]))
    starts, ends = expert_rows
    torch.arange(0, starts.shape[0] * max_rows, max_rows, out=starts)
    torch.add(starts, rows_per_expert, out=ends)
    return expert_rows
