"""The rows of served models as tables: ours beside the engine's own backends."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from scripts.common.text import number, percent
from scripts.table.tables import Table, numbers

TIMED = ("decode", "graph", "prefill", "mixed")
LARGER_IS_BETTER = ("tokens/s",)
SERVED = "served"
"""The measurement's name."""
OWN = ("ours", "accurate")
LONG_PROMPT = 4096
"""Tokens from which on the GPU, not the host, is what a prefill waits for."""
GAINS = {
    "decode": "a decode step",
    "graph": "its CUDA graph",
    "prefill": f"prefill from {LONG_PROMPT} tokens",
    "mixed": "mixed load",
}
"""Columns of what was timed."""
Row = Mapping[str, Any]


def frame_of(rows: Sequence[Row]) -> pd.DataFrame:
    """The rows, and of each the model and how it was served."""
    f = pd.DataFrame(list(rows), dtype=object)
    spread = ", " + f.gpus.astype(str) + " GPUs, " + f.parallel.astype(str) + " parallel"
    model = f.model + ", " + f.layers.astype(str) + " layers" + spread.where(f.gpus > 1, "")
    if "batch_invariant" in f:
        model += f.batch_invariant.map({True: ", batch invariant"}).fillna("")
    if "dense" in f:
        model += (", dense layers by " + f.dense).fillna("")
    return f.assign(model=model)


def gains(timed: pd.DataFrame) -> "pd.Series[float]":
    """Ours over the best of the engine's own, by model, what was timed, size and unit."""
    f = timed.assign(value=timed.value.astype(float))
    values = f.pivot(index=["model", "part", "size", "unit"], columns="subject", values="value")
    others = values.drop(columns=list(OWN), errors="ignore")
    ours = values.get("ours", pd.Series(float("nan"), values.index))
    larger = values.index.isin(LARGER_IS_BETTER, level="unit")
    return (others.min(axis=1) / ours).where(~larger, ours / others.max(axis=1))


def gains_table(rows: Sequence[Row]) -> Table:
    """A line a model: ours over the best of the engine's own."""
    f = frame_of(rows)
    f = f[f.part.isin(TIMED)]
    found = gains(f).dropna().reset_index(name="gain")
    found = found[(found.part != "prefill") | (found["size"] >= LONG_PROMPT)]
    wide = found.groupby(["model", "part"]).gain.agg(between).unstack().rename(columns=GAINS)
    models = [model for model in f.model.unique() if model in wide.index]
    columns = [column for column in GAINS.values() if column in wide]
    wide = wide.reindex(index=models, columns=columns).astype(object).fillna("-")
    title = "Ours over the best of the engine's own kernels, end to end"
    return Table(wide.rename_axis("served").reset_index(), title=title)


def between(values: "pd.Series[float]") -> str:
    """The least and the greatest."""
    least, most = f"{values.min():.2f}x", f"{values.max():.2f}"
    return least if least == f"{most}x" else f"{least[:-1]} to {most}x"


def timed_tables(rows: Sequence[Row]) -> list[Table]:
    """A table a model: a line a backend, a column a size."""
    f = frame_of(rows)
    by_model = f[f.part.isin(TIMED)].groupby("model", sort=False)
    return [timed_table(model, of) for model, of in by_model]


def timed_table(model: str, f: pd.DataFrame) -> Table:
    """Of one model: medians, ours over the best of the engine's own, the same of each backend's
    fastest repeat, which what else runs on a host changes least, and the largest spread of a
    column's backends."""
    case = ["part", "size", "unit"]
    columns = pd.MultiIndex.from_frame(f[case].drop_duplicates())
    values = f.pivot(index="subject", columns=case, values="value")
    values = values.reindex(index=f.subject.unique(), columns=columns)
    forms = {column: ",.0f" if column[-1] in LARGER_IS_BETTER else ".2f" for column in columns}
    found = values.apply(lambda of: numbers(of, forms[of.name]))
    found.loc["gain"] = numbers(gains(f).droplevel("model").reindex(columns), unit="x")
    if "least" in f and f.least.notna().all():  # not in older records
        fastest = f.most.where(f.unit.isin(LARGER_IS_BETTER), f.least)
        of_fastest = gains(f.assign(value=fastest)).droplevel("model").reindex(columns)
        found.loc["gain, fastest"] = numbers(of_fastest, unit="x")
    found.loc["spread"] = f.groupby(case).spread.max().reindex(columns).map(percent)
    units = dict.fromkeys(f"{part} in {unit}" for part, _, unit in columns)
    found.columns = [f"{part} {size}" for part, size, _ in columns]
    found = found.rename_axis("backend").reset_index()
    return Table(found, title=f"{model}: {', '.join(units)}")


def checks_table(rows: Sequence[Row]) -> Table:
    """What is no time: start, worst layer, compilations, tokens; a line a model and backend."""
    f = frame_of(rows)
    f = f[~f.part.isin(TIMED)]

    def cell(of: pd.DataFrame) -> str:
        """Of several layers the worst, which is the last of equal ones."""
        row = of.iloc[::-1].loc[of.value.astype(float).iloc[::-1].idxmax()]
        if row.part.startswith("calc_diff"):
            return f"{row.value:.2e} (layer {row['size']})"
        if pd.api.types.is_bool(row.value):
            return "yes" if row.value else "no"
        return f"{number(row.value, '.4g')} {row.unit}".strip()

    case = ["model", "subject"]
    cells = {key: cell(of) for key, of in f.groupby([*case, "part"], sort=False)}
    lines = pd.MultiIndex.from_frame(f[case].drop_duplicates())
    found = pd.Series(cells).unstack().reindex(lines, columns=f.part.unique()).fillna("-")
    found = found.reset_index().rename(columns={"subject": "backend"})
    return Table(found, left=2, title="Checks; of the layers the worst")
