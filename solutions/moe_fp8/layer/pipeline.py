"""The layers of one operation after the other: what v1 to flat call, out of interchangeable parts.

Three classes are the layer. `fused.FusedLayer` is the one to use: it is the fastest for any number
of tokens, and what `fused_moe`, `experts` and the engines call. The two here show the steps to it,
and each of their stages can be timed: `PaddedLayer` copies the rows into `[E, max_rows, K]` buffers
and back (v1, v2); `PlacedLayer` keeps them where the GEMMs want them (v3, flat).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from ..kernels import architectures
from ..numerics import BLOCK, round_up
from ..problem import DEEPSEEK_V3, GroupedRows, MoeInputs, MoeShape, some_tokens
from .backend import on_device, select
from .validate import validate

STAGES = ("routing", "gemm1", "swiglu_quant", "gemm2", "combine")
"""What `mark` is called with, in this order, each after its stage has been enqueued, which may be
empty; once more for every further chunk of tokens."""
CHUNK_TOKENS = 16384
"""Tokens that are computed at once: up to 141 KB each (all of its experts local), 2.3 GB."""


class HostRows(NamedTuple):
    """What the host must know of the routing to allocate padded buffers."""

    ends: Sequence[int]  # where each expert's rows end; the last is P, the number of pairs
    max_rows: int  # rows reserved per expert: those of the fullest one, rounded up

    @property
    def rows(self) -> int:
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

    def pad(self, x, x_scale, source_row) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of `x` [*, K] and scales [K/128, *] at their padded places: [E*max_rows, K] and
        [K/128, E*max_rows]. `source_row`: row of `x` for each row; None: row i is row i."""
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


class Workspace(NamedTuple):
    """The tensors between a layer's operations, for R rows: views of one allocation."""

    a: torch.Tensor  # [R, H] float8_e4m3fn
    a_scale: torch.Tensor  # [H/128, R] float32
    g: torch.Tensor  # [R, 2I] bfloat16
    q: torch.Tensor  # [R, I] float8_e4m3fn
    q_scale: torch.Tensor  # [I/128, R] float32
    o: torch.Tensor  # [R, H] bfloat16


