"""The layer of the generations with padded GEMM inputs, out of interchangeable parts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from .backend import select
from .config import BLOCK, GemmConfig
from .layout import BatchedRows
from .problem import DEEPSEEK_V3, MoeInputs, MoeShape, validate
from .routing import GroupedRows, group_rows, route

STAGES = ("routing", "gemm1", "swiglu_quant", "gemm2", "combine")
"""What `mark` is called with, in this order, each after its stage has been enqueued.

A call without a token or without a local pair marks them all too: its later stages are empty.
"""


class HostRows(NamedTuple):
    """What the host must know of the routing to allocate padded buffers: reading it is a sync."""

    total_rows: int  # P
    max_rows: int  # rows reserved per expert: those of the fullest one, rounded up


def round_up(rows: int, multiple: int = BLOCK) -> int:
    return -(-rows // multiple) * multiple


class Permutation(Protocol):
    """Moves rows between the flat order of `GroupedRows` and the padded `BatchedRows`.

    One object serves one call of the layer. The padding is never initialised.
    """

    layout: BatchedRows

    def __init__(self, rows: GroupedRows, host: HostRows) -> None: ...

    @staticmethod
    def read(rows: GroupedRows) -> HostRows:
        """Wait for the routing and read what the host needs to know of it."""
        ...

    def pad(
        self,
        x: torch.Tensor,  # [*, K] float8_e4m3fn
        x_scale: torch.Tensor,  # [K/128, *] float32
        source_row: torch.Tensor | None,  # row of x for each row, or None: row i is row i
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows at their padded places: [E*max_rows, K] and scales [K/128, E*max_rows]."""
        ...

    def unpad(self, padded: torch.Tensor) -> torch.Tensor:
        """[E*max_rows, N] bfloat16 -> [P, N]."""
        ...


def _unmarked(stage: str) -> None:
    pass


def _mark_empty(stages: tuple[str, ...], mark: Callable[[str], None]) -> None:
    for stage in stages:
        mark(stage)


@dataclass(frozen=True)
class PaddedLayer:
    """The MoE layer with batched `[E, max_rows, K]` GEMM inputs.

    A call is `group` (routing), `permutation.read` (wait for it, read the row counts) and
    `compute`, which needs no answer from the GPU: if the permutation does not ask for one either,
    `compute` can be captured in a CUDA graph for the row counts it is given.
    """

    permutation: type[Permutation]
    config: GemmConfig | None = None
    shape: MoeShape = DEEPSEEK_V3

    @torch.inference_mode()  # no autograd bookkeeping: a sixth of the host time of torch's ops
    def __call__(
        self,
        inputs: MoeInputs,
        output: torch.Tensor,
        mark: Callable[[str], None] = _unmarked,
    ) -> None:
        """Write the layer's output; `mark` is told of each stage once it is enqueued.

        Raises:
            ValueError: an argument is wrong or the GPU is not supported. Nothing was launched.
        """
        tokens = validate(inputs, output, self.shape)
        select(output.device)  # refuse an unsupported GPU before anything is launched
        if tokens == 0:
            return _mark_empty(STAGES, mark)
        rows = self.group(inputs)
        mark("routing")
        host = self.permutation.read(rows)
        if host.total_rows == 0:
            output.zero_()
            return _mark_empty(STAGES[1:], mark)
        self.compute(inputs, output, rows, host, mark)

    def group(self, inputs: MoeInputs) -> GroupedRows:
        """Route the tokens and number the pairs of this rank. Reads nothing on the host."""
        shape = self.shape
        ids, weights = route(
            inputs.routing_logits,
            inputs.routing_bias,
            float(inputs.routed_scaling_factor),
            shape,
            index_dtype=torch.int64,
        )
        offset = int(inputs.local_expert_offset)
        return group_rows(ids, weights, offset, shape.num_local_experts)

    def compute(
        self,
        inputs: MoeInputs,
        output: torch.Tensor,
        rows: GroupedRows,
        host: HostRows,
        mark: Callable[[str], None] = _unmarked,
    ) -> None:
        """Everything after the host knows the row counts, which must be those of `rows`."""
        backend = select(output.device)
        intermediate = self.shape.intermediate_size
        new = output.new_empty
        permutation = self.permutation(rows, host)
        layout = permutation.layout

        a, a_scale = permutation.pad(
            inputs.hidden_states, inputs.hidden_states_scale, rows.token_of_row[: host.total_rows]
        )
        padded = new((a.shape[0], 2 * intermediate))
        w13, w13_scale = inputs.gemm1_weights, inputs.gemm1_weights_scale
        backend.grouped_gemm(a, a_scale, w13, w13_scale, padded, layout, self.config)
        g = permutation.unpad(padded)
        mark("gemm1")

        q = new((host.total_rows, intermediate), dtype=torch.float8_e4m3fn)
        q_scale = new((intermediate // BLOCK, host.total_rows), dtype=torch.float32)
        backend.swiglu_quant(g, q, q_scale)
        mark("swiglu_quant")

        a, a_scale = permutation.pad(q, q_scale, None)
        padded = new((a.shape[0], self.shape.hidden_size))
        w2, w2_scale = inputs.gemm2_weights, inputs.gemm2_weights_scale
        backend.grouped_gemm(a, a_scale, w2, w2_scale, padded, layout, self.config)
        o = permutation.unpad(padded)
        mark("gemm2")

        backend.combine(o, rows.pair_row, rows.weights, output)
        mark("combine")
