"""Tables of rows: cases down, subjects across."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from scripts.common.definitions import MoeDefinition, find_layer
from scripts.common.project import short_name
from scripts.common.roofline import bandwidth, gemm_bytes, gemm_flops, roofline_ms, stepwise_ms
from scripts.common.text import number, percent
from scripts.data.results import CLOCKS
from scripts.data.rows import ROOFLINE, Rows
from scripts.table.tables import Table, joined, numbers, ratio

Case = Mapping[str, str]
"""The columns that identify a case, by their titles in the table."""
SWEEP: Case = {"T": "tokens", "active": "active", "pairs": "pairs"}
MODELS: Case = {"layer": "definition", "T": "tokens", "active": "active"}
BATCHED: Case = {"experts": "experts", "tokens each": "rows", "fullest": "fullest"}
GEMM: Case = {"T": "tokens", "experts": "active", "rows": "rows", "N": "n", "K": "k"}


def wide(f: pd.DataFrame, case: Case, clock: str | None = "device") -> pd.DataFrame:
    """Return the values by case and subject, in the order of the rows. Every case has a line."""
    columns = list(case.values())
    at_clock = f.clock.isna() if clock is None else f.clock == clock
    timed = f[f.value.notna() & at_clock].drop_duplicates([*columns, "subject"], keep="last")
    values = timed.set_index([*columns, "subject"]).value.astype(float).unstack()
    cases = pd.MultiIndex.from_frame(f[columns].drop_duplicates())
    return values.reindex(index=cases, columns=list(timed.subject.unique()))


DONE_BEFORE = ("experts", "fused_moe fp8", "experts fp8", "experts fp8 up first",
               "experts fp8 token-major")  # fmt: skip
"""Subjects timed without the routing or quantisation that every peer does in its call: they have
times, but are not compared."""


def compared(values: pd.DataFrame) -> pd.DataFrame:
    return values.drop(columns=list(DONE_BEFORE), errors="ignore")


def marked(values: pd.DataFrame, form: str) -> pd.DataFrame:
    """Return the values as text, the least of a case with a *."""
    least = values.eq(compared(values).min(axis=1), axis=0)
    return values.map(lambda v: number(v, form)) + least.map(lambda best: "*" if best else "")


def roofline_of(f: pd.DataFrame, case: Case) -> "pd.Series[float]":
    """Return the roofline of each case, in the order of the rows."""
    return f.groupby(list(case.values()), sort=False).roofline.first().astype(float)


def called(rows: Rows, name: str) -> pd.DataFrame:
    """Return the rows of a sweep that were tried."""
    counts = ["tokens", "active", "pairs"]
    return rows.frame(name).dropna(subset=counts).astype(dict.fromkeys(counts, int))


def peers_of(f: pd.DataFrame) -> "pd.Series[bool]":
    """Return, by subject, true if it is a peer."""
    return (
        f.dropna(subset=["peer"]).drop_duplicates("subject").set_index("subject").peer.astype(bool)
    )


def versus(values: pd.DataFrame, peers: "pd.Series[bool]") -> "pd.Series[float]":
    """Return the best peer's time over our best, for each case."""
    values = compared(values)
    peer = peers.reindex(values.columns)
    return values.loc[:, peer.eq(True)].min(axis=1) / values.loc[:, peer.eq(False)].min(axis=1)


def fastest_first(values: pd.DataFrame) -> list[str]:
    """Return the subjects with the most cases first, and among equals by their geometric means."""
    logs = np.log(values)
    order = pd.DataFrame(
        {"missing": values.isna().sum(), "mean": logs.mean(), "name": values.columns}
    )
    return list(order.sort_values(["missing", "mean", "name"]).index)


def named_cases(values: pd.DataFrame, case: Case) -> dict[str, Any]:
    """Return the first columns of a table, which name the cases."""
    index = values.index.to_frame().set_axis(list(case), axis=1).reset_index(drop=True)
    return {
        name: index[name].map(
            lambda value: f"{value:g}" if isinstance(value, float) else str(value)
        )
        for name in index
    }


