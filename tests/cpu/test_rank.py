"""Ranking on hand-made traces: the statistics, the failures, and no mixing of machines."""

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from scripts.common.command_line import UsageError
from scripts.common.project import BASELINES, DEFINITION, OURS
from scripts.common.text import markdown_table, percent
from scripts.data.traces import read_records
from scripts.pack.pack import every_generation
from scripts.programs import rank
from scripts.table import rank_text, tables
from scripts.table.rankings import TOLERANCES, Ranking, rankings

UUIDS = {7: "aaaa0000", 80: "bbbb0000", 901: "cccc0000"}


def trace(
    solution: str,
    length: int,
    latency: float | None,
    reference: float = 10.0,
    status: str = "PASSED",
    log: str = "",
    hardware: str = "GPU A",
    extra: dict | None = None,
    timestamp: str = "2026-01-01T00:00:00",
    libs: dict | None = None,
) -> dict[str, Any]:
    correct = status in ("PASSED", "INCORRECT_NUMERICAL")
    performance = {
        "latency_ms": latency,
        "reference_latency_ms": reference,
        "speedup_factor": reference / latency if latency else 0.0,
    }
    error = {"max_relative_error": 0.1, "max_absolute_error": 0.5, "extra": extra}
    return {
        "definition": DEFINITION,
        "workload": {"axes": {"seq_len": length}, "inputs": {}, "uuid": UUIDS[length]},
        "solution": solution,
        "evaluation": {
            "status": status,
            "environment": {"hardware": hardware, "libs": libs or {}},
            "timestamp": timestamp,
            "log": log,
            "correctness": error if correct else None,
            "performance": performance if status == "PASSED" else None,
        },
    }


def write(path: Path, traces: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(t) + "\n" for t in traces))
    return path


def ranked(tmp_path: Path, traces: list[dict], **options: Any) -> list[Ranking]:
    path = write(tmp_path / "traces.jsonl", traces)
    return rankings(read_records([path]), **options)


def to_text(ranking: Ranking) -> str:
    return rank_text.print_rankings([ranking])


def to_markdown(ranking: Ranking) -> str:
    return rank_text.print_rankings([ranking], "markdown")


def cells_of(table: tables.Table) -> tuple[list[str], list[list[str]]]:
    return table.header, table.rows


def test_statistics_wins_and_order(tmp_path: Path) -> None:
    traces = [
        trace("slow", 901, 5.0),
        trace("slow", 7, 2.0),
        trace("fast", 901, 2.5),
        trace("fast", 7, 1.0),
        trace("fast", 80, 10.0),
        trace("slow", 80, 5.0),
    ]
    (ranking,) = ranked(tmp_path, traces)
    assert ranking.workloads == [(7, "aaaa0000"), (80, "bbbb0000"), (901, "cccc0000")]
    fast, slow = ranking.summaries
    assert (fast.solution, slow.solution) == ("fast", "slow")
    assert fast.mean == pytest.approx((10 + 1 + 4) / 3)
    assert fast.geomean == pytest.approx(40 ** (1 / 3))
    assert (fast.median, fast.lowest, fast.highest) == (4.0, 1.0, 10.0)
    assert (fast.harness_wins, slow.harness_wins) == (2, 1)
    assert fast.harness_mean_ms == pytest.approx(13.5 / 3)
    assert fast.harness_geomean_ms == pytest.approx((1.0 * 10.0 * 2.5) ** (1 / 3))


def test_machines_and_timing_methods_get_a_table_each(tmp_path: Path) -> None:
    traces = [
        trace("x", 7, 1.0),
        trace("x", 7, 2.0, hardware="GPU B"),
        trace("x", 7, 3.0, libs={"timing": "CUPTI"}),
    ]
    found = ranked(tmp_path, traces)
    assert [(r.hardware, r.timing) for r in found] == [
        ("GPU A", ""),
        ("GPU A", "CUPTI"),
        ("GPU B", ""),
    ]
    assert [r.records["aaaa0000", "x"].latency_ms for r in found] == [1.0, 3.0, 2.0]
    assert len(ranked(tmp_path, traces, hardware="gpu b")) == 1


def test_the_latest_result_of_a_pair_counts_and_the_rest_is_mentioned(tmp_path: Path) -> None:
    old = trace("x", 7, 1.0, timestamp="2026-01-01T00:00:00")
    new = trace("x", 7, 4.0, timestamp="2026-02-01T00:00:00")
    (ranking,) = ranked(tmp_path, [new, old])
    assert ranking.summaries[0].mean == 2.5
    assert "1 older results" in to_text(ranking)


