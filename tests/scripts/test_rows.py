"""Traces and rows: what is written is kept and read back, what is neither is refused in one line,
and figures join the results that they belong to."""

import codecs
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from flashinfer_bench.data import Trace
from small_record import COUNTS, RATES, UUIDS, measurement, record, trace, write

from scripts.common.program import DEFINITION, UsageError
from scripts.publishing import rows
from scripts.publishing.rows import Writer, read_results

CASE = {"uuid": UUIDS[7], "tokens": 7, "hash": "1"}
NAN, INFINITE = float("nan"), float("inf")


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def read_one(place: Path, line: Any, *measurements: list[dict], **info: Any) -> dict[str, Any]:
    """Return the one result of a run with this line in its traces."""
    (result,) = read_results([record(place, [line], *measurements, **info)]).to_dict("records")
    return result


def test_the_columns_are_those_of_a_result() -> None:
    row = rows.result_of(trace("x", 7, 1.0), "a file", {}, lambda *_: ({}, {}, {}))
    assert row is not None and sorted(row) == sorted(rows.COLUMNS)


# --- writing rows ---------------------------------------------------------------------------------


def test_a_file_that_is_named_twice_is_read_once(tmp_path: Path) -> None:
    file = tmp_path / "a" / "traces.jsonl"
    file.parent.mkdir()
    file.touch()
    assert rows.trace_files([tmp_path, file, file.parent]) == [file]


def test_rows_are_in_the_file_as_soon_as_they_come(tmp_path: Path) -> None:
    """Rows follow those of other measurements; missing directories are made."""
    path = tmp_path / "new" / rows.FILE
    for name in ("bits", "times"):
        into = Writer(name, "GPU A", "how", path, repeats=5)
        assert lines_of(path)[-1] == into.measurement
        for number in (1, 2):
            added = into.add(CASE, "x", value=float(number), unit=None)
            assert "unit" not in added and added["of"] == into.measurement["id"]
            assert lines_of(path)[-1] == added and len(into.rows) == number
    recorded = rows.read(tmp_path / "new")
    assert recorded.rows_of("times") == into.rows
    assert ("times" in recorded, "sweep" in recorded) == (True, False)
    assert recorded.measurements["times"]["repeats"] == 5
    assert recorded.measurements["times"]["environment"]["versions"]
    assert list(recorded.frame("times").value) == [1.0, 2.0]
    assert recorded.frame("times").error.isna().all(), "has every column that a row may have"
    assert into.result.rows_of("times") == into.rows
    assert rows.read(tmp_path / "absent").measurements == {}


def test_each_served_model_counts_by_its_latest_measurement(tmp_path) -> None:
    """`serve` begins a measurement for each model, also for one that it serves again."""
    path = tmp_path / rows.FILE
    for model, value in (("a", 1.0), ("b", 2.0), ("a", 3.0)):
        Writer("served", "GPU A", "how", path).add(
            {"model": model, "layers": 4, "gpus": 1}, "ours", value=value, unit="ms"
        )
    found = {row["model"]: row["value"] for row in rows.read(path).rows_of("served")}
    assert found == {"b": 2.0, "a": 3.0}


def test_of_two_measurements_at_once_the_one_that_began_last_counts(tmp_path) -> None:
    """Whichever of them adds the first row, or the last."""
    for order in ((0, 1, 0), (1, 0), (1, 0, 1)):
        path = tmp_path / str(order) / rows.FILE
        both = [Writer("sweep", "GPU A", "how", path) for _ in range(2)]
        for number in order:
            both[number].add({"tokens": 7}, "x", value=1.0 + number, unit="ms")
        read = rows.read(path)
        counted = read.rows_of("sweep")
        assert {row["value"] for row in counted} == {2.0} and len(counted) == order.count(1)
        assert read.measurements["sweep"] == both[1].measurement


def test_of_two_at_once_a_result_has_the_figures_of_the_one_that_began_last(tmp_path: Path) -> None:
    def begun(name: str, *each: list[dict]) -> list[list[dict]]:
        """Give measurements of one name ids of their own."""
        own = [({"id": f"{name} {n}"}, {"of": f"{name} {n}"}) for n in range(len(each))]
        return [
            [h | id, *(r | of for r in rows)]
            for (h, *rows), (id, of) in zip(each, own, strict=True)
        ]

    times = [measurement("times", figures([{"clock": "device", "value": ms}])) for ms in (1.0, 2.0)]
    case = CASE | COUNTS[7]
    limits = [measurement("roofline", [case | {"value": n}], rates=RATES) for n in (80.0, 90.0)]
    both = [begun("times", *times), begun("roofline", *limits)]
    alone = read_one(tmp_path / "alone", ours(), *(newer for _, newer in both))
    mixed = [[old, new, new_row, old_row] for (old, old_row), (new, new_row) in both]
    result = read_one(tmp_path / "mixed", ours(), *mixed)
    told = ("device", "roofline")
    assert [result[name] for name in told] == [alone[name] for name in told]
    assert result["device"] == 2.0 and result["roofline"] == 90.0


