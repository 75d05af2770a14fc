"""The grouped FP8 GEMM alone, beside DeepGEMM and sgl_kernel, in one process on one GPU.

For each shape every variant is checked against the torch model first, then timed: CUDA graphs of
several launches that rotate over copies of the operands (together at least four times the L2 cache,
so no launch finds its weights there), replayed in turns, L2 overwritten before each replay; a
figure is the replay's time over its launches, as median and 10th to 90th percentile. A variant that
cannot be captured is timed by events around single launches and marked so.

us are of kernel time as a caller pays it: sgl_kernel's own pointer set-up kernel is part of its
call. The floor is the larger of bytes over bandwidth and FLOPs over FP8 rate, both measured in the
same run: a large copy and a large read, and torch._scaled_mm of 8192^3.
"""

import dataclasses
import enum
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import environment
from common import (
    EXIT_FAILED,
    EXIT_OK,
    Progress,
    UsageError,
    markdown_table,
    parser,
    run_main,
    text_table,
)

if TYPE_CHECKING:
    import torch

BLOCK = 128
MAX_CALC_DIFF = 1e-3
FLUSH_BYTES = 256 * 2**20

Launch = Callable[[], Any]


def parse_config(text: str, cls: type) -> Any:
    """A config dataclass from `field=value,...`; values are read as the defaults' types."""
    fields = {f.name: f for f in dataclasses.fields(cls)}
    values: dict[str, Any] = {}
    for item in filter(None, (i.strip() for i in text.split(","))):
        name, separator, value = item.partition("=")
        if not separator or name not in fields:
            raise UsageError(
                f"--config {text}: expected FIELD=VALUE with a field of {', '.join(fields)}"
            )
        default = fields[name].default
        try:
            if isinstance(default, bool):
                values[name] = {"true": True, "1": True, "false": False, "0": False}[value.lower()]
            elif isinstance(default, enum.Enum):
                values[name] = type(default)[value]
            elif isinstance(default, tuple):
                values[name] = tuple(int(v) for v in value.split("x"))
            elif isinstance(default, str):
                values[name] = value
            else:
                values[name] = int(value)
        except (ValueError, KeyError):
            raise UsageError(f"--config {text}: {value!r} is no value of {name}") from None
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:
        raise UsageError(f"--config {text}: {error}") from None