def test_failures_are_listed_and_rank_behind(tmp_path: Path) -> None:
    log = "Traceback (most recent call last):\n  File ...\nValueError: unsupported device cuda:0\n"
    missing = "BuildError: Failed importing: No module named 'flashinfer.fused_moe'\n"
    traces = [
        trace("ok", 7, 5.0),
        trace("ok", 80, 5.0),
        trace("half", 7, 0.1),
        trace("half", 80, None, status="RUNTIME_ERROR", log=log),
        trace("absent", 7, None, status="COMPILE_ERROR", log=missing),
        trace("wrong", 7, None, status="INCORRECT_NUMERICAL", extra={"matched_ratio": 0.5}),
        trace("late", 7, None, status="TIMEOUT", log="Evaluation timeout after 300 seconds"),
    ]
    (ranking,) = ranked(tmp_path, traces)
    assert [s.solution for s in ranking.summaries][:2] == ["ok", "half"]
    reasons = {r.solution: r.reason for r in ranking.failures()}
    assert reasons == {
        "half": "unsupported device cuda:0",
        "absent": "not installed: flashinfer",
        "wrong": "matched ratio 0.5000 is too low (largest error 0.5)",
        "late": "Evaluation timeout after 300 seconds",
    }
    text, markdown = to_text(ranking), to_markdown(ranking)
    for reason in reasons.values():
        assert reason in text and reason in markdown
    header, rows = cells_of(tables.workload_tables(ranking)[0])
    cells = {name: [row[header.index(name)] for row in rows] for name in header[3:]}
    assert cells == {
        "ok": ["5.0000", "5.0000*"],
        "half": ["0.1000*", "RUNTIME_ERROR"],
        "absent": ["COMPILE_ERROR", "not run"],
        "late": ["TIMEOUT", "not run"],
        "wrong": ["INCORRECT_NUMERICAL", "not run"],
    }
    assert "| solution   | " in markdown and "Failed:" in text
    (good,) = ranked(tmp_path, traces[:2])
    assert "Failed:" not in to_text(good)
    assert not tables.accuracy_table(good), "nothing is known of it"


def test_what_failed_after_all_has_no_speed(tmp_path: Path) -> None:
    """Its trace says PASSED: it changed its inputs, or its time is none."""
    traces = [trace("x", 7, 2.0), trace("y", 7, 1.0), trace("y", 80, 5.0)]
    traces.append(trace("x", 80, 0.1, extra={"inputs_changed": ["hidden_states"]}))
    (ranking,) = ranked(tmp_path, traces)
    summary = {s.solution: s for s in ranking.summaries}
    assert [r.status for r in ranking.failures()] == ["CHANGED_INPUTS"]
    x = summary["x"]
    assert (x.passed, x.failed, x.harness_count, x.harness_mean_ms) == (1, 1, 1, 2.0)
    speed = [x.mean, x.geomean, x.median, x.lowest, x.highest]
    assert speed == pytest.approx([5.0] * 5)
    assert summary["y"].harness_wins == 2

    libs = {"device": "cpu", "emulated": "sm_90a"}
    (emulated,) = ranked(tmp_path, [trace("x", 7, 0.1, libs=libs)])
    assert [r.status for r in emulated.failures()] == ["INVALID"]
    assert emulated.summary.highest.isna().all()


def test_accuracy_columns_show_the_worst(tmp_path: Path) -> None:
    def extra(value: float) -> dict:
        return {
            "matched_ratio": value,
            "cosine": value,
            "calc_diff": 1 - value,
            "matched_ratios": {"0.2/0.1": value, "0.3/1": value, "0.01/0.01": value},
        }

    traces = [trace("x", 7, 1.0, extra=extra(0.99)), trace("x", 80, 1.0, extra=extra(0.9))]
    (ranking,) = ranked(tmp_path, traces)
    (summary,) = ranking.summaries
    assert (summary.matched_ratio, summary.cosine) == (0.9, 0.9)
    assert summary.calc_diff == pytest.approx(0.1)
    ratios = ranking.summary[list(TOLERANCES)].iloc[0].to_dict()
    assert ratios == {
        "0.2/0.1": 0.9,
        "0.3/1": 0.9,
        "0.01/0.01": 0.9,
    }
    assert "0.900000" in to_text(ranking)
    # What flashinfer-bench itself records, without the accuracy pass.
    (ranking,) = ranked(tmp_path, [trace("x", 7, 1.0, extra={"matched_ratio": 0.95})])
    assert tables.accuracy_table(ranking).rows == [["x", "0.9500", *["-"] * 5]]


