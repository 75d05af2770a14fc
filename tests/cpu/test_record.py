"""A record is made step by step, whatever becomes of a step, and the archive holds all of it. Small
commands stand for the programs."""

import functools
import json
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from programs import gone

import run
from scripts.common.command_line import EXIT_FAILED, EXIT_OK
from scripts.common.project import RESULTS_DIR
from scripts.data import rows
from scripts.measure import gpu
from scripts.programs import record
from scripts.programs.record import Step

RECORD = RESULTS_DIR / "nvidia-h200" / "2026-11-25"


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def note(
    directory: Path, name: str, fails: bool = False, gate: bool = False, hangs: bool = False
) -> Step:
    """A step that appends its name to a file, prints it and ends."""
    code = f"open({str(directory / 'order.txt')!r}, 'a').write({name + ' '!r}); print({name!r}); "
    hang = f"open(f'{directory}/{{os.getpid()}}', 'w').write('hangs'); time.sleep(600); "
    code += "import os, sys, time; " + hang * hangs
    return Step(name, python(f"{code}sys.exit({int(fails)})"), gate)


def said_in(directory: Path) -> dict:
    return json.loads((directory / "steps.json").read_text())


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "record-gpu"
    made.mkdir()
    return made


LIMIT_S = 2.0


@pytest.fixture
def limit(directory: Path, monkeypatch) -> None:
    """LIMIT_S is over once a step has written to the file of its pid, on a slow machine as on a
    fast one."""

    class Limited(subprocess.Popen):
        def wait(self, timeout: float | None = None) -> int:
            while timeout == LIMIT_S and self.poll() is None:
                written = directory / str(self.pid)
                if written.exists() and written.read_text():
                    raise subprocess.TimeoutExpired(self.args, timeout)
                time.sleep(0.01)
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Limited)


FAILS, HANGS, GATE = "fails", "hangs", "gate"


@pytest.mark.parametrize(
    ("chosen", "statuses", "ended", "message"),
    [
        ({"a": [], "b": []}, [0, 0], EXIT_OK, "to send back: "),
        ({"a": [], "b": [FAILS], "c": []}, [0, 1, 0], EXIT_FAILED, "not passed: b (1); "),
        ({"a": [HANGS], "b": []}, ["ended after 2.0 s", 0], EXIT_FAILED, "a (ended after 2.0 s)"),
        ({"a": [GATE], "b": [GATE, FAILS], "c": [], "d": []}, [0, 1], EXIT_FAILED,
         "b has not passed: nothing else is run; to time all the same: --only c d\n"),
        ({"a": [GATE, HANGS], "b": []}, ["ended after 2.0 s"], EXIT_FAILED,
         "a has not passed: nothing else is run; to time all the same: --only b\n"),
    ],
)  # fmt: skip
def test_steps_run_in_order_and_only_a_gate_that_has_not_passed_stops_the_next(
    chosen, statuses, ended, message, directory: Path, limit, capfd, monkeypatch
) -> None:
    """steps.json and the archive say so."""
    monkeypatch.setattr(record, "PATIENCE_S", 1.0)  # where Ctrl-C is ignored, as behind nohup
    steps = [
        note(directory, name, FAILS in of, GATE in of, HANGS in of) for name, of in chosen.items()
    ]
    assert record.record(steps, directory, LIMIT_S, hardware="GPU") == ended
    names = list(chosen)[: len(statuses)]
    assert (directory / "order.txt").read_text().split() == names
    with tarfile.open(f"{directory}.tar.gz") as packed:
        content = json.load(packed.extractfile("record-gpu/steps.json"))
    assert content == said_in(directory) and not content["interrupted"]
    assert content["hardware"] == "GPU"
    assert [(s["name"], s["status"]) for s in content["steps"]] == list(
        zip(names, statuses, strict=True)
    )
    shown = capfd.readouterr().err
    assert message in shown and f"to send back: {directory}.tar.gz, nothing else" in shown


def test_nothing_is_timed_before_the_gpu_tests_have_passed(directory: Path) -> None:
    first, *others = record.steps(directory)
    assert first.gate and first.command[2:4] == ["test", "tests/gpu"]
    assert not any(step.gate for step in others)


def test_the_archive_holds_everything(directory: Path) -> None:
    failing = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    record.record([note(directory, "a"), Step("b", python(failing))], directory, 60)
    with tarfile.open(directory.with_name("record-gpu.tar.gz")) as packed:
        files = set(packed.getnames())
        log = packed.extractfile("record-gpu/logs/b.log")
        assert log is not None
        written = log.read().decode()
    assert written.startswith(f"$ {sys.executable}") and "out\n" in written and "err\n" in written
    on_disk = {f"record-gpu/{p.relative_to(directory)}" for p in directory.rglob("*")}
    assert files == on_disk | {"record-gpu"}
    assert {"record-gpu/steps.json", "record-gpu/order.txt", "record-gpu/logs/a.log"} <= files
    assert not list(directory.parent.glob(".*"))


def test_a_step_that_hangs_is_ended_with_what_it_started(
    directory: Path, limit, monkeypatch
) -> None:
    """A child that would outlive its parent, as a worker that holds the GPU's memory does; neither
    heeds Ctrl-C."""
    child = f"import os, time; open(f'{directory}/{{os.getppid()}}', 'w').write(str(os.getpid())); "
    child += "time.sleep(600)"
    code = "import signal, subprocess, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    code += f"subprocess.run([sys.executable, '-c', {child!r}])"
    monkeypatch.setattr(record, "PATIENCE_S", 0.2)
    chosen = [Step("hangs", python(code)), note(directory, "next")]
    assert record.record(chosen, directory, LIMIT_S) == EXIT_FAILED
    assert [s["status"] for s in said_in(directory)["steps"]] == ["ended after 2.0 s", 0]
    (pid,) = directory.glob("[0-9]*")
    assert gone(int(pid.read_text()))


