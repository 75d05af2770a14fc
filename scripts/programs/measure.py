"""Measurements beyond the benchmark's own clock: accuracy, device times, bits, time by kernel.

    python3 run.py measure times --solutions 'cutedsl_*' --workloads 80
    python3 run.py measure bits
    python3 run.py measure roofline
    python3 run.py measure kernels --workloads 80           of fused, or of other --solutions
    python3 run.py measure sweep                            T = 1, 2, 4 ... 16384
    python3 run.py measure sweep --as engines
    python3 run.py measure sweep --definition dsv3_tp8 glm5     T = 1, 8, 64, 512, 4096
    python3 run.py measure gemm --grid study                81 configurations, even rows
    python3 run.py measure gemm --layers                    the layer's GEMMs, 19 workloads
    python3 run.py measure batched                          tokens that lie by expert
    python3 run.py measure tune_layer --definition glm5     other configs of a layer's two GEMMs

times: cosine, calc_diff and matched ratios at three tolerances against the reference, then the time
of a call on the GPU alone and by flashinfer-bench's loop. bits: checks that outputs repeat, and
that a token's output does not depend on the rest of the batch. It takes one workload, by default
the largest of up to 1024 tokens. roofline: the least time of every workload, from the weights that
must be read and the FLOPs, at rates measured here. On the CPU, times (without times) and bits check
the reference model. With --run, these three take the solutions and workloads of that run of bench
whose sources and hardware are unchanged, and add to it. `bench` does so after every run on a GPU.

kernels: a call of each solution is captured in a CUDA graph and replayed while torch's profiler
(CUPTI) notes the begin and end of every kernel. With --eager, or if the host waits in a call, the
calls themselves are traced. Gaps then include the host's. A gap is the time from the end of the
previous kernel. A negative gap means an early launch (programmatic dependent launch), and the
kernel's time includes its wait: only the span from the first start to the last end adds up. The
device time without the profiler is shown beside it. MB and GFLOP are the data that a kernel has to
move and the work that it has to compute for the routing of the workload. A workload whose weights
or intermediates stay in the L2 cache can beat its roofline. For Nsight Compute or Systems
--only-call makes one call between cudaProfilerStart and Stop:

    ncu --profile-from-start off --target-processes all --metrics dram__bytes_read.sum,... \\
        python3 run.py measure kernels --workloads 80 --only-call

sweep: the times of whole calls against the roofline, by default of fused, fused_hifi, flat and
three peers. A wrong output has no time. With --as engines tokens are bfloat16, and experts are
chosen and tokens quantised within the call: `moe_fp8.experts` in all its forms, the functions of
vLLM and SGLang if these are installed, and the peers. dsv3_tp8_shared, which is in no data set, is
DeepSeek-V3 TP8 with the shared expert fused, and has `moe_fp8.experts` besides its solutions.

gemm: the grouped FP8 GEMM alone against DeepGEMM, sgl_kernel and Triton: CUDA graphs of eight
launches that rotate over copies of the operands (together at least four times the L2 cache). With
--layers our kernel has the configs that flat and v3 launch on these workloads. flat is also timed
with the neighbouring configs: "best known" is the fastest of the three. Otherwise the config is the
heuristic's for known rows, and every expert's rows are padded to the same number.

batched: `moe_fp8.batched_experts` with 8 to 64 experts of DeepSeek-V3 and Kimi-K2 and 1 to 256
tokens each (--rows), or with --uneven on average, so that the fullest has about twice as many. The
peers are DeepGEMM's masked GEMMs with vLLM's, SGLang's or a Triton kernel for SwiGLU and
quantisation between them. A wrong output has no time.

tune_layer: the fastest configs on this GPU, and the loss of the shipped ones: the shipped pair
against pairs a step away on the heuristic's ladder, by device time of the whole layer. All must
give the shipped pair's bits. Exit status 1 if the shipped pair loses more than --max-loss percent,
or did not run.

The L2 cache is overwritten before every call, compared calls take turns, and medians are reported.
--out appends every figure to a file, a row each, as it comes.
"""