def test_shares_and_methods_in_words() -> None:
    assert [percent(x) for x in (None, 0.0, 0.5, 1.0)] == ["-", "0 %", "50 %", "100 %"]
    methods = [rank_text.say_method(m) for m in ("graph", "clock", "")]
    assert methods == ["replay of a CUDA graph", "clock", "unknown method"]


def test_markdown_has_every_table_of_the_text(tmp_path: Path) -> None:
    (ranking,) = ranked(tmp_path, CLOCKED, peers=["peer"])
    said = to_markdown(ranking)
    found = tables.workload_tables(ranking)
    assert len(found) == 4
    for table in found:
        assert f"{table.title}:\n\n{markdown_table(table.header, table.rows, left=0)}" in said


def test_against_is_the_geometric_mean_of_latency_ratios(tmp_path: Path) -> None:
    traces = [trace("a", 7, 1.0), trace("b", 7, 2.0), trace("a", 80, 1.0), trace("b", 80, 8.0)]
    (ranking,) = ranked(tmp_path, traces, against="b")
    by_name = {s.solution: s for s in ranking.summaries}
    assert by_name["a"].harness_against == pytest.approx(math.sqrt(2 * 8))
    assert by_name["b"].harness_against == pytest.approx(1.0)
    with pytest.raises(UsageError, match="no trace"):
        ranked(tmp_path, traces, against="c")


def test_cpu_results_are_called_so(tmp_path: Path) -> None:
    (ranking,) = ranked(tmp_path, [trace("x", 7, 1.0, hardware="Xeon", libs={"device": "cpu"})])
    assert to_text(ranking).startswith("CPU (Xeon)")
    assert "nothing about a GPU" in to_markdown(ranking).replace("say nothing", "nothing")


def test_json_is_complete(tmp_path: Path) -> None:
    found = ranked(tmp_path, [trace("x", 7, 2.0), trace("y", 7, None, status="TIMEOUT")])
    (data,) = json.loads(rank_text.print_rankings(found, "json"))
    assert data["summary"][0]["mean"] == 5.0
    assert data["workloads"][0]["results"]["y"]["status"] == "TIMEOUT"


def test_skipped_solutions_are_named_with_the_reason(tmp_path: Path) -> None:
    reasons = {
        "flashinfer_moe": "unsupported on sm_90 (needs sm_100/103)",
        "sglang_moe": "not installed: pip install sglang-kernel==0.4.3",
        "x": "was skipped once and has results now",
    }
    (tmp_path / "run.json").write_text(json.dumps({"skipped": reasons}))
    (ranking,) = ranked(tmp_path, [trace("x", 7, 1.0)])
    assert list(ranking.skipped) == ["flashinfer_moe", "sglang_moe"]
    for said in (to_text(ranking), to_markdown(ranking)):
        for name in ranking.skipped:
            assert f"{name}: {reasons[name]}" in said
        assert "has results now" not in said
    assert ranking.failures() == [], "what cannot run is no failure"
    assert rank_text.to_json(ranking)["skipped"] == ranking.skipped
    assert ranked(tmp_path, [trace("x", 7, 1.0)], solutions=["x"])[0].skipped == {}


PEER_TRACES = [
    trace("ours", 7, 1.0),
    trace("ours", 80, 4.0),
    trace("peer_a", 7, 2.0),
    trace("peer_a", 80, 8.0),
    trace("peer_b", 7, 4.0),
    trace("peer_b", 80, 2.0),
]


def test_ratio_to_the_best_peer_of_each_workload(tmp_path: Path) -> None:
    (ranking,) = ranked(tmp_path, PEER_TRACES, peers=["peer_*"])
    assert ranking.best(peer=True)["aaaa0000"] == ("peer_a", 2.0)
    assert ranking.best(peer=True)["bbbb0000"] == ("peer_b", 2.0)
    assert ranking.figure("aaaa0000", "ours", "harness_vs_peer") == 2.0
    assert ranking.figure("bbbb0000", "ours", "harness_vs_peer") == 0.5
    overall = {s.solution: s.harness_vs_peer for s in ranking.summaries}
    assert overall["ours"] == pytest.approx(1.0)
    assert overall["peer_a"] == pytest.approx(math.sqrt(1 * 2 / 8))
    assert overall["peer_b"] == pytest.approx(math.sqrt(2 / 4 * 1))
    assert "vs best peer" in tables.summary_table(ranking).header
    table = tables.workload_tables(ranking)[2]
    assert "best peer" in table.title
    assert [(r[0], r[-1]) for r in table.rows] == [("7", "peer_a"), ("80", "peer_b")]
    assert rank_text.to_json(ranking)["workloads"][0]["results"]["ours"]["vs_best_peer"] == {
        "harness": 2.0
    }


