"""Where the time of a call goes: kernel by kernel on a workload, or by the stages of the layer.

    python3 run.py profile --workloads 80      of fused, or of other --solutions
    python3 run.py profile --stages --tokens 1024 2048

Kernels: a call of each solution is captured in a CUDA graph and replayed, the L2 cache overwritten
before each replay, while torch's profiler (CUPTI) notes when every kernel begins and ends; with
--eager, or where the host waits in a call, the calls themselves are traced, and gaps are then the
host's, too. Medians over the replays. A gap is the time from the end of the kernel before; where it
is negative, the kernel was launched early (programmatic dependent launch) and its time holds what
it waited for: only the span from the first start to the last end adds up. Beside it stands the
device time without the profiler. MB and GFLOP are what a kernel has to move and to compute for the
routing of the workload, its floor the larger of both over the rates of this GPU, the floor of the
call that of `check --only floors`. A workload whose weights or intermediates stay in the L2 cache
can beat the former. --ncu adds what Nsight Compute counts in each kernel of one call.

Stages: routing, GEMM1, SwiGLU + requantisation, GEMM2 and combine of every solution that marks
them, by CUDA events; gemm1 and gemm2 include the padding before and the unpadding after the kernel.
Where the GPU waits for the host, that wait counts. End to end is measured by calls of their own.
Routing is that of the workload with this token count, if there is one, else drawn from the seed.
"""

import argparse
import sys
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
from scripts.common.floors import floor_ms
from scripts.common.progress import steps
from scripts.common.text import markdown_table, text_table
from scripts.data.dataset import Inputs, definition_of, tokens
from scripts.pack import sources
from scripts.programs.options import add_options

if TYPE_CHECKING:
    from scripts.measure.gpu import Rates
    from scripts.measure.plan import Plan

FUSED = "cutedsl_moe_fp8_fused"


def parse_arguments() -> argparse.Namespace:
    arguments = parser(__doc__)
    add = arguments.add_argument
    what = arguments.add_mutually_exclusive_group(required=True)
    what.add_argument("--workloads", nargs="+", metavar="T|UUID", help="kernels of these")
    what.add_argument("--stages", action="store_true", help="the stages of the layer instead")
    add_options(
        arguments, "solutions", "local", "run-foreign", "rates", "seed", "cpu", "markdown", "json",
        cpu={"help": "stages: time the torch model on the CPU"},
    )  # fmt: skip
    add("--repeats", type=whole(1), help="timed calls (20; stages: 50)")
    add("--eager", action="store_true", help="kernels: trace the calls, not replays of a graph")
    add("--ncu", action="store_true", help="kernels: add what Nsight Compute counts; minutes")
    add("--only-call", action="store_true", help=argparse.SUPPRESS)  # what --ncu starts
    add("--tokens", nargs="+", type=whole(1), default=[1024, 2048], metavar="T", help="stages")
    add("--warmup", type=whole(0), default=5, help="stages: calls that do not count (5)")
    add("--offset", type=int, default=0, help="stages: first local expert of draws (0)")
    return arguments.parse_args()


def show(args: argparse.Namespace, title: str, header: list[str], rows: list[list[str]]) -> None:
    print(("### " if args.markdown else "") + title + "\n")
    print((markdown_table if args.markdown else text_table)(header, rows))


def counted(args: argparse.Namespace, uuid: str, solution: str) -> list[dict[str, Any]]:
    """What ncu counts in this program's --only-call."""
    from scripts.measure import profile

    program = [sys.executable, str(Path(__file__)), "--only-call", "--local", str(args.local)]
    program += ["--workloads", uuid, "--solutions", solution, "--seed", str(args.seed)]
    return profile.count(program)


def profile_kernels(
    args: argparse.Namespace, chosen: "Plan", rates: "Rates", trace: Any, inputs: list[Any]
) -> list[dict[str, Any]]:
    """The figures of every solution on a workload, printed as they are known."""
    from scripts.measure import floors, profile
    from scripts.measure.gemm_problems import histogram
    from scripts.measure.timing import timed

    repeats = args.repeats or 20
    h = histogram(chosen.trace_set, trace.workload)
    (workload,) = floors.workloads([h])
    if args.rates is None:
        workload["read_ms"] = floors.measure_reading([h], repeats)[h.uuid]
    results = []
    for solution in chosen.solutions:
        call = timed(definition_of(chosen.trace_set), solution, inputs)
        result = {
            "solution": solution.name,
            "workload": workload,
            "floor_us": 1e3 * max(floor_ms(workload, rates)),
            **profile.measure(call, repeats, args.eager),
        }
        del call  # its buffers: ncu's process needs the memory, too
        result["kernels"] = profile.with_work(result["kernels"], h, rates)
        if args.ncu:
            try:
                counts = counted(args, h.uuid, solution.name)
                result["kernels"] = profile.with_counts(result["kernels"], counts)
            except RuntimeError as error:  # the times are there all the same
                result["ncu_error"] = str(error)
                say(f"error: {solution.name}: {error}")
        results.append(result)
        show(args, profile.title(result), *profile.table(result))
        print("\n" + profile.summary(result) + "\n", flush=True)
    return results