import argparse
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.common import schemas
from scripts.common.command_line import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    UsageError,
    parser,
    positive,
    run_main,
    say,
    steps,
    whole,
)
from scripts.common.definitions import (
    DEFAULT,
    MODEL_TOKENS,
    RENORMALIZE,
    SHARED,
    MoeDefinition,
    find_any,
)
from scripts.common.project import FUSED
from scripts.data.dataset import Inputs, definition_of, named, tokens
from scripts.data.rows import BITS, FILE, ROOFLINE, TIMES
from scripts.measure.gemm_problems import GRIDS, grid_problems, histograms, layer_problems
from scripts.programs.options import add_options

if TYPE_CHECKING:
    from scripts.data.rows import Writer
    from scripts.measure.plan import Plan
    from scripts.table.tables import Table

REPLAYED = "CUDA graph replays and flashinfer-bench's loop, L2 overwritten, medians"
ON_CPU = ("times", "bits")
OF_A_RUN = ("times", "bits", "roofline")
TURNS = "CUDA graph replays in turns, L2 overwritten, medians"
REPEATS = {"tune_layer": 10}
TUNED_TOKENS = (1, 80, 320, 901, 2048, 4096, 14107)
"""The heuristic's pairs at these tokens are all that it picks for the default layer."""
OPTIONS = {
    "definition": ("times", "bits", "roofline", "kernels", "sweep", "tune_layer"),
    "run": OF_A_RUN,
    "solutions": ("times", "bits", "kernels", "sweep"),
    "run_foreign": (*OF_A_RUN, "kernels", "sweep"),
    "workloads": ("times", "bits", "kernels"),
    "max_tokens": ("times",),
    "tokens": ("sweep", "gemm", "tune_layer"),
    "form": ("sweep",),
    "eager": ("kernels",),
    "only_call": ("kernels",),
    "grid": ("gemm",),
    "layers": ("gemm",),
    "rows": ("batched",),
    "uneven": ("batched",),
    "accurate": ("tune_layer",),
    "max_loss": ("tune_layer",),
}
"""The measurements that take an option, for options that not all take."""
LACKS = {"bits": "repeats", "batched": "local"}
"""The one option that a measurement does not take."""


def parse_arguments() -> argparse.Namespace:
    arguments = parser(__doc__)
    add = arguments.add_argument
    add("what", choices=list(MEASURES), help="what is measured")
    add_options(
        arguments, "local", "solutions", "definition", "run-foreign", "workloads", "max-tokens",
        "seed", "cpu", "markdown", definition={"nargs": "+", "default": [], "type": find_any},
    )  # fmt: skip
    add("--run", type=Path, metavar="DIR", help="times, bits, roofline: add to this run of bench")
    add("--out", type=Path, metavar="FILE", help="append all figures there")
    add("--repeats", type=whole(1), help="timed calls of each kind (20; tune_layer 10)")
    text = "sweep (1 2 4 ... 16384), gemm --layers, tune_layer (1 ... 14107)"
    add("--tokens", nargs="+", type=whole(1), metavar="T", help=text)
    text = "sweep: what is called, the definition's solutions or what engines call"
    add("--as", dest="form", choices=("definition", "engines"), help=text)
    add("--eager", action="store_true", help="kernels: trace the calls, not replays of a graph")
    add("--only-call", action="store_true", help="kernels: one call for ncu or nsys, no figures")
    grid = arguments.add_mutually_exclusive_group()
    grid.add_argument("--grid", choices=list(GRIDS), help="gemm: even rows (quick)")
    grid.add_argument("--layers", action="store_true", help="gemm: the workloads' rows")
    add("--rows", nargs="+", type=whole(1), metavar="M", help="batched: of an expert")
    add("--uneven", action="store_true", help="batched: drawn around that")
    add("--accurate", action="store_true", help="tune_layer: two FP8 terms, as in hifi")
    add("--max-loss", type=positive, metavar="PERCENT", help="tune_layer: what may be lost (2)")
    args = arguments.parse_args()
    for option, measures in OPTIONS.items():
        if getattr(args, option) and args.what not in measures:
            name = "as" if option == "form" else option.replace("_", "-")
            raise UsageError(f"--{name}: only with {', '.join(measures)}")
    lacking = LACKS.get(args.what)
    if lacking and getattr(args, lacking) != arguments.get_default(lacking):
        raise UsageError(f"--{lacking}: not with {args.what}")
    if args.tokens and args.what == "gemm" and not args.layers:
        raise UsageError("--tokens: only with --layers")
    if len(args.definition) > 1 and args.what not in ("kernels", "sweep"):
        raise UsageError(f"{args.what}: of one --definition")
    if SHARED in args.definition and args.what not in ("sweep", "tune_layer"):
        raise UsageError(f"{SHARED.short}: only with sweep or tune_layer, it has no workloads")
    if args.run and args.out:
        raise UsageError("--out: not with --run, whose figures go to that run's file")
    if args.run and not args.definition and (info := args.run / "run.json").is_file():
        of_run = schemas.read(info, schemas.RunInfo).get("definition", DEFAULT.name)
        args.definition = [find_any(of_run)]
    args.definition = args.definition or [DEFAULT]
    layers = all(isinstance(definition, MoeDefinition) for definition in args.definition)
    if not layers and args.what != "times":
        raise UsageError(f"{args.what}: only of a layer, not of a GEMM's definition")
    args.tokens = list(dict.fromkeys(args.tokens or ())) or None  # each once
    args.repeats = args.repeats or REPEATS.get(args.what, 20)
    args.path = args.run / FILE if args.run else args.out

    import torch

    from scripts.measure.gpu import require_gpu

    on_gpu = torch.cuda.is_available() and not args.cpu
    if not on_gpu and args.what not in ON_CPU:
        require_gpu()
        raise UsageError(f"{args.what}: not with --cpu")
    args.device = "cuda:0" if on_gpu else "cpu"
    return args