def sweep_table(rows: Rows, name: str) -> Table:
    """Return whole calls over the number of tokens, of one layer or several: the times by each
    clock, the roofline, its share of the best time, and the best peer's time over ours."""
    f = called(rows, name)
    case = MODELS if f.definition.nunique() > 1 else SWEEP
    values = [wide(f, case, clock) for clock in CLOCKS]
    subjects = fastest_first(values[-1])
    subjects += [name for ms in values for name in ms if name not in subjects]
    values = [ms.reindex(columns=subjects).reset_index(drop=True) for ms in values]
    roofline = roofline_of(f, case).reset_index(drop=True)
    lines = {**named_cases(wide(f, case), case), "roofline": numbers(roofline, ".3f")}
    frame = pd.concat([pd.DataFrame(lines), joined(marked(ms, ".4f") for ms in values)], axis=1)
    frame.columns = [short_name(name) for name in frame]
    shares = [(roofline / compared(ms).min(axis=1)).map(percent) for ms in values]
    ratios = [versus(ms, peers_of(f)).map(ratio) for ms in values]
    frame["roofline / best"], frame["best peer / our best"] = joined(shares), joined(ratios)
    title = "Harness/device time in ms, * the fastest"
    return Table(frame, left=int("layer" in case), title=title)


def batched_table(rows: Rows) -> Table:
    """Return the experts on tokens that lie by expert: device us, the roofline, its share of our
    time, the best peer's time over our best."""
    f = rows.frame("batched")
    values, peer = wide(f, BATCHED), peers_of(f)
    roofline = roofline_of(f, BATCHED).reindex(values.index)
    frame = pd.concat(
        [pd.DataFrame(named_cases(values, BATCHED)), marked(values, ".1f").reset_index(drop=True)],
        axis=1,
    )
    ours = values.loc[:, peer.reindex(values.columns).eq(False)].min(axis=1)
    frame["roofline"] = numbers(roofline, ".1f").to_numpy()
    frame["roofline / ours"] = (roofline / ours).map(percent).to_numpy()
    frame["best peer / our best"] = versus(values, peer).map(ratio).to_numpy()
    return Table(frame, left=0, title="Device us, * the fastest")


def failed_table(f: pd.DataFrame) -> Table:
    """Return the calls without a time, and the reasons."""
    f = f[f.error.notna()]
    named = pd.DataFrame(
        {"layer": f.definition, "call": f.subject.map(short_name), "error": f.error}
    )
    named["T"] = f.tokens.map(lambda tokens: f"{tokens:.0f}")
    by = ["layer", "call", "error"]
    failures = named.groupby(by, sort=False, dropna=False, as_index=False)["T"].agg(", ".join)
    several = failures.layer.nunique() > 1
    return Table(failures[[*["layer"] * several, "call", "T", "error"]], left=4, title="Failed")


def models_summary(rows: Rows, name: str) -> Table:
    """Summarise sweeps of several layers: layers down, tokens across."""
    f, rates = called(rows, name), rows.measurements[name]["rates"]
    values, peer = compared(1e3 * wide(f, MODELS)), peers_of(f)
    ours = values.loc[:, peer.reindex(values.columns).eq(False)].min(axis=1)
    cases = f.drop_duplicates(list(MODELS.values())).to_dict("records")
    steps = [stepwise_ms(case, rates, find_layer(case["definition"])) for case in cases]
    roofline = roofline_of(f, MODELS)
    stepwise = pd.Series(steps, values.index).clip(lower=roofline)
    shares = [(1e3 * part / ours).map(lambda part: percent(part).replace(" ", ""))
              for part in (roofline, stepwise)]  # fmt: skip
    text = shares[0] + ", " + shares[1] + ", " + versus(values, peer).map(ratio)
    cells = numbers(ours, ".1f") + " (" + text + ")"
    cells.index = cells.index.droplevel("active")
    frame = cells.unstack().reindex(index=f.definition.unique()).fillna("-")
    frame.columns = [f"T={tokens:.0f}" for tokens in frame]
    title = (
        "Our best device time in us (roofline over it; the same of two GEMMs and a combine one by "
        "one, whose intermediates go through memory; best peer's time over it)"
    )
    return Table(frame.rename_axis("layer").reset_index(), title=title)


KERNELS = "kernels"
"""The measurement of a call kernel by kernel."""
KERNEL_COLUMNS = {
    "us": ("value", 1, ".2f"),
    "gap": ("gap", 1, "+.2f"),
    "MB": ("bytes", 1e6, ".2f"),
    "GFLOP": ("flops", 1e9, ".2f"),
    "GB/s": ("gbytes", 1, ".0f"),
    "TFLOP/s": ("tflops", 1, ".0f"),
    "roofline us": ("roofline", 1, ".2f"),
    "% of roofline": ("percent", 1, ".0f"),
}
"""A column of a kernel's row, its divisor, and its format."""


