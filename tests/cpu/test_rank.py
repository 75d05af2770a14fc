"""Ranking on hand-made traces: the statistics, the failures, and no mixing of machines."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import rank
from common import DEFINITION, UsageError

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


def ranked(tmp_path: Path, traces: list[dict], **options: Any) -> list[rank.Ranking]:
    path = write(tmp_path / "traces.jsonl", traces)
    return rank.rankings(rank.read_records([path]), **options)


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
    assert (fast.wins, slow.wins) == (2, 1)
    assert fast.mean_latency_ms == pytest.approx(13.5 / 3)


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
    assert "1 older results" in rank.to_text(ranking)


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
    text, markdown = rank.to_text(ranking), rank.to_markdown(ranking)
    for reason in reasons.values():
        assert reason in text and reason in markdown
    for cell in ("unsupported", "not installed", "TIMEOUT", "not run"):
        assert cell in text


def test_nan_outputs_and_skipped_solutions_have_a_reason() -> None:
    nan = {"status": "INCORRECT_NUMERICAL", "correctness": {"max_absolute_error": "NaN"}}
    assert rank.failure_reason(nan) == "NaN or infinite values in the output"
    skipped = {
        "status": "RUNTIME_ERROR",
        "log": "Solution skipped after 3 failures. Last error: Traceback:\nKeyError: 'x'\n",
    }
    assert rank.failure_reason(skipped) == "KeyError: 'x'"
    assert rank.failure_reason({"status": "RUNTIME_ERROR", "log": ""}) == "no reason recorded"


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
    assert summary.matched_ratios == {"0.2/0.1": 0.9, "0.3/1": 0.9, "0.01/0.01": 0.9}
    assert "0.900000" in rank.to_text(ranking)


def test_against_is_the_geometric_mean_of_latency_ratios(tmp_path: Path) -> None:
    traces = [trace("a", 7, 1.0), trace("b", 7, 2.0), trace("a", 80, 1.0), trace("b", 80, 8.0)]
    (ranking,) = ranked(tmp_path, traces, against="b")
    by_name = {s.solution: s for s in ranking.summaries}
    assert by_name["a"].against == pytest.approx(math.sqrt(2 * 8))
    assert by_name["b"].against == pytest.approx(1.0)
    with pytest.raises(UsageError, match="no trace"):
        ranked(tmp_path, traces, against="c")


def test_cpu_results_are_called_so(tmp_path: Path) -> None:
    (ranking,) = ranked(tmp_path, [trace("x", 7, 1.0, hardware="Xeon", libs={"device": "cpu"})])
    assert rank.to_text(ranking).startswith("CPU (Xeon)")
    assert "nothing about a GPU" in rank.to_markdown(ranking).replace("say nothing", "nothing")


def test_json_is_complete(tmp_path: Path) -> None:
    found = ranked(tmp_path, [trace("x", 7, 2.0), trace("y", 7, None, status="TIMEOUT")])
    (data,) = json.loads(rank.print_rankings(found, "json"))
    assert data["summary"][0]["mean"] == 5.0
    assert data["workloads"][0]["results"]["y"]["status"] == "TIMEOUT"


def test_reads_directories_and_data_sets_and_skips_other_definitions(tmp_path: Path) -> None:
    other = trace("x", 7, 1.0) | {"definition": "gemm"}
    only_workload = trace("x", 7, 1.0) | {"solution": None, "evaluation": None}
    write(tmp_path / "set" / "traces" / "moe" / "a.jsonl", [trace("x", 7, 1.0), other])
    write(tmp_path / "set" / "workloads" / "moe" / "a.jsonl", [only_workload])
    assert len(rank.read_records([tmp_path / "set"])) == 1
    assert len(rank.read_records([tmp_path / "set" / "traces"])) == 1
    assert rank.parse_record(only_workload, "") is None


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [trace("x", 7, 1.0)])
    path.write_text(path.read_text() + "{broken\n")
    with pytest.raises(UsageError, match=r"t\.jsonl:2"):
        rank.read_records([path])


def test_hand_made_traces_are_traces_of_flashinfer_bench() -> None:
    from flashinfer_bench.data import Trace

    made = Trace.model_validate(trace("x", 7, 1.0, extra={"matched_ratio": 1.0}))
    record = rank.parse_record(json.loads(made.model_dump_json()), "")
    assert record is not None and record.speedup == 10.0 and record.tokens == 7


def test_skipped_solutions_have_a_row_with_the_reason(tmp_path: Path) -> None:
    reasons = {
        "flashinfer_moe": "unsupported on sm_90 (needs sm_100/103)",
        "sglang_moe": "not installed: pip install sglang-kernel==0.4.3",
        "x": "was skipped once and has results now",
    }
    (tmp_path / "run.json").write_text(json.dumps({"skipped": reasons}))
    (ranking,) = ranked(tmp_path, [trace("x", 7, 1.0)])
    assert list(ranking.skipped) == ["flashinfer_moe", "sglang_moe"]
    header, rows = rank.summary_table(ranking)
    assert header[-1] == "why" and len(rows) == 3
    assert rows[1][:3] == ["-", "flashinfer_moe", "unsupported"]
    assert rows[2][:3] + rows[2][-1:] == ["-", "sglang_moe", "not installed", reasons["sglang_moe"]]
    for said in (rank.to_text(ranking), rank.to_markdown(ranking)):
        assert reasons["flashinfer_moe"] in said and "has results now" not in said
    assert ranking.failures() == [], "what cannot run is no failure"
    assert rank.to_json(ranking)["skipped"] == ranking.skipped
    assert ranked(tmp_path, [trace("x", 7, 1.0)], solutions=["x"])[0].skipped == {}


def test_failures_say_why_in_the_table(tmp_path: Path) -> None:
    log = "RuntimeError: misaligned address\n"
    traces = [trace("x", 7, 1.0)]
    traces += [trace("bad", t, None, status="RUNTIME_ERROR", log=log) for t in (7, 80, 901)]
    (ranking,) = ranked(tmp_path, traces)
    _, rows = rank.summary_table(ranking)
    assert [r[2] for r in rows] == ["1/1", "0/3"]
    assert [r[-1] for r in rows] == ["", "T=7: misaligned address (and 2 more)"]


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
    assert ranking.best("aaaa0000", peer=True) == ("peer_a", 2.0)
    assert ranking.best("bbbb0000", peer=True) == ("peer_b", 2.0)
    assert ranking.vs_peer("aaaa0000", "ours") == 2.0
    assert ranking.vs_peer("bbbb0000", "ours") == 0.5
    overall = {s.solution: s.vs_peer for s in ranking.summaries}
    assert overall["ours"] == pytest.approx(1.0)
    assert overall["peer_a"] == pytest.approx(math.sqrt(1 * 2 / 8))
    assert overall["peer_b"] == pytest.approx(math.sqrt(2 / 4 * 1))
    header, rows = rank.summary_table(ranking)
    assert "vs best peer" in header
    title, header, rows = rank.workload_tables(ranking)[2]
    assert "best peer" in title
    assert [(r[0], r[-1]) for r in rows] == [("7", "peer_a"), ("80", "peer_b")]
    assert rank.to_json(ranking)["workloads"][0]["results"]["ours"]["vs_best_peer"] == 2.0


def test_peers_are_known_from_the_run_or_from_the_repository(tmp_path: Path) -> None:
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
    assert not alone.compares_peers and "best peer" not in rank.to_text(alone)


def test_the_fastest_of_a_workload_is_marked(tmp_path: Path) -> None:
    (ranking,) = ranked(tmp_path, [trace("a", 7, 1.0), trace("b", 7, 2.0)])
    _, header, rows = rank.workload_tables(ranking)[0]
    assert header[3:] == ["a", "b"]
    assert [cell.strip() for cell in rows[0][3:]] == ["1.0000*", "2.0000"]


def test_several_machines_stand_side_by_side_and_are_labelled(tmp_path: Path) -> None:
    traces = [
        trace("x", 7, 1.0),
        trace("y", 7, 2.0),
        trace("x", 7, 4.0, hardware="GPU B"),
        trace("x", 80, 4.0, hardware="GPU B"),
        trace("x", 80, None, hardware="GPU B", status="TIMEOUT", timestamp="2026-02-01"),
    ]
    found = ranked(tmp_path, traces)
    legend, header, rows = rank.side_by_side(found)
    assert legend == ["A: GPU A, 1 workloads", "B: GPU B, 2 workloads"]
    assert header == ["solution", "A geomean", "A ms", "B geomean", "B ms"]
    assert rows == [
        ["x", "10.00x", "1.0000", "2.50x (1)", "4.0000"],
        ["y", "5.00x", "2.0000", "not run", "-"],
    ]
    assert "Side by side" in rank.print_rankings(found)
    assert "Side by side" not in rank.print_rankings(found[:1])


def test_results_of_different_software_are_marked(tmp_path: Path) -> None:
    traces = [
        trace("x", 7, 1.0, libs={"torch": "2.11.0", "triton": "3.6.0"}),
        trace("y", 7, 1.0, libs={"torch": "2.12.0", "triton": "3.6.0"}),
    ]
    (ranking,) = ranked(tmp_path, traces)
    assert ranking.remarks == ["Measured with different versions of torch: 2.11.0, 2.12.0."]
    assert ranking.remarks[0] in rank.to_text(ranking)
    assert ranking.remarks[0] in rank.to_markdown(ranking)
