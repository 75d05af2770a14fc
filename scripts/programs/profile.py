"""Where the time of a call goes: by kernel, by stage of the layer, or over the number of tokens.

    python3 run.py profile --workloads 80      of fused, or of other --solutions
    python3 run.py profile --workloads 8 --definition dsv3_tp8
    python3 run.py profile --stages --tokens 1024 2048
    python3 run.py profile --sweep             T = 1, 2, 4 ... 16384
    python3 run.py profile --sweep --as engines
    python3 run.py profile --sweep --definition dsv3_tp8 glm5    T = 1, 8, 64, 512, 4096

Kernels: a call of each solution is captured in a CUDA graph and replayed, the L2 cache overwritten
before each replay, while torch's profiler (CUPTI) notes when every kernel begins and ends; with
--eager, or where the host waits in a call, the calls themselves are traced, and gaps are then the
host's, too. Medians over the replays. A gap is the time from the end of the kernel before; where it
is negative, the kernel was launched early (programmatic dependent launch) and its time holds what
it waited for: only the span from the first start to the last end adds up. Beside it stands the
device time without the profiler. MB and GFLOP are what a kernel has to move and to compute for the
routing of the workload, its floor the larger of both over the rates of this GPU, the floor of the
call that of `check --only floors`. A workload whose weights or intermediates stay in the L2 cache
can beat the former. For Nsight Compute or Systems --only-call makes one call between
cudaProfilerStart and Stop:

    ncu --profile-from-start off --target-processes all --metrics dram__bytes_read.sum,... \\
        python3 run.py profile --workloads 80 --only-call

Stages: routing, GEMM1, SwiGLU + requantisation, GEMM2 and combine of every solution that marks
them, by CUDA events; gemm1 and gemm2 include the padding before and the unpadding after the kernel.
Where the GPU waits for the host, that wait counts. End to end is measured by calls of their own.
Routing is that of the workload with this token count, if there is one, else drawn as that of the
nearest is.

Sweep: the times of whole calls, on the device and by flashinfer-bench's loop, in turns and on a
cold L2 cache, beside the floor; an output that is wrong has no time. Of fused, fused_hifi, flat
and three peers unless --solutions names others. With --as engines tokens are bfloat16, and experts
are chosen and tokens quantised within the call: `moe_fp8.experts` in all its forms, what vLLM and
SGLang have in its place where they are installed, and the peers. --json is written after each T.
--definition names other layers, each with its own floor; dsv3_tp8_shared, which is in no data set,
is DeepSeek-V3 TP8 with the shared expert fused, and has `moe_fp8.experts` beside its solutions.
"""

import argparse
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from scripts.common import environment, files
from scripts.common.command_line import EXIT_OK, Failure, UsageError, parser, run_main, steps, whole
from scripts.common.definitions import (
    DEFAULT,
    MODEL_TOKENS,
    RENORMALIZE,
    SHARED,
    MoeDefinition,
    find_layer,
)
from scripts.common.floors import floor_ms
from scripts.common.text import markdown_table, text_table
from scripts.data.dataset import Inputs, definition_of, named
from scripts.pack import sources
from scripts.programs.options import add_options

if TYPE_CHECKING:
    import pandas as pd

    from scripts.measure.gemm_problems import Histogram
    from scripts.measure.timing import Timed

FUSED = "cutedsl_moe_fp8_fused"


def parse_arguments() -> argparse.Namespace:
    arguments = parser(__doc__)
    add = arguments.add_argument
    what = arguments.add_mutually_exclusive_group(required=True)
    what.add_argument("--workloads", nargs="+", metavar="T|UUID", help="kernels of these")
    what.add_argument("--stages", action="store_true", help="the stages of the layer instead")
    what.add_argument("--sweep", action="store_true", help="whole calls over the number of tokens")
    add_options(
        arguments, "definition", "solutions", "local", "run-foreign", "rates", "seed", "cpu",
        "markdown", "json", cpu={"help": "stages: time the torch model on the CPU"},
        definition={"nargs": "+", "type": find_layer, "default": [], "help": "other layers"},
    )  # fmt: skip
    add("--repeats", type=whole(1), help="timed calls (20; stages: 50)")
    add("--eager", action="store_true", help="kernels: trace the calls, not replays of a graph")
    add("--only-call", action="store_true", help="kernels: one call for ncu or nsys, no figures")
    said = "stages (1024 2048), sweep (1 2 4 ... 16384)"
    add("--tokens", nargs="+", type=whole(1), metavar="T", help=said)
    said = "sweep: what is called, the definition's solutions or what engines call"
    add("--as", dest="form", choices=("definition", "engines"), default="definition", help=said)
    args = arguments.parse_args()
    if args.definition and args.stages:
        raise UsageError("--definition: not with --stages")
    if SHARED in args.definition and not args.sweep:
        raise UsageError(f"{SHARED.short}: only with --sweep, it has no workloads")
    args.definition = args.definition or [DEFAULT]
    args.repeats = args.repeats or (50 if args.stages else 20)
    return args


