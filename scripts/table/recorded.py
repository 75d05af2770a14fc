"""A run's directory: traces.jsonl with run.json, and rows.jsonl with the other measurements."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from scripts.common import schemas
from scripts.common.command_line import UsageError
from scripts.common.definitions import find_layer
from scripts.common.project import DEFINITION, RESULTS_DIR, TRACES_DIR
from scripts.common.roofline import pair_flops, roofline_ms, weight_bytes
from scripts.data import rows
from scripts.data.results import Clock
from scripts.data.rows import ROOFLINE, Rows
from scripts.data.traces import read_results, read_run
from scripts.table.rankings import Ranking, rankings


@dataclass(frozen=True)
class Recorded:
    directory: Path
    info: schemas.RunInfo
    rankings: list[Ranking]
    rows: Rows = field(default_factory=Rows)

    @property
    def definition(self) -> str:
        return self.info.get("definition", DEFINITION)

    @property
    def main(self) -> Ranking:
        """The ranking of run.json's own timing method: the run that the directory records."""
        named = [r for r in self.rankings if r.timing == self.info.get("timing")]
        return (named or self.rankings)[0]

    @property
    def day(self) -> str:
        """The day of the run; empty if run.json does not have it."""
        return self.info.get("environment", {}).get("time", "")[:10]

    def limits(self, ranking: Ranking) -> pd.DataFrame:
        """Return the roofline of every workload, by its uuid, if it was measured on the ranking's
        GPU: `ms`, and `tbytes` of weights if reading takes longer, or `tflop` if the FLOPs do."""
        by_uuid = {}
        of_gpu = [row for gpu, row in self.rows.every(ROOFLINE) if gpu == ranking.hardware]
        for w in (row for row in of_gpu if row["of"] == of_gpu[-1]["of"]):  # the latest of them
            layer, rates = find_layer(self.definition), self.rows.heads[w["of"]]["rates"]
            reading, computing = roofline_ms(w, rates, w.get("value"), layer)
            reads = {"tbytes": w["active"] * weight_bytes(layer) / 1e12}
            flops = {"tflop": w["pairs"] * pair_flops(layer) / 1e12}
            bound = reads if reading >= computing else flops
            by_uuid[w["uuid"]] = {"ms": max(reading, computing), **bound}
        return pd.DataFrame(by_uuid.values(), list(by_uuid), ["ms", "tbytes", "tflop"], dtype=float)

    def roofline_ms(self, ranking: Ranking) -> dict[str, float]:
        return self.limits(ranking).ms.to_dict()


def read(directory: Path, peers: Sequence[str] = (), by: Clock = "harness") -> Recorded:
    """Read the content of the directory. Raises UsageError: there are no traces."""
    traces = directory / "traces.jsonl"
    if not traces.is_file():
        raise UsageError(f"{directory} has no traces.jsonl")
    info = read_run(traces)
    results = read_results([traces], info.get("definition", DEFINITION))
    ranked = rankings(results, peers=peers, by=by)
    if not ranked:
        raise UsageError(f"{traces} has no results")
    return Recorded(directory, info, ranked, rows.read(directory))


def recorded_runs(root: Path = RESULTS_DIR, definition: str = DEFINITION) -> list[Recorded]:
    """Return the latest record of the definition for every GPU."""
    latest = {
        path.parents[1].name: path.parent
        for path in sorted(root.glob("*/*/traces.jsonl"))
        if read_run(path).get("definition", DEFINITION) == definition
    }
    return [read(directory) for directory in latest.values()]


def find_run(path: Path | None) -> Path:
    """Return the directory of a run: the named one, or the latest of `bench`. Raises UsageError."""
    if path is not None:
        return path.parent if path.is_file() else path
    runs = sorted(TRACES_DIR.glob("*/traces.jsonl"))
    if not runs:
        raise UsageError(f"no run in {TRACES_DIR}: name a directory, for example one of results/")
    return runs[-1].parent
