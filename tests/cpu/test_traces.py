"""Trace files: what is no trace is refused, what is no measurement is marked, and writing keeps
what was there."""

import codecs
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from flashinfer_bench.data import Trace
from small_record import UUIDS, measurement, record, trace, write

from scripts.common.command_line import UsageError
from scripts.data import results, traces
from scripts.data.results import result_of
from scripts.data.traces import read_results
from scripts.table import rank_text
from scripts.table.rankings import rankings


def test_reads_directories_and_data_sets_and_skips_what_is_no_result(tmp_path: Path) -> None:
    """A data set's workloads have the form of traces."""
    other = trace("x", 7, 1.0) | {"definition": "gemm"}
    workload = trace("x", 7, 1.0) | {"solution": None, "evaluation": None}
    write(tmp_path / "set" / "traces" / "moe" / "a.jsonl", [workload, trace("x", 7, 1.0), other])
    write(tmp_path / "set" / "workloads" / "moe" / "a.jsonl", [workload])
    assert list(read_results([tmp_path / "set"]).solution) == ["x"]
    assert len(read_results([tmp_path / "set" / "traces"])) == 1
    assert result_of(workload, "") is None


# --- files that are not as they should be ---------------------------------------------------------


def changed(**fields: Any) -> dict:
    return trace("x", 7, 1.0) | fields


def changed_evaluation(**fields: Any) -> dict:
    made = trace("x", 7, 1.0)
    return made | {"evaluation": made["evaluation"] | fields}


def changed_performance(**fields: Any) -> dict:
    return changed_evaluation(performance=changed()["evaluation"]["performance"] | fields)


@pytest.mark.parametrize(
    "made",
    [
        [1, 2],
        changed(workload=None),
        changed(workload={"axes": {"seq_len": "many"}, "uuid": "u"}),
        changed(workload={"axes": {"seq_len": 7}, "uuid": 5}),
        changed(solution=["x"]),
        changed(evaluation=[1]),
        changed_evaluation(status=5),
        changed_evaluation(status="TIMEOUT", log=5),
        changed_evaluation(environment={"hardware": 5}),
        changed_evaluation(environment={"hardware": "GPU", "libs": {"timing": 5}}),
        changed_evaluation(performance=[1.0]),
        changed_evaluation(correctness={"extra": [1]}),
        *(changed_performance(latency_ms=ms) for ms in ("x", float("nan"), None, 10**400, -1.0)),
        changed_performance(speedup_factor=-5.0),
        changed_performance(reference_latency_ms=-5.0),
    ],
)
def test_what_is_no_trace_is_named_in_one_line(tmp_path: Path, made: Any) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(trace("x", 7, 1.0)) + "\n\n" + json.dumps(made) + "\n")
    with pytest.raises(UsageError, match=r"t\.jsonl:3 is no trace: [^\n]*$"):
        read_results([path])


@pytest.mark.parametrize("content", [b"\xff\xfe{}\n", b"[" * 100_000 + b"\n", b"\x00{\n"])
def test_bytes_that_are_no_text_or_no_json_are_named_too(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"t\.jsonl:1 is no trace"):
        read_results([path])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{broken", "is no JSON"),
        ("[]", "the whole"),
        ('{"peers": {"x": "maybe"}}', "peers.x"),
        ('{"environment": {"gpus": 5}}', "environment.gpus"),
    ],
)
def test_a_broken_run_json_is_named_in_one_line(tmp_path: Path, content: str, said: str) -> None:
    path = write(tmp_path / "traces.jsonl", [trace("x", 7, 1.0)])
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(UsageError, match=rf"run\.json:? {said}[^\n]*$"):
        read_results([path])
    (tmp_path / "run.json").write_text("{}")
    assert len(read_results([path])) == 1


# --- figures --------------------------------------------------------------------------------------


def failed(log: str) -> dict:
    return trace("x", 7, None, status="RUNTIME_ERROR", log=log)


def wrong(error: Any) -> dict:
    made = trace("x", 7, None, status="INCORRECT_NUMERICAL")
    made["evaluation"]["correctness"]["max_absolute_error"] = error
    return made


