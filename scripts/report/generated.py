"""The generated blocks of the README and the docs: tables and sentences with a record's figures."""

import statistics
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.common.command_line import UsageError
from scripts.common.project import RESULTS_DIR, ROOT
from scripts.common.text import markdown, markdown_table, printable
from scripts.measure import plot_gemm
from scripts.measure.stages import TOTAL
from scripts.report import run_data
from scripts.report.run_data import Recorded
from scripts.table import bits
from scripts.table.rank_tables import bits_table, latency_title, short_table
from scripts.table.rank_text import device_methods, say_method
from scripts.table.ranking import PREFIX, Clock, short_name

STUDY_TOKENS = 1024
GENERATIONS = ("v1", "v2", "v3", "flat", "fused", "fused_hifi")
LADDER_TOKENS = (1, 80, 901, 14107)
MANY_EXPERTS = 16
"""Active experts from which on the weights alone keep the whole GPU reading."""


def table(header: list[str], rows: list[list[str]], left: int) -> str:
    """Markdown, with what is marked as the best in bold."""
    cells = [[f"**{c.rstrip('* ')}**" if c.rstrip().endswith("*") else c for c in r] for r in rows]
    return markdown_table(header, cells, left=left)


def paragraph(*sentences: str) -> str:
    text = printable(" ".join(filter(None, sentences)))
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def parts(*blocks: str) -> str:
    return "\n\n".join(filter(None, blocks))


def relative(recorded: Recorded) -> str:
    path = recorded.directory.resolve()
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.as_posix()


def pictures_of(recorded: Recorded) -> Path:
    """Where the pictures of a record lie: the records themselves hold data alone."""
    directory = recorded.directory.resolve()
    if not directory.is_relative_to(RESULTS_DIR):
        return directory
    return ROOT / "docs" / "pictures" / "-".join(directory.relative_to(RESULTS_DIR).parts)


def picture(recorded: Recorded, name: str, what: str) -> str:
    """A picture in Markdown, its path from the root."""
    path = pictures_of(recorded) / name
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    return f"![{what}]({shown.as_posix()})"


def short_ranking(recorded: Recorded) -> str:
    main = recorded.main
    where = markdown(f"{main.hardware}, {recorded.day}, {len(main.workloads)} workloads")
    text = f"{where} (`{relative(recorded)}/`)."
    return parts(
        paragraph(text, markdown(run_data.say_clocks(main)), run_data.changed_sources(main)),
        table(*short_table(main), left=3),
    )


def ranking(recorded: Recorded) -> str:
    main = recorded.main
    said = markdown(", ".join(filter(None, [main.hardware, recorded.day, main.timing])))
    lines = f"{said} (`{relative(recorded)}/`). Names are without the prefix `{PREFIX}`."
    clocks = ""
    if len(main.clocks) > 1:
        methods = " or ".join(map(say_method, device_methods(main)))
        clocks = (
            f"harness: flashinfer-bench's time, host included, over which the speed-ups are; "
            f"device: the time on the GPU alone ({markdown(methods)}); ms are means over the "
            "workloads, in brackets of how many where not of all; spread: from the 10th to the "
            "90th percentile of the calls over their median."
        )
    changed = run_data.changed_sources(main)
    header, rows = run_data.ranking_table(main)
    return parts(paragraph(lines, clocks, changed), table(header, rows, left=2))


def ladder(recorded: Recorded) -> str:
    """Our generations, one below the other, at a few numbers of tokens, by the device's clock."""
    main = recorded.main
    chosen = [(length, uuid) for length, uuid in main.workloads if length in LADDER_TOKENS]
    rows, before = [], dict[str, float]()
    for name in GENERATIONS:
        row = [name]
        for _, uuid in chosen:
            ms = main.latency_ms(uuid, PREFIX + name, "device")
            faster = f" ({before[uuid] / ms:.2f}x)" if ms and uuid in before else ""
            row.append(f"{ms:.3f}{faster}" if ms else "-")
            if ms:
                before[uuid] = ms
        rows.append(row)
    text = "Device time in ms, and in brackets how much faster than the generation above:"
    return parts(paragraph(text), table(["", *(f"T={t}" for t, _ in chosen)], rows, left=1))


def latency(recorded: Recorded) -> str:
    """A table for each clock."""

    def of(clock: Clock) -> str:
        main = recorded.main
        header, rows = run_data.latency_table(main, recorded.floor_ms(main), clock)
        text = f"{latency_title(main, clock)}, the fastest in bold"
        if "floor" in header:
            text += "; floor: the larger of bytes over measured bandwidth and FLOPs over measured "
            text += "rate"
        return parts(paragraph(text + ":"), table(header, rows, left=0))

    return parts(*map(of, recorded.main.clocks))