def test_nan_and_infinity_are_written_as_flashinfer_bench_does(tmp_path: Path) -> None:
    into = Writer("bits", "GPU A", "how", tmp_path / rows.FILE)
    into.add({}, "x", cosine=NAN, calc_diff=INFINITE, largest=-INFINITE)
    written = {"cosine": "NaN", "calc_diff": "Infinity", "largest": "-Infinity"}
    assert lines_of(into.path)[-1].items() >= written.items()
    assert rows.read(tmp_path).rows == into.rows
    assert rows.read(tmp_path).frame("bits").largest.astype(float).max() == -INFINITE


def test_hashes_are_of_the_solutions_whose_sources_a_subject_runs() -> None:
    into = Writer("gemm_layers", "GPU A", "how")
    into.add({}, "flat, next larger", solution="cutedsl_moe_fp8_flat", hash="1")
    into.add({}, "peer", hash="2")
    into.add({}, "library")
    assert into.result.hashes("gemm_layers") == {"cutedsl_moe_fp8_flat": "1", "peer": "2"}


def test_the_last_measurement_of_a_name_that_has_rows_counts(tmp_path: Path) -> None:
    first = measurement("times", [CASE | {"value": 1.0}], "GPU A")
    second = measurement("times", [CASE | {"value": 2.0}, CASE | {"value": 3.0}], "GPU B")
    other = measurement("bits", [{"value": 9.0}])
    begun = measurement("times", [], "GPU C")  # and ended at once
    recorded = rows.read(write(tmp_path / rows.FILE, [*first, *second, *other, *begun]))
    assert [row["value"] for row in recorded.rows_of("times")] == [2.0, 3.0]
    assert recorded.measurements["times"]["hardware"] == "GPU B"
    assert [row["value"] for row in recorded.rows_of("bits")] == [9.0]


# --- files of either kind -------------------------------------------------------------------------


def made_trace(name: str) -> Trace:
    return Trace.model_validate(trace(name, 7, 1.0))


def add_rows(path: Path) -> None:
    rows.append(path, measurement("times", [CASE]))


def add_trace(path: Path) -> None:
    rows.append_traces(path, [made_trace("x")])


ROWS = ("rows.jsonl", add_rows, lambda path: len(rows.read(path).rows))
TRACES = ("traces.jsonl", add_trace, lambda path: len(read_results([path])))
either_kind = pytest.mark.parametrize(("name", "add", "count"), [ROWS, TRACES])


@pytest.mark.parametrize("cut", [b'{"of": "times 1", "sub', b'{"of": "\xc3'])
@either_kind
def test_a_last_line_cut_short_is_left_out_and_taken_away(
    name: str, add: Callable, count: Callable, cut: bytes, tmp_path: Path, capsys
) -> None:
    add(path := tmp_path / "new" / name)
    whole = path.read_bytes()
    path.write_bytes(whole + cut)
    assert count(path) == 1
    assert capsys.readouterr().err == f"{path}: the last line is cut short and left out\n"
    add(path)
    assert path.read_bytes().startswith(whole) and count(path) == 2 and lines_of(path)
    path.write_bytes(whole[:-1])  # only its end is missing
    capsys.readouterr()
    add(path)
    assert count(path) == 2 and lines_of(path) and capsys.readouterr().err == ""
    path.write_bytes(cut)
    add(path)
    assert count(path) == 1 and lines_of(path)


@either_kind
def test_a_mark_of_byte_order_is_no_part_of_a_line(
    name: str, add: Callable, count: Callable, tmp_path: Path
) -> None:
    """Editors and PowerShell begin a file with the mark; `cat` then puts it in the middle."""
    add(path := tmp_path / name)
    path.write_bytes(2 * (codecs.BOM_UTF8 + path.read_bytes()))
    assert count(path) == 2


