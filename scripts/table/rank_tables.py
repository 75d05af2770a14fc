"""Rankings as text, Markdown and JSON: the tables of the programs, the report and the README.

Where a ranking has device times, its tables name both clocks: `harness` is what flashinfer-bench
measured, with the host's part; `device` is device_time.py's.
"""

from collections.abc import Callable, Sequence

from scripts.common.project import ACCURACY_TOLERANCES
from scripts.table import bits
from scripts.table.bits import BATCH_INVARIANT, batch_invariant
from scripts.table.ranking import Clock, Ranking, Times, short_name
from scripts.table.records import Record

Table = tuple[list[str], list[list[str]]]


def number(value: float | None, form: str = ".2f", unit: str = "") -> str:
    """A table's cell: the value with its unit, or a dash for none."""
    return "-" if value is None else f"{value:{form}}{unit}"


def percent(share: float | None) -> str:
    return number(None if share is None else 100 * share, ".0f", " %")


def summary_table(ranking: Ranking) -> Table:
    """The solutions in their order; a row without figures for each that could not run."""
    both = len(ranking.clocks) > 1

    def times_header(clock: Clock) -> list[str]:
        device = clock == "device"
        header = [f"{clock} ms"] if both else ["mean ms"]
        header += [f"{clock} geomean ms"] if device else []
        header += [f"{clock} spread"] if both else []
        header += [f"{clock} wins"] if device else []
        named = f"{clock} vs" if device else "vs"
        header += [f"{named} best peer"] if ranking.compares_peers else []
        header += [f"{named} {ranking.against}"] if ranking.against else []
        return header

    def times_cells(clock: Clock, times: Times, passed: int) -> list[str]:
        device = clock == "device"
        cells = [mean_text(times.mean_ms, times, passed, ".4f")]
        cells += [mean_text(times.geomean_ms, times, passed, ".4f")] if device else []
        cells += [percent(times.spread)] if both else []
        cells += [str(times.wins)] if device else []
        cells += [number(times.vs_peer, unit="x")] if ranking.compares_peers else []
        cells += [number(times.against, unit="x")] if ranking.against else []
        return cells

    header = ["#", "solution", "passed", "mean", "geomean", "median", "min", "max", "wins"]
    for clock in ranking.clocks:
        header += times_header(clock)
    header += [BATCH_INVARIANT] if ranking.knows_bits else []
    rows = []
    for place, s in enumerate(ranking.summaries, 1):
        row = [str(place), s.solution, f"{s.passed}/{s.passed + s.failed}"]
        row += [number(v, unit="x") for v in (s.mean, s.geomean, s.median, s.lowest, s.highest)]
        row.append(str(s.harness.wins))
        for clock in ranking.clocks:
            row += times_cells(clock, s.times(clock), s.passed)
        row += [batch_invariant(s.checks)] if ranking.knows_bits else []
        rows.append(row)
    for name, why in ranking.skipped.items():
        rows.append(["-", name, skip_status(why), *["-"] * (len(header) - 3)])
    reasons = [s.note for s in ranking.summaries] + list(ranking.skipped.values())
    if any(reasons):
        header.append("why")
        rows = [[*row, reason] for row, reason in zip(rows, reasons, strict=True)]
    return header, rows


def mean_text(mean: float | None, times: Times, passed: int, form: str) -> str:
    """A mean, and of how many workloads where some that passed have no time."""
    return number(mean, form) + (f" ({times.count})" if 0 < times.count < passed else "")


def skip_status(reason: str) -> str:
    """The beginning of the reason that says what kind it is."""
    for kind in ("unsupported", "not installed"):
        if reason.startswith(kind):
            return kind
    return "not run"


def short_status(record: Record) -> str:
    if "unsupported" in record.reason.lower():
        return "unsupported"
    if record.reason.startswith("not installed"):
        return "not installed"
    return record.status


def latency_title(ranking: Ranking, clock: Clock) -> str:
    """What a table of this clock's latencies is called."""
    if len(ranking.clocks) == 1:
        return "Latency in ms"
    return {"harness": "Harness time in ms, host included", "device": "Device time in ms"}[clock]


def workload_tables(ranking: Ranking) -> list[tuple[str, list[str], list[list[str]]]]:
    """(title, header, rows), workloads down: latency of each clock first, in the order of
    `clocks`, then speed-up, ratios to the best peer and, with device times, the spread."""
    both = len(ranking.clocks) > 1
    names = [s.solution for s in ranking.summaries]

    def table(title: str, cell: Callable[[str, str], str], peer: Clock | None = None) -> None:
        header = ["T", "workload", "reference ms", *map(short_name, names)]
        header += ["best peer"] if peer else []
        rows = []
        for length, uuid in ranking.workloads:
            row = [str(length), uuid[:8], number(ranking.reference_ms(uuid), ".3f")]
            for name in names:
                record = ranking.records.get((uuid, name))
                if record is None:
                    row.append("not run")
                else:
                    row.append(cell(uuid, name) if record.passed else short_status(record))
            if peer:
                best = ranking.best(uuid, peer=True, clock=peer)
                row.append(best[0] if best else "-")
            rows.append(row)
        tables.append((title, header, rows))

    def latency(clock: Clock) -> Callable[[str, str], str]:
        def cell(uuid: str, solution: str) -> str:
            best = ranking.best(uuid, clock=clock)
            mark = "*" if best is not None and best[0] == solution else " "
            return number(ranking.latency_ms(uuid, solution, clock), ".4f") + mark

        return cell

    def vs_peer(clock: Clock) -> Callable[[str, str], str]:
        return lambda uuid, solution: number(ranking.vs_peer(uuid, solution, clock), unit="x")

    def spread(uuid: str, solution: str) -> str:
        return " / ".join(
            percent(timed.spread if (timed := ranking.timed(uuid, solution, c)) else None)
            for c in ranking.clocks
        )

    tables: list[tuple[str, list[str], list[list[str]]]] = []
    for clock in ranking.clocks:
        table(f"{latency_title(ranking, clock)}, * the fastest", latency(clock))
    table(
        "Speed-up over the reference",
        lambda uuid, solution: number(ranking.records[uuid, solution].speedup, unit="x"),
    )
    if ranking.compares_peers:
        for clock in ranking.clocks:
            what = f"{clock.capitalize()} time" if both else "Latency"
            title = f"{what} of the workload's best peer over the solution's"
            table(title, vs_peer(clock), peer=clock)
    if both:
        table("Spread of the calls, harness / device", spread)
    return tables


