"""Rankings of hand-made traces, as `run.py report --text` prints them."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import small_record
from programs import call
from small_record import UUIDS, clocked, measurement, record, roofline, trace, write_traces

from scripts.common import hashes, machine_code
from scripts.common.definitions import find_layer, pair_flops, weight_bytes
from scripts.common.packer import every_generation
from scripts.common.program import BASELINES, OURS, RESULTS_DIR, UsageError
from scripts.publishing import pages, rankings, tables
from scripts.publishing.rankings import read
from scripts.publishing.rows import read_run

RECORD = sorted(RESULTS_DIR.glob("*/*"))[-1]


def ranked(path: Path, *options: str) -> list[dict]:
    """Return the rankings that --json writes for the traces of a file or a run."""
    out = path.with_name("ranking.json")
    call("report", "--text", path, "--json", out, *options)
    return json.loads(out.read_text(), parse_constant=pytest.fail)


def rank_of(tmp_path: Path, traces: list[dict], *options: str) -> dict:
    """Return the only ranking, its summary by solution, its results by tokens and solution."""
    (ranking,) = ranked(write_traces(tmp_path / "traces.jsonl", traces), *options)
    ranking["summary"] = {row["solution"]: row for row in ranking["summary"]}
    ranking["results"] = {(r["tokens"], r["solution"]): r for r in ranking["results"]}
    return ranking


def text_of(tmp_path: Path, traces: list[dict], *options: str) -> str:
    return call(
        "report", "--text", write_traces(tmp_path / "traces.jsonl", traces), *options
    ).stdout


def cells(text: str, title: str) -> list[list[str]]:
    """The lines of a table of the text, without head and rule."""
    lines = text.split(f"{title}:\n\n")[1].split("\n\n")[0].splitlines()
    return [re.split(r"  +", line.strip()) for line in lines[2:]]


def traces_of(solution: str, ms: dict[int, float | None], **options: Any) -> list[dict]:
    failed = {"status": "TIMEOUT"}
    return [trace(solution, n, t, **options if t else {**failed, **options}) for n, t in ms.items()]


def test_two_workloads_with_one_uuid_are_refused(tmp_path: Path) -> None:
    """Tables and figures find a workload by its uuid. The files may be several."""
    one, other = trace("x", 7, 1.0), trace("y", 80, 1.0)
    other["workload"]["uuid"] = UUIDS[7]
    apart = [write_traces(tmp_path / f"{n}.jsonl", [t]) for n, t in enumerate((one, other))]
    together = write_traces(tmp_path / "traces.jsonl", [one, other])
    for paths in (apart, [together]):
        why = call("report", "--text", *paths).stderr
        axes = ("{'seq_len': 7}", "{'seq_len': 80}")
        assert UUIDS[7] in why and all(each in why for each in axes) and "Traceback" not in why
    with pytest.raises(UsageError, match=UUIDS[7]):
        read(together.parent)


# --- statistics -----------------------------------------------------------------------------------

NAN = {"cosine": float("nan"), "calc_diff": "NaN", "matched_ratios": {"0.2/0.1": float("nan")}}
RIGHT = {"matched_ratio": 0.9, "cosine": 0.99, "calc_diff": 0.01}
RATIOS = {"matched_ratios": {"0.2/0.1": 0.9, "0.3/1": 2, "0.01/0.01": 0.5}}
BETTER = {"matched_ratio": 0.95, "cosine": 0.999, "calc_diff": 0.001}
WRONG = {"matched_ratio": 0.4, "calc_diff": "Infinity", "matched_ratios": {"0.2/0.1": 0.8}}
ACCURACY = [
    trace("x", 7, 1.0, extra=NAN),  # min() and max() keep a NaN that comes first
    trace("x", 80, 1.0, extra=RIGHT | RATIOS),
    trace("x", 901, None, status="INCORRECT_NUMERICAL", extra=WRONG),
    trace("y", 7, 1.0, extra=RIGHT),
    trace("y", 80, 1.0, extra=BETTER),
    trace("z", 7, 1.0, extra={"matched_ratio": 0.95}),  # without the accuracy pass
]
CLOCKED = [
    clocked("ours", 7, 1.0, 0.1),
    clocked("ours", 80, 4.0, 2.0),
    clocked("peer", 7, 0.5, 0.2),
    clocked("peer", 80, 2.0, 1.6),
]
RUNS = [
    *traces_of("ours", {7: 1.0, 80: 1.0}, libs={"run": "1"}),
    *traces_of("peer", {7: 2.0}, libs={"run": "1"}),
    *traces_of("late", {7: 1.0, 80: 1.0}, reference=20.0, libs={"run": "2"}),
    *traces_of("peer", {80: 4.0}, reference=20.0, libs={"run": "2"}),
    *traces_of("peer_b", {7: 16.0}, reference=20.0, libs={"run": "2"}),
]
SOURCES = [
    *traces_of("x", {7: 1.0, 80: 1.0}, libs={"solution_hash": "a" * 40}, timestamp="2026-01-01"),
    *traces_of("x", {901: 1.0}, timestamp="2026-01-02"),
    *traces_of("x", {7: 2.0}, libs={"solution_hash": "b" * 40}, timestamp="2026-01-04"),
    *traces_of("x", {7: 5.0}, libs={"solution_hash": "b" * 40}, timestamp="2026-01-03"),
    *traces_of("y", {80: 1.0}),
]
FIGURES = {
    "each solution's speed-ups, times and wins": (
        [
            *traces_of("slow", {901: 5.0, 7: 2.0, 80: 5.0}),
            *traces_of("fast", {901: 2.5, 7: 1.0, 80: 10.0}),
        ],
        [], {
            "fast": {
                "mean": (10 + 1 + 4) / 3, "geomean": 40 ** (1 / 3), "median": 4.0, "min": 1.0,
                "max": 10.0, "harness_wins": 2, "harness_mean_ms": 13.5 / 3,
                "harness_geomean_ms": 25 ** (1 / 3), "passed": 3, "missing": 0,
            },
            "slow": {"harness_wins": 1},
        },
    ),
    "against: geometric mean of ratios, where both passed": (
        [
            *traces_of("a", {7: 1.0, 80: 1.0, 901: 1.0}),
            *traces_of("b", {7: 2.0, 80: 8.0, 901: None}),
        ],
        ["--against", "b"],
        {"a": {"harness_against": math.sqrt(2 * 8)}, "b": {"harness_against": 1.0, "missing": 0}},
    ),
    "ratio to each workload's best peer": (
        [
            *traces_of("ours", {7: 1.0, 80: 4.0, 901: 1.0}),
            *traces_of("peer_a", {7: 2.0, 80: 8.0, 901: None}),
            *traces_of("peer_b", {7: 4.0, 80: 2.0}),
        ],
        ["--peers", "peer_*"], {
            "ours": {"harness_vs_peer": 1.0},
            "peer_a": {"harness_vs_peer": math.sqrt(2 / 8)},
            "peer_b": {"harness_vs_peer": math.sqrt(2 / 4), "missing": 1},
        },
    ),
    "worst accuracy, also of failures, without what is no number": (
        ACCURACY, [], {
            "x": {"matched_ratio": 0.4, "cosine": 0.99, "calc_diff": 0.01, "0.2/0.1": 0.8,
                  "0.3/1": 2.0, "0.01/0.01": 0.5},
            "y": {"matched_ratio": 0.9, "cosine": 0.99, "calc_diff": 0.01},
            "z": {"matched_ratio": 0.95, "cosine": None},
        },
    ),
    "the last source alone": (SOURCES, [], {"x": {"passed": 1, "missing": 1, "mean": 5.0}}),
    "ratios within a run": (
        RUNS, ["--peers", "peer*", "--against", "ours"], {
            "late": {"harness_vs_peer": math.sqrt(16 * 4), "harness_against": None},
            "ours": {"harness_vs_peer": 2.0, "harness_against": 1.0},
        },
    ),
    "both clocks": (
        CLOCKED, ["--peers", "peer"], {
            "ours": {
                "device_count": 2, "device_mean_ms": 1.05, "device_geomean_ms": math.sqrt(0.2),
                "harness_wins": 0, "device_wins": 1, "harness_vs_peer": 0.5,
                "device_vs_peer": math.sqrt(2.0 * 0.8), "device_spread": 0.02,
                "harness_spread": 0.2,
            },
            "peer": {"harness_wins": 2, "device_wins": 1},
        },
    ),
    "no time of what has failed": (
        [clocked("x", 7, 1.0, 0.1, status="INCORRECT_NUMERICAL"), *traces_of("y", {7: 1.0})], [],
        {"x": {"device_count": 0, "harness_count": 0, "mean": None}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FIGURES)
def test_a_solutions_row_has(name: str, tmp_path: Path) -> None:
    traces, options, expected = FIGURES[name]
    summary = rank_of(tmp_path, traces, *options)["summary"]
    for solution, figures in expected.items():
        row = {column: summary[solution][column] for column in figures}
        assert row == pytest.approx(figures), solution


def test_the_reference_of_a_workload_is_the_median_of_its_timings(tmp_path: Path) -> None:
    references = {"a": 10.0, "b": 30.0, "c": 11.0}
    traces = [trace(name, 7, 1.0, reference=ms) for name, ms in references.items()]
    text = text_of(tmp_path, [*traces, *traces_of("d", {7: None})])
    assert cells(text, "Time in ms, * the fastest")[0][2] == "11.0000"


def test_files_that_do_not_say_their_run_are_a_run_each(tmp_path: Path) -> None:
    for one_trace in (*traces_of("ours", {7: 1.0}), *traces_of("peer", {7: 2.0})):
        write_traces(tmp_path / "files" / f"{one_trace['solution']}.jsonl", [one_trace])
    (ranking,) = ranked(tmp_path / "files", "--peers", "peer")
    assert [r["harness_vs_peer"] for r in ranking["results"]] == [None, 1.0]


def test_our_names_begin_as_no_peers_does() -> None:
    for generation in every_generation():
        is_peer = BASELINES in generation.path.relative_to(generation.root).parts
        assert generation.name.startswith(OURS) != is_peer


@pytest.mark.parametrize(
    ("options", "info", "peers"),
    [
        ([], {}, {"cutedsl_moe_fp8_v2": False, "b": True, "c": True}),
        ([], {"b": False}, {"cutedsl_moe_fp8_v2": False, "b": False, "c": True}),
        (["--peers", "cute*", "c"], {}, {"cutedsl_moe_fp8_v2": True, "b": False, "c": True}),
    ],
)
def test_solutions_and_peers_are_known_from_options_the_run_and_their_names(
    options: list[str], info: dict, peers: dict[str, bool], tmp_path: Path
) -> None:
    traces = [trace(name, 7, 1.0) for name in ("cutedsl_moe_fp8_v2", "b", "c")]
    run = record(tmp_path / "run", traces, peers=info)
    (ranking,) = ranked(run, *options)
    assert {row["solution"]: row["peer"] for row in ranking["summary"]} == peers
    assert ("best peer" in call("report", "--text", run, *options).stdout) == (
        len(set(peers.values())) == 2
    )


# --- failed, missing and impossible figures -------------------------------------------------------

LOG = "Traceback (most recent call last):\n  File ...\nValueError: unsupported device cuda:0\n"
MISSING = "BuildError: Failed importing: No module named 'flashinfer.fused_moe'\n"
REASONS = {
    "half": ("RUNTIME_ERROR", LOG, "unsupported device cuda:0"),
    "absent": ("COMPILE_ERROR", MISSING, "not installed: flashinfer"),
    "wrong": ("INCORRECT_NUMERICAL", "", "matched ratio 0.5000 is too low (largest error 0.5)"),
    "late": ("TIMEOUT", "Evaluation timeout after 9 seconds", "Evaluation timeout after 9 seconds"),
}


def test_failures_are_listed_and_rank_behind(tmp_path: Path) -> None:
    traces = [*traces_of("ok", {7: 5.0, 80: 5.0}), *traces_of("half", {7: 0.1})]
    for name, (status, log, _) in REASONS.items():
        length, extra = 80 if name == "half" else 7, {"matched_ratio": 0.5}
        traces.append(trace(name, length, None, status=status, log=log, extra=extra))
    assert list(rank_of(tmp_path, traces)["summary"])[:2] == ["ok", "half"]
    done = call("report", "--text", tmp_path / "traces.jsonl")
    assert done.returncode == 1 and "(1)" not in done.stdout, "what passed has its times"
    assert {row[0]: row[-1] for row in cells(done.stdout, "Failed")} == {
        name: reason for name, (*_, reason) in REASONS.items()
    }
    header, *_ = done.stdout.split("Time in ms, * the fastest:\n\n")[1].splitlines()
    columns = zip(*cells(done.stdout, "Time in ms, * the fastest"), strict=True)
    assert dict(list(zip(header.split(), columns, strict=True))[3:]) == {
        "ok": ("5.0000", "5.0000*"),
        "half": ("0.1000*", "RUNTIME_ERROR"),
        "absent": ("COMPILE_ERROR", "not run"),
        "late": ("TIMEOUT", "not run"),
        "wrong": ("INCORRECT_NUMERICAL", "not run"),
    }
    assert "| solution   | " in text_of(tmp_path, traces, "--markdown")
    done = call("report", "--text", write_traces(tmp_path / "traces.jsonl", traces[:2]))
    assert done.returncode == 0 and "Failed:" not in done.stdout


IMPOSSIBLE = trace("x", 80, 1.0)
IMPOSSIBLE["evaluation"]["performance"] |= {"latency_ms": 0.0, "speedup_factor": 1e9}


@pytest.mark.parametrize(
    ("failed", "status"),
    [
        (trace("x", 80, 0.1, extra={"inputs_changed": ["hidden_states"]}), "CHANGED_INPUTS"),
        (IMPOSSIBLE, "INVALID"),
        (trace("x", 80, None, status="INCORRECT_NUMERICAL"), "INCORRECT_NUMERICAL"),
    ],
)
def test_failed_results_give_no_speed_and_win_nothing(
    tmp_path: Path, failed: dict, status: str
) -> None:
    """Times in the traces of failed results are ignored."""
    traces = [*traces_of("x", {7: 2.0}), *traces_of("y", {7: 1.0, 80: 5.0}), failed]
    ranking = rank_of(tmp_path, traces)
    x = ranking["summary"]["x"]
    assert (x["passed"], x["failed"], x["harness_count"], x["harness_mean_ms"]) == (1, 1, 1, 2.0)
    assert [x[n] for n in ("mean", "geomean", "median", "min", "max")] == pytest.approx([5.0] * 5)
    assert (x["harness_wins"], ranking["summary"]["y"]["harness_wins"]) == (0, 2)
    assert ranking["results"][80, "x"]["harness"] is None
    assert [row[3] for row in cells(text_of(tmp_path, traces), "Failed")] == [status]


def test_accuracy_is_shown_and_what_is_not_known_is_a_dash(tmp_path: Path) -> None:
    text = text_of(tmp_path, ACCURACY)
    assert ["z", "1/1", "0.9500", *["-"] * 5] in cells(text, "Accuracy")
    assert cells(text, "Accuracy")[0][:4] == ["x", "2/3", "0.4000", "0.990000"]
    assert not re.search(r"\bnan\b", text.lower())


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
    all_rankings = ranked(write_traces(tmp_path / "traces.jsonl", traces))
    by_key = {(r["hardware"], r["timing"], r["tolerance"]): r["results"] for r in all_rankings}
    assert {key: [r["harness"] for r in results] for key, results in by_key.items()} == {
        ("GPU A", "", ""): [1.0],
        ("GPU B", "", ""): [2.0],
        ("GPU A", "CUPTI", ""): [3.0],
        ("GPU A", "", "rtol 0.2"): [None],
        ("GPU A", "", "rtol 9"): [4.0],
    }
    run = record(tmp_path / "run", traces, timing="CUPTI")
    assert read(run).main.timing == "CUPTI", "the run's own"
    cpu = text_of(tmp_path, [trace("x", 7, 1.0, hardware="Xeon", libs={"device": "cpu"})])
    assert cpu.startswith("CPU (Xeon)") and "nothing about a GPU" in cpu and " ms" not in cpu


REMARKS = {
    "one run": (RUNS[:1], None),
    "several runs": (RUNS, "at T=7 (10.00 to 20.00 ms), T=80 (10.00 to 20.00 ms) (in brackets"),
    "several runs without a time": (
        [
            *traces_of("x", {7: None}, libs={"run": "a"}),
            *traces_of("y", {7: None}, libs={"run": "b"}),
        ],
        "several runs stand side by side at T=7 (in",
    ),
    "several sources": (
        SOURCES,
        "x is ranked with its source bbbbbbbb; 3 results of other sources (aaaaaaaa, unknown)",
    ),
    "software": (
        [trace(v, 7, 1.0, libs={"torch": v, "triton": "3", "run": "1"}) for v in ("2.1", "2.2")],
        "Measured with different versions of torch: 2.1, 2.2.",
    ),
}


@pytest.mark.parametrize("name", REMARKS)
def test_results_that_do_not_compare_have_a_remark(name: str, tmp_path: Path) -> None:
    traces, expected = REMARKS[name]
    remarks = rank_of(tmp_path, traces)["remarks"]
    assert len(remarks) == (expected is not None)
    for style in ("--markdown", "--by=harness"):
        text = text_of(tmp_path, traces, style)
        assert expected is None or expected in text and expected in remarks[0]
    assert ("1 older results" in text) == (name == "several sources")


def test_skipped_solutions_are_named_with_the_reason(tmp_path: Path) -> None:
    reasons = {
        "flashinfer_moe": "unsupported on sm_90 (needs sm_100/103)",
        "sglang_moe": "not installed: pip install sglang-kernel==0.4.3",
        "x": "was skipped once and has results now",
    }
    run = record(tmp_path / "run", traces_of("x", {7: 1.0}), skipped=reasons)
    (ranking,) = ranked(run)
    assert list(ranking["skipped"]) == ["flashinfer_moe", "sglang_moe"]
    done = call("report", "--text", run)
    for name in ranking["skipped"]:
        assert f"{name}: {reasons[name]}" in done.stdout
    assert "has results now" not in done.stdout
    assert done.returncode == 0, "what cannot run is no failure"


# --- two clocks -----------------------------------------------------------------------------------


def test_device_times_stand_beside_the_harnesss(tmp_path: Path) -> None:
    text = text_of(tmp_path, CLOCKED, "--peers", "peer")
    assert cells(text, "Speed-ups")[1][7:] == [
        "0/1", "2.5000/1.0500", "2.0000/0.4472", "20 %/2 %", "0.50x/1.26x",
    ]  # fmt: skip
    assert [row[3:5] for row in cells(text, "Harness/device time in ms, * the fastest")] == [
        ["0.5000*/0.2000", "1.0000/0.1000*"],
        ["2.0000*/1.6000*", "4.0000/2.0000"],
    ]
    results = rank_of(tmp_path, CLOCKED, "--peers", "peer")["results"]
    for name, ratios in {"peer": (1.0, 1.0), "ours": (0.5, 2.0)}.items():
        result = results[7, name]
        assert (result["harness_vs_peer"], result["device_vs_peer"]) == pytest.approx(ratios)
        assert (result["harness_spread"], result["device_spread"]) == pytest.approx((0.2, 0.02))
    assert "(replay of a CUDA graph)" in text and "Ordered by the mean speed-up." in text
    ranking = read(record(tmp_path / "run", CLOCKED)).main
    stdout = call("report", "--text", tmp_path / "run", "--markdown").stdout
    for table in tables.ranking_tables(ranking):
        assert table.markdown() in stdout


FAST = clocked("x", 7, 1.0, 0.01)
NOT_TIMED = traces_of("none", {7: 1.0, 80: 1.0})


@pytest.mark.parametrize(
    ("by", "more", "order"),
    [
        ("harness", [], ["peer", "ours"]),
        ("device", [], ["ours", "peer"]),
        ("device", [FAST], ["ours", "peer", "x"]),  # of fewer workloads
        ("device", [FAST, *traces_of("x", {80: 1.0})], ["ours", "peer", "x"]),
        ("device", NOT_TIMED, ["ours", "peer", "none"]),
        ("device", traces_of("x", {7: 1.0, 80: 1.0, 901: 1.0}), ["x", "ours", "peer"]),  # of more
        ("device", [clocked("a", 7, 0.1, 0.2), clocked("a", 80, 0.1, 1.0)], ["a", "ours", "peer"]),
    ],
)
def test_the_order_is_by_either_clock(by: str, more: list, order: list, tmp_path: Path) -> None:
    ranking = rank_of(tmp_path, [*CLOCKED, *more], "--by", by)
    assert (ranking["by"], list(ranking["summary"])) == (by, order)
    text = text_of(tmp_path, [*CLOCKED, *more], "--by", by)
    assert ("Ordered by the geometric mean" in text) == (by == "device")


def test_different_ways_of_taking_device_times_and_missing_ones_are_said(tmp_path: Path) -> None:
    other = clocked("cutedsl_moe_fp8_v1", 7, 9.0, 8.0, method="kernel sum")
    remark = "(replay of a CUDA graph; v1: sum of its kernels' times, pauses left out)"
    assert remark in text_of(tmp_path, [*CLOCKED, other])
    traces = [*CLOCKED[1:], trace("ours", 7, 1.0)]
    text = text_of(tmp_path, traces)
    assert "(replay of a CUDA graph)" in text
    assert cells(text, "Speed-ups")[1][8:10] == ["2.5000/2.0000 (1)", "2.0000/2.0000 (1)"]
    partly = read(record(tmp_path, traces, roofline(), peers={"ours": False}))
    rate = f"{28 * weight_bytes() / 2e9:.2f}"  # TB/s of the one that was timed
    table = tables.short_table(partly.main)
    assert table.frame.iloc[1, 4:6].tolist() == ["2.000 (1)", rate]


def test_the_first_ranks_are_those_on_the_gpu(tmp_path: Path) -> None:
    """Our two fastest solutions, the three fastest peers, whoever they are, and the roofline."""
    times = {
        "slow": 9.0,
        "fast": 1.0,
        "middle": 2.0,
        "humming": 1.5,
        "p2": 3.0,
        "p3": 4.0,
        "p4": 5.0,
    }
    traces = [clocked(name, 7, 10.0 - ms, ms) for name, ms in times.items()]
    ours = dict.fromkeys(("slow", "fast", "middle"), False)
    recorded = read(record(tmp_path / "run", traces, roofline(), peers=ours))
    limit = recorded.main.limits.roofline[UUIDS[7]]
    shares = {name: f"{100 * limit / ms:.0f} %" for name, ms in times.items()}
    assert tables.first_table(recorded.main).frame.to_numpy().tolist() == [
        ["fast", "9.000", "1.000", shares["fast"], "1.50x"],
        ["middle", "8.000", "2.000", shares["middle"], "0.75x"],
        ["humming", "8.500", "1.500", shares["humming"], "1.00x"],
        ["p2", "7.000", "3.000", shares["p2"], "0.50x"],
        ["p3", "6.000", "4.000", shares["p3"], "0.38x"],
        ["roofline", "-", f"{limit:.3f}", "100 %", "-"],
    ]
    plain = read(record(tmp_path / "plain", [trace("x", 7, 1.0)])).main
    assert tables.first_table(plain).frame.to_numpy().tolist() == [["x", "1.000"]]


def test_the_limits_stand_below_the_solutions(tmp_path: Path) -> None:
    """T=7 is bound by the measured time of reading, T=80 by FLOPs."""
    lines = roofline()
    lines[0]["rates"] |= {"fp8_flops_per_s": 109 * pair_flops() / 1e-3}
    lines[1] |= {"value": 0.05, "pairs": 1}
    lines[2] |= {"value": 0.9}
    recorded = read(record(tmp_path, CLOCKED, lines, peers={"ours": False}))
    table = tables.short_table(recorded.main).frame
    of_flops = 109 * pair_flops() / 1e9  # TFLOP/s of 1 ms
    of_reading = 7 * weight_bytes() / 1e9  # TB/s of 1 ms
    assert list(table)[4:-1] == ["device ms", "TB/s", "TFLOP/s", "of the limit"]
    assert table.iloc[:, [0, 4, 5, 6, 7]].to_numpy().tolist() == [
        ["peer", "0.900", f"{of_reading / 0.2:.2f}", f"{of_flops / 1.6:.0f}", "44 %"],
        ["ours", "1.050", f"{of_reading / 0.1:.2f}", f"{of_flops / 2:.0f}", "50 %"],
        ["roofline", "0.525", f"{of_reading / 0.05:.2f}", f"{of_flops:.0f}", "100 %"],
    ]
    times = tables.latency_table(recorded.main).frame
    assert times[
        ["reference", "roofline", "roofline / best", "best peer / our best"]
    ].values.tolist() == [
        ["10.0000", "0.050", "10 %/50 %", "0.50x/2.00x"],
        ["10.0000", "1.000", "50 %/62 %", "0.50x/0.80x"],
    ]
    bounds = tables.roofline_table(recorded.rows, find_layer(recorded.definition)).frame
    assert bounds.to_numpy().tolist() == [
        ["7", "2", "1", "7", "1", "0.0500", "0.0092", "memory"],
        ["80", "48", "109", "28", "9", "0.9000", "1.0000", "compute"],
    ]
    other = read(record(tmp_path, CLOCKED, roofline("GPU B")))
    assert other.main.limits.empty, "of another GPU"
    both = read(record(tmp_path / "both", CLOCKED, lines, roofline("GPU B")))
    assert both.main.limits.equals(recorded.main.limits), "a later one of another"
    later = [lines[0] | {"id": "later"}, lines[2] | {"of": "later", "value": 2.0}]
    again = read(record(tmp_path / "again", CLOCKED, lines, later))
    assert list(again.main.limits.roofline) == [2.0], "the latest of this GPU"
    glm5 = find_layer("glm5")
    traces = [one_trace | {"definition": glm5.name} for one_trace in CLOCKED]
    of_glm5 = read(record(tmp_path, traces, lines, definition=glm5.name))
    assert of_glm5.main.limits.roofline[UUIDS[80]] == pytest.approx(
        max(0.9, pair_flops(glm5) / pair_flops())
    )


# --- what names and logs hold, and the command line -----------------------------------------------

EVIL = "a|b\x1b[31m`<img src=x>\n$x$ [c](d)\\"


def test_names_and_logs_are_escaped_in_every_style(tmp_path: Path) -> None:
    log = f"RuntimeError: {EVIL.splitlines()[0]}\n"
    of_evil = {"hardware": f"GPU {EVIL}", "libs": {"timing": EVIL, "tolerance": EVIL}}
    traces = [
        trace(EVIL, 7, 1.0, **of_evil),
        trace("y", 7, None, status="RUNTIME_ERROR", log=log, hardware=f"GPU {EVIL}"),
    ]
    info = {"skipped": {f"z{EVIL}": EVIL}, "peers": {EVIL: False, "y": False}}
    device = {"subject": EVIL, "uuid": UUIDS[7], "hash": "", "clock": "device"}
    rows = measurement("times", [device | {"method": EVIL, "value": 1.0}], f"GPU {EVIL}")
    run = record(tmp_path / "run", traces, rows, **info)
    summaries = [(s["solution"], s["peer"]) for r in ranked(run) for s in r["summary"]]
    assert summaries == [("y", False), (EVIL, False)], "as it is"
    for style in ("--by=harness", "--markdown"):
        text = call("report", "--text", run, style).stdout
        assert all(line.isprintable() for line in text.split("\n")), style
        assert "\\x1b[31m" in text or "\\x1b\\[31m" in text
    lines = text.split("\n")
    for line in lines:
        assert not re.search(r"(?<!\\)(\\\\)*[<`$\[]", line), line
    for number, line in enumerate(lines):
        if line.startswith("|:--"):  # header and rule have as many columns as the rows
            columns = [len(re.findall(r"(?<!\\)(?:\\\\)*\|", x)) for x in lines[number - 1 :]]
            assert len(set(columns[: columns.index(0)])) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--definition", "absent"], "no results in"),
        (["--against", "c"], "--against c: no solution c; there are: "),
        (["--peers", "*", "typo*"], "--peers: no solution typo*; there are: "),
        (["--by", "device"], "--by device: no trace has a device time"),
    ],
)
def test_unknown_names_and_missing_times_are_refused(
    options: list, message: str, tmp_path: Path
) -> None:
    done = call("report", "--text", write_traces(tmp_path / "t.jsonl", NOT_TIMED), *options)
    assert done.returncode == 2 and message in done.stderr


# --- runs on the CPU, and the records beside them -------------------------------------------------


def on_cpu() -> rankings.Ranking:
    """A ranking of a run on the CPU, of which v1 fails at T=1."""
    f = read_run(RECORD).results
    f = f[f.tokens.isin([1, 7]) & f.solution.str.startswith("cutedsl")]
    f = f.assign(cpu=True, hardware="Some CPU", timing="wall clock")
    failed = {"passed": False, "status": "INCORRECT_NUMERICAL", "reason": "too many values differ"}
    f.loc[f.solution.str.endswith("v1") & (f.tokens == 1), list(failed)] = list(failed.values())
    (ranking,) = rankings.rankings(f)
    return ranking


def test_outputs_are_judged_and_no_time_is_given() -> None:
    text = pages.print_rankings([on_cpu()])
    first, _, second, *_ = text.splitlines()
    assert first.startswith("CPU (Some CPU), workloads of T=1, 7")
    verdict = (
        "5 of 6 solutions passed on all 2 workloads (reference model), v1 on 1; nothing was timed"
    )
    assert second.startswith(f"{verdict}; not run: flashinfer_")
    assert " Tolerance: rtol 0.2, atol 0.1" in second
    passed = {row[0]: row[1] for row in cells(text, "Accuracy")}
    assert passed["v2"] == "2/2" and passed["v1"] == "1/2"
    failed = ["v1", "1", "e05c6c03", "INCORRECT_NUMERICAL"]
    assert [row[:4] for row in cells(text, "Failed")] == [failed]
    assert "ms" not in text.split("Failed:")[0].split() and "0x" not in text


def test_the_recorded_ranking_stands_beside_it(monkeypatch) -> None:
    recorded, every = read(RECORD), rankings.recorded_runs()
    now = dict(recorded.info["solutions"])
    monkeypatch.setattr(hashes, "current", lambda definition=None: now)
    text = pages.without_gpu([on_cpu()], every)
    assert text.count("\nRecorded: ") == len(every)
    own = text.split(f"\nRecorded: {recorded.main.hardware}: 19 workloads, ")[1]
    own = own.split("\n\n\n")[0]
    assert f"Recorded {RECORD.name}; not measured in this run." in own
    assert "The sources have not changed since." in own and "Harness: host included" in own
    assert own.endswith(tables.first_table(recorded.main).text())
    assert f"run.py report results/{RECORD.relative_to(RESULTS_DIR)}" in own
    now["cutedsl_moe_fp8_v3"] = "x"
    monkeypatch.setattr(machine_code, "unchanged", lambda *_: False)
    assert "Since this run the source of v3 has changed." in pages.without_gpu([], [recorded])


def test_of_every_gpu_the_latest_record_is_taken(tmp_path: Path, monkeypatch) -> None:
    for place in ("gpu-a/2026-01-02", "gpu-a/2026-01-10", "gpu-b/2025-12-31"):
        record(tmp_path / place, [trace("x", 7, 1.0)])
    glob = Path.glob  # whose order is the file system's
    monkeypatch.setattr(Path, "glob", lambda *arguments: sorted(glob(*arguments), reverse=True))
    directories = [r.directory.relative_to(tmp_path) for r in rankings.recorded_runs(tmp_path)]
    assert [d.as_posix() for d in directories] == ["gpu-a/2026-01-10", "gpu-b/2025-12-31"]
    assert rankings.recorded_runs(tmp_path / "absent") == []


# --- what was emulated ----------------------------------------------------------------------------


def emulated(solution: str, length: int, **more: Any) -> dict[str, Any]:
    libs = {"device": "cpu", "emulated": "sm_90a", "timing": "kernels, sm_90a, emulated"}
    extra = {"matched_ratio": 0.9, "cosine": 0.9, "calc_diff": 1e-4}
    options = {"latency": 0.0, "reference": 0.0, "libs": libs, "extra": extra, **more}
    return trace(f"cutedsl_moe_fp8_{solution}", length, **options)


TRACES = [emulated("a", 7), emulated("b", 7), emulated("b", 80)]


def test_emulated_results_pass_without_a_time(tmp_path: Path) -> None:
    timed = [trace(f"cutedsl_moe_fp8_{n}", 7, 2.0, hardware="GPU A") for n in "ab"]
    both = sorted(small_record.ranked(tmp_path, [*TRACES, *timed]), key=lambda r: r.emulated)
    gpu, ours = both
    assert (gpu.emulated, ours.emulated) == ("", "sm_90a")
    assert list(ours.summary.passed) == [2, 1] and ours.results.harness.isna().all()
    text = pages.print_rankings(both)
    by_the_emulator = "The kernels were run by the emulator, with the bits of a Hopper GPU"
    assert f"{by_the_emulator}: there is no time." in text
    part = text.split("CPU (GPU A)")[1]
    assert " ms" not in part and "wins" not in part
    assert "outputs of the kernels for sm_90a, emulated" in part
    assert {r["harness"] for r in rankings.to_json(ours)["results"]} == {None}
    verdict = "All 2 solutions passed on the one workload; 1 of 2 solutions passed on all 2 "
    verdict += "workloads (kernels for sm_90a, emulated), a on 1."
    assert rankings.verdict(both) == verdict


def test_a_time_in_an_emulated_trace_is_refused(tmp_path: Path) -> None:
    (ranking,) = small_record.ranked(tmp_path, [emulated("c", 7, latency=0.1, reference=10.0)])
    (failed,) = ranking.results[~ranking.results.passed].itertuples()
    assert failed.solution.endswith("_c") and failed.status == "INVALID"
    assert failed.reason == "a time of the emulator is no measurement"