def test_our_names_begin_as_no_peers_does() -> None:
    for generation in every_generation():
        is_peer = BASELINES in generation.path.relative_to(generation.root).parts
        assert generation.name.startswith(OURS) != is_peer


def test_peers_are_known_from_the_run_or_by_their_names(tmp_path: Path) -> None:
    (by_name,) = ranked(tmp_path, [trace("cutedsl_moe_fp8_v2", 7, 1.0), trace("other", 7, 2.0)])
    assert {s.solution: s.peer for s in by_name.summaries} == {
        "cutedsl_moe_fp8_v2": False,
        "other": True,
    }
    peers = {"ours": False, "peer_a": True, "peer_b": True}
    (tmp_path / "run.json").write_text(json.dumps({"peers": peers}))
    (by_run,) = ranked(tmp_path, PEER_TRACES)
    assert {s.solution: s.peer for s in by_run.summaries} == peers
    (alone,) = ranked(tmp_path, [trace("ours", 7, 1.0)])
    assert not alone.compares_peers and "best peer" not in to_text(alone)


def test_the_fastest_of_a_workload_is_marked(tmp_path: Path) -> None:
    (ranking,) = ranked(tmp_path, [trace("a", 7, 1.0), trace("b", 7, 2.0)])
    header, rows = cells_of(tables.workload_tables(ranking)[0])
    assert header[3:] == ["a", "b"]
    assert rows[0][3:] == ["1.0000*", "2.0000"]


def test_results_of_different_software_are_marked(tmp_path: Path) -> None:
    traces = [
        trace("x", 7, 1.0, libs={"torch": "2.11.0", "triton": "3.6.0"}),
        trace("y", 7, 1.0, libs={"torch": "2.12.0", "triton": "3.6.0"}),
    ]
    (ranking,) = ranked(tmp_path, traces)
    (remark,) = ranking.remarks
    assert "torch: 2.11.0, 2.12.0" in remark and "triton" not in remark
    assert remark in to_text(ranking) and remark in to_markdown(ranking)


# --- what does not compare is kept apart ----------------------------------------------------------


def test_a_pass_at_another_tolerance_replaces_no_failure(tmp_path: Path) -> None:
    strict = {"tolerance": "rtol 0.2, atol 0.1, matched ratio 0.85"}
    loose = {"tolerance": "rtol 9, atol 9, matched ratio 0.1"}
    failed = {"status": "INCORRECT_NUMERICAL", "timestamp": "2026-01-01", "libs": strict}
    traces = [trace("x", 7, None, **failed), trace("x", 7, 1.0, timestamp="2026-02-01", libs=loose)]
    found = ranked(tmp_path, traces)
    assert {r.tolerance: len(r.failures()) for r in found} == {
        strict["tolerance"]: 1,
        loose["tolerance"]: 0,
    }


def test_of_several_sources_the_last_one_counts_and_the_others_are_named(tmp_path: Path) -> None:
    def of(source: str, length: int, latency: float, day: int) -> dict:
        libs = {"solution_hash": source} if source else {}
        return trace("x", length, latency, libs=libs, timestamp=f"2026-01-{day:02}")

    traces = [of("a" * 40, 7, 1.0, 1), of("a" * 40, 80, 1.0, 1), of("", 901, 1.0, 2)]
    traces += [of("b" * 40, 7, 2.0, 4), of("b" * 40, 7, 5.0, 3), trace("y", 80, 1.0)]
    (ranking,) = ranked(tmp_path, traces)
    x = next(s for s in ranking.summaries if s.solution == "x")
    assert (x.passed, x.missing, x.mean) == (1, 1, 5.0), "no figure of source a is taken for b's"
    assert ranking.superseded == 1
    (remark,) = ranking.remarks
    assert re.search(r"source bbbbbbbb; 3 results of other .*\(aaaaaaaa, unknown\)", remark)
    assert remark in to_text(ranking) and remark in to_markdown(ranking)


