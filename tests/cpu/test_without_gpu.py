"""The output of bench on a machine without a GPU: a record's times, and none of the CPU."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from small_record import clocked, record, trace

from scripts.common.project import RESULTS_DIR, short_name
from scripts.data.traces import read_results
from scripts.pack import sources
from scripts.report import report
from scripts.table import rank_text
from scripts.table.rankings import Ranking, rankings
from scripts.table.recorded import read, recorded_runs

RECORD = sorted(RESULTS_DIR.glob("*/*"))[-1]


@pytest.fixture
def on_cpu() -> Ranking:
    """A ranking of a run on the CPU, of which v1 fails at T=1."""
    f = read_results([RECORD / "traces.jsonl"])
    f = f[f.tokens.isin([1, 7]) & f.solution.str.startswith("cutedsl")]
    f = f.assign(cpu=True, hardware="Some CPU", timing="wall clock")
    failed = {"passed": False, "status": "INCORRECT_NUMERICAL", "reason": "too many values differ"}
    f.loc[f.solution.str.endswith("v1") & (f.tokens == 1), list(failed)] = list(failed.values())
    (ranking,) = rankings(f)
    return ranking


def test_outputs_are_judged_and_no_time_is_given(on_cpu) -> None:
    text = rank_text.print_ranking(on_cpu)
    first, second, *_ = text.splitlines()
    assert first.startswith("CPU (Some CPU), workloads of T=1, 7")
    assert second.startswith("Tolerance: rtol 0.2, atol 0.1")
    rows = {
        line.split()[0]: line.split()[1]
        for line in text.split("Failed:")[0].splitlines()
        if "cutedsl" in line
    }
    assert rows["cutedsl_moe_fp8_v2"] == "2/2" and rows["cutedsl_moe_fp8_v1"] == "1/2"
    failed = text.split("Failed:")[1].split()[10:]
    assert failed[:4] == ["cutedsl_moe_fp8_v1", "1", "e05c6c03", "INCORRECT_NUMERICAL"]
    assert "ms" not in text.split("Failed:")[0].split() and "0x" not in text


def test_the_recorded_ranking_stands_beside_it(on_cpu) -> None:
    (recorded,) = [r for r in recorded_runs() if r.directory == RECORD]
    text = rank_text.without_gpu([on_cpu], recorded_runs())
    assert f"Recorded on {recorded.main.hardware}, {RECORD.name}, 19 workloads" in text
    assert "harness ms: flashinfer-bench" in text
    first = recorded.main.summary.iloc[0]
    assert text.count("\nRecorded on ") == len(recorded_runs())
    own = text.split(f"Recorded on {recorded.main.hardware}, ")[1].split("\nRecorded on ")[0]
    (row,) = [line.split() for line in own.splitlines() if line.startswith("1  ")]
    kind = "peer" if first.peer else "ours"
    assert row[:4] == ["1", short_name(first.solution), kind, "19/19"]
    assert row[4] == f"{first.harness_mean_ms:.3f}"


def test_whether_the_sources_have_changed_since_is_said(monkeypatch) -> None:
    recorded = read(RECORD)
    measured = recorded.info["solutions"]
    monkeypatch.setattr(sources, "current", lambda: measured)
    assert "The sources have not changed since." in rank_text.recorded_ranking(recorded)
    changed = measured | {"cutedsl_moe_fp8_v3": "x"}
    monkeypatch.setattr(sources, "current", lambda: changed)
    assert "Since this run the source of v3 has changed." in rank_text.recorded_ranking(recorded)


def test_device_times_are_shown_where_they_are_recorded(tmp_path: Path) -> None:
    with_times, without = clocked("x", 7, 1.0, 0.5), trace("x", 7, 1.0)
    text = rank_text.recorded_ranking(read(record(tmp_path, [with_times])))
    assert "on the GPU alone (replay of a CUDA graph)" in text
    assert "0.500" in text and "not recorded" not in text
    text = rank_text.recorded_ranking(read(record(tmp_path, [without])))
    assert "The time on the GPU alone is not recorded." in text and "0.500" not in text


def test_of_every_gpu_the_latest_record_is_taken(tmp_path: Path, monkeypatch) -> None:
    for place in ("gpu-a/2026-01-02", "gpu-a/2026-01-10", "gpu-b/2025-12-31"):
        record(tmp_path / place, [trace("x", 7, 1.0)])
    glob = Path.glob  # whose order is the file system's
    monkeypatch.setattr(Path, "glob", lambda *of: sorted(glob(*of), reverse=True))
    found = [r.directory.relative_to(tmp_path) for r in recorded_runs(tmp_path)]
    assert [d.as_posix() for d in found] == ["gpu-a/2026-01-10", "gpu-b/2025-12-31"]
    assert recorded_runs(tmp_path / "absent") == []


# --- what was emulated ----------------------------------------------------------------------------


def emulated(solution: str, length: int, **more: Any) -> dict[str, Any]:
    libs = {"device": "cpu", "emulated": "sm_90a", "timing": "kernels, sm_90a, emulated"}
    extra = {"matched_ratio": 0.9, "cosine": 0.9, "calc_diff": 1e-4}
    options = {"latency": 0.0, "reference": 0.0, "libs": libs, "extra": extra, **more}
    return trace(f"cutedsl_moe_fp8_{solution}", length, **options)


TRACES = [emulated("a", 7), emulated("b", 7), emulated("b", 80)]


def ranked(place: Path, *more: dict) -> list[Ranking]:
    record(place, [*TRACES, *more])
    return rankings(read_results([place / "traces.jsonl"]))


def test_what_was_emulated_passes_and_has_no_time(tmp_path: Path) -> None:
    timed = [trace(f"cutedsl_moe_fp8_{n}", 7, 2.0, hardware="GPU A") for n in "ab"]
    both = sorted(ranked(tmp_path, *timed), key=lambda r: r.emulated)
    gpu, ours = both
    assert (gpu.emulated, ours.emulated) == ("", "sm_90a")
    assert list(ours.summary.passed) == [2, 1] and ours.results.harness.isna().all()
    text = rank_text.print_rankings(both)
    assert "The kernels were run by the emulator: there is no time." in text
    part = text.split("CPU (GPU A)")[1]
    assert " ms" not in part and "wins" not in part
    assert "outputs of the kernels for sm_90a, emulated" in part
    made = {of["emulated"]: of for of in json.loads(rank_text.print_rankings(both, "json"))}
    assert {result["harness"] for result in made["sm_90a"]["results"]} == {None}


def test_a_time_in_an_emulated_trace_is_refused(tmp_path: Path) -> None:
    (ranking,) = ranked(tmp_path, emulated("c", 7, latency=0.1, reference=10.0))
    (failed,) = ranking.results[~ranking.results.passed].itertuples()
    assert failed.solution.endswith("_c") and failed.status == "INVALID"
    assert failed.reason == "a time of the emulator is no measurement"


def test_the_page_shows_the_same(on_cpu, tmp_path: Path, monkeypatch) -> None:
    (emulated,) = ranked(tmp_path)
    environment = {"time": "2026-01-02T03:04"}
    of_gpu = read(record(tmp_path / "gpu", [trace("x", 7, 1.0)], environment=environment))
    monkeypatch.setattr(report, "recorded_runs", lambda definition: [of_gpu])
    measured = dataclasses.replace(of_gpu, rankings=[on_cpu, *of_gpu.rankings])
    assert "not measured in this run" not in report.render(measured), "it has a GPU's"
    page = report.render(dataclasses.replace(read(tmp_path), rankings=[on_cpu, emulated]))
    assert "Recorded: GPU A" in page and "Recorded 2026-01-02; not measured in this run." in page
    assert "CPU (Some CPU)" in page and "INCORRECT_NUMERICAL" in page
    assert page.count("<h2>Environment") == 1
    assert "outputs of the kernels for sm_90a, emulated" in page
