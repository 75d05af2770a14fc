"""The grouped GEMM on paper: what limits it on which GPU, and how long it then takes.

    python3 run.py model [--all]

From public figures of the GPUs and the kernels' configs: clocks of every resource for a K block of
a tile, accumulators that keep the tensor cores busy, and predicted times of the 81 configurations
of the study and of the layer's two GEMMs on the 19 workloads. For Hopper the same arithmetic is
checked against recorded times, and its error printed. Needs no GPU. What the figures mean and what
they do not tell: docs/gemm-model.md.
"""

import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from scripts.common.command_line import EXIT_OK, UsageError, parser, run_main
from scripts.common.project import RESULTS_DIR, ROOT
from scripts.common.text import markdown_table
from scripts.measure.gemm_bench import grid_problems
from scripts.measure.gemm_model import (
    CONSTANTS,
    Block,
    Constants,
    Gpu,
    Prediction,
    accumulators_needed,
    block_sm100,
    config_sm90,
    predict,
)
from scripts.measure.problems import LAYER_SHAPES, Problem, histograms, layer_problems, uneven_rows

RECORD = RESULTS_DIR / "nvidia-h200" / "2026-11-23"
MEASURED_READ = 4.30e12
"""Bytes a second of a large read: floors.json at b1af57c, the record that the constants were chosen
by; later ones, of other cards, have 4.34e12 and 4.42e12."""
MEASURED_CLOCK = 1.55e9
"""Of an H200's multiprocessors in a long GEMM: ncu saw 1.397 to 1.55 GHz (docs/notes/gemm_sm90.md);
the upper end, because most of the records' kernels are short and leave power to spare."""

H200 = Gpu(
    name="H200, nominal",
    multiprocessors=132,
    clock_hz=1.83e9,
    mma_per_clock=8192,
    fma_per_clock=128,
    fma_per_instruction=1,
    smem_per_clock=128,
    l2_per_clock=64,
    tmem_per_clock=0,
    dram_per_s=4.8e12,
)
H200_MEASURED = replace(
    H200, name="H200, as measured", clock_hz=MEASURED_CLOCK, dram_per_s=MEASURED_READ
)
B200 = Gpu(
    name="B200, nominal",
    multiprocessors=148,
    clock_hz=1.856e9,
    mma_per_clock=16384,
    fma_per_clock=128,
    fma_per_instruction=2,
    smem_per_clock=128,
    l2_per_clock=64,
    tmem_per_clock=512,
    dram_per_s=8.0e12,
)
B200_AS_H200 = replace(
    B200,
    name="B200, H200's shares",
    clock_hz=B200.clock_hz * H200_MEASURED.clock_hz / H200.clock_hz,
    dram_per_s=B200.dram_per_s * H200_MEASURED.dram_per_s / H200.dram_per_s,
)
GPUS = (H200, H200_MEASURED, B200, B200_AS_H200)
SOURCES = (
    ("FP8 FLOPs, dense", "H200 1.979e15, B200 (HGX) 4.5e15: NVIDIA's data sheets; 8192^3 by cuBLAS "
     "on the H200 1.40e15 (floors.json at b1af57c), which bounds nothing here"),
    ("multiprocessors", "132; 148 (2 dies of 74: chipsandcheese.com on the B200)"),
    ("clock, nominal", "what the FLOPs of the data sheet come from at 8192 and 16384 a clock"),
    ("clock, as measured", "ncu, docs/notes/gemm_sm90.md; B200: H200's share of its nominal one"),
    ("DRAM, nominal", "4.8 and 8 TB/s: NVIDIA's data sheets"),
    ("DRAM, as measured", "floors.json at b1af57c; B200: H200's share of its nominal one"),
    ("shared memory", "128 bytes a clock: CUDA programming guide (32 banks of 4 bytes); of the "
     "B200 also SemiAnalysis, Dissecting Nvidia Blackwell (2026): MMA under 128 columns wait"),
    ("L2 to a multiprocessor", "64 bytes a clock: seen on the H200 (docs/notes/gemm_sm90.md, "
     "115 GB/s); assumed for the B200"),
    ("multiply-adds", "128 lanes: CUDA programming guide; two an instruction on Blackwell: PTX "
     "ISA, fma.rn.f32x2; assumed not to add lanes"),
    ("tensor memory", "512 columns of 128 lanes of 4 bytes: PTX ISA; read at a column of 32 lanes "
     "a clock by each of four warps: assumed"),
)  # fmt: skip