def kernels_table(rows: Rows, solution: str, uuid: str) -> Table:
    """Return a call's kernels in the order of launch, then the span from the first start to the
    last end, and the call without the profiler."""
    f = rows.frame(KERNELS)
    f = f[(f.subject == solution) & (f.uuid == uuid) & f.value.notna()]
    f = f.reindex(columns=list(dict.fromkeys([*f, "gap", "bytes", "flops"])))
    f = f.assign(part=f.part.fillna("without the profiler"), flops=f.flops.where(f.flops > 0))
    f = f.assign(
        gbytes=f.bytes / f.value / 1e3,
        tflops=f.flops / f.value / 1e6,
        percent=100 * f.roofline / f.value,
    )
    frame = pd.DataFrame({"kernel": f.part})
    for name, (column, by, form) in KERNEL_COLUMNS.items():
        frame[name] = numbers(f[column].astype(float) / by, form)
    spread = f.p10.map("{:.2f}-".format) + f.p90.map("{:.2f}".format)
    frame["p10-p90"] = spread.where(f.p10.notna(), "-")
    return Table(frame)


def launches(rows: Rows, solution: str, tokens: int) -> pd.DataFrame:
    """Return `part`, `begin` and `end` in us of a call's kernels, in the order of launch, from the
    start of the first. A kernel that begins before the one before it ends has a negative gap."""
    f = rows.frame(KERNELS)
    f = f[(f.subject == solution) & (f.tokens == tokens) & f.kernel.notna()]
    us, gap = f.value.astype(float), f.gap.astype(float).fillna(0.0)
    end = (us + gap).cumsum()
    return pd.DataFrame({"part": f.part, "begin": end - us, "end": end})


def tuned_table(rows: Rows) -> Table:
    """Return the fastest pair of configs at each T, the shipped pair, and its loss."""
    f = rows.frame("tune_layer").dropna(subset=["best"])
    frame = pd.DataFrame({"T": f.tokens.astype(int).astype(str), "best": f.best})
    frame["us"] = numbers(f.best_us, ".1f")
    frame["shipped"] = f.subject.where(f.subject != f.best, "the best")
    frame["loss"] = numbers(f.value, ".1f", " %").replace("-", "not run")
    return Table(frame, left=0)


# --- measurements that follow a benchmark run -----------------------------------------------------


def pairs_table(rows: Rows, name: str) -> Table:
    """Return a line for each workload and solution: accuracy, times in ms, or the error."""
    f = rows.frame(name)
    by = ["tokens", "uuid", "subject"]
    by_pair = f.groupby(by, sort=False)[["cosine", "calc_diff", "error"]].first()
    for clock in CLOCKS:
        by_pair[f"{clock} ms"] = f[f.clock == clock].set_index(by).value.astype(float)
    shown = by_pair.reset_index()
    shown["uuid"] = shown.uuid.astype(str).str[:8]
    shown["error"] = shown.error.astype(object).fillna("").astype(str).str[:60]
    forms = {"cosine": ".6f", "calc_diff": ".1e"} | {f"{clock} ms": ".4f" for clock in CLOCKS}
    for column, form in forms.items():
        shown[column] = numbers(pd.to_numeric(shown[column], errors="coerce"), form)
    shown = shown[[*by, *forms, "error"]].astype(str)
    return Table(shown.rename(columns={"tokens": "T", "subject": "solution"}), left=3)


def roofline_table(rows: Rows, layer: MoeDefinition) -> Table:
    """Return the bound of every workload: memory or compute."""
    rates, lines = rows.measurements[ROOFLINE]["rates"], []
    for row in rows.rows_of(ROOFLINE):
        reading, computing = roofline_ms(row, rates, row["value"], layer)
        counts = {name: str(row[name]) for name in ("tokens", "hit", "pairs", "active", "max")}
        bound = "memory" if reading >= computing else "compute"
        times = {"read ms": f"{reading:.4f}", "FLOPs ms": f"{computing:.4f}", "bound": bound}
        lines.append(counts | times)
    return Table(pd.DataFrame(lines), left=0)


# --- the grouped GEMM alone -----------------------------------------------------------------------