@pytest.mark.parametrize(
    "content",
    [b"\xff\xfe{}\n", b"[" * 100_000 + b"\n", b"\0{\n", b"{broken\n{}\n", b"my notes"],
)
@either_kind
def test_bytes_that_are_no_json_are_refused_in_one_line(
    name: str, add: Callable, count: Callable, content: bytes, tmp_path: Path
) -> None:
    """The bytes stay, whatever is added."""
    (path := tmp_path / name).write_bytes(content)
    for reads in (count, lambda path: Writer("times", "GPU A", "how", path)):
        with pytest.raises(UsageError, match=rf"{name}:1 is no (row|trace): [^\n]*$"):
            reads(path)
    assert path.read_bytes() == content
    add(path)
    assert path.read_bytes().startswith(content)


def of_times(**fields: Any) -> list[dict]:
    return measurement("times", [CASE | fields])


def without(number: int, field: str) -> list[dict]:
    lines = of_times()
    del lines[number][field]
    return lines


NO_ROWS = [
    (of_times()[1:], "1 is no row: no measurement times 1 GPU A stands before it"),
    (of_times(value="fast"), "2 is no row: value"),
    (of_times(p10=0.0), "2 is no row: p10"),
    (of_times(value=NAN), "2 is no row: value"),
    (of_times(matched_ratios=[1.0]), "2 is no row: matched_ratios"),
    (of_times(differ=-1), "2 is no row: differ"),
    # A text or a truth value is no number: a table would add or compare it later.
    (of_times(value="1.5"), "2 is no row: value"),
    (of_times(p10="1.5"), "2 is no row: p10"),
    (of_times(tokens="7"), "2 is no row: tokens"),
    (of_times(pairs=True), "2 is no row: pairs"),
    (of_times(matched_ratios={"0.2/0.1": "0.9"}), "2 is no row: matched_ratios"),
    (of_times(largest="much"), "2 is no row: largest"),
    (of_times(calc_diff="1e-3"), "2 is no row: calc_diff"),
    (of_times(layers="4"), "2 is no row: layers"),
    (of_times(read="5"), "2 is no row: read"),
    (measurement("times", [], rates=RATES | {"copy_bytes_per_s": "3e12"}), "1 is no row: rates"),
    (without(1, "subject"), "2 is no row: subject"),
    (without(1, "uuid"), "2 is no row: uuid"),
    (without(1, "hash"), "2 is no row: hash"),
    (without(0, "hardware"), "1 is no row: hardware"),
    (measurement("roofline", [CASE]), "2 is no row: hit"),
    (measurement("times", [], rates={"copy_bytes_per_s": 1.0}), "1 is no row: rates"),
    ([[1, 2]], "1 is no row: the whole"),
    ([{"name": 5}], "1 is no row: id"),
]


@pytest.mark.parametrize(("lines", "message"), NO_ROWS)
def test_malformed_rows_are_refused(lines: list, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / rows.FILE, lines)
    with pytest.raises(UsageError, match=rf"rows\.jsonl:{message}[^\n]*$"):
        rows.read(path)


def changed(**fields: Any) -> dict:
    return trace("x", 7, 1.0) | fields


def evaluated(**fields: Any) -> dict:
    return changed(evaluation=changed()["evaluation"] | fields)


def performed(**fields: Any) -> dict:
    return evaluated(performance=changed()["evaluation"]["performance"] | fields)


NO_TRACES = [
    [1, 2],
    changed(workload=None),
    changed(workload={"axes": {"seq_len": "many"}, "uuid": "u"}),
    changed(workload={"axes": {"seq_len": 7}, "uuid": 5}),
    changed(solution=["x"]),
    changed(evaluation=[1]),
    evaluated(status=5),
    evaluated(status="TIMEOUT", log=5),
    evaluated(environment={"hardware": 5}),
    evaluated(environment={"hardware": "GPU", "libs": {"timing": 5}}),
    evaluated(performance=[1.0]),
    evaluated(correctness={"extra": [1]}),
    *(performed(latency_ms=ms) for ms in ("x", NAN, None, 10**400, -1.0)),
    performed(speedup_factor=-5.0),
    performed(reference_latency_ms=-5.0),
]


