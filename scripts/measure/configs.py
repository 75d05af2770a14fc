"""The GEMM configs of an architecture, those that ship and those that `tune` tries, and whether
each computes what it should.

Imports no DSL: the emulator must be in place first, see `alone`.
"""

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from moe_fp8.kernels.architectures import of_target
from moe_fp8.kernels.tile_config import Schedule
from moe_fp8.layer import model
from moe_fp8.layer.metrics import calc_diff
from moe_fp8.layer.rows import flat_rows
from moe_fp8.numerics import BLOCK, TMA_ROWS, round_up
from moe_fp8.problem import DEEPSEEK_V3, MoeInputs, MoeShape

from scripts.measure.alone import Row, WrongError
from scripts.measure.emulated import emulate
from scripts.measure.gemm_problems import LAYER_SHAPES, ROWS

# --- which there are ------------------------------------------------------------------------------

Space = dict[str, Sequence[Any]]
"""Values of a config's fields; its configs are all combinations that the class takes."""


def swapped(tiles: Sequence[int], rows: float) -> Space:
    """With swapped operands, and tile heights that are worth a try for so many rows."""
    heights = [tile for tile in tiles if rows / 2 <= tile <= max(tiles[0], 4 * rows)]
    return {"swap_ab": [True], "tile_m": heights, "cluster_n": (1, 2), "stages": (0, 6)}


def schedules(rows: float) -> tuple[Schedule, ...]:
    """Tiles on demand are for many of them."""
    return (Schedule.STATIC, Schedule.DYNAMIC) if rows > 64 else (Schedule.STATIC,)


def spaces_sm90(rows: float) -> Iterator[Space]:
    yield {**swapped((8, 16, 32, 64, 128), rows), "tile_n": (64, 128)}
    clusters = {"cluster_m": (1, 2), "cluster_n": (1, 2)}
    tiles = {"tile_m": (64, 128, 192), "tile_n": (64, 128)}
    if rows >= 16:
        yield {**tiles, **clusters, "schedule": schedules(rows), "overlap": (False, True)}
    if rows > 64:
        # Constants in the main loop are for large tiles.
        large: Space = {
            "tile_m": [192],
            "schedule": [Schedule.DYNAMIC],
            "unroll": [True],
            "stages": [4],
        }
        yield {**large, **clusters}


def spaces_sm100(rows: float) -> Iterator[Space]:
    # Accumulators: the fewest, and as many as fit, against one in the making and one read.
    accumulators = {"accumulators": (2, 0)}
    yield {**swapped((16, 32, 64), rows), **accumulators}
    if rows >= 16:
        clusters = {"cluster_m": (1, 2), "cluster_n": (1, 2), "mma_ctas": (1, 2)}
        tiles = {"tile_n": (64, 128, 256), **clusters, "schedule": schedules(rows)}
        yield {**tiles, "stages": (0, 4), **accumulators}


SPACES = {"sm90": spaces_sm90, "sm100": spaces_sm100}
"""By the folder of the architecture's kernels: what is worth timing for experts with about so many
rows."""


def candidates(rows: float, architecture: Any) -> list[Any]:
    """Its legal configs worth timing for experts with about so many rows, each once."""
    cls = type(architecture.config)
    found: dict[str, Any] = {}
    for space in SPACES[cls.__module__.split(".")[-2]](rows):
        for values in itertools.product(*space.values()):
            with contextlib.suppress(ValueError):
                config = cls(**dict(zip(space, values, strict=True)))
                # By what they say: 0 stages and the number that fits are the same config.
                found.setdefault(str(config), config)
    return list(found.values())


TOKENS = (*range(1, 256), *range(256, 32768, 32))
"""Every config of the layer ships for some of these."""


class Job(NamedTuple):
    """A config of the GEMM alone, or the two of a layer whose intermediate has so many terms."""

    configs: tuple[Any, ...]
    terms: int = 1

    def __str__(self) -> str:
        terms = "one term" if self.terms == 1 else "two terms"
        of = f"layer, {terms}" if len(self.configs) > 1 else "GEMM"
        return f"{of}: {' + '.join(map(str, self.configs))}"


def jobs(target: str, shipped: bool = False) -> list[Job]:
    """Those that ship: in the layer, with SwiGLU after the first GEMM and one and two terms in the
    second, and of the GEMM alone; then, unless `shipped`, all that `tune` tries."""
    of = of_target(target)
    shapes = LAYER_SHAPES.values()
    layers = dict.fromkeys(
        Job(of.choose_layer(tokens, DEEPSEEK_V3, terms), terms)
        for terms in (1, 2)
        for tokens in TOKENS
    )
    alone = dict.fromkeys(
        Job((of.choose(rows, n, k, even=even, experts=experts),))
        for (n, k), even, experts in itertools.product(shapes, (False, True), (None, 1, 8, 32))
        for rows in ROWS
    )
    tried = [Job((config,)) for rows in ROWS for config in candidates(rows, of)]
    found = [*layers, *alone, *([] if shipped else tried)]
    return list({str(job): job for job in found}.values())


# --- what each must compute -----------------------------------------------------------------------


class Place(NamedTuple):
    """Where a config runs, and on what: rows of every expert in the GEMM, tokens of the layer."""

    target: str
    emulated: bool
    n: int
    k: int
    rows: tuple[int, ...]
    shape: MoeShape
    tokens: int

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.emulated else "cuda:0")


RAGGED = (0, 1, 17, 65, 128, 200)
"""None, one, few, half a tile, a whole one, more."""
SMALL = MoeShape(num_experts=16, num_local_experts=5, hidden_size=384, intermediate_size=256,
                 n_group=4, topk_group=2, top_k=3)  # fmt: skip
