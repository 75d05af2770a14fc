"""The producer half of the grouped GEMM: fills the stages of shared memory that the MMA reads.

Hopper and Blackwell load alike, so both kernels share this file. A K block has, for a tile,

    A     tile_m rows of 128 e4m3 values (tokens), once for each FP8 term
    SFA   their scales, one float32 a row
    B     b_rows rows of 128 e4m3 values (weights)

The warps of warpgroup 0:

    0    A and SFA, by TMA; gathered rows by cp.async, together with warp 3
    1    B, by TMA
    2    the tile scheduler, where the schedule is dynamic
    3    a side job that has nothing to do with the GEMM, where it does not load

The consumer half, which empties the stages, is `gemm_sm90` and `gemm_sm100`. The two halves meet at
`ab_pipeline`, one stage a K block, and with a dynamic schedule at the tile queue
(`tiles.TileQueue`). For stage s:

    warp 0                         warp 1                         consumers
    wait for empty[s]              wait for empty[s]              wait for full[s]
    expect A's bytes at full[s]    expect B's bytes at full[s]    read the stage
    copy A and SFA to s            copy B to s                    arrive at empty[s]

In a cluster each CTA loads its share of the A tile for the CTAs in its row (cluster_n) and its
share of the B tile for those in its column (cluster_m). Multicast writes a share to all of them.
What Blackwell loads otherwise (SFA by itself, two CTAs for one MMA) is in `gemm_sm100`.

What the previous kernel wrote is first touched after `wait_for_previous` or, with `Ready`, by
expert after `wait_for_rows` (`sync`). With `rows_known` only A comes from the previous kernel, so
only the warps that load A wait. B of the first stages is loaded early: the consumers cannot store
anything before A has arrived.

A tile may read rows past its expert's end. They only reach accumulator values that are not stored.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Boolean, Float8E4M3FN, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.nvgpu.tcgen05 import CtaGroup

from ..shape import BLOCK, TMA_ROWS
from .configs import WARP, WGMMA_M
from .dsl import BF16_VECTOR, LayoutEnum, copy_async, load, vector
from .sync import Ready, wait_for_previous, wait_for_rows
from .tiles import MAX_EXPERTS, Tile, TileScheduler

A_WARPS = (0, 3)
"""The warps that load A: the first one, or both."""
B_WARP = 1
SCHEDULER_WARP = 2
SIDE_JOB_WARP = A_WARPS[-1]
"""The warp of a side job: free, because with a side job only one warp loads A."""
SLICE_ROWS = WGMMA_M
"""Rows of a slice: a consumer warpgroup's part of a tile where tokens are the MMA's rows."""
SWIZZLE_ALIGN = 1024
"""Alignment of a buffer with a 128-byte swizzle, whose pattern repeats every 1024 bytes."""
CP_ASYNC_VALUES = 16
"""e4m3 values of one cp.async, and of one piece of the 128-byte swizzle."""
EVICT_FIRST = 0x12F0000000000000
"""The L2 cache policy of that name (createpolicy.fractional.L2::evict_first) as a constant."""


class StageCounts(NamedTuple):
    """The arrivals and bytes that complete a phase of the two mbarriers of a stage."""

    # Arrivals on `full`: of the warps that load A, and one expect-tx for B.
    full_arrivals: int
    a_bytes: int  # that TMA brings to a CTA, at most: A and, where it comes with A, SFA
    b_bytes: int
    # Arrivals on `empty`: every reader of the stage in every CTA of the same row and column of the
    # cluster, to which copies are multicast. `PipelineTmaAsync` signals them also where nothing is
    # multicast (`GatheredRows` in clusters of (1, 2)).
    empty_arrivals: int


class TmaTensor(NamedTuple):
    """A tensor as TMA copies it."""

    atom: cute.CopyAtom
    coordinates: cute.Tensor  # of the tensor's shape: TMA takes coordinates, not addresses


class SharedOperands(NamedTuple):
    """The operands in a CTA's shared memory."""

    sA: cute.Tensor  # ((8, tile_m / 8), (128, 1), (1, stages * terms)) e4m3, swizzled
    sSFA: cute.Tensor  # (sfa_rows, 1, sfa_stages) f32
    sB: cute.Tensor  # ((8, b_rows / 8), (128, 1), (1, stages)) e4m3, swizzled
    # (tile_m,) i32, 16-byte aligned: the tokens of a tile's rows, where they are gathered
    tokens: cute.Pointer


class GemmArguments(NamedTuple):
    """The kernel's arguments, as the host function makes them."""

    a: Any  # A and SFA: `TmaRows` or `TokensByRow`
    b: TmaTensor  # (n, k, experts)
    # (experts, n / 128, k / 128) f32, or e8m0 as u8; `per_channel` (n, 1, experts) f32
    sfb: cute.Tensor
    output: Any  # what the epilogue made of D
    expert_rows: cute.Tensor  # (2, experts) i32: first row, end
    counter: cute.Tensor  # (any) i32, zero: tiles handed out by a dynamic schedule
    side_job_tensors: tuple
    ready: Ready | None  # where A's rows are handed over by expert


