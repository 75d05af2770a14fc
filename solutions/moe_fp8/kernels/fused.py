"""The fused layer: every kernel of a call, launched in order by one compiled host function.

    kernel            reads                          writes
    route (1 to 2)    logits, bias; or given ids     m_indptr, pair_row, token_of_row, weights
    permute           x, pair_row, token_of_row      A and its scales, by row    (with many rows)
    GEMM1             A (or x, gathered), w13        q: SwiGLU of the sums, in FP8 terms
    GEMM2             q, w2                          o
    combine           o, pair_row, weights           out

A row is a pair of a token and one of its local experts. Rows lie expert by expert; `m_indptr` says
where each expert's rows begin. Each kernel starts while its predecessor ends (`sync`). A GEMM2 with
a dynamic schedule takes an expert's rows as soon as GEMM1 has stored them, on SMs that GEMM1 has no
tile for.

With few rows GEMM1 gathers them from the tokens. With few columns (2 I) it does so up to more rows.
Beyond that gathering is too slow: a permute kernel runs first, and a spare GEMM1 warp zeroes the
tokens without a local expert.

What the kernels hand each other lies in one workspace, whose layout follows from the number of
tokens. `BatchedExperts` runs `PlaceTokens` and the GEMMs, on tokens that lie by expert already.
"""

import functools
import operator
from dataclasses import replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64, Uint8

from ..shape import ALIGNMENT, BLOCK, PACKED_BYTES, TMA_ROWS, Form, MoeShape, round_up
from .combine import Combine
from .compile import DSL_TYPES, Argument, CompiledOnce, Extent, Scalar, Tensor, compiled
from .gemm_load import ZeroTokens
from .grouped_gemm import GEMM_CLASSES
from .permute import Permute, PlaceTokens, TokensOfRows, token_arguments
from .route import WORD_TOKENS, Route, routing_arguments
from .swiglu import Activation, QuantisedTokens
from .sync import Ready
from .tiles import max_ctas

O_TYPES = {1: BFloat16, 2: Float32}
"""Type of GEMM2's rows by the FP8 terms of the intermediate. Two terms make it as accurate as
bfloat16, so rounding a pair's row would cost more than they gain."""
TILE_COUNTERS = 2
"""Counters of tiles on demand, one for each GEMM."""
WORKSPACE_ALIGN = 256
"""The parts of the workspace begin at multiples of it, in bytes."""

# --- workspace ----------------------------------------------------------------------------------


class Workspace(NamedTuple):
    """The parts of the workspace: (type, extents) of each, or its offset, or the tensor."""

    expert: Any  # (tokens, top_k) i32: local expert of each pair, or -1
    marks: Any  # (ceil(tokens / 32), local) i32: bit t: token t chose the expert
    weights: Any  # (tokens, top_k) f32
    m_indptr: Any  # (local + 1,) i32
    pair_row: Any  # (tokens, top_k) i32: row of each pair, or -1
    token_of_row: Any  # (rows,) i32
    counters: Any  # (TILE_COUNTERS + local,) i32: tiles handed out, `Ready.counts` of q
    o: Any  # (rows, H) of `O_TYPES`; after a permute A and its scales lie at its end first
    q: Any  # (rows, terms * I) e4m3
    q_scale: Any  # (I / 128, rows) f32
    x: Any = None  # (tokens, H) e4m3: of bfloat16 tokens that are gathered
    x_scale: Any = None  # (H / 128, tokens) f32