def writer(args: argparse.Namespace, name: str, method: str, **more: Any) -> "Writer":
    from flashinfer_bench.utils import hardware_from_device

    from scripts.data.rows import Writer

    settings = {"repeats": args.repeats, "seed": args.seed, **more}
    return Writer(name, hardware_from_device(args.device), method, args.path, **settings)


def planned(args: argparse.Namespace, **options: Any) -> "Plan":
    """Return the plan of a measurement on workloads."""
    from scripts.measure import plan

    chosen = {"solutions": args.solutions, "run": args.run, "definition": args.definition[0]}
    return plan.choose(
        args.local,
        args.device != "cpu",
        workloads=args.workloads,
        max_tokens=args.max_tokens,
        run_foreign=args.run_foreign,
        **(chosen | options),
    )


Shown = Iterator["Writer | tuple[str, Table]"]
"""The measurement, as soon as it has begun, then titles and their tables."""


def times(args: argparse.Namespace) -> Shown:
    from scripts.measure import times
    from scripts.table import pivots

    on_gpu = args.device != "cpu"
    method = "accuracy against the reference" + f"; {REPLAYED}" * on_gpu
    plan, into = planned(args), writer(args, TIMES, method)
    yield into
    times.of_plan(plan, into, args.device, args.seed, args.repeats * on_gpu)
    yield "", pivots.pairs_table(into.result, TIMES)


def bits(args: argparse.Namespace) -> Shown:
    from scripts.measure import bits
    from scripts.measure.plan import CPU_MAX_TOKENS
    from scripts.table.tables import bits_table, by_part

    plan, most = planned(args), bits.MAX_TOKENS if args.device != "cpu" else CPU_MAX_TOKENS
    fitting = [t.workload for t in plan.workloads if args.workloads or tokens(t.workload) <= most]
    if not fitting:
        raise UsageError(f"bits: no workload of at most {most} tokens; --workloads names one")
    workload = max(fitting, key=tokens)
    solutions = [s for s in plan.solutions if (workload.uuid, s.name) in plan.pairs]
    say(f"T={tokens(workload)} ({workload.uuid[:8]}): {', '.join(s.name for s in solutions)}")
    definition = definition_of(plan.trace_set)
    inputs = Inputs(plan.trace_set, args.device, args.seed).of(workload)
    case = {"definition": definition.name, "uuid": workload.uuid, "tokens": tokens(workload)}
    into = writer(args, BITS, "the same tokens again and in other batches, bit by bit")
    yield into
    bits.measure(into, case, definition, solutions, inputs, args.device)
    yield "", bits_table(by_part(into.rows))


