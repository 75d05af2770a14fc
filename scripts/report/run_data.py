"""What a run's directory holds, and the tables that the report and the README make of it.

A run of `bench` or a recorded result: traces.jsonl with run.json, and, where they were measured,
floors.json, invariance.json, stages.json and the gemm*.json of gemm_bench and ablation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.common import schemas
from scripts.common.command_line import UsageError
from scripts.common.project import DEFINITION, RESULTS_DIR
from scripts.measure import floors
from scripts.measure.stages import TOTAL
from scripts.pack import sources
from scripts.table import bits, rank_text
from scripts.table.rank_tables import Table, number, percent, short_status, summary_table
from scripts.table.ranking import Clock, Ranking, short_name
from scripts.table.rankings import rankings
from scripts.table.traces import read_records, read_run


@dataclass(frozen=True)
class Recorded:
    """A directory's contents."""

    directory: Path
    info: schemas.RunInfo
    rankings: list[Ranking]
    floors: dict[str, Any] | None = None
    stages: dict[str, Any] | None = None
    invariance: schemas.Invariance | None = None
    gemm: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By the file's stem."""

    @property
    def definition(self) -> str:
        """Whose solutions were run."""
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

    def floor_ms(self, ranking: Ranking) -> dict[str, float]:
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
    stages = directory / "stages.json"
    return Recorded(
        directory=directory,
        info=info,
        rankings=ranked,
        floors=floors.read_floors(directory),
        stages=schemas.read(stages, schemas.Stages) if stages.is_file() else None,
        invariance=bits.read(directory),
        gemm={p.stem: schemas.read(p, schemas.Gemm) for p in sorted(directory.glob("gemm*.json"))},
    )


def recorded_runs(root: Path = RESULTS_DIR, definition: str = DEFINITION) -> list[Recorded]:
    """The latest record of every GPU that is of the definition."""
    latest = {
        path.parents[1].name: path.parent
        for path in sorted(root.glob("*/*/traces.jsonl"))
        if read_run(path).get("definition", DEFINITION) == definition
    }
    return [read(directory) for directory in latest.values()]


def say_clocks(ranking: Ranking) -> str:
    """What the columns of a ranking's clocks are."""
    said = f"harness ms: {ranking.timing}, host included."
    if "device" in ranking.clocks:
        names: dict[str, set[str]] = {}
        for (_, solution), record in ranking.records.items():
            if record.passed and record.device is not None:
                names.setdefault(record.device.method, set()).add(short_name(solution))
        usual, *others = sorted(names, key=lambda method: (-len(names[method]), method))
        methods = rank_text.say_method(usual) + "".join(
            f"; {', '.join(sorted(names[method]))}: {rank_text.say_method(method)}"
            for method in others
        )
        means = "Means over the workloads, in brackets of how many where not of all."
        return f"{said} device ms: on the GPU alone ({methods}). {means}"
    return f"{said} Means over the workloads. The time on the GPU alone is not recorded."


def changed_sources(ranking: Ranking) -> str:
    """A sentence on the solutions whose sources are not those that were ranked, or nothing."""
    return sources.remark(sources.measured(ranking))


def changed_since(record: dict[str, Any]) -> str:
    """The same for stages.json or a gemm*.json."""
    return sources.record_remark(record.get("solutions"), record.get("environment"))


def ranking_table(ranking: Ranking) -> Table:
    """The overall ranking, names short, with a row for each solution that could not run."""
    header, rows = summary_table(ranking)
    return header, [[row[0], short_name(row[1]), *row[2:]] for row in rows]


def latency_table(ranking: Ranking, floor_ms: dict[str, float], clock: Clock = "harness") -> Table:
    """Workloads down, solutions across in ms, the fastest marked with *; the floor where it is
    known and its share of the fastest time, and the best peer's time over that of our best. The
    reference stands beside the harness's times, by which it was measured."""
    names = [s.solution for s in ranking.summaries]
    header = ["T", "workload"]
    header += ["reference"] if clock == "harness" else []
    header += ["floor"] if floor_ms else []
    header += [short_name(name) for name in names]
    header += ["floor / best"] if floor_ms else []
    header += ["best peer / ours"] if ranking.compares_peers else []
    rows = []
    for length, uuid in ranking.workloads:
        best = ranking.best(uuid, clock=clock)
        floor = floor_ms.get(uuid)
        row = [str(length), uuid[:8]]
        row += [number(ranking.reference_ms(uuid), ".2f")] if clock == "harness" else []
        row += [number(floor, ".3f")] if floor_ms else []
        for name in names:
            record = ranking.records.get((uuid, name))
            if record is None or not record.passed:
                row.append("not run" if record is None else short_status(record))
                continue
            mark = "*" if best is not None and best[0] == name else ""
            row.append(number(ranking.latency_ms(uuid, name, clock), ".3f") + mark)
        if floor_ms:
            row.append(percent(floor / best[1] if floor is not None and best else None))
        if ranking.compares_peers:
            ours = ranking.best(uuid, peer=False, clock=clock)
            row.append(number(ranking.vs_peer(uuid, ours[0], clock) if ours else None, ".2f", "x"))
        rows.append(row)
    return header, rows