def test_ratios_are_formed_within_a_run_and_mixed_runs_are_named(tmp_path: Path) -> None:
    def of(run: str, solution: str, length: int, latency: float, reference: float) -> dict:
        return trace(solution, length, latency, reference, libs={"run": run})

    traces = [
        of("1", "ours", 7, 1.0, 10.0),
        of("1", "peer", 7, 2.0, 10.0),
        of("2", "late", 7, 1.0, 20.0),
        of("1", "ours", 80, 1.0, 10.0),
        of("2", "late", 80, 1.0, 20.0),
        of("2", "peer", 80, 4.0, 20.0),
    ]
    (ranking,) = ranked(tmp_path, traces, peers=["peer"], against="ours")
    u7, u80 = UUIDS[7], UUIDS[80]
    ratios = {
        (uuid, name): ranking.figure(uuid, name, "harness_vs_peer")
        for uuid in (u7, u80)
        for name in ("ours", "late")
    }
    assert ratios == {(u7, "ours"): 2.0, (u7, "late"): None, (u80, "ours"): None, (u80, "late"): 4}
    by_name = {s.solution: s for s in ranking.summaries}
    assert by_name["late"].harness_vs_peer == 4.0 and by_name["ours"].harness_vs_peer == 2.0
    assert by_name["late"].harness_against is None and by_name["ours"].harness_against == 1.0
    (remark,) = ranking.remarks
    assert "at T=7 (10.00 to 20.00 ms), T=80 (10.00 to 20.00 ms)" in remark
    (one_run,) = ranked(tmp_path, [t | {} for t in traces[:2]])
    assert one_run.remarks == []


def test_files_without_a_run_are_a_run_each(tmp_path: Path) -> None:
    files = [
        write(tmp_path / "a.jsonl", [trace("ours", 7, 1.0)]),
        write(tmp_path / "b.jsonl", [trace("peer", 7, 2.0, reference=20.0)]),
    ]
    (ranking,) = rankings(read_records(files), peers=["peer"])
    assert ranking.figure(UUIDS[7], "ours", "harness_vs_peer") is None
    assert "several runs stand side by side at T=7" in ranking.remarks[0]


# --- failed, missing and impossible figures -------------------------------------------------------


def test_failed_results_give_no_speed_and_win_nothing(tmp_path: Path) -> None:
    fast = trace("fast", 7, 0.1)
    fast["evaluation"] |= {"status": "INCORRECT_NUMERICAL", "performance": None}
    zero = trace("zero", 7, 1.0)
    zero["evaluation"]["performance"] |= {"latency_ms": 0.0, "speedup_factor": 1e9}
    (ranking,) = ranked(tmp_path, [fast, zero, trace("slow", 7, 5.0)])
    assert [s.solution for s in ranking.summaries] == ["slow", "fast", "zero"]
    slow, failed, impossible = ranking.summaries
    assert slow.harness_wins == 1
    for s in (failed, impossible):
        assert (s.mean, s.harness_mean_ms, s.harness_wins, s.passed, s.failed) == (
            None,
            None,
            0,
            0,
            1,
        )
    assert ranking.best()[UUIDS[7]] == ("slow", 5.0)
    assert ranking.figure(UUIDS[7], "fast", "harness") is None
    assert re.search("INVALID +a latency of 0.0 ms", to_text(ranking))


def test_accuracy_counts_what_failed_and_not_what_is_no_number(tmp_path: Path) -> None:
    nan = {"cosine": float("nan"), "calc_diff": "NaN", "matched_ratios": {"0.2/0.1": float("nan")}}
    right = {"matched_ratio": 0.9, "cosine": 0.99, "calc_diff": 0.01}
    right["matched_ratios"] = {"0.2/0.1": 0.9, "0.3/1": 2}
    wrong = {"matched_ratio": 0.4, "calc_diff": "Infinity", "matched_ratios": {"0.2/0.1": 0.8}}
    traces = [
        trace("x", 7, 1.0, extra=nan),  # min() and max() keep a NaN that comes first
        trace("x", 80, 1.0, extra=right),
        trace("x", 901, None, status="INCORRECT_NUMERICAL", extra=wrong),
    ]
    (ranking,) = ranked(tmp_path, traces)
    (x,) = ranking.summaries
    assert (x.matched_ratio, x.cosine, x.calc_diff) == (0.4, 0.99, 0.01)
    assert ranking.summary[["0.2/0.1", "0.3/1"]].iloc[0].to_list() == [0.8, 2.0]
    assert "nan" not in to_text(ranking).lower().replace("nan or", "")
    json.loads(rank_text.print_rankings([ranking], "json"), parse_constant=pytest.fail)