@pytest.mark.parametrize("line", NO_TRACES)
def test_malformed_traces_are_refused(line: Any, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(changed()) + "\n\n" + json.dumps(line) + "\n")
    with pytest.raises(UsageError, match=r"t\.jsonl:3 is no trace: [^\n]*$"):
        read_results([path])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{broken", "is no JSON"),
        ("[]", "the whole"),
        ('{"peers": {"x": "maybe"}}', "peers.x"),
        ('{"peers": {"x": "false"}}', "peers.x"),
        ('{"environment": {"gpus": 5}}', "environment.gpus"),
    ],
)
def test_a_broken_run_json_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = write(tmp_path / "traces.jsonl", [changed()])
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(UsageError, match=rf"run\.json:? {message}[^\n]*$"):
        read_results([path])
    (tmp_path / "run.json").write_bytes(codecs.BOM_UTF8 + b'{"solutions": {"x": "1"}}')
    assert list(read_results([path]).hash) == ["1"]


def test_directories_and_data_sets_are_read_but_for_what_is_no_result(tmp_path: Path) -> None:
    """A data set's workloads have the form of traces."""
    other = changed(definition="gemm")
    workload = changed(solution=None, evaluation=None)
    write(tmp_path / "set" / "traces" / "moe" / "a.jsonl", [workload, changed(), other])
    write(tmp_path / "set" / "workloads" / "moe" / "a.jsonl", [workload])
    for place in (tmp_path / "set", tmp_path / "set" / "traces"):
        assert list(read_results([place]).solution) == ["x"]


@pytest.mark.parametrize("recorded", [True, False])
def test_a_record_leaves_out_solutions_that_no_longer_ship(
    recorded: bool, tmp_path: Path, monkeypatch
) -> None:
    """Their traces, rows and reasons stay in its files. Another run shows all that it ran."""
    place = tmp_path / "results" if recorded else tmp_path
    monkeypatch.setattr(rows, "RESULTS_DIR", tmp_path / "results")
    monkeypatch.setattr(rows.packer, "shipped", lambda: {"x"})
    names = ["x", "gone", "a foreign one"]
    kept = ["x", "a foreign one"] if recorded else names
    sweep = [{"subject": name, "value": 1.0} for name in names]
    sweep += [{"subject": "gone + quantiser", "solution": "gone", "value": 1.0}]
    info = {"peers": dict.fromkeys(("x", "gone", "never ran"), True)}
    info["skipped"] = {"never ran": "no GPU", "another": "no GPU"}
    run = record(place / "gpu/day", [changed(solution=n) for n in names],
                 measurement("sweep", sweep), **info)  # fmt: skip
    for results in (read_results([run]), rows.read_run(run).results):
        assert list(results.solution) == kept
        assert set(results.skipped.iloc[0]) == {"another", *["never ran"] * (not recorded)}
    subjects = list(rows.read_run(run).rows.frame("sweep").subject)
    assert subjects == [*kept, *["gone + quantiser"] * (not recorded)]


def test_several_programs_may_add_at_once(tmp_path: Path) -> None:
    path, begin = tmp_path / "traces.jsonl", threading.Barrier(9)

    def work(number: int) -> None:
        begin.wait()
        for i in range(5):
            rows.append_traces(path, [made_trace(f"{number}.{i}")])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 9)]
    for thread in threads:
        thread.start()
    begin.wait()
    for thread in threads:
        thread.join()
    solutions = read_results([path]).solution
    assert solutions.nunique() == len(solutions) == 40


# --- what a trace says ----------------------------------------------------------------------------


def failed(log: str) -> dict:
    return trace("x", 7, None, status="RUNTIME_ERROR", log=log)


def wrong(error: Any) -> dict:
    line = trace("x", 7, None, status="INCORRECT_NUMERICAL")
    line["evaluation"]["correctness"]["max_absolute_error"] = error
    return line


SKIPPED = "Solution skipped after 3 failures. Last error: Traceback:\nKeyError: 'x'\n"
LONG = "ValueError: " + "x" * 10_000
REASONS = [
    (trace("x", 7, 1.0, log="some output\n"), "PASSED", ""),
    (wrong("NaN"), "INCORRECT_NUMERICAL", "NaN or infinite values in the output"),
    (wrong(5.0), "INCORRECT_NUMERICAL", "too many values differ (largest error 5.0)"),
    (failed(SKIPPED), "RUNTIME_ERROR", "KeyError: 'x'"),
    (failed(""), "RUNTIME_ERROR", "no reason recorded"),
    (failed("compiling\nkilled by the system\n\n"), "RUNTIME_ERROR", "killed by the system"),
    (failed("after a timeout\nKeyError: 'x'\nended\n"), "RUNTIME_ERROR", "KeyError: 'x'"),
    (failed(LONG), "RUNTIME_ERROR", LONG[12 : 12 + rows.MAX_REASON - 3] + "..."),
    (performed(latency_ms=0.0), "INVALID", "a latency of 0.0 ms is no measurement"),
    (performed(latency_ms=INFINITE), "INVALID", "a latency of inf ms is no measurement"),
]


