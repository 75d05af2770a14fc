"""Small kernels that measure what the model of the GEMM assumes of a GPU, in clocks of its
multiprocessors: how long hand-offs take, and what shared memory, L2 and tensor memory give.

Results are named after the fields of `model.Gpu` and `model.Constants` that they replace. Imports
no DSL before it compiles: the emulator must be in place first, and what that counts is no time.
"""

import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from scripts.measure.emulated import emulate

BLOCK = 128
CHUNK = BLOCK * BLOCK


class Mma(NamedTuple):
    """The MMA of a K block, whose operands come from shared memory at 128 bytes a clock if they run
    at full rate."""

    rows: int
    columns: int
    probes: tuple[str, ...]  # that its architecture has

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.columns * BLOCK

    @property
    def read(self) -> int:
        return (self.rows + self.columns) * BLOCK


HOPPER = Mma(64, 64, ("handoff", "rates"))  # no tensor memory, no MMA of two CTAs
BLACKWELL = Mma(128, 128, ("tensor memory", "handoff", "handoff of a pair", "rates"))


def mma_of(target: str) -> Mma:
    return HOPPER if target == "sm_90a" else BLACKWELL


class Sizes(NamedTuple):
    """How much is done in a launch, and how often."""

    rounds: int
    chunks: int
    source: int  # chunks that there are: they stay in L2
    ctas: int
    launches: int


Run = Callable[[], dict[str, float]]
"""Launches what was compiled, and names what it found."""


class Probes:
    def __init__(self, target: str, emulated: bool):
        self.target, self.mma = target, mma_of(target)
        self.device = torch.device("cpu" if emulated else "cuda:0")
        self.sizes = Sizes(rounds=3, chunks=10, source=4, ctas=2, launches=1)
        if not emulated:
            processors = torch.cuda.get_device_properties(0).multi_processor_count
            self.sizes = Sizes(1000, 4000, 1024, processors, launches=5)

    def engine(self, **how: Any) -> Callable[[int, int, int], list[float]]:
        """A launch of the `Engine` with so many rounds and chunks on so many CTAs, which gives the
        clocks of its loads and of its MMA, the medians of the CTAs that did either."""
        from scripts.measure.probe_kernels import compile_engine

        function = compile_engine(self.target, **how)
        shape = (self.sizes.source * BLOCK, BLOCK)
        source = torch.zeros(shape, dtype=torch.uint8, device=self.device)

        def launch(rounds: int, chunks: int, ctas: int) -> list[float]:
            for _ in range(self.sizes.launches):  # the last one counts: the first loads code
                clocks = torch.zeros((2, ctas), dtype=torch.int64, device=self.device)
                function(source.view(torch.float8_e4m3fn), clocks, chunks, rounds, ctas)
            return [statistics.median(list(filter(None, of)) or [0]) for of in clocks.tolist()]

        return launch

    def handoff(self, pair: bool = False) -> Run:
        """Clocks of a round with 1 and with 4 K blocks of MMA: what a block adds is the MMA's, what
        is left the hand-off's. Hopper: from the last WGMMA's end to what waits for its group, and
        on to the next WGMMA. Blackwell: commit, the waiting warp, its arrival, the MMA's warp that
        waits for it; of a pair, a waiting warp in each CTA."""
        engines = [self.engine(blocks=blocks, pair=pair) for blocks in (1, 4)]
        rounds = self.sizes.rounds

        def run() -> dict[str, float]:
            one, four = (engine(rounds, 0, 1 + pair)[1] / rounds for engine in engines)
            block = (four - one) / 3
            if pair:
                return {"pair_handoff_clocks": one - block}
            block = max(1.0, block)  # the emulator's MMA take no time
            rates = {
                "mma_per_clock": self.mma.flops / block,
                "smem_per_clock": self.mma.read / block,
            }
            return {"handoff_clocks": one - block, **rates}

        return run

    def rates(self) -> Run:
        """TMA loads alone, MMA alone that read their operands again and again, and both at once, as
        long as each other, on all multiprocessors."""
        blocks, (rounds, chunks, _, ctas, _) = 16, self.sizes
        loads, mma = self.engine(loads=True), self.engine(blocks=blocks)
        both = self.engine(loads=True, blocks=blocks)

        def run() -> dict[str, float]:
            load_alone, mma_alone = loads(0, chunks, ctas)[0], mma(rounds, 0, ctas)[1]
            together = max(1, round(rounds * load_alone / mma_alone))
            load, multiply = both(together, chunks, ctas)
            alone = mma_alone * together / rounds
            # While the MMA ran, so much was written beside it; what it reads it reads at its rate.
            written = CHUNK * chunks * min(1.0, multiply / load)
            smem = together * blocks * self.mma.read / alone
            return {
                "l2_per_clock": CHUNK * chunks / load_alone,
                "writes": max(0.0, (multiply - alone) * smem / written),
                "l2_per_clock_beside_mma": CHUNK * chunks / load,
                "mma_slower_beside_loads": multiply / alone,
            }

        return run

    def tensor_memory(self) -> Run:
        """A chain of loads by the four warps of a warpgroup, of 64 columns as the kernel has them
        and of 16, and bytes a clock of loads that need not wait for each other."""
        from scripts.measure.probe_kernels import LOADS, compile_tensor_memory

        shapes = ((16, True), (64, True), (16, False))
        functions = [compile_tensor_memory(self.target, *shape) for shape in shapes]
        clocks = torch.zeros(4, dtype=torch.int64, device=self.device)

        def of(function: Callable[[torch.Tensor], None]) -> float:
            for _ in range(self.sizes.launches):
                function(clocks)
            return float(clocks.max()) / LOADS

        def run() -> dict[str, float]:
            x16, x64, free = map(of, functions)
            found = {"tmem_ld_x16_clocks": x16, "tmem_clocks": x64}
            return found | {"tmem_per_clock": 4 * 128 * 16 / free}

        return run


def prepare(name: str, target: str, emulated: bool) -> Run:
    """Compile a probe; see `alone.Prepare`."""
    if emulated:
        emulate(target)
    of = Probes(target, emulated)
    known: dict[str, Callable[[], Run]] = {
        "tensor memory": of.tensor_memory,
        "handoff": of.handoff,
        "handoff of a pair": functools.partial(of.handoff, pair=True),
        "rates": of.rates,
    }
    return known[name]()


def measured(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    return {k: v for row in rows if row["status"] == "passed" for k, v in row["output"].items()}