def roofline(args: argparse.Namespace) -> Shown:
    from scripts.measure import gpu, roofline
    from scripts.table import pivots

    if args.run and not args.run.is_dir():
        raise UsageError(f"{args.run} has no traces.jsonl")
    (layer,) = args.definition
    rates = gpu.measure_rates()
    into = writer(args, ROOFLINE, "reading the weights, CUDA graph replays", rates=rates)
    yield into
    roofline.measure(into, histograms(args.local, layer=layer), args.repeats, layer)
    yield gpu.describe_rates(rates), pivots.roofline_table(into.result, layer)


def kernels(args: argparse.Namespace) -> Shown:
    from scripts.measure import gpu, kernels, roofline
    from scripts.measure.gemm_problems import histogram
    from scripts.measure.timing import timed
    from scripts.table import pivots

    into, rates = None, {}
    if not args.only_call:
        rates = gpu.measure_rates()
        method = "torch.profiler (CUPTI), L2 overwritten before each call, medians"
        into = writer(args, "kernels", method, rates=rates)
        yield into
    for layer in args.definition:
        names = list(map(layer.packed_name, args.solutions or [FUSED]))
        plan = planned(args, solutions=names, definition=layer)
        definition = definition_of(plan.trace_set)
        inputs_of = Inputs(plan.trace_set, "cuda", args.seed)
        for trace in steps(plan.workloads, lambda t: named(t.workload)):
            h = histogram(plan.trace_set, trace.workload, layer)
            case = {"definition": layer.name, "uuid": h.uuid, **h.counts()}
            counts = f"{case['pairs']} pairs, {case['active']} experts"
            inputs = inputs_of.of(trace.workload)
            least_us = 1e3 * roofline.least_ms(h, rates, args.repeats, layer) if rates else 0.0
            for s in plan.solutions:
                call = timed(definition, s, inputs, "cuda")
                if into is None:
                    kernels.one_call(call)
                    continue
                arguments = (h, layer, rates, least_us, args.repeats, args.eager)
                kernels.measure(into, case, s.name, call, *arguments, hash=s.hash())
                title = f"{s.name}, T={h.tokens}: {counts}"
                yield title, pivots.kernels_table(into.result, s.name, h.uuid)


def sweep(args: argparse.Namespace) -> Shown:
    from scripts.measure import calls, gpu
    from scripts.measure.cases import problems_of
    from scripts.table import pivots

    engines, layers = args.form == "engines", args.definition
    if engines and any(d.routing == RENORMALIZE or d.swiglu_limit is not None for d in layers):
        raise UsageError("--as engines: not of a layer that clamps or routes by renormalisation")
    wanted = args.solutions or ([FUSED, *calls.PEERS] if engines else calls.SOLUTIONS)
    name = "sweep_engines" if engines else "sweep" if len(layers) == 1 else "models"
    rates = gpu.measure_rates()
    into = writer(args, name, REPLAYED, rates=rates)
    yield into
    lengths = args.tokens or (calls.TOKENS if len(layers) == 1 else MODEL_TOKENS)
    for layer in layers:
        chosen = calls.choose(layer, wanted, args.local, args.run_foreign)
        called: calls.Calls = calls.OfDefinition(layer, chosen)
        if engines:
            from scripts.measure.as_engines import Engines

            called = Engines(layer, chosen)
        problems = problems_of(layer, args.local, "cuda", args.seed)
        text = f"{layer.short} T={{}}".strip().format
        for length in steps(lengths, text, lambda t: 4000 + t):
            calls.measure(into, layer, problems, called, length, rates, args.repeats)
        for subject, why in called.skipped.items():
            into.add({}, subject, not_tried=why)
        del problems, called  # frees the layer's weights
    shown = pivots.sweep_table(into.result, name)
    for table in (shown, pivots.failed_table(pivots.called(into.result, name))):
        yield table.title, table


