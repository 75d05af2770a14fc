"""Ranking on hand-made traces: the statistics, the failures, and no mixing of machines."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from programs import call
from small_record import UUIDS, clocked, record, roofline, trace, write

from scripts.common.command_line import UsageError
from scripts.common.definitions import find_layer
from scripts.common.project import BASELINES, OURS
from scripts.common.roofline import pair_flops, weight_bytes
from scripts.common.text import markdown_table, percent
from scripts.data.traces import read_records
from scripts.pack.pack import every_generation
from scripts.programs import rank
from scripts.table import rank_text, tables
from scripts.table.rankings import TOLERANCES, Ranking, rankings
from scripts.table.recorded import read


def ranked(tmp_path: Path, traces: list[dict], **options: Any) -> list[Ranking]:
    path = write(tmp_path / "traces.jsonl", traces)
    return rankings(read_records([path]), **options)


def to_text(ranking: Ranking) -> str:
    return rank_text.print_rankings([ranking])


def to_markdown(ranking: Ranking) -> str:
    return rank_text.print_rankings([ranking], "markdown")


def by_name(ranking: Ranking) -> dict[str, Any]:
    return {s.solution: s for s in ranking.summaries}


# --- statistics -----------------------------------------------------------------------------------


def test_statistics_wins_and_order(tmp_path: Path) -> None:
    times = {"slow": {901: 5.0, 7: 2.0, 80: 5.0}, "fast": {901: 2.5, 7: 1.0, 80: 10.0}}
    traces = [trace(name, n, ms) for name, of in times.items() for n, ms in of.items()]
    (ranking,) = ranked(tmp_path, traces)
    assert ranking.workloads == [(7, "aaaa0000"), (80, "bbbb0000"), (901, "cccc0000")]
    fast, slow = ranking.summaries
    assert (fast.solution, slow.solution) == ("fast", "slow")
    assert fast.mean == pytest.approx((10 + 1 + 4) / 3)
    assert fast.geomean == pytest.approx(40 ** (1 / 3))
    assert (fast.median, fast.lowest, fast.highest) == (4.0, 1.0, 10.0)
    assert (fast.harness_wins, slow.harness_wins) == (2, 1)
    assert fast.harness_mean_ms == pytest.approx(13.5 / 3)
    assert fast.harness_geomean_ms == pytest.approx(25 ** (1 / 3))


def test_shares_and_methods_in_words() -> None:
    assert [percent(x) for x in (None, 0.0, 0.5, 1.0)] == ["-", "0 %", "50 %", "100 %"]
    methods = [rank_text.say_method(m) for m in ("graph", "clock", "")]
    assert methods == ["replay of a CUDA graph", "clock", "unknown method"]


def test_against_is_the_geometric_mean_of_latency_ratios(tmp_path: Path) -> None:
    """Over the workloads that both passed."""
    traces = [trace("a", 7, 1.0), trace("b", 7, 2.0), trace("a", 80, 1.0), trace("b", 80, 8.0)]
    traces += [trace("a", 901, 1.0), trace("b", 901, None, status="TIMEOUT")]
    (ranking,) = ranked(tmp_path, traces, against="b")
    assert by_name(ranking)["a"].harness_against == pytest.approx(math.sqrt(2 * 8))
    assert by_name(ranking)["b"].harness_against == pytest.approx(1.0)
    with pytest.raises(UsageError, match="no trace"):
        ranked(tmp_path, traces, against="c")


PEER_TRACES = [
    trace(name, length, ms)
    for name, of in {"ours": (1.0, 4.0), "peer_a": (2.0, 8.0), "peer_b": (4.0, 2.0)}.items()
    for length, ms in zip((7, 80), of, strict=True)
]


def test_ratio_to_the_best_peer_of_each_workload(tmp_path: Path) -> None:
    late = trace("peer_a", 901, None, status="TIMEOUT")
    traces = [*PEER_TRACES, trace("ours", 901, 1.0), late]
    (ranking,) = ranked(tmp_path, traces, peers=["peer_*"])
    best = {"aaaa0000": ("peer_a", 2.0), "bbbb0000": ("peer_b", 2.0)}
    assert ranking.best(peer=True) == best
    assert ranking.figure("aaaa0000", "ours", "harness_vs_peer") == 2.0
    assert ranking.figure("bbbb0000", "ours", "harness_vs_peer") == 0.5
    overall = {name: s.harness_vs_peer for name, s in by_name(ranking).items()}
    expected = {"ours": 1.0, "peer_a": math.sqrt(2 / 8), "peer_b": math.sqrt(2 / 4)}
    assert overall == pytest.approx(expected)
    assert "vs best peer" in tables.summary_table(ranking).header
    table = tables.workload_tables(ranking)[2]
    assert "best peer" in table.title
    assert [(r[0], r[-1]) for r in table.rows] == [("7", "peer_a"), ("80", "peer_b"), ("901", "-")]
    results = rank_text.to_json(ranking)["workloads"][0]["results"]
    assert results["ours"]["vs_best_peer"] == {"harness": 2.0}


def test_our_names_begin_as_no_peers_does() -> None:
    for generation in every_generation():
        is_peer = BASELINES in generation.path.relative_to(generation.root).parts
        assert generation.name.startswith(OURS) != is_peer


def test_peers_are_known_from_the_run_or_by_their_names(tmp_path: Path) -> None:
    (named,) = ranked(tmp_path, [trace("cutedsl_moe_fp8_v2", 7, 1.0), trace("other", 7, 2.0)])
    peers = {name: s.peer for name, s in by_name(named).items()}
    assert peers == {"cutedsl_moe_fp8_v2": False, "other": True}
    peers = {"ours": False, "peer_a": True, "peer_b": True}
    run = record(tmp_path, PEER_TRACES, peers=peers)
    assert {name: s.peer for name, s in by_name(read(run).main).items()} == peers
    (alone,) = ranked(tmp_path, [trace("ours", 7, 1.0)])
    assert not alone.compares_peers and "best peer" not in to_text(alone)


def test_the_reference_of_a_workload_is_the_median_of_its_timings(tmp_path: Path) -> None:
    references = {"a": 10.0, "b": 30.0, "c": 11.0}
    traces = [trace(name, 7, 1.0, reference=ms) for name, ms in references.items()]
    traces.append(trace("d", 7, None, status="TIMEOUT"))
    (ranking,) = ranked(tmp_path, traces)
    assert ranking.references()[UUIDS[7]] == 11.0
    assert tables.workload_tables(ranking)[0].rows[0][2] == "11.0000"


# --- failed, missing and impossible figures -------------------------------------------------------


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
    table = tables.workload_tables(ranking)[0]
    cells = {name: table.frame[name].to_list() for name in table.header[3:]}
    assert cells == {
        "ok": ["5.0000", "5.0000*"],
        "half": ["0.1000*", "RUNTIME_ERROR"],
        "absent": ["COMPILE_ERROR", "not run"],
        "late": ["TIMEOUT", "not run"],
        "wrong": ["INCORRECT_NUMERICAL", "not run"],
    }
    (data,) = json.loads(rank_text.print_rankings([ranking], "json"))
    assert data["workloads"][0]["results"]["late"]["status"] == "TIMEOUT"
    assert data["sources"] == [str(tmp_path / "traces.jsonl")]
    assert "| solution   | " in markdown and "Failed:" in text
    (good,) = ranked(tmp_path, traces[:2])
    assert "Failed:" not in to_text(good)
    assert not tables.accuracy_table(good), "nothing is known of it"


def with_latency(made: dict, ms: float) -> dict:
    made["evaluation"]["performance"] |= {"latency_ms": ms, "speedup_factor": 1e9}
    return made


@pytest.mark.parametrize(
    ("failed", "status"),
    [
        (trace("x", 80, 0.1, extra={"inputs_changed": ["hidden_states"]}), "CHANGED_INPUTS"),
        (with_latency(trace("x", 80, 1.0), 0.0), "INVALID"),
        (trace("x", 80, None, status="INCORRECT_NUMERICAL"), "INCORRECT_NUMERICAL"),
    ],
)
def test_failed_results_give_no_speed_and_win_nothing(
    tmp_path: Path, failed: dict, status: str
) -> None:
    """Whatever their traces say of it."""
    traces = [trace("x", 7, 2.0), trace("y", 7, 1.0), trace("y", 80, 5.0), failed]
    (ranking,) = ranked(tmp_path, traces)
    assert [r.status for r in ranking.failures()] == [status]
    x, y = by_name(ranking)["x"], by_name(ranking)["y"]
    assert (x.passed, x.failed, x.harness_count, x.harness_mean_ms) == (1, 1, 1, 2.0)
    assert [x.mean, x.geomean, x.median, x.lowest, x.highest] == pytest.approx([5.0] * 5)
    assert (x.harness_wins, y.harness_wins) == (0, 2)
    assert ranking.best()[UUIDS[80]] == ("y", 5.0)
    assert ranking.figure(UUIDS[80], "x", "harness") is None
    assert re.search(rf"{status} +\w", to_text(ranking))


def test_accuracy_is_the_worst_also_of_what_failed_and_without_what_is_no_number(
    tmp_path: Path,
) -> None:
    nan = {"cosine": float("nan"), "calc_diff": "NaN", "matched_ratios": {"0.2/0.1": float("nan")}}
    right = {"matched_ratio": 0.9, "cosine": 0.99, "calc_diff": 0.01}
    right["matched_ratios"] = {"0.2/0.1": 0.9, "0.3/1": 2, "0.01/0.01": 0.5}
    better = {"matched_ratio": 0.95, "cosine": 0.999, "calc_diff": 0.001}
    wrong = {"matched_ratio": 0.4, "calc_diff": "Infinity", "matched_ratios": {"0.2/0.1": 0.8}}
    traces = [
        trace("x", 7, 1.0, extra=nan),  # min() and max() keep a NaN that comes first
        trace("x", 80, 1.0, extra=right),
        trace("x", 901, None, status="INCORRECT_NUMERICAL", extra=wrong),
        trace("y", 7, 1.0, extra=right),
        trace("y", 80, 1.0, extra=better),
        trace("z", 7, 1.0, extra={"matched_ratio": 0.95}),  # without the accuracy pass
    ]
    (ranking,) = ranked(tmp_path, traces)
    x, y = by_name(ranking)["x"], by_name(ranking)["y"]
    assert (x.matched_ratio, x.cosine, x.calc_diff) == (0.4, 0.99, 0.01)
    assert (y.matched_ratio, y.cosine, y.calc_diff) == (0.9, 0.99, 0.01)
    ratios = ranking.summary.set_index("solution").loc["x", list(TOLERANCES)]
    assert ratios.to_dict() == {"0.2/0.1": 0.8, "0.3/1": 2.0, "0.01/0.01": 0.5}
    assert ["z", "0.9500", *["-"] * 5] in tables.accuracy_table(ranking).rows
    assert "0.990000" in to_text(ranking)
    assert "nan" not in to_text(ranking).lower().replace("nan or", "")
    json.loads(rank_text.print_rankings([ranking], "json"), parse_constant=pytest.fail)


def test_skipped_solutions_are_named_with_the_reason(tmp_path: Path) -> None:
    reasons = {
        "flashinfer_moe": "unsupported on sm_90 (needs sm_100/103)",
        "sglang_moe": "not installed: pip install sglang-kernel==0.4.3",
        "x": "was skipped once and has results now",
    }
    run = record(tmp_path, [trace("x", 7, 1.0)], skipped=reasons)
    ranking = read(run).main
    assert list(ranking.skipped) == ["flashinfer_moe", "sglang_moe"]
    for said in (to_text(ranking), to_markdown(ranking)):
        for name in ranking.skipped:
            assert f"{name}: {reasons[name]}" in said
        assert "has results now" not in said
    assert ranking.failures() == [], "what cannot run is no failure"
    assert rank_text.to_json(ranking)["skipped"] == ranking.skipped
    (chosen,) = rankings(read_records([run / "traces.jsonl"]), solutions=["x"])
    assert chosen.skipped == {}


# --- what does not compare is kept apart ----------------------------------------------------------


def test_machines_timing_methods_and_tolerances_get_a_ranking_each(tmp_path: Path) -> None:
    strict, loose = ({"tolerance": f"rtol {r}"} for r in (0.2, 9))
    failed = {"status": "INCORRECT_NUMERICAL", "timestamp": "2026-01-01", "libs": strict}
    traces = [
        trace("x", 7, 1.0),
        trace("x", 7, 2.0, hardware="GPU B"),
        trace("x", 7, 3.0, libs={"timing": "CUPTI"}),
        trace("x", 7, None, **failed),
        trace("x", 7, 4.0, timestamp="2026-02-01", libs=loose),
    ]
    found = ranked(tmp_path, traces)
    of = {(r.hardware, r.timing, r.tolerance): r.records[UUIDS[7], "x"].latency_ms for r in found}
    assert of == {
        ("GPU A", "", ""): 1.0,
        ("GPU B", "", ""): 2.0,
        ("GPU A", "CUPTI", ""): 3.0,
        ("GPU A", "", "rtol 0.2"): None,
        ("GPU A", "", "rtol 9"): 4.0,
    }
    assert [len(r.failures()) for r in found if r.tolerance == "rtol 0.2"] == [1]
    assert len(ranked(tmp_path, traces, hardware="gpu b")) == 1
    (cpu,) = ranked(tmp_path, [trace("x", 7, 1.0, hardware="Xeon", libs={"device": "cpu"})])
    assert to_text(cpu).startswith("CPU (Xeon)") and "nothing about a GPU" in to_markdown(cpu)


def test_of_several_sources_the_last_one_counts_and_the_others_are_named(tmp_path: Path) -> None:
    def of(source: str, length: int, latency: float, day: int) -> dict:
        libs = {"solution_hash": source} if source else {}
        return trace("x", length, latency, libs=libs, timestamp=f"2026-01-{day:02}")

    traces = [of("a" * 40, 7, 1.0, 1), of("a" * 40, 80, 1.0, 1), of("", 901, 1.0, 2)]
    traces += [of("b" * 40, 7, 2.0, 4), of("b" * 40, 7, 5.0, 3), trace("y", 80, 1.0)]
    (ranking,) = ranked(tmp_path, traces)
    x = by_name(ranking)["x"]
    assert (x.passed, x.missing, x.mean) == (1, 1, 5.0), "no figure of source a is taken for b's"
    assert ranking.superseded == 1 and "1 older results" in to_text(ranking)
    (remark,) = ranking.remarks
    assert re.search(r"source bbbbbbbb; 3 results of other .*\(aaaaaaaa, unknown\)", remark)
    assert remark in to_text(ranking) and remark in to_markdown(ranking)


def test_results_of_different_software_are_marked(tmp_path: Path) -> None:
    versions = {"x": "2.11.0", "y": "2.12.0"}
    traces = [trace(n, 7, 1.0, libs={"torch": v, "triton": "3.6.0"}) for n, v in versions.items()]
    (ranking,) = ranked(tmp_path, traces)
    (remark,) = ranking.remarks
    assert "torch: 2.11.0, 2.12.0" in remark and "triton" not in remark


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
    late, ours = by_name(ranking)["late"], by_name(ranking)["ours"]
    assert (late.harness_vs_peer, ours.harness_vs_peer) == (4.0, 2.0)
    assert (late.harness_against, ours.harness_against) == (None, 1.0)
    (remark,) = ranking.remarks
    assert "at T=7 (10.00 to 20.00 ms), T=80 (10.00 to 20.00 ms)" in remark
    (one_run,) = ranked(tmp_path, traces[:2])
    assert one_run.remarks == []
    failed = [trace(n, 7, None, libs={"run": n}, status="TIMEOUT") for n in "ab"]
    (ranking,) = ranked(tmp_path, failed)
    assert "several runs stand side by side at T=7 (in" in ranking.remarks[0]
    # Files that do not say their run are a run each.
    files = [write(tmp_path / f"{t['solution']}.jsonl", [t]) for t in PEER_TRACES[::2]]
    (ranking,) = rankings(read_records(files), peers=["peer_*"])
    assert ranking.figure(UUIDS[7], "ours", "harness_vs_peer") is None


# --- two clocks -----------------------------------------------------------------------------------

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
    assert tables.summary_table(ranking).frame.iloc[1, 8:].to_dict() == {
        "wins": "0/1",
        "mean ms": "2.5000/1.0500",
        "geomean ms": "2.0000/0.4472",
        "spread": "20 %/2 %",
        "vs best peer": "0.50x/1.26x",
    }
    latency, _, ratios, spread = found = tables.workload_tables(ranking)
    assert latency.header[3:5] == ["peer", "ours"]
    assert [row[3:5] for row in latency.rows] == [
        ["0.5000*/0.2000", "1.0000/0.1000*"],
        ["2.0000*/1.6000*", "4.0000/2.0000"],
    ]
    assert ratios.rows[0][2:] == ["1.00x/1.00x", "0.50x/2.00x", "peer/peer"]
    assert spread.rows[0][2:] == ["20 %/2 %"] * 2
    text, said = to_text(ranking), to_markdown(ranking)
    for table in found:
        assert f"{table.title}:\n\n{markdown_table(table.header, table.rows, left=0)}" in said
    assert "replay of a CUDA graph" in text and "Ordered by the mean speed-up." in text
    results = rank_text.to_json(ranking)["workloads"][0]["results"]["ours"]
    assert results["device"]["ms"] == 0.1 and results["vs_best_peer"]["device"] == 2.0


def test_a_ranking_is_ordered_by_either_clock(tmp_path: Path) -> None:
    def order(by: Any, *more: dict) -> list[str]:
        (ranking,) = ranked(tmp_path, [*CLOCKED, *more], by=by)
        assert ranking.by == by
        return [s.solution for s in ranking.summaries]

    assert order("harness") == ["peer", "ours"]
    assert order("device") == ["ours", "peer"]
    fast = clocked("x", 7, 1.0, 0.01)
    assert order("device", fast, trace("x", 80, 1.0)) == ["ours", "peer", "x"], "fewer workloads"
    assert order("device", fast) == ["ours", "peer", "x"]
    without = [trace("none", 7, 1.0), trace("none", 80, 1.0)]
    assert order("device", *without) == ["ours", "peer", "none"]
    with pytest.raises(UsageError, match="--by device"):
        ranked(tmp_path, without, by="device")


def test_without_device_times_there_are_no_columns_of_them(tmp_path: Path) -> None:
    other = trace("x", 7, 1.0, hardware="GPU B")
    found = ranked(tmp_path, [*CLOCKED, other], by="device")
    assert [(r.hardware, r.clocks, r.by) for r in found] == [
        ("GPU A", ("harness", "device"), "device"),
        ("GPU B", ("harness",), "harness"),
    ]
    assert tables.summary_table(found[1]).header[-2:] == ["wins", "mean ms"]
    assert "device" not in to_text(found[1])
    failed = clocked("x", 7, 1.0, 0.1, status="INCORRECT_NUMERICAL")
    (ranking,) = ranked(tmp_path, [failed, trace("y", 7, 1.0)])
    assert ranking.clocks == ("harness",), "a failure has no time"


def test_different_ways_of_taking_device_times_and_missing_ones_are_said(tmp_path: Path) -> None:
    other = clocked("cutedsl_moe_fp8_v1", 7, 9.0, 8.0, method="kernel sum")
    (ranking,) = ranked(tmp_path, [*CLOCKED, other])
    said = "(replay of a CUDA graph; v1: sum of its kernels' times, pauses left out)"
    assert said in rank_text.notes(ranking) and said in rank_text.say_clocks(ranking)
    run = record(tmp_path, [*CLOCKED[1:], trace("ours", 7, 1.0)], peers={"ours": False})
    recorded = read(run)
    partly = recorded.main
    assert "(replay of a CUDA graph)" in rank_text.notes(partly)
    assert tables.summary_table(partly).rows[1][9:11] == ["2.5000/2.0000 (1)", "2.0000/2.0000 (1)"]
    assert tables.short_table(partly, recorded.limits(partly)).rows[1][5] == "2.000 (1)"


def test_the_limits_stand_below_the_solutions(tmp_path: Path) -> None:
    """T=7 is bound by reading, as long as was measured, T=80 by FLOPs."""
    lines = roofline()
    lines[0]["rates"] |= {"fp8_flops_per_s": 109 * pair_flops() / 1e-3}
    lines[1] |= {"value": 0.05, "pairs": 1}
    lines[2] |= {"value": 0.9}
    run = record(tmp_path, CLOCKED, lines, peers={"ours": False})
    recorded = read(run)
    table = tables.short_table(recorded.main, recorded.limits(recorded.main)).frame
    of_flops = 109 * pair_flops() / 1e9  # TFLOP/s of 1 ms
    of_reading = 7 * weight_bytes() / 1e9  # TB/s of 1 ms
    assert list(table)[5:-1] == ["device ms", "TB/s", "TFLOP/s", "of the limit"]
    assert table.iloc[:, [1, 5, 6, 7, 8]].to_numpy().tolist() == [
        ["peer", "0.900", f"{of_reading / 0.2:.2f}", f"{of_flops / 1.6:.0f}", "44 %"],
        ["ours", "1.050", f"{of_reading / 0.1:.2f}", f"{of_flops / 2:.0f}", "50 %"],
        ["roofline", "0.525", f"{of_reading / 0.05:.2f}", f"{of_flops:.0f}", "100 %"],
    ]
    other = read(record(tmp_path, CLOCKED, roofline("GPU B")))
    assert other.limits(other.main).empty, "of another GPU"
    glm5 = find_layer("glm5")
    traces = [made | {"definition": glm5.name} for made in CLOCKED]
    of_glm5 = read(record(tmp_path, traces, lines, definition=glm5.name))
    ms = of_glm5.roofline_ms(of_glm5.main)
    assert ms[UUIDS[80]] == pytest.approx(max(0.9, pair_flops(glm5) / pair_flops()))


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
    found = read(record(tmp_path, traces, **info)).rankings
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


def test_solutions_and_peers_are_chosen_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [trace(n, 7, 1.0) for n in ("a", "b", "c")])
    out = tmp_path / "ranking.json"

    def peers(*arguments: str) -> dict[str, bool]:
        assert "solutions" in call("rank", path, "--json", out, *arguments).stdout
        return {s["solution"]: s["peer"] for s in json.loads(out.read_text())[0]["summary"]}

    assert list(peers("--solutions", "a")) == ["a"]
    assert list(peers("--solutions", "a", "[bx]")) == ["a", "b"]
    assert peers("--peers", "b", "c") == {"a": False, "b": True, "c": True}


def test_the_order_is_chosen(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", CLOCKED)
    text = call("rank", path).stdout
    assert text.index("peer ") < text.index("ours ")
    text = call("rank", path, "--by", "device", "--markdown").stdout
    assert text.index("| ours") < text.index("| peer") and "Ordered by the geometric mean" in text
    nothing = call("rank", path, "--solutions", "absent")
    assert nothing.returncode == 2 and "no results in" in nothing.stderr
    write(path, [trace("x", 7, None, status="TIMEOUT")])
    assert call("rank", path).returncode == 1


@pytest.mark.parametrize("traces", ["absent", "empty"])
def test_without_a_run_the_records_are_named(tmp_path: Path, monkeypatch, traces: str) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(rank, "TRACES_DIR", tmp_path / traces)
    none = call("rank")
    assert none.returncode == 2
    assert re.search(rf"no run in .*{traces}: run.py bench .* run.py rank ", none.stderr)
    write(tmp_path / traces / "a" / "traces.jsonl", [trace("x", 7, 1.0)])
    assert call("rank").returncode == 0
