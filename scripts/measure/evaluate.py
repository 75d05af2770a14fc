"""Calling a built solution outside of flashinfer-bench's Benchmark: fresh inputs, checked output.

As in flashinfer-bench's timing, a solution gets copies of the inputs, so that one that writes into
them harms no other; that it did is found by comparing the copies with what they were made of.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
from flashinfer_bench.bench.evaluators.utils import allocate_outputs, normalize_result
from flashinfer_bench.compile import BuilderRegistry
from flashinfer_bench.data import Definition
from moe_fp8.layer.metrics import calc_diff, cosine, matched_ratio

from scripts.common.project import ACCURACY_TOLERANCES
from scripts.measure.timing import FAILURES


class ChangedInputs(Exception):
    """A solution wrote into its inputs; the message says into which."""


def tolerance_name(rtol: float, atol: float) -> str:
    return f"{rtol:g}/{atol:g}"


def metrics(output: torch.Tensor, reference: torch.Tensor) -> dict[str, Any]:
    """The figures that go into a trace's correctness.extra."""
    return {
        "cosine": float(cosine(output, reference)),
        "calc_diff": float(calc_diff(output, reference)),
        "matched_ratios": {
            tolerance_name(rtol, atol): float(matched_ratio(output, reference, rtol, atol))
            for rtol, atol in ACCURACY_TOLERANCES
        },
    }


def fresh(inputs: Sequence[Any]) -> list[Any]:
    """Copies of the tensors among the inputs; the rest as it is."""
    return [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]


def changed(definition: Definition, inputs: Sequence[Any], originals: Sequence[Any]) -> list[str]:
    """The names of the inputs that are no longer the bytes of the originals."""
    return [
        name
        for name, x, original in zip(definition.inputs, inputs, originals, strict=True)
        if isinstance(original, torch.Tensor) and not torch.equal(_bytes(x), _bytes(original))
    ]


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """Its elements as bytes: NaN equals itself, and 0 does not equal -0."""
    return x.contiguous().view(-1).view(torch.uint8)


def refuse_changed(definition: Definition, inputs: Sequence[Any], originals: Sequence[Any]) -> None:
    """Raise ChangedInputs where the inputs are no longer what the originals are."""
    if names := changed(definition, inputs, originals):
        raise ChangedInputs(f"the solution changes its inputs: {', '.join(names)}")


def run_solution(runnable: Any, inputs: Sequence[Any], device: str) -> torch.Tensor:
    """The output of a built solution, whose memory is filled with NaN before: an element that is
    not written shows."""
    definition = runnable.metadata.definition
    with torch.no_grad():
        if runnable.metadata.destination_passing_style:
            outputs = allocate_outputs(definition, list(inputs), device)
            for output in outputs:
                output.fill_(float("nan"))
            runnable(*inputs, *outputs)
        else:
            outputs = normalize_result(definition, runnable(*inputs), device)
    return outputs[0]


def run_reference(definition: Definition, inputs: Sequence[Any]) -> tuple[torch.Tensor, float]:
    """The output of the definition's reference, and the seconds that it took. Raises RuntimeError:
    it fails or calls sys.exit; one line says how."""
    try:
        reference = BuilderRegistry.get_instance().build_reference(definition)
        start = time.perf_counter()
        return reference(*inputs), time.perf_counter() - start
    except FAILURES as error:
        said = f"the reference of {definition.name} fails: {type(error).__name__}: {error}"
        raise RuntimeError(said.splitlines()[0]) from error