def latency_plot(recorded: Recorded) -> str:
    """A picture for each clock, the one nearest to the kernels first."""
    files = {"harness": "latency.png", "device": "latency_device.png"}
    what = {"harness": "Latency", "device": "Device time"}
    return parts(
        *(
            picture(recorded, files[clock], f"{what[clock]} of all solutions and the floor")
            for clock in reversed(recorded.main.clocks)
        )
    )


def first_plot(recorded: Recorded) -> str:
    """The first of these alone."""
    return latency_plot(recorded).split("\n\n")[0]


def accuracy(recorded: Recorded) -> str:
    """One line for the solutions that share the figures, which bitwise equal outputs do."""
    groups: dict[tuple[str, str], list[str]] = {}
    for s in recorded.main.summaries:
        if s.matched_ratio is not None and s.cosine is not None:
            key = (f"{100 * s.matched_ratio:.1f} %", f"{s.cosine:.5f}")
            groups.setdefault(key, []).append(markdown(short_name(s.solution)))
    lines = [
        f"- {', '.join(names)}: {matched} of the values within the tolerance, cosine {cosine}"
        for (matched, cosine), names in groups.items()
    ]
    tolerance = markdown(recorded.main.tolerance)
    return f"Accuracy in the worst workload ({tolerance}):\n\n" + "\n".join(lines)


def invariance(recorded: Recorded) -> str:
    """Which solutions repeat their bits, check by check."""
    header, rows = bits_table(recorded.main)
    where = f"{markdown(recorded.main.hardware)}, {recorded.day} (`{relative(recorded)}/`)"
    if recorded.invariance is None or not rows:
        return paragraph(f"{where}: not recorded.")
    largest = bits.largest([s.checks for s in recorded.main.summaries])
    return parts(
        paragraph(
            f"{where}, T={recorded.invariance['tokens']}. Where not, the tokens that differ of "
            f"those compared; the largest relative difference of any token is {largest:.1e}.",
            run_data.changed_sources(recorded.main),
        ),
        table(header, [[short_name(row[0]), *row[1:]] for row in rows], left=1),
    )


def _stages(recorded: Recorded) -> dict[str, Any]:
    if recorded.stages is None or not recorded.stages["results"]:
        raise UsageError(f"{recorded.directory} has no stages.json")
    return recorded.stages


def _study_stages(recorded: Recorded) -> dict[str, Any]:
    """The stages at the original study's token count; at the first measured one without it."""
    results = _stages(recorded)["results"]
    return next((r for r in results if r["tokens"] == STUDY_TOKENS), results[0])


def stages(recorded: Recorded) -> str:
    result = _study_stages(recorded)
    return parts(
        f"T={result['tokens']}, median ms:",
        table(*run_data.stages_table(result), left=1),
        paragraph(run_data.changed_since(_stages(recorded))),
    )


def speed_of_v2(recorded: Recorded) -> str:
    """v2 against v1, the step that the original study reports."""
    record, result = _stages(recorded), _study_stages(recorded)
    pair = [PREFIX + name for name in ("v1", "v2")]
    try:
        v1, v2 = (result["solutions"][name]["median_ms"] for name in pair)
        ratio = {stage: v1[stage] / v2[stage] for stage in (TOTAL, "gemm1", "gemm2")}
    except (KeyError, ZeroDivisionError) as error:
        raise UsageError(f"{recorded.directory}: stages.json does not have {error}") from None
    measured = record.get("solutions")
    if measured is not None:
        record = {**record, "solutions": {n: h for n, h in measured.items() if n in pair}}
    return paragraph(
        f"v2 against v1 at T={result['tokens']}, {markdown(result['routing'].split(',')[0])}: "
        f"{ratio[TOTAL]:.1f}x end to end, GEMM1 with its wrapper {ratio['gemm1']:.1f}x, "
        f"GEMM2 {ratio['gemm2']:.1f}x.",
        run_data.changed_since(record),
    )


def _gemm(recorded: Recorded, name: str) -> dict[str, Any]:
    if name not in recorded.gemm:
        raise UsageError(f"{recorded.directory} has no {name}.json")
    return recorded.gemm[name]