def test_ratios_need_both_and_one_failure_is_one(tmp_path: Path) -> None:
    traces = [
        trace("a", 7, 1.0),
        trace("b", 7, 2.0),
        trace("a", 80, None, status="TIMEOUT", log="Evaluation timeout after 1 seconds"),
        trace("b", 80, 2.0),
        trace("a", 901, 1.0),
        trace("b", 901, None, status="TIMEOUT"),
    ]
    (ranking,) = ranked(tmp_path, traces, against="b", peers=["b"])
    by_name = {s.solution: s for s in ranking.summaries}
    assert by_name["a"].harness_against == 2.0 and by_name["a"].harness_vs_peer == 2.0
    assert tables.failures_table(ranking).rows[0][-1] == "Evaluation timeout after 1 seconds"
    assert rank_text.to_json(ranking)["sources"] == [str(tmp_path / "traces.jsonl")]


def test_mixed_runs_without_a_reference_are_named_too(tmp_path: Path) -> None:
    failed = {"status": "TIMEOUT"}
    traces = [trace("a", 7, None, libs={"run": "1"}, **failed)]
    traces.append(trace("b", 7, None, libs={"run": "2"}, **failed))
    (ranking,) = ranked(tmp_path, traces)
    assert "several runs stand side by side at T=7 (in" in ranking.remarks[0]


def test_the_reference_of_a_workload_is_the_median_of_its_timings(tmp_path: Path) -> None:
    references = {"a": 10.0, "b": 30.0, "c": 11.0}
    traces = [trace(name, 7, 1.0, reference=ms) for name, ms in references.items()]
    traces.append(trace("d", 7, None, status="TIMEOUT"))
    (ranking,) = ranked(tmp_path, traces)
    assert ranking.references()[UUIDS[7]] == 11.0
    rows = tables.workload_tables(ranking)[0].rows
    assert rows[0][2] == "11.0000"


# --- two clocks -----------------------------------------------------------------------------------


def clocked(solution: str, length: int, harness: float, device: float, **options: Any) -> dict:
    method = options.pop("method", "graph")

    def figures(ms: float, share: float) -> dict:
        return {"ms": ms, "p10": ms * (1 - share / 4), "p90": ms * (1 + 3 * share / 4), "calls": 9}

    extra = {"device": {"method": method, **figures(device, 0.02)}, "harness": figures(9.0, 0.2)}
    return trace(solution, length, harness, extra=extra, **options)


NO_LIMITS = pd.DataFrame()
CLOCKED = [
    clocked("ours", 7, 1.0, 0.1),
    clocked("ours", 80, 4.0, 2.0),
    clocked("peer", 7, 0.5, 0.2),
    clocked("peer", 80, 2.0, 1.6),
]


def test_device_times_stand_beside_the_harnesss(tmp_path: Path) -> None:
    (ranking,) = ranked(tmp_path, CLOCKED, peers=["peer"])
    assert ranking.clocks == ("harness", "device")
    peer, ours = ranking.summaries
    assert (ours.solution, ours.device_count) == ("ours", 2)
    assert ours.device_mean_ms == pytest.approx(1.05)
    assert ours.device_geomean_ms == pytest.approx(math.sqrt(0.2))
    assert (ours.harness_wins, ours.device_wins) == (0, 1)
    assert (peer.harness_wins, peer.device_wins) == (2, 1)
    assert ours.harness_vs_peer == pytest.approx(0.5)
    assert ours.device_vs_peer == pytest.approx(math.sqrt(2.0 * 0.8))
    assert ours.device_spread == pytest.approx(0.02)
    assert ours.harness_spread == pytest.approx(0.2)
    header, rows = cells_of(tables.summary_table(ranking))
    assert dict(zip(header[8:], rows[1][8:], strict=True)) == {
        "wins": "0/1",
        "mean ms": "2.5000/1.0500",
        "geomean ms": "2.0000/0.4472",
        "spread": "20 %/2 %",
        "vs best peer": "0.50x/1.26x",
    }
    (partly,) = ranked(tmp_path, [*CLOCKED[1:], trace("ours", 7, 1.0)], peers=["peer"])
    assert tables.summary_table(partly).rows[1][9:11] == ["2.5000/2.0000 (1)", "2.0000/2.0000 (1)"]
    assert tables.short_table(partly, NO_LIMITS).rows[1][5] == "2.000 (1)"
    latency, _, ratios, spread = tables.workload_tables(ranking)
    assert latency.header[3:5] == ["peer", "ours"]
    assert [row[3:5] for row in latency.rows] == [
        ["0.5000*/0.2000", "1.0000/0.1000*"],
        ["2.0000*/1.6000*", "4.0000/2.0000"],
    ]
    assert ratios.rows[0][2:] == ["1.00x/1.00x", "0.50x/2.00x", "peer/peer"]
    assert spread.rows[0][2:] == ["20 %/2 %"] * 2
    text = to_text(ranking)
    assert "replay of a CUDA graph" in text and "Ordered by the mean speed-up." in text
    results = rank_text.to_json(ranking)["workloads"][0]["results"]["ours"]
    assert results["device"]["ms"] == 0.1 and results["vs_best_peer"]["device"] == 2.0


