"""The rows of served models as tables: ours against the engine's own backends."""

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
NOISY = 0.15
"""Spread of a backend's repeats above which a gain is marked: the host's other load made it."""
LONG_PROMPT = 4096
"""Tokens from which on the GPU, not the host, bounds a prefill."""
GAINS = {
    "decode": "a decode step",
    "graph": "its CUDA graph",
    "prefill": f"prefill from {LONG_PROMPT} tokens",
    "mixed": "mixed load",
}
"""Columns of the timed quantities."""
CASE = ["model", "part", "size", "unit"]
Row = Mapping[str, Any]


def frame_of(rows: Sequence[Row]) -> pd.DataFrame:
    """Return the rows with a `name`, the model's, and a `model` that includes the settings of the
    server.

    vLLM prefers FlashInfer's kernel where experts are spread over ranks: a row says so if none of
    the backends is FlashInfer's.
    """
    f = pd.DataFrame(list(rows), dtype=object)
    spread = ", " + f.gpus.astype(str) + " GPUs, " + f.parallel.astype(str) + " parallel"
    model = f.model + ", " + f.layers.astype(str) + " layers" + spread.where(f.gpus > 1, "")
    if "batch_invariant" in f:
        model += f.batch_invariant.map({True: ", batch invariant"}).fillna("")
    if "dense" in f:
        model += (", dense layers by " + f.dense).fillna("")
    is_flashinfer = f.subject.str.startswith("flashinfer").groupby(model).transform("any")
    preferred = (f.parallel == "expert") & (f.engine == "vllm") & ~is_flashinfer
    model += preferred.map({True: ", without FlashInfer", False: ""})
    return f.assign(name=f.model, model=model)


def gains(timed: pd.DataFrame) -> "pd.Series[float]":
    """Return the gain of ours over the best of the engine's own, by model, part, size and unit."""
    f = timed.assign(value=timed.value.astype(float))
    values = f.pivot(index=CASE, columns="subject", values="value")
    others = values.drop(columns=list(OWN), errors="ignore")
    ours = values.get("ours", pd.Series(float("nan"), values.index))
    larger = values.index.isin(LARGER_IS_BETTER, level="unit")
    return (others.min(axis=1) / ours).where(~larger, ours / others.max(axis=1))


def gains_table(rows: Sequence[Row], short: bool = False) -> Table:
    """Return a line for each model: ours over the best of the engine's own.

    Args:
        short: only one GPU and the engine's default kernels, and of each model the most layers.
    """
    f = frame_of([row for row in rows if row["part"] in TIMED])
    if short:
        f = f[(f.gpus == 1) & f.model.isin(f.model[f.subject == "engine"])]
        f = f[f.layers == f.groupby("name").layers.transform("max")]
    spread = f.groupby(CASE).spread.max()
    frame = pd.DataFrame({"gain": gains(f), "spread": spread}).dropna().reset_index()
    frame = frame[(frame.part != "prefill") | (frame["size"] >= LONG_PROMPT)]
    cells = {key: between(group) for key, group in frame.groupby(["model", "part"])}
    wide = pd.Series(cells).unstack().rename(columns=GAINS)
    models = [model for model in f.model.unique() if model in wide.index]
    columns = [column for column in GAINS.values() if column in wide]
    wide = wide.reindex(index=models, columns=columns).fillna("-")
    title = "Ours over the best of the engine's own kernels, end to end"
    return Table(wide.rename_axis("served").reset_index(), title=title)


def between(cases: pd.DataFrame) -> str:
    """Return the least and the greatest gain, marked if one of the two is noisy."""
    ends = cases.loc[[cases.gain.idxmin(), cases.gain.idxmax()]]
    least, most = (f"{gain:.2f}" for gain in ends.gain)
    cell = f"{least}x" if least == most else f"{least} to {most}x"
    return f"{cell} (noisy)" if (ends.spread > NOISY).any() else cell


def timed_tables(rows: Sequence[Row]) -> list[Table]:
    """Return a table for each model: a line for each backend, a column for each size."""
    f = frame_of(rows)
    by_model = f[f.part.isin(TIMED)].groupby("model", sort=False)
    return [timed_table(model, of_model) for model, of_model in by_model]


def timed_table(model: str, f: pd.DataFrame) -> Table:
    """Return one model's medians, the gain of ours over the best of the engine's own, the gain from
    each backend's fastest repeat, which the host's other load changes least, and the largest spread
    of a column's backends."""
    case = ["part", "size", "unit"]
    columns = pd.MultiIndex.from_frame(f[case].drop_duplicates())
    values = f.pivot(index="subject", columns=case, values="value")
    values = values.reindex(index=f.subject.unique(), columns=columns)
    forms = {column: ",.0f" if column[-1] in LARGER_IS_BETTER else ".2f" for column in columns}
    frame = values.apply(lambda column_values: numbers(column_values, forms[column_values.name]))
    spread = f.groupby(case).spread.max().reindex(columns)
    marks = (spread > NOISY).map({True: " (noisy)", False: ""})
    frame.loc["gain"] = numbers(gains(f).droplevel("model").reindex(columns), unit="x") + marks
    if "least" in f and f.least.notna().all():  # not in older records
        fastest = f.most.where(f.unit.isin(LARGER_IS_BETTER), f.least)
        of_fastest = gains(f.assign(value=fastest)).droplevel("model").reindex(columns)
        frame.loc["gain, fastest"] = numbers(of_fastest, unit="x")
    frame.loc["spread"] = spread.map(percent)
    units = dict.fromkeys(f"{part} in {unit}" for part, _, unit in columns)
    frame.columns = [f"{part} {size}" for part, size, _ in columns]
    frame = frame.rename_axis("backend").reset_index()
    return Table(frame, title=f"{model}: {', '.join(units)}")


def checks_table(rows: Sequence[Row]) -> Table:
    """Return the start, worst layer, compilations and tokens: a line for each model and backend."""
    f = frame_of(rows)
    f = f[~f.part.isin(TIMED)]

    def cell(group: pd.DataFrame) -> str:
        """Return the worst of several layers, the last one of equal ones."""
        row = group.iloc[::-1].loc[group.value.astype(float).iloc[::-1].idxmax()]
        if row.part.startswith("calc_diff"):
            return f"{row.value:.2e} (layer {row['size']})"
        if pd.api.types.is_bool(row.value):
            return "yes" if row.value else "no"
        return f"{number(row.value, '.4g')} {row.unit}".strip()

    case = ["model", "subject"]
    cells = {key: cell(group_rows) for key, group_rows in f.groupby([*case, "part"], sort=False)}
    lines = pd.MultiIndex.from_frame(f[case].drop_duplicates())
    frame = pd.Series(cells).unstack().reindex(lines, columns=f.part.unique()).fillna("-")
    frame = frame.reset_index().rename(columns={"subject": "backend"})
    return Table(frame, left=2, title="Checks; of the layers the worst")
