"""Measurements beyond the benchmark's own clock. Each has options of its own: measure NAME --help.

    python3 run.py measure times --solutions 'cutedsl_*' --workloads 80
    python3 run.py measure bits
    python3 run.py measure roofline
    python3 run.py measure kernels --workloads 80           of fused, or of other --solutions
    python3 run.py measure sweep                            T = 1, 2, 4 ... 16384
    python3 run.py measure sweep --as engines
    python3 run.py measure sweep --as channels              a weight scale for each channel
    python3 run.py measure sweep --definition dsv3_tp8 glm5     T = 1, 8, 64, 512, 4096
    python3 run.py measure gemm --ladder                    one field more a step
    python3 run.py measure gemm --grid study                81 configurations, even rows
    python3 run.py measure gemm --layers                    the layer's GEMMs, 19 workloads
    python3 run.py measure batched                          tokens that lie by expert
    python3 run.py measure tune_layer --definition glm5     other configs of a layer's two GEMMs

The L2 cache is overwritten before every timed call (gemm: before eight launches). Graph replays
that are compared take turns. Figures are medians. --out appends every figure to a file, a row each,
as it comes.
"""

import argparse
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.common import options
from scripts.common.definitions import (
    DEFAULT,
    GIVEN,
    MODEL_TOKENS,
    RENORMALIZE,
    find,
    find_layer,
)
from scripts.common.program import (
    EXIT_CODES,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    FUSED,
    Help,
    UsageError,
    input_path,
    output_file,
    parser,
    run_main,
    say,
    show,
    steps,
    whole,
)

if TYPE_CHECKING:
    from scripts.publishing.rows import Writer
    from scripts.publishing.tables import Table


REPLAYED = "CUDA graph replays and flashinfer-bench's loop, L2 overwritten, medians"
TURNS = "CUDA graph replays in turns, L2 overwritten, medians"
TUNED_TOKENS = (1, 80, 320, 901, 1280, 2048, 4096, 14107)
"""The heuristic's pairs at these tokens are all that it picks for the default layer."""
OF_A_RUN = ("times", "bits", "roofline")
"""The measurements that follow a run of bench."""

Shown = Iterator["Writer | tuple[str, Table]"]
"""The measurement, as soon as it has begun, then titles and their tables."""
Measure = Callable[[argparse.Namespace], Shown]
Parser = argparse.ArgumentParser


def writer(args: argparse.Namespace, name: str, method: str, **more: Any) -> "Writer":
    from flashinfer_bench.utils import hardware_from_device

    from scripts.publishing.rows import Writer

    settings = {key: getattr(args, key) for key in ("repeats", "seed") if key in args} | more
    return Writer(name, hardware_from_device(args.device), method, args.path, **settings)


def measure_times(args: argparse.Namespace) -> Shown:
    """Accuracy of the outputs and times of the calls.

    Cosine, calc_diff and matched ratios at three tolerances against the reference, then the time of
    a call on the GPU alone and by flashinfer-bench's loop. A wrong output is timed, too. On the CPU
    the reference model is checked and nothing is timed. With --run it takes the solutions and
    workloads of that run of bench whose sources and hardware are unchanged, and adds to it. `bench`
    does so after every run on a GPU.
    """
    from scripts.measuring import cases, layers
    from scripts.publishing import tables
    from scripts.publishing.rows import TIMES

    on_gpu = args.device != "cpu"
    plan = cases.choose(
        args.local, on_gpu, args.run, args.solutions, args.workloads, args.max_tokens,
        args.run_foreign, args.definition,
    )  # fmt: skip
    into = writer(args, TIMES, "accuracy against the reference" + f"; {REPLAYED}" * on_gpu)
    yield into
    layers.measure_plan(plan, into, args.device, args.seed, args.repeats * on_gpu)
    yield "", tables.pairs_table(into.result, TIMES)