def test_a_ranking_is_ordered_by_either_clock(tmp_path: Path) -> None:
    def order(by: Any, traces: list[dict]) -> list[str]:
        (ranking,) = ranked(tmp_path, traces, by=by)
        assert ranking.by == by
        return [s.solution for s in ranking.summaries]

    assert order("harness", CLOCKED) == ["peer", "ours"]
    assert order("device", CLOCKED) == ["ours", "peer"]
    partly = [*CLOCKED, clocked("half", 7, 1.0, 0.01), trace("half", 80, 1.0)]
    assert order("device", partly) == ["ours", "peer", "half"], "times of fewer workloads"
    failed = [*CLOCKED, clocked("failed", 7, 1.0, 0.01)]
    assert order("device", failed) == ["ours", "peer", "failed"]
    without = [*CLOCKED, trace("none", 7, 1.0), trace("none", 80, 1.0)]
    assert order("device", without) == ["ours", "peer", "none"]
    with pytest.raises(UsageError, match="--by device"):
        ranked(tmp_path, [trace("x", 7, 1.0)], by="device")


def test_without_device_times_there_are_no_columns_of_them(tmp_path: Path) -> None:
    other = trace("x", 7, 1.0, hardware="GPU B")
    found = ranked(tmp_path, [*CLOCKED, other], by="device")
    assert [(r.hardware, r.clocks, r.by) for r in found] == [
        ("GPU A", ("harness", "device"), "device"),
        ("GPU B", ("harness",), "harness"),
    ]
    header, _ = cells_of(tables.summary_table(found[1]))
    assert header[-2:] == ["wins", "mean ms"]
    assert "device" not in to_text(found[1])
    failed = clocked("x", 7, 1.0, 0.1, status="INCORRECT_NUMERICAL")
    (ranking,) = ranked(tmp_path, [failed, trace("y", 7, 1.0)])
    assert ranking.clocks == ("harness",), "a failure has no time"


def test_different_ways_of_taking_device_times_are_said(tmp_path: Path) -> None:
    other = clocked("cutedsl_moe_fp8_v1", 7, 9.0, 8.0, method="kernel sum")
    (ranking,) = ranked(tmp_path, [*CLOCKED, other])
    said = "(replay of a CUDA graph; v1: sum of its kernels' times, pauses left out)"
    assert said in rank_text.notes(ranking) and said in rank_text.say_clocks(ranking)
    (partly,) = ranked(tmp_path, [*CLOCKED, trace("x", 7, 1.0)])
    assert "(replay of a CUDA graph)" in rank_text.notes(partly)


def test_the_limits_stand_below_the_solutions(tmp_path: Path) -> None:
    (ranking,) = ranked(tmp_path, CLOCKED, peers=["peer"])
    limits = pd.DataFrame(
        {"ms": [0.05, 1.0], "tbytes": [2e-4, None], "tflop": [None, 1.2]},
        index=[UUIDS[7], UUIDS[80]],
    )
    header, rows = cells_of(tables.short_table(ranking, limits))
    first = header.index("device ms")
    assert header[first:-1] == ["device ms", "TB/s", "TFLOP/s", "of the limit"]
    assert [row[1:2] + row[first:-1] for row in rows] == [
        ["peer", "0.900", "1.00", "750", "44 %"],
        ["ours", "1.050", "2.00", "600", "50 %"],
        ["floor", "0.525", "4.00", "1200", "100 %"],
    ]


def test_a_workload_that_no_peer_passed_has_no_best_peer(tmp_path: Path) -> None:
    traces = [trace("ours", 7, 1.0), trace("peer", 7, None, status="TIMEOUT")]
    traces += [trace("ours", 80, 1.0), trace("peer", 80, 2.0)]
    (ranking,) = ranked(tmp_path, traces, peers=["peer"])
    rows = tables.workload_tables(ranking)[2].rows
    assert [row[-1] for row in rows] == ["-", "peer"]


