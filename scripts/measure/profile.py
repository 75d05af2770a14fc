"""One call of a solution kernel by kernel: time, gap, bytes and rates against a floor; and what
Nsight Compute counts.

A kernel's work is what it has to move and to compute on a workload. Bytes: every operand once, the
weights of the experts that have rows, the rows of the pairs there are; no padding, nothing read
twice, no table that only one implementation keeps. FLOPs: those of the GEMMs. A kernel is known by
its name.
"""

import csv
import re
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from scripts.common.command_line import UsageError
from scripts.common.floors import LOGIT_BYTES, OUTPUT_BYTES, TOKEN_BYTES, bandwidth
from scripts.measure.gemm_problems import BLOCK, LAYER_SHAPES, Histogram, Problem
from scripts.measure.gpu import Rates
from scripts.measure.timing import (
    WARMUP,
    Span,
    Timed,
    captured,
    device_times,
    flush_buffer,
    percentile,
    traced_calls,
    waits,
)

HIDDEN = LAYER_SHAPES["gemm1"][1]
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


def rates_of(done: Work, us: float, rates: Rates) -> dict[str, float]:
    """The rates that work of this time reached, beside the least time that it can take."""
    floor_us = 1e6 * max(done.bytes / bandwidth(rates), done.flops / rates["fp8_flops_per_s"])
    return {
        **done._asdict(),
        "gbytes": done.bytes / us / 1e3,
        "tflops": done.flops / us / 1e6,
        "floor_us": floor_us,
        "percent_of_floor": 100 * floor_us / us,
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
            **(rates_of(of_stage[stage], kernel["us"], rates) if stage else {}),
        }
        for kernel, stage in zip(kernels, known, strict=True)
    ]


# --- the trace of a call --------------------------------------------------------------------------

COPIES = ("Memset", "Memcpy")
"""Beginnings of the names of what the profiler lists and ncu does not: no kernels."""


def timings(calls: Sequence[Sequence[Span]]) -> list[dict[str, Any]]:
    """Of each kernel, in the order of beginning: its name, the median and spread of its time, and
    the median gap to the end of the kernel before it (None for the first), in us. A negative gap is
    a dependent launch that began before."""
    found = []
    for i, kernel in enumerate(calls[0]):
        times = [call[i].end - call[i].start for call in calls]
        gaps = [call[i].start - call[i - 1].end for call in calls] if i else []
        found.append(
            {
                "name": kernel.name,
                "us": statistics.median(times),
                "us_p10": percentile(times, 0.1),
                "us_p90": percentile(times, 0.9),
                "gap_us": statistics.median(gaps) if gaps else None,
            }
        )
    return found


def totals(calls: Sequence[Sequence[Span]]) -> dict[str, float]:
    """Medians over the calls: the sum of the kernels, and from the first's start to the last's end,
    in us."""
    return {
        "sum_us": statistics.median(sum(s.end - s.start for s in call) for call in calls),
        "span_us": statistics.median(max(s.end for s in call) - call[0].start for call in calls),
    }


def measure(call: Timed, repeats: int, eager: bool) -> dict[str, Any]:
    """Timings of a call's kernels and of the whole, in us."""
    for _ in range(WARMUP):
        call()
    replay = None if eager or waits(call) else captured(call, call.output)
    calls = traced_calls(replay or call, flush_buffer().zero_, repeats)
    return {
        "traced": "replays of a CUDA graph" if replay else "calls",
        "kernels": timings(calls),
        **totals(calls),
        "device": device_times({"": call}, repeats)[""],
    }


def one_call(call: Timed) -> None:
    """A call between cudaProfilerStart and Stop, for Nsight Compute and Systems."""
    for _ in range(WARMUP):
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


# --- Nsight Compute -------------------------------------------------------------------------------

METRICS = {
    "read_bytes": "dram__bytes_read.sum",
    "written_bytes": "dram__bytes_write.sum",
    "l2_percent": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "tensor_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
    "spilled_loads": "l1tex__t_sectors_pipe_lsu_mem_local_op_ld.sum",
    "spilled_stores": "l1tex__t_sectors_pipe_lsu_mem_local_op_st.sum",
}
"""Spilled: sectors of local memory."""


def count(program: Sequence[str]) -> list[dict[str, Any]]:
    """What ncu counts in the kernels that a program marks by cudaProfilerStart and Stop. It runs
    each kernel alone and several times over, with cold caches: times are not taken from it. Raises
    UsageError: there is no ncu; RuntimeError: it failed; the message is what it said last."""
    if shutil.which("ncu") is None:
        raise UsageError("--ncu: Nsight Compute's ncu is not on the PATH")
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "ncu.csv"
        command = [
            *("ncu", "--profile-from-start", "off", "--target-processes", "all"),
            *("--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base"),
            *("--log-file", str(report), "--metrics", ",".join(METRICS.values()), *program),
        ]
        result = subprocess.run(command, capture_output=True, text=True)
        written = report.read_text(encoding="utf-8") if report.is_file() else ""
    if kernels := parse_counts(written.splitlines()):
        return kernels
    said = f"{written}\n{result.stdout}\n{result.stderr}".strip().splitlines()[-8:]
    raise RuntimeError("ncu: no kernel in what it wrote: " + "\n".join(said))