def measure_bits(args: argparse.Namespace) -> Shown:
    """Checks that outputs repeat, and that a token's output does not depend on the other tokens.

    It takes one workload, by default the largest of up to 1024 tokens. On the CPU it checks the
    reference model. With --run it takes the solutions and workloads of that run of bench whose
    sources and hardware are unchanged, and adds to it. `bench` does so after every run on a GPU.
    """
    from scripts.measuring import cases, layers
    from scripts.publishing.rows import BITS
    from scripts.publishing.tables import bits_table, by_part

    on_gpu = args.device != "cpu"
    plan = cases.choose(
        args.local, on_gpu, args.run, args.solutions, args.workloads,
        run_foreign=args.run_foreign, definition=args.definition,
    )  # fmt: skip
    most = layers.BITS_MAX_TOKENS if on_gpu else cases.CPU_MAX_TOKENS
    if not plan.pairs:
        raise UsageError(f"bits: {args.run} has no result of the present sources and hardware")
    tokens, every = cases.tokens, [t.workload for t in plan.workloads]
    fitting = [workload for workload in every if args.workloads or tokens(workload) <= most]
    if not fitting:
        raise UsageError(f"bits: no workload of at most {most} tokens; --workloads names one")
    workload = max(fitting, key=tokens)
    solutions = [s for s in plan.solutions if (workload.uuid, s.name) in plan.pairs]
    say(f"T={tokens(workload)} ({workload.uuid[:8]}): {', '.join(s.name for s in solutions)}")
    definition = cases.definition_of(plan.trace_set)
    inputs = cases.Inputs(plan.trace_set, args.device, args.seed).of(workload)
    case = {"definition": definition.name, "uuid": workload.uuid, "tokens": tokens(workload)}
    into = writer(args, BITS, "the same tokens again and in other batches, bit by bit")
    yield into
    layers.measure_bits(into, case, definition, solutions, inputs, args.device)
    yield "", bits_table(by_part(into.rows))


def measure_roofline(args: argparse.Namespace) -> Shown:
    """The least time of every workload: reading the weights, and FLOPs at a rate measured here.

    With --run it adds to that run of bench, as `bench` does after every run on a GPU.
    """
    from scripts.measuring import cases, clock, layers
    from scripts.publishing import tables
    from scripts.publishing.rows import ROOFLINE

    rates = clock.measure_rates()
    into = writer(args, ROOFLINE, "reading the weights, CUDA graph replays", rates=rates)
    yield into
    histograms = cases.histograms(args.local, layer=args.definition)
    layers.measure_rooflines(into, histograms, args.repeats, args.definition)
    yield clock.describe_rates(rates), tables.roofline_table(into.result, args.definition)


def measure_kernels(args: argparse.Namespace) -> Shown:
    """Calls kernel by kernel: time, gap, bytes and FLOPs against the roofline.

    A call of each solution is captured in a CUDA graph and replayed while torch's profiler (CUPTI)
    notes the begin and end of every kernel. If the host waits in a call, the calls themselves are
    traced, and gaps include the host's. A gap is the time from the end of the previous kernel. A
    negative gap means an early launch (programmatic dependent launch), and the kernel's time
    includes its wait: only the span from the first start to the last end adds up. The device time
    without the profiler is shown beside it. MB and GFLOP are the data that a kernel has
    to move and the work that it has to compute for the routing of the workload. A workload whose
    weights or intermediates stay in the L2 cache can beat its roofline. For Nsight Compute or
    Systems --only-call makes one call between cudaProfilerStart and Stop:

        ncu --profile-from-start off --target-processes all --metrics dram__bytes_read.sum,... \\
            python3 run.py measure kernels --workloads 80 --only-call
    """
    from scripts.measuring import cases, clock, kernels, layers
    from scripts.publishing import tables

    into, rates = None, {}
    if not args.only_call:
        rates = clock.measure_rates()
        method = "torch.profiler (CUPTI), L2 overwritten before each call, medians"
        into = writer(args, "kernels", method, rates=rates)
        yield into
    for layer in args.definition:
        names = list(map(layer.packed_name, args.solutions or [FUSED]))
        plan = cases.choose(
            args.local, True, solutions=names, workloads=args.workloads,
            run_foreign=args.run_foreign, definition=layer,
        )  # fmt: skip
        inputs_of = cases.Inputs(plan.trace_set, "cuda", args.seed)
        for trace in steps(plan.workloads, lambda t: cases.named(t.workload)):
            h = cases.histogram(plan.trace_set, trace.workload, layer)
            inputs = inputs_of.of(trace.workload)
            least_us = 1e3 * layers.least_ms(h, rates, args.repeats, layer) if rates else 0.0
            for s in plan.solutions:
                call = clock.timed(inputs_of.definition, s, inputs, "cuda")
                if into is None:
                    kernels.one_call(call)
                    continue
                kernels.measure(into, s, call, h, layer, rates, least_us, args.repeats)
                counts = h.counts()
                title = "{}, T={tokens}: {pairs} pairs, {active} experts".format(s.name, **counts)
                yield title, tables.kernels_table(into.result, s.name, h.uuid)


