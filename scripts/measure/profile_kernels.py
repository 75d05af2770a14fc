"""One workload under the profiler: each kernel's time, bytes and rates against its floor, the gaps.

A call of each solution is captured in a CUDA graph and replayed, the L2 cache overwritten before
each replay, while torch's profiler (CUPTI) notes when every kernel begins and ends; with --eager,
or where the host waits in a call, the calls themselves are traced, and gaps are then the host's,
too. Medians over the replays. A gap is the time from the end of the kernel before; where it is
negative, the kernel was launched early (programmatic dependent launch) and its time holds what it
waited for: only the span from the first start to the last end adds up. Beside it stands the device
time without the profiler, as `device_time` measures it.

MB and GFLOP are what a kernel has to move and to compute for the routing of the workload
(`kernel_work`), its floor the larger of both over the rates of this GPU, the floor of the call that
of `floors`. A workload whose weights or intermediates stay in the L2 cache can beat the former.

--ncu adds what Nsight Compute counts in each kernel of one call: bytes of DRAM, L2 throughput, time
of the tensor pipe, registers of a thread, sectors of spilled registers, the two most frequent
reasons of stalls (warps for each instruction issued).
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.common import environment, files
from scripts.common.command_line import (
    EXIT_FAILED,
    EXIT_OK,
    UsageError,
    parser,
    run_main,
    say,
    whole,
)
from scripts.common.progress import Progress
from scripts.common.project import DEFINITION, ROOT
from scripts.common.text import markdown_table, number, text_table
from scripts.data.dataset import Inputs, tokens
from scripts.measure import floors, kernel_trace, kernel_work, ncu_metrics
from scripts.measure.device_time import (
    NOT_TIMED,
    WARMUP,
    Timed,
    captured,
    device_times,
    timed,
    waits,
)
from scripts.measure.gpu import require_gpu
from scripts.measure.problems import histogram
from scripts.measure.rates import measure_floors, say_floors
from scripts.measure.second_pass import Pass, choose
from scripts.measure.timing import FLUSH_BYTES
from scripts.pack.pack import PackError

if TYPE_CHECKING:
    from flashinfer_bench.data import Solution, Trace

FUSED = "cutedsl_moe_fp8_fused"
COPIES = ("Memset", "Memcpy")
"""Beginnings of the names of what the profiler lists and ncu does not: no kernels."""


def measure(call: Timed, repeats: int, eager: bool) -> dict[str, Any]:
    """Timings of a call's kernels and of the whole, in us."""
    import torch

    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    for _ in range(WARMUP):
        call()
    replay = None if eager or waits(call) else captured(call, call.output)
    calls = kernel_trace.traced_calls(replay or call, flush.zero_, repeats)
    return {
        "traced": "replays of a CUDA graph" if replay else "calls",
        "kernels": kernel_trace.timings(calls),
        **kernel_trace.totals(calls),
        "device": device_times({"": call}, repeats)[""],
    }