def gemm_frame(rows: Rows, name: str) -> pd.DataFrame:
    """Return the rows of a measurement of GEMMs that have a time, with derived figures. `shipped`
    is the subject. For a config beside the shipped one ("flat, next larger"), which only tells if
    that would have been better, it is the solution, and `beside` is true."""
    f = rows.frame(name)
    f = f[f.value.notna()].reset_index(drop=True)
    f["read"] = f["read"] if "read" in f else np.nan
    f["tokens"] = f.tokens.astype(float).fillna(0).astype(int)  # 0: rows of no workload
    for column in ("active", "pairs", "n", "k", "experts"):
        f[column] = f[column].astype(int)
    us = f.value.astype(float)
    best = f[f.peer.astype(bool)].groupby(list(GEMM.values())).value.min()
    of_case = pd.MultiIndex.from_frame(f[list(GEMM.values())])
    shipped = f.subject.astype(str).str.split(", next ").str[0]
    return f.assign(
        us=us,
        tflops=gemm_flops(f.pairs, f.n, f.k) / us / 1e6,
        gbytes=gemm_bytes(f.active, f.pairs, f.n, f.k) / us / 1e3,
        percent=100 * f.roofline / us,
        vs_best_peer=best.reindex(of_case).to_numpy() / us,
        shipped=shipped,
        beside=shipped != f.subject,
    )


def compute_bound(f: pd.DataFrame, rates: Mapping[str, float]) -> "pd.Series[bool]":
    """Return, for the rows of a gemm_frame, true if the FLOPs take longer than the bytes."""
    return 1e12 * f.tflops / rates["fp8_flops_per_s"] > 1e9 * f.gbytes / bandwidth(rates)


def first_of_ours(f: pd.DataFrame) -> str:
    """Return the subject that a measurement is about: a shipped solution, or the first config of
    ours; empty if there is none."""
    ours = f[~f.peer.astype(bool) & ~f.beside].subject
    return "" if ours.empty else str(ours.iloc[0])


def best_known(f: pd.DataFrame) -> pd.DataFrame:
    """Return each problem's fastest of our shipped config and those beside it."""
    mine = f[f.shipped == first_of_ours(f)]
    return mine.sort_values("us").drop_duplicates(list(GEMM.values()))


def gemm_table(f: pd.DataFrame) -> Table:
    """Return problems down, the subjects across in us, ours against the best peer, and our TFLOP/s.
    If configs beside the shipped one were timed, also the time of the best known one."""
    first = first_of_ours(f)
    values = wide(f[~f.beside], GEMM, None)

    def by_case(rows: pd.DataFrame) -> pd.DataFrame:
        return rows.set_index(list(GEMM.values())).reindex(values.index)

    ours = by_case(f[f.subject == first])
    frame = pd.concat(
        [pd.DataFrame(named_cases(values, GEMM)), marked(values, ".1f").reset_index(drop=True)],
        axis=1,
    )
    if f.beside.any():
        frame[f"{first}, best known"] = numbers(by_case(best_known(f)).us, ".1f").to_numpy()
    frame["best peer / ours"] = ours.vs_best_peer.map(ratio).to_numpy()
    frame["TFLOP/s"] = numbers(ours.tflops, ".0f").to_numpy()
    frame["TB/s"] = numbers(ours.gbytes / 1e3, ".2f").to_numpy()
    return Table(frame if f.tokens.any() else frame.drop(columns="T"), left=0)


def ratios_table(f: pd.DataFrame) -> Table:
    """Return the ratio to the best peer of each of our subjects: over all problems, and for each
    row count (even rows) or weight shape (workloads)."""
    ours = f[~f.peer.astype(bool) & f.vs_best_peer.notna()]
    shape = ours.n.astype(str) + "x" + ours.k.astype(str)
    each = shape.where(ours.tokens > 0, ours["rows"].map("{:g} rows".format))
    both = pd.concat([ours.assign(of="all"), ours.assign(of=each)])
    grouped = both.groupby(["subject", "of"], sort=False).vs_best_peer
    frame = grouped.agg(problems="count", median="median", min="min")
    frame["below 1.0"] = (
        both[both.vs_best_peer < 1]
        .groupby(["subject", "of"])
        .size()
        .reindex(frame.index, fill_value=0)
    )
    frame[["median", "min"]] = frame[["median", "min"]].map(lambda value: number(value, ".3f", "x"))
    return Table(frame.reset_index().astype(str), left=2, title="Ratio to the best peer")
