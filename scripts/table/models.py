"""The rows of a sweep over several layers as tables: device times beside the floor."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from scripts.common.project import short_name
from scripts.common.text import number, percent
from scripts.table.tables import Table


def models_table(sweep: Mapping[str, Any]) -> list[Table]:
    """Of a sweep.json with several layers: the times and what failed."""
    names = dict.fromkeys(name for row in sweep["results"] for name in row["solutions"])
    ordered = sorted(names, key=lambda name: sweep["peers"].get(name, True))
    rows, failed = [], []
    for row in sweep["results"]:
        us = {
            name: 1e3 * of["device"]["ms"]
            for name, of in row["solutions"].items()
            if "device" in of and "error" not in of
        }
        best = min(us.values(), default=None)
        ours = min((us[n] for n in us if not sweep["peers"][n]), default=None)
        peer = min((us[n] for n in us if sweep["peers"][n]), default=None)
        cells = {name: number(us.get(name), ".1f") + "*" * (us.get(name) == best) for name in us}
        failed += [
            [row["definition"], str(row["tokens"]), short_name(name), of["error"]]
            for name, of in row["solutions"].items()
            if "error" in of
        ]
        rows.append(
            {
                "layer": row["definition"],
                "T": str(row["tokens"]),
                "active": str(row["active"]),
                "floor": f"{1e3 * row['floor_ms']:.1f}",
                **{short_name(name): cells.get(name, "-") for name in ordered},
                "of the floor": percent(1e3 * row["floor_ms"] / ours if ours else None),
                "best peer / ours": number(peer / ours if ours and peer else None, ".2f", "x"),
            }
        )
    title = "Device time in us, * the fastest; active: experts with rows; of the floor: our best"
    header = ["layer", "T", "call", "error"]
    return [
        Table(pd.DataFrame(rows), title=title),
        Table(pd.DataFrame(failed, columns=header), left=4, title="Failed"),
    ]
