"""The configs of the grouped GEMM: what can be tuned on each architecture, and what is legal.

A config holds every compile-time constant of the GEMM. It raises a ValueError that names the limit
when its values cannot work. `LayerRules` makes the two configs of the fused layer. Its numbers, and
the tile for a number of rows, are in `heuristic_sm90` and `heuristic_sm100`.
"""

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..shape import BLOCK, PACKED_BYTES, TMA_ROWS, MoeShape, expected_rows

WARP = 32
"""Threads of a warp."""
WARPGROUP = 128
"""Threads of a warpgroup."""
WARPGROUP_WARPS = 4
"""Warps of a warpgroup."""
SMEM_BYTES = 227 * 1024
"""Shared memory of one CTA, on Hopper and on Blackwell."""
CTA_REGISTERS = 64 * 1024
"""Registers of one CTA. Each of its warpgroups takes 128 of them for every register of a thread."""
PRODUCER_REGISTERS = 24
"""Registers of a producer thread: enough for it, and the least that setmaxnreg takes."""
MAX_CONSUMER_REGISTERS = 240
"""Registers of a consumer thread, at most. It binds with one warpgroup; more have less left."""
CONVERTER_REGISTERS = 56
"""Registers of a thread that converts packed weights."""
PACKED_STAGES = 4
"""Packed blocks in shared memory, on their way to the converters."""
MAX_CONSUMER_WARPGROUPS = 3
EPILOGUE_N = 64
"""Output columns of one TMA store: one 128-byte swizzle row of bfloat16."""
MAX_SFB = 128
"""Weight scales of a tile that a warp has room for: one a K block, two with up and gate."""
SFA_STAGES = 8
"""K blocks of token scales in shared memory on Blackwell."""
WGMMA_M = 64
"""Rows of one WGMMA, which a warpgroup issues."""
OTHER_REGISTERS = 32
"""Registers of a consumer thread on Hopper that are not accumulators, at least."""
UMMA_M = 128
"""Rows of one tcgen05.mma, one a lane of tensor memory."""
TMEM_COLUMNS = 512
"""Columns of a multiprocessor's tensor memory, of 128 lanes of 4 bytes each."""
TMEM_LOAD_COLUMNS = 64
"""Accumulator columns that a consumer thread reads from tensor memory at once. Its registers have
no room for more beside up to 128 sums."""
STAGED_COLUMNS = 32
"""Columns of a warp's rows that go through shared memory at once on their way out (Blackwell)."""
MAX_ACCUMULATORS = 4
"""K blocks in tensor memory, at most. With two the next K block's MMA runs while one is promoted.
More let the MMA run on while a tile is stored."""


class Schedule(enum.Enum):
    """The order in which clusters get tiles."""

    STATIC = "static"
    """Round robin: tile i belongs to cluster i, modulo the number of clusters."""
    WHOLE_WAVES = "whole_waves"
    """Round robin among the fewest clusters that need no more waves. A GEMM that waits for weights
    reads as fast with fewer clusters, and the next kernel starts on the SMs left over."""
    DYNAMIC = "dynamic"
    """The next tile that no cluster has asked for (`tiles.TileQueue`)."""


