"""Every GEMM config of an architecture that ships, and what each must compute.

`test_as_shipped.py` runs `main` in a process of its own; the emulator runs a few of them.
"""

import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from moe_fp8 import reference
from moe_fp8.kernels import architectures
from moe_fp8.kernels.grouped_gemm import compile_grouped_gemm
from moe_fp8.ladder import steps
from moe_fp8.layer import make_call
from moe_fp8.reference import calc_diff
from moe_fp8.shape import DEEPSEEK_V3, MoeShape
from problems import gemm, layer_inputs

from scripts.measuring.gemm import LAYER_SHAPES

TOKENS = (*range(1, 256), *range(256, 32768, 32))
"""Every config of the layer ships for some of these."""
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048)
"""Rows of an expert: every config of the GEMM alone ships for some of these."""
MOST_DIFFERENT = {1: 3e-4, 2: 3e-5}
"""calc_diff of a layer and its model, by terms: Hopper adds in 14 bits, and what lies next to the
middle between two FP8 values goes one way or the other. Without the second term it is 2.7e-4."""


# --- which there are ------------------------------------------------------------------------------


class Job(NamedTuple):
    """The config of a GEMM alone, or the two configs of a layer with so many terms."""

    configs: tuple[Any, ...]
    terms: int = 1

    @property
    def kind(self) -> str:
        """All jobs of a kind must give the same bits."""
        return f"layer, terms={self.terms}" if len(self.configs) > 1 else "GEMM"

    def __str__(self) -> str:
        return f"{self.kind}: {' + '.join(map(str, self.configs))}"


def shipped(target: str) -> list[Job]:
    """Return the jobs of all configs: the layer with one and two terms, and the GEMM alone."""
    architecture = architectures.of_target(target)
    layers = dict.fromkeys(
        Job(architecture.choose_layer(tokens, DEEPSEEK_V3, terms), terms)
        for terms in (1, 2)
        for tokens in TOKENS
    )
    alone = dict.fromkeys(Job((architecture.choose(rows),)) for rows in ROWS)
    return [*layers, *alone]


# --- what each must compute -----------------------------------------------------------------------


class Sizes(NamedTuple):
    """Rows of every expert in the GEMM; tokens of the layer."""

    n: int
    k: int
    rows: tuple[int, ...]
    shape: MoeShape
    tokens: int


OF_THE_LAYER = Sizes(*LAYER_SHAPES["gemm2"], (0, 1, 17, 65, 128, 200, 3, 450), DEEPSEEK_V3, 300)
"""None, one, few, half a tile, a whole one, more."""


def wrong(todo: Iterable[Job], at: Sizes, device: torch.device) -> Iterator[str]:
    """Run the jobs, each named before it begins; yields those that are wrong and how."""
    with device:
        problem = gemm(at.rows, at.n, at.k, 0, exact=True, layout="flat")
        bias, offset = torch.zeros(at.shape.num_experts), at.shape.num_local_experts
        bias[offset + 1] = 2.0  # an expert that all tokens choose
        inputs = layer_inputs(at.shape, at.tokens, bias.bfloat16(), offset, 2.5)
    wanted = {"GEMM": problem.expected}
    first: dict[str, torch.Tensor] = {}
    for job in todo:
        print(job, flush=True)
        if job.kind not in wanted:
            wanted[job.kind] = torch.full_like(inputs.hidden_states, 0, dtype=torch.bfloat16)
            reference.fused(inputs, wanted[job.kind], at.shape, job.terms)
        of_model = wanted[job.kind]
        if job.kind == "GEMM":
            out = problem.output()
            steps.grouped_gemm(*problem[:4], out, problem.expert_rows, job.configs[0])
            if not torch.equal(out, of_model):
                at_rows = (out != of_model).any(dim=1).nonzero().flatten().tolist()
                yield f"{job}: not as the model in {len(at_rows)} rows, the first is {at_rows[0]}"
        else:
            out = torch.full_like(of_model, torch.nan)
            make_call(at.tokens, device, at.shape, job.terms, job.configs)(inputs, out)
            difference = calc_diff(out, of_model)
            if not difference < MOST_DIFFERENT[job.terms]:  # nor NaN
                yield f"{job}: calc_diff {difference:.1e}"
            if not torch.equal(out, first.setdefault(job.kind, out)):
                yield f"{job}: other bits than the first config of its kind"


def compile_job(job: Job) -> None:
    """Leave a job's kernels in the cache on disk."""
    device, at = torch.device("cuda:0"), OF_THE_LAYER
    if job.kind == "GEMM":
        target = architectures.of_device(device).target
        compile_grouped_gemm(job.configs[0], at.n, at.k, len(at.rows), target)
    else:
        make_call(at.tokens, device, at.shape, job.terms, job.configs)


def main() -> None:
    """Run all jobs of this GPU. The exit status is 1 if one of them is wrong."""
    device = torch.device("cuda:0")
    target = architectures.of_device(device).target
    errors = list(wrong(shipped(target), OF_THE_LAYER, device))
    sys.exit("\n".join(errors) or 0)
