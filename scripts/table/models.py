"""The rows of a sweep over several layers as tables: device times beside the floor."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pandas as pd

from scripts.common.project import short_name
from scripts.common.text import number, percent
from scripts.table.tables import Table


class Best(NamedTuple):
    """Of a layer at a number of tokens: device times in us, None where nothing was measured."""

    layer: str
    tokens: int
    active: int
    floor: float
    us: dict[str, float]
    ours: float | None
    peer: float | None

    @property
    def of_the_floor(self) -> float | None:
        return self.floor / self.ours if self.ours else None

    @property
    def vs_peer(self) -> float | None:
        return self.peer / self.ours if self.ours and self.peer else None


def best(sweep: Mapping[str, Any]) -> Iterator[Best]:
    """Every row of a sweep.json with several layers."""
    for row in sweep["results"]:
        timed = {n: of["device"]["ms"] for n, of in row["solutions"].items() if "device" in of}
        us = {name: 1e3 * ms for name, ms in timed.items()}
        ours, peer = (
            min((of for name, of in us.items() if sweep["peers"][name] == peers), default=None)
            for peers in (False, True)
        )
        counts = row["definition"], row["tokens"], row["active"]
        yield Best(*counts, 1e3 * row["floor_ms"], us, ours, peer)


def models_table(sweep: Mapping[str, Any]) -> list[Table]:
    """Of a sweep.json with several layers: the times, a row for each number of tokens, and what
    failed."""
    names = dict.fromkeys(name for row in sweep["results"] for name in row["solutions"])
    ordered = sorted(names, key=lambda name: sweep["peers"].get(name, True))
    rows = []
    for of in best(sweep):
        least = min(of.us.values(), default=None)
        cells = {n: number(us, ".1f") + "*" * (us == least) for n, us in of.us.items()}
        rows.append(
            {
                "layer": of.layer,
                "T": str(of.tokens),
                "active": str(of.active),
                "floor": number(of.floor, ".1f"),
                **{short_name(name): cells.get(name, "-") for name in ordered},
                "of the floor": percent(of.of_the_floor),
                "best peer / ours": number(of.vs_peer, ".2f", "x"),
            }
        )
    failed = [
        [row["definition"], str(row["tokens"]), short_name(name), of["error"]]
        for row in sweep["results"]
        for name, of in row["solutions"].items()
        if "error" in of
    ]
    title = "Device time in us, * the fastest; active: experts with rows; of the floor: our best"
    header = ["layer", "T", "call", "error"]
    return [
        Table(pd.DataFrame(rows), title=title),
        Table(pd.DataFrame(failed, columns=header), left=4, title="Failed"),
    ]


def models_summary(sweep: Mapping[str, Any]) -> Table:
    """The same in fewer words: layers down, tokens across."""
    cells: dict[str, dict[str, str]] = {}
    for of in best(sweep):
        share = percent(of.of_the_floor).replace(" ", "")
        cell = f"{number(of.ours, '.1f')} ({share}, {number(of.vs_peer, '.2f', 'x')})"
        cells.setdefault(of.layer, {})[f"T={of.tokens}"] = cell
    frame = pd.DataFrame.from_dict(cells, orient="index").fillna("-")
    title = "Our best device time in us (floor over it, best peer's time over it)"
    return Table(frame.rename_axis("layer").reset_index(), title=title)
