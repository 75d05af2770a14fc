"""The tiles of all experts, as a warp looks them up."""

import functools

import cutlass.cute as cute
import pytest
import torch
from cuda.bindings import driver as cuda
from cutlass import Int32
from markers import backends
from moe_fp8.cache import CACHE_VARIABLE
from moe_fp8.kernels.compile import Extent, Scalar, Tensor, compiled
from moe_fp8.kernels.tiles import WARP, ExpertTiles, rows_of_lane

pytestmark = backends("emulator")
TILE_M, N_TILES = 192, 3


class Lookup:
    """`found[i]` is the tile at position `i`."""

    def __init__(self, step: int):
        self.step = step

    @cute.jit
    def __call__(self, expert_rows: cute.Tensor, out: cute.Tensor, n: Int32, stream: cuda.CUstream):
        self.kernel(expert_rows, out, n).launch(grid=[1, 1, 1], block=[WARP, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, expert_rows: cute.Tensor, out: cute.Tensor, n: Int32):
        lane, _, _ = cute.arch.thread_idx()
        rows = rows_of_lane(expert_rows)
        tiles = ExpertTiles(rows, expert_rows, TILE_M, N_TILES, self.step)
        total = tiles.total()
        for linear in range(n):
            tile = tiles.locate(linear)
            if lane == 0:
                out[linear, 0] = tile.expert
                out[linear, 1] = tile.n_tile
                out[linear, 2] = tile.row
                out[linear, 3] = tile.rows
                out[linear, 4] = total


def look_up(counts: list[int], n: int, step: int, apart: int = 0) -> list[list[int]]:
    """Return the tiles at `n` positions. The table's row stride is `apart` more than its width."""
    experts = len(counts)
    arguments = (
        Tensor(Int32, (2, experts), align=4, strides=(Extent("apart"), 1)),
        Tensor(Int32, (Extent("positions"), 5), align=4),
        Scalar(Int32),
    )
    out = torch.full((n, 5), -1, dtype=torch.int32)
    starts = torch.arange(experts) * 1000
    expert_rows = torch.full((2, experts + apart), -1, dtype=torch.int32)[:, :experts]
    expert_rows[0], expert_rows[1] = starts, starts + torch.tensor(counts)
    compiled(Lookup, (step,), arguments, "sm_90a")(expert_rows, out, n)
    return out.tolist()


@pytest.mark.parametrize("step", [64, TILE_M])
@pytest.mark.parametrize(
    "counts",
    [
        [5],
        [0, 192, 0, 193],
        [700, 1, 0, 64, 448],
        [1] * WARP,
        [*[0] * 40, 5, *[0] * 30, 193],  # three experts a lane, of which many have none
        [1 if e % 5 else 0 for e in range(384)],
    ],
    ids=lambda counts: f"{len(counts)} experts, {sum(counts)} rows",
)
def test_every_row_is_in_one_tile_of_every_column(counts, step, emulator):
    tiles = N_TILES * sum(-(-count // TILE_M) for count in counts)
    located = look_up(counts, tiles, step)
    covered = [
        (expert, column, row + i - 1000 * expert)
        for expert, column, row, rows, _ in located
        for i in range(min(rows, TILE_M))  # in tiles of one step `rows` are all that follow
    ]
    assert sorted(covered) == [
        (expert, column, i)
        for expert, count in enumerate(counts)
        for column in range(N_TILES)
        for i in range(count)
    ]
    assert [expert for expert, *_ in located] == sorted(expert for expert, *_ in located)
    assert all(rows > 0 and total == tiles for *_, rows, total in located)
    assert emulator.reports[-1].hazards == []


def test_boundaries_may_lie_any_distance_apart(emulator):
    assert look_up([5, 200], 9, 64, apart=7) == look_up([5, 200], 9, 64)


def test_tiles_are_found_by_the_shuffle_of_dsl_4_6(emulator, monkeypatch):
    """DSL 4.6's default lets no lane read another."""
    kind = cute.arch.shuffle_sync_up.keywords["kind"]
    of_4_6 = functools.partial(cute.arch.shuffle_sync_op, kind=kind)
    wanted = look_up([5, 200], 9, 64)
    monkeypatch.setattr(cute.arch, "shuffle_sync_up", of_4_6)
    monkeypatch.setenv(CACHE_VARIABLE, "")  # it would hold what was compiled with the other
    assert look_up([5, 200], 9, 64) == wanted


@pytest.mark.parametrize("experts", [32, 33, 1024])
@pytest.mark.parametrize("step", [64, TILE_M])
def test_without_rows_a_tile_has_none(step, experts, emulator):
    """A warp looks its first tile up before it knows that there is none."""
    ((_, n_tile, _, rows, total),) = look_up([0] * experts, 1, step)
    assert (n_tile, rows, total) == (0, 0, 0)