def workspace(like: torch.Tensor, rows: int, shape: MoeShape) -> Workspace:
    """Uninitialised tensors on `like`'s device; `rows` is a multiple of 4.

    `o` lies over `a`, `a_scale` and `g`, none of which is needed any more when the second GEMM
    writes it: 2 GB rather than 3.6 GB at T=14107.
    """
    h, i = shape.hidden_size, shape.intermediate_size
    h_blocks, i_blocks = h // BLOCK, i // BLOCK
    # Bytes of a row in each tensor. A multiple of 4 rows keeps all of them 16-byte aligned.
    a, a_scale, g, q, q_scale, o = h, 4 * h_blocks, 4 * i, i, 4 * i_blocks, 2 * h
    second = max(a + a_scale + g, o)
    memory = like.new_empty(rows * (second + q + q_scale), dtype=torch.uint8)
    fp8, f32 = memory.view(torch.float8_e4m3fn), memory.view(torch.float32)
    bf16 = memory.view(torch.bfloat16)
    return Workspace(
        a=fp8.as_strided((rows, h), (h, 1)),
        a_scale=f32.as_strided((h_blocks, rows), (rows, 1), rows * a // 4),
        g=bf16.as_strided((rows, 2 * i), (2 * i, 1), rows * (a + a_scale) // 2),
        q=fp8.as_strided((rows, i), (i, 1), rows * second),
        q_scale=f32.as_strided((i_blocks, rows), (rows, 1), rows * (second + q) // 4),
        o=bf16.as_strided((rows, h), (h, 1)),
    )


Choose = Callable[..., Any]
"""Picks a GEMM's config from the rows per active expert, n and k: see `sm90.heuristic.choose`."""

Placement = Callable[[GroupedRows, MoeShape, Choose], PlacedRows]
"""Gives every pair a row. Only a placement that waits for the routing may return 0 rows."""


Mark = Callable[[str], None]


def unmarked(stage: str) -> None:
    pass


def mark_all(stages: tuple[str, ...], mark: Mark) -> None:
    for stage in stages:
        mark(stage)


def chunks(inputs: Any, output: torch.Tensor) -> Iterator[tuple[Any, torch.Tensor]]:
    """The tokens in as few parts as `CHUNK_TOKENS` allows, with their rows of the output."""
    tokens = output.shape[0]
    if tokens <= CHUNK_TOKENS:
        yield inputs, output
        return
    for first in range(0, tokens, CHUNK_TOKENS):
        part = slice(first, first + CHUNK_TOKENS)
        yield some_tokens(inputs, part), output[part]


class Layer:
    """What both share: the checks, the routing, and a call without tokens."""

    shape: MoeShape
    names_tokens: ClassVar[bool]  # whether it needs `GroupedRows.token_of_row`

    @torch.inference_mode()  # no autograd bookkeeping: a sixth of the host time of torch's ops
    def __call__(self, inputs: Any, output: torch.Tensor, mark: Mark = unmarked) -> None:
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
            for part, part_output in chunks(inputs, output):
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
        placed = self.placed(rows)
        if placed.rows == 0:
            output.zero_()
            return mark_all(STAGES[1:], mark)
        self.compute(inputs, output, rows, placed, mark)

    def placed(self, rows: GroupedRows) -> Any:
        """What `compute` needs to know of the rows, of which there may be none."""
        raise NotImplementedError

    def compute(
        self, inputs: MoeInputs, output: torch.Tensor, rows: GroupedRows, placed: Any, mark: Mark
    ) -> None:
        """Everything after the rows have their places, which must be those of `rows`."""
        raise NotImplementedError


@dataclass(frozen=True)
class PaddedLayer(Layer):
    """The MoE layer with batched `[E, max_rows, K]` GEMM inputs.

    If the permutation asks the GPU nothing after `read`, `compute` can be captured in a CUDA graph
    for the row counts it is given.
    """

    permutation: type[Permutation]
    config: Any = None
    shape: MoeShape = DEEPSEEK_V3
    names_tokens = True

    def placed(self, rows: GroupedRows) -> HostRows:
        """Wait for the routing and read the row counts."""
        return self.permutation.read(rows)

    def compute(
        self, inputs: MoeInputs, output: torch.Tensor, rows, placed, mark: Mark = unmarked
    ) -> None:
        backend = select(output.device)
        intermediate = self.shape.intermediate_size
        new = output.new_empty
        permutation = self.permutation(rows, placed)
        expert_rows = permutation.expert_rows

        assert rows.token_of_row is not None
        a, a_scale = permutation.pad(
            inputs.hidden_states, inputs.hidden_states_scale, rows.token_of_row[: placed.rows]
        )
        padded = new((a.shape[0], 2 * intermediate))
        w13, w13_scale = inputs.gemm1_weights, inputs.gemm1_weights_scale
        backend.grouped_gemm(a, a_scale, w13, w13_scale, padded, expert_rows, self.config)
        g = permutation.unpad(padded)
        mark("gemm1")

        q = new((placed.rows, intermediate), dtype=torch.float8_e4m3fn)
        q_scale = new((intermediate // BLOCK, placed.rows), dtype=torch.float32)
        backend.swiglu_quant(g, q, q_scale, rows.m_indptr, self.shape.swiglu, self.shape.ue8m0)
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

    If the placement does not wait for the routing, neither does anything else: the host knows T
    only, and the call can be captured in a CUDA graph that serves any routing of T tokens.
    """

    place: Placement
    choose: Choose | None = None  # the architecture's heuristic
    shape: MoeShape = DEEPSEEK_V3
    names_tokens = False

    def placed(self, rows: GroupedRows) -> PlacedRows:
        """Where the rows go, and the configs for them."""
        choose = self.choose or architectures.of_device(rows.m_indptr.device).choose
        return self.place(rows, self.shape, choose)

    def compute(
        self, inputs: MoeInputs, output: torch.Tensor, rows, placed, mark: Mark = unmarked
    ) -> None:
        backend = select(output.device)
        expert_rows, pair_row = placed.expert_rows, placed.pair_row
        a, a_scale, g, q, q_scale, o = workspace(output, placed.rows, self.shape)

        backend.permute(inputs.hidden_states, inputs.hidden_states_scale, pair_row, a, a_scale)
        w13, w13_scale = inputs.gemm1_weights, inputs.gemm1_weights_scale
        backend.grouped_gemm(a, a_scale, w13, w13_scale, g, expert_rows, placed.config1)
        mark("gemm1")

        backend.swiglu_quant(g, q, q_scale, placed.m_indptr, self.shape.swiglu, self.shape.ue8m0)
        mark("swiglu_quant")

        w2, w2_scale = inputs.gemm2_weights, inputs.gemm2_weights_scale
        backend.grouped_gemm(q, q_scale, w2, w2_scale, o, expert_rows, placed.config2)
        mark("gemm2")

        backend.combine(o, pair_row, placed.weights, output)
        mark("combine")