# --- the roles ----------------------------------------------------------------------------------


class GemmLoad:
    """The producer half: what it holds in shared memory, and the roles of warpgroup 0.

    Args:
        config: the GEMM's config.
        n, k, experts: of the weights; n and k are multiples of 128.
        rows, weights: the classes that load A and B.
        rows_known: the previous kernel wrote nothing that this one reads but A and A's scales: not
            `expert_rows`, `counter` or the side job's tensors. Only warps that load A wait.
        side_job: work for warp 3, see `ZeroTokens.run`.

    Raises:
        ValueError: a size is not supported.
    """

    def __init__(
        self, config, n: int, k: int, experts: int, rows: type, weights: type,
        rows_known=False, side_job=None,
    ):  # fmt: skip
        for name, size in (("n", n), ("k", k)):
            if size % BLOCK:
                raise ValueError(f"{name}={size}: expected a multiple of {BLOCK}")
        if not 1 <= experts <= MAX_EXPERTS:
            raise ValueError(f"experts={experts}: expected 1..{MAX_EXPERTS}")
        self.config, self.k, self.experts = config, k, experts
        self.k_blocks = k // BLOCK
        self.rows_known, self.side_job = rows_known, side_job
        self.a_loader: Any = rows(config)
        self.b_loader: Any = weights(config)
        if side_job and self.a_loader.warps == len(A_WARPS):
            raise ValueError(f"{rows.__name__} leaves no warp for {side_job}")
        self.counts = StageCounts(
            full_arrivals=self.a_loader.arrivals + self.b_loader.arrivals,
            a_bytes=self.a_loader.bytes,
            b_bytes=self.b_loader.bytes,
            empty_arrivals=config.stage_readers * (config.cluster_m + config.cluster_n - 1),
        )

    def setup(self) -> None:
        """Make the layouts of shared memory. They are values of the compiler, which live only in
        the function that makes them: the host function and the kernel both call this."""
        c = self.config
        # ((8, tile_m / 8), (128, 1), (1, stages * terms)): 8 rows of 128 bytes are a swizzle atom
        self.a_smem = rows_layout(c, c.tile_m, c.num_stages * c.terms)
        self.sfa_smem = sfa_layout(c)  # (sfa_rows, 1, sfa_stages)
        # ((8, b_rows / 8), (128, 1), (1, stages)), or of packed blocks (bytes, stages)
        self.b_smem = self.b_loader.layout()

    def prefetch(self, args: GemmArguments) -> None:
        """Fetch the TMA descriptors ahead of the first copy; one warp."""
        self.a_loader.prefetch(args.a)
        self.b_loader.prefetch(args.b)

    def shared(self, storage) -> SharedOperands:
        """Return the views of the operands' shared memory."""
        return SharedOperands(  # shapes: `SharedOperands`
            sA=storage.a.get_tensor(self.a_smem.outer, swizzle=self.a_smem.inner),
            sSFA=storage.a_scale.get_tensor(self.sfa_smem),
            sB=self.b_loader.shared(storage, self.b_smem),
            tokens=storage.tokens.data_ptr(),
        )

    @cute.jit
    def run(self, warp_idx, ab_pipeline, tile_sched: TileScheduler, args, shared, ring=None):
        """Run the roles of warpgroup 0. `ring`: of `mxfp4.Converters`."""
        for i in cutlass.range_constexpr(self.a_loader.warps):
            if warp_idx == A_WARPS[i]:
                # The loop over tiles and K blocks is the same for all kinds of rows.
                begin_tile = partial(self.a_loader.begin_tile, args.a, shared, a_warp=i)
                copy = partial(self.a_loader.copy, args.a, ab_pipeline=ab_pipeline, a_warp=i)
                self.load_rows(
                    ab_pipeline, self.config.num_stages, tile_sched, args, begin_tile, copy
                )
        if warp_idx == B_WARP:
            b_pipeline, b_shared, stages = ab_pipeline, shared, self.config.num_stages
            if cutlass.const_expr(ring is not None):
                b_pipeline, stages = ring[0], self.b_loader.stages
                b_shared = shared._replace(sB=ring[1])
            begin_tile = partial(self.b_loader.begin_tile, args.b, b_shared)
            copy = partial(self.b_loader.copy, args.b, ab_pipeline=b_pipeline)
            self.load_weights(b_pipeline, stages, tile_sched, begin_tile, copy)
        if cutlass.const_expr(self.side_job is not None):
            if warp_idx == SIDE_JOB_WARP:
                # The warps of all CTAs take the tokens round robin.
                block, _, _ = cute.arch.block_idx()
                blocks, _, _ = cute.arch.grid_dim()
                self.side_job.run(*args.side_job_tensors, block, blocks)
        if cutlass.const_expr(self.config.dynamic):
            # One warp of a cluster asks for tiles, for all of its CTAs.
            if warp_idx == SCHEDULER_WARP and cute.arch.block_idx_in_cluster() == 0:
                linear, stride, total = tile_sched.first()
                tile_sched.queue.fetch(args.counter.iterator, linear, stride, total)

    @cute.jit
    def load_rows(self, pipe, stages: int, tile_sched, args: GemmArguments, begin_tile, copy):
        """Load A and SFA, or SFA alone, of every K block of every tile of this CTA; one warp.

        `begin_tile` returns what `copy` needs of a tile. `copy` starts the copies of a K block into
        a free stage of `pipe`.
        """
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, stages)
        cta = tile_sched.cta_in_cluster()
        linear, stride, total = tile_sched.first()
        queue_state = tile_sched.queue_state()
        ready = args.ready
        if cutlass.const_expr(ready is not None):
            # Before this kernel has waited for the previous one: `sync` says why that is allowed.
            cute.arch.griddepcontrol_launch_dependents()
            if cutlass.const_expr(ready.writable_rows is not None):
                # Must come before the first copy, or the consumers store over rows that the
                # previous kernel still reads: they store nothing before A has arrived.
                # The end of the last expert is the number of rows.
                if tile_sched.tiles.expert_rows[1, self.experts - 1] > ready.writable_rows:
                    cute.arch.griddepcontrol_wait()
        elif cutlass.const_expr(self.rows_known):
            # Must come before the first copy of A, which the previous kernel writes.
            wait_for_previous()
        while linear < total:
            tile = tile_sched.tile(linear, cta, slices=self.config.slices)
            if cutlass.const_expr(ready is not None):
                # All rows of the expert; no stored value depends on neighbours' rows in the box.
                expert_rows = tile_sched.tiles.expert_rows
                rows = expert_rows[1, tile.expert] - expert_rows[0, tile.expert]
                wait_for_rows(ready.counts, tile.expert, rows * self.k)
            copies = begin_tile(tile, cta)
            for kb in cutlass.range(self.k_blocks, unroll=1):
                # Not `producer_acquire`: it expects a whole stage's bytes, which two warps bring.
                pipe.sync_object_empty.wait(state.index, state.phase)
                copy(copies, kb, state=state)
                state.advance()
            linear, queue_state = tile_sched.next(linear, stride, queue_state)
        if cutlass.const_expr(ready is not None):
            # Must come before the exit, or the next kernel takes earlier kernels for complete.
            cute.arch.griddepcontrol_wait()

    @cute.jit
    def load_weights(self, pipe, stages: int, tile_sched, begin_tile, copy):
        """Load B of every K block of every tile of this CTA; one warp. `begin_tile` and `copy` as
        in `load_rows`."""
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, stages)
        cta = tile_sched.cta_in_cluster()
        linear, stride, total = tile_sched.first()
        queue_state = tile_sched.queue_state()
        while linear < total:
            copies = begin_tile(tile_sched.tile(linear, cta), cta)
            for kb in cutlass.range(self.k_blocks, unroll=1):
                pipe.sync_object_empty.wait(state.index, state.phase)
                copy(copies, kb, state=state)
                state.advance()
            linear, queue_state = tile_sched.next(linear, stride, queue_state)
        # Must come before the exit, or the other CTAs' arrivals find this CTA gone.
        pipe.producer_tail(state)