def measure_sweep(args: argparse.Namespace) -> Shown:
    """Times of whole calls over the number of tokens, against the roofline.

    By default of fused, fused_hifi, flat and four peers. A wrong output has no time. With --as
    engines experts are chosen within the call, and tokens are bfloat16 that it quantises, except in
    calls named fp8: `moe_fp8.experts` and `fused_moe`, the functions of vLLM, SGLang and FlashInfer
    if these are installed, and three peers. With --as channels weights have a scale for each
    channel: `moe_fp8.experts` on them, on the same weights in blocks, and the engines' functions.
    dsv3_tp8_shared, which is in no data set, is DeepSeek-V3 TP8 with the shared expert fused, and
    has `moe_fp8.experts` besides its solutions.
    """
    from scripts.measuring import cases, clock, subjects
    from scripts.publishing import tables

    as_called, definitions = args.form in ("engines", "channels"), args.definition
    if as_called and any(
        d.routing == RENORMALIZE or d.swiglu_limit is not None for d in definitions
    ):
        raise UsageError(
            f"--as {args.form}: not of a layer that clamps or routes by renormalisation"
        )
    if args.form == "channels" and args.solutions:
        raise UsageError("--solutions: not with --as channels, no solution takes such weights")
    peers = () if args.form == "channels" else subjects.PEERS
    wanted = args.solutions or ([FUSED, *peers] if as_called else subjects.SOLUTIONS)
    name = "sweep" if len(definitions) == 1 else "models"
    if as_called:
        name = f"sweep_{args.form}"
    rates = clock.measure_rates()
    into = writer(args, name, REPLAYED, rates=rates)
    yield into
    lengths = args.tokens or (subjects.TOKENS if len(definitions) == 1 else MODEL_TOKENS)
    skipped: set[str] = set()
    for layer in definitions:
        chosen = subjects.choose(layer, wanted, args.local, args.run_foreign)
        of_solutions = functools.partial(subjects.of_solutions, layer, chosen)
        forms = {"engines": subjects.Engines, "channels": subjects.Channels}
        calls = forms[args.form](layer, chosen) if as_called else of_solutions
        problems = cases.problems_of(layer, args.local, "cuda", args.seed)
        text = f"{layer.short} T={{}}".strip().format
        for length in steps(lengths, text, lambda t: 4000 + t):
            subjects.measure(into, layer, problems, calls, length, rates, args.repeats)
        for subject, why in chosen.skipped.items():
            if subject not in skipped:
                into.add({}, subject, not_tried=why)
        skipped |= chosen.skipped.keys()
        del problems, calls  # frees the layer's weights
    shown = tables.sweep_table(into.result, name)
    for table in (shown, tables.failed_table(tables.called(into.result, name))):
        yield table.title, table


def measure_gemm(args: argparse.Namespace) -> Shown:
    """The grouped FP8 GEMM alone against DeepGEMM, sgl_kernel and Triton.

    CUDA graphs of eight launches rotate over copies of the operands (four times the L2 cache, or
    one for each launch). With --layers our kernel has the configs that flat and v3 launch on these
    workloads. flat is also timed with the neighbouring configs: "best known" is the fastest of the
    three. With --ladder our kernel has the configs of scripts/measuring/gemm_ladder.py, from a
    plain one to the shipped ones, a field more a step, and DeepGEMM is the only peer. Without a GPU
    the emulator checks these configs. Otherwise the config is the heuristic's for known rows, and
    every expert's rows are padded to the same number.
    """
    if args.device == "cpu":
        yield from emulate_ladder(args)
        return
    from scripts.measuring import cases, clock, gemm, gemm_ladder
    from scripts.publishing import tables

    name = "gemm_layers" if args.layers else f"gemm_{args.grid or 'quick'}"
    problems = gemm.grid_problems(args.grid or "quick")
    if args.ladder:
        if clock.gpu_arch() != gemm_ladder.TARGET:
            raise UsageError("--ladder: the configs are Hopper's")
        name, problems = "gemm_ladder", gemm.ladder_problems()
        gemm.compile_ahead(gemm.compile_step, [v.name for v in gemm.ladder_and_peer()])
    else:
        if args.layers:
            problems = gemm.layer_problems(cases.histograms(args.local, args.tokens))
        gemm.compile_ahead(functools.partial(gemm.compile_variants, args.layers), problems)
    rates = clock.measure_rates()
    method = (
        f"graphs of {gemm.LAUNCHES} launches over rotating operands, {args.repeats} replays in "
        "turns, L2 overwritten before each; median"
    )
    into = writer(args, name, method, rates=rates)
    yield into
    for problem in steps(problems):
        if args.ladder:
            variants = gemm.ladder_and_peer()
        else:
            variants = gemm.collect_variants(args.layers, problem)
        gemm.run_problem(into, problem, variants, rates, args.repeats, args.seed)
    title = f"{method}. {clock.describe_rates(rates)}"
    if args.ladder:
        yield title, tables.gemm_ladder_table(into.result)
        return
    f = tables.gemm_frame(into.result, name)
    yield title, tables.gemm_table(f)
    yield "Ratio to the best peer", tables.ratios_table(f)