@dataclass(frozen=True)
class GemmConfig:
    """Tile and pipeline of a grouped GEMM: what the configs of both architectures share.

    Attributes:
        tile_m: rows (tokens) of a CTA tile.
        tile_n: output columns of a CTA tile.
        cluster_m: CTAs of a cluster along the rows. They share each B tile by multicast.
        cluster_n: CTAs of a cluster along the columns. They share each A tile by multicast.
        stages: depth of the load pipeline in K blocks; 0 takes all the shared memory.
        swap_ab: weights take the MMA's rows and tokens its columns, for few rows.
        schedule: which cluster computes which tile.
        terms: FP8 values whose sum is an element of A, 1 or 2. Each of them multiplies the same B.
            With two the GEMM's sums are stored from registers: for the fused layer in float32,
            since rounding would cost what the second term gains, for the batched one and the GEMM
            alone in bfloat16.
        quantises: FP8 terms that the epilogue makes of up and gate; 0 for a plain store.
        evict_first: weights leave L2 before other lines. They arrive sooner where few experts are
            active and L2 is full of lines that are not written back yet (`LayerRules`).
        per_channel: weights have a scale for each row (an output channel), not for each block of
            128x128. The epilogue multiplies by it, the promotion by token scales alone.

    Raises:
        ValueError: a value is outside what the kernel supports; the message names the limit.
    """

    tile_m: int = 128
    tile_n: int = 128
    cluster_m: int = 1
    cluster_n: int = 1
    stages: int = 0
    swap_ab: bool = False
    schedule: Schedule = Schedule.STATIC
    terms: int = 1
    quantises: int = 0
    evict_first: bool = False
    per_channel: bool = False
    # The class of an architecture overrides these, as a field or a constant.
    packed = False
    ctas = 1
    producer_warpgroups = 1
    gathers = False
    slices = False

    def check(self, **legal: tuple[int, ...]) -> None:
        """Raise a ValueError if a field has none of its `legal` values or the stages do not fit."""
        side = "with swap_ab" if self.swap_ab else "without swap_ab"
        for name, values in {**legal, "terms": (1, 2), "quantises": (0, 1, 2)}.items():
            value = getattr(self, name)
            if value not in values:
                raise ValueError(
                    f"{name}={value}: expected one of {values} {side} and "
                    f"quantises={self.quantises}"
                )
        if (self.cluster_m, self.cluster_n) not in ((1, 1), (1, 2), (2, 1)):
            raise ValueError(
                f"cluster ({self.cluster_m}, {self.cluster_n}): expected (1, 1), (1, 2) or (2, 1)"
            )
        if self.stages < 0 or self.stages == 1:
            raise ValueError(f"stages={self.stages}: expected 0 (as many as fit) or at least 2")
        if self.num_stages < 2 or self.smem_bytes > self.smem_limit:
            raise ValueError(
                f"{self}: needs {self.smem_bytes} bytes of shared memory, "
                f"more than the {self.smem_limit} of one CTA"
            )

    def one_line(self, *words: str) -> str:
        """The config in one line, with what an architecture adds."""
        tile = f"{self.tile_m}x{self.tile_n}x{BLOCK}"
        cluster = f"cluster {self.cluster_m}x{self.cluster_n}"
        terms = f"{self.terms} terms" if self.terms > 1 else ""
        quantises = f"quantises {self.quantises}" if self.quantises else ""
        words = (tile, cluster, f"{self.num_stages} stages", *words, terms, quantises)
        return ", ".join(filter(None, (*words, *self.flags("evict_first", "per_channel"))))

    def flags(self, *names: str) -> list[str]:
        """The names of the fields that are True."""
        return [name for name in names if getattr(self, name)]

    @property
    def schedule_word(self) -> str:
        return "" if self.schedule is Schedule.STATIC else self.schedule.value

    @property
    def dynamic(self) -> bool:
        return self.schedule is Schedule.DYNAMIC

    @property
    def cluster_size(self) -> int:
        return self.cluster_m * self.cluster_n

    @property
    def consumer_warpgroups(self) -> int:
        """Warpgroups that make a tile's sums."""
        raise NotImplementedError

    @property
    def converter_warpgroups(self) -> int:
        """Warpgroups that make FP8 values of packed weights."""
        return 0

    @property
    def packed_stages(self) -> int:
        """Packed blocks in shared memory, on their way to the converters."""
        return 0

    @property
    def consumer_warps(self) -> int:
        return self.consumer_warpgroups * WARPGROUP_WARPS

    @property
    def gathers_rows(self) -> bool:
        """True if the layer's GEMM1 with this config gathers its rows."""
        return self.swap_ab or self.gathers

    @property
    def row_step(self) -> int:
        """An expert's rows are divided among its tiles in steps of this many rows."""
        return self.tile_m * self.cluster_m

    @property
    def sfb_halves(self) -> int:
        """Weight scales of one K block of a tile: one, or two: of up and gate, or of two blocks."""
        return 2 if self.quantises or self.packed and self.tile_n > BLOCK else 1

    @property
    def channels(self) -> int:
        """Columns of a tile that have a weight scale of their own."""
        return self.tile_n if self.per_channel else 0

    @property
    def interleave(self) -> int:
        """Weight rows of up that lie side by side in a tile with `quantises`, then as many of gate.
        One thread then has up and gate of a column."""
        raise NotImplementedError

    @property
    def warpgroups(self) -> int:
        return self.consumer_warpgroups + self.producer_warpgroups + self.converter_warpgroups

    @property
    def threads(self) -> int:
        return self.warpgroups * WARPGROUP

    @property
    def consumer_registers(self) -> int:
        """Registers of a consumer thread. Threads start with equally many, a multiple of 8, as
        setmaxnreg takes; those that the other warpgroups give away go to the consumers."""
        left = CTA_REGISTERS // self.ctas // self.threads // 8 * 8 * self.warpgroups
        left -= self.producer_warpgroups * PRODUCER_REGISTERS
        left -= self.converter_warpgroups * CONVERTER_REGISTERS
        return min(MAX_CONSUMER_REGISTERS, left // self.consumer_warpgroups // 8 * 8)

    @property
    def stage_readers(self) -> int:
        """Arrivals of a CTA that free a stage: one for each consumer warp."""
        return self.consumer_warps

    @property
    def b_rows(self) -> int:
        """Rows of B in one CTA's shared memory."""
        return self.tile_n

    @property
    def b_bytes(self) -> int:
        """Shared memory of one K block of B in a CTA."""
        if self.packed and not self.converter_warpgroups:
            return self.tile_n // BLOCK * PACKED_BYTES
        return self.b_rows * BLOCK

    @property
    def sfa_rows(self) -> int:
        """Token scales of one K block: those of the tile and 4 more, up to 3 of them before it."""
        return self.tile_m + TMA_ROWS

    @property
    def sfa_bytes(self) -> int:
        """Shared memory of one K block's token scales. TMA writes to multiples of 128 bytes."""
        return -(-self.sfa_rows * 4 // 128) * 128

    @property
    def sfa_stages(self) -> int:
        """K blocks of token scales in shared memory. They come with the rows."""
        return self.num_stages

    @property
    def stage_bytes(self) -> int:
        return self.tile_m * self.terms * BLOCK + self.b_bytes + self.sfa_bytes

    @property
    def staging_bytes(self) -> int:
        """Shared memory of the epilogue: the tile in bfloat16, nothing with two terms."""
        return self.tile_m * self.tile_n * 2 if self.terms == 1 else 0

    @property
    def fixed_bytes(self) -> int:
        """Shared memory beside the stages: staging and scales; in 2048 bytes the barriers, the tile
        queue, the gathered tokens and the alignment."""
        scales = self.consumer_warps * (MAX_SFB + self.channels) * 4
        return self.staging_bytes + scales + 2048 + self.packed_stages * PACKED_BYTES

    @property
    def num_stages(self) -> int:
        """Depth of the load pipeline, with 0 resolved to what fits."""
        return self.stages or (self.smem_limit - self.fixed_bytes) // self.stage_bytes

    @property
    def smem_limit(self) -> int:
        """Shared memory of one of the CTAs of a multiprocessor, each of which takes 1 KiB more."""
        return (SMEM_BYTES + 1024) // self.ctas - 1024

    @property
    def smem_bytes(self) -> int:
        return self.fixed_bytes + self.num_stages * self.stage_bytes


@dataclass(frozen=True)
class GemmConfigSm90(GemmConfig):
    """The config on Hopper; further fields: `GemmConfig`.

    Attributes:
        tile_m: 64, 128 or 192; with `swap_ab` 8, 16, 32, 64 or 128.
        tile_n: 64 or 128. With `quantises` 128, in clusters of (1, 2).
        overlap: a second accumulator. Within an iteration of the main loop (1, 2 or 4 K blocks, or
            all stages) a K block is promoted while the next one runs. Without `unroll` an odd
            number of K blocks gains nothing.
        unroll: an iteration of the main loop covers all stages, so that stage addresses are
            constants. Where the stages do not divide the K blocks it covers up to four; where it
            would cover all K blocks, one.
        gathers: the layer's first GEMM gathers its rows, as with `swap_ab`. Without it a permute
            kernel brings them together first.
        slices: empty 64-row slices of a tile are not loaded. Without `swap_ab` and `gathers`, with
            more than 64 rows.
        packed: weights are MXFP4, packed by `moe_fp8.pack_mxfp4`. With `swap_ab` the consumers make
            FP8 fragments of them in registers: tile_m is a multiple of 8 up to 64, tile_n 256, and
            there is no cluster. Otherwise two warpgroups of converters fill the stages: tile_m is
            64 or 128, tile_n 128, and clusters are (1, 1) or (1, 2).
        ctas: CTAs of a multiprocessor, 2 only with `packed` and `swap_ab`, for up to 32 rows. The
            warps of one then fill the time that those of the other wait.
    """

    overlap: bool = False
    unroll: bool = False
    gathers: bool = False
    slices: bool = False
    packed: bool = False
    ctas: int = 1

    def __post_init__(self) -> None:
        rows: tuple[int, ...] = (8, 16, 32, 64, 128) if self.swap_ab else (64, 128, 192)
        columns: tuple[int, ...] = (BLOCK,) if self.quantises else (64, BLOCK)
        if self.packed:
            rows = tuple(range(8, 72, 8)) if self.swap_ab else (64, 128)
            columns = (2 * BLOCK,) if self.swap_ab else (BLOCK,)
        in_registers = self.packed and self.swap_ab
        self.check(tile_m=rows, tile_n=columns, ctas=(1, 2) if in_registers else (1,))
        if self.packed and (self.cluster_m > 1 or in_registers and self.cluster_n > 1):
            clusters = "(1, 1)" if in_registers else "(1, 1) or (1, 2)"
            raise ValueError(f"{self}: packed weights, expected clusters {clusters}")
        if self.packed and self.per_channel:
            raise ValueError(f"{self}: packed weights have block scales, none of channels")
        if in_registers and (self.overlap or self.unroll):
            raise ValueError(f"{self}: weights in registers, expected neither overlap nor unroll")
        if self.quantises and self.tile_n == BLOCK and self.cluster_n != 2:
            raise ValueError(f"{self}: expected clusters (1, 2), which share the scales")
        if self.slices and (self.swap_ab or self.gathers or self.tile_m == WGMMA_M):
            raise ValueError(f"slices: expected several warpgroups of permuted tokens, got {self}")
        most = self.consumer_registers - OTHER_REGISTERS
        if self.acc_registers > most:
            raise ValueError(
                f"{self}: {self.acc_registers} accumulator registers a thread, "
                f"expected at most {most}"
            )

    @property
    def consumer_warpgroups(self) -> int:
        """Warpgroups that issue WGMMA, each for 64 rows of a tile's MMA, or of its two blocks."""
        rows = self.tile_n if self.swap_ab else self.tile_m
        return rows // self.blocks_of_warpgroup // WGMMA_M

    @property
    def packed_stages(self) -> int:
        return PACKED_STAGES if self.converter_warpgroups else 0

    @property
    def converts_ahead(self) -> bool:
        """True if the consumers convert packed weights while WGMMA multiplies others. With two CTAs
        of a multiprocessor and more than 8 tokens there are too few registers."""
        return self.ctas == 1 or self.tile_m == 8

    @property
    def blocks_of_warpgroup(self) -> int:
        """Blocks of 128 columns of which a warpgroup has 64 rows, with `swap_ab`."""
        return max(self.tile_n // BLOCK, 1) if self.swap_ab else 1

    @property
    def converter_warpgroups(self) -> int:
        return 2 if self.packed and not self.swap_ab else 0

    @property
    def row_step(self) -> int:
        """One warpgroup's rows. In a cluster with several row tiles each tile has a fixed share of
        the cluster's rows."""
        by_rows = self.cluster_m == 1 and not self.swap_ab
        return WGMMA_M if by_rows else super().row_step

    @property
    def interleave(self) -> int:
        """Rows r and r + 8 of the accumulator, or column groups j and j + 8, are a thread's."""
        return 8 if self.swap_ab else self.tile_n // 2

    @property
    def acc_registers(self) -> int:
        """Registers of a consumer thread for the sum and for one or two K blocks, and for A."""
        values = self.tile_m * self.tile_n // (self.consumer_warpgroups * WARPGROUP)
        if self.packed and self.swap_ab:  # of A 16 registers for 64 rows
            return 2 * values + (32 if self.converts_ahead else 0)
        return values * (3 if self.overlap else 2)

    @property
    def staging_bytes(self) -> int:
        """Shared memory of the epilogue. With `quantises`: the FP8 terms of a row's columns, the
        maxima of this CTA's warps (with `swap_ab`), two numbers more (those of the other CTA, or
        scales) and mbarriers: at least the epilogue's `smem_elements`."""
        if not self.quantises:
            return super().staging_bytes
        numbers = 2 + (self.consumer_warps if self.swap_ab else 0)
        row = (self.tile_n // 2 + 16) * self.quantises + 4 * numbers
        return self.tile_m * row + 16 * self.consumer_warpgroups

    def with_swiglu(self, terms: int, few: bool = False) -> "GemmConfigSm90":
        """This config for an epilogue that makes `terms` FP8 terms of up and gate. `few`: the rank
        has at most `LayerRules.one_wave` rows, which matters on Blackwell alone."""
        # Pairs of CTAs make the 128 columns of a scale, unless one CTA has them all.
        return replace(self, cluster_n=2 if self.tile_n == BLOCK else 1, quantises=terms)

    def with_room_for(self, experts: int) -> "GemmConfigSm90":
        """Return this config with as many stages as leave room for the rows of `experts` experts
        (`tiles.expert_rows_smem`), or with its own."""
        if self.stages:
            return self
        left = self.smem_limit - self.fixed_bytes - 2 * 4 * experts
        return replace(self, stages=left // self.stage_bytes)

    def __str__(self) -> str:
        before = self.flags("swap_ab", "overlap")
        return self.one_line(
            *before,
            self.schedule_word,
            *self.flags("unroll", "gathers", "slices", "packed"),
            f"{self.ctas} CTAs" if self.ctas > 1 else "",
        )


@dataclass(frozen=True)
class GemmConfigSm100(GemmConfig):
    """The config on Blackwell; further fields: `GemmConfig`.

    Attributes:
        tile_m: 128; with `swap_ab` 16, 32 or 64.
        tile_n: 64, 128 or 256; with `swap_ab` 128. With `quantises` 256, the up and gate of 128
            columns; with `swap_ab` in clusters of (1, 2) 128, the up or the gate.
        accumulators: K blocks in tensor memory at once; 0 takes as many as fit, up to 4.
        mma_ctas: CTAs that share an MMA. The two CTAs of a cluster (2, 1) hold their own rows of
            the tile and of the accumulator, and half of B each. An MMA of 256 rows reads both
            halves, so a CTA loads and reads half as much of B. Without `swap_ab`.
    """

    accumulators: int = 0
    mma_ctas: int = 1
    producer_warpgroups = 2
    """One that loads, as on Hopper, and one with the MMA and the token scales."""
    sfa_stages = SFA_STAGES
    """Token scales have a pipeline of their own: they may be read after the MMA, when their stage
    of rows may have been filled again."""
    stage_readers = 1
    """The MMA."""

    def __post_init__(self) -> None:
        if self.mma_ctas == 2 and (self.swap_ab or self.cluster_m == 1):
            side = "with swap_ab" if self.swap_ab else "without swap_ab"
            raise ValueError(
                "mma_ctas=2: expected cluster (2, 1) without swap_ab, not "
                f"({self.cluster_m}, {self.cluster_n}) {side}"
            )
        rows = (16, 32, 64) if self.swap_ab else (UMMA_M,)
        columns = (UMMA_M,) if self.swap_ab else (64, 128, 256)
        if self.quantises:
            columns = (BLOCK,) if self.swap_ab and self.cluster_n == 2 else (2 * BLOCK,)
        self.check(mma_ctas=(1, 2), tile_m=rows, tile_n=columns)
        most = min(MAX_ACCUMULATORS, TMEM_COLUMNS // self.acc_columns)
        if self.accumulators < 0 or self.accumulators == 1 or self.accumulators > most:
            raise ValueError(
                f"accumulators={self.accumulators}: expected 0 (as many as fit) or 2 to {most}, "
                f"of {self.acc_columns} of the {TMEM_COLUMNS} columns of tensor memory each"
            )

    @property
    def b_rows(self) -> int:
        return self.tile_n // self.mma_ctas

    @property
    def stage_bytes(self) -> int:
        return super().stage_bytes - self.sfa_bytes

    @property
    def fixed_bytes(self) -> int:
        return super().fixed_bytes + self.sfa_stages * self.sfa_bytes

    @property
    def acc_columns(self) -> int:
        """Columns of one accumulator in a CTA's tensor memory."""
        return self.tile_m * (self.tile_n // UMMA_M) if self.swap_ab else self.tile_n

    @property
    def num_accumulators(self) -> int:
        """Accumulators in tensor memory, with 0 resolved to what fits."""
        return self.accumulators or min(MAX_ACCUMULATORS, TMEM_COLUMNS // self.acc_columns)

    @property
    def tmem_columns(self) -> int:
        """Columns of tensor memory to allocate: a power of two, 32 at least."""
        return max(32, 1 << (self.num_accumulators * self.acc_columns - 1).bit_length())

    @property
    def consumer_warpgroups(self) -> int:
        """Warpgroups that promote. A thread has a lane of tensor memory, and so a row. Two share
        the columns where there are enough; a third would leave a thread too few registers."""
        return 1 if self.swap_ab else min(2, self.acc_columns // TMEM_LOAD_COLUMNS)

    @property
    def consumer_columns(self) -> int:
        """Accumulator columns that one consumer thread promotes."""
        return self.acc_columns // self.consumer_warpgroups

    @property
    def by_pairs(self) -> bool:
        """True if two CTAs hold up and gate of a column."""
        return self.quantises > 0 and self.tile_n == BLOCK

    @property
    def sfb_halves(self) -> int:
        return 1 if self.by_pairs else super().sfb_halves

    @property
    def interleave(self) -> int:
        """The rows of two MMA are a thread's, or the halves of its warpgroup's columns."""
        return UMMA_M if self.swap_ab else self.consumer_columns // 2

    @property
    def staging_bytes(self) -> int:
        """Shared memory of the epilogue: FP8 terms, maxima and, by pairs, the other CTA's sums;
        without `quantises` the tile in bfloat16 or a part. At least its `smem_elements`."""
        if self.quantises:
            rows = self.tile_m // 2 if self.by_pairs else self.tile_m
            sums = 2 * 4 * UMMA_M if self.by_pairs else 0  # of the other CTA, two buffers
            row = (BLOCK + 16) * self.quantises + sums
            return rows * row + self.tile_m * 4 * self.consumer_warps + 16
        if self.swap_ab or self.terms > 1:
            return super().staging_bytes
        return self.consumer_warpgroups * self.tile_m * STAGED_COLUMNS * 2

    def with_swiglu(self, terms: int, few: bool = False) -> "GemmConfigSm100":
        """Return this config with SwiGLU, as on Hopper. With `few` rows pairs of CTAs share a
        tile, because the tiles would give work to less than half of the GPU."""
        pair = few and self.swap_ab
        tile: dict[str, Any] = {"tile_n": BLOCK, "cluster_n": 2} if pair else {"tile_n": 2 * BLOCK}
        return replace(self, **tile, quantises=terms, stages=0, accumulators=0)

    def __str__(self) -> str:
        mma = f"MMA of {self.mma_ctas} CTAs" if self.mma_ctas > 1 else ""
        accumulators = f"{self.num_accumulators} accumulators"
        return self.one_line(accumulators, *self.flags("swap_ab"), self.schedule_word, mma)


class LayerRules(NamedTuple):
    """The fused layer's changes to the configs that an architecture's heuristic picks for a GEMM.

    With few rows (`swap_ab`):
    - Both GEMMs have `stages` stages. So deep a pipeline leaves no room for a CTA of GEMM2 until
      one of GEMM1 is done.
    - GEMM1 gathers its rows. With small tiles and a dynamic GEMM2 it runs in whole waves, so that
      GEMM2 starts on the SMs left over.
    With more rows a permute kernel runs before GEMM1, unless so few columns read each row that
    GEMM1 gathers it (`gathered`). In the layer larger tiles pay from fewer rows on than in the GEMM
    alone (`larger`).

    GEMM2 is dynamic where it starts while GEMM1 runs, because its CTAs start at different times.
    With few K blocks a tile, asking for each tile costs more than the early start gains: then GEMM2
    runs after GEMM1 with a static schedule (`in_order`).

    The last five fields are off by default, for an architecture that was not measured.
    """

    stages: int  # of both GEMMs with few rows
    one_wave: float  # rows on this rank up to which GEMM1 makes one wave and GEMM2 is static
    whole_waves: int  # largest tile_m of a GEMM1 that runs in whole waves
    evict_first: float = 0  # bytes up to which weights leave L2 first, one expert counted per row
    # (tile_m, rows): tiles of at least `tile_m` rows skip empty slices, up to `rows` an expert.
    slices: tuple[int, float] = (0, 0)
    in_order: int = 0  # K blocks of GEMM2 up to which its schedule is static
    # (columns, rows): up to `columns` of GEMM1 and `rows` an expert there is no permute.
    gathered: tuple[int, float] = (0, 0)
    # (above, pick_as): with more than `above` rows an expert, GEMM1 picks its config as for at
    # least `pick_as` rows.
    larger: tuple[float, float] = (math.inf, math.inf)

    def configs(
        self, tokens: int, shape: MoeShape, terms: int, pick: Callable[..., Any]
    ) -> tuple[Any, Any]:
        """Return the configs of GEMM1 and GEMM2 for T tokens, at least one. `pick` is a heuristic's
        `choose`; it is asked for GEMM1, then for GEMM2."""
        rows = expected_rows(tokens * shape.top_k, shape.num_experts)
        h, i = shape.hidden_size, shape.intermediate_size
        above, pick_as = self.larger
        config1 = pick(max(rows, pick_as) if rows > above else rows)
        config2 = pick(rows, terms=terms)
        local_rows = tokens * shape.top_k * shape.num_local_experts / shape.num_experts
        early = not config2.swap_ab or local_rows > self.one_wave  # GEMM2 starts while GEMM1 runs
        early = early and i // BLOCK > self.in_order
        config2 = replace(
            config2,
            stages=self.stages if config2.swap_ab else config2.stages,
            schedule=Schedule.DYNAMIC if early else Schedule.STATIC,
        )
        if config1.swap_ab:
            waves = early and config1.tile_m <= self.whole_waves
            schedule = Schedule.WHOLE_WAVES if waves else Schedule.STATIC
            config1 = replace(config1, stages=self.stages, schedule=schedule)
        else:
            config1 = replace(config1, schedule=Schedule.DYNAMIC)
            columns, most = self.gathered
            if 2 * i <= columns and rows <= most:
                config1 = replace(config1, gathers=True)
        config1 = config1.with_swiglu(terms, few=local_rows <= self.one_wave)
        return tuple(self._with_loads(c, rows, local_rows * 3 * h * i) for c in (config1, config2))

    def _with_loads(self, config: Any, rows: float, bytes_by_row: float) -> Any:
        """Set `slices` and `evict_first`."""
        least, most = self.slices
        if config.tile_m >= least and rows <= most and not (config.swap_ab or config.gathers):
            config = replace(config, slices=True)
        return replace(config, evict_first=bytes_by_row <= self.evict_first)
