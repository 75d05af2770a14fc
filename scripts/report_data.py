"""What a run's directory holds, and the tables that the report and the README make of it.

A run of `bench` or a recorded result: traces.jsonl with run.json, and, where they were measured,
floors.json, stages.json and the gemm*.json of gemm_bench and ablation.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import floors
import rank
from common import UsageError
from stages import TOTAL

Table = tuple[list[str], list[list[str]]]


@dataclass(frozen=True)
class Recorded:
    """A directory's contents."""

    directory: Path
    info: dict[str, Any]
    rankings: list[rank.Ranking]
    floors: dict[str, Any] | None = None
    stages: dict[str, Any] | None = None
    gemm: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By the file's stem."""

    @property
    def main(self) -> rank.Ranking:
        """The ranking of run.json's own timing method: the run that the directory records."""
        named = [r for r in self.rankings if r.timing == self.info.get("timing")]
        return (named or self.rankings)[0]

    def floor_ms(self, ranking: rank.Ranking) -> dict[str, float]:
        """The floor of every workload, if it was measured on the ranking's GPU."""
        if self.floors is None or self.floors.get("hardware") != ranking.hardware:
            return {}
        return floors.by_workload(self.floors)


def gemm_kind(record: dict[str, Any]) -> str:
    """What a gemm*.json holds: an 'ablation', the workloads' 'layers', or a grid of 'even' rows."""
    if any("vs_base" in row for row in record["results"]):
        return "ablation"
    by_tokens = any(row.get("tokens") is not None for row in record["results"])
    return "layers" if by_tokens else "even"


