"""The main loop of a GEMM that reads MXFP4 weights, as docs/notes/w4a8.md describes it: an
experiment, not a kernel of the package.

One warpgroup has 64 rows of weights, WGMMA's A from registers, and N tokens. Four-bit values become
the e4m3 bytes that `from_mxfp4` makes of them, and their block's scale is promoted once in a K
block. Loads are plain: TMA and stages are those of `gemm_load`.
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
import pytest
import torch
from cuda.bindings import driver as cuda
from cutlass import Float8E4M3FN, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from markers import backends
from moe_fp8 import from_mxfp4
from moe_fp8.call import BLOCK
from moe_fp8.kernels.dsl import LayoutEnum, SmemAllocator
from moe_fp8.mxfp4 import BIAS, E2M1, GROUP, HIGHEST, SPAN
from mxfp4_values import decoded, drawn

pytestmark = backends("emulator", "gpu")

ROWS, GROUPS, THREADS = 64, BLOCK // GROUP, 128
MAGNITUDES, SIGNS = 0x77777777, -0x7F7F7F80  # 0x80808080


@cute.jit
def launch(packed, exponents, table, scales, tokens, token_scales, out, stream: cuda.CUstream):
    w4a8_mainloop(packed, exponents, table, scales, tokens, token_scales, out).launch(
        grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream
    )


@cute.kernel
def w4a8_mainloop(
    packed: cute.Tensor,  # (k_blocks, 128 threads, 2 rows, 4 groups) i32: 8 values each
    exponents: cute.Tensor,  # (k_blocks, 128 threads, 2 rows) i32: a byte for each group
    table: cute.Tensor,  # (15, 2) i32: the bytes of the eight magnitudes, by exponent
    scales: cute.Tensor,  # (k_blocks) f32
    tokens: cute.Tensor,  # (N, K) e4m3
    token_scales: cute.Tensor,  # (k_blocks, N) f32
    out: cute.Tensor,  # (64, N) f32
):
    n, k_blocks = cute.size(tokens, mode=[0]), cute.size(scales)
    thread, _, _ = cute.arch.thread_idx()
    major = OperandMajorMode.K
    tiled_mma = hopper.make_trivial_tiled_mma(
        Float8E4M3FN, Float8E4M3FN, major, major, Float32, (1, 1, 1), (ROWS, n),
        a_source=warpgroup.OperandSource.RMEM,
    )  # fmt: skip
    layout = hopper.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (ROWS, n, BLOCK), Float8E4M3FN, 1)
    sB = SmemAllocator().allocate_tensor(Float8E4M3FN, layout.outer, 1024, layout.inner)
    thr_mma = tiled_mma.get_slice(thread)
    tCrB = tiled_mma.make_fragment_B(thr_mma.partition_B(sB))  # (1, 1, 4, 1)
    # ((4 columns, 2 rows, 2 halves), 1, 4 groups): the bytes that WGMMA reads
    tCrA = cute.make_rmem_tensor(tiled_mma.partition_shape_A((ROWS, BLOCK)), Float8E4M3FN)
    words = cute.recast_tensor(tCrA, Int32)
    words = cute.make_tensor(words.iterator, cute.make_layout((2, 2, GROUPS)))
    # ((2 columns, 2 rows, N / 8), 1, 1)
    acc = cute.make_rmem_tensor(tiled_mma.partition_shape_C((ROWS, n)), Float32)
    accum = cute.make_rmem_tensor(acc.shape, Float32)
    acc.fill(0.0)
    for kb in cutlass.range(k_blocks, unroll=1):
        for i in cutlass.range_constexpr(n):
            sB[i, thread, 0] = tokens[i, kb * BLOCK + thread]
        for row in cutlass.range_constexpr(2):
            for group in cutlass.range_constexpr(GROUPS):
                exponent = exponents[kb, thread, row] >> (8 * group) & 0xFF
                eight = packed[kb, thread, row, group]
                selector, low, high = eight & MAGNITUDES, table[exponent, 0], table[exponent, 1]
                first = Int32(cute.arch.prmt(low, high, selector))
                second = Int32(cute.arch.prmt(low, high, selector >> 16))
                words[row, 0, group] = first | (eight << 4) & SIGNS
                words[row, 1, group] = second | eight & SIGNS
        # Must come before the WGMMA, or they read old data: they do not see a thread's writes.
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        mma = cute.make_mma_atom(tiled_mma.op)
        warpgroup.fence()
        for group in cutlass.range_constexpr(GROUPS):
            mma.set(warpgroup.Field.ACCUMULATE, group != 0)
            cute.gemm(mma, accum, tCrA[None, None, group], tCrB[None, None, group, 0], accum)
        warpgroup.commit_group()
        # Must come before the next block, or it overwrites registers and tokens that WGMMA reads.
        warpgroup.wait_group(0)
        cute.arch.sync_threads()
        for v in cutlass.range_constexpr(cute.size(acc)):
            column = v // 4 * 8 + thread % 4 * 2 + v % 2
            acc[v] = cute.math.fma(accum[v], token_scales[kb, column] * scales[kb], acc[v])
    for v in cutlass.range_constexpr(cute.size(acc)):
        row = thread // 32 * 16 + thread % 32 // 4 + v // 2 % 2 * 8
        out[row, v // 4 * 8 + thread % 4 * 2 + v % 2] = acc[v]


def compile_mainloop(tokens: int, k_blocks: int):
    k = k_blocks * BLOCK
    tensors = [
        (Int32, (k_blocks, THREADS, 2, GROUPS)), (Int32, (k_blocks, THREADS, 2)),
        (Int32, (SPAN + 1, 2)), (Float32, (k_blocks,)), (Float8E4M3FN, (tokens, k)),
        (Float32, (k_blocks, tokens)), (Float32, (ROWS, tokens)),
    ]  # fmt: skip
    fakes = [
        make_fake_tensor(dtype, shape, torch.empty(shape, device="meta").stride())
        for dtype, shape in tensors
    ]
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(launch, *fakes, stream, options="--enable-tvm-ffi --gpu-arch=sm_90a")


def table() -> torch.Tensor:
    """Return the e4m3 bytes of e2m1's magnitudes times 2^-8 to 2^6, `[15, 2]` int32."""
    powers = 2.0 ** torch.arange(HIGHEST - SPAN, HIGHEST + 1)
    exact = torch.tensor(E2M1) * powers[:, None]
    as_bytes = exact.to(torch.float8_e4m3fn)
    assert torch.equal(as_bytes.float(), exact)
    return as_bytes.view(torch.int32)