SKIPPED = "Solution skipped after 3 failures. Last error: Traceback:\nKeyError: 'x'\n"
LONG = "ValueError: " + "x" * 10_000


@pytest.mark.parametrize(
    ("made", "status", "reason"),
    [
        (trace("x", 7, 1.0, log="some output\n"), "PASSED", ""),
        (wrong("NaN"), "INCORRECT_NUMERICAL", "NaN or infinite values in the output"),
        (wrong(5.0), "INCORRECT_NUMERICAL", "too many values differ (largest error 5.0)"),
        (failed(SKIPPED), "RUNTIME_ERROR", "KeyError: 'x'"),
        (failed(""), "RUNTIME_ERROR", "no reason recorded"),
        (failed("compiling\nkilled by the system\n\n"), "RUNTIME_ERROR", "killed by the system"),
        (failed(LONG), "RUNTIME_ERROR", LONG[12 : 12 + results.MAX_REASON - 3] + "..."),
        (changed_performance(latency_ms=0.0), "INVALID", "a latency of 0.0 ms is no measurement"),
        (
            changed_performance(latency_ms=float("inf")),
            "INVALID",
            "a latency of inf ms is no measurement",
        ),
    ],
)
def test_why_a_result_counts_or_not(made: dict, status: str, reason: str) -> None:
    found = result_of(made, "")
    assert found is not None and (found["status"], found["reason"]) == (status, reason)
    assert found["passed"] == (status == "PASSED") == (found["harness"] is not None)


def test_a_speedup_is_formed_of_the_latencies_of_its_trace() -> None:
    made = trace("x", 7, 2.0, reference=10.0)
    made["evaluation"]["performance"]["speedup_factor"] = 77.0
    found = result_of(made, "")
    assert found is not None and found["speedup"] == 5.0
    made["evaluation"]["performance"] |= {"reference_latency_ms": 0.0, "speedup_factor": 0.0}
    found = result_of(made, "")
    assert found is not None and found["passed"] and found["speedup"] is None, "was not timed"


def test_texts_are_kept_as_they_are() -> None:
    """They are made printable where they are printed; a name made so would match no solution's."""
    evil = "\x1b[2J\u202e\n"
    log = f"RuntimeError: a{evil[:-1]}b\n"
    libs = {"timing": evil, "tolerance": evil, "torch": evil}
    made = trace(f"x{evil}", 7, None, status="RUNTIME_ERROR", log=log, hardware=evil, libs=libs)
    made["workload"]["uuid"] += evil
    found = result_of(made, "", {"solutions": {f"x{evil}": "hash"}})
    assert found is not None and found["hash"] == "hash"
    assert (found["solution"], found["uuid"]) == (f"x{evil}", UUIDS[7] + evil)
    assert [found[name] for name in ("hardware", "timing", "tolerance")] == [evil] * 3
    assert found["reason"] == f"a{evil[:-1]}b"
    assert found["software"] == (("torch", evil),)


@pytest.mark.parametrize("other", ["cuda:0", ["cuda:0"], 3, {"ms": "fast"}, {"ms": 0}, None])
def test_others_may_use_our_names_for_something_else(other: Any, tmp_path: Path) -> None:
    extra = {name: other for name in ("device", "harness", "launches", "matched_ratios")}
    write(tmp_path / "traces.jsonl", [trace("x", 7, 2.0, extra=extra), trace("y", 7, 4.0)])
    found = read_results([tmp_path])
    assert found.device.isna().all() and found.launches[0] == [] and found.harness[0] == 2.0
    (ranking,) = rankings(found)
    assert list(ranking.summary.solution) == ["x", "y"]
    assert rank_text.print_rankings([ranking]).count("Counted in emulation") == 0