def stages_table(result: dict[str, Any]) -> Table:
    """Median ms of every stage, solutions across, of one token count of stages.json."""
    names = list(result["solutions"])
    medians = [result["solutions"][name]["median_ms"] for name in names]
    stages = list(dict.fromkeys(stage for m in medians for stage in m))
    stages.sort(key=lambda stage: stage == TOTAL)
    rows = [[stage, *(number(m.get(stage), ".3f") for m in medians)] for stage in stages]
    return ["stage", *map(short_name, names)], rows


def is_neighbour(row: dict[str, Any]) -> bool:
    """Whether a timing is of a config beside the shipped one, such as "flat, next larger": it only
    says what would have been better."""
    return ", next " in row["variant"]


def first_of_ours(rows: list[dict[str, Any]]) -> str | None:
    """The variant that a record is about: a solution as it ships, or the first config of ours."""
    return next((r["variant"] for r in rows if not r["peer"] and not is_neighbour(r)), None)


def best_known(found: dict[str, dict[str, Any]], name: str) -> dict[str, Any] | None:
    """Of one problem's timings by variant the fastest of a solution's and of those beside it."""
    known = [r for v, r in found.items() if v == name or v.startswith(f"{name}, next ")]
    return min(known, key=lambda row: row["us"]) if known else None


def by_problem(rows: list[dict[str, Any]]) -> dict[tuple[Any, ...], dict[str, dict[str, Any]]]:
    """The timed rows of each problem, by variant."""
    problems: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        tokens, active = row.get("tokens"), row.get("active", row["experts"])
        key = (tokens, active, row["rows"], row["n"], row["k"])
        problems.setdefault(key, {})[row["variant"]] = row
    return problems


def gemm_table(rows: list[dict[str, Any]]) -> Table:
    """Problems down, the variants across in us, ours against the best peer, our TFLOP/s; where
    configs beside the shipped one were timed, the best known one's time."""
    problems = by_problem(rows)
    first = first_of_ours(rows)
    variants = list(dict.fromkeys(row["variant"] for row in rows if not is_neighbour(row)))
    by_tokens = any(key[0] is not None for key in problems)
    neighbours = any(map(is_neighbour, rows))
    header = ["T"] if by_tokens else []
    header += ["experts", "rows", "N", "K", *variants]
    header += [f"{first}, best known"] if neighbours else []
    header += ["best peer / ours", "TFLOP/s", "TB/s"]
    out = []
    for (tokens, active, count, n, k), found in problems.items():
        fastest = min((v for v in variants if v in found), key=lambda v: found[v]["us"], default="")
        ours = found.get(first or "")
        cells = [str(tokens)] if by_tokens else []
        cells += [str(active), f"{count:g}", str(n), str(k)]
        for v in variants:
            mark = "*" * (v == fastest)
            cells.append(number(found[v]["us"] if v in found else None, ".1f") + mark)
        if neighbours:
            known = best_known(found, first or "")
            cells.append(number(known["us"] if known else None, ".1f"))
        cells += [number(ours.get("vs_best_peer") if ours else None, ".2f", "x")]
        cells += [number(ours["tflops"] if ours else None, ".0f")]
        cells += [number(ours["gbytes"] / 1e3 if ours else None, ".2f")]
        out.append(cells)
    return header, out


def environment_table(recorded: Recorded) -> Table:
    """What the run was made on and with."""
    info = recorded.info
    captured = info.get("environment", {})
    rows = []
    for place, gpu in enumerate(captured.get("gpus", [])):
        name = "GPU" if place == 0 else f"GPU {place + 1}"
        rows.append([name, f"{gpu.get('name')}, {gpu.get('memory')}, driver {gpu.get('driver')}"])
        for when, seen in (("before", gpu), ("after", _after(info, place))):
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
    rows.append(["tolerance", recorded.main.tolerance or "unknown"])
    facts = (
        ("started", captured.get("time")),
        ("platform", captured.get("platform")),
        ("CUDA", captured.get("cuda")),
        ("ended", info.get("ended")),
    )
    rows += [[name, value] for name, value in facts if value]
    for earlier in info.get("earlier", []):
        rows.append(["resumed; begun", str(earlier.get("environment", {}).get("time"))])
    rows += [[name, version] for name, version in captured.get("versions", {}).items()]
    if info.get("command") is not None:
        rows.append(["command", " ".join(["run.py bench", *info["command"]])])
    rows += [[f"hash of {short_name(n)}", h] for n, h in info.get("solutions", {}).items()]
    return ["", ""], rows


def _after(info: schemas.RunInfo, place: int) -> dict[str, str | None]:
    after = info.get("gpus_after", [])
    return after[place] if place < len(after) else {}
