"""rows.jsonl: what is written is kept and read back, and figures join the traces they belong to."""

import codecs
import json
from pathlib import Path
from typing import Any

import pytest
from small_record import UUIDS, measurement, record, trace, write

from scripts.common.command_line import UsageError
from scripts.common.project import DEFINITION
from scripts.data import rows
from scripts.data.rows import Writer, append, read
from scripts.data.traces import checks_of, read_results

CASE = {"uuid": UUIDS[7], "tokens": 7, "hash": "1"}


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def test_rows_are_in_the_file_as_soon_as_they_come(tmp_path: Path) -> None:
    """Beside those of other measurements, in directories that are not there yet."""
    path = tmp_path / "new" / rows.FILE
    for name in ("bits", "times"):
        into = Writer(name, "GPU A", "how", path, repeats=5)
        assert lines_of(path)[-1] == into.measurement
        for number in (1, 2):
            added = into.add(CASE, "x", value=float(number), unit=None)
            assert "unit" not in added and added["of"] == into.measurement["id"]
            assert lines_of(path)[-1] == added and len(into.rows) == number
    found = read(tmp_path / "new")
    assert (found.rows_of("times"), "times" in found, "sweep" in found) == (into.rows, True, False)
    assert found.measurements["times"]["repeats"] == 5
    assert found.measurements["times"]["environment"]["versions"]
    assert list(found.frame("times").value) == [1.0, 2.0]
    assert found.frame("times").error.isna().all(), "has every column that a row may have"
    assert into.result.rows_of("times") == into.rows


def test_without_a_file_rows_are_kept_in_memory_and_none_is_read(tmp_path: Path) -> None:
    into = Writer("times", "GPU A", "how")
    into.add(CASE, "x", value=1.0)
    assert len(into.result.rows_of("times")) == 1
    assert read(tmp_path).rows == [] and read(tmp_path / "absent").measurements == {}


@pytest.mark.parametrize("cut", [b'{"of": "times 1", "sub', b'{"of": "\xc3'])
def test_a_last_line_cut_short_is_left_out_and_taken_away(tmp_path: Path, cut, capsys) -> None:
    path = write(tmp_path / rows.FILE, measurement("times", [CASE]))
    whole = path.read_bytes()
    path.write_bytes(whole + cut)
    assert len(read(path).rows) == 1
    assert capsys.readouterr().err == f"{path}: the last line is cut short and left out\n"
    append(path, measurement("bits", []))
    assert path.read_bytes().startswith(whole) and len(lines_of(path)) == 3
    path.write_bytes(whole[:-1])  # only its end is missing
    append(path, measurement("bits", []))
    assert len(read(path).rows) == 1 and capsys.readouterr().err == ""
    path.write_bytes(cut)
    append(path, measurement("bits", []))
    assert len(lines_of(path)) == 1


def of_times(**fields: Any) -> list[dict]:
    return measurement("times", [CASE | fields])


def without(lines: list[dict], number: int, field: str) -> list[dict]:
    del lines[number][field]
    return lines


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (of_times()[1:], "1 is no row: no measurement times 1 GPU A stands before it"),
        (of_times(value="fast"), "2 is no row: value"),
        (of_times(p10=0.0), "2 is no row: p10"),
        (of_times(value=float("nan")), "2 is no row: value"),
        (of_times(matched_ratios=[1.0]), "2 is no row: matched_ratios"),
        (of_times(differ=-1), "2 is no row: differ"),
        (without(of_times(), 1, "subject"), "2 is no row: subject"),
        (without(of_times(), 1, "uuid"), "2 is no row: uuid"),
        (without(of_times(), 1, "hash"), "2 is no row: hash"),
        (without(of_times(), 0, "hardware"), "1 is no row: hardware"),
        (measurement("roofline", [CASE]), "2 is no row: hit"),
        (measurement("times", [], rates={"copy_bytes_per_s": 1.0}), "1 is no row: rates"),
        ([[1, 2]], "1 is no row: the whole"),
        ([{"name": 5}], "1 is no row: id"),
    ],
)
def test_what_is_no_row_is_refused_in_one_line(tmp_path: Path, lines: list, said: str) -> None:
    path = write(tmp_path / rows.FILE, lines)
    with pytest.raises(UsageError, match=rf"rows\.jsonl:{said}[^\n]*$"):
        read(path)


@pytest.mark.parametrize("content", [b"\xff\xfe{}\n", b"[" * 100_000 + b"\n", b"{broken\n{}\n"])
def test_bytes_that_are_no_json_are_refused_too(tmp_path: Path, content: bytes) -> None:
    (tmp_path / rows.FILE).write_bytes(content)
    with pytest.raises(UsageError, match=r"rows\.jsonl:1 is no row: [^\n]*$"):
        read(tmp_path)


def test_the_last_measurement_of_a_name_that_has_rows_counts(tmp_path: Path) -> None:
    first = measurement("times", [CASE | {"value": 1.0}], "GPU A")
    second = measurement("times", [CASE | {"value": 2.0}, CASE | {"value": 3.0}], "GPU B")
    other = measurement("bits", [{"value": 9.0}])
    begun = measurement("times", [], "GPU C")  # and ended at once
    found = read(write(tmp_path / rows.FILE, [*first, *second, *other, *begun]))
    assert [row["value"] for row in found.rows_of("times")] == [2.0, 3.0]
    assert found.measurements["times"]["hardware"] == "GPU B"
    assert [row["value"] for row in found.rows_of("bits")] == [9.0]


def test_a_mark_of_byte_order_is_no_part_of_a_line(tmp_path: Path) -> None:
    path = write(tmp_path / rows.FILE, of_times())
    marked = [codecs.BOM_UTF8 + line for line in path.read_bytes().splitlines(keepends=True)]
    path.write_bytes(b"".join(marked))
    assert len(read(path).rows) == 1


