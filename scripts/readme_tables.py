"""The README's figures from a recorded run: its tables, sentences with figures, and pictures.

    python3 run.py readme_tables --check              # fails if README and record disagree
    python3 run.py readme_tables                      # writes both anew
    python3 run.py readme_tables --record results/nvidia-h200/2026-12-24

README.md names the record in `<!-- record: DIRECTORY -->`; what stands between
`<!-- generated: NAME -->` and `<!-- /generated -->` is written here. Pictures go to the record's
directory and carry a hash of its data, by which --check knows them.
"""

import hashlib
import re
import statistics
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plot_gemm
import rank
import report_data
from common import EXIT_FAILED, EXIT_OK, ROOT, UsageError, markdown_table, parser, run_main
from report_data import Recorded
from stages import TOTAL

README = ROOT / "README.md"
RECORD = re.compile(r"<!-- record: (\S+) -->")
BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- /generated -->)", re.DOTALL)
PICTURES = ("latency.png", "speedup.png", "gemm_layers.png", "gemm_grid.png")
STUDY_TOKENS = 1024
MANY_EXPERTS = 16
"""Active experts from which on the weights alone keep the whole GPU reading."""


def table(header: list[str], rows: list[list[str]], left: int) -> str:
    """Markdown, with what is marked as the best in bold."""
    cells = [[f"**{c.rstrip('* ')}**" if c.rstrip().endswith("*") else c for c in r] for r in rows]
    return markdown_table(*rank.escape(header, cells), left=left)


def paragraph(text: str) -> str:
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def relative(recorded: Recorded) -> str:
    path = recorded.directory.resolve()
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.as_posix()


def ranking(recorded: Recorded) -> str:
    main = recorded.main
    day = recorded.info.get("environment", {}).get("time", "")[:10]
    said = ", ".join(filter(None, [main.hardware, day, main.timing]))
    lines = f"{said} (`{relative(recorded)}/`). Names are without the prefix `{rank.PREFIX}`."
    header, rows = report_data.ranking_table(main)
    return f"{paragraph(lines)}\n\n{table(header, rows, left=2)}"


def latency(recorded: Recorded) -> str:
    header, rows = report_data.latency_table(recorded.main, recorded.floor_ms(recorded.main))
    text = "Latency in ms, the fastest in bold"
    if "floor" in header:
        text += "; floor: the larger of bytes over measured bandwidth and FLOPs over measured rate"
    return f"{paragraph(text + ':')}\n\n{table(header, rows, left=0)}"


def latency_plot(recorded: Recorded) -> str:
    return f"![Latency of all solutions and the floor]({relative(recorded)}/latency.png)"


def accuracy(recorded: Recorded) -> str:
    """One line for the solutions that share the figures, which bitwise equal outputs do."""
    groups: dict[tuple[str, str], list[str]] = {}
    for s in recorded.main.summaries:
        if s.matched_ratio is not None and s.cosine is not None:
            key = (f"{100 * s.matched_ratio:.1f} %", f"{s.cosine:.5f}")
            groups.setdefault(key, []).append(rank.short_name(s.solution))
    lines = [
        f"- {', '.join(names)}: {matched} of the values within the tolerance, cosine {cosine}"
        for (matched, cosine), names in groups.items()
    ]
    tolerance = "; ".join(recorded.main.tolerances)
    return f"Accuracy in the worst workload ({tolerance}):\n\n" + "\n".join(lines)


def _study_stages(recorded: Recorded) -> dict[str, Any]:
    """The stages at the original study's token count; at the first measured one without it."""
    if recorded.stages is None:
        raise UsageError(f"{recorded.directory} has no stages.json")
    results = recorded.stages["results"]
    return next((r for r in results if r["tokens"] == STUDY_TOKENS), results[0])


def stages(recorded: Recorded) -> str:
    result = _study_stages(recorded)
    return f"T={result['tokens']}, median ms:\n\n" + table(
        *report_data.stages_table(result), left=1
    )


def speed_of_v2(recorded: Recorded) -> str:
    """v2 against v1, the step that the original study reports."""
    result = _study_stages(recorded)
    v1, v2 = (result["solutions"][rank.PREFIX + name]["median_ms"] for name in ("v1", "v2"))
    ratio = {stage: v1[stage] / v2[stage] for stage in (TOTAL, "gemm1", "gemm2")}
    return paragraph(
        f"v2 against v1 at T={result['tokens']}, {result['routing'].split(',')[0]}: "
        f"{ratio[TOTAL]:.1f}x end to end, GEMM1 with its wrapper {ratio['gemm1']:.1f}x, "
        f"GEMM2 {ratio['gemm2']:.1f}x."
    )


def _gemm(recorded: Recorded, name: str) -> dict[str, Any]:
    if name not in recorded.gemm:
        raise UsageError(f"{recorded.directory} has no {name}.json")
    return recorded.gemm[name]


def gemm(recorded: Recorded) -> str:
    record = _gemm(recorded, "gemm")
    header, rows = report_data.gemm_table(report_data.timed(record))
    text = f"The grouped GEMM alone, us, the fastest in bold ({record['hardware']}"
    versions = record["environment"]["versions"]
    peers = (("DeepGEMM", "sgl-deep-gemm"), ("sgl_kernel", "sglang-kernel"))
    said = [text, *(f"{name} {versions[of]}" for name, of in peers if of in versions)]
    method = record["method"]
    return f"{paragraph(', '.join(said) + f'; {method}):')}\n\n{table(header, rows, left=0)}"