def gemm(recorded: Recorded) -> str:
    record = _gemm(recorded, "gemm")
    header, rows = run_data.gemm_table(run_data.timed(record))
    text = f"The grouped GEMM alone, us, the fastest in bold ({record['hardware']}"
    versions = record["environment"].get("versions", {})
    peers = (("DeepGEMM", "sgl-deep-gemm"), ("sgl_kernel", "sglang-kernel"))
    said = [text, *(f"{name} {versions[of]}" for name, of in peers if of in versions)]
    method = record["method"]
    return parts(
        paragraph(markdown(f"{', '.join(said)}; {method}") + "):"),
        table(header, rows, left=0),
        paragraph(run_data.changed_since(record)),
    )


def _ours(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The timings that the record is about, as far as a peer was timed beside them."""
    name = run_data.first_of_ours(record["results"])
    found = [r for r in run_data.timed(record) if r["variant"] == name and "vs_best_peer" in r]
    if not found:
        raise UsageError("no timing of ours stands beside a peer's in the record of the GEMMs")
    return found


def _spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f}x the best peer in the median, {min(ratios):.2f}x at"


def gemm_layers(recorded: Recorded) -> str:
    """What our GEMMs reach on the workloads' rows, in a sentence."""
    record = _gemm(recorded, "gemm_layers")
    rows, floors = _ours(record), record["floors"]
    bandwidth, peak = floors["read_bytes_per_s"] / 1e12, floors["fp8_flops_per_s"] / 1e12
    least = min(rows, key=lambda r: r["vs_best_peer"])
    ratios = [r["vs_best_peer"] for r in rows]
    shapes = list(dict.fromkeys((r["n"], r["k"]) for r in rows))
    gemm = f"GEMM{shapes.index((least['n'], least['k'])) + 1}"
    workloads = len({(r["tokens"], r["pairs"]) for r in rows})
    name = rows[0]["variant"]
    shipped = f"of {name}, with the configs that it ships, " if " " not in name else ""
    text = (
        f"On the rows of the {workloads} workloads (flat rows, `gemm_bench --layers`) the two "
        f"GEMMs {shipped}are {_spread(ratios)} the least ({gemm} at T={least['tokens']})"
    )
    known = _best_known(record, name)
    if known:
        text += f" ({_spread(known)} the least with the best configs known)"
    reading = [
        r
        for r in rows
        if (r["n"], r["k"]) == shapes[0]
        and r["active"] >= MANY_EXPERTS
        and not plot_gemm.compute_bound(r, bandwidth, peak)
    ]
    if reading:
        shares = [r["percent_of_floor"] for r in reading]
        measured = all("read_us" in r for r in reading)
        rate = "rate of a kernel that only reads them" if measured else "bandwidth of a large read"
        text += (
            f", and from {MANY_EXPERTS} active experts on, where reading bounds it, GEMM1 reads "
            f"its weights at {min(shares):.0f} to {max(shares):.0f} % of the {rate}"
        )
    return paragraph(text + ".", run_data.changed_since(record))


def _best_known(record: dict[str, Any], name: str) -> list[float]:
    """The ratios to the best peer with the fastest config timed; none if only one was."""
    rows = run_data.timed(record)
    if not any(map(run_data.is_neighbour, rows)):
        return []
    best = [run_data.best_known(found, name) for found in run_data.by_problem(rows).values()]
    return [row["vs_best_peer"] for row in best if row is not None and "vs_best_peer" in row]


def gemm_study(recorded: Recorded) -> str:
    record = _gemm(recorded, "gemm_study")
    ratios = [r["vs_best_peer"] for r in _ours(record)]
    below = sum(ratio < 1.0 for ratio in ratios)
    return paragraph(
        f"Over the {len(ratios)} configurations of the original study (`--grid study`: 1, 4 or 8 "
        f"experts with even rows) the median is {statistics.median(ratios):.2f}x, the least "
        f"{min(ratios):.2f}x; {below} of them are below 1.0x.",
        run_data.changed_since(record),
    )


def gemm_plot(recorded: Recorded) -> str:
    what = "The two GEMMs of the layer against the floor and the peers"
    return picture(recorded, "gemm_layers.png", what)


BLOCKS: dict[str, Callable[[Recorded], str]] = {
    f.__name__: f
    for f in (
        short_ranking,
        first_plot,
        ranking,
        latency,
        latency_plot,
        accuracy,
        invariance,
        stages,
        ladder,
        speed_of_v2,
        gemm,
        gemm_layers,
        gemm_study,
        gemm_plot,
    )
}