def timed(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows that have a time."""
    return [row for row in record["results"] if "us" in row]


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content["results"], list):
            raise TypeError("results is no list")
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is no record of a measurement ({error!r})") from None
    return content


def read(directory: Path, peers: Sequence[str] = ()) -> Recorded:
    """Everything that the directory holds; UsageError without traces."""
    traces = directory / "traces.jsonl"
    if not traces.is_file():
        raise UsageError(f"{directory} has no traces.jsonl")
    records = rank.read_records([traces])
    rankings = rank.rankings(records, peers=peers)
    if not rankings:
        raise UsageError(f"{traces} has no results")
    stages = directory / "stages.json"
    return Recorded(
        directory=directory,
        info=rank.read_run(traces),
        rankings=rankings,
        floors=floors.read_floors(directory),
        stages=_read(stages) if stages.is_file() else None,
        gemm={path.stem: _read(path) for path in sorted(directory.glob("gemm*.json"))},
    )


def ranking_table(ranking: rank.Ranking) -> Table:
    """The overall ranking, names short, with a row for each solution that could not run."""
    header, rows = rank.summary_table(ranking)
    return header, [[row[0], rank.short_name(row[1]), *row[2:]] for row in rows]


def latency_table(ranking: rank.Ranking, floor_ms: dict[str, float]) -> Table:
    """Workloads down, solutions across in ms, the fastest marked with *; the floor where it is
    known and its share of the fastest time, and the best peer's time over that of our best."""
    names = [s.solution for s in ranking.summaries]
    header = ["T", "workload", "reference"]
    header += ["floor"] if floor_ms else []
    header += [rank.short_name(name) for name in names]
    header += ["floor / best"] if floor_ms else []
    header += ["best peer / ours"] if ranking.compares_peers else []
    rows = []
    for length, uuid in ranking.workloads:
        best = ranking.best(uuid)
        floor = floor_ms.get(uuid)
        row = [str(length), uuid[:8], rank.number(ranking.reference_ms(uuid), ".2f")]
        row += [rank.number(floor, ".3f")] if floor_ms else []
        for name in names:
            record = ranking.records.get((uuid, name))
            if record is None or not record.passed:
                row.append("not run" if record is None else rank.short_status(record))
                continue
            mark = "*" if best is not None and best[0] == name else ""
            row.append(rank.number(record.latency_ms, ".3f") + mark)
        if floor_ms:
            share = 100 * floor / best[1] if floor is not None and best else None
            row.append(rank.number(share, ".0f", " %"))
        if ranking.compares_peers:
            peer, ours = ranking.best(uuid, peer=True), ranking.best(uuid, peer=False)
            row.append(rank.number(peer[1] / ours[1] if peer and ours else None, ".2f", "x"))
        rows.append(row)
    return header, rows


def stages_table(result: dict[str, Any]) -> Table:
    """Median ms of every stage, solutions across, of one token count of stages.json."""
    names = list(result["solutions"])
    medians = [result["solutions"][name]["median_ms"] for name in names]
    stages = list(dict.fromkeys(stage for m in medians for stage in m))
    stages.sort(key=lambda stage: stage == TOTAL)
    rows = [[stage, *(rank.number(m.get(stage), ".3f") for m in medians)] for stage in stages]
    return ["stage", *map(rank.short_name, names)], rows


def gemm_table(rows: list[dict[str, Any]]) -> Table:
    """Problems down, the variants across in us, ours against the best peer, our TFLOP/s."""
    problems: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        tokens, active = row.get("tokens"), row.get("active", row["experts"])
        key = (tokens, active, row["rows"], row["n"], row["k"])
        problems.setdefault(key, {})[row["variant"]] = row
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    by_tokens = any(key[0] is not None for key in problems)
    header = ["T"] if by_tokens else []
    header += ["experts", "rows", "N", "K", *variants, "best peer / ours", "TFLOP/s", "TB/s"]
    out = []
    for (tokens, active, count, n, k), found in problems.items():
        best = min(found, key=lambda v: found[v]["us"])
        ours = next((r for r in found.values() if not r["peer"]), None)
        cells = [str(tokens)] if by_tokens else []
        cells += [str(active), f"{count:g}", str(n), str(k)]
        for v in variants:
            cells.append(
                rank.number(found[v]["us"] if v in found else None, ".1f") + "*" * (v == best)
            )
        cells += [rank.number(ours.get("vs_best_peer") if ours else None, ".2f", "x")]
        cells += [rank.number(ours["tflops"] if ours else None, ".0f")]
        cells += [rank.number(ours["gbytes"] / 1e3 if ours else None, ".2f")]
        out.append(cells)
    return header, out


def environment_table(recorded: Recorded) -> Table:
    """What the run was made on and with."""
    info = recorded.info
    captured = info.get("environment", {})
    rows = []
    for number, gpu in enumerate(captured.get("gpus", [])):
        name = "GPU" if number == 0 else f"GPU {number + 1}"
        rows.append([name, f"{gpu.get('name')}, {gpu.get('memory')}, driver {gpu.get('driver')}"])
        for when, seen in (("before", gpu), ("after", _after(info, number))):
            if seen:
                said = f"SM {seen.get('sm_clock')} of {seen.get('sm_clock_max')}, memory "
                said += f"{seen.get('memory_clock')}, {seen.get('temperature_c')} C"
                rows.append([f"{name} clocks {when}", said])
        rows.append([f"{name} power limit", str(gpu.get("power_limit"))])
    if not captured.get("gpus"):
        rows.append(["hardware", str(info.get("hardware", recorded.main.hardware))])
    source = captured.get("source", {})
    if source.get("commit"):
        changed = " with changes" if source.get("modified") else ""
        rows.append(["commit", source["commit"] + changed])
    if source.get("hash"):
        rows.append(["source hash", source["hash"]])
    rows.append(["timing", info.get("timing") or recorded.main.timing or "unknown"])
    rows.append(["tolerance", "; ".join(recorded.main.tolerances) or "unknown"])
    for name, key in (("started", "time"), ("platform", "platform"), ("CUDA", "cuda")):
        if captured.get(key):
            rows.append([name, str(captured[key])])
    if info.get("ended"):
        rows.append(["ended", info["ended"]])
    for earlier in info.get("earlier", []):
        rows.append(["resumed; begun", str(earlier.get("environment", {}).get("time"))])
    rows += [[name, version] for name, version in captured.get("versions", {}).items()]
    if info.get("command") is not None:
        rows.append(["command", " ".join(["run.py bench", *info["command"]])])
    rows += [[f"hash of {rank.short_name(n)}", h] for n, h in info.get("solutions", {}).items()]
    return ["", ""], rows


def _after(info: dict[str, Any], number: int) -> dict[str, Any]:
    after = info.get("gpus_after", [])
    return after[number] if number < len(after) else {}