def parse_counts(lines: Iterable[str]) -> list[dict[str, Any]]:
    """What was counted in each kernel, in the order of launch; None where ncu has no figure.

    Lines of `--csv --page raw`: names of the columns, their units, a line for each kernel; between
    them ncu's own remarks, `==PROF== ...`.
    """

    def number(text: str) -> float | None:
        try:
            return float(text.replace(",", ""))
        except ValueError:  # n/a
            return None

    rows = list(csv.DictReader(line for line in lines if line.startswith('"')))
    return [
        {"name": row["Kernel Name"], **{k: number(row.get(m, "")) for k, m in METRICS.items()}}
        for row in rows[1:]
        if "Kernel Name" in row
    ]


def with_counts(
    kernels: Sequence[dict[str, Any]], counts: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The kernels with what ncu counted in each: both are in the order of launch. Raises
    RuntimeError: they are not the same kernels."""
    traced = [k["short"] for k in kernels if not k["name"].startswith(COPIES)]
    seen = [short_name(counted["name"]) for counted in counts]
    if seen != traced:
        said = f"ncu saw {', '.join(seen)}; the profiler {', '.join(traced)}"
        raise RuntimeError(f"ncu saw other kernels than the profiler: {said}")
    left = iter({k: v for k, v in counted.items() if k != "name"} for counted in counts)
    return [
        k if k["name"].startswith(COPIES) else {**k, "ncu": next(left)}  # copies: not ncu's
        for k in kernels
    ]


# --- tables ---------------------------------------------------------------------------------------

Column = tuple[str, float, str]
"""Key of a kernel's figures, what it is divided by, and its format."""
COLUMNS: dict[str, Column] = {
    "us": ("us", 1, ".2f"),
    "gap": ("gap_us", 1, "+.2f"),
    "MB": ("bytes", 1e6, ".2f"),
    "GFLOP": ("flops", 1e9, ".2f"),
    "GB/s": ("gbytes", 1, ".0f"),
    "TFLOP/s": ("tflops", 1, ".0f"),
    "floor us": ("floor_us", 1, ".2f"),
    "% of floor": ("percent_of_floor", 1, ".0f"),
}
COUNTED: dict[str, Column] = {
    "read MB": ("read_bytes", 1e6, ".2f"),
    "written MB": ("written_bytes", 1e6, ".2f"),
    "L2 %": ("l2_percent", 1, ".0f"),
    "tensor %": ("tensor_percent", 1, ".0f"),
    "registers": ("registers", 1, ".0f"),
    "spilled loads": ("spilled_loads", 1, ".0f"),
    "stores": ("spilled_stores", 1, ".0f"),
}


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """A line for each kernel, in the order of launch."""

    def cells(figures: dict[str, Any], columns: dict[str, Column]) -> list[str]:
        values = [(figures.get(key), by, form) for key, by, form in columns.values()]
        return ["-" if value is None else format(value / by, form) for value, by, form in values]

    kernels = result["kernels"]
    with_ncu = any("ncu" in k for k in kernels)
    header = ["kernel", *COLUMNS, "p10-p90", *(COUNTED if with_ncu else ())]
    rows = []
    for k in kernels:
        timed = k if k.get("flops") else {**k, "flops": None, "tflops": None}
        row = [k["stage"] or k["short"], *cells(timed, COLUMNS)]
        row.append(f"{k['us_p10']:.2f}-{k['us_p90']:.2f}")
        rows.append(row + (cells(k.get("ncu", {}), COUNTED) if with_ncu else []))
    return header, rows


def title(result: dict[str, Any]) -> str:
    w = result["workload"]
    return (
        f"{result['solution']}, T={w['tokens']} ({w['uuid'][:8]}: {w['pairs']} pairs, "
        f"{w['active']} experts, the fullest has {w['max']} rows): {result['traced']}, us"
    )


def summary(result: dict[str, Any]) -> str:
    """The whole call in a line."""
    device, floor = result["device"], result["floor_us"]
    without = device.get("error") or f"{1e3 * device['ms']:.2f} ({device['method']})"
    return (
        f"sum of the kernels {result['sum_us']:.2f}, first start to last end "
        f"{result['span_us']:.2f}, without the profiler {without}, floor {floor:.2f} "
        f"({100 * floor / result['span_us']:.0f} % of the span)"
    )