def show(args: argparse.Namespace, title: str, frame: "pd.DataFrame") -> None:
    render = markdown_table if args.markdown else text_table
    print(f"{'### ' if args.markdown else ''}{title}\n")
    print(render(list(frame.columns), frame.values.tolist()), flush=True)


def rates_of(args: argparse.Namespace) -> dict[str, float]:
    """This GPU's, measured now or recorded."""
    from scripts.measure import floors, gpu

    return gpu.measure_rates() if args.rates is None else floors.recorded_rates(args.rates)[1]


def kernels(args: argparse.Namespace) -> dict[str, Any]:
    """All figures of the kernels; nothing with --only-call."""
    import torch

    from scripts.measure import gpu, plan, profile
    from scripts.measure.gemm_problems import histogram
    from scripts.measure.timing import timed

    hardware = gpu.require_gpu()
    rates = None if args.only_call else rates_of(args)
    if rates:
        print(f"{hardware}: {gpu.describe_rates(rates)}\n")
    results: list[dict[str, Any]] = []
    hashes: dict[str, str] = {}
    for layer in args.definition:
        chosen = plan.choose(
            args.local,
            True,
            solutions=list(map(layer.packed_name, args.solutions or [FUSED])),
            workloads=args.workloads,
            run_foreign=args.run_foreign,
            definition=layer,
        )
        hashes |= {s.name: s.hash() for s in chosen.solutions}
        inputs_of = Inputs(chosen.trace_set, "cuda", args.seed)
        build = functools.partial(timed, definition_of(chosen.trace_set))
        for trace in steps(chosen.workloads, lambda t: named(t.workload)):
            with torch.no_grad():
                inputs = inputs_of.of(trace.workload)
                calls = {s.name: functools.partial(build, s, inputs) for s in chosen.solutions}
                if rates:
                    h = histogram(chosen.trace_set, trace.workload, layer)
                    results += kernels_of(args, calls, h, layer, rates)
                else:
                    for call in calls.values():
                        profile.one_call(call())
    if not rates:
        return {}
    return {
        "hardware": hardware,
        "method": "torch.profiler (CUPTI), L2 overwritten before each call, medians",
        "repeats": args.repeats,
        "seed": args.seed,
        "environment": environment.capture(),
        "floors": rates,
        "solutions": hashes,
        "results": results,
    }


def kernels_of(
    args: argparse.Namespace,
    calls: "Mapping[str, Callable[[], Timed]]",
    h: "Histogram",
    layer: MoeDefinition,
    rates: dict[str, float],
) -> list[dict[str, Any]]:
    """Of the calls of a workload, which are shown one after the other."""
    from scripts.measure import floors, profile

    (workload,) = floors.workloads([h])
    if args.rates is None:
        workload["read_ms"] = floors.measure_reading([h], args.repeats, layer)[h.uuid]
    floor_us = 1e3 * max(floor_ms(workload, rates, layer))
    results = []
    for name, call in calls.items():
        result: dict[str, Any] = {"solution": name, "workload": workload, "floor_us": floor_us}
        result |= profile.measure(call(), args.repeats, args.eager)
        result["kernels"] = profile.with_work(result["kernels"], h, rates, layer)
        results.append(result)
        show(args, profile.title(result), profile.table(result))
        print(f"\n{profile.summary(result)}\n", flush=True)
    return results