@pytest.mark.parametrize(("line", "status", "reason"), REASONS)
def test_why_a_result_counts_or_not(line: dict, status: str, reason: str, tmp_path: Path) -> None:
    result = read_one(tmp_path, line)
    assert (result["status"], result["reason"]) == (status, reason)
    assert result["passed"] == (status == "PASSED") == pd.notna(result["harness"])


@pytest.mark.parametrize(("reference", "speedup"), [(10.0, 5.0), (0.0, None)])  # 0: not timed
def test_a_speedup_is_of_the_latencies_of_its_trace(reference, speedup, tmp_path: Path) -> None:
    performance = {"latency_ms": 2.0, "reference_latency_ms": reference, "speedup_factor": 77.0}
    result = read_one(tmp_path, performed(**performance))
    assert result["passed"] and result["speedup"] == speedup


def test_texts_are_kept_as_they_are(tmp_path: Path) -> None:
    """Texts are made printable only when printed: a changed name would match no solution."""
    evil = "\x1b[2J\u202e\n"
    log = f"RuntimeError: a{evil[:-1]}b\n"
    libs = {"timing": evil, "tolerance": evil, "torch": evil}
    line = trace(f"x{evil}", 7, None, status="RUNTIME_ERROR", log=log, hardware=evil, libs=libs)
    line["workload"]["uuid"] += evil
    result = read_one(tmp_path, line, solutions={f"x{evil}": "hash"})
    assert result["hash"] == "hash" and result["software"] == (("torch", evil),)
    assert (result["solution"], result["uuid"]) == (f"x{evil}", UUIDS[7] + evil)
    assert [result[name] for name in ("hardware", "timing", "tolerance")] == [evil] * 3
    assert result["reason"] == f"a{evil[:-1]}b"


@pytest.mark.parametrize("other", ["cuda:0", ["cuda:0"], 3, {"ms": "fast"}, {"ms": 0}, None])
def test_others_may_use_our_names_for_something_else(other: Any, tmp_path: Path) -> None:
    extra = {name: other for name in ("device", "harness", "matched_ratios")}
    result = read_one(tmp_path, trace("x", 7, 2.0, extra=extra))
    assert (result["device"], result["harness"]) == (None, 2.0)
    assert result["0.2/0.1"] is None


@pytest.mark.parametrize(("earlier", "known"), [([], "of the run"), ([{}], "")])
def test_the_hash_is_the_traces_own_and_else_that_of_run_json(
    earlier: list, known: str, tmp_path: Path
) -> None:
    """A resumed run's run.json may name sources that older traces are not of."""
    own = trace("x", 7, 1.0, libs={"solution_hash": "own"})
    info: dict[str, Any] = {"solutions": {"x": "of the run"}, "earlier": earlier}
    run = record(tmp_path, [own, trace("x", 80, 1.0), trace("y", 7, 1.0)], **info)
    assert list(read_results([run]).hash) == ["own", known, ""]


ONE, TWO = "1" * 40, "2" * 40
NOT_SAME = [
    (ONE, {"x": ONE}, "GPU A", None),
    (ONE, {"x": TWO}, "GPU A", "x: measured with source 11111111, the present one is 22222222"),
    (ONE, {}, "GPU A", "x: not among the present solutions"),
    (ONE, {"x": ONE}, "GPU B", "x: measured on GPU A, this is GPU B"),
    ("", {"x": TWO}, "GPU A", "x: measured with an unknown source, the present one is 22222222"),
]


@pytest.mark.parametrize(("was", "now", "hardware", "reason"), NOT_SAME)
def test_why_figures_of_now_do_not_belong_to_a_result(was, now, hardware, reason, tmp_path) -> None:
    path = write(tmp_path / "t.jsonl", [trace("x", 7, 1.0, libs={"solution_hash": was})])
    (result,) = read_results([path]).itertuples()
    assert rows.why_not_same(result, now, hardware) == reason


# --- figures join the results that they belong to -------------------------------------------------

FIGURES = [
    {"cosine": 0.5, "calc_diff": "NaN", "matched_ratios": {"0.2/0.1": 0.9}},
    {"clock": "device", "value": 2.0, "p10": 1.9, "p90": 2.3, "calls": 9, "method": "graph"},
    {"clock": "harness", "value": 3.0, "p10": 2.9, "p90": 3.3, "calls": 7},
]