# ms of the whole layer on a B200, by others, with their own stacks and the captured traffic: what
# TensorRT-LLM's kernels take through FlashInfer (two laboratories), and one of the three best
# contest kernels. The predictions beside them are of the two GEMMs alone.
PUBLISHED = {
    1: (0.105, 0.203, 0.067), 7: (0.137, 0.213, 0.104), 14: (0.180, 0.266, 0.152),
    15: (0.127, 0.203, 0.088), 16: (0.175, 0.254, 0.155), 32: (0.248, 0.308, 0.223),
    52: (0.208, 0.283, 0.180), 55: (0.257, 0.335, 0.229), 58: (0.265, 0.338, 0.239),
    62: (0.245, 0.295, 0.185), 80: (0.293, 0.367, 0.271), 901: (0.393, 0.459, 0.324),
    11948: (1.737, 1.787, 0.864), 14107: (2.368, 2.410, 1.210),
}  # fmt: skip

Table = tuple[str, list[str], list[list[str]]]
"""Title, header, rows."""


def gpu_tables() -> list[Table]:
    """The GPUs' figures, where they come from, and the model's own constants."""
    fields = (
        ("FP8 PFLOP/s", lambda g: f"{g.flops_per_s / 1e15:.2f}"),
        ("multiprocessors", lambda g: str(g.multiprocessors)),
        ("clock GHz", lambda g: f"{g.clock_hz / 1e9:.3f}"),
        ("DRAM TB/s", lambda g: f"{g.dram_per_s / 1e12:.2f}"),
        ("FP8 FLOPs a clock", lambda g: str(g.mma_per_clock)),
        ("shared memory, bytes a clock", lambda g: str(g.smem_per_clock)),
        ("L2, bytes a clock", lambda g: str(g.l2_per_clock)),
        ("tensor memory, bytes a clock", lambda g: str(g.tmem_per_clock or "-")),
        ("multiply-adds a clock", lambda g: str(g.fma_per_clock)),
    )
    figures = [[name, *(of(gpu) for gpu in GPUS)] for name, of in fields]
    c = CONSTANTS
    constants = [
        ["launch", f"{c.launch_us} us", "measured: study record, reading of few weights"],
        ["end of a tile", f"{c.tile_end_us} us", "measured: docs/notes/gemm_sm90.md, DeepGEMM's"],
        ["other instructions", f"{c.other_instructions} a K block and warp", "counted: the same"],
        ["hand-off", f"{c.handoff_clocks} clocks", "chosen for the check, of 60, 120, 200"],
        ["latency of a stage", f"{c.latency_us} us", "assumed"],
        ["TMA writes that stop reads", f"{c.writes:g}", "chosen for the check, of 0 and 1"],
    ]
    return [
        ("GPUs", ["", *(gpu.name for gpu in GPUS)], figures),
        ("Sources", ["figure", "from"], [list(row) for row in SOURCES]),
        ("Constants of the model", ["what", "value", "from"], constants),
    ]


# --- the check on Hopper --------------------------------------------------------------------------


