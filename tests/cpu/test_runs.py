"""The directory of a run: one run each, and a new directory however many start at once."""

import json
import threading
from pathlib import Path

import pytest
from flashinfer_bench.data import Trace
from test_benchmark import evaluation

from scripts.common.command_line import UsageError
from scripts.common.project import DEFINITION, ROOT
from scripts.data import dataset, traces
from scripts.measure import runs


def result(name: str, length: int = 1) -> Trace:
    trace_set, _ = dataset.load(ROOT)
    (chosen,) = dataset.select_workloads(trace_set.workloads[DEFINITION], [str(length)])
    return Trace(
        definition=DEFINITION, workload=chosen.workload, solution=name, evaluation=evaluation()
    )


def test_the_directory_is_named_after_time_and_hardware(tmp_path: Path) -> None:
    with runs.new_run(tmp_path, "NVIDIA H100 80GB HBM3") as run:
        assert run.directory.name.endswith("-nvidia-h100-80gb-hbm3")


def test_runs_that_start_at_once_get_a_directory_each(tmp_path: Path) -> None:
    begin, found = threading.Barrier(16), []

    def start() -> None:
        begin.wait()
        found.append(runs.new_run(tmp_path, "GPU"))

    threads = [threading.Thread(target=start) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({run.directory for run in found}) == 16
    assert all(run.directory.is_dir() for run in found)


def test_a_directory_that_cannot_be_made_is_an_error_of_the_system(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        runs.new_run(tmp_path / "file", "GPU")
    with pytest.raises(OSError):
        runs.new_run(tmp_path / "file" / "below", "GPU")


def test_the_latest_run_or_the_named_one_is_resumed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run to resume in .*absent"):
        runs.find_run(tmp_path / "absent", None)
    for name in ("1", "2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(json.dumps({"hardware": name}))
    with runs.find_run(tmp_path, None) as run:
        assert run.info == {"hardware": "2"}
    with runs.find_run(tmp_path, tmp_path / "1") as run:
        assert run.info == {"hardware": "1"}
    with pytest.raises(UsageError, match="no run to resume in .*3"):
        runs.find_run(tmp_path, tmp_path / "3")


def test_a_run_is_held_by_one_program_until_it_is_closed(tmp_path: Path) -> None:
    with runs.new_run(tmp_path, "GPU") as run:
        run.save_info(hardware="GPU")
        with pytest.raises(UsageError, match="another program is measuring"):
            runs.find_run(tmp_path, run.directory)
    with runs.find_run(tmp_path, run.directory):
        pass


def test_what_is_stored_says_what_it_is_of_and_is_done(tmp_path: Path) -> None:
    with runs.new_run(tmp_path, "GPU") as run:
        run.begin({"x": "1", "y": "2"}, {"timing": "t"}, "s")
        assert run.done() == set()
        given = [result("x"), result("y")]
        shared = given[0].evaluation.environment
        given[1] = given[1].model_copy(
            update={"evaluation": given[1].evaluation.model_copy(update={"environment": shared})}
        )
        run.store(given)
        assert "timing" not in shared.libs, "what flashinfer-bench gave is left alone"
        uuid = given[0].workload.uuid
        assert run.done() == {(uuid, "x"), (uuid, "y")}
        assert run.info["solutions"] == {"x": "1", "y": "2"}
        records = {r.solution: r for r in traces.read_records([run.traces])}
        assert {n: (r.hash, r.settings, r.timing) for n, r in records.items()} == {
            "x": ("1", "s", "t"),
            "y": ("2", "s", "t"),
        }
        run.begin({"x": "1", "y": "3"}, {"timing": "t"}, "s")
        assert run.done() == {(uuid, "x")}
        run.begin({"x": "1", "y": "2"}, {"timing": "t"}, "other settings")
        assert run.done() == set()


def test_an_impossible_result_is_not_done(tmp_path: Path) -> None:
    with runs.new_run(tmp_path, "GPU") as run:
        run.begin({"x": "1"}, {}, "s")
        run.store([result("x")])
        text = run.traces.read_text()
        assert '"latency_ms":1.0' in text
        run.traces.write_text(text.replace('"latency_ms":1.0', '"latency_ms":0.0'))
        assert run.done() == set()


def test_settings_have_one_hash_whatever_their_order() -> None:
    assert runs.settings_hash({"a": 1, "b": [2]}) == runs.settings_hash({"b": [2], "a": 1})
    assert runs.settings_hash({"a": 1}) != runs.settings_hash({"a": 2})