# --- B: weights ---------------------------------------------------------------------------------


def weights_layout(config: Any):
    """Shared memory of B: (b_rows, 128, stages), swizzled."""
    tile = (config.tile_m, config.b_rows, BLOCK)
    # ((8, b_rows / 8), (128, 1), (1, stages))
    return hopper.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tile, Float8E4M3FN, config.num_stages)


class WeightCopies(NamedTuple):
    """The copies of one tile's weights: sources by K block, destinations by stage."""

    tBgB: cute.Tensor  # (((128, b_rows), 1), k_blocks)
    tBsB: cute.Tensor  # ((b_rows * 128, 1), (1, stages))
    mask: Any  # CTAs that a copy is multicast to


class TmaWeights:
    """Load a tile's weights by one TMA copy. CTAs of a cluster's column load a part each for all of
    them."""

    warps = 1
    arrivals = 1  # on a stage's `full` barrier: with the bytes that will come
    ring_bytes = 0

    def __init__(self, config: Any):
        self.config = config
        self.bytes = config.b_bytes

    def layout(self):
        """Shared memory of B, see `weights_layout`."""
        layout = weights_layout(self.config)
        # The barriers must wait for exactly the bytes that the copies bring.
        one_stage = cute.slice_(layout, (None, None, 0))
        assert self.bytes == cute.size_in_bytes(Float8E4M3FN, one_stage)
        return layout

    def shared(self, storage, layout) -> cute.Tensor:
        """Return the weights in shared memory, as `SharedOperands.sB`."""
        return storage.b.get_tensor(layout.outer, swizzle=layout.inner)

    def operand(self, b: cute.Tensor, layout) -> TmaTensor:
        """Make TMA's view of B, (experts, n, k) e4m3; the host function calls it."""
        c = self.config
        weights = weights_by_column(b, c)  # (n, k, experts)
        return tma_tensor(weights, layout, (c.b_rows, BLOCK), c.cluster_m)

    def prefetch(self, b: TmaTensor) -> None:
        cpasync.prefetch_descriptor(b.atom)

    def begin_tile(self, b: TmaTensor, shared: SharedOperands, tile: Tile, cta) -> WeightCopies:
        """Return the `WeightCopies` of a tile."""
        c = self.config
        # (b_rows, 128, k_blocks); with `quantises` the rows are (interleave, 2, ...)
        gB = cute.local_tile(b.coordinates, (c.b_rows, BLOCK), (tile.n_tile, None, tile.expert))
        # ((b_rows * 128, 1), (1, stages)) and (((128, b_rows), 1), k_blocks)
        tBsB, tBgB = tma_partition(b.atom, shared.sB, gB, cta[0], c.cluster_m)
        return WeightCopies(tBgB, tBsB, multicast_mask((c.cluster_m, c.cluster_n), cta, 0))

    def copy(self, b: TmaTensor, copies: WeightCopies, kb, ab_pipeline, state) -> None:
        """Start the copy of K block `kb` into a free stage."""
        # This warp's arrival, with the bytes to wait for.
        full = expect_bytes(ab_pipeline, state, self.bytes)
        cute.copy(
            b.atom,
            copies.tBgB[None, kb],
            copies.tBsB[None, state.index],
            tma_bar_ptr=full,
            mcast_mask=copies.mask,
            **l2_hint(self.config),
        )


