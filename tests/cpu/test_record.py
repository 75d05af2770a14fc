"""A record is made step by step, whatever becomes of a step, and the archive holds all of it. Small
commands stand for the programs."""

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

import run
from scripts.common.command_line import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, UsageError
from scripts.measure import record
from scripts.measure.record import RUN, Step


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def note(directory: Path, name: str, status: int = 0) -> Step:
    """A step that appends its name to a file and ends with a status."""
    code = f"open({str(directory / 'order.txt')!r}, 'a').write({name + ' '!r}); print({name!r}); "
    return Step(name, python(f"import sys; {code}sys.exit({status})"))


def said(directory: Path) -> dict:
    return json.loads((directory / "steps.json").read_text())


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "record-gpu"
    made.mkdir()
    return made


def test_steps_run_in_order_and_none_stops_the_next(directory: Path) -> None:
    chosen = [note(directory, "a"), note(directory, "b", 1), note(directory, "c")]
    chosen.insert(1, Step("absent", ["/absent/program"]))
    assert record.record(chosen, directory, 60, hardware="GPU") == EXIT_FAILED
    assert (directory / "order.txt").read_text().split() == ["a", "b", "c"]
    content = said(directory)
    assert content["hardware"] == "GPU" and not content["interrupted"]
    assert [s["name"] for s in content["steps"]] == ["a", "absent", "b", "c"]
    statuses = [s["status"] for s in content["steps"]]
    assert statuses[::2] == [0, 1] and statuses[3] == 0 and "No such file" in statuses[1]


def test_all_passed(directory: Path) -> None:
    assert record.record([note(directory, "a")], directory, 60) == EXIT_OK


def test_the_archive_holds_everything(directory: Path) -> None:
    failing = python("print('the reason'); raise SystemExit(3)")
    record.record([note(directory, "a"), Step("b", failing)], directory, 60)
    archive = directory.with_name("record-gpu.tar.gz")
    with tarfile.open(archive) as packed:
        held = set(packed.getnames())
        log = packed.extractfile("record-gpu/logs/b.log")
        assert log is not None and "the reason" in log.read().decode()
    on_disk = {f"record-gpu/{p.relative_to(directory)}" for p in directory.rglob("*")}
    assert held == on_disk | {"record-gpu"}
    assert {"record-gpu/steps.json", "record-gpu/order.txt", "record-gpu/logs/a.log"} <= held
    assert not list(directory.parent.glob(".*"))


def test_a_log_has_both_streams_and_the_command(directory: Path) -> None:
    code = "import sys; print('out'); print('err', file=sys.stderr)"
    record.record([Step("a", python(code))], directory, 60)
    log = (directory / "logs" / "a.log").read_text()
    assert log.startswith(f"$ {sys.executable}") and "out\n" in log and "err\n" in log


def test_a_step_that_hangs_is_ended_with_what_it_started(directory: Path) -> None:
    """A child that would outlive its parent, as a worker that holds the GPU's memory does."""
    pid = directory / "pid"
    child = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    start = time.monotonic()
    chosen = [Step("hangs", python(code)), note(directory, "next")]
    assert record.record(chosen, directory, 2.0) == EXIT_FAILED
    assert time.monotonic() - start < 60
    assert said(directory)["steps"][0]["status"] == "ended after 2.0 s"
    assert (directory / "order.txt").read_text() == "next "
    for _ in range(50):  # init has to collect it first
        state = Path(f"/proc/{pid.read_text()}/stat")
        if not state.exists() or state.read_text().split()[2] == "Z":
            break
        time.sleep(0.1)
    else:
        pytest.fail("the child is still there")


def test_files_of_the_run_move_up_even_if_it_failed(directory: Path) -> None:
    made = directory / RUN / "20260101-000000-gpu"
    code = (
        f"from pathlib import Path; d = Path({str(made)!r}); d.mkdir(parents=True)\n"
        "for n in ('traces.jsonl', 'run.json', '.run.lock', 'stages.json'): (d / n).write_text(n)\n"
        "raise SystemExit(1)"
    )
    (directory / "stages.json").write_text("earlier")
    record.record([Step("bench", python(code), collects=True)], directory, 60)
    assert (directory / "traces.jsonl").read_text() == "traces.jsonl"
    assert (directory / "run.json").exists() and not (directory / ".run.lock").exists()
    assert (directory / "stages.json").read_text() == "earlier", "nothing is written over"


@pytest.mark.skipif(os.name != "posix", reason="sends a signal")
def test_ctrl_c_packs_what_there_is(directory: Path) -> None:
    first = note(directory, "a")
    code = (
        "import signal, sys; from pathlib import Path\n"
        # Where the tests run in the background it would be ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from scripts.measure.record import Step, record\n"
        f"a = Step('a', {list(first.command)!r})\n"
        "code = 'import time; print(1, flush=True); time.sleep(600)'\n"
        "b = Step('b', [sys.executable, '-c', code])\n"
        f"sys.exit(record([a, b, a], Path({str(directory)!r}), 900))"
    )
    process = subprocess.Popen(python(code), env=run.environment(), stderr=subprocess.DEVNULL)
    log = directory / "logs" / "b.log"
    deadline = time.monotonic() + 60
    while not (log.is_file() and "\n1\n" in log.read_text()):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == EXIT_INTERRUPTED
    assert said(directory)["interrupted"]
    assert [s["status"] for s in said(directory)["steps"]] == [0, "interrupted"]
    assert directory.with_name("record-gpu.tar.gz").is_file()


def test_steps_name_programs_and_files_of_a_record(directory: Path) -> None:
    every = record.steps(directory)
    started = [step.command[2] for step in every]
    assert set(started) - {"test"} <= set(run.programs())
    assert started[0] == "test" and started[-1] == "report"
    words = {str(word) for step in every for word in step.command}
    kept = {p.name for p in (record.ROOT / "results" / "nvidia-h200" / "2026-11-23").iterdir()}
    from_bench = {"floors.json", "invariance.json", "run.json", "traces.jsonl"}
    assert {str(directory / name) for name in kept - from_bench} <= words


@pytest.mark.parametrize("step", record.steps(Path("/tmp/d")), ids=lambda s: s.name)
def test_steps_have_arguments_that_their_programs_take(step: Step) -> None:
    """Each option of a step is one that the program's own help names."""
    if step.command[2] == "test":
        return
    path = run.programs()[step.command[2]]
    shown = subprocess.run(
        [sys.executable, str(path), "--help"], env=run.environment(), capture_output=True, text=True
    ).stdout
    for word in step.command[3:]:
        assert not word.startswith("--") or word in shown


def test_selection(directory: Path) -> None:
    every = record.steps(directory)
    assert [s.name for s in record.selected(every, ["bench", "tests"], [])] == ["tests", "bench"]
    assert "tests" not in [s.name for s in record.selected(every, [], ["tests"])]
    with pytest.raises(UsageError, match="no step absent: expected tests, bench"):
        record.selected(every, ["absent"], [])
    with pytest.raises(UsageError, match="no step is left"):
        record.selected(every, ["bench"], ["bench"])


def test_the_machine_is_described(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = {"good.txt": python("print('fine')"), "bad.txt": ["/absent/tool"]}
    monkeypatch.setattr(record, "TOOLS", tools)
    record.describe_machine(directory)
    assert "versions" in json.loads((directory / "environment.json").read_text())
    assert (directory / "good.txt").read_text() == "fine\n"
    assert "No such file" in (directory / "bad.txt").read_text()