def read_record(path: Path) -> list[dict[str, Any]]:
    """The timed rows of our kernel in a record of gemm_bench.

    Raises:
        UsageError: it is none.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["results"]
        return [row for row in rows if not row["peer"] and "us" in row]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path}: not a record of gemm_bench ({error!r})") from None


def problem_of(row: dict[str, Any], rows_of: dict[int, tuple[int, ...]]) -> Problem:
    """The problem of a recorded row; `rows_of` has the experts' rows by a workload's tokens."""
    if row["tokens"] is None:
        rows = (row["pairs"] // row["experts"],) * row["experts"]
        return Problem(rows, row["n"], row["k"])
    return Problem(rows_of[row["tokens"]], row["n"], row["k"], row["tokens"])


CHANGES: tuple[tuple[str, Gpu, Constants], ...] = (
    ("as it is", H200_MEASURED, CONSTANTS),
    ("clock 1.40 GHz", replace(H200_MEASURED, clock_hz=1.40e9), CONSTANTS),
    ("clock 1.83 GHz", replace(H200_MEASURED, clock_hz=1.83e9), CONSTANTS),
    ("TMA's writes cost nothing", H200_MEASURED, replace(CONSTANTS, writes=0.0)),
    ("L2 gives twice as much", replace(H200_MEASURED, l2_per_clock=128), CONSTANTS),
    ("no end of a tile", H200_MEASURED, replace(CONSTANTS, tile_end_us=0.0)),
    ("no launch", H200_MEASURED, replace(CONSTANTS, launch_us=0.0)),
    ("hand-off 0 clocks", H200_MEASURED, replace(CONSTANTS, handoff_clocks=0.0)),
    ("hand-off 200 clocks", H200_MEASURED, replace(CONSTANTS, handoff_clocks=200.0)),
    ("latency 0.5 us", H200_MEASURED, replace(CONSTANTS, latency_us=0.5)),
)
"""Name, GPU and constants of the check with one thing changed, to see what rests on what."""

Checked = tuple[dict[str, Any], Prediction, float]
"""A recorded row, the prediction, and its error: predicted over measured, less one."""


def check(
    rows: Iterable[dict[str, Any]],
    rows_of: dict[int, tuple[int, ...]],
    gpu: Gpu = H200_MEASURED,
    constants: Constants = CONSTANTS,
) -> list[Checked]:
    """Every recorded row beside what the model says."""
    made = []
    for row in rows:
        predicted = predict(gpu, config_sm90(row["config"]), problem_of(row, rows_of), constants)
        made.append((row, predicted, predicted.us / row["us"] - 1))
    return made


def error_row(name: str, checked: Sequence[Checked]) -> list[str]:
    """Count, median and worst error, and how many are within 10 %."""
    errors = [error for *_, error in checked]
    absolute = [abs(error) for error in errors]
    return [
        name,
        str(len(errors)),
        f"{100 * statistics.median(absolute):.1f} %",
        f"{100 * statistics.median(errors):+.1f} %",
        f"{100 * max(errors, key=abs):+.1f} %",
        f"{sum(error <= 0.1 for error in absolute)} of {len(errors)}",
    ]


def hopper_tables(rows_of: dict[int, tuple[int, ...]], record: Path = RECORD) -> list[Table]:
    """The error on the records, by config, and the rows that it is largest on."""
    layers = read_record(record / "gemm_layers.json")
    study = check(read_record(record / "gemm_study.json"), rows_of)
    shipped = check((r for r in layers if r["variant"] in ("flat", "v3")), rows_of)
    beside = check((r for r in layers if r["variant"] not in ("flat", "v3")), rows_of)
    summary = [
        error_row("19 workloads, shipped configs", shipped),
        error_row("the same, the configs beside them (not looked at for the choice)", beside),
        error_row("81 configurations", study),
    ]
    everything = [*shipped, *beside, *study]
    configs = dict.fromkeys(row["config"] for row, *_ in everything)
    by_config = [
        error_row(config, [c for c in everything if c[0]["config"] == config]) for config in configs
    ]
    worst = sorted(everything, key=lambda c: -abs(c[2]))[:12]
    rows = [
        [
            str(row["tokens"] or "-"), f"{row['active']} x {row['rows']:g}",
            f"{row['n']}x{row['k']}", row["config"], f"{row['us']:.1f}", f"{made.us:.1f}",
            f"{100 * error:+.1f} %", made.limit,
        ]
        for row, made, error in worst
    ]  # fmt: skip
    header = ["", "rows", "median", "signed", "worst", "within 10 %"]
    of_row = ["T", "experts x rows", "NxK", "config", "us", "model", "error", "limit"]
    changed = [
        error_row(name, check((row for row, *_ in everything), rows_of, gpu, constants))
        for name, gpu, constants in CHANGES
    ]
    return [
        ("Hopper: error of the model", header, summary),
        ("Hopper: all rows, with one constant changed", header, changed),
        ("Hopper: by config", ["config", *header[1:]], by_config),
        ("Hopper: the twelve worst", of_row, rows),
    ]


# --- Blackwell -----------------------------------------------------------------------------------


def shapes_sm100() -> list[Any]:
    """Configs of every tile, from few rows to many."""
    from moe_fp8.kernels.sm100.config import GemmConfig

    swapped = [GemmConfig(tile_m=rows, swap_ab=True) for rows in (16, 32, 64)]
    plain = [GemmConfig(tile_n=columns) for columns in (64, 128, 256)]
    return swapped + plain + [replace(c, cluster_m=2, mma_ctas=2) for c in plain[1:]]


def block_table(gpu: Gpu = B200) -> Table:
    """Clocks of every resource for a K block, and what share of them the tensor cores work: if
    everything is as assumed, and if TMA's writes cost nothing and L2 gives twice as much."""
    rows = []
    for config in shapes_sm100():
        block = block_sm100(gpu, config)
        generous = replace(block, write=0.0, l2=block.l2 / 2)
        clocks = (block.mma, block.read, block.write, block.l2, block.tmem, block.promote)
        shares = (block.mma / steady(block), block.mma / steady(generous))
        rows.append(
            [
                short(config), str(config.num_stages), str(config.num_accumulators),
                *(f"{c:.0f}" for c in (*clocks, block.chain)),
                *(f"{100 * share:.0f} %" for share in shares),
            ]
        )  # fmt: skip
    header = ["tile", "stages", "accumulators", "MMA", "operand reads", "TMA writes", "L2"]
    header += ["tensor memory", "promotion", "accumulator", "tensor cores", "at best"]
    return ("B200: clocks of a K block, and how busy the tensor cores can be", header, rows)