def emulate_ladder(args: argparse.Namespace) -> Shown:
    """Compile every step of the GEMM's ladder, and check it in the emulator."""
    from scripts.measuring import emulate, gemm_ladder
    from scripts.publishing import tables

    if why := emulate.why_not():
        raise UsageError(f"no GPU is visible, and nothing can be emulated: {why}")
    into = writer(args, "gemm_ladder_emulated", f"{gemm_ladder.TARGET}, emulated")
    yield into
    emulate.emulate(gemm_ladder.TARGET)
    # Must come after it: this imports the DSL, which the emulator replaces in part.
    from scripts.measuring import gemm

    gemm.emulate_ladder(into, args.seed)
    yield "", tables.emulated_ladder_table(into.result)


def measure_batched(args: argparse.Namespace) -> Shown:
    """`moe_fp8.batched_experts`: 8 to 64 experts of DeepSeek-V3 and Kimi-K2, 1 to 256 tokens each.

    With --uneven the tokens are drawn around that number, so that the fullest expert has about
    twice as many. The peers are DeepGEMM's masked GEMMs with vLLM's, SGLang's or a Triton kernel
    for SwiGLU and quantisation between them. A wrong output has no time.
    """
    from scripts.measuring import batched, clock
    from scripts.publishing import tables

    rates = clock.measure_rates()
    into = writer(args, "batched", TURNS, rates=rates, uneven=args.uneven)
    yield into
    weights = batched.make_weights(max(batched.EXPERTS), args.seed)
    cases = [(e, m) for e in batched.EXPERTS for m in args.rows or batched.TOKENS]
    for experts, each in steps(cases, lambda case: "{} experts, {} tokens each".format(*case)):
        case = batched.make_case(weights.of(experts), each, args.seed, args.uneven)
        batched.measure(into, case, rates, args.repeats)
    yield clock.describe_rates(rates), tables.batched_table(into.result)


def measure_tune_layer(args: argparse.Namespace) -> Shown:
    """The fastest configs on this GPU, and the loss of the shipped ones.

    The shipped pair runs against pairs a step away on the heuristic's ladder, by device time of the
    whole layer. All must give the shipped pair's bits. Exit status 1 if the shipped pair loses more
    than 2 percent, or did not run.
    """
    from scripts.measuring import cases, tune
    from scripts.publishing import tables

    problems = cases.problems_of(args.definition, args.local, args.device, args.seed)
    into = writer(args, "tune_layer", TURNS)
    yield into
    terms, tokens = 2 if args.accurate else 1, args.tokens or TUNED_TOKENS
    tune.tune_layer(into, problems, tokens, terms, args.repeats)
    yield "", tables.tuned_table(into.result)


def run_of_bench(text: str) -> Path:
    """Return the directory of a run of bench."""
    if not (run := input_path(text)).is_dir():
        raise argparse.ArgumentTypeError(f"{run} is no directory")
    return run


