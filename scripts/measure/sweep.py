"""Calls on one number of tokens after the other: whether they are right, the time by both clocks,
and the floor. All calls of a number of tokens take turns; what fails costs no other its row."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from flashinfer_bench.data import Definition
from moe_fp8.layer.metrics import calc_diff
from moe_fp8.problem import MoeInputs

from scripts.common.floors import floor_ms
from scripts.common.project import PREFIX
from scripts.measure import floors
from scripts.measure.check import both_times, run_reference
from scripts.measure.gemm_problems import counted
from scripts.measure.gpu import Rates
from scripts.measure.stages import Problems
from scripts.measure.timing import Timed, attempt

TOKENS = tuple(2**i for i in range(15))
PEERS = ("triton_moe", "deepgemm_moe", "hpc_ops_moe")
SOLUTIONS = (*(PREFIX + name for name in ("fused", "fused_hifi", "flat")), *PEERS)
LARGEST_DIFF = 2e-3
"""calc_diff to the reference in float32; an intermediate in FP8 alone makes 3e-4."""

Calls = Callable[[MoeInputs], tuple[MoeInputs, Mapping[str, Callable[[], Timed]]]]
"""Of inputs those that the reference is to be given, and what prepares each call, by name."""


def solutions_on(
    definition: Definition,
    inputs: MoeInputs,
    prepare: Mapping[str, Callable[[], Timed]],
    repeats: int,
) -> dict[str, dict[str, Any]]:
    """calc_diff, `device` and `harness` times in ms of each call, or its `error`."""
    expected, _ = run_reference(definition, list(inputs))
    diffs: dict[str, dict[str, float]] = {}

    def checked(name: str) -> Timed:
        call = prepare[name]()
        call.output.fill_(float("nan"))
        call()
        diff = calc_diff(call.output, expected)
        if not diff <= LARGEST_DIFF:  # nor is NaN
            raise RuntimeError(f"calc_diff {diff:.1e} to the reference")
        diffs[name] = {"calc_diff": diff}
        return call

    calls = {name: attempt(checked, name) for name in prepare}
    return {name: diffs.get(name, {}) | of for name, of in both_times(calls, repeats).items()}


def measure(
    problems: Problems, calls: Calls, length: int, rates: Rates, reads: bool, repeats: int
) -> dict[str, Any]:
    """A result of sweep.json; of the floor reading the weights is measured if it `reads`."""
    torch.cuda.empty_cache()  # of buffers that have other sizes now
    drawn, routing = problems.of(length)
    offset, factor = int(drawn.local_expert_offset), float(drawn.routed_scaling_factor)
    h = counted(f"T={length}", drawn.routing_logits, drawn.routing_bias, offset, factor)
    (workload,) = floors.workloads([h])
    if reads:
        workload["read_ms"] = floors.measure_reading([h], repeats)[h.uuid]
    floor = max(floor_ms(workload, rates))
    inputs, prepare = calls(drawn)
    found = attempt(solutions_on, problems.inputs.definition, inputs, prepare, repeats)
    if "error" in found:  # not of one call
        found = dict.fromkeys(prepare, found)
    return {**workload, "routing": routing, "floor_ms": floor, "solutions": found}