def gemm(args: argparse.Namespace) -> Shown:
    from scripts.measure import gemm, gpu
    from scripts.table import pivots

    name = "gemm_layers" if args.layers else f"gemm_{args.grid or 'quick'}"
    problems = grid_problems(args.grid or "quick")
    if args.layers:
        problems = layer_problems(histograms(args.local, args.tokens))
    collect = functools.partial(gemm.collect_variants, args.layers)
    gemm.compile_ahead(functools.partial(gemm.compile_variants, collect), problems)
    rates = gpu.measure_rates()
    method = (
        f"graphs of {gemm.LAUNCHES} launches over rotating operands, {args.repeats} replays in "
        "turns, L2 overwritten before each; median"
    )
    into = writer(args, name, method, rates=rates)
    yield into
    timing = gemm.Timing(rates, args.repeats, args.seed)
    for problem in steps(problems):
        gemm.run_problem(into, problem, collect(problem), timing)
    f = pivots.gemm_frame(into.result, name)
    yield f"{method}. {gpu.describe_rates(rates)}", pivots.gemm_table(f)
    yield "Ratio to the best peer", pivots.ratios_table(f)


def batched(args: argparse.Namespace) -> Shown:
    from scripts.measure import batched, gpu
    from scripts.table import pivots

    rates = gpu.measure_rates()
    into = writer(args, "batched", TURNS, rates=rates, uneven=args.uneven)
    yield into
    weights = batched.make_weights(max(batched.EXPERTS), args.seed)
    cases = [(e, m) for e in batched.EXPERTS for m in args.rows or batched.TOKENS]
    for experts, each in steps(cases, lambda case: "{} experts, {} tokens each".format(*case)):
        case = batched.make_case(weights.of(experts), each, args.seed, args.uneven)
        batched.measure(into, case, rates, args.repeats)
    yield gpu.describe_rates(rates), pivots.batched_table(into.result)


def tune_layer(args: argparse.Namespace) -> Shown:
    from scripts.measure import tune
    from scripts.measure.cases import problems_of
    from scripts.table import pivots

    problems = problems_of(args.definition[0], args.local, args.device, args.seed)
    into = writer(args, "tune_layer", TURNS)
    yield into
    terms, tokens = 2 if args.accurate else 1, args.tokens or TUNED_TOKENS
    tune.tune_layer(into, problems, tokens, terms, args.repeats, args.max_loss or 2.0)
    yield "", pivots.tuned_table(into.result)


MEASURES: dict[str, Callable[[argparse.Namespace], Shown]] = {
    measure.__name__: measure
    for measure in (times, bits, roofline, kernels, sweep, gemm, batched, tune_layer)
}


def main() -> int:
    args = parse_arguments()

    import torch

    into: Writer | None = None
    interrupted = False
    shown = MEASURES[args.what](args)
    try:
        with torch.no_grad():
            for each in shown:
                if not isinstance(each, tuple):
                    into = each
                    continue
                title, table = each
                if table:
                    text = table.markdown() if args.markdown else table.text()
                    print("\n\n".join(filter(None, [title, text])) + "\n", flush=True)
    except KeyboardInterrupt:
        interrupted = True
        say("interrupted")
    rows = into.rows if into else []
    for row in rows:
        if why := why_failed(row):
            say(f"error: {row['subject']}{where(row)}: {why}")
    if args.path and rows:
        say(f"{len(rows)} rows added to {args.path}")
    if interrupted:
        return EXIT_INTERRUPTED
    failed = [row for row in rows if why_failed(row) and not row.get("peer")]
    return EXIT_FAILED if failed else EXIT_OK


def where(row: dict[str, Any]) -> str:
    """Return the case of a row for an error's line."""
    if row.get("tokens") is not None:
        return f" at T={row['tokens']}"
    if "n" in row:
        return f" at {row['rows']:g} rows, {row['n']}x{row['k']}"
    return f" at {row['experts']} experts, {row['rows']} rows" if "experts" in row else ""


def why_failed(row: dict[str, Any]) -> str:
    """Return the reason why a row failed; empty if it did not."""
    if changed := row.get("inputs_changed"):
        return f"changes its inputs: {', '.join(changed)}"
    return row.get("error") or ("not finite" if row.get("output") == "not finite" else "")


if __name__ == "__main__":
    run_main(main)
