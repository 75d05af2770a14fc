"""The CuTe DSL kernels as functions of torch tensors.

The reference model, `layer.model`, has the same functions and says what each computes.
"""

import functools
from typing import Any

import torch
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32

from ..numerics import BLOCK, TMA_ROWS, round_up
from ..problem import SILU, Form, FusedCall, GroupedRows, MoeInputs, MoeShape, bounded_offset
from .architectures import of_device
from .combine import Combine, compile_combine
from .compile import CompiledOnce, Extent, Scalar, Tensor, compiled
from .fused import GEMMS, batched_workspace_bytes, compile_fused, workspace_bytes
from .permute import compile_permute
from .route import WORD_TOKENS, compile_route
from .swiglu import SwigluQuant, compile_swiglu_quant
from .tiles import max_ctas


def route(inputs: MoeInputs, shape: MoeShape, with_tokens: bool = True) -> GroupedRows:
    logits = inputs.routing_logits
    tokens, top_k, local = logits.shape[0], shape.top_k, shape.num_local_experts
    words, pairs = -(-tokens // WORD_TOKENS), tokens * top_k
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
        ctas = max_ctas(config, rows, n, experts, multiprocessors_of(a.device))
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
        ctas = min(tokens, Combine(hidden, top_k).max_ctas(multiprocessors_of(o.device)))
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
    quantised = not form.has_scales and configs[0].gathers_rows
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
    size = batched_workspace_bytes(shape, terms, rows, not form.has_scales)
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
    """Return the parameters of `compile_fused` and `describe_fused` for a GPU."""
    return shape, *configs, multiprocessors_of(device), target_of(device), form


@CompiledOnce
def compile_grouped_gemm(config: Any, n: int, k: int, experts: int, target: str) -> Any:
    """Compile the GEMM alone. A ValueError says that there is none for the shape."""
    rows, blocks = Extent("rows"), k // BLOCK
    scale_stride = Extent("scale stride", TMA_ROWS)  # TMA: strides of 16 bytes
    arguments = (
        Tensor(Float8E4M3FN, (rows, k)),
        Tensor(Float32, (blocks, rows), strides=(scale_stride, 1)),
        Tensor(Float8E4M3FN, (experts, n, k)),
        Tensor(Float32, (experts, n // BLOCK, blocks), align=4),
        Tensor(BFloat16, (rows, n)),
        Tensor(Int32, (2, experts), align=4, strides=(Extent("boundary stride"), 1)),
        Tensor(Int32, (Extent("counters"),), align=4),
        Scalar(Int32),
    )
    return compiled(GEMMS[type(config)], (config, n, k, experts), arguments, target)


def target_of(device: torch.device) -> str:
    """What kernels are compiled for on it, `sm_90a` for example."""
    return of_device(device).target


@functools.cache
def multiprocessors_of(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