def test_files_of_the_run_move_up_even_if_it_failed(directory: Path) -> None:
    made = directory / "bench" / "20260101-000000-gpu"
    code = (
        f"from pathlib import Path; d = Path({str(made)!r}); d.mkdir(parents=True)\n"
        "for n in ('traces.jsonl', 'run.json', '.run.lock', 'rows.jsonl'): (d / n).write_text(n)\n"
        "raise SystemExit(1)"
    )
    (directory / "rows.jsonl").write_text("earlier")
    record.record([Step("bench", python(code))], directory, 60)
    assert (directory / "traces.jsonl").read_text() == "traces.jsonl"
    assert (directory / "run.json").exists() and not (directory / ".run.lock").exists()
    assert (directory / "rows.jsonl").read_text() == "earlier", "nothing is written over"


def as_on_a_gpu(monkeypatch, out: Path, steps: list[Step], *options: str) -> int:
    """`run.py record` where these stand for the programs."""
    monkeypatch.setattr(gpu, "require_gpu", lambda: "NVIDIA B200")
    monkeypatch.setattr(gpu, "gpu_arch", lambda: "sm_100a")
    monkeypatch.setattr(record, "steps", lambda directory: steps)
    monkeypatch.setattr("sys.argv", ["record", "--out", str(out), *options])
    return record.main()


NAMES = [name for name, *_ in record.STEPS]


def test_a_whole_record(tmp_path: Path, monkeypatch, capfd) -> None:
    """All steps, two of which fail in a way that stops nothing."""
    steps = [note(tmp_path, name, name in ("tune_layer", "gemm_study")) for name in NAMES]
    assert as_on_a_gpu(monkeypatch, tmp_path, steps) == EXIT_FAILED
    assert (tmp_path / "order.txt").read_text().split() == NAMES
    said_last = capfd.readouterr().err
    assert "not passed: gemm_study (1), tune_layer (1); their output is in the archive" in said_last
    (archive,) = tmp_path.glob("record-nvidia-b200-*.tar.gz")
    assert said_last.rstrip().endswith(f"to send back: {archive}, nothing else")
    with tarfile.open(archive) as packed:
        files = {Path(name).name for name in packed.getnames()}
    assert {"environment.json", "steps.json", *(f"{name}.log" for name in NAMES)} <= files


def test_only_some_steps(tmp_path: Path, monkeypatch) -> None:
    """Steps run in the order of the record, whatever order is asked for."""
    steps = [note(tmp_path, name) for name in NAMES]
    assert as_on_a_gpu(monkeypatch, tmp_path, steps, "--only", "tune_layer", "bench") == EXIT_OK
    assert (tmp_path / "order.txt").read_text().split() == ["bench", "tune_layer"]


STEP = """
import subprocess, time
child = subprocess.Popen(["sleep", "600"])
try:
    print("child", child.pid, flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print("keeps what it has", flush=True)
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_what_ends_it_packs_what_there_is(number, status: int, directory: Path) -> None:
    """SIGTERM at a job's limit too."""
    code = (
        "import os, signal; from pathlib import Path\n"
        "from scripts.common import command_line\n"
        "from scripts.programs import record\n"
        "for each in command_line.ENDING: signal.signal(each, command_line.interrupt)\n"
        f"a = {note(directory, 'a').command!r}\n"
        f"steps = [record.Step(n, c) for n, c in dict(a=a, b={python(STEP)!r}, c=a).items()]\n"
        f"command_line.run_main(lambda: record.record(steps, Path({str(directory)!r}), 900))"
    )
    process = subprocess.Popen(python(code), env=run.environment(), stderr=subprocess.DEVNULL)
    log = directory / "logs" / "b.log"
    deadline = time.monotonic() + 600
    while not (log.is_file() and (found := re.search(r"^child (\d+)\n", log.read_text(), re.M))):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(600) == status
    assert found and gone(int(found[1])) and "\nkeeps what it has\n" in log.read_text()
    assert said_in(directory)["interrupted"]
    assert [s["status"] for s in said_in(directory)["steps"]] == [0, "interrupted"]
    assert directory.with_name("record-gpu.tar.gz").is_file()


def test_steps_measure_what_a_record_holds(directory: Path) -> None:
    every = record.steps(directory)
    assert {step.command[2] for step in every} - {"test"} <= set(run.programs())
    by_bench = {"times", "bits", "roofline"}
    by_others = {"served", "stages"}  # in an engine's environment; by no program any more
    measured = set(rows.read(RECORD).measurements) - by_bench - by_others
    assert measured <= {step.name for step in every}
    into = [step for step in every if "--out" in step.command]
    assert {step.command[step.command.index("--out") + 1] for step in into} == {
        str(directory / "rows.jsonl")
    }
    assert measured <= {step.name for step in into}
    names = [step.name for step in every]
    assert names.index("bench") < min(names.index(step.name) for step in into), "moves its rows up"


@functools.cache
def shown_by(program: str) -> str:
    command = [sys.executable, str(run.programs()[program]), "--help"]
    return subprocess.run(command, env=run.environment(), capture_output=True, text=True).stdout


@pytest.mark.parametrize("step", record.steps(Path("/tmp/d"))[1:], ids=lambda step: step.name)
def test_steps_have_arguments_that_their_programs_take(step: Step) -> None:
    """Each option of a step is one that the program's own help names."""
    options = [word for word in step.command[3:] if word.startswith("--")]
    assert all(option in shown_by(step.command[2]) for option in options)