def parse_arguments() -> argparse.Namespace:
    arguments = parser(__doc__)
    subparsers = arguments.add_subparsers(dest="what", required=True)

    def begin(
        name: str, measure: Measure, *shared: Callable[[Parser], None], repeats: int = 20
    ) -> Parser:
        """Add a sub-parser with the options of all measurements and the shared ones."""
        doc = inspect.cleandoc(measure.__doc__ or "")
        texts: dict[str, Any] = {
            "help": doc.splitlines()[0],
            "description": doc,
            "epilog": EXIT_CODES,
        }
        to = subparsers.add_parser(name, formatter_class=Help, **texts)
        to.set_defaults(measure=measure)
        place = to.add_mutually_exclusive_group()
        place.add_argument(
            "--out", type=output_file, metavar="FILE", help="append all figures there"
        )
        if name in OF_A_RUN:
            text = "add to this run of bench: the pairs that it has, if nothing has changed since"
            place.add_argument("--run", type=run_of_bench, metavar="DIR", help=text)
        to.add_argument("--markdown", action="store_true", help="print Markdown")
        if name != "bits":
            text = "timed calls of each kind"
            to.add_argument("--repeats", type=whole(1), default=repeats, metavar="N", help=text)
        for add_option in (options.seed, *shared):
            add_option(to)
        return to

    def add_tokens(to: Parser, default: str, text: str = "tokens of a call") -> None:
        text = f"{text} (default: {default})"
        to.add_argument("--tokens", nargs="+", type=whole(1), metavar="T", help=text)

    chosen = options.local, options.solutions, options.workloads
    of_run = functools.partial(options.definition, default=None)
    of_run = functools.partial(of_run, otherwise=f"that of --run, else {DEFAULT.name}")
    several: dict[str, Any] = {"nargs": "+", "default": [DEFAULT]}
    begin("times", measure_times, *chosen, options.max_tokens, options.cpu, of_run)
    largest = functools.partial(options.workloads, default="the largest of up to 1024 tokens")
    begin("bits", measure_bits, options.local, options.solutions, largest, options.cpu, of_run)
    begin("roofline", measure_roofline, options.local, of_run)
    fused = functools.partial(options.solutions, default="fused")
    to = begin("kernels", measure_kernels, options.local, fused, options.workloads)
    options.definition(to, **several)
    text = "one call for ncu or nsys, no figures"
    to.add_argument("--only-call", action="store_true", help=text)
    few = functools.partial(options.solutions, default="fused, fused_hifi, flat and four peers")
    to = begin("sweep", measure_sweep, options.local, few)
    options.definition(to, type=find_layer, **several)
    add_tokens(to, "1 2 4 ... 16384, of several layers 1 8 64 512 4096")
    text = "what is called: the definition's solutions, or what engines call"
    forms = ("definition", "engines", "channels")
    to.add_argument("--as", dest="form", choices=forms, default="definition", help=text)
    to = begin("gemm", measure_gemm, options.local)
    rows = to.add_mutually_exclusive_group()
    rows.add_argument("--grid", choices=("quick", "study"), help="even rows (default: quick)")
    rows.add_argument("--layers", action="store_true", help="the workloads' rows")
    text = "one field more a step; without a GPU checked in the emulator"
    rows.add_argument("--ladder", action="store_true", help=text)
    add_tokens(to, "all", "tokens of the workloads of --layers")
    to = begin("batched", measure_batched)
    text = "tokens of an expert (default: 1 2 4 ... 256)"
    to.add_argument("--rows", nargs="+", type=whole(1), metavar="M", help=text)
    text = "draw them around that, as an exchange between ranks brings them"
    to.add_argument("--uneven", action="store_true", help=text)
    to = begin("tune_layer", measure_tune_layer, options.local, repeats=10)
    options.definition(to, type=find_layer)
    add_tokens(to, " ".join(map(str, TUNED_TOKENS)))
    to.add_argument("--accurate", action="store_true", help="two FP8 terms, as in hifi")

    args = arguments.parse_args()
    if args.what == "gemm" and args.tokens and not args.layers:
        raise UsageError("--tokens: only with --layers")
    args.path = args.out
    if args.what in OF_A_RUN:
        args.path = args.run / "rows.jsonl" if args.run else args.out
        if not args.definition and args.run and (info := args.run / "run.json").is_file():
            from scripts.common import environment

            args.definition = find(
                environment.read_json(info, environment.RunInfo).get("definition", DEFAULT.name)
            )
        args.definition = args.definition or DEFAULT
    if args.what in ("sweep", "tune_layer"):
        layers = args.definition if args.what == "sweep" else [args.definition]
        if any(layer.routing == GIVEN for layer in layers):
            raise UsageError(f"{args.what}: not of a layer with given experts")
    if "tokens" in args and args.tokens:
        args.tokens = list(dict.fromkeys(args.tokens))  # each once

    import torch

    on_gpu = torch.cuda.is_available() and not getattr(args, "cpu", False)
    if not on_gpu and "cpu" not in args and not getattr(args, "ladder", False):
        raise UsageError("no GPU is visible")
    args.device = "cuda:0" if on_gpu else "cpu"
    return args


def main() -> int:
    args = parse_arguments()

    import torch

    into: Writer | None = None
    interrupted = False
    try:
        with torch.no_grad():
            for each in args.measure(args):
                if not isinstance(each, tuple):
                    into = each
                    continue
                title, table = each
                if table:
                    text = table.markdown() if args.markdown else table.text()
                    show("\n\n".join(filter(None, [title, text])) + "\n", sys.stdout)
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
    return row.get("error", "")


if __name__ == "__main__":
    run_main(main)