def kernels(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Exit status, and all figures of the kernels."""
    import torch

    from scripts.measure import floors, gpu, plan, profile
    from scripts.measure.timing import timed

    hardware = gpu.require_gpu()
    chosen = plan.choose(
        args.local,
        True,
        solutions=args.solutions or [FUSED],
        workloads=args.workloads,
        run_foreign=args.run_foreign,
    )
    inputs_of = Inputs(chosen.trace_set, "cuda", args.seed)
    results: list[dict[str, Any]] = []
    if args.only_call:
        for trace in chosen.workloads:
            for solution in chosen.solutions:
                with torch.no_grad():
                    inputs = inputs_of.of(trace.workload)
                    profile.one_call(timed(definition_of(chosen.trace_set), solution, inputs))
        return EXIT_OK, {}
    rates = gpu.measure_rates() if args.rates is None else floors.recorded_rates(args.rates)[1]
    print(f"{hardware}: {gpu.describe_rates(rates)}\n")
    for trace in steps(
        chosen.workloads, lambda t: f"T={tokens(t.workload)} ({t.workload.uuid[:8]})"
    ):
        with torch.no_grad():
            results += profile_kernels(args, chosen, rates, trace, inputs_of.of(trace.workload))
    failed = any("ncu_error" in r for r in results)
    return EXIT_FAILED if failed else EXIT_OK, {
        "hardware": hardware,
        "method": "torch.profiler (CUPTI), L2 overwritten before each call, medians",
        "repeats": args.repeats or 20,
        "seed": args.seed,
        "environment": environment.capture(),
        "floors": rates,
        "solutions": {s.name: s.hash() for s in chosen.solutions},
        "results": results,
    }


def layer_stages(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Exit status, and the content of stages.json."""
    import torch
    from flashinfer_bench.utils import hardware_from_device

    from scripts.measure import stages

    if not args.cpu and not torch.cuda.is_available():
        raise UsageError("no GPU is visible; --cpu times the torch model on the CPU instead")
    device, iterations = "cpu" if args.cpu else "cuda:0", args.repeats or 50
    hardware = hardware_from_device(device)
    timing = "host clock" if args.cpu else "CUDA events between the stages, L2 overwritten"
    layers = stages.load_layers(args.solutions, use_gpu=not args.cpu)
    hashes = sources.current()
    problems = stages.Problems(args.local, device, args.seed, args.offset)
    names = ", ".join(layers)
    results = [
        stages.measure(layers, problems, length, iterations, args.warmup)
        for length in steps(args.tokens, lambda t: f"T={t}: {names}", lambda t: 4000 + t)
    ]
    where = f"CPU ({hardware}), torch model" if args.cpu else hardware
    for result in results:
        how = f"median ms of {iterations} calls ({timing}; routing: {result['routing']})"
        show(args, f"T={result['tokens']}, {where}: {how}", *stages.table(result))
        for name, solution in list(result["solutions"].items())[1:]:
            print(f"\n{name}: output {solution['output']}")
        print()
    outputs = {s["output"] for result in results for s in result["solutions"].values()}
    if "not finite" in outputs:
        say("error: an output holds NaN or infinite values")
    return EXIT_FAILED if "not finite" in outputs else EXIT_OK, {
        "hardware": hardware,
        "device": "cpu" if args.cpu else "cuda",
        "timing": timing,
        "iterations": iterations,
        "seed": args.seed,
        "environment": environment.capture(),
        "solutions": {name: hashes[name] for name in layers},
        "results": results,
    }


def main() -> int:
    args = parse_arguments()
    status, record = layer_stages(args) if args.stages else kernels(args)
    if args.json and record:
        files.write_json(args.json, record)
    return status


if __name__ == "__main__":
    run_main(main)