def l2_hint(config: Any) -> dict[str, Int64]:
    """Return the argument of a copy of weights that sets L2's policy, if the config has one."""
    return {"cache_policy": Int64(EVICT_FIRST)} if config.evict_first else {}


def weights_by_column(b: cute.Tensor, config: Any) -> cute.Tensor:
    """Return B, (experts, n, k), as (n, k, experts) with its rows in the order of tile columns.
    Scales of rows, (experts, n, 1), are viewed likewise.

    With `quantises` half of a tile's columns are rows of the first half of n, half are the same
    rows of the second half: up and gate. They are interleaved so that one thread has up and gate of
    a column. The view has rank 5, which one TMA instruction copies.
    """
    if not config.quantises:
        # (n, k, experts)
        return cute.make_tensor(b.iterator, cute.select(b.layout, mode=[1, 2, 0]))
    experts, n, k = (cute.size(b, mode=[i]) for i in range(3))
    half, group = n // 2, config.interleave
    # ((rows of a group, up and gate, groups), k, experts)
    shape = ((group, 2, half // group), k, experts)
    stride = ((k, half * k, group * k), 1, n * k)
    return cute.make_tensor(b.iterator, cute.make_layout(shape, stride=stride))


# --- A: rows that lie one after the other -------------------------------------------------------


def rows_layout(config: Any, rows: int, copies: int):
    """Shared memory of `copies` times `rows` rows of A: (rows, 128, copies), swizzled."""
    tile = (rows, config.tile_n, BLOCK)
    # ((8, rows / 8), (128, 1), (1, copies))
    return hopper.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tile, Float8E4M3FN, copies)


def sfa_layout(config: Any) -> cute.Layout:
    """Shared memory of SFA: (sfa_rows, 1, sfa_stages)."""
    shape = (config.sfa_rows, 1, config.sfa_stages)
    # Stages are `sfa_bytes` apart, a multiple of the 128 bytes that TMA writes to.
    return cute.make_layout(shape, stride=(1, 0, config.sfa_bytes // 4))


class TmaRows(NamedTuple):
    """A and SFA as TMA copies them."""

    a: TmaTensor  # (rows, terms * k)
    sfa: TmaTensor  # (rows, k / 128)


class TileCopies(NamedTuple):
    """The copies of one tile: sources by K block, destinations by stage."""

    # (((128, tile_m), 1), k_blocks * terms), in slices (((128, 64), 1), slices, k_blocks * terms)
    tAgA: cute.Tensor
    # ((tile_m * 128, 1), (1, stages * terms)), in slices ((8192, 1), (1, stages * terms * slices))
    tAsA: cute.Tensor
    tAgSFA: cute.Tensor  # ((sfa_rows, 1), k_blocks)
    tAsSFA: cute.Tensor  # ((sfa_rows, 1), sfa_stages)
    mask: Any  # CTAs that a copy of A is multicast to
    slices: Int32 | None = None  # slices with rows, of `SlicedRows`


class ContiguousRows:
    """Load a tile's rows by one TMA copy and their scales by another one.

    The CTAs of a cluster's row share the rows: each loads a part for all. The scales are too few
    for that. TMA reads scales from a multiple of 16 bytes on, so a tile's scales begin up to
    `TMA_ROWS - 1` places into what is loaded.
    """

    warps = 1  # that load
    arrivals = 1  # on a stage's `full` barrier: with the bytes that will come
    token_slots = 0  # Int32 in shared memory, for the tokens of a tile's rows, if gathered

    def __init__(self, config: Any):
        self.config = config
        self.sfa_bytes = config.sfa_rows * 4
        self.bytes = config.tile_m * config.terms * BLOCK + self.sfa_bytes

    def operand(self, a: cute.Tensor, sfa: cute.Tensor) -> TmaRows:
        """Make TMA's view of `a` (rows, terms * k) e4m3 and `sfa` (k / 128, rows) f32; the host
        function calls it."""
        c = self.config
        # (rows, k / 128)
        by_row = cute.make_tensor(sfa.iterator, cute.select(sfa.layout, mode=[1, 0]))
        return TmaRows(self._a(a), tma_tensor(by_row, sfa_layout(c), (c.sfa_rows, 1), 1))

    def _a(self, a: cute.Tensor) -> TmaTensor:
        c = self.config
        smem = rows_layout(c, c.tile_m, c.num_stages * c.terms)  # as `GemmLoad.a_smem`
        return tma_tensor(a, smem, (c.tile_m, BLOCK), c.cluster_n)

    def prefetch(self, operand: TmaRows) -> None:
        cpasync.prefetch_descriptor(operand.a.atom)
        cpasync.prefetch_descriptor(operand.sfa.atom)

    def begin_tile(self, operand: TmaRows, shared: SharedOperands, tile: Tile, cta, a_warp=0):
        """Return the `TileCopies` of a tile."""
        c = self.config
        # (sfa_rows, 1, k_blocks), from the multiple of 4 rows at or before the tile's first row
        gSFA = cute.local_tile(
            cute.domain_offset((tile.row // TMA_ROWS * TMA_ROWS, 0), operand.sfa.coordinates),
            (c.sfa_rows, 1),
            (0, None),
        )
        tAsA, tAgA = self._partition(operand, shared, tile, cta)
        # ((sfa_rows, 1), sfa_stages) and ((sfa_rows, 1), k_blocks)
        tAsSFA, tAgSFA = tma_partition(operand.sfa.atom, shared.sSFA, gSFA, 0, 1)
        mask = multicast_mask((c.cluster_m, c.cluster_n), cta, 1)
        return TileCopies(tAgA, tAsA, tAgSFA, tAsSFA, mask)

    def _partition(self, operand: TmaRows, shared: SharedOperands, tile: Tile, cta):
        c = self.config
        # (tile_m, 128, k_blocks * terms): a tile begins at any row
        gA = cute.local_tile(
            cute.domain_offset((tile.row, 0), operand.a.coordinates), (c.tile_m, BLOCK), (0, None)
        )
        # ((tile_m * 128, 1), (1, stages * terms)) and (((128, tile_m), 1), k_blocks * terms)
        return tma_partition(operand.a.atom, shared.sA, gA, cta[1], c.cluster_n)

    def copy(self, operand: TmaRows, copies: TileCopies, kb, ab_pipeline, state, a_warp) -> None:
        """Start the copies of K block `kb` into a free stage."""
        # This warp's arrival, with the bytes to wait for.
        full = expect_bytes(ab_pipeline, state, self.bytes)
        self._copy_a(operand, copies, kb, full, state)
        self._copy_sfa(operand, copies, kb, full, state)

    def _copy_a(self, operand: TmaRows, copies: TileCopies, kb, full, state) -> None:
        terms = self.config.terms
        # The terms of A lie side by side along k: term t of K block kb is kb + t * k_blocks.
        k_blocks = cute.size(copies.tAgA, mode=[1]) // terms
        for t in range(terms):
            cute.copy(
                operand.a.atom,
                copies.tAgA[None, kb + t * k_blocks],
                copies.tAsA[None, state.index * terms + t],
                tma_bar_ptr=full,
                mcast_mask=copies.mask,
            )

    def _copy_sfa(self, operand: TmaRows, copies: TileCopies, kb, full, state) -> None:
        cute.copy(
            operand.sfa.atom,
            copies.tAgSFA[None, kb],
            copies.tAsSFA[None, state.index],
            tma_bar_ptr=full,
        )

    def fence_loaded(self) -> None:
        """Do nothing: the MMA sees what TMA wrote."""

    def from_first_row(self, tile: Tile, sSFA: cute.Tensor) -> cute.Tensor:
        """Return the scales in shared memory from the tile's first row on."""
        # (sfa_rows, 1, sfa_stages)
        return cute.domain_offset((tile.row % TMA_ROWS, 0, 0), sSFA)


class SlicedRows(ContiguousRows):
    """Like `ContiguousRows`, in slices of 64 rows. Empty slices are not loaded.

    The consumer warpgroups of empty slices read nothing. The CTAs of a cluster's row have the same
    rows, so each expects the bytes that both bring.
    """

    def __init__(self, config: Any):
        super().__init__(config)
        self.slices = config.tile_m // SLICE_ROWS

    def _layout(self):
        """The shared memory of A by slices: ((8, 8), (128, 1), (1, stages * terms * slices))."""
        c = self.config
        return rows_layout(c, SLICE_ROWS, c.num_stages * c.terms * self.slices)

    def _a(self, a: cute.Tensor) -> TmaTensor:
        return tma_tensor(a, self._layout(), (SLICE_ROWS, BLOCK), self.config.cluster_n)

    def begin_tile(self, operand, shared, tile: Tile, cta, a_warp=0):
        copies = super().begin_tile(operand, shared, tile, cta)
        # `tile.rows` may reach past the tile, up to its expert's end.
        rows = cutlass.max(cutlass.min(tile.rows, self.config.tile_m), 0)
        return copies._replace(slices=(rows + (SLICE_ROWS - 1)) // SLICE_ROWS)

    def _partition(self, operand, shared, tile: Tile, cta):
        gA = cute.domain_offset((tile.row, 0), operand.a.coordinates)
        # (64, 128, slices from here to the end of A, k_blocks * terms)
        gA = cute.local_tile(gA, (SLICE_ROWS, BLOCK), (None, None))
        # ((8, 8), (128, 1), (1, stages * terms * slices)): sA's memory, one slice after the other
        sA = cute.make_tensor(shared.sA.iterator, self._layout().outer)
        return tma_partition(operand.a.atom, sA, gA, cta[1], self.config.cluster_n)

    @cute.jit
    def copy(self, operand, copies, kb, ab_pipeline, state, a_warp):
        terms = self.config.terms
        # No more than comes, or the consumers wait for ever; no less, or they read too early.
        size = copies.slices * (SLICE_ROWS * BLOCK * terms) + self.sfa_bytes
        full = expect_bytes(ab_pipeline, state, size)
        k_blocks = cute.size(copies.tAgA, mode=[2]) // terms
        for t in cutlass.range_constexpr(terms):
            for s in cutlass.range_constexpr(self.slices):
                if s < copies.slices:
                    cute.copy(
                        operand.a.atom,
                        copies.tAgA[None, s, kb + t * k_blocks],
                        copies.tAsA[None, (state.index * terms + t) * self.slices + s],
                        tma_bar_ptr=full,
                        mcast_mask=copies.mask,
                    )
        # The scales of all slices come: there are too few to divide.
        self._copy_sfa(operand, copies, kb, full, state)


# --- A: rows that are copies of tokens ----------------------------------------------------------


class TokensByRow(NamedTuple):
    """The tokens that rows of A are copies of."""

    x: cute.Tensor  # (tokens, k) e4m3
    x_scale: cute.Tensor  # (k / 128, tokens) f32, of any strides
    token_of_row: cute.Tensor  # (rows,) i32


class TileTokens(NamedTuple):
    """The tokens of a tile's rows."""

    shared: SharedOperands
    tokens: cute.Tensor  # (tile_m / 8, 8) i32 in shared memory, those of a lane side by side


class GatheredRows:
    """Load a tile's rows by cp.async from the tokens that they are copies of: no permute kernel.

    Two warps copy, each four of every eight rows. A lane copies 16 bytes of every eighth row, and
    the scales of every 32nd of its warp's rows. It arrives when its copies are done. The consumers
    must fence for the async proxy, or the MMA may read the stage before cp.async's writes. Nothing
    is multicast. A row past `tile.rows` is a copy of the last valid row.
    """

    warps = 2
    arrivals = 2 * WARP
    bytes = 0

    def __init__(self, config: Any):
        # In a column of CTAs one may have a row tile behind its expert's end.
        if config.cluster_m > 1 or config.terms > 1:
            raise ValueError(f"{config}: gathers rows, expected cluster_m=1 and terms=1")
        self.config = config
        self.token_slots = config.tile_m

    def operand(self, x: tuple[cute.Tensor, cute.Tensor], x_scale: cute.Tensor) -> TokensByRow:
        """Return `x`, (tokens (tokens, k) e4m3, token_of_row (rows,) i32), and their scales."""
        tokens, token_of_row = x
        return TokensByRow(tokens, x_scale, token_of_row)

    def prefetch(self, operand: TokensByRow) -> None:
        """Do nothing: cp.async takes no descriptor."""

    def _row(self, a_warp: int, i: Int32) -> Int32:
        """Return the row in the tile of the i-th row of warp `A_WARPS[a_warp]`."""
        # The first of the two has rows 0 to 3, 8 to 11, ...; the other one 4 to 7, 12 to 15, ...
        return i // 4 * 8 + a_warp * 4 + i % 4

    @cute.jit
    def begin_tile(self, operand: TokensByRow, shared: SharedOperands, tile: Tile, cta, a_warp):
        """Return the `TileTokens` of a warp's rows of a tile."""
        eights = self.config.tile_m // 8
        # (tile_m / 8, 8): the rows of a lane, eight apart, lie side by side
        layout = cute.make_layout((eights, 8), stride=(1, eights))
        tokens = cute.make_tensor(shared.tokens, layout)
        # Must come before the writes: all lanes are done with the previous tile.
        cute.arch.sync_warp()
        for i in cutlass.range(cute.arch.lane_idx(), self.config.tile_m // self.warps, WARP):
            row = self._row(a_warp, Int32(i))
            # Past `tile.rows`: the last valid row again. Without rows: where the tile begins.
            within = cutlass.max(cutlass.min(row, tile.rows - 1), 0)
            tokens[row // 8, row % 8] = operand.token_of_row[tile.row + within]
        cute.arch.sync_warp()  # must come before the reads: a lane reads what others wrote
        return TileTokens(shared, tokens)

    @cute.jit
    def copy(self, operand: TokensByRow, copies: TileTokens, kb, ab_pipeline, state, a_warp):
        """Start the copies of K block `kb` into a free stage."""
        self._copy_a(operand, copies, kb, state, a_warp)
        self._copy_sfa(operand, copies, kb, state, a_warp)
        self.arrive(ab_pipeline, state)

    @cute.jit
    def _copy_a(self, operand: TokensByRow, copies: TileTokens, kb, state, a_warp):
        c = self.config
        lane = cute.arch.lane_idx()
        tokens, shared = copies.tokens, copies.shared
        k = cute.size(operand.x, mode=[1])
        columns = operand.x.iterator + kb * BLOCK + lane % 8 * CP_ASYNC_VALUES
        row = self._row(a_warp, lane // 8)
        # The 128-byte swizzle: chunk c of row r lies at chunk c ^ (r % 8). A lane's rows are eight
        # apart, so that is the same chunk for all of them.
        place = cute.recast_ptr(shared.sA.iterator, dtype=Float8E4M3FN)
        place = place + (state.index * c.tile_m + row) * BLOCK + (lane % 8 ^ row) * CP_ASYNC_VALUES
        # Read some tokens at once: no load can be moved ahead of a copy to shared memory.
        at_once = math.gcd(c.tile_m // 8, 4)
        some = cute.make_rmem_tensor(at_once, Int32)  # (at_once,): tokens of this lane's next rows
        for first in cutlass.range_constexpr(0, c.tile_m // 8, at_once):
            load(tokens.iterator + row * (c.tile_m // 8) + first, some)
            for i in cutlass.range_constexpr(at_once):
                source = columns + Int64(some[i]) * k
                copy_async(source, place + 8 * BLOCK * (first + i), CP_ASYNC_VALUES)

    @cute.jit
    def _copy_sfa(self, operand: TokensByRow, copies: TileTokens, kb, state, a_warp):
        scales, token_stride = self._scales(operand, kb)
        place = copies.shared.sSFA.iterator + state.index * (self.config.sfa_bytes // 4)
        for i in cutlass.range(cute.arch.lane_idx(), self.config.tile_m // self.warps, WARP):
            scale_row = self._row(a_warp, Int32(i))
            token = copies.tokens[scale_row // 8, scale_row % 8]
            copy_async(scales + token * token_stride, place + scale_row, 1)

    def arrive(self, pipe, state) -> None:
        """Arrive at a stage's `full` barrier when this lane's copies are done."""
        # noinc: the barrier counts it among `arrivals`.
        cute.arch.cp_async_mbarrier_arrive_noinc(pipe.producer_get_barrier(state))

    def _scales(self, operand: TokensByRow, kb) -> tuple[cute.Pointer, Any]:
        """Return (first scale of K block `kb`, distance between neighbouring tokens' scales)."""
        block_stride, token_stride = operand.x_scale.stride
        if isinstance(token_stride, int):  # known when it is compiled: contiguous
            block_stride = cute.size(operand.x_scale, mode=[1])
        return operand.x_scale.iterator + Int64(kb) * block_stride, token_stride

    def fence_loaded(self) -> None:
        """Make a stage visible to the MMA, by a consumer that has waited for it."""
        # Must come before the MMA, or it reads the stage before cp.async's writes: it is of the
        # async proxy, they are of the generic one.
        cute.arch.fence_proxy("async.shared", space="cta")

    def from_first_row(self, tile: Tile, sSFA: cute.Tensor) -> cute.Tensor:
        """Return the scales in shared memory from the tile's first row on."""
        return sSFA


# --- TMA ----------------------------------------------------------------------------------------


def tma_tensor(
    tensor: cute.Tensor, smem_layout, box: tuple[int, int], multicast: int, group=CtaGroup.ONE
) -> TmaTensor:
    """Make TMA's view of a tensor for copies of `box` that `multicast` CTAs share. `group`: the
    CTAs of an MMA, of which the first one's barrier counts the copies."""
    alone, shared = cpasync.CopyBulkTensorTileG2SOp, cpasync.CopyBulkTensorTileG2SMulticastOp
    op = (shared if multicast > 1 else alone)(group)
    # ((8, rows / 8), (128, 1)) of A and B, (sfa_rows, 1) of SFA
    one_stage = cute.slice_(smem_layout, (None, None, 0))
    return TmaTensor(
        *cpasync.make_tiled_tma_atom(op, tensor, one_stage, box, num_multicast=multicast)
    )


def tma_partition(atom, smem: cute.Tensor, gmem: cute.Tensor, share: Int32, shares: int):
    """Return this CTA's share of a tile, as the copies of `atom`, in shared and global memory.

    `share`, one of `shares`, is a part of the rows. Modes 0 and 1, the box, become one mode: from
    (rows, columns, rest) to ((rows * columns, 1), rest) in shared memory and
    (((columns, rows), 1), rest) in global memory.
    """
    return cpasync.tma_partition(
        atom,
        share,
        cute.make_layout(shares),
        cute.group_modes(smem, 0, 2),
        cute.group_modes(gmem, 0, 2),
    )


def multicast_mask(cluster: tuple[int, int], cta: tuple[Int32, Int32], mode: int):
    """Return the CTAs of the cluster that share this CTA's part along `mode`; None if it is
    alone."""
    if cluster[mode] == 1:
        return None  # a copy that is no multicast takes no mask
    # Bit r stands for CTA r of the cluster.
    return cute.make_layout_image_mask(cute.make_layout(cluster), cta, mode=mode)


def expect_bytes(pipe, state, size: int | Int32, cta: int | None = None) -> cute.Pointer:
    """Arrive at a stage's `full` barrier, which then expects `size` bytes, and return the barrier;
    one warp. `cta`: of the cluster, whose barrier it is; None: this one."""
    full = pipe.producer_get_barrier(state)
    # One lane: the barrier counts one arrival of a warp that loads by TMA.
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, size, cta)
    return full


# --- side jobs ----------------------------------------------------------------------------------


class ZeroTokens:
    """Zero the tokens whose `pair_row[t]`, (tokens, top_k) i32, are all negative, by one otherwise
    idle warp of each CTA.

    Over half of the tokens of a large batch have no local expert. A kernel that waits for the
    tensor cores has time for them, and the combine then skips them.
    """

    def __init__(self, hidden: int, top_k: int):
        self.hidden, self.top_k = hidden, top_k

    @cute.jit
    def run(self, pair_row: cute.Tensor, out: cute.Tensor, warp: Int32, warps: Int32):
        """Zero `out`, (tokens, hidden) bf16, at tokens without a row; all lanes of a warp, which
        takes every `warps`-th token from `warp` on."""
        lane = cute.arch.lane_idx()
        zeros = cute.make_rmem_tensor(BF16_VECTOR, BFloat16)  # (8,): 16 bytes
        zeros.fill(0.0)
        for token in cutlass.range(warp, Int32(cute.size(out, mode=[0])), warps, unroll=1):
            if self.is_zero(pair_row, Int32(token)):
                start = out.iterator + Int64(token) * self.hidden
                for column in cutlass.range(
                    lane * BF16_VECTOR, self.hidden, WARP * BF16_VECTOR, unroll=4
                ):
                    cute.autovec_copy(zeros, vector(start + column, BF16_VECTOR))

    @cute.jit
    def is_zero(self, pair_row: cute.Tensor, token: Int32) -> Boolean:
        """True, in all lanes, if no pair of the token has a row."""
        row = Int32(-1)  # of one of the token's pairs, a lane each
        if cute.arch.lane_idx() < self.top_k:
            row = Int32(pair_row[token, cute.arch.lane_idx()])
        return Boolean(not cute.arch.vote_any_sync(row >= 0))