def layer_stages(args: argparse.Namespace) -> dict[str, Any]:
    """The content of stages.json."""
    import torch
    from flashinfer_bench.utils import hardware_from_device

    from scripts.measure import stages

    if not args.cpu and not torch.cuda.is_available():
        raise UsageError("no GPU is visible; --cpu times the torch model on the CPU instead")
    device = "cpu" if args.cpu else "cuda:0"
    hardware = hardware_from_device(device)
    timing = "host clock" if args.cpu else "CUDA events between the stages, L2 overwritten"
    lengths = args.tokens or (1024, 2048)
    layers = stages.load_layers(args.solutions, use_gpu=not args.cpu)
    hashes = sources.current()
    problems = stages.Problems(args.local, device, args.seed)
    names, results = ", ".join(layers), []
    where = f"CPU ({hardware}), torch model" if args.cpu else hardware
    for length in steps(lengths, lambda t: f"T={t}: {names}", lambda t: 4000 + t):
        result = stages.measure(layers, problems, length, args.repeats)
        results.append(result)
        how = f"median ms of {args.repeats} calls ({timing}; routing: {result['routing']})"
        show(args, f"T={length}, {where}: {how}", stages.table(result))
        for name in list(layers)[1:]:
            print(f"\n{name}: output {result['solutions'][name]['output']}")
        print()
    return {
        "hardware": hardware,
        "device": "cpu" if args.cpu else "cuda",
        "timing": timing,
        "iterations": args.repeats,
        "seed": args.seed,
        "environment": environment.capture(),
        "solutions": {name: hashes[name] for name in layers},
        "results": results,
    }


def sweep(args: argparse.Namespace) -> dict[str, Any]:
    """The content of sweep.json, written after each number of tokens."""
    import torch

    from scripts.measure import gpu
    from scripts.measure import sweep as measure
    from scripts.pack.availability import say_skipped
    from scripts.table.models import models_table
    from scripts.table.tables import sweep_tables

    hardware = gpu.require_gpu()
    engines, layers = args.form == "engines", args.definition
    if engines and any(layer.routing == RENORMALIZE for layer in layers):
        raise UsageError("--as engines: not of a layer that routes by renormalisation")
    wanted = args.solutions or ([FUSED, *measure.PEERS] if engines else measure.SOLUTIONS)
    rates = rates_of(args)
    record: dict[str, Any] = {
        "hardware": hardware,
        "form": args.form,
        "method": "CUDA graph replays and flashinfer-bench's loop, L2 overwritten, medians",
        "repeats": args.repeats,
        "seed": args.seed,
        "environment": environment.capture(),
        "floors": rates,
        "solutions": {},
        "peers": {},
        "skipped": {},
        "results": [],
    }
    peers, results = record["peers"], record["results"]
    lengths = args.tokens or (measure.TOKENS if len(layers) == 1 else MODEL_TOKENS)
    for layer in layers:
        chosen = measure.choose(layer, wanted, args.local, args.run_foreign)
        calls, skipped, found = measure.of_definition(layer, chosen), chosen.skipped, chosen.peers
        if engines:
            from moe_fp8.problem import MoeShape

            from scripts.measure.as_engines import Engines

            others = {n: s for n, s in chosen.solutions.items() if chosen.peers[n]}
            calls = Engines(chosen.definition, others, MoeShape(**layer.shape))
            skipped, found = calls.skipped, calls.peers  # which the calls fill
            skipped |= chosen.skipped
        record["solutions"] |= chosen.hashes
        problems = measure.problems_of(layer, args.local, "cuda", args.seed)
        text = f"{layer.short} T={{}}".strip()
        with torch.no_grad():
            for length in steps(lengths, text.format, lambda t: 4000 + t):
                args_of = (problems, calls, length, rates, args.rates is None, args.repeats)
                results.append(measure.measure(*args_of))
                peers |= found
                record["skipped"] |= skipped
                if args.json:
                    files.write_json(args.json, record)
        del problems, calls  # with the layer's weights
    for table in sweep_tables(record) if len(layers) == 1 else models_table(record):
        if table:
            show(args, table.title, table.frame)
            print()
    if record["skipped"]:
        print(f"not run: {say_skipped(record['skipped'])}")
    failed = [n for r in results for n, of in r["solutions"].items() if "error" in of]
    if ours := sorted({name for name in failed if not peers[name]}):
        raise Failure(f"failed: {', '.join(ours)}")
    return record


def main() -> int:
    args = parse_arguments()
    measure = sweep if args.sweep else layer_stages if args.stages else kernels
    record = measure(args)
    if args.json and record:
        files.write_json(args.json, record)
    measured = (
        [s for r in record["results"] for s in r["solutions"].values()] if args.stages else []
    )
    if any(of["output"] == "not finite" for of in measured):
        raise Failure("an output holds NaN or infinite values")
    return EXIT_OK


if __name__ == "__main__":
    run_main(main)