@dataclass(frozen=True)
class Problem:
    """`experts` GEMMs of [rows, k] x [n, k]^T."""

    experts: int
    rows: int
    n: int
    k: int

    @property
    def max_rows(self) -> int:
        return -(-self.rows // BLOCK) * BLOCK

    @property
    def flops(self) -> float:
        return 2.0 * self.experts * self.rows * self.n * self.k

    @property
    def bytes(self) -> float:
        """Each operand read once, the output written once."""
        weights = self.n * self.k + 4 * self.n * self.k / BLOCK**2
        tokens = self.rows * (self.k + 4 * self.k / BLOCK + 2 * self.n)
        return self.experts * (weights + tokens)


class Operands:
    """One set of operands, in each layout that a variant takes. The values are those that
    flashinfer-bench draws; the layouts differ, so they are prepared outside the timing."""

    def __init__(self, problem: Problem, device: "torch.device", seed: int):
        import torch
        from moe_fp8.core.layout import BatchedRows

        generator = torch.Generator(device=device)
        generator.manual_seed(seed)
        p = problem
        blocks = p.k // BLOCK

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device)

        def fp8(*shape: int) -> torch.Tensor:
            return normal(*shape).clamp_(-2.0, 2.0).to(torch.float8_e4m3fn)

        self.problem = p
        padded = p.experts * p.max_rows
        # Batched rows: expert e owns rows from e * max_rows; those past `rows` are padding.
        self.a = fp8(padded, p.k)
        self.a_scale = normal(blocks, padded)
        self.b = torch.stack([fp8(p.n, p.k) for _ in range(p.experts)])
        self.b_scale = normal(p.experts, p.n // BLOCK, blocks)
        self.out = torch.empty((padded, p.n), dtype=torch.bfloat16, device=device)
        self.rows_per_expert = torch.full((p.experts,), p.rows, dtype=torch.int32, device=device)
        self.layout = BatchedRows(self.rows_per_expert, p.max_rows)
        row = torch.arange(padded, device=device)
        self.valid = row[row % p.max_rows < p.rows]


@dataclass(frozen=True)
class Call:
    """A launch that is ready to be made, its output and which of its rows the problem defines."""

    launch: Launch
    out: "torch.Tensor"
    rows: "torch.Tensor | None"

    def poison(self) -> None:
        self.out.fill_(float("nan"))

    def result(self) -> "torch.Tensor":
        return self.out if self.rows is None else self.out[self.rows]


@dataclass(frozen=True)
class Variant:
    """A kernel with its name and how to prepare a call on a set of operands."""

    name: str
    prepare: Callable[[Operands], Call]
    peer: bool


def ours(name: str, config: Any) -> Variant:
    from moe_fp8.core import kernels
    from moe_fp8.core.heuristic import choose

    def prepare(x: Operands) -> Call:
        def launch() -> None:
            chosen = config or choose(x.problem.rows, x.problem.n, x.problem.k, even=True)
            kernels.grouped_gemm(x.a, x.a_scale, x.b, x.b_scale, x.out, x.layout, chosen)

        return Call(launch, x.out, x.valid)

    return Variant(name, prepare, peer=False)


def deepgemm_variants() -> list[Variant]:
    """DeepGEMM's two grouped layouts. On Hopper it takes float32 scales; those of the activations
    run along the rows, which the block-major ones already do."""
    import deep_gemm
    import torch

    recipe = (1, BLOCK, BLOCK)

    def contiguous(x: Operands) -> Call:
        p = x.problem
        expert = torch.arange(p.experts, dtype=torch.int32, device=x.a.device)
        groups = expert.repeat_interleave(p.max_rows)
        row = torch.arange(groups.numel(), device=x.a.device)
        groups[row % p.max_rows >= p.rows] = -1  # padding
        a, b = (x.a, x.a_scale.t()), (x.b, x.b_scale)

        def launch() -> None:
            deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous(a, b, x.out, groups, recipe=recipe)

        return Call(launch, x.out, x.valid)

    def masked(x: Operands) -> Call:
        p = x.problem
        batched = x.a.view(p.experts, p.max_rows, p.k)
        # [E, rows, K/128] with the rows contiguous, one matrix an expert.
        scale = x.a_scale.view(-1, p.experts, p.max_rows).transpose(0, 1).contiguous()
        a, b = (batched, scale.transpose(1, 2)), (x.b, x.b_scale)
        out = x.out.view(p.experts, p.max_rows, p.n)

        def launch() -> None:
            deep_gemm.m_grouped_fp8_fp4_gemm_nt_masked(
                a, b, out, x.rows_per_expert, p.rows, recipe=recipe
            )

        return Call(launch, x.out, x.valid)

    return [
        Variant("deepgemm contiguous", contiguous, peer=True),
        Variant("deepgemm masked", masked, peer=True),
    ]


def sgl_variants() -> list[Variant]:
    """sgl_kernel's CUTLASS grouped GEMM on flat rows, set up as SGLang's cutlass_fused_experts_fp8
    does: B as [E, K, N], one stride an expert, scales of A row by row."""
    import torch
    from sgl_kernel import fp8_blockwise_scaled_grouped_mm

    def flat(x: Operands) -> Call:
        p, device = x.problem, x.a.device
        a, a_scale = x.a, x.a_scale.t().contiguous()
        out = x.out
        if p.rows != p.max_rows:
            # index_select knows no FP8
            a = x.a.view(torch.uint8)[x.valid].view(torch.float8_e4m3fn)
            a_scale = a_scale[x.valid]
            out = torch.empty((len(x.valid), p.n), dtype=x.out.dtype, device=device)
        b, b_scale = x.b.transpose(1, 2), x.b_scale.transpose(1, 2)
        pointers = [torch.empty(p.experts, dtype=torch.int64, device=device) for _ in range(5)]
        stride_ab = torch.full((p.experts,), p.k, dtype=torch.int64, device=device)
        stride_out = torch.full((p.experts,), p.n, dtype=torch.int64, device=device)
        layouts = [torch.empty((p.experts, 5), dtype=torch.int32, device=device) for _ in range(2)]
        sizes = torch.tensor([[p.rows, p.n, p.k]] * p.experts, dtype=torch.int32, device=device)
        offsets = torch.arange(p.experts, dtype=torch.int32, device=device) * p.rows
        workspace = torch.empty(32 * 2**20, dtype=torch.uint8, device=device)

        def launch() -> None:
            fp8_blockwise_scaled_grouped_mm(
                out,
                *pointers,
                a,
                b,
                a_scale,
                b_scale,
                stride_ab,
                stride_ab,
                stride_out,
                *layouts,
                sizes,
                offsets,
                workspace,
            )

        return Call(launch, out, None)

    return [Variant("sgl_kernel", flat, peer=True)]


PEERS = {"deepgemm": deepgemm_variants, "sgl": sgl_variants}


def check(variant: Variant, operands: Operands, expected: "torch.Tensor") -> float:
    """calc_diff of the variant's output from the torch model's."""
    import torch
    from moe_fp8.core.metrics import calc_diff

    call = variant.prepare(operands)
    call.poison()
    call.launch()
    torch.cuda.synchronize()
    result = call.result()
    if not bool(torch.isfinite(result).all()):
        return float("inf")
    return calc_diff(result, expected)


def capture(calls: Sequence[Call]) -> "torch.cuda.CUDAGraph | None":
    """A graph of the launches, or None where one cannot be captured or was not recorded."""
    import torch

    for call in calls:
        call.launch()
    torch.cuda.synchronize()
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call.launch()
    except Exception as error:
        print(f"not captured: {error}", file=sys.stderr)
        torch.cuda.synchronize()
        return None
    # A launch on a stream of its own would leave an empty graph, which replays in no time.
    calls[-1].poison()
    graph.replay()
    torch.cuda.synchronize()
    return graph if bool(torch.isfinite(calls[-1].result()).all()) else None


def time_variants(calls: dict[str, list[Call]], repeats: int) -> dict[str, tuple[list[float], str]]:
    """Microseconds of one launch, a list over the repeats, and the method, for each variant."""
    import torch

    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    graphs = {name: capture(prepared) for name, prepared in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(-2, repeats):  # two rounds of warm-up
        for name, prepared in calls.items():
            graph = graphs[name]
            runs: list[tuple[Launch, int]] = [(call.launch, 1) for call in prepared]
            if graph is not None:
                runs = [(graph.replay, len(prepared))]
            spans = []
            for run, count in runs:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                flush.zero_()
                begin.record()
                run()
                end.record()
                end.synchronize()
                spans.append(1e3 * begin.elapsed_time(end) / count)
            if repeat >= 0:
                samples[name].append(statistics.fmean(spans))
    return {n: (samples[n], "graph" if graphs[n] else "events") for n in calls}


def measure_floors() -> dict[str, float]:
    """Bytes a second of a large copy (read + write) and of a large read; FP8 FLOPs a second."""
    import torch

    def best(run: Launch, repeats: int = 10) -> float:
        times = []
        for i in range(repeats + 3):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            if i >= 3:
                times.append(1e-3 * begin.elapsed_time(end))
        return statistics.median(times)

    size = 4 * 2**30
    source = torch.randint(0, 127, (size,), dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    copy = 2 * size / best(lambda: target.copy_(source))
    words = source.view(torch.float32)
    read = size / best(lambda: torch.sum(words))
    n = 8192
    a = torch.randn((n, n), device="cuda").to(torch.float8_e4m3fn)
    b = torch.randn((n, n), device="cuda").to(torch.float8_e4m3fn)
    one = torch.ones((), device="cuda")

    def multiply() -> None:
        torch._scaled_mm(
            a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    fp8 = 2.0 * n**3 / best(multiply)
    return {"copy_bytes_per_s": copy, "read_bytes_per_s": read, "fp8_flops_per_s": fp8}


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def run_problem(
    problem: Problem,
    variants: Sequence[Variant],
    floors: dict[str, float],
    launches: int,
    repeats: int,
    seed: int,
) -> list[dict[str, Any]]:
    """One row of figures for each variant."""
    import torch
    from moe_fp8.core import model

    device = torch.device("cuda")
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    sets = min(launches, max(2, -(-4 * l2 // int(problem.bytes)) + 1))
    operands = [Operands(problem, device, seed + i) for i in range(sets)]
    first = operands[0]
    expected_out = torch.empty_like(first.out)
    model.grouped_gemm(
        first.a, first.a_scale, first.b, first.b_scale, expected_out, first.layout, None
    )
    expected = expected_out[first.valid]

    rows: dict[str, dict[str, Any]] = {}
    calls: dict[str, list[Call]] = {}
    for variant in variants:
        row: dict[str, Any] = {**dataclasses.asdict(problem), "variant": variant.name}
        row["peer"] = variant.peer
        rows[variant.name] = row
        try:
            row["calc_diff"] = check(variant, first, expected)
            if row["calc_diff"] > MAX_CALC_DIFF:
                row["error"] = f"wrong: calc_diff {row['calc_diff']:.1e}"
                continue
            prepared = [variant.prepare(x) for x in operands]
            calls[variant.name] = [prepared[i % sets] for i in range(launches)]
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
    bandwidth = max(floors["copy_bytes_per_s"], floors["read_bytes_per_s"])
    floor = max(problem.bytes / bandwidth, problem.flops / floors["fp8_flops_per_s"])
    for name, (samples, method) in time_variants(calls, repeats).items():
        seconds = 1e-6 * statistics.median(samples)
        rows[name].update(
            us=1e6 * seconds,
            us_p10=percentile(samples, 0.1),
            us_p90=percentile(samples, 0.9),
            tflops=problem.flops / seconds / 1e12,
            gbytes=problem.bytes / seconds / 1e9,
            percent_of_floor=100 * floor / seconds,
            method=method,
        )
    peers = [r["us"] for r in rows.values() if r["peer"] and "us" in r]
    for row in rows.values():
        if peers and "us" in row:
            row["vs_best_peer"] = min(peers) / row["us"]
    return list(rows.values())


HEADER = ["E", "rows", "N", "K", "variant", "us", "p10-p90", "TFLOP/s", "GB/s", "% of floor"]
HEADER += ["vs best peer", "calc_diff"]


def table_row(row: dict[str, Any]) -> list[str]:
    cells = [str(row[key]) for key in ("experts", "rows", "n", "k")] + [row["variant"]]
    if "us" not in row:
        return [*cells, row.get("error", "not run")[:20], *[""] * 6]
    ratio = row.get("vs_best_peer")
    return [
        *cells,
        f"{row['us']:.1f}" + ("" if row["method"] == "graph" else " (events)"),
        f"{row['us_p10']:.1f}-{row['us_p90']:.1f}",
        f"{row['tflops']:.0f}",
        f"{row['gbytes']:.0f}",
        f"{row['percent_of_floor']:.0f}",
        f"{ratio:.2f}x" if ratio else "-",
        f"{row['calc_diff']:.1e}",
    ]


def shape(text: str) -> tuple[int, int]:
    """`4096x7168` as (N, K)."""
    n, _, k = text.partition("x")
    if not (n.isdigit() and k.isdigit()) or int(n) % BLOCK or int(k) % BLOCK or not int(n) * int(k):
        raise UsageError(f"--shapes {text}: expected NxK, both multiples of {BLOCK}")
    return int(n), int(k)


def collect_variants(configs: Sequence[str], peers: Sequence[str]) -> list[Variant]:
    from moe_fp8.core.config import GemmConfig

    variants = []
    for text in configs or ["default"]:
        config = None if text == "default" else parse_config(text, GemmConfig)
        variants.append(ours(f"ours {text}", config))
    for name in peers:
        try:
            variants += PEERS[name]()
        except Exception as error:  # a peer's import compiles and loads its own libraries
            print(f"{name}: not measured, {type(error).__name__}: {error}", file=sys.stderr)
    return variants


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--experts", nargs="+", type=int, default=[8], metavar="E")
    arguments.add_argument("--rows", nargs="+", type=int, default=[128, 512], metavar="M")
    arguments.add_argument("--shapes", nargs="+", default=["4096x7168", "7168x2048"], metavar="NxK")
    arguments.add_argument(
        "--config",
        nargs="+",
        default=[],
        metavar="FIELD=VALUE,...",
        help="configurations of our kernel to compare; 'default' is the heuristic's",
    )
    arguments.add_argument("--peers", nargs="*", default=list(PEERS), choices=list(PEERS))
    arguments.add_argument("--launches", type=int, default=8, help="launches in a graph (8)")
    arguments.add_argument("--repeats", type=int, default=40, help="replays of each graph (40)")
    arguments.add_argument("--seed", type=int, default=2026)
    arguments.add_argument("--markdown", action="store_true", help="print Markdown")
    arguments.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    args = arguments.parse_args()
    shapes = [shape(text) for text in args.shapes]
    if min(*args.experts, *args.rows, args.launches, args.repeats) < 1:
        raise UsageError("--experts, --rows, --launches and --repeats must be at least 1")

    import torch

    if not torch.cuda.is_available():
        raise UsageError("no GPU is visible")
    variants = collect_variants(args.config, args.peers)
    hardware = torch.cuda.get_device_name(0)
    with torch.no_grad():
        floors = measure_floors()
        problems = [Problem(e, m, n, k) for n, k in shapes for e in args.experts for m in args.rows]
        progress = Progress(len(problems))
        rows = []
        for problem in problems:
            progress.step(str(problem))
            rows += run_problem(problem, variants, floors, args.launches, args.repeats, args.seed)
            progress.finish()
    method = (
        f"graphs of {args.launches} launches over rotating operands, {args.repeats} replays in "
        "turns, L2 overwritten before each; median"
    )
    said = (
        f"copy {floors['copy_bytes_per_s'] / 1e12:.2f} TB/s, "
        f"read {floors['read_bytes_per_s'] / 1e12:.2f} TB/s, "
        f"FP8 matmul {floors['fp8_flops_per_s'] / 1e12:.0f} TFLOP/s"
    )
    print(f"{'### ' if args.markdown else ''}{hardware}: grouped FP8 GEMM, kernel only\n")
    print(f"{method}. Floors: {said}.\n")
    render = markdown_table if args.markdown else text_table
    print(render(HEADER, [table_row(row) for row in rows], 0))
    if args.json:
        record = {
            "hardware": hardware,
            "method": method,
            "floors": floors,
            "environment": environment.capture(),
            "results": rows,
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        if "us" not in row:
            where = f"{row['variant']}, {row['rows']} rows, {row['n']}x{row['k']}"
            print(f"error: {where}: {row.get('error')}", file=sys.stderr)
    failed = [r for r in rows if not r["peer"] and "us" not in r]
    return EXIT_FAILED if failed else EXIT_OK


if __name__ == "__main__":
    run_main(main)