def workspace_parts(
    shape: MoeShape, terms: int, tokens: Any, rows: Any, quantised: bool = False
) -> Workspace:
    """Return type and extents of every part. `tokens` and `rows` are ints in Python, Int32 or Int64
    in the compiled function. `quantised`: tokens are quantised before they are gathered."""
    h = shape.hidden_size
    i, local, pairs = shape.intermediate_size, shape.num_local_experts, (tokens, shape.top_k)
    return Workspace(
        expert=(Int32, pairs),
        marks=(Int32, ((tokens + (WORD_TOKENS - 1)) // WORD_TOKENS, local)),
        weights=(Float32, pairs),
        m_indptr=(Int32, (local + 1,)),
        pair_row=(Int32, pairs),
        token_of_row=(Int32, (rows,)),
        counters=(Int32, (TILE_COUNTERS + local,)),
        o=(O_TYPES[terms], (rows, h)),
        q=(Float8E4M3FN, (rows, terms * i)),
        q_scale=(Float32, (i // BLOCK, rows)),
        x=(Float8E4M3FN, (tokens, h)) if quantised else None,
        x_scale=(Float32, (h // BLOCK, tokens)) if quantised else None,
    )


def max_rows(shape: MoeShape, tokens: Any) -> Any:
    """Return the most rows of `tokens` tokens, a multiple of 4: each has an expert at most once."""
    return round_up(tokens * min(shape.top_k, shape.num_local_experts), TMA_ROWS)


def workspace_bytes(shape: MoeShape, terms: int, tokens: int, quantised: bool = False) -> int:
    """Return the size of the workspace for `tokens` tokens."""
    rows = max_rows(shape, tokens)
    return offsets(workspace_parts(shape, terms, tokens, rows, quantised))[1]


def offsets(parts: Any) -> tuple[Any, Any]:
    """Return (where each part begins, bytes of the workspace); a part that is None takes none."""
    at, starts = 0, []
    for part in parts:
        starts.append(at)
        if part is None:
            continue
        dtype, extents = part
        # In the host function tokens and rows are Int64 here: the product can pass 2^31.
        elements = functools.reduce(operator.mul, extents)
        at = at + round_up(elements * dtype.width // 8, WORKSPACE_ALIGN)
    return type(parts)(*starts), at


def tensors_at(workspace: Int64, starts: Any, parts: Any) -> Any:
    """Return the parts as row-major tensors; `starts` are offsets from the workspace's address."""

    def tensor(start: Int64, part: tuple | None) -> cute.Tensor | None:
        if part is None:
            return None
        address, (dtype, extents) = workspace + start, part
        layout = cute.make_ordered_layout(extents, order=tuple(range(len(extents)))[::-1])
        return cute.make_tensor(pointer(address, dtype), layout)

    return type(parts)(*map(tensor, starts, parts))


def pointer(address: Int64, dtype: Any) -> cute.Pointer:
    return cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=16)


# --- the layer ----------------------------------------------------------------------------------


class FusedMoe:
    """All kernels of the layer, with its own routing or with experts that the caller gives.

    Args:
        shape: of the layer; `shape.routing == "given"`: ids and weights come from the caller.
        config1, config2: of GEMM1 and GEMM2, of one architecture.
        num_sms: multiprocessors of the GPU: a GEMM has no more CTAs.
        gate_first: the gate rows of w13 come before the up rows.
    """

    def __init__(self, shape: MoeShape, config1, config2, num_sms: int, gate_first: bool):
        h, top_k = shape.hidden_size, shape.top_k
        self.shape, self.num_sms, self.terms = shape, num_sms, config2.terms
        self.gathers = config1.gathers_rows
        self.route = Route(shape, names_tokens=True)
        self.permute = Permute(h, top_k, shape.ue8m0)
        # Behind a permute kernel GEMM1 uses `m_indptr`, `counters` and `pair_row`, and zeroes parts
        # of `out`, without a wait: the routing and all kernels before it are complete (`sync`). A
        # GEMM1 that gathers has no warp for a side job: there the combine writes the zeros.
        load_options: dict[str, Any] = (
            {"gather": True}
            if self.gathers
            else {"rows_known": True, "side_job": ZeroTokens(h, top_k)}
        )
        self.gemms = ExpertGemms(shape, config1, config2, num_sms, gate_first, **load_options)
        self.combine = Combine(h, top_k, O_TYPES[self.terms], zeros=self.gathers, pairs_known=True)

    @cute.jit
    def __call__(
        self,
        # These four as in `RouterInputs`, or in `GivenExperts`.
        logits: cute.Tensor,  # (tokens, experts) f32 or bf16
        bias: cute.Tensor | None,  # (experts,) bf16 or f32
        offset: Int32,
        scaling,
        x: cute.Tensor,  # (tokens, H) e4m3 or bf16
        x_scale: cute.Tensor | None,  # (H / 128, tokens) f32 of any strides, None with bf16
        w13: cute.Tensor,  # (local, 2 I, H) e4m3, or packed blocks: `GemmSm90.launch`
        w13_scale: cute.Tensor,  # (local, 2 I / 128, H / 128) f32 or e8m0, or (local, 2 I, 1)
        w2: cute.Tensor,  # (local, H, I) e4m3
        w2_scale: cute.Tensor,  # (local, H / 128, I / 128) f32 or e8m0, or (local, H, 1)
        out: cute.Tensor,  # (tokens, H) bf16
        workspace: Int64,  # its address
        stream: cuda.CUstream,
    ):
        h, local = self.shape.hidden_size, self.shape.num_local_experts
        tokens = cute.size(logits, mode=[0])
        rows = cute.assume(max_rows(self.shape, tokens), divby=TMA_ROWS)
        quantised = self.gathers and x.element_type is BFloat16
        # Offsets of parts need 64 bits, their extents 32.
        sizes = self.shape, self.terms
        starts, _ = offsets(workspace_parts(*sizes, Int64(tokens), Int64(rows), quantised))
        ws = tensors_at(workspace, starts, workspace_parts(*sizes, tokens, rows, quantised))
        # A and its scales, h + h / 32 bytes a row, lie at the end of o, so that the first rows of o
        # can be written while A is read.
        row_bytes = ws.o.element_type.width // 8 * h
        before_a = row_bytes - h - h // BLOCK * 4
        begin = pointer(workspace + (starts.o + Int64(rows) * before_a), Float8E4M3FN)
        a = cute.make_tensor(begin, cute.make_layout((rows, h), stride=(h, 1)))
        begin = cute.recast_ptr(begin + Int64(rows) * h, dtype=Float32).align(16)
        a_scale = cute.make_tensor(begin, cute.make_layout((h // BLOCK, rows), stride=(rows, 1)))

        self.route(
            logits, bias, offset, scaling,
            ws.expert, ws.marks, ws.weights, ws.m_indptr, ws.pair_row, ws.token_of_row, ws.counters,
            QuantisedTokens(x, ws.x, ws.x_scale) if quantised else None, stream,
        )  # fmt: skip
        if cutlass.const_expr(quantised):
            x, x_scale = ws.x, ws.x_scale
        # (2, local): m_indptr[e] and m_indptr[e + 1]
        expert_rows = cute.make_tensor(
            ws.m_indptr.iterator, cute.make_layout((2, local), stride=(1, 1))
        )
        operand_a: tuple = (a, a_scale)
        side_job_tensors: tuple = (ws.pair_row, out)
        writable_rows: Any = Int32(Int64(rows) * before_a // row_bytes)
        if cutlass.const_expr(self.gathers):
            operand_a = (x, ws.token_of_row), x_scale
            side_job_tensors, writable_rows = (), None
        else:
            by_row = None
            if cutlass.const_expr(x.element_type is not BFloat16):
                end = cute.domain_offset((local,), ws.m_indptr)
                by_row = TokensOfRows(ws.token_of_row, end)
            self.permute(x, x_scale, ws.pair_row, a, a_scale, by_row, stream)
        self.gemms.launch(
            operand_a, (w13, w13_scale, w2, w2_scale), ws.q, ws.q_scale, ws.o,
            expert_rows, ws.counters, rows, stream, side_job_tensors, writable_rows,
        )  # fmt: skip
        ctas = cutlass.min(tokens, self.combine.max_token_ctas(self.num_sms))
        self.combine(ws.o, ws.pair_row, ws.weights, out, ctas, stream)


class ExpertGemms:
    """GEMM1 with SwiGLU and FP8, then GEMM2: `o[r] = w2[e] @ swiglu(w13[e] @ a[r])`.

    `load_options`: `gather`, `rows_known` and `side_job` of GEMM1's `GemmLoad`.
    """

    def __init__(
        self, shape: MoeShape, config1, config2, num_sms: int, gate_first: bool, **load_options: Any
    ):
        if config1.quantises != config2.terms:
            raise ValueError(
                f"{config1}: expected quantises={config2.terms}, the terms of GEMM2 ({config2})"
            )
        if config1.packed != config2.packed:
            raise ValueError(f"{config1}, {config2}: expected packed weights of both GEMMs or none")
        h, i, local = shape.hidden_size, shape.intermediate_size, shape.num_local_experts
        self.local, self.num_sms = local, num_sms
        # Only a dynamic GEMM2 computes while GEMM1 runs: its CTAs start at different times.
        self.hands_over = config2.dynamic
        gemm = GEMM_CLASSES[type(config1)]
        activation = Activation(shape.swiglu, gate_first, shape.ue8m0)
        self.gemm1 = gemm(config1, 2 * i, h, local, activation=activation, **load_options)
        self.gemm2 = gemm(config2, h, i, local, rows_known=True)

    def launch(
        self,
        operand_a: tuple,  # A and its scales, as `GemmSm90.launch` takes them
        weights: tuple,  # w13, w13_scale, w2, w2_scale
        q: cute.Tensor,  # (rows, terms * I) e4m3, written
        q_scale: cute.Tensor,  # (I / 128, rows) f32, written
        o: cute.Tensor,  # (rows, H), written
        expert_rows: cute.Tensor,  # (2, local) i32: first row, end
        counters: cute.Tensor,  # (TILE_COUNTERS + local,) i32, zero
        rows: Int32,
        stream: cuda.CUstream,
        side_job_tensors: tuple = (),
        writable_rows: Int32 | None = None,  # as in `Ready`
    ) -> None:
        """Launch both GEMMs, in the host function."""
        w13, w13_scale, w2, w2_scale = weights
        counts = ready = None
        if self.hands_over:
            begin = cute.domain_offset((TILE_COUNTERS,), counters).iterator
            counts = cute.make_tensor(begin, cute.make_layout(self.local))
            ready = Ready(counts, writable_rows)
        self.gemm1.launch(
            *operand_a, w13, w13_scale, (q, q_scale, counts),
            expert_rows, counters, self._ctas(self.gemm1, rows), stream,
            side_job_tensors=side_job_tensors,
        )  # fmt: skip
        counter2 = cute.domain_offset((1,), counters)
        self.gemm2.launch(
            q, q_scale, w2, w2_scale, o,
            expert_rows, counter2, self._ctas(self.gemm2, rows), stream, ready=ready,
        )  # fmt: skip

    def _ctas(self, gemm: Any, rows: Int32) -> Int32:
        return max_ctas(gemm.config, rows, gemm.n, gemm.experts, self.num_sms, minimum=cutlass.min)


# --- batched experts ----------------------------------------------------------------------------

PLACE_CTAS = 2
"""CTAs of `PlaceTokens` on a multiprocessor."""


class BatchedWorkspace(NamedTuple):
    """The parts of the workspace of `BatchedExperts`, as in `Workspace`."""

    expert_rows: Any  # (2, local) i32
    counters: Any  # (TILE_COUNTERS + local,) i32
    q: Any  # (rows, terms * I) e4m3
    q_scale: Any  # (I / 128, rows) f32
    x_scale: Any  # (H / 128, rows) f32
    x: Any = None  # (rows, H) e4m3, of tokens in bfloat16


def batched_parts(shape: MoeShape, terms: int, rows: Any, quantised: bool) -> BatchedWorkspace:
    """Return type and extents of every part; `rows` of all experts together, a multiple of 4."""
    h, i, local = shape.hidden_size, shape.intermediate_size, shape.num_local_experts
    return BatchedWorkspace(
        expert_rows=(Int32, (2, local)),
        counters=(Int32, (TILE_COUNTERS + local,)),
        q=(Float8E4M3FN, (rows, terms * i)),
        q_scale=(Float32, (i // BLOCK, rows)),
        x_scale=(Float32, (h // BLOCK, rows)),
        x=(Float8E4M3FN, (rows, h)) if quantised else None,
    )


def batched_workspace_bytes(shape: MoeShape, terms: int, capacity: int, quantised: bool) -> int:
    """Return the size of the workspace for `capacity` rows of every expert."""
    flat = round_up(shape.num_local_experts * capacity, TMA_ROWS)
    return offsets(batched_parts(shape, terms, flat, quantised))[1]


class BatchedExperts:
    """The experts of tokens that lie by expert, R rows each: `PlaceTokens`, then two GEMMs."""

    def __init__(self, shape: MoeShape, config1, config2, num_sms: int, gate_first: bool):
        self.shape, self.terms = shape, config2.terms
        self.place_ctas = PLACE_CTAS * num_sms
        self.place = PlaceTokens(shape.hidden_size, TILE_COUNTERS, shape.ue8m0)
        self.gemms = ExpertGemms(shape, config1, config2, num_sms, gate_first)

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # (local, R, H) e4m3 or bf16
        x_scale: cute.Tensor | None,  # (local, R, H / 128) f32 of any strides, None with bf16
        num_tokens: cute.Tensor,  # (local,) i32
        w13: cute.Tensor,  # (local, 2 I, H) e4m3, or packed blocks: `GemmSm90.launch`
        w13_scale: cute.Tensor,  # (local, 2 I / 128, H / 128) f32 or e8m0, or (local, 2 I, 1)
        w2: cute.Tensor,  # (local, H, I) e4m3
        w2_scale: cute.Tensor,  # (local, H / 128, I / 128) f32 or e8m0, or (local, H, 1)
        out: cute.Tensor,  # (local, R, H) bf16
        workspace: Int64,  # its address
        stream: cuda.CUstream,
    ):
        local, h = self.shape.num_local_experts, self.shape.hidden_size
        capacity = Int32(cute.size(x, mode=[1]))
        rows = local * capacity
        # TMA takes strides that are multiples of 16 bytes.
        whole = cute.assume(round_up(rows, TMA_ROWS), divby=TMA_ROWS)
        quantised = x.element_type is BFloat16
        starts, _ = offsets(batched_parts(self.shape, self.terms, Int64(whole), quantised))
        ws = tensors_at(workspace, starts, batched_parts(self.shape, self.terms, whole, quantised))
        flat = cute.make_layout((rows, h), stride=(h, 1))
        a, to_quantise = cute.make_tensor(x.iterator, flat), None
        if cutlass.const_expr(quantised):
            to_quantise = QuantisedTokens(a, ws.x, ws.x_scale)
            a = ws.x
        self.place.launch(
            to_quantise, x_scale, num_tokens, capacity, ws.x_scale, ws.expert_rows, ws.counters,
            self.place_ctas, stream,
        )  # fmt: skip
        self.gemms.launch(
            (a, ws.x_scale), (w13, w13_scale, w2, w2_scale), ws.q, ws.q_scale,
            cute.make_tensor(out.iterator, flat), ws.expert_rows, ws.counters, rows, stream,
        )  # fmt: skip


# --- compilation --------------------------------------------------------------------------------


@CompiledOnce
def compile_fused(*geometry: Any) -> Any:
    """Compile the whole layer; parameters: `describe_fused`."""
    return compiled(*describe_fused(*geometry))


def describe_fused(
    shape: MoeShape, config1: Any, config2: Any, num_sms: int, target: str, form: Form | None = None
) -> tuple[type, tuple, tuple, str]:
    """Return the arguments of `compiled` and `is_on_disk` for the whole layer; needs no GPU."""
    form = form or Form.usual(shape)
    local, h, i = shape.num_local_experts, shape.hidden_size, shape.intermediate_size
    tokens = Extent("tokens")
    scale, align = DSL_TYPES[form.weight_scale], form.weight_scale.itemsize
    scales = (2 * i // BLOCK, h // BLOCK), (h // BLOCK, i // BLOCK)
    if form.per_channel:
        scales, align = ((2 * i, 1), (h, 1)), ALIGNMENT
        config1, config2 = (replace(config, per_channel=True) for config in (config1, config2))
    values = [Tensor(Float8E4M3FN, (local, n, k)) for n, k in ((2 * i, h), (h, i))]
    if form.packed:
        values = [Tensor(Uint8, (local, n, k, PACKED_BYTES)) for n, k in scales]
    weights = (
        values[0],
        Tensor(scale, (local, *scales[0]), align),
        values[1],
        Tensor(scale, (local, *scales[1]), align),
    )
    parameters = (shape, config1, config2, num_sms, form.gate_first)
    arguments: tuple[Argument, ...]
    if form.batched:
        x, x_scale = Tensor(DSL_TYPES[form.x], (local, tokens, h)), None
        if form.has_scales:
            strides = tuple(Extent(f"{what} stride") for what in ("expert", "token", "block"))
            x_scale = Tensor(Float32, (local, tokens, h // BLOCK), 4, strides)
        num_tokens, out = Tensor(Int32, (local,), align=4), Tensor(BFloat16, (local, tokens, h))
        arguments = (x, x_scale, num_tokens, *weights, out, Scalar(Int64))
        return BatchedExperts, parameters, arguments, target
    out, routing = Tensor(BFloat16, (tokens, h)), routing_arguments(shape, tokens, form)
    arguments = (*routing, *token_arguments(h, tokens, form), *weights, out, Scalar(Int64))
    return FusedMoe, parameters, arguments, target
