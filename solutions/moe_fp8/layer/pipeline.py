"""The layers: what the generations call, out of interchangeable parts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from ..kernels import architectures
from ..numerics import BLOCK, round_up
from ..problem import DEEPSEEK_V3, GroupedRows, MoeInputs, MoeShape
from .backend import select
from .device import on_device
from .validate import validate
from .workspace import workspace

STAGES = ("routing", "gemm1", "swiglu_quant", "gemm2", "combine")
"""What `mark` is called with, in this order, each after its stage has been enqueued; once more for
every further chunk of tokens.

A call without a token or without a local pair marks them all too: its later stages are empty.
"""

CHUNK_TOKENS = 16384
"""Tokens that are computed at once. What a call computes on its way takes up to 141 KB a token (all
of its experts local): 2.3 GB. A token's result does not depend on the others beside it."""


class HostRows(NamedTuple):
    """What the host must know of the routing to allocate padded buffers: reading it is a sync."""

    ends: Sequence[int]  # where each expert's rows end; the last is P, the number of pairs
    max_rows: int  # rows reserved per expert: those of the fullest one, rounded up

    @property
    def total_rows(self) -> int:
        """P."""
        return self.ends[-1]


def host_rows(ends: Sequence[int]) -> HostRows:
    """Of the experts' ends, which the caller has waited for."""
    counts = (end - start for start, end in zip((0, *ends), ends, strict=False))
    return HostRows(ends, round_up(max(counts), BLOCK))


class Permutation(Protocol):
    """Moves rows between the flat order of `GroupedRows` and batched rows, padded to `max_rows`.

    One object serves one call of the layer. The padding is never initialised.
    """

    expert_rows: torch.Tensor  # [2, E] int32: the batched rows, see `rows`

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


class PlacedRows(NamedTuple):
    """Where the rows of the pairs lie in the GEMMs' row operand, which they share."""

    rows: int  # rows to allocate, a multiple of 4 (TMA strides); 0: there is no pair
    expert_rows: torch.Tensor  # [2, E] int32, see `rows`
    pair_row: torch.Tensor  # [T, top_k] int32 in these rows, -1 where the expert is not local
    weights: torch.Tensor  # [T, top_k] float32
    m_indptr: torch.Tensor  # [*] int32, the last element is where the rows in use end
    config1: Any  # of the two GEMMs
    config2: Any


Choose = Callable[..., Any]
"""Picks a GEMM's config from the rows per active expert, n and k: see `sm90.heuristic.choose`."""

Placement = Callable[[GroupedRows, MoeShape, Choose], PlacedRows]
"""Gives every pair a row. Only a placement that waits for the routing may return 0 rows."""


Mark = Callable[[str], None]
"""Told of each stage once it is enqueued."""


def unmarked(stage: str) -> None:
    pass


def mark_all(stages: tuple[str, ...], mark: Mark) -> None:
    for stage in stages:
        mark(stage)


def _chunks(inputs: MoeInputs, output: torch.Tensor) -> Iterator[tuple[MoeInputs, torch.Tensor]]:
    """The tokens in as few parts as `CHUNK_TOKENS` allows, with their rows of the output."""
    tokens = output.shape[0]
    if tokens <= CHUNK_TOKENS:
        yield inputs, output
        return
    for first in range(0, tokens, CHUNK_TOKENS):
        part = slice(first, first + CHUNK_TOKENS)
        yield (
            inputs._replace(
                routing_logits=inputs.routing_logits[part],
                hidden_states=inputs.hidden_states[part],
                hidden_states_scale=inputs.hidden_states_scale[:, part].contiguous(),
            ),
            output[part],
        )


class Layer:
    """What all layers share: the checks, the routing, and a call without tokens."""

    shape: MoeShape
    names_tokens: ClassVar[bool]  # whether it needs `GroupedRows.token_of_row`

    @torch.inference_mode()  # no autograd bookkeeping: a sixth of the host time of torch's ops
    def __call__(self, inputs: MoeInputs, output: torch.Tensor, mark: Mark = unmarked) -> None:
        """Write the layer's output; `mark` is told of each stage once it is enqueued.

        Works on the current stream of the tensors' device, whichever device is the current one.

        Raises:
            ValueError: an argument is wrong or the GPU is not supported. Nothing was launched.
            RuntimeError: the stream is being captured and no call with as many tokens came before.
        """
        tokens = validate(inputs, output, self.shape)
        device = output.device
        select(device)  # refuse an unsupported GPU before anything is launched
        if tokens == 0:
            return mark_all(STAGES, mark)
        with on_device(device):
            for part, part_output in _chunks(inputs, output):
                self.launch(part, part_output, mark)

    def launch(self, inputs: MoeInputs, output: torch.Tensor, mark: Mark) -> None:
        """Compute a part of the tokens, at least one."""
        rows = self.group(inputs)
        mark("routing")
        self.finish(inputs, output, rows, mark)

    def group(self, inputs: MoeInputs) -> GroupedRows:
        """Route the tokens and number the pairs of this rank. Reads nothing on the host."""
        backend = select(inputs.routing_logits.device)
        return backend.route(inputs, self.shape, self.names_tokens)

    def finish(
        self, inputs: MoeInputs, output: torch.Tensor, rows: GroupedRows, mark: Mark
    ) -> None:
        """Everything after the routing."""
        raise NotImplementedError


