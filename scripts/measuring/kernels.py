"""One call of a solution kernel by kernel: time, gap, bytes and FLOPs against the roofline.

A kernel's work is the bytes that it must move and the FLOPs that it must compute on a workload.
Bytes: every operand once, the weights of the experts that have rows, and the rows of the existing
pairs. Padding, repeated reads and tables of a single implementation do not count. FLOPs: those of
the GEMMs. A kernel is recognised by its name.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from flashinfer_bench.data import Solution

from scripts.common.definitions import BLOCK, DEFAULT, RENORMALIZE, MoeDefinition, bandwidth
from scripts.measuring.cases import Histogram
from scripts.measuring.clock import (
    WARMUP,
    Rates,
    Timed,
    captured,
    device_times,
    figures,
    flush_buffer,
    percentile,
    traced_calls,
    waits,
)
from scripts.measuring.gemm import Problem
from scripts.publishing.rows import Writer

OURS = re.compile(r"kernels(?:sm\d+)?[a-z0-9_]*?([A-Z]\w*?)_object_at")
"""A CuTe DSL kernel's name has the module's path and the class."""

TWO_TERMS = re.compile(r"Combine_object_at__tensorptrf32")
"""The intermediate has two FP8 terms if the combine reads float32 rows."""

GEMM = "gemm"
OTHERS_GEMM = re.compile(
    # DeepGEMM's; hpc-ops'; Humming's; sgl_kernel's, whose only CUTLASS kernel it is.
    r"^sm90_fp8_gemm|^group_gemm_blockwise|^humming$|^device_kernel$"
)
"""Peers' GEMMs: they take rows and write bfloat16, whatever other kernels their layers launch."""
STAGES: tuple[tuple[str, str], ...] = (
    (r"^RouteWord$", "route"),
    (r"^ChooseExperts$|^_route_kernel$", "choose"),
    (r"^NumberRows$|^_place_kernel$|^_sort$", "number"),
    (r"^Permute$|^_scatter_kernel$", "permute"),
    (r"^SwigluQuant$|^_swiglu_quant_kernel$|^process_input_kernel$", "swiglu_quant"),
    (r"^Combine$|^_combine_kernel$", "combine"),
    (r"^GemmSm\d|^_grouped_gemm_kernel$|" + OTHERS_GEMM.pattern, GEMM),
)
"""Patterns of short names, and the stage of such a kernel."""


class Work(NamedTuple):
    bytes: float
    flops: float = 0.0

    def least_us(self, rates: Rates) -> float:
        """Return the least time that the work can take."""
        return 1e6 * max(self.bytes / bandwidth(rates), self.flops / rates["fp8_flops_per_s"])


def short_name(kernel: str) -> str:
    """Return a kernel's own name: our class, or the function without namespaces and arguments."""
    if match := OURS.search(kernel):
        return match[1]
    plain = kernel.replace("(anonymous namespace)::", "").removeprefix("void ")
    return re.split(r"[<(]", plain)[0].rsplit("::", 1)[-1].strip()[:40]


def stages(kernels: Sequence[str]) -> list[str | None]:
    """Return the stage of each kernel of a call, None if its name does not tell. Two GEMMs are
    `gemm1` and `gemm2`."""
    names = [
        next((stage for pattern, stage in STAGES if re.search(pattern, short_name(k))), None)
        for k in kernels
    ]
    gemms = [i for i, stage in enumerate(names) if stage == GEMM]
    for place, i in enumerate(gemms, 1):
        names[i] = f"{GEMM}{place}" if len(gemms) == 2 else None
    # The division of a stage's work among several launches is not known.
    return [stage if stage is None or names.count(stage) == 1 else None for stage in names]