def figures(rows_of: list[dict] = FIGURES, solution: str = "x", length: int = 7) -> list[dict]:
    case = {"subject": solution, "definition": DEFINITION, "uuid": UUIDS[length], "hash": "1"}
    return [case | row for row in rows_of]


def ours(solution: str = "x", length: int = 7, hash: str = "1", **options: Any) -> dict:
    defaults = {"latency": 1.0, "libs": {"solution_hash": hash}, "extra": {"matched_ratio": 0.9}}
    return trace(solution, length, **defaults | options)


def test_a_result_has_the_figures_of_its_rows(tmp_path: Path) -> None:
    result = read_one(tmp_path, ours(), measurement("times", figures()))
    assert (result["device"], result["method"], result["harness"]) == (2.0, "graph", 1.0)
    assert result["device_spread"] == pytest.approx(0.2)
    assert result["harness_spread"] == pytest.approx(0.4 / 3.0)
    assert (result["cosine"], result["calc_diff"], result["0.2/0.1"]) == (0.5, None, 0.9)
    assert result["matched_ratio"] == 0.9, "what the trace itself has stays"
    assert result["trace"] == ours(), "as it is in the file"


SPREADS = [
    ({"value": 2.0, "p90": 2.3}, (2.0, None)),
    ({"value": 2.0, "p10": 1.9}, (2.0, None)),
    ({"value": 0.0, "p10": 1.9, "p90": 2.3}, (None, None)),  # 0 ms is no time
]


@pytest.mark.parametrize(("row", "expected"), SPREADS)
def test_unknown_parts_of_a_time_are_none(row: dict, expected: tuple, tmp_path: Path) -> None:
    rows_of = measurement("times", figures([{"clock": "device"} | row]))
    result = read_one(tmp_path, ours(), rows_of)
    assert (result["device"], result["device_spread"]) == expected
    assert (result["method"], result["harness_spread"]) == ("", None)


FAILED = {"latency": None, "status": "RUNTIME_ERROR"}
PAIRS = {  # whether the figures of x and z at T=7 and T=80 join
    "same": (ours(), True),
    "of another workload": (ours(length=901), False),
    "of another source": (ours(length=80, hash="2"), False),
    "of no known source": (ours(length=80, hash=""), False),
    "of another GPU": (ours(hardware="GPU B"), False),
    "of another solution": (ours("y"), False),
    "without output": (ours("z", **FAILED), False),
    "wrong": (ours("z", 80, **FAILED | {"status": "INCORRECT_NUMERICAL"}), True),
}


@pytest.mark.parametrize("name", PAIRS)
def test_figures_join_a_result_of_the_same_pair_source_and_gpu(name: str, tmp_path: Path) -> None:
    """Accuracy also joins an incorrect result; times join correct results alone."""
    line, joins = PAIRS[name]
    of_all = [row for n in "xz" for length in (7, 80) for row in figures(solution=n, length=length)]
    result = read_one(tmp_path, line, measurement("times", of_all))
    assert pd.notna(result["cosine"]) == joins
    assert pd.notna(result["device"]) == (name == "same")


def test_a_part_that_is_measured_again_replaces_that_part_alone(tmp_path: Path) -> None:
    times = measurement("times", [*figures(), *figures(solution="y")])
    again = measurement("times", figures([{"clock": "device", "value": 1.5}]))
    bit = {"part": "again", "compared": 7, "hash": "1"}
    bits = measurement("bits", [bit | {"differ": 1}, bit | {"hash": "2", "differ": 2}])
    same = measurement("bits", [bit | {"differ": 0}])
    traces = [ours(), ours("y"), ours("z", hash="2"), ours("of another source", hash="3")]
    x, y, z, other = read_results([record(tmp_path, traces, times, again, bits, same)]).itertuples()
    assert (x.device, y.device) == (1.5, 2.0)
    assert x.harness_spread == y.harness_spread > 0 and x.cosine == y.cosine == 0.5
    assert [row.checks["again"]["differ"] for row in (x, y, z)] == [0, 0, 2] and other.checks == {}


def test_a_row_with_changed_inputs_fails_its_result(tmp_path: Path) -> None:
    rows_of = measurement("times", figures([{"inputs_changed": ["hidden_states"]}]))
    x, y = read_results([record(tmp_path, [ours(), ours("y")], rows_of)]).itertuples()
    assert (x.status, y.status) == ("CHANGED_INPUTS", "PASSED")
    assert x.reason == "the solution changes its inputs: hidden_states" and not x.passed