def accuracy_table(ranking: Ranking) -> Table:
    tolerances = [f"{r:g}/{a:g}" for r, a in ACCURACY_TOLERANCES]
    header = ["solution", "matched", "cosine", "calc_diff", *(f"matched {t}" for t in tolerances)]
    rows = []
    for s in ranking.summaries:
        if s.matched_ratio is None and s.cosine is None:
            continue
        row = [s.solution, number(s.matched_ratio, ".4f"), number(s.cosine, ".6f")]
        row += [number(s.calc_diff, ".1e")]
        row += [number(s.matched_ratios.get(t), ".4f") for t in tolerances]
        rows.append(row)
    return header, rows


def correctness_table(ranking: Ranking) -> Table:
    """Whether the solutions are right, by name; without any time."""
    header, rows = accuracy_table(ranking)
    figures = {row[0]: row[1:] for row in rows}
    missing = ["-"] * (len(header) - 1)
    return ["solution", "passed", *header[1:]], [
        [s.solution, f"{s.passed}/{s.passed + s.failed}", *figures.get(s.solution, missing)]
        for s in sorted(ranking.summaries, key=lambda s: s.solution)
    ]


def short_table(ranking: Ranking) -> Table:
    """The ranking in as few columns as say it: the mean time by each clock, and the speed against
    the best peer by the clock that is nearest to the kernels."""
    nearest = ranking.clocks[-1]
    header = ["#", "solution", "of", "passed", *(f"{clock} ms" for clock in ranking.clocks)]
    header += ["vs best peer"] if ranking.compares_peers else []
    header += [BATCH_INVARIANT] if ranking.knows_bits else []
    rows = []
    for place, s in enumerate(ranking.summaries, 1):
        row = [str(place), short_name(s.solution), "peer" if s.peer else "ours"]
        row += [f"{s.passed}/{s.passed + s.failed}"]
        for times in map(s.times, ranking.clocks):
            row.append(mean_text(times.mean_ms, times, s.passed, ".3f"))
        row += [number(s.times(nearest).vs_peer, unit="x")] if ranking.compares_peers else []
        row += [batch_invariant(s.checks)] if ranking.knows_bits else []
        rows.append(row)
    return header, rows


def bits_table(ranking: Ranking) -> Table:
    """The solutions that invariance.py looked at, by name, a column for each of its checks; without
    rows where there is none."""
    header, rows = bits.rows({s.solution: s.checks for s in ranking.summaries})
    return header, sorted(rows)


def failures_table(ranking: Ranking) -> Table:
    """One row a failure; empty where everything passed."""
    header = ["solution", "T", "workload", "status", "reason"]
    rows = [[r.solution, str(r.tokens), r.uuid[:8], r.status, r.reason] for r in ranking.failures()]
    return header, rows


def side_by_side(ranked: Sequence[Ranking]) -> tuple[list[str], list[str], list[list[str]]]:
    """(legend, header, rows): the solutions down; machines, timing methods and tolerances across.

    Figures are of all the workloads that a solution passed on that machine; only where these are
    the same do the columns compare.
    """
    labels = [chr(ord("A") + i) if i < 26 else str(i) for i in range(len(ranked))]
    tolerances = {r.tolerance for r in ranked}
    legend = []
    for label, r in zip(labels, ranked, strict=True):
        where = f"CPU ({r.hardware})" if r.cpu else r.hardware
        said = [where, r.timing, r.tolerance if len(tolerances) > 1 else ""]
        legend.append(f"{label}: {', '.join(filter(None, said))}, {len(r.workloads)} workloads")
    header = ["solution", *(f"{label} {what}" for label in labels for what in ("geomean", "ms"))]
    rows = []
    for name in dict.fromkeys(s.solution for r in ranked for s in r.summaries):
        row = [name]
        for r in ranked:
            s = next((s for s in r.summaries if s.solution == name), None)
            if s is None:
                row += [skip_status(r.skipped.get(name, "")), "-"]
            else:
                partial = "" if s.passed == len(r.workloads) else f" ({s.passed})"
                row += [number(s.geomean, unit="x") + partial, number(s.harness.mean_ms, ".4f")]
        rows.append(row)
    return legend, header, rows
