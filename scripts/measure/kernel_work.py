"""What each kernel of the layer has to move and to compute on a workload, and how fast it did.

Bytes: every operand once, the weights of the experts that have rows, the rows of the pairs there
are; no padding, nothing read twice, no table that only one implementation keeps. FLOPs: those of
the GEMMs. The kernel is told by its name; one that is not known has no such figures.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from scripts.measure.floors import (
    HIDDEN,
    LOGIT_BYTES,
    OUTPUT_BYTES,
    TOKEN_BYTES,
    Rates,
)
from scripts.measure.problems import BLOCK, LAYER_SHAPES, Histogram, Problem
from scripts.measure.rates import bandwidth

TOP_K = 8
PAIR_TABLE_BYTES = 4 * TOP_K
"""Of a token: an int32 or float32 for each of its chosen experts."""
INTERMEDIATE = LAYER_SHAPES["gemm2"][1]
UP_AND_GATE_BYTES = 2 * LAYER_SHAPES["gemm1"][0]
"""Of a pair: bfloat16 output of the first GEMM."""
INTERMEDIATE_BYTES = INTERMEDIATE + 4 * INTERMEDIATE // BLOCK
"""Of a pair: FP8 values and scales that the second GEMM reads; a second term is values alone."""

OURS = re.compile(r"kernels(?:sm\d+)?[a-z0-9_]*?([A-Z]\w*?)_object_at")
"""A CuTe DSL kernel's name holds the module's path and the class."""

TWO_TERMS = re.compile(r"Combine_object_at__tensorptrf32")
"""The intermediate has two FP8 terms where the combine reads float32 rows."""

GEMM = "gemm"
OTHERS_GEMM = re.compile(
    # DeepGEMM's; hpc-ops'; sgl_kernel's, which is the only one of CUTLASS there.
    r"^sm90_fp8_gemm|^group_gemm_blockwise|^device_kernel$"
)
"""They take rows and write bfloat16, whatever else their layers launch."""
STAGES: tuple[tuple[str, str], ...] = (
    (r"^RouteWord$", "route"),
    (r"^ChooseExperts$|^_route_kernel$", "choose"),
    (r"^NumberRows$|^_place_kernel$", "number"),
    (r"^Permute$|^_scatter_kernel$", "permute"),
    (r"^SwigluQuant$|^_swiglu_quant_kernel$", "swiglu_quant"),
    (r"^Combine$|^_combine_kernel$", "combine"),
    (r"^GroupedGemm|^_grouped_gemm_kernel$|" + OTHERS_GEMM.pattern, GEMM),
)
"""Patterns of short names, and the stage that such a kernel is."""


class Work(NamedTuple):
    bytes: float
    flops: float = 0.0


def short_name(kernel: str) -> str:
    """A kernel's own name: a class of ours, or the function without namespaces and arguments."""
    if found := OURS.search(kernel):
        return found[1]
    plain = kernel.replace("(anonymous namespace)::", "").removeprefix("void ")
    return re.split(r"[<(]", plain)[0].rsplit("::", 1)[-1].strip()[:40]


def stages(kernels: Sequence[str]) -> list[str | None]:
    """The stage of each kernel of a call, None where its name does not tell; the GEMMs are `gemm1`
    and `gemm2` where there are two."""
    found = [
        next((stage for pattern, stage in STAGES if re.search(pattern, short_name(k))), None)
        for k in kernels
    ]
    gemms = [i for i, stage in enumerate(found) if stage == GEMM]
    for number, i in enumerate(gemms, 1):
        found[i] = f"{GEMM}{number}" if len(gemms) == 2 else None
    # A stage in several launches: how its work is divided among them is not known.
    return [stage if stage is None or found.count(stage) == 1 else None for stage in found]


def work(h: Histogram, gathers: bool, quantises: bool, terms: int = 1) -> dict[str, Work]:
    """The work of every stage.

    Args:
        gathers: the first GEMM reads the tokens, by the token of every row; there is no `permute`.
        quantises: it writes FP8 and scales; there is no `swiglu_quant`.
        terms: FP8 terms of the intermediate. With two, the rows that are combined are float32.
    """
    pairs = sum(h.rows)
    gemm1, gemm2 = (Problem(h.rows, n, k, h.tokens) for n, k in LAYER_SHAPES.values())
    saved = pairs * (UP_AND_GATE_BYTES - INTERMEDIATE_BYTES) if quantises else 0
    saved += (pairs - h.hit) * TOKEN_BYTES - 4 * pairs if gathers else 0
    more = pairs * (terms - 1)
    tables = h.tokens * PAIR_TABLE_BYTES
    # Where the first GEMM waits for the tensor cores, it writes the zeros.
    zeros = (h.tokens - h.hit) * OUTPUT_BYTES if quantises and not gathers else 0
    return {
        "route": Work(h.tokens * LOGIT_BYTES + 2 * tables),  # writes rows and weights
        "choose": Work(h.tokens * LOGIT_BYTES + 2 * tables),  # writes experts and weights
        "number": Work(2 * tables),  # experts to rows
        "permute": Work(tables + (h.hit + pairs) * TOKEN_BYTES),
        "gemm1": Work(gemm1.bytes - saved + zeros + more * INTERMEDIATE, gemm1.flops),
        "swiglu_quant": Work(pairs * (UP_AND_GATE_BYTES + INTERMEDIATE_BYTES)),
        "gemm2": Work(gemm2.bytes + more * (INTERMEDIATE + 2 * HIDDEN), gemm2.flops * terms),
        "combine": Work(2 * tables + 2 * (pairs + more) * HIDDEN + h.tokens * OUTPUT_BYTES - zeros),
    }


def figures(done: Work, us: float, rates: Rates) -> dict[str, float]:
    """The rates that work of this time reached, beside the least time that it can take."""
    seconds = 1e-6 * us
    floor = max(done.bytes / bandwidth(rates), done.flops / rates["fp8_flops_per_s"])
    return {
        "bytes": done.bytes,
        "flops": done.flops,
        "gbytes": done.bytes / seconds / 1e9,
        "tflops": done.flops / seconds / 1e12,
        "floor_us": 1e6 * floor,
        "percent_of_floor": 100 * floor / seconds,
    }


def with_work(
    kernels: Sequence[dict[str, Any]], h: Histogram, rates: Rates
) -> list[dict[str, Any]]:
    """Timings of a call's kernels with what is known of each one's work."""
    known = stages([k["name"] for k in kernels])
    others = any(OTHERS_GEMM.search(short_name(k["name"])) for k in kernels)
    gathers, quantises = (
        not others and stage not in known for stage in ("permute", "swiglu_quant")
    )
    terms = 2 if any(TWO_TERMS.search(k["name"]) for k in kernels) else 1
    of_stage = work(h, gathers, quantises, terms)
    return [
        {
            **kernel,
            "short": short_name(kernel["name"]),
            "stage": stage,
            **(figures(of_stage[stage], kernel["us"], rates) if stage else {}),
        }
        for kernel, stage in zip(kernels, known, strict=True)
    ]
