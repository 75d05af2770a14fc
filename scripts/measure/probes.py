"""Small kernels that measure what the model of the GEMM assumes of a GPU, in clocks of its
multiprocessors: how long hand-offs take, and what shared memory, L2 and tensor memory give.

Results are named after the fields of `model.Gpu` and `model.Constants` that they replace; the
others are what there is no field for. Imports no DSL before it compiles: the emulator must be in
place first. What the emulator counts is no time.
"""

import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from scripts.measure.alone import emulate

BLOCK = WARPGROUP = 128
FLOPS = {"sm90": 2 * 64 * 64 * BLOCK, "sm100": 2 * 128 * 128 * BLOCK}
"""Of a K block: on Hopper 64 rows of a warpgroup and 64 columns, whose MMA read 128 bytes a clock
of shared memory at full rate, on Blackwell 128 rows and 128 columns, which do so, too."""
READ = {"sm90": (64 + 64) * BLOCK, "sm100": (128 + 128) * BLOCK}
"""Bytes of shared memory that the MMA of a K block read."""
CHUNK = BLOCK * BLOCK
"""Bytes of a TMA load."""


class Sizes(NamedTuple):
    """How much is done in a launch, and how often."""

    rounds: int
    chunks: int
    source: int  # chunks that there are: they stay in L2
    ctas: int
    launches: int


def sizes(emulated: bool) -> Sizes:
    if emulated:
        return Sizes(rounds=3, chunks=10, source=4, ctas=2, launches=1)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    return Sizes(rounds=2000, chunks=4000, source=1024, ctas=processors, launches=5)


NAMES = {
    "sm90": ("handoff", "rates"),  # there is no tensor memory, and no MMA of two CTAs
    "sm100": ("tensor memory", "handoff", "handoff of a pair", "rates"),
}


def family(target: str) -> str:
    return "sm90" if target == "sm_90a" else "sm100"


class Probes:
    """Each compiles its kernels and returns what runs them and names what it found."""

    def __init__(self, target: str, emulated: bool):
        self.target, self.sizes = target, sizes(emulated)
        self.family = family(target)
        self.device = torch.device("cpu" if emulated else "cuda:0")

    def _engine(self, **how: Any) -> Callable[..., list[list[float]]]:
        """A launch of the `Engine` with so many rounds and chunks on so many CTAs, which gives the
        clocks of every CTA, a list for each role."""
        from scripts.measure.probe_kernels import compile_engine

        function = compile_engine(self.target, **how)
        shape = (self.sizes.source * BLOCK, BLOCK)
        source = torch.zeros(shape, dtype=torch.uint8, device=self.device)

        def launch(rounds: int, chunks: int, ctas: int) -> list[list[float]]:
            clocks = torch.zeros((3, ctas), dtype=torch.int64, device=self.device)
            function(source.view(torch.float8_e4m3fn), clocks, chunks, rounds, ctas)
            return clocks.tolist()

        return launch

    def _best(self, launch: Callable[[], float]) -> float:
        """The least of some launches: the first one also loads code."""
        return min(launch() for _ in range(self.sizes.launches))

    def handoff(self, pair: bool = False) -> Callable[[], dict[str, float]]:
        """Clocks of a round with 1 and with 4 K blocks of MMA: what a block adds is the MMA's, what
        is left the hand-off's. Hopper: from the last WGMMA's end to what waits for its group, and
        on to the next WGMMA. Blackwell: commit, the waiting warp, its arrival, the MMA's warp that
        waits for it; of a pair, a waiting warp in each CTA."""
        engines = {blocks: self._engine(blocks=blocks, pair=pair) for blocks in (1, 4)}
        rounds = self.sizes.rounds

        def of(blocks: int) -> float:
            ctas = 1 + pair
            return self._best(lambda: engines[blocks](rounds, 0, ctas)[1][0] / rounds)

        def run() -> dict[str, float]:
            one, four = of(1), of(4)
            block = (four - one) / 3
            if pair:
                return {"pair_handoff_clocks": one - block}
            return {
                "handoff_clocks": one - block,
                "mma_per_clock": ratio(FLOPS[self.family], block),
            }

        return run

    def rates(self) -> Callable[[], dict[str, float]]:
        """TMA loads alone, MMA alone that read their operands again and again, and both at once, as
        long as each other, on all multiprocessors."""
        how = dict(blocks=4, groups=2)
        loads = self._engine(loads=True, blocks=0)
        mma, both = self._engine(**how), self._engine(loads=True, **how)
        rounds, chunks, ctas = self.sizes.rounds, self.sizes.chunks, self.sizes.ctas
        blocks = 4 * (2 if self.family == "sm90" else 1)  # of a round
        read = blocks * READ[self.family]

        def median(launch: Callable[..., list[list[float]]], role: int, *of: int) -> float:
            return self._best(lambda: statistics.median(launch(*of)[role]))

        def run() -> dict[str, float]:
            chunk = median(loads, 0, 0, chunks, ctas) / chunks
            a_round = median(mma, 1, rounds, 0, ctas) / rounds
            together = max(1, min(rounds, round(chunks * chunk / a_round)))
            for _ in range(self.sizes.launches):  # the last one counts
                found = both(together, chunks, ctas)
            load, multiply = (statistics.median(clocks) for clocks in found[:2])
            smem = read / a_round
            # While the MMA ran, so much was written beside it.
            written = CHUNK * chunks * min(1.0, multiply / load)
            late = multiply - together * a_round
            return {
                "l2_per_clock": CHUNK / chunk,
                "smem_per_clock": smem,
                "writes": max(0.0, late * smem / written),
                "l2_per_clock_beside_mma": CHUNK * chunks / load,
                "mma_slower_beside_loads": multiply / (together * a_round),
            }

        return run

    def tensor_memory(self) -> Callable[[], dict[str, float]]:
        """A chain of loads by the four warps of a warpgroup, and bytes a clock of loads that need
        not wait for each other."""
        from scripts.measure.probe_kernels import LOADS, compile_tensor_memory

        shapes = ((16, True), (64, True), (16, False))
        functions = [compile_tensor_memory(self.target, *shape) for shape in shapes]
        clocks = torch.zeros(4, dtype=torch.int64, device=self.device)

        def launch(function: Callable[[torch.Tensor], None]) -> float:
            function(clocks)
            return float(clocks.max())

        def run() -> dict[str, float]:
            x16, x64, free = (
                self._best(functools.partial(launch, function)) / LOADS for function in functions
            )
            found = {"tmem_ld_x16_clocks": x16, "tmem_ld_x64_clocks": x64}
            return found | {"tmem_per_clock": 4 * WARPGROUP * 16 / free}

        return run


def ratio(of: float, to: float) -> float:
    """0 where the emulator's clock gives no difference."""
    return of / to if to > 0 else 0.0


def prepare(name: str, target: str, emulated: bool) -> Callable[[], dict[str, float]]:
    """Compile a probe; see `alone.Prepare`."""
    if emulated:
        emulate(target)
    of = Probes(target, emulated)
    known: dict[str, Callable[[], Callable[[], dict[str, float]]]] = {
        "tensor memory": of.tensor_memory,
        "handoff": of.handoff,
        "handoff of a pair": functools.partial(of.handoff, pair=True),
        "rates": of.rates,
    }
    return known[name]()


def measured(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """What all probes that passed have found, by name."""
    return {k: v for row in rows if row["status"] == "passed" for k, v in row["output"].items()}