def steady(block: Block) -> float:
    """Clocks of a K block in the middle of a tile with all its stages full."""
    return replace(block, latency=0.0).clocks


def accumulator_table(gpu: Gpu = B200) -> Table:
    """Accumulators that keep the MMA going, by how long the hand-off takes."""
    handoffs = (60, 240, 480)
    rows = []
    for config in shapes_sm100():
        cases = (replace(CONSTANTS, handoff_clocks=clocks) for clocks in handoffs)
        needed = [f"{accumulators_needed(gpu, config, case):.1f}" for case in cases]
        rows.append([short(config), str(config.num_accumulators), *needed])
    header = ["tile", "there are", *(f"hand-off {h} clocks" for h in handoffs)]
    return ("B200: accumulators that keep the MMA going", header, rows)


def chosen_sm100(problem: Problem) -> Any:
    """The config that sm100's heuristic picks."""
    from moe_fp8.kernels.sm100.heuristic import choose

    return choose(problem.mean_rows, problem.n, problem.k, problem.even, problem.active)


def best_sm100(gpu: Gpu, problem: Problem) -> tuple[Any, Prediction]:
    """The config with the least predicted time, of all tiles, dealt in turns or on demand."""
    configs = [replace(c, dynamic=dynamic) for c in shapes_sm100() for dynamic in (False, True)]
    made = [(config, predict(gpu, config, problem)) for config in configs]
    return min(made, key=lambda one: one[1].us)


def short(config: Any) -> str:
    """A config in few letters; the rows of CTAs that share an MMA are one tile's."""
    flags = " swapped" * config.swap_ab + " by two CTAs" * (config.mma_ctas == 2)
    flags += " dynamic" * config.dynamic
    return f"{config.tile_m * config.mma_ctas}x{config.tile_n}{flags}"


def workload_table(problems: Sequence[Problem]) -> Table:
    """Both GEMMs of every workload as predicted, beside what others published of the layer."""
    rows = []
    for tokens in sorted({p.tokens for p in problems if p.tokens is not None}):
        pair = [p for p in problems if p.tokens == tokens]
        cells = [str(tokens), str(pair[0].pairs), str(pair[0].active)]
        cells.append(short(chosen_sm100(pair[0])))
        for gpu in (B200, B200_AS_H200):
            made = [predict(gpu, chosen_sm100(p), p) for p in pair]
            cells += [f"{m.us:.1f}" for m in made]
        cells.append(" / ".join(dict.fromkeys(m.limit for m in made)))
        best = sum(best_sm100(B200_AS_H200, p)[1].us for p in pair)
        cells.append(f"{sum(m.us for m in made) / best:.2f}")
        cells += [f"{1e3 * ms:.0f}" for ms in PUBLISHED.get(tokens, ())] or ["-"] * 3
        rows.append(cells)
    header = ["T", "pairs", "active", "config", "GEMM1 us", "GEMM2 us", "GEMM1 us, H200's shares"]
    header += ["GEMM2 us, H200's shares", "limit", "over best tile"]
    header += ["layer us: TensorRT-LLM, A", "B", "contest"]
    return ("B200: the two GEMMs of the 19 workloads", header, rows)