def with_counts(
    kernels: Sequence[dict[str, Any]], counts: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The kernels with what ncu counted in each: both are in the order of launch.

    Raises:
        RuntimeError: they are not the same kernels.
    """
    left = iter(counts)
    found = []
    for kernel in kernels:
        if kernel["name"].startswith(COPIES):
            found.append(kernel)
            continue
        counted = next(left, None)
        if counted is None or kernel_work.short_name(counted["name"]) != kernel["short"]:
            raise RuntimeError(
                f"ncu saw other kernels than the profiler, from {kernel['short']} on"
            )
        found.append({**kernel, "ncu": {k: v for k, v in counted.items() if k != "name"}})
    if (more := next(left, None)) is not None:
        raise RuntimeError(f"ncu saw a kernel that the profiler did not: {more['name']}")
    return found


def call_of(what: Pass, solution: "Solution", inputs: Sequence[Any]) -> Timed:
    """A call of the solution.

    Raises:
        UsageError: it is of the kind that is not timed.
    """
    call = timed(what.trace_set.definitions[DEFINITION], solution, inputs)
    if call is None:
        raise UsageError(f"{solution.name}: {NOT_TIMED}")
    return call


def one_call(call: Timed) -> None:
    """A call between cudaProfilerStart and Stop, for Nsight Compute and Systems."""
    import torch

    for _ in range(WARMUP):
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def mega(value: float | None, form: str) -> str:
    return number(None if value is None else value / 1e6, form)


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """A line for each kernel, in the order of launch."""
    header = ["kernel", "us", "p10-p90", "gap", "MB", "GFLOP", "GB/s", "TFLOP/s", "floor us"]
    header.append("% of floor")
    with_ncu = any("ncu" in k for k in result["kernels"])
    if with_ncu:
        header += ["read MB", "written MB", "L2 %", "tensor %", "registers", "spills", "stalls"]
    rows = []
    for k in result["kernels"]:
        flops = k.get("flops") or None
        row = [k["stage"] or k["short"], f"{k['us']:.2f}", f"{k['us_p10']:.2f}-{k['us_p90']:.2f}"]
        row += [number(k["gap_us"], "+.2f"), mega(k.get("bytes"), ".2f")]
        row += [number(flops and flops / 1e9, ".2f"), number(k.get("gbytes"), ".0f")]
        row += [number(flops and k["tflops"], ".0f"), number(k.get("floor_us"), ".2f")]
        row.append(number(k.get("percent_of_floor"), ".0f"))
        if with_ncu:
            n = k.get("ncu", {})
            row += [mega(n.get("read_bytes"), ".2f"), mega(n.get("written_bytes"), ".2f")]
            row += [number(n.get(key), ".0f") for key in ("l2_percent", "tensor_percent")]
            row += [number(n.get(key), ".0f") for key in ("registers", "spill_sectors")]
            row.append(", ".join(f"{name} {ratio:.1f}" for name, ratio in n.get("stalls", ())))
        rows.append(row)
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


def print_result(result: dict[str, Any], markdown: bool) -> None:
    print(("### " if markdown else "") + title(result) + "\n")
    print((markdown_table if markdown else text_table)(*table(result)))
    print("\n" + summary(result) + "\n", flush=True)


def parse_arguments() -> argparse.Namespace:
    arguments = parser(__doc__)
    add = arguments.add_argument
    add("--workloads", nargs="+", required=True, metavar="T|UUID", help="one or more")
    add("--solutions", nargs="+", default=[FUSED], metavar="NAME", help=f"{FUSED}; * allowed")
    add("--local", type=Path, default=ROOT, help="data set; this repository")
    add("--run-foreign", action="store_true", help="run the data set's own, too")
    add("--repeats", type=whole(1), default=20, help="traced replays (20)")
    add("--seed", type=whole(0), default=2026)
    add("--eager", action="store_true", help="trace the calls instead of replays of a graph")
    add("--rates", type=Path, metavar="JSON", help="as of `floors`: measure no rates")
    add("--ncu", action="store_true", help="add what Nsight Compute counts; takes minutes")
    add(
        "--only-call",
        action="store_true",
        help="only call each solution once between cudaProfilerStart and Stop (--ncu does it)",
    )
    add("--markdown", action="store_true", help="print Markdown")
    add("--json", type=Path, metavar="FILE", help="write all figures there")
    return arguments.parse_args()


def counted(args: argparse.Namespace, trace: "Trace", solution: "Solution") -> list[dict[str, Any]]:
    """What ncu counts in this program's --only-call."""
    program = [sys.executable, str(Path(__file__)), "--only-call", "--local", str(args.local)]
    program += ["--workloads", trace.workload.uuid, "--solutions", solution.name]
    program += ["--seed", str(args.seed)]
    return ncu_metrics.measure(program)


def profile(
    args: argparse.Namespace, what: Pass, rates: floors.Rates, trace: "Trace", inputs: list[Any]
) -> list[dict[str, Any]]:
    """The figures of every solution on a workload, printed as they are known."""
    h = histogram(what.trace_set, trace.workload)
    (workload,) = floors.workloads([h])
    if args.rates is None:
        workload["read_ms"] = floors.measure_reading([h], args.repeats)[h.uuid]
    floor_us = 1e3 * max(floors.floor_ms(workload, rates))
    results = []
    for solution in what.solutions:
        call = call_of(what, solution, inputs)
        result = measure(call, args.repeats, args.eager)
        del call  # its buffers: ncu's process needs the memory, too
        result["kernels"] = kernel_work.with_work(result["kernels"], h, rates)
        if args.ncu:
            try:
                result["kernels"] = with_counts(result["kernels"], counted(args, trace, solution))
            except RuntimeError as error:  # the times are there all the same
                result["ncu_error"] = str(error)
                say(f"error: {solution.name}: {error}")
        named = {"solution": solution.name, "workload": workload, "floor_us": floor_us}
        results.append({**named, **result})
        print_result(results[-1], args.markdown)
    return results


def main() -> int:
    args = parse_arguments()
    hardware = require_gpu()

    import torch

    try:
        what = choose(
            args.local,
            "cuda:0",
            solutions=args.solutions,
            workloads=args.workloads,
            run_foreign=args.run_foreign,
        )
    except PackError as error:
        say(f"error: {error}")
        return EXIT_FAILED
    inputs_of = Inputs(what.trace_set, "cuda", args.seed)
    if args.only_call:
        for trace in what.workloads:
            for solution in what.solutions:
                call = call_of(what, solution, inputs_of.of(trace.workload))
                with torch.no_grad():
                    one_call(call)
        return EXIT_OK

    rates = measure_floors() if args.rates is None else floors.recorded_rates(args.rates)[1]
    print(f"{hardware}: {say_floors(rates)}\n")
    progress = Progress(len(what.workloads))
    results = []
    for trace in what.workloads:
        progress.step(f"T={tokens(trace.workload)} ({trace.workload.uuid[:8]})")
        with torch.no_grad():
            results += profile(args, what, rates, trace, inputs_of.of(trace.workload))
        progress.finish()
    if args.json:
        record = {
            "hardware": hardware,
            "method": "torch.profiler (CUPTI), L2 overwritten before each call, medians",
            "repeats": args.repeats,
            "seed": args.seed,
            "environment": environment.capture(),
            "floors": rates,
            "solutions": {s.name: s.hash() for s in what.solutions},
            "results": results,
        }
        files.write(args.json, json.dumps(record, indent=1) + "\n")
    return EXIT_FAILED if any("ncu_error" in r for r in results) else EXIT_OK


if __name__ == "__main__":
    run_main(main)
