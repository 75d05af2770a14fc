"""What is timed on a problem: our kernel with a config, a peer's, or a reading of the weights; and
whether its output is right."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from scripts.measure import gpu
from scripts.measure.operands import Operands, Placed
from scripts.measure.problems import Problem

if TYPE_CHECKING:
    import torch
LAYOUTS = ("batched", "aligned", "flat")

Launch = Callable[[], Any]


@dataclass(frozen=True)
class Call:
    """A launch that is ready to be made, its output and the rows there, in the flat order."""

    launch: Launch
    out: "torch.Tensor"
    rows: "torch.Tensor"

    def poison(self) -> None:
        self.out.fill_(float("nan"))

    def result(self) -> "torch.Tensor":
        return self.out[self.rows]

    def written(self) -> bool:
        """Whether the launch has written its result, poisoned before."""
        import torch

        return bool(torch.isfinite(self.result()).all())


@dataclass(frozen=True)
class Reading:
    """A launch that only reads, and says how much."""

    launch: Launch
    read: "torch.Tensor"  # [CTAs] int64

    def poison(self) -> None:
        self.read.fill_(-1)

    def written(self) -> bool:
        return int(self.read.min()) >= 0


def readings(x: Operands) -> list[Reading]:
    """Launches that only read the active experts' weights, each in another order."""
    import torch

    from scripts.measure.weight_stream import readers

    device = x.a.device
    active = [e for e, rows in enumerate(x.problem.rows) if rows]
    experts = torch.tensor(active, dtype=torch.int32, device=device)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    read = torch.empty(processors, dtype=torch.int64, device=device)
    return [Reading(launch, read) for launch in readers(x.b, experts, read, gpu.gpu_arch())]


@dataclass(frozen=True)
class Variant:
    """A kernel with its name and how to prepare a call on a set of operands."""

    name: str
    prepare: Callable[[Operands], Call]
    peer: bool = False
    config: Callable[[Problem], Any] = lambda problem: None


def heuristic(problem: Problem) -> Any:
    """The config that the heuristic gives who knows the rows, as the solution v3 does."""
    rows, active = problem.mean_rows, problem.active
    choose = gpu.architecture().choose
    return choose(rows, problem.n, problem.k, even=problem.even, experts=active)


def ours(name: str, config: Any = None, layout: str = "flat") -> Variant:
    """Our kernel with a config, with that which a function gives for the problem, or, without
    either, the heuristic's."""
    from moe_fp8.kernels import operations as kernels
    from moe_fp8.layer.rows import batched_rows, flat_rows

    def chosen(problem: Problem) -> Any:
        if config is None:
            return heuristic(problem)
        return config(problem) if callable(config) else config

    def prepare(x: Operands) -> Call:
        p, picked = x.problem, chosen(x.problem)
        if layout == "batched":
            placed = x.batched
            rows = batched_rows(x.rows_per_expert, p.max_rows)
        elif layout == "aligned":
            placed = x.aligned
            rows = x.aligned_rows
        else:
            placed = Placed(x.a, x.a_scale, x.out, x.index)
            rows = flat_rows(x.m_indptr)
        arguments = (placed.a, placed.a_scale, x.b, x.b_scale, placed.out, rows)

        def launch() -> None:
            kernels.grouped_gemm(*arguments, config=picked)

        return Call(launch, placed.out, placed.index)

    return Variant(name, prepare, False, chosen)


class Checker:
    """Outputs against the torch model's, on the fullest, the first and the last active expert."""

    def __init__(self, operands: Operands):
        import torch
        from moe_fp8.layer import model

        x, p = operands, operands.problem
        active = [e for e, rows in enumerate(p.rows) if rows]
        experts = sorted({active[0], active[-1], max(active, key=lambda e: p.rows[e])})
        self.operands = x
        self.expected: list[tuple[slice, torch.Tensor]] = []
        for e in experts:
            begin = sum(p.rows[:e])
            rows = slice(begin, begin + p.rows[e])
            out = x.out.new_empty((p.rows[e], p.n))
            alone = torch.tensor([[0], [p.rows[e]]], dtype=torch.int32, device=out.device)
            b, b_scale = x.b[e : e + 1], x.b_scale[e : e + 1]
            model.grouped_gemm(x.a[rows], x.a_scale[:, rows], b, b_scale, out, alone, None)
            self.expected.append((rows, out))

    def calc_diff(self, variant: Variant) -> float:
        """The largest over these experts; infinite where any row was not written."""
        import torch
        from moe_fp8.layer.metrics import calc_diff

        call = variant.prepare(self.operands)
        call.poison()
        call.launch()
        result = call.result()
        if not bool(torch.isfinite(result).all()):
            return float("inf")
        return max(calc_diff(result[rows], expected) for rows, expected in self.expected)
