"""Writes and runs small PTX kernels."""

import ctypes

import ptxemu
import torch
from ptxemu import engine, memory

REGISTERS = """
    .reg .pred %p<16>; .reg .b16 %h<32>; .reg .b32 %r<128>; .reg .f32 %f<128>;
    .reg .b64 %rd<64>; .reg .f64 %fd<16>; .reg .b128 %q<4>;
"""
THREAD = """
    mov.u32 %r0, %tid.x;
    mov.u32 %r100, %ctaid.x;
    mov.u32 %r101, %ntid.x;
    mad.lo.s32 %r1, %r100, %r101, %r0;
"""
"""%r0: thread of the CTA; %r1: thread of the grid."""


def kernel(parameters: str, body: str, top: str = "", target: str = "sm_90a") -> str:
    """Return a module with the kernel `k`; `parameters` is like "u64 x, map m" (a tensor map).

    Registers are %p0.. (predicates), %h (16 bits), %r (32), %f (f32), %rd (64), %fd, %q (128).
    """
    declared = ", ".join(
        f".param .align 64 .b8 {name}[128]" if kind == "map" else f".param .{kind} {name}"
        for kind, name in (parameter.split() for parameter in parameters.split(","))
    )
    return (
        f".version 8.7\n.target {target}\n.address_size 64\n{top}\n"
        f".visible .entry k({declared})\n{{{REGISTERS}{THREAD}{body}\n    ret;\n}}\n"
    )


def address(register: str, parameter: str, index: str, size: int) -> str:
    """Return PTX: `register` = address of element `index` (a 32-bit register) of a parameter."""
    return (
        f"ld.param.u64 {register}, [{parameter}]; mul.wide.u32 %rd63, {index}, {size}; "
        f"add.s64 {register}, {register}, %rd63;"
    )


DATA_TYPES = {torch.uint8: 0, torch.int32: 3, torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
SWIZZLES = {"none": 0, "32": 1, "64": 2, "128": 3}


def tensor_map(tensor: torch.Tensor, box: tuple[int, ...], swizzle: str = "none") -> bytes:
    """Return the map of cuTensorMapEncodeTiled for a tensor, with dimensions in torch's order.

    Raises:
        ValueError: the driver would refuse it.
    """
    buffer = ctypes.create_string_buffer(128 + 63)
    place = -ctypes.addressof(buffer) % 64
    rank = tensor.dim()
    size = tensor.element_size()
    status = engine.lib()._cuTensorMapEncodeTiled(
        ctypes.byref(buffer, place),
        DATA_TYPES[tensor.dtype],
        rank,
        ctypes.c_void_p(tensor.data_ptr()),
        (ctypes.c_uint64 * rank)(*reversed(tensor.shape)),
        (ctypes.c_uint64 * rank)(*(s * size for s in reversed(tensor.stride()[:-1])), 0),
        (ctypes.c_uint32 * rank)(*reversed(box)),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,
        SWIZZLES[swizzle],
        0,
        0,
    )
    if status:
        raise ValueError("refused")
    return buffer[place : place + 128]


def run(text: str, *arguments, threads=32, ctas=1, also=(), **more) -> ptxemu.Report:
    """Run the kernel `k`; `also` are tensors that it reaches without an argument."""
    tokens = [ptxemu.register_tensor(tensor) for tensor in also]
    try:
        return ptxemu.run_ptx(text, "k", (ctas, 1, 1), (threads, 1, 1), list(arguments), **more)
    finally:
        for token in tokens:
            del memory.ranges[token]


MAP_ADDRESS = "mov.b64 {0}, {1}; cvta.param.u64 {0}, {0};"
"""PTX: the address of a parameter that is a tensor map."""
WAIT = """
{label}:
    mbarrier.try_wait.parity.shared::cta.b64 %p15, [{barrier}], {parity};
    @!%p15 bra {label};
"""
"""PTX: wait for a phase of an mbarrier."""


def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)