def _ours(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [r for r in rows if not r["peer"] and "vs_best_peer" in r]


def gemm_layers(recorded: Recorded) -> str:
    """What our GEMMs reach on the workloads' rows, in a sentence."""
    record = _gemm(recorded, "gemm_layers")
    rows, floors = _ours(record["results"]), record["floors"]
    bandwidth, peak = floors["read_bytes_per_s"] / 1e12, floors["fp8_flops_per_s"] / 1e12
    least = min(rows, key=lambda r: r["vs_best_peer"])
    median = statistics.median(r["vs_best_peer"] for r in rows)
    shapes = list(dict.fromkeys((r["n"], r["k"]) for r in rows))
    name = f"GEMM{shapes.index((least['n'], least['k'])) + 1}"
    workloads = len({(r["tokens"], r["pairs"]) for r in rows})
    text = (
        f"On the rows of the {workloads} workloads (flat rows, `gemm_bench --layers`) the two "
        f"GEMMs are {median:.2f}x the best peer in the median, {least['vs_best_peer']:.2f}x at "
        f"the least ({name} at T={least['tokens']})"
    )
    reading = [
        r["percent_of_floor"]
        for r in rows
        if (r["n"], r["k"]) == shapes[0]
        and r["active"] >= MANY_EXPERTS
        and not plot_gemm.compute_bound(r, bandwidth, peak)
    ]
    if reading:
        text += (
            f", and from {MANY_EXPERTS} active experts on, where reading bounds it, GEMM1 reads "
            f"its weights at {min(reading):.0f} to {max(reading):.0f} % of the bandwidth of a "
            "large read"
        )
    return paragraph(text + ".")


def gemm_study(recorded: Recorded) -> str:
    ratios = [r["vs_best_peer"] for r in _ours(_gemm(recorded, "gemm_study")["results"])]
    return paragraph(
        f"Over the {len(ratios)} configurations of the original study (`--grid study`: 1, 4 or 8 "
        f"experts with even rows) the median is {statistics.median(ratios):.2f}x, the least "
        f"{min(ratios):.2f}x."
    )


def gemm_plot(recorded: Recorded) -> str:
    picture = f"{relative(recorded)}/gemm_layers.png"
    return f"![The two GEMMs of the layer against the floor and the peers]({picture})"


BLOCKS: dict[str, Callable[[Recorded], str]] = {
    f.__name__: f
    for f in (
        ranking,
        latency,
        latency_plot,
        accuracy,
        stages,
        speed_of_v2,
        gemm,
        gemm_layers,
        gemm_study,
        gemm_plot,
    )
}


def record_of(text: str) -> Path:
    """The directory of the record that the README names."""
    found = RECORD.findall(text)
    if len(found) != 1:
        raise UsageError("the README must name one record: <!-- record: DIRECTORY -->")
    return ROOT / found[0]


def generate(text: str, recorded: Recorded) -> str:
    """The README with every generated block made anew."""
    unknown = [name for _, name, _ in BLOCK.findall(text) if name not in BLOCKS]
    if unknown:
        raise UsageError(f"README: no block {', '.join(unknown)}; there are {', '.join(BLOCKS)}")

    def block(match: re.Match[str]) -> str:
        return f"{match[1]}\n{BLOCKS[match[2]](recorded)}\n\n{match[3]}"

    made = RECORD.sub(f"<!-- record: {relative(recorded)} -->", text)
    return BLOCK.sub(block, made)


def data_hash(directory: Path) -> str:
    """A hash of the data that pictures are drawn from."""
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.json*")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def draw(recorded: Recorded) -> list[Path]:
    """Write the pictures of the record."""
    from report import write_pictures
    from report_plots import save_png

    source = data_hash(recorded.directory)
    written = write_pictures(recorded, recorded.directory, source)
    figures = {}
    if (record := recorded.gemm.get("gemm_layers")) is not None:
        figures["gemm_layers.png"] = plot_gemm.layers_figure(
            report_data.timed(record), record["floors"], record["hardware"]
        )
    if (record := recorded.gemm.get("gemm_study")) is not None:
        figures["gemm_grid.png"] = plot_gemm.grid_figure(
            report_data.timed(record), record["hardware"]
        )
    for name, figure in figures.items():
        if figure is not None:
            save_png(figure, recorded.directory / name, source)
            written.append(recorded.directory / name)
    return written


def stale(text: str, recorded: Recorded) -> list[str]:
    """What of the README and its pictures is not made of the record as it is now."""
    problems = []
    for (_, name, _), old, new in zip(
        BLOCK.findall(text),
        BLOCK.finditer(text),
        BLOCK.finditer(generate(text, recorded)),
        strict=True,
    ):
        if old[0] != new[0]:
            problems.append(f"README.md, block {name}: not what {relative(recorded)} says")
    source = data_hash(recorded.directory).encode()
    shown = re.findall(rf"{re.escape(relative(recorded))}/(\w+\.png)", text)
    present = [n for n in PICTURES if n in shown or (recorded.directory / n).is_file()]
    for name in present:
        picture = recorded.directory / name
        if not picture.is_file():
            problems.append(f"{relative(recorded)}/{name}: missing")
        elif source not in picture.read_bytes():
            problems.append(f"{relative(recorded)}/{name}: drawn from other data")
    return problems


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--record", type=Path, metavar="DIR", help="the record to take instead")
    arguments.add_argument("--check", action="store_true", help="write nothing; fail if stale")
    args = arguments.parse_args()
    text = README.read_text(encoding="utf-8")
    recorded = report_data.read(args.record or record_of(text))
    if args.check:
        problems = stale(text, recorded)
        print("\n".join(problems) or f"README and pictures are those of {relative(recorded)}")
        return EXIT_FAILED if problems else EXIT_OK
    README.write_text(generate(text, recorded), encoding="utf-8")
    for path in draw(recorded):
        print(path)
    return EXIT_OK


if __name__ == "__main__":
    run_main(main)