def work(
    h: Histogram, gathers: bool, quantises: bool, terms: int = 1, layer: MoeDefinition = DEFAULT
) -> dict[str, Work]:
    """Return the work of every stage of a layer.

    Args:
        gathers: GEMM1 gathers the tokens of its rows; there is no `permute`.
        quantises: GEMM1 writes FP8 and scales; there is no `swiglu_quant`.
        terms: FP8 terms of the intermediate. With two, the combined rows are float32.
    """
    pairs, hidden, inner = sum(h.rows), layer.hidden_size, layer.intermediate_size
    gemm1, gemm2 = (Problem(h.rows, n, k, h.tokens) for n, k in layer.gemms)
    # A token has FP8 values with scales, logits, an int32 or float32 for each chosen expert, and an
    # output. A pair has both GEMMs' results. The second FP8 term has no scales.
    token, output = hidden + 4 * hidden // BLOCK, 2 * hidden
    logits = h.tokens * layer.num_experts * (2 if layer.routing == RENORMALIZE else 4)
    up_and_gate, quantised = 2 * 2 * inner, inner + 4 * inner // BLOCK
    saved = pairs * (up_and_gate - quantised) if quantises else 0
    saved += (pairs - h.hit) * token - 4 * pairs if gathers else 0
    more = pairs * (terms - 1)
    tables = h.tokens * 4 * layer.top_k
    # A compute-bound GEMM1 also zeroes the outputs of tokens without a local expert.
    zeros = (h.tokens - h.hit) * output if quantises and not gathers else 0
    return {
        "route": Work(logits + 2 * tables),  # writes rows and weights
        "choose": Work(logits + 2 * tables),  # writes experts and weights
        "number": Work(2 * tables),  # experts to rows
        "permute": Work(tables + (h.hit + pairs) * token),
        "gemm1": Work(gemm1.bytes - saved + zeros + more * inner, gemm1.flops),
        "swiglu_quant": Work(pairs * (up_and_gate + quantised)),
        "gemm2": Work(gemm2.bytes + more * (inner + output), gemm2.flops * terms),
        "combine": Work(2 * tables + (pairs + more + h.tokens) * output - zeros),
    }


def works(
    names: Sequence[str], h: Histogram, layer: MoeDefinition = DEFAULT
) -> list[tuple[str, str | None, Work | None]]:
    """Return the short name of each kernel of a call, and its stage and work if known: that of
    MXFP4 weights is not."""
    known, short = stages(names), list(map(short_name, names))
    others = any(map(OTHERS_GEMM.search, short))
    gathers, quantises = (
        not others and stage not in known for stage in ("permute", "swiglu_quant")
    )
    terms = 2 if any(map(TWO_TERMS.search, names)) else 1
    work_of = {} if layer.mxfp4 else work(h, gathers, quantises, terms, layer)
    return [
        (name, stage, work_of.get(stage) if stage else None)
        for name, stage in zip(short, known, strict=True)
    ]


# --- the trace of a call --------------------------------------------------------------------------


def measure(
    writer: Writer,
    solution: Solution,
    call: Timed,
    h: Histogram,
    layer: MoeDefinition,
    rates: Rates,
    least_us: float,
    repeats: int,
) -> None:
    """Write rows of a call's kernels in order of start, medians over the calls in us: the time, the
    `gap` to the end of the previous kernel (negative: a dependent launch that started earlier), and
    the work. Then a row from the first start to the last end, and one of the call without the
    profiler, both against the `least_us` of the case."""
    for _ in range(WARMUP):
        call()
    replay = None if waits(call) else captured(call)
    calls = traced_calls(replay or call, flush_buffer().zero_, repeats)
    spans = np.array([[(s.start, s.end) for s in kernels] for kernels in calls])
    start, end = spans[..., 0], spans[..., 1]  # [calls, kernels]
    us, gaps = end - start, start[:, 1:] - end[:, :-1]
    case = {"definition": layer.name, "uuid": h.uuid, **h.counts()}
    source = {"hash": solution.hash()}

    def add(value: float, least: float | None, **fields: Any) -> None:
        fields = {"value": value, "unit": "us", "roofline": least, **source, **fields}
        writer.add(case, solution.name, **fields)

    names = [kernel.name for kernel in calls[0]]
    for i, (short, stage, done) in enumerate(works(names, h, layer)):
        add(
            float(np.median(us[:, i])),
            done and done.least_us(rates),
            part=stage or short,
            kernel=names[i],
            p10=percentile(us[:, i].tolist(), 0.1),
            p90=percentile(us[:, i].tolist(), 0.9),
            gap=float(np.median(gaps[:, i - 1])) if i else None,
            **(done._asdict() if done else {}),
        )
    span = float(np.median(end.max(axis=1) - start[:, 0]))
    total = float(np.median(us.sum(axis=1)))
    method = "replays of a CUDA graph" if replay else "calls"
    add(span, least_us, part="span", sum=total, calls=repeats, method=method)
    alone = figures(device_times({"": call}, repeats)[""], "us")
    if "error" not in alone:
        alone |= {"clock": "device", "roofline": least_us}
    writer.add(case, solution.name, **source, **alone)


def one_call(call: Timed) -> None:
    """Make one call between cudaProfilerStart and Stop, for Nsight Compute and Systems."""
    for _ in range(WARMUP):
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