EMULATED_CTAS = 4
MOST_DIFFERENT = {1: 3e-4, 2: 3e-5}
"""calc_diff of a layer and its model, by terms: Hopper adds in 14 bits, and what lies next to the
middle between two FP8 values goes one way or the other. Without the second term it is 2.7e-4."""


def place(target: str, emulated: bool) -> Place:
    """On a GPU the layer's own sizes, whose kernels the steps of a record find compiled."""
    if emulated:
        return Place(target, True, 512, 512, RAGGED, SMALL, 140)
    n, k = DEEPSEEK_V3.hidden_size, DEEPSEEK_V3.intermediate_size
    return Place(target, False, n, k, (*RAGGED, 3, 450), DEEPSEEK_V3, 300)


Run = Callable[[], str]
"""Runs what was compiled, raises WrongError, or returns a digest of the output."""


def prepare(job: Job, target: str, emulated: bool) -> Run:
    """Compile the kernels of a job; see `alone.Prepare`."""
    at = place(target, emulated)
    if emulated:
        emulate(target)
    from moe_fp8.kernels import operations

    if emulated:
        of: Any = operations
        of.target_of, of.multiprocessors_of = lambda _: target, lambda _: EMULATED_CTAS
    if len(job.configs) > 1:
        call = operations.fused_call(at.tokens, at.device, at.shape, job.terms, job.configs)
        return lambda: run_layer(call, job.terms, at)
    operations.compile_grouped_gemm(job.configs[0], at.n, at.k, len(at.rows), target)
    return lambda: run_gemm(operations.grouped_gemm, job.configs[0], at)


def run_gemm(grouped_gemm: Callable[..., None], config: Any, at: Place) -> str:
    """On small integers and powers of two, whose sums are exact in any order; what lies beside the
    experts' rows is NaN, or must stay as it is."""
    torch.manual_seed(at.n)
    total = round_up(sum(at.rows), TMA_ROWS) + TMA_ROWS
    experts, device = len(at.rows), at.device

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, device=device).float()

    a, b = (integers(*s).to(torch.float8_e4m3fn) for s in ((total, at.k), (experts, at.n, at.k)))
    a_scale = 2.0 ** integers(at.k // BLOCK, total)
    b_scale = -(2.0 ** integers(experts, at.n // BLOCK, at.k // BLOCK))
    a.view(torch.uint8)[sum(at.rows) :] = 0x7F
    a_scale[:, sum(at.rows) :] = torch.nan
    ends = torch.tensor([0, *at.rows], dtype=torch.int32, device=device).cumsum(0).int()
    wanted = torch.full((total, at.n), -7.0, dtype=torch.bfloat16, device=device)
    out = wanted.clone()
    model.grouped_gemm(a, a_scale, b, b_scale, wanted, flat_rows(ends))
    grouped_gemm(a, a_scale, b, b_scale, out, flat_rows(ends), config)
    if not torch.equal(out, wanted):
        wrong = (out != wanted).any(dim=1)
        of = [e for e in range(experts) if wrong[int(ends[e]) : int(ends[e + 1])].any()]
        beside = "; rows of no expert are written" if wrong[sum(at.rows) :].any() else ""
        error = float((out.float() - wanted.float()).abs().max())
        rows = ", ".join(str(at.rows[e]) for e in of)
        raise WrongError(f"off by up to {error:g}, in experts with {rows or 'no'} rows{beside}")
    return digest(out)


def run_layer(call: Callable[..., None], terms: int, at: Place) -> str:
    """Drawn as flashinfer-bench does, but for one expert that all tokens choose."""
    torch.manual_seed(at.tokens)
    s, t, device = at.shape, at.tokens, at.device
    e, h, i, first = s.num_local_experts, s.hidden_size, s.intermediate_size, s.num_local_experts

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device)

    def fp8(*shape: int) -> torch.Tensor:
        return normal(*shape).clamp_(-2, 2).to(torch.float8_e4m3fn)

    bias = torch.zeros(s.num_experts, device=device)
    bias[first + 1] = 2.0
    inputs = MoeInputs(
        normal(t, s.num_experts), bias.bfloat16(), fp8(t, h), normal(h // BLOCK, t),
        fp8(e, 2 * i, h), normal(e, 2 * i // BLOCK, h // BLOCK),
        fp8(e, h, i), normal(e, h // BLOCK, i // BLOCK), first, 2.5,
    )  # fmt: skip
    wanted = torch.full((t, h), torch.nan, dtype=torch.bfloat16, device=device)
    out = wanted.clone()
    model.fused(inputs, wanted, s, terms)
    call(inputs, out)
    difference = calc_diff(out, wanted)
    if not difference < MOST_DIFFERENT[terms]:  # nor NaN
        raise WrongError(f"calc_diff {difference:.1e} (rounding: {MOST_DIFFERENT[terms]:.0e})")
    return digest(out)


def digest(out: torch.Tensor) -> str:
    return hashlib.sha256(out.cpu().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def odd_ones(rows: Sequence[Row]) -> list[Row]:
    """Those whose output has other bits than most of their kind have: all configs must give the
    same, of the GEMM and of a layer with so many terms."""
    of_kind: dict[str, list[Row]] = {}
    for row in rows:
        if row["status"] == "passed":
            of_kind.setdefault(row["job"].split(":")[0], []).append(row)
    found = []
    for kind in of_kind.values():
        outputs = [row["output"] for row in kind]
        usual = max(outputs, key=outputs.count)
        found += [row for row in kind if row["output"] != usual]
    return found
