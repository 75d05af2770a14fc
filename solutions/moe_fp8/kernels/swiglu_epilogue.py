"""SwiGLU and FP8 requantisation of a tile's sums: what the architectures' epilogues share.

Half of a tile's columns are rows of the weights' first half, half are the same rows of the second
one: up and gate, or, with `gate_first`, gate and up. They are interleaved so that one thread has up
and gate of a column: the weights are viewed as a tensor of rank 5, whose copy is one TMA
instruction.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64

from ..numerics import BLOCK
from ..problem import SILU, Swiglu
from .epilogue import Epilogue
from .handoff import announce
from .swiglu_quant import of_gate, of_up
from .tiles import Tile
from .vectors import E4M3_VECTOR, vector


class Quantised(NamedTuple):
    """What the epilogue writes."""

    q: cute.Tensor  # (rows, terms * n / 2) e4m3
    scale: cute.Tensor  # (n / 256, rows) f32
    counts: cute.Tensor | None = None  # (experts,) i32: of what is stored, see `handoff`


class SwigluEpilogue(Epilogue):
    """`c = silu(gate) * up` of the float32 sums, or what else `swiglu` says, `q = fp8(c / scale)`,
    `scale = amax(|c|) / 448`.

    A scale covers a row's 128 columns. With two terms the rounding error of the first FP8 value is
    a second one, stored after the first ones: `q[:, n / 2:] = fp8(c / scale - q[:, :n / 2])`. It is
    at most 1/16 of the value and needs no scale of its own: 2^-10, where FP8 ends, is 2e-6 of the
    largest.

    The arithmetic is that of `SwigluQuant`, but up and gate are not rounded: a row's bits depend
    neither on the other rows nor on the config or the architecture. What derives from it, for an
    architecture, names its staging buffer, `rows` (tile_m, columns, terms) e4m3, and stores a tile.
    `terms`: FP8 values of a result; `gate_first`: the first half of the weights' rows are those of
    gate.
    """

    n_halves = 2
    staging_type = Float8E4M3FN
    columns = BLOCK
    """Of the result that a tile makes."""

    def __init__(
        self, config: Any, operands: Any, n: int, terms: int = 1, gate_first: bool = False,
        swiglu: Swiglu = SILU, ue8m0: bool = False,
    ):  # fmt: skip
        if config.quantises != terms or n % (2 * BLOCK):
            raise ValueError(
                f"{config}, n={n}: expected quantises={terms} and n a multiple of {2 * BLOCK}"
            )
        super().__init__(config, operands, n)
        self.terms = terms
        self.gate_first = gate_first
        self.swiglu, self.ue8m0 = swiglu, ue8m0
        self.intermediate = n // 2
        self.warps = config.consumer_warps
        # That have maxima of their own, of a token: a warp's columns, or a warpgroup's.
        self.column_groups = self.warps if config.swap_ab else config.consumer_warpgroups
        self.rows = config.tile_m  # that a tile makes
        self.parts = self.columns // E4M3_VECTOR  # accesses of a row
        # Bytes from a staged row to the next: 8 rows of a column then lie in different banks.
        self.pitch = self.columns + E4M3_VECTOR

    def weights(self, b: cute.Tensor) -> cute.Tensor:
        """In the host function: (n, k, experts), the rows of B in the order of tile columns."""
        experts, n, k = (cute.size(b, mode=[i]) for i in range(3))
        group = self.operands.interleave
        shape = ((group, 2, self.intermediate // group), k, experts)
        stride = ((k, self.intermediate * k, group * k), 1, n * k)
        return cute.make_tensor(b.iterator, cute.make_layout(shape, stride=stride))

    def activated(self, sums: cute.Tensor, first: int, second: int) -> Float32:
        """`c` of a column; `first` is the place of its sum over the weights' first half, `second`
        of the one over the second half."""
        gate, up = (first, second) if self.gate_first else (second, first)
        return of_gate(sums[gate], self.swiglu) * of_up(sums[up], self.swiglu)

    def scale_block(self, n_tile: Int32, half: int, warpgroup: Int32) -> Int32:
        """Row of the B scales for a tile's columns over the first (0) or second (1) half."""
        return (half * self.intermediate + n_tile * self.columns) // BLOCK

    def staged_rows(self, base: cute.Pointer) -> cute.Tensor:
        """The rows of the staging buffer, which begin at `base`."""
        shape = (self.rows, self.columns, self.terms)
        stride = (self.pitch, 1, self.rows * self.pitch)
        return cute.make_tensor(base, cute.make_layout(shape, stride=stride))

    def staged_bytes(self) -> int:
        """Of the rows of the staging buffer."""
        return self.rows * self.pitch * self.terms

    def output(self, out: tuple) -> Quantised:
        """In the host function: `out` as in `Quantised`."""
        return Quantised(*out)

    @cute.jit
    def _announce_tile(self, output: Quantised, tile: Tile, thread: Int32, barrier):
        """Tell the next kernel that this CTA's part of a tile is stored, where it asked for it."""
        if cutlass.const_expr(output.counts is not None):
            barrier.arrive_and_wait()
            if thread == 0:
                self._announce_rows(output, tile, 0, self.rows)

    @cute.jit
    def _announce_rows(self, output: Quantised, tile: Tile, first: Int32 | int, count: int):
        """The same for some of its rows; by one of the threads that stored them."""
        rows = cutlass.min(tile.rows - first, count)  # tile.rows may reach past the tile
        if rows > 0:
            announce(output.counts, tile.expert, rows * self.columns)

    def _largest(self, staging: Any, token: Int32) -> Int32:
        """The maximum over this CTA's columns."""
        amax = Int32(0)
        for group in range(self.column_groups):
            amax = cutlass.max(amax, staging.amax[group, token])
        return amax

    def _next_term(self, values: cute.Tensor, quantised: cute.Tensor, term: int) -> None:
        """The values' FP8 term; before a later one, what the one before has left of them."""
        if term > 0:
            values.store(values.load() - quantised.load().to(Float32))
        quantised.store(values.load().to(Float8E4M3FN))

    def _staged(self, staging: Any, row: Int32, term: int) -> cute.Pointer:
        """Where a term of a row is staged."""
        return staging.rows.iterator + (term * self.rows + row) * self.pitch

    @cute.jit
    def _store_part(self, output: Quantised, staging: Any, tile: Tile, row: Int32, part: Int32):
        """16 bytes of each term of a row that the tile's expert has."""
        if row < tile.rows:
            source = self._staged(staging, row, 0) + part * E4M3_VECTOR
            start = Int64(tile.row + row) * (self.terms * self.intermediate)
            target = output.q.iterator + start + tile.n_tile * self.columns + part * E4M3_VECTOR
            for t in cutlass.range_constexpr(self.terms):
                of_term = source + t * self.rows * self.pitch
                there = vector(target + t * self.intermediate, E4M3_VECTOR)
                cute.autovec_copy(vector(of_term, E4M3_VECTOR), there)