def study_table(gpu: Gpu, every: bool) -> Table:
    """The 81 configurations as predicted, all of them or one line for E and rows."""
    problems = grid_problems("study", None, None, None)
    rows = []
    groups: dict[tuple[int, ...], list[Problem]] = {}
    for p in problems:
        key = (p.experts, p.rows[0], *((p.n, p.k) if every else ()))
        groups.setdefault(key, []).append(p)
    for key, group in sorted(groups.items()):
        made = [predict(gpu, chosen_sm100(p), p) for p in group]
        rate = [p.flops / m.us / 1e6 for p, m in zip(group, made, strict=True)]
        over = [m.us / best_sm100(gpu, p)[1].us for p, m in zip(group, made, strict=True)]
        best = dict.fromkeys(short(best_sm100(gpu, p)[0]) for p in group)
        rows.append(
            [
                *map(str, key), short(chosen_sm100(group[0])),
                " to ".join(dict.fromkeys(f"{f(m.us for m in made):.1f}" for f in (min, max))),
                f"{statistics.median(rate):.0f}", f"{statistics.median(over):.2f}",
                ", ".join(best), ", ".join(dict.fromkeys(m.limit for m in made)),
            ]
        )  # fmt: skip
    header = ["experts", "rows", *(("N", "K") if every else ()), "config", "us", "TFLOP/s"]
    header += ["over best tile", "best tiles", "limit"]
    return (f"{gpu.name}: the {len(problems)} configurations", header, rows)


ROWS = (2, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
"""Rows per expert that the configs are compared at."""


def heuristic_table(gpu: Gpu = B200_AS_H200, experts: int = 32, seed: int = 2026) -> Table:
    """Both GEMMs with every tile, by the rows that an expert has on average, uneven as drawn."""
    configs = [replace(c, dynamic=True) for c in shapes_sm100()]
    rows = []
    for mean in ROWS:
        drawn = uneven_rows(mean, experts, seed)
        problems = [Problem(drawn, n, k) for n, k in LAYER_SHAPES.values()]
        us = [sum(predict(gpu, c, p).us for p in problems) for c in configs]
        chosen = sum(predict(gpu, chosen_sm100(p), p).us for p in problems)
        picked = short(chosen_sm100(problems[0]))
        cells = [f"{t:.0f}" + (" *" if t == min(us) else "") for t in us]
        rows.append([str(mean), *cells, picked, f"{chosen:.0f}"])
    header = ["rows", *(short(c).removesuffix(" dynamic") for c in configs), "heuristic", "us"]
    return (f"{gpu.name}: GEMM1 + GEMM2 us of {experts} experts, tiles on demand", header, rows)


def tables(
    rows_of: dict[int, tuple[int, ...]], problems: Sequence[Problem], every: bool
) -> Iterator[Table]:
    """Everything, in the order of docs/gemm-model.md."""
    yield from gpu_tables()
    yield from hopper_tables(rows_of)
    yield block_table()
    yield accumulator_table()
    yield workload_table(problems)
    yield study_table(B200_AS_H200, every)
    yield heuristic_table()


def to_text(title: str, header: list[str], rows: list[list[str]]) -> str:
    """A table under its title, as the page has it."""
    left = len(header) if header[-1] == "from" else 1
    return f"### {title}\n\n{markdown_table(header, rows, left)}"


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--local", type=Path, default=ROOT, help="data set of the workloads")
    arguments.add_argument("--all", action="store_true", help="a line for each of the 81")
    args = arguments.parse_args()
    found = histograms(args.local)
    rows_of = {h.tokens: h.rows for h in found}
    for table in tables(rows_of, layer_problems(found), args.all):
        print(to_text(*table) + "\n")
    return EXIT_OK


if __name__ == "__main__":
    run_main(main)
