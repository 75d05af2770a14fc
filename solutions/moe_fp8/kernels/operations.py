"""The CuTe DSL kernels as functions of torch tensors.

The reference model, `layer.model`, has the same functions and says what each computes.

What compiles a kernel is given its geometry and a target, and needs no GPU; sizes that change from
call to call are `Extent`s.
"""

import functools
from typing import Any

import torch
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64, Uint8

from ..numerics import BLOCK, TMA_ROWS, round_up
from ..problem import (
    SILU,
    Form,
    FusedCall,
    GroupedRows,
    MoeInputs,
    MoeShape,
    Swiglu,
    bounded_offset,
)
from . import batched_experts
from .architectures import of_device, of_target
from .combine import Combine
from .compile import Argument, CompiledOnce, Extent, Scalar, Tensor, compiled
from .fused import FusedMoe, workspace_bytes
from .permute import Permute
from .route import WORD, Route
from .swiglu_quant import SwigluQuant
from .tiles import most_ctas
from .vectors import alignment


def route(inputs: MoeInputs, shape: MoeShape, with_tokens: bool = True) -> GroupedRows:
    logits = inputs.routing_logits
    tokens, top_k, local = logits.shape[0], shape.top_k, shape.num_local_experts
    words, pairs = -(-tokens // WORD), tokens * top_k
    # One allocation costs the host several times as much as a view.
    marks_at, m_indptr_at = 4 * pairs, 4 * pairs + words * local
    memory = torch.empty(m_indptr_at + local + 2, dtype=torch.int32, device=logits.device)
    slots = (tokens, top_k), (top_k, 1)
    expert, pair_row = memory.as_strided(*slots), memory.as_strided(*slots, pairs)
    weights = memory.view(torch.float32).as_strided(*slots, 2 * pairs)
    token_of_row = memory.as_strided((pairs,), (1,), 3 * pairs)
    marks = memory.as_strided((words, local), (local, 1), marks_at)
    m_indptr = memory.as_strided((local + 1,), (1,), m_indptr_at)
    counters = memory.as_strided((1,), (1,), m_indptr_at + local + 1)  # unused here
    offset = bounded_offset(int(inputs.local_expert_offset), local)
    scaling = float(inputs.routed_scaling_factor)
    bias = inputs.routing_bias
    form = Form(choice=logits.dtype, bias=None if bias is None else bias.dtype)
    function = compile_route(shape, with_tokens, target_of(logits.device), form)
    given = (logits, bias, offset, scaling)
    if tokens:
        function(*given, expert, marks, weights, m_indptr, pair_row, token_of_row, counters, None)
    else:
        m_indptr.zero_()
    return GroupedRows(token_of_row if with_tokens else None, m_indptr, pair_row, weights)


def grouped_gemm(a, a_scale, b, b_scale, out, expert_rows, config=None) -> None:
    experts, n, k = b.shape
    rows = a.shape[0]
    config = config or of_device(a.device).config
    function = compile_grouped_gemm(config, n, k, experts, target_of(a.device))
    if rows:
        if rows % TMA_ROWS:  # TMA reads rows of `a_scale` from multiples of 16 bytes
            wide = a_scale.new_empty((k // BLOCK, round_up(rows, TMA_ROWS)))
            a_scale = wide[:, :rows].copy_(a_scale)
        ctas = most_ctas(config, rows, n, experts, multiprocessors_of(a.device))
        # One for every launch: launches may overlap, and a captured one is replayed. It is
        # unused with static scheduling.
        counter = expert_rows.new_zeros(1) if config.dynamic else expert_rows[0]
        function(a, a_scale, b, b_scale, out, expert_rows, counter, ctas)


def permute(x, x_scale, pair_row, a, a_scale, ue8m0=False) -> None:
    tokens, hidden = x.shape
    if tokens:
        layout = x_scale is not None and not x_scale.is_contiguous()
        form = Form(x=x.dtype, strided_scales=layout)
        top_k = pair_row.shape[1]
        function = compile_permute(hidden, top_k, target_of(x.device), form, ue8m0)
        function(x, x_scale, pair_row, a, a_scale, None)


def swiglu_quant(g, q, q_scale, m_indptr, swiglu=SILU, ue8m0=False) -> None:
    rows, intermediate = q.shape
    if rows:
        function = compile_swiglu_quant(intermediate, target_of(g.device), swiglu, ue8m0)
        ctas = SwigluQuant(intermediate).ctas(rows, multiprocessors_of(g.device))
        function(g, q, q_scale, m_indptr, ctas)


def combine(o, pair_row, weights, out) -> None:
    tokens, hidden = out.shape
    if tokens:
        top_k = pair_row.shape[1]
        ctas = min(tokens, Combine(hidden, top_k).most_ctas(multiprocessors_of(o.device)))
        compile_combine(hidden, top_k, target_of(o.device))(o, pair_row, weights, out, ctas)


def allocate(size: int, gpu: int) -> int:
    """The address of `size` bytes: a tensor costs the host several times as much.

    They belong to the current stream as a tensor's would, in a stream capture to the graph, and may
    be freed as soon as the last kernel that uses them is launched. `caching_allocator_alloc` takes
    twice the time: it looks at what it is given and sets the device first.
    """
    stream = torch._C._cuda_getCurrentRawStream(gpu)
    return torch._C._cuda_cudaCachingAllocator_raw_alloc(size, stream)


free = torch.cuda.caching_allocator_delete
"""Give the bytes at an address of `allocate` back."""


def fused_call(
    tokens: int, device: torch.device, shape: MoeShape, terms=1, configs=None, form=None
) -> FusedCall:
    """The whole layer for `tokens` tokens, at least one, on a GPU; see `kernels.fused`.

    The intermediate is a sum of `terms` FP8 values; without `configs` the architecture's are taken,
    without a form the definition's.
    """
    form = form or Form.usual(shape)
    configs = configs or of_device(device).choose_layer(tokens, shape, terms)
    function = compile_fused(*fused_geometry(device, shape, configs, form))
    if form.batched:
        return _batched_call(function, tokens, device, shape, terms, form)
    quantised = not form.has_scales and of_device(device).gather(configs[0]) is not None
    size = workspace_bytes(shape, terms, tokens, quantised)
    gpu, local, given = device.index, shape.num_local_experts, shape.routing == "given"
    exponents = form.weight_scale is torch.float8_e8m0fnu

    def call(inputs: Any, output: torch.Tensor) -> None:
        logits, bias, x, x_scale, w13, w13_scale, w2, w2_scale, offset, last = inputs
        if exponents:
            w13_scale, w2_scale = bytes_of(w13_scale), bytes_of(w2_scale)
        workspace = allocate(size, gpu)
        try:
            function(
                logits, bias, bounded_offset(int(offset), local), last if given else float(last),
                x, x_scale, w13, w13_scale, w2, w2_scale, output, workspace,
            )  # fmt: skip
        finally:
            free(workspace)

    return call


def bytes_of(exponents: torch.Tensor) -> torch.Tensor:
    """As the compiled function takes them. Raises TypeError: they are of another type."""
    if exponents.dtype is not torch.float8_e8m0fnu:
        raise TypeError(f"expected scales of float8_e8m0fnu, got {exponents.dtype}")
    return exponents.view(torch.uint8)


def _batched_call(
    function: Any, rows: int, device: torch.device, shape: MoeShape, terms: int, form: Form
) -> FusedCall:
    """The same for `rows` rows of every expert."""
    size = batched_experts.workspace_bytes(shape, terms, rows, not form.has_scales)
    gpu, exponents = device.index, form.weight_scale is torch.float8_e8m0fnu

    def call(inputs: Any, output: torch.Tensor) -> None:
        num_tokens, _, x, x_scale, w13, w13_scale, w2, w2_scale = inputs
        if exponents:
            w13_scale, w2_scale = bytes_of(w13_scale), bytes_of(w2_scale)
        workspace = allocate(size, gpu)
        try:
            function(x, x_scale, num_tokens, w13, w13_scale, w2, w2_scale, output, workspace)
        finally:
            free(workspace)

    return call


def fused_geometry(device: torch.device, shape: MoeShape, configs: Any, form: Form) -> tuple:
    """What `compile_fused` and `fused_kernel` are given for a GPU."""
    return shape, *configs, multiprocessors_of(device), target_of(device), form


@CompiledOnce
def compile_fused(*geometry: Any) -> Any:
    """The whole layer, see `fused_kernel`."""
    return compiled(*fused_kernel(*geometry))


def fused_kernel(
    shape: MoeShape,
    config1: Any,
    config2: Any,
    multiprocessors: int,
    target: str,
    form: Form | None = None,
) -> tuple[type, tuple, tuple, str]:
    """What `compiled` and `is_kept` are given of the whole layer."""
    form = form or Form.usual(shape)
    local = shape.num_local_experts
    h, i = shape.hidden_size, shape.intermediate_size
    tokens = Extent("tokens")
    scale, align = TYPES[form.weight_scale], form.weight_scale.itemsize
    weights = (
        Tensor(Float8E4M3FN, (local, 2 * i, h)),
        Tensor(scale, (local, 2 * i // BLOCK, h // BLOCK), align),
        Tensor(Float8E4M3FN, (local, h, i)),
        Tensor(scale, (local, h // BLOCK, i // BLOCK), align),
    )
    architecture = of_target(target)
    classes = architecture.classes(config1)
    arguments: tuple[Argument, ...]
    parameters: tuple = (shape, config1, config2, multiprocessors, *classes)
    if form.batched:
        out = Tensor(BFloat16, (local, tokens, h))
        arguments = (*_tokens_by_expert(local, h, tokens, form), *weights, out, Scalar(Int64))
        return batched_experts.BatchedExperts, (*parameters, form.gate_first), arguments, target
    out, given = Tensor(BFloat16, (tokens, h)), _routed(shape, tokens, form)
    arguments = (*given, *_tokens(h, tokens, form), *weights, out, Scalar(Int64))
    parameters = (*parameters, architecture.gather(config1), form.gate_first)
    return FusedMoe, parameters, arguments, target


@CompiledOnce
def compile_route(
    shape: MoeShape, names_tokens: bool, target: str, form: Form | None = None
) -> Any:
    local, top_k, tokens = shape.num_local_experts, shape.top_k, Extent("tokens")
    slots = Tensor(Int32, (tokens, top_k), align=4)
    arguments = (
        *_routed(shape, tokens, form or Form.usual(shape)),
        slots,
        Tensor(Int32, (Extent("words"), local), align=4),
        Tensor(Float32, (tokens, top_k), align=4),
        Tensor(Int32, (local + 1,), align=4),
        slots,
        Tensor(Int32, (Extent("rows"),), align=4),
        Tensor(Int32, (Extent("counters"),), align=4),
        None,  # no tokens are quantised
    )
    return compiled(Route, (shape, names_tokens), arguments, target)


TYPES = {
    torch.float32: Float32,
    torch.bfloat16: BFloat16,
    torch.float8_e4m3fn: Float8E4M3FN,
    torch.int32: Int32,
    torch.int64: Int64,
    torch.float8_e8m0fnu: Uint8,
}
"""The compiler's, by torch's; exponents alone are passed as their bytes."""


def _routed(shape: MoeShape, tokens: Extent, form: Form) -> tuple[Argument, ...]:
    """What the routing is given: logits, bias, first local expert, factor of the weights; or ids,
    weights, first local expert, map of the experts."""
    choice = TYPES[form.choice]
    if shape.routing == "given":
        slots = tokens, shape.top_k
        experts = Tensor(Int32, (shape.num_experts,), align=4) if form.has_map else None
        ids = Tensor(choice, slots, align=form.choice.itemsize)
        return ids, Tensor(Float32, slots, align=4), Scalar(Int32), experts
    bias = Tensor(TYPES[form.bias], (shape.num_experts,)) if form.bias else None
    return Tensor(choice, (tokens, shape.num_experts)), bias, Scalar(Int32), Scalar(Float32)


def _tokens(hidden: int, tokens: Extent, form: Form) -> tuple[Argument, Argument]:
    """The tokens and their scales."""
    x, scale = Tensor(TYPES[form.x], (tokens, hidden)), None
    if form.has_scales:
        apart = (Extent("blocks apart"), Extent("tokens apart")) if form.strided_scales else None
        scale = Tensor(Float32, (hidden // BLOCK, tokens), 4, apart)
    return x, scale


def _tokens_by_expert(
    local: int, hidden: int, rows: Extent, form: Form
) -> tuple[Argument, Argument, Argument]:
    """The same of each expert, and how many there are."""
    x, scale = Tensor(TYPES[form.x], (local, rows, hidden)), None
    if form.has_scales:
        apart = tuple(Extent(f"{what} apart") for what in ("experts", "tokens", "blocks"))
        scale = Tensor(Float32, (local, rows, hidden // BLOCK), 4, apart)
    return x, scale, Tensor(Int32, (local,), align=4)


@CompiledOnce
def compile_grouped_gemm(config: Any, n: int, k: int, experts: int, target: str) -> Any:
    """A ValueError says that there are no kernels for the target, or none for the shape."""
    rows, blocks = Extent("rows"), k // BLOCK
    scales_apart = Extent("scales apart", TMA_ROWS)  # TMA: strides of 16 bytes
    arguments = (
        Tensor(Float8E4M3FN, (rows, k)),
        Tensor(Float32, (blocks, rows), strides=(scales_apart, 1)),
        Tensor(Float8E4M3FN, (experts, n, k)),
        Tensor(Float32, (experts, n // BLOCK, blocks), align=4),
        Tensor(BFloat16, (rows, n)),
        Tensor(Int32, (2, experts), align=4, strides=(Extent("boundaries apart"), 1)),
        Tensor(Int32, (Extent("counters"),), align=4),
        Scalar(Int32),
    )
    gemm, _ = of_target(target).classes(config)
    return compiled(gemm, (config, n, k, experts), arguments, target)


@CompiledOnce
def compile_permute(
    hidden: int, top_k: int, target: str, form: Form | None = None, ue8m0: bool = False
) -> Any:
    rows, tokens, blocks = Extent("rows"), Extent("tokens"), hidden // BLOCK
    arguments = (
        *_tokens(hidden, tokens, form or Form()),
        Tensor(Int32, (tokens, top_k), align=alignment(top_k)),
        Tensor(Float8E4M3FN, (rows, hidden)),
        Tensor(Float32, (blocks, rows), align=4),
        None,  # scales are copied by token
    )
    return compiled(Permute, (hidden, top_k, ue8m0), arguments, target)


@CompiledOnce
def compile_swiglu_quant(
    intermediate: int, target: str, swiglu: Swiglu = SILU, ue8m0: bool = False
) -> Any:
    rows = Extent("rows")
    arguments = (
        Tensor(BFloat16, (rows, 2 * intermediate)),
        Tensor(Float8E4M3FN, (rows, intermediate)),
        Tensor(Float32, (intermediate // BLOCK, rows), align=4),
        Tensor(Int32, (Extent("boundaries"),), align=4),
        Scalar(Int32),
    )
    return compiled(SwigluQuant, (intermediate, swiglu, ue8m0), arguments, target)


@CompiledOnce
def compile_combine(hidden: int, top_k: int, target: str) -> Any:
    rows, tokens = Extent("rows"), Extent("tokens")
    arguments = (
        Tensor(BFloat16, (rows, hidden)),
        Tensor(Int32, (tokens, top_k), align=alignment(top_k)),
        Tensor(Float32, (tokens, top_k), align=alignment(top_k)),
        Tensor(BFloat16, (tokens, hidden)),
        Scalar(Int32),
    )
    return compiled(Combine, (hidden, top_k), arguments, target)


def target_of(device: torch.device) -> str:
    """What kernels are compiled for on it, `sm_90a` for example."""
    return of_device(device).target


@functools.cache
def multiprocessors_of(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