# --- what names and logs hold ---------------------------------------------------------------------

EVIL = "a|b\x1b[31m`<img src=x>\n$x$ [c](d)\\"


def test_names_and_logs_are_escaped_in_every_style(tmp_path: Path) -> None:
    log = f"RuntimeError: {EVIL.splitlines()[0]}\n"
    device = {"device": {"method": EVIL, "ms": 1.0}}
    of_evil = {"hardware": f"GPU {EVIL}", "libs": {"timing": EVIL, "tolerance": EVIL}}
    traces = [
        trace(EVIL, 7, 1.0, extra=device, **of_evil),
        trace("y", 7, None, status="RUNTIME_ERROR", log=log, hardware=f"GPU {EVIL}"),
    ]
    info = {"skipped": {f"z{EVIL}": EVIL}, "peers": {EVIL: False, "y": False}}
    (tmp_path / "run.json").write_text(json.dumps(info))
    found = ranked(tmp_path, traces)
    every = json.loads(rank_text.print_rankings(found, "json"))
    summaries = [(s["solution"], s["peer"]) for r in every for s in r["summary"]]
    assert summaries == [("y", False), (EVIL, False)], "as it is"
    for style in ("text", "markdown"):
        text = rank_text.print_rankings(found, style)
        assert all(line.isprintable() for line in text.split("\n")), style
        assert "\\x1b[31m" in text or "\\x1b\\[31m" in text
    lines = rank_text.print_rankings(found, "markdown").split("\n")
    for line in lines:
        assert not re.search(r"(?<!\\)(\\\\)*[<`$\[]", line), line
    for number, line in enumerate(lines):
        if line.startswith("| --"):  # header and rule have as many columns as the rows
            columns = [len(re.findall(r"(?<!\\)(?:\\\\)*\|", x)) for x in lines[number - 1 :]]
            count = next(i for i, n in enumerate(columns) if n == 0) if 0 in columns else None
            assert len(set(columns[:count])) == 1


# --- the command line -----------------------------------------------------------------------------


def call(monkeypatch, capsys, *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["rank.py", *arguments])
    assert rank.main() == 0
    return capsys.readouterr().out


def test_solutions_and_peers_are_chosen_by_name(tmp_path: Path, monkeypatch, capsys) -> None:
    path = str(write(tmp_path / "t.jsonl", [trace(n, 7, 1.0) for n in ("a", "b", "c")]))
    out = tmp_path / "ranking.json"

    def peers(*arguments: str) -> dict[str, bool]:
        assert "solutions" in call(monkeypatch, capsys, path, "--json", str(out), *arguments)
        return {s["solution"]: s["peer"] for s in json.loads(out.read_text())[0]["summary"]}

    assert list(peers("--solutions", "a")) == ["a"]
    assert list(peers("--solutions", "a", "[bx]")) == ["a", "b"]
    assert peers("--peers", "b", "c") == {"a": False, "b": True, "c": True}


def test_the_order_is_chosen(tmp_path: Path, monkeypatch, capsys) -> None:
    path = str(write(tmp_path / "t.jsonl", CLOCKED))
    text = call(monkeypatch, capsys, path)
    assert text.index("peer ") < text.index("ours ")
    text = call(monkeypatch, capsys, path, "--by", "device", "--markdown")
    assert text.index("| ours") < text.index("| peer") and "Ordered by the geometric mean" in text
    monkeypatch.setattr(sys, "argv", ["rank.py", path, "--solutions", "absent"])
    with pytest.raises(UsageError, match="no results in"):
        rank.main()
    write(Path(path), [trace("x", 7, None, status="TIMEOUT")])
    monkeypatch.setattr(sys, "argv", ["rank.py", path])
    assert rank.main() == 1


@pytest.mark.parametrize("traces", ["absent", "empty"])
def test_without_a_run_the_records_are_named(tmp_path: Path, monkeypatch, traces: str) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(rank, "TRACES_DIR", tmp_path / traces)
    monkeypatch.setattr(sys, "argv", ["rank.py"])
    with pytest.raises(UsageError, match=rf"no run in .*{traces}: run.py bench .* run.py rank "):
        rank.main()
    write(tmp_path / traces / "a" / "traces.jsonl", [trace("x", 7, 1.0)])
    assert rank.main() == 0