@dataclass(frozen=True)
class PaddedLayer(Layer):
    """The MoE layer with batched `[E, max_rows, K]` GEMM inputs.

    A call is `group` (routing), `permutation.read` (wait for it, read the row counts) and
    `compute`, which needs no answer from the GPU: if the permutation does not ask for one either,
    `compute` can be captured in a CUDA graph for the row counts it is given.
    """

    permutation: type[Permutation]
    config: Any = None
    shape: MoeShape = DEEPSEEK_V3
    names_tokens = True

    def finish(
        self, inputs: MoeInputs, output: torch.Tensor, rows: GroupedRows, mark: Mark
    ) -> None:
        host = self.permutation.read(rows)
        if host.total_rows == 0:
            output.zero_()
            return mark_all(STAGES[1:], mark)
        self.compute(inputs, output, rows, host, mark)

    def compute(
        self,
        inputs: MoeInputs,
        output: torch.Tensor,
        rows: GroupedRows,
        host: HostRows,
        mark: Mark = unmarked,
    ) -> None:
        """Everything after the host knows the row counts, which must be those of `rows`."""
        backend = select(output.device)
        intermediate = self.shape.intermediate_size
        new = output.new_empty
        permutation = self.permutation(rows, host)
        expert_rows = permutation.expert_rows

        assert rows.token_of_row is not None
        a, a_scale = permutation.pad(
            inputs.hidden_states, inputs.hidden_states_scale, rows.token_of_row[: host.total_rows]
        )
        padded = new((a.shape[0], 2 * intermediate))
        w13, w13_scale = inputs.gemm1_weights, inputs.gemm1_weights_scale
        backend.grouped_gemm(a, a_scale, w13, w13_scale, padded, expert_rows, self.config)
        g = permutation.unpad(padded)
        mark("gemm1")

        q = new((host.total_rows, intermediate), dtype=torch.float8_e4m3fn)
        q_scale = new((intermediate // BLOCK, host.total_rows), dtype=torch.float32)
        backend.swiglu_quant(g, q, q_scale, rows.m_indptr)
        mark("swiglu_quant")

        a, a_scale = permutation.pad(q, q_scale, None)
        padded = new((a.shape[0], self.shape.hidden_size))
        w2, w2_scale = inputs.gemm2_weights, inputs.gemm2_weights_scale
        backend.grouped_gemm(a, a_scale, w2, w2_scale, padded, expert_rows, self.config)
        o = permutation.unpad(padded)
        mark("gemm2")

        backend.combine(o, rows.pair_row, rows.weights, output)
        mark("combine")


@dataclass(frozen=True)
class PlacedLayer(Layer):
    """The MoE layer with rows where the GEMMs want them from the first copy to the last.

    Every token is copied to the rows of its pairs (`permute`), both GEMMs and the activation
    between them work on these rows, and the combine reads them where they lie. If the placement
    does not wait for the routing, neither does anything else: the host knows T only, and the
    whole call can be captured in a CUDA graph that serves any routing of T tokens.
    """

    place: Placement
    choose: Choose | None = None  # the architecture's heuristic
    shape: MoeShape = DEEPSEEK_V3
    names_tokens = False

    def placed(self, rows: GroupedRows) -> PlacedRows:
        """Where the rows go, and the configs for them."""
        choose = self.choose or architectures.of_device(rows.m_indptr.device).choose
        return self.place(rows, self.shape, choose)

    def finish(
        self, inputs: MoeInputs, output: torch.Tensor, rows: GroupedRows, mark: Mark
    ) -> None:
        placed = self.placed(rows)
        if placed.rows == 0:
            output.zero_()
            return mark_all(STAGES[1:], mark)
        self.compute(inputs, output, placed, mark)

    def compute(
        self, inputs: MoeInputs, output: torch.Tensor, placed: PlacedRows, mark: Mark = unmarked
    ) -> None:
        """Everything after the rows have their places. Reads nothing on the host."""
        backend = select(output.device)
        expert_rows, pair_row = placed.expert_rows, placed.pair_row
        a, a_scale, g, q, q_scale, o = workspace(output, placed.rows, self.shape)

        backend.permute(inputs.hidden_states, inputs.hidden_states_scale, pair_row, a, a_scale)
        w13, w13_scale = inputs.gemm1_weights, inputs.gemm1_weights_scale
        backend.grouped_gemm(a, a_scale, w13, w13_scale, g, expert_rows, placed.config1)
        mark("gemm1")

        backend.swiglu_quant(g, q, q_scale, placed.m_indptr)
        mark("swiglu_quant")

        w2, w2_scale = inputs.gemm2_weights, inputs.gemm2_weights_scale
        backend.grouped_gemm(q, q_scale, w2, w2_scale, o, expert_rows, placed.config2)
        mark("gemm2")

        backend.combine(o, pair_row, placed.weights, output)
        mark("combine")