def shuffled(
    packed: torch.Tensor, exponents: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `w4a8_mainloop` reads of 64 rows of MXFP4 weights.

    Args:
        packed: `[64, K/2]`, and its exponents `[64, K/32]`.
        scales: `[K/128]`, as `from_mxfp4` makes them.
    """
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1)  # (64, K)
    # (4 warps, 2 rows, 8 lanes, k_blocks, 4 groups, 2 halves, 4 lanes, 4 values)
    codes = codes.view(4, 2, 8, -1, GROUPS, 2, 4, 4).permute(3, 0, 2, 6, 1, 4, 5, 7)
    codes = codes.flatten(1, 3).long()  # (k_blocks, 128, 2, 4, 2, 4)
    nibble = torch.arange(4)
    # A value's magnitude selects a byte. Its sign lies where a shift of 4 or 0 brings it to bit 7.
    words = (codes & 7) << (4 * nibble + 16 * torch.arange(2)[:, None])
    words += (codes >> 3) << (8 * nibble + 3 + 4 * torch.arange(2)[:, None])
    offset = (
        exponents.view(torch.uint8).int()
        - BIAS
        - (torch.frexp(scales).exponent - 1).repeat_interleave(GROUPS)
    )
    offset = offset - (HIGHEST - SPAN)
    offset = offset.view(4, 2, 8, -1, GROUPS).permute(3, 0, 2, 1, 4)  # (kb, 4, 8, 2, groups)
    offset = offset.unsqueeze(3).expand(-1, 4, 8, 4, 2, GROUPS).flatten(1, 3)
    assert ((offset >= 0) & (offset <= SPAN)).all()
    exponent_words = (offset.long() << (8 * torch.arange(GROUPS))).sum(-1)
    return words.sum((-1, -2)).to(torch.int32), exponent_words.to(torch.int32)


def hopper_sums(weights: torch.Tensor, x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the products `[M, N]` of `[M, K]` and `[N, K]` as Hopper's WGMMA sums them.

    An instruction aligns 32 products and the sum so far to the largest exponent, where a product's
    is the sum of its factors'. It drops what lies below the 13th fraction bit, adds, and drops what
    lies below the 13th fraction bit of the new sum. `scales` is `[K / 128, N]`.
    """
    out = torch.zeros(len(weights), len(x))
    for k_block, scale in enumerate(scales.double()):
        accum = torch.zeros_like(out, dtype=torch.float64)
        for k in range(k_block * BLOCK, (k_block + 1) * BLOCK, 32):
            a, b = weights[:, None, k : k + 32], x[None, :, k : k + 32]
            terms = torch.cat([a * b, accum[..., None]], -1)
            # frexp has significands from 1/2 to 1, so a product's exponent has one more.
            exponents = torch.cat(
                [a.frexp().exponent + b.frexp().exponent - 1, accum[..., None].frexp().exponent], -1
            )
            largest = exponents.where(terms != 0, -99).amax(-1, keepdim=True)
            accum = truncated(terms, largest).sum(-1)
            accum = truncated(accum, accum.frexp().exponent)
        out = (out + accum * scale).float()
    return out


def truncated(x: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Return `x` without what lies below the 13th fraction bit of a value of such an exponent."""
    last_bit = torch.ones_like(x).ldexp(exponents - 14)
    return (x / last_bit).trunc() * last_bit


@pytest.mark.parametrize("tokens", [8, 16, BLOCK])
def test_the_products_of_four_bit_weights(tokens, backend):
    """With 128 tokens that are unit vectors the sums are the weights themselves, to the bit."""
    k_blocks = 2
    packed, exponents = drawn(BLOCK, k_blocks * BLOCK, span=SPAN)
    _, scales = from_mxfp4(packed, exponents)
    if tokens == BLOCK:
        x = torch.eye(BLOCK).repeat(1, k_blocks)
        x[:, :BLOCK] = 0
    else:
        x = torch.randn(tokens, k_blocks * BLOCK, generator=torch.Generator().manual_seed(1))
    x = x.to(torch.float8_e4m3fn)
    token_scales = 2.0 ** (torch.arange(k_blocks * tokens) % 5).view(k_blocks, tokens)
    inputs = *shuffled(packed[:ROWS], exponents[:ROWS], scales[0]), table(), scales[0]
    out = torch.full((ROWS, tokens), torch.nan)

    def run(out: torch.Tensor, *arguments: torch.Tensor) -> torch.Tensor:
        compile_mainloop(tokens, k_blocks)(*arguments, out)
        return out

    out = backend.run(run, out, *inputs, x, token_scales)
    rows = x.double() * token_scales.t().repeat_interleave(BLOCK, 1)
    expected = decoded(packed[:ROWS], exponents[:ROWS]) @ rows.t()
    if tokens == BLOCK:
        assert torch.equal(out.double(), expected)
    elif backend.name == "gpu":
        weights, scales = from_mxfp4(packed, exponents)
        weights, token_scales = weights[:ROWS].double(), token_scales * scales[0, :, None]
        assert torch.equal(out, hopper_sums(weights, x.double(), token_scales))
    else:
        assert (out - expected).abs().max() < 1e-5 * expected.abs().max()