def test_a_mark_of_byte_order_is_no_part_of_a_file(tmp_path: Path) -> None:
    """As editors and PowerShell write it at the beginning, and `cat` then in the midst."""
    path = write(tmp_path / "traces.jsonl", [trace("x", 7, 2.0)])
    path.write_bytes(2 * (codecs.BOM_UTF8 + path.read_bytes()))
    (tmp_path / "run.json").write_bytes(codecs.BOM_UTF8 + b'{"solutions": {"x": "1"}}')
    assert read_results([path])[["solution", "hash"]].to_numpy().tolist() == [["x", "1"]] * 2


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({"value": 2.0, "p10": 1.9, "p90": 2.3, "method": "graph"}, (2.0, 0.2, "graph")),
        ({"value": 2.0, "p90": 2.3}, (2.0, None, "")),
        ({"value": 2.0, "p10": 1.9}, (2.0, None, "")),
        ({"value": 0.0, "p10": 1.9, "p90": 2.3}, (None, None, "")),  # 0 ms is no time
    ],
)
def test_times_with_their_spread(figures: dict, expected: tuple, tmp_path: Path) -> None:
    case = {"subject": "x", "uuid": UUIDS[7], "hash": "", "clock": "device"}
    run = record(tmp_path, [trace("x", 7, 1.0)], measurement("times", [case | figures]))
    (found,) = read_results([run]).to_dict("records")
    times = found["device"], found["device_spread"], found["method"]
    assert times == pytest.approx(expected, nan_ok=True) and found["harness_spread"] is None


# --- hashes ---------------------------------------------------------------------------------------


def test_the_hash_is_the_traces_own_and_else_that_of_run_json(tmp_path: Path) -> None:
    own = trace("x", 7, 1.0, libs={"solution_hash": "own"})
    made = [own, trace("x", 80, 1.0), trace("y", 7, 1.0)]
    info: dict[str, Any] = {"solutions": {"x": "of the run"}}
    run = record(tmp_path, made, **info)
    assert list(read_results([run / "traces.jsonl"]).hash) == ["own", "of the run", ""]
    # A resumed run's run.json may name sources that older traces are not of.
    record(tmp_path, made, **info, earlier=[{}])
    assert list(read_results([run / "traces.jsonl"]).hash) == ["own", "", ""]


# --- writing --------------------------------------------------------------------------------------


def made_trace(name: str, length: int = 7, **options: Any) -> Trace:
    return Trace.model_validate(trace(name, length, 1.0, **options))


def test_appending_drops_a_cut_line_and_keeps_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "new" / "traces.jsonl"
    traces.append(path, [made_trace("a")])
    path.write_bytes(path.read_bytes() + b'{"definition": "cut sh')
    assert list(read_results([path]).solution) == ["a"]
    traces.append(path, [made_trace("b"), made_trace("c")])
    assert list(read_results([path]).solution) == ["a", "b", "c"]
    assert path.read_bytes().endswith(b"}\n") and path.read_bytes().count(b"\n") == 3
    path.write_bytes(path.read_bytes()[:-1])  # only its end is missing
    traces.append(path, [made_trace("d")])
    assert list(read_results([path]).solution) == ["a", "b", "c", "d"]


def test_several_programs_may_add_at_once(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    begin = threading.Barrier(9)

    def work(number: int) -> None:
        begin.wait()
        for i in range(5):
            traces.append(path, [made_trace(f"{number}.{i}")])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 9)]
    for thread in threads:
        thread.start()
    begin.wait()
    for thread in threads:
        thread.join()
    found = read_results([path]).solution
    assert found.nunique() == len(found) == 40


@pytest.mark.parametrize(
    ("was", "now", "hardware", "said"),
    [
        ("1" * 40, {"x": "1" * 40}, "GPU A", None),
        (
            "1" * 40,
            {"x": "2" * 40},
            "GPU A",
            "x: measured with source 11111111, the present one is 22222222",
        ),
        ("1" * 40, {}, "GPU A", "x: not among the present solutions"),
        ("1" * 40, {"x": "1" * 40}, "GPU B", "x: measured on GPU A, this is GPU B"),
        (
            "",
            {"x": "2" * 40},
            "GPU A",
            "x: measured with an unknown source, the present one is 22222222",
        ),
    ],
)
def test_why_figures_of_now_do_not_belong_to_a_result(
    was: str, now: dict, hardware: str, said: str | None, tmp_path: Path
) -> None:
    path = write(tmp_path / "t.jsonl", [trace("x", 7, 1.0, libs={"solution_hash": was})])
    (found,) = read_results([path]).itertuples()
    assert traces.why_not_same(found, now, hardware) == said
