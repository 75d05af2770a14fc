"""A kernel that only reads: the time of reading the weights of the active experts on this GPU.

No kernel that needs these weights is faster, so this is the roofline of a memory-bound grouped
GEMM. The rate of one large buffer is no such bound: three experts' weights are read at another
rate, and a GEMM has reached 102 % of it.

Every CTA walks through chunks of 16 KB, which TMA loads into a ring in shared memory. Nothing reads
the ring. There are two orders, of which the faster counts: all CTAs walk through the weights
together, or each through its own part.
"""

import functools
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cuda.bindings import driver as cuda
from cutlass import Float8E4M3FN, Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync
from moe_fp8.kernels.compile import COMPILE_OPTIONS, Extent, Scalar, Tensor, fakes
from moe_fp8.kernels.dsl import SmemAllocator

LINE = 128
"""Bytes of a row of the weights as TMA reads them: the widest box without swizzle."""
LINES = 128
"""Rows of a chunk."""
CHUNK = LINE * LINES
STAGES = 12
WARP = 32


class StreamWeights:
    """Reads the chunks of the named experts and writes how many each CTA has read.

    Args:
        chunks: of one expert.
        side_by_side: CTA c of G reads chunks c, c + G, ...; otherwise the c-th part of all.
        add_up: write the sum of the bytes instead, which shows that the right bytes were read.
    """

    def __init__(self, chunks: int, side_by_side: bool, add_up: bool = False):
        self.chunks = chunks
        self.side_by_side = side_by_side
        self.add_up = add_up

    @cute.jit
    def __call__(
        self,
        weights: cute.Tensor,  # (experts * chunks * LINES, LINE) bytes
        experts: cute.Tensor,  # (active,) i32
        read: cute.Tensor,  # (ctas,) i64: chunks read by each
        ctas: Int32,
        stream: cuda.CUstream,
    ):
        ring = cute.make_ordered_layout((LINES, LINE, STAGES), order=(1, 0, 2))
        tma, tma_weights = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(),
            weights,
            cute.slice_(ring, (None, None, 0)),
            (LINES, LINE),
        )

        @cute.struct
        class SharedStorage:
            arrived: cute.struct.MemRange[Int64, STAGES]
            ring: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, CHUNK * STAGES], 128]

        self.shared_storage = SharedStorage
        self.kernel(tma, tma_weights, experts, read).launch(
            grid=[ctas, 1, 1], block=[WARP, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self, tma: cute.CopyAtom, weights: cute.Tensor, experts: cute.Tensor, read: cute.Tensor
    ):
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        storage = SmemAllocator().allocate(self.shared_storage)
        arrived = storage.arrived.data_ptr()
        ring = storage.ring.get_tensor(
            cute.make_ordered_layout((LINES, LINE, STAGES), order=(1, 0, 2))
        )
        if cute.arch.lane_idx() == 0:
            for stage in cutlass.range_constexpr(STAGES):
                cute.arch.mbarrier_init(arrived + stage, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()

        total = cute.size(experts) * self.chunks
        if cutlass.const_expr(self.side_by_side):
            first, count, step = cta, (total - cta + ctas - 1) // ctas, ctas
        else:
            first = Int32(Int64(cta) * total // ctas)
            count, step = Int32(Int64(cta + 1) * total // ctas) - first, Int32(1)
        target, source = cpasync.tma_partition(
            tma,
            0,
            cute.make_layout(1),
            cute.group_modes(ring, 0, 2),
            cute.group_modes(cute.local_tile(weights, (LINES, LINE), (None, 0)), 0, 2),
        )
        result = Int64(0) if self.add_up else Int64(count)
        words = cute.make_tensor(
            cute.recast_ptr(storage.ring.data_ptr(), dtype=Uint32),
            cute.make_layout((CHUNK // 4, STAGES)),
        )
        for i in cutlass.range(0, count + STAGES, unroll=1):
            stage = i % STAGES
            if i >= STAGES:
                cute.arch.mbarrier_wait(arrived + stage, (i // STAGES - 1) % 2)
                if cutlass.const_expr(self.add_up):
                    for word in cutlass.range(cute.arch.lane_idx(), CHUNK // 4, WARP):
                        for byte in cutlass.range_constexpr(4):
                            result += Int64(words[word, stage] >> (8 * byte) & 255)
                    cute.arch.sync_warp()  # before the next copy overwrites the stage
            if i < count:
                chunk = first + i * step
                expert = experts[chunk // self.chunks]
                if cute.arch.lane_idx() == 0:
                    cute.arch.mbarrier_arrive_and_expect_tx(arrived + stage, CHUNK)
                cute.copy(
                    tma,
                    source[None, expert * self.chunks + chunk % self.chunks],
                    target[None, stage],
                    tma_bar_ptr=arrived + stage,
                )
        if cutlass.const_expr(self.add_up):
            for distance in (16, 8, 4, 2, 1):
                result += cute.arch.shuffle_sync_bfly(result, distance)
        if cute.arch.lane_idx() == 0:
            read[cta] = result


@functools.cache
def compile_stream(chunks: int, side_by_side: bool, arch: str, add_up: bool = False) -> Any:
    """Compile the kernel as a function that takes the caller's stream. Needs no GPU."""
    arguments = (
        Tensor(Float8E4M3FN, (Extent("lines"), LINE)),
        Tensor(Int32, (Extent("active"),), align=4),
        Tensor(Int64, (Extent("ctas"),), align=8),
        Scalar(Int32),
    )
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    kernel, options = StreamWeights(chunks, side_by_side, add_up), COMPILE_OPTIONS.format(arch=arch)
    return cute.compile(kernel, *fakes(arguments), stream, options=options)


def readers(
    weights: torch.Tensor,  # [E, N, K] float8_e4m3fn
    experts: torch.Tensor,  # [active] int32, on the same device
    read: torch.Tensor,  # [CTAs] int64, written: chunks read by each CTA
    arch: str,
    add_up: bool = False,
) -> list[Callable[[], None]]:
    """Return launches, one an order, that read all weights of these experts once. Raises
    ValueError: an expert's weights are not whole chunks."""
    chunks, rest = divmod(weights[0].numel(), CHUNK)
    if rest:
        raise ValueError(f"weights {tuple(weights.shape)}: expected whole chunks of {CHUNK} bytes")
    lines = weights.view(-1, LINE)

    def reader(side_by_side: bool) -> Callable[[], None]:
        function = compile_stream(chunks, side_by_side, arch, add_up)
        return lambda: function(lines, experts, read, read.shape[0])

    return [reader(True), reader(False)]
