"""What a run's directory holds.

A run of `bench` or a recorded result: traces.jsonl with run.json, and, where they were measured,
floors.json, invariance.json, stages.json, the gemm*.json of the grouped GEMM alone and the
sweep*.json over numbers of tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from scripts.common import schemas
from scripts.common.command_line import UsageError
from scripts.common.floors import floor_ms, pair_flops, weight_bytes
from scripts.common.project import DEFINITION, RESULTS_DIR, TRACES_DIR
from scripts.data.traces import read_records, read_run
from scripts.table.rankings import Clock, Ranking, rankings, read_invariance


@dataclass(frozen=True)
class Recorded:
    directory: Path
    info: schemas.RunInfo
    rankings: list[Ranking]
    floors: dict[str, Any] | None = None
    stages: dict[str, Any] | None = None
    invariance: schemas.Invariance | None = None
    gemm: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By the file's stem."""
    sweeps: dict[str, dict[str, Any]] = field(default_factory=dict)

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
        """When the run was made; empty where run.json does not say it."""
        return self.info.get("environment", {}).get("time", "")[:10]

    def limits(self, ranking: Ranking) -> pd.DataFrame:
        """The floor of every workload, by its uuid, if it was measured on the ranking's GPU: `ms`,
        and `tbytes` of weights where reading takes longer, `tflop` where FLOPs do."""
        rows = {}
        if self.floors is not None and self.floors.get("hardware") == ranking.hardware:
            for w in self.floors["workloads"]:
                reading, computing = floor_ms(w, self.floors["floors"])
                reads = {"tbytes": w["active"] * weight_bytes() / 1e12}
                flops = {"tflop": w["pairs"] * pair_flops() / 1e12}
                bound = reads if reading >= computing else flops
                rows[w["uuid"]] = {"ms": max(reading, computing), **bound}
        return pd.DataFrame(rows.values(), list(rows), ["ms", "tbytes", "tflop"], dtype=float)

    def floor_ms(self, ranking: Ranking) -> dict[str, float]:
        return self.limits(ranking).ms.to_dict()


def read(directory: Path, peers: Sequence[str] = (), by: Clock = "harness") -> Recorded:
    """Everything that the directory holds; UsageError without traces."""
    traces = directory / "traces.jsonl"
    if not traces.is_file():
        raise UsageError(f"{directory} has no traces.jsonl")
    info = read_run(traces)
    records = read_records([traces], info.get("definition", DEFINITION))
    ranked = rankings(records, peers=peers, by=by)
    if not ranked:
        raise UsageError(f"{traces} has no results")
    stages, floors = directory / "stages.json", directory / "floors.json"
    return Recorded(
        directory=directory,
        info=info,
        rankings=ranked,
        floors=schemas.read(floors, schemas.Floors) if floors.is_file() else None,
        stages=schemas.read(stages, schemas.Stages) if stages.is_file() else None,
        invariance=read_invariance(directory),
        gemm={p.stem: schemas.read(p, schemas.Gemm) for p in sorted(directory.glob("gemm*.json"))},
        sweeps={p.stem: schemas.read(p, schemas.Sweep) for p in directory.glob("sweep*.json")},
    )


def recorded_runs(root: Path = RESULTS_DIR, definition: str = DEFINITION) -> list[Recorded]:
    """The latest record of every GPU that is of the definition."""
    latest = {
        path.parents[1].name: path.parent
        for path in sorted(root.glob("*/*/traces.jsonl"))
        if read_run(path).get("definition", DEFINITION) == definition
    }
    return [read(directory) for directory in latest.values()]


def find_run(path: Path | None) -> Path:
    """The directory of a run: the given one, or the latest of `bench`. Raises UsageError."""
    if path is not None:
        return path.parent if path.is_file() else path
    runs = sorted(TRACES_DIR.glob("*/traces.jsonl"))
    if not runs:
        raise UsageError(f"no run in {TRACES_DIR}: name a directory, for example one of results/")
    return runs[-1].parent