def test_what_is_no_number_is_written_as_flashinfer_bench_does(tmp_path: Path) -> None:
    into = Writer("bits", "GPU A", "how", tmp_path / rows.FILE)
    nan, infinite = float("nan"), float("inf")
    into.add({}, "x", cosine=nan, calc_diff=infinite, largest=-infinite)
    assert lines_of(into.path)[-1].items() >= {
        "cosine": "NaN", "calc_diff": "Infinity", "largest": "-Infinity",
    }.items()  # fmt: skip
    assert read(tmp_path).rows == into.rows
    assert read(tmp_path).frame("bits").largest.astype(float).max() == -infinite


def test_hashes_are_of_the_solutions_whose_sources_a_subject_runs() -> None:
    into = Writer("gemm_layers", "GPU A", "how")
    into.add({}, "flat, next larger", solution="cutedsl_moe_fp8_flat", hash="1")
    into.add({}, "peer", hash="2")
    into.add({}, "library")
    assert into.result.hashes("gemm_layers") == {"cutedsl_moe_fp8_flat": "1", "peer": "2"}


# --- figures join the traces that they belong to --------------------------------------------------

FIGURES = [
    {"cosine": 0.5, "calc_diff": "NaN", "matched_ratios": {"0.2/0.1": 0.9}},
    {"clock": "device", "value": 2.0, "p10": 1.9, "p90": 2.3, "calls": 9, "method": "graph"},
    {"clock": "harness", "value": 3.0, "p10": 2.9, "p90": 3.3, "calls": 7},
]


def figures(rows_of: list[dict] = FIGURES, solution: str = "x", length: int = 7) -> list[dict]:
    case = {"subject": solution, "definition": DEFINITION, "uuid": UUIDS[length], "hash": "1"}
    return [case | row for row in rows_of]


def ours(solution: str = "x", length: int = 7, hash: str = "1", **options: Any) -> dict:
    made = {"latency": 1.0, "libs": {"solution_hash": hash}, "extra": {"matched_ratio": 0.9}}
    return trace(solution, length, **made | options)


def test_a_record_has_the_figures_of_its_rows(tmp_path: Path) -> None:
    run = record(tmp_path, [ours()], measurement("times", figures()))
    (found,) = read_results([run]).to_dict("records")  # rows are no traces
    assert (found["device"], found["method"], found["harness"]) == (2.0, "graph", 1.0)
    assert found["device_spread"] == pytest.approx(0.2)
    assert found["harness_spread"] == pytest.approx(0.4 / 3.0)
    assert (found["cosine"], found["calc_diff"], found["0.2/0.1"]) == (0.5, None, 0.9)
    assert found["matched_ratio"] == 0.9, "what the trace itself has stays"
    assert found["trace"] == ours(), "as it is in the file"


def test_figures_join_only_results_of_the_same_pair_source_and_gpu(tmp_path: Path) -> None:
    failed = {"latency": None, "status": "RUNTIME_ERROR"}
    made = {
        "same": ours(),
        "of another workload": ours(length=901),
        "of another source": ours(length=80, hash="2"),
        "of no known source": ours(length=80, hash=""),
        "of another GPU": ours(hardware="GPU B"),
        "of another solution": ours("y"),
        "without output": ours("z", **failed),
        "wrong": ours("z", 80, **failed | {"status": "INCORRECT_NUMERICAL"}),
    }
    of_all = [row for n in "xz" for length in (7, 80) for row in figures(solution=n, length=length)]
    run = record(tmp_path, list(made.values()), measurement("times", of_all))
    found = read_results([run / "traces.jsonl"]).set_axis(list(made))
    assert list(found.index[found.cosine.notna()]) == ["same", "wrong"]
    assert list(found.index[found.device.notna()]) == ["same"], "no time of what is wrong"
    # The hash is run.json's where the trace has none.
    run = record(tmp_path, [ours(hash="")], measurement("times", figures()), solutions={"x": "1"})
    assert read_results([run / "traces.jsonl"]).device[0] == 2.0


def test_a_part_that_is_measured_again_replaces_that_part_alone(tmp_path: Path) -> None:
    first = measurement("times", [*figures(), *figures(solution="y")])
    again = measurement("times", figures([{"clock": "device", "value": 1.5}]))
    run = record(tmp_path, [ours(), ours("y")], first, again)
    x, y = read_results([run / "traces.jsonl"]).itertuples()
    assert (x.device, y.device) == (1.5, 2.0)
    assert x.harness_spread == y.harness_spread > 0 and x.cosine == y.cosine == 0.5
    bit = {"part": "again", "compared": 7}
    x_bits, y_bits = bit | {"subject": "x", "hash": "1"}, bit | {"subject": "y", "hash": "2"}
    whole = measurement("bits", [x_bits | {"differ": 1}, y_bits | {"differ": 2}])
    run = record(tmp_path, [ours()], whole, measurement("bits", [x_bits | {"differ": 0}]))
    found = checks_of(read(run))
    assert {key: part["again"]["differ"] for key, part in found.items()} == {
        ("1", "GPU A"): 0,
        ("2", "GPU A"): 2,
    }


def test_what_changed_its_inputs_by_its_row_has_failed(tmp_path: Path) -> None:
    changed = figures([{"inputs_changed": ["hidden_states"]}])
    run = record(tmp_path, [ours(), ours("y")], measurement("times", changed))
    x, y = read_results([run / "traces.jsonl"]).itertuples()
    assert (x.status, y.status) == ("CHANGED_INPUTS", "PASSED")
    assert x.reason == "the solution changes its inputs: hidden_states" and not x.passed
