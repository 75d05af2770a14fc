"""How benchmark drives flashinfer-bench, whose Benchmark needs a GPU and is stood in for."""

import json
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from flashinfer_bench.bench import BenchmarkConfig
from flashinfer_bench.data import Evaluation, Solution, Trace, TraceSet, Workload
from test_dataset import solution

from scripts.common.command_line import (
    ENDING,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    UsageError,
)
from scripts.common.project import DEFINITION, ROOT
from scripts.data import dataset
from scripts.measure import bench, cpu_bench, plan
from scripts.measure.timing import HARNESS_CLOCK
from scripts.pack import availability, pack
from scripts.programs import bench as program
from scripts.report import report


def evaluation(status: str = "PASSED") -> Evaluation:
    passed = status == "PASSED"
    return Evaluation.model_validate(
        {
            "status": status,
            "environment": {"hardware": "GPU", "libs": {"torch": "1"}},
            "timestamp": "2026-01-01T00:00:00",
            "log": "" if passed else "ValueError: unsupported GPU",
            "correctness": {"max_absolute_error": 0.1} if passed else None,
            "performance": (
                {"latency_ms": 1.0, "reference_latency_ms": 5.0, "speedup_factor": 5.0}
                if passed
                else None
            ),
        }
    )


class FakeBenchmark:
    """What the code under test may rely on: the trace set that was given is read at run_all."""

    instances: list["FakeBenchmark"] = []
    interrupt_at: int | None = None
    signal_at: int | None = None
    signal = signal.SIGINT
    before_results: Callable[[int], None] = staticmethod(lambda call: None)
    spawned_with: list[object]
    ran: list[tuple[str, str]]
    """(uuid, content of the source) of every evaluation."""

    def __init__(self, trace_set: TraceSet, config: BenchmarkConfig):
        self.trace_set, self.calls, self.closed = trace_set, 0, False
        self.log_dir = Path(config.log_dir or "")  # None in flashinfer-bench's main
        self.spawned_with = [signal.getsignal(each) for each in ENDING]
        self.ran = []
        FakeBenchmark.instances.append(self)

    def run_all(self, dump_traces: bool = True, resume: bool = False) -> TraceSet:
        assert dump_traces is False, "would write into the data set"
        if self.calls == self.interrupt_at:
            raise KeyboardInterrupt
        if self.calls == self.signal_at:
            os.kill(os.getpid(), self.signal)
        FakeBenchmark.before_results(self.calls)
        self.calls += 1
        (workload,) = self.trace_set.workloads[DEFINITION]
        traces = []
        for s in self.trace_set.solutions[DEFINITION]:
            if s.name in ("lost", f"lost {self.calls}"):
                logging.getLogger("flashinfer_bench.bench").error("worker died: out of memory")
                continue
            if s.name == "silent":
                continue
            self.ran.append((workload.workload.uuid, s.sources[0].content))
            status = "RUNTIME_ERROR" if s.name == "fails" else "PASSED"
            traces.append(
                Trace(
                    definition=DEFINITION,
                    workload=workload.workload,
                    solution=s.name,
                    evaluation=evaluation(status),
                )
            )
        return TraceSet(traces={DEFINITION: traces})

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def fake(monkeypatch) -> Iterator[type[FakeBenchmark]]:
    """Of a program that both signals interrupt; where the tests run in the background Ctrl-C would
    be ignored."""
    before = [signal.signal(each, signal.default_int_handler) for each in ENDING]
    monkeypatch.setattr(FakeBenchmark, "instances", [])
    monkeypatch.setattr(FakeBenchmark, "interrupt_at", None)
    monkeypatch.setattr(FakeBenchmark, "signal_at", None)
    monkeypatch.setattr(FakeBenchmark, "signal", signal.SIGINT)
    monkeypatch.setattr(FakeBenchmark, "before_results", staticmethod(lambda call: None))
    monkeypatch.setattr(bench, "Benchmark", FakeBenchmark)
    monkeypatch.setattr(bench, "load_tensors", lambda *_: None)
    yield FakeBenchmark
    for each, handler in zip(ENDING, before, strict=True):
        signal.signal(each, handler)


def drive(names: list[str], stored: list[list[Trace]], large: bool = False) -> list[str]:
    trace_set, _ = dataset.load(ROOT)
    workloads = dataset.select_workloads(trace_set.workloads[DEFINITION], ["1", "7"])
    solutions = [solution(n) for n in names]
    pairs = [(t, solutions) for t in workloads]
    return bench.run_on_gpu(trace_set, pairs, BenchmarkConfig(), stored.append, large)


def test_one_benchmark_serves_all_workloads_and_each_is_stored_at_once(fake) -> None:
    stored: list[list[Trace]] = []
    assert drive(["x", "fails"], stored) == []
    (instance,) = fake.instances
    assert instance.calls == 2 and instance.closed
    assert [[t.solution for t in traces] for traces in stored] == [["x", "fails"]] * 2
    assert {t.workload.axes["seq_len"] for traces in stored for t in traces} == {1, 7}


def test_of_a_large_definition_a_benchmark_serves_one_workload(fake, monkeypatch) -> None:
    """Before it begins, the one before is closed and its memory given back."""
    order: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: order.append("collected"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: order.append("emptied"))
    fake.before_results = staticmethod(
        lambda call: order.append((call, [b.closed for b in fake.instances]))
    )
    stored: list[list[Trace]] = []
    assert drive(["x"], stored, large=True) == [] and len(stored) == 2
    freed = ["collected", "emptied"]
    assert order == [(0, [False]), *freed, (0, [True, False]), *freed]
    assert all(b.closed for b in fake.instances)


def test_a_result_that_never_came_is_an_error_with_its_own_reason(fake, capsys) -> None:
    logger = logging.getLogger("flashinfer_bench")
    before = (list(logger.handlers), logger.propagate)
    errors = drive(["lost 1", "silent", "x"], [])
    assert [e.split("): ", 1)[1] for e in errors] == [
        "lost 1, silent: worker died: out of memory",
        "silent: no result",
    ]
    said = capsys.readouterr().err
    assert all(error in said for error in errors)
    assert (logger.handlers, logger.propagate) == before


def test_a_workload_that_cannot_be_read_or_whose_reference_exits_costs_no_other(
    fake, monkeypatch
) -> None:
    """flashinfer-bench runs the reference in this process."""

    def load(trace_set: TraceSet, workload: Workload) -> None:
        if workload.axes["seq_len"] == 1:
            raise UsageError("workload e05c6c03: no file")

    stored: list[list[Trace]] = []
    monkeypatch.setattr(bench, "load_tensors", load)
    (error,) = drive(["x", "y"], stored)
    assert error == "T=1 (e05c6c03): x, y: workload e05c6c03: no file"
    assert [[t.solution for t in traces] for traces in stored if traces] == [["x", "y"]]
    monkeypatch.setattr(bench, "load_tensors", lambda *_: None)
    fake.before_results = staticmethod(lambda call: sys.exit(0))
    errors = drive(["x"], stored)
    assert len(errors) == 2 and fake.instances[-1].closed
    assert all(f"the reference of {DEFINITION} calls sys.exit(0)" in error for error in errors)


@pytest.mark.parametrize("number", ENDING)
def test_ctrl_c_finishes_and_keeps_the_workload_under_way(fake, number, capfd) -> None:
    """flashinfer-bench evaluates the rest of a workload's solutions before it lets go."""
    fake.signal_at, fake.signal = 0, number
    stored: list[list[Trace]] = []
    with pytest.raises(KeyboardInterrupt):
        drive(["x", "y", "fails"], stored)
    (instance,) = fake.instances
    assert instance.calls == 1 and instance.closed
    assert [[t.solution for t in traces] for traces in stored] == [["x", "y"]]
    assert "finishing this workload" in capfd.readouterr().err
    assert instance.spawned_with == [signal.SIG_IGN, signal.default_int_handler], (
        "the workers must not stop at Ctrl-C; SIGTERM is what ends them"
    )
    assert {signal.getsignal(each) for each in ENDING} == {signal.default_int_handler}


def test_what_was_ignored_stays_ignored(fake) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    fake.signal_at = 0
    stored: list[list[Trace]] = []
    assert drive(["x", "fails"], stored) == []
    assert [[t.solution for t in traces] for traces in stored] == [["x", "fails"]] * 2
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_second_ctrl_c_ends_the_program_and_its_workers(
    fake, number, status: int, monkeypatch, capsys
) -> None:
    workers = [subprocess.Popen(["sleep", "60"])]
    monkeypatch.setattr(bench.multiprocessing, "active_children", lambda: workers)
    monkeypatch.setattr(bench.os, "_exit", sys.exit)
    fake.signal_at = 0
    fake.before_results = staticmethod(lambda call: os.kill(os.getpid(), number))
    monkeypatch.setattr(bench, "evaluate", lambda benchmark, *_: benchmark.run_all(False))
    with pytest.raises(SystemExit) as ended:
        drive(["x"], [])
    assert ended.value.code == status and workers[0].wait(timeout=10) != 0
    assert "stopped; `run.py rank` shows what was kept" in capsys.readouterr().err


# --- the whole program, on a machine that seems to have an H200 -----------------------------------


def blackwell_only(name: str) -> Solution:
    made = solution(name).model_dump()
    made["spec"] |= {"target_hardware": ["NVIDIA B200", "NVIDIA B300"]}
    return Solution.model_validate(made)


def needs_package(name: str) -> Solution:
    made = solution(name).model_dump()
    made["spec"] |= {"dependencies": ["torch", "no-such-package==1.5"]}
    return Solution.model_validate(made)


class Program:
    """Runs the program with these arguments; the GPU, its Benchmark and the solutions are fakes."""

    def __init__(self, monkeypatch, traces: Path):
        self.monkeypatch, self.traces = monkeypatch, traces
        self.solutions = [solution("fails"), solution("x"), blackwell_only("b"), needs_package("p")]

    def __call__(self, *arguments: str) -> int:
        options = ["--traces", str(self.traces), "--no-report"]
        if "--solutions" not in arguments:
            options += ["--solutions", *(s.name for s in self.solutions if s.name != "fails")]
        return self.plain(*options, *arguments)

    def plain(self, *arguments: str) -> int:
        self.monkeypatch.setattr(sys, "argv", ["bench.py", *arguments])
        return program.main()

    def change(self, name: str, content: str) -> None:
        """Give a solution another source."""
        self.solutions = [solution(name, content) if s.name == name else s for s in self.solutions]


@pytest.fixture
def h200(fake, monkeypatch, tmp_path: Path) -> Program:
    import torch

    machine = availability.Machine((9, 0), availability.installed_version)
    program = Program(monkeypatch, tmp_path / "traces")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(plan, "hardware_from_device", lambda device: "GPU")
    monkeypatch.setattr(plan, "this_machine", lambda use_gpu: machine)
    monkeypatch.setattr(pack, "write_packed", lambda **_: [])
    monkeypatch.setattr(plan, "packed_solutions", lambda packed: program.solutions)
    monkeypatch.setattr(plan, "make_missing_workloads", lambda root, traces: None)
    monkeypatch.setattr(bench, "add_measurements", lambda run, args, foreign: None)
    return program


def the_run(tmp_path: Path) -> Path:
    (run,) = (tmp_path / "traces").iterdir()
    return run


def traces_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "traces.jsonl").read_text().splitlines()]


def info_of(run: Path) -> dict:
    return json.loads((run / "run.json").read_text())


def libs_of(trace: dict) -> dict[str, str]:
    return trace["evaluation"]["environment"]["libs"]


def test_what_cannot_run_here_is_left_out_with_the_reason(h200, fake, tmp_path, capsys) -> None:
    assert h200("--workloads", "1", "7") == 0, "what cannot run is no failure"
    assert [t.name for t in fake.instances[0].trace_set.solutions[DEFINITION]] == ["x"]
    info = json.loads((the_run(tmp_path) / "run.json").read_text())
    assert info["skipped"] == {
        "b": "unsupported on sm_90 (needs sm_100/103)",
        "p": "not installed: pip install no-such-package==1.5",
    }
    out, err = capsys.readouterr()
    for reason in info["skipped"].values():
        assert reason in out and reason in err
    assert (
        info["finished"] and info["seconds"] >= 0 and info["ended"] >= info["environment"]["time"]
    )
    with pytest.raises(UsageError, match="no solution can run here:\n.*b: unsupported on sm_90"):
        h200("--solutions", "b")


def test_an_interrupted_run_is_ranked_and_resumed(h200, fake, tmp_path, capsys) -> None:
    fake.signal_at = 1
    chosen = ["--workloads", "1", "7", "14"]
    assert h200(*chosen) == EXIT_INTERRUPTED
    out, err = capsys.readouterr()
    assert "what was measured is kept" in err and "2 workloads, 1 solutions" in out
    run = the_run(tmp_path)
    assert len((run / "traces.jsonl").read_text().splitlines()) == 2
    assert not json.loads((run / "run.json").read_text())["finished"]

    fake.signal_at = None
    assert h200(*chosen, "--resume") == 0
    out, err = capsys.readouterr()
    assert "1 workloads to run" in err and "3 workloads, 1 solutions" in out
    assert the_run(tmp_path) == run
    assert len((run / "traces.jsonl").read_text().splitlines()) == 3
    info = json.loads((run / "run.json").read_text())
    assert info["finished"] and len(info["earlier"]) == 1
    earlier = info["earlier"][0]
    assert set(earlier) == {"command", "environment", "seconds"}
    assert "--resume" in info["command"] and "--resume" not in earlier["command"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda info: info.update(hardware="GPU B"), "hardware 'GPU B' then, 'GPU' now"),
        (lambda info: info["environment"]["versions"].update(torch="1.0"), "torch 1.0 then"),
        (lambda info: info["environment"].update(cuda="9.0"), "CUDA 9.0 then"),
        (lambda info: info["configuration"].update(iterations=7), "configuration"),
        (lambda info: info.pop("seed"), "seed None then"),
        (lambda info: info.clear(), "hardware None then"),
        (lambda info: info.update(environment=5), r"run\.json: environment: "),
    ],
)
def test_a_run_of_another_machine_or_setting_is_not_resumed(
    h200, tmp_path, change, message
) -> None:
    assert h200("--workloads", "1") == 0
    path = the_run(tmp_path) / "run.json"
    info = json.loads(path.read_text())
    change(info)
    path.write_text(json.dumps(info))
    with pytest.raises(UsageError, match=message):
        h200("--workloads", "1", "7", "--resume")
    assert len((the_run(tmp_path) / "traces.jsonl").read_text().splitlines()) == 1


def test_progress_shows_workload_elapsed_and_remaining(h200, capsys) -> None:
    assert h200("--workloads", "1", "7") == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "elapsed" in line]
    assert lines[0].startswith("[1/2] T=7 (b8f4f012): 1 solutions   elapsed 0.0 s")
    assert lines[1].startswith("[2/2] T=1 (e05c6c03)") and "remaining about" in lines[1]


def test_the_list_runs_nothing(h200, fake, tmp_path, capsys) -> None:
    assert h200("--list") == 0
    out = capsys.readouterr().out
    rows = {tuple(line.split(maxsplit=2)) for line in out.splitlines() if line}
    assert ("x", "x", "yes") in rows
    assert ("b", "x", "unsupported on sm_90 (needs sm_100/103)") in rows
    assert ("14107", "5e8dc11c-f2a9-42d5-8dce-9419cbf34d5d") in rows
    assert fake.instances == [] and not (tmp_path / "traces").exists()


def test_without_any_result_the_program_fails_and_says_so(h200, capsys) -> None:
    h200.solutions.append(solution("lost"))
    assert h200("--workloads", "1", "--solutions", "lost") == EXIT_FAILED
    err = capsys.readouterr().err
    assert "nothing was measured" in err and "error: T=1" in err and "traces:" not in err


def test_passes_and_report_follow_a_run(h200, fake, monkeypatch, tmp_path, capsys) -> None:
    done: list[str] = []
    monkeypatch.setattr(bench, "add_measurements", lambda *_: done.append("passes"))
    monkeypatch.setattr(report, "write", lambda run, peers: done.append("report"))
    arguments = ["--workloads", "1", "--solutions", "x", "--traces", str(tmp_path / "traces")]
    assert h200.plain(*arguments) == 0
    assert done == ["passes", "report"]
    assert "left out" not in capsys.readouterr().err, "nothing is"
    target = tmp_path / "ranking.json"
    assert h200.plain(*arguments, "--no-report", "--json", str(target)) == 0
    assert done == ["passes", "report", "passes"]
    assert h200.plain(*arguments, "--no-report", "--only-harness") == 0 and len(done) == 3
    assert json.loads(target.read_text())[0]["hardware"] == "GPU"


@pytest.fixture
def passes(monkeypatch, tmp_path):
    """The commands of the passes that follow a run, by name; the first one does not fail."""
    commands: list[list[str]] = []

    def run(command: list[str], stdout: int) -> subprocess.CompletedProcess[str]:
        assert command[1:3] == ["-m", "scripts.programs.measure"]
        assert stdout == subprocess.DEVNULL, "the tables are in the ranking and the report"
        commands.append(command[3:])
        return subprocess.CompletedProcess(command, len(commands) - 1)

    def start(*arguments: str, foreign: bool = False) -> dict[str, list[str]]:
        commands.clear()
        monkeypatch.setattr(sys, "argv", ["bench.py", *arguments])
        with bench.new_run(tmp_path, "GPU") as made:
            bench.add_measurements(made, program.parse_arguments(), foreign)
        return {name: rest for name, *rest in commands}

    monkeypatch.setattr(bench.subprocess, "run", run)
    return start


def test_the_passes_have_the_options_of_the_run(passes, capsys) -> None:
    every = passes("--seed", "7")
    assert list(every) == ["roofline", "times", "bits"]
    for options in every.values():
        assert options[:3] == ["--local", str(ROOT), "--run"] and options[4:6] == ["--seed", "7"]
        assert options[6:] == ["--definition", DEFINITION]
    assert capsys.readouterr().err.splitlines() == [
        f"measure {name} failed; its figures are incomplete: "
        f"run.py measure {name} {' '.join(every[name])}"
        for name in list(every)[1:]
    ]
    assert "--run-foreign" in passes(foreign=True)["times"]
    of_another = passes("--definition", "kimi_k2")
    assert list(of_another) == list(every)
    assert all("_ng1_kg1_e48_" in options[-1] for options in of_another.values())
    assert list(passes("--definition", "gemm1")) == ["times"], "no layer"


@pytest.fixture
def cpu(h200, monkeypatch) -> list[tuple[list[int], BenchmarkConfig]]:
    """The program on a machine without a GPU: token counts and settings that the runner gets."""
    import torch

    calls: list[tuple[list[int], BenchmarkConfig]] = []

    def run(trace_set, pairs, config, seed, store, emulation) -> None:
        calls.append(([dataset.tokens(t.workload) for t, _ in pairs], config))
        for trace, solutions in pairs:
            for s in solutions:
                made = trace.model_copy(update={"solution": s.name, "evaluation": evaluation()})
                store([made])

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(plan, "this_machine", lambda gpu: availability.Machine(None, str))
    monkeypatch.setattr(bench, "add_measurements", lambda *_: pytest.fail("needs a GPU"))
    monkeypatch.setattr(cpu_bench, "run", run)
    return calls


def test_without_a_gpu_the_small_workloads_run_on_the_cpu(h200, cpu, tmp_path, capsys) -> None:
    assert h200("--solutions", "x") == 0
    (lengths, config) = cpu[-1]
    assert sorted(lengths) == [1, 7, 14, 15, 16]
    assert (config.iterations, config.num_trials) == (1, 1)
    err = capsys.readouterr().err
    assert "not run: 14 workloads (T=32, " in err
    assert "no GPU is visible: the solutions run as their reference model on the CPU" in err
    assert info_of(the_run(tmp_path))["skipped"] == {}
    assert h200("--solutions", "x", "--workloads", "901", "--iterations", "5") == 0
    assert cpu[-1][0] == [901] and cpu[-1][1].iterations == 5
    assert h200("--solutions", "x", "--max-tokens", "7") == 0
    assert sorted(cpu[-1][0]) == [1, 7]


def test_a_run_that_emulates_for_another_target_is_not_resumed(h200, cpu, tmp_path) -> None:
    assert h200("--solutions", "x", "--workloads", "1") == 0
    with pytest.raises(UsageError, match="emulate 'sm_90a' then, 'sm_100a' now"):
        h200("--solutions", "x", "--workloads", "1", "--resume", "--emulate", "sm_100a")


def test_the_cpu_is_taken_where_it_is_asked_for(h200, fake, cpu, monkeypatch, capsys) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert h200("--solutions", "x", "--cpu", "--workloads", "1") == 0
    assert len(cpu) == 1 and fake.instances == []
    assert "as asked (--cpu): the solutions run as" in capsys.readouterr().err


def test_files_of_solutions_that_cannot_be_read_are_passed_over(h200, tmp_path, capsys) -> None:
    root = tmp_path / "set"
    for part in ("definitions", "workloads"):
        shutil.copytree(ROOT / part, root / part)
    (root / "solutions" / "folder.json").mkdir(parents=True)
    (root / "solutions" / "gone.json").symlink_to(root / "absent")
    assert h200("--local", str(root), "--workloads", "1") == 0
    said = capsys.readouterr().err
    assert f"passed over: {root}/solutions/gone.json: No such file or directory" in said
    assert f"passed over: {root}/solutions/folder.json: Is a directory" in said


# --- the directory of a run ---------------------------------------------------------------------


def result(name: str, length: int = 1) -> Trace:
    trace_set, _ = dataset.load(ROOT)
    (chosen,) = dataset.select_workloads(trace_set.workloads[DEFINITION], [str(length)])
    return Trace(
        definition=DEFINITION, workload=chosen.workload, solution=name, evaluation=evaluation()
    )


def test_runs_that_start_at_once_get_a_directory_each(tmp_path: Path) -> None:
    begin, found = threading.Barrier(16), []

    def start() -> None:
        begin.wait()
        found.append(bench.new_run(tmp_path, "NVIDIA H100 80GB HBM3"))

    threads = [threading.Thread(target=start) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({run.directory for run in found}) == 16
    assert all("-nvidia-h100-80gb-hbm3" in run.directory.name for run in found)


def test_the_latest_run_or_the_named_one_is_resumed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run to resume in .*absent"):
        bench.find_run(tmp_path / "absent", None)
    for name in ("1", "2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(json.dumps({"hardware": name}))
    with bench.find_run(tmp_path, None) as run:
        assert run.info == {"hardware": "2"}
    with bench.find_run(tmp_path, tmp_path / "1") as run:
        assert run.info == {"hardware": "1"}
    with pytest.raises(UsageError, match="no run to resume in .*3"):
        bench.find_run(tmp_path, tmp_path / "3")


def test_a_run_is_held_by_one_program_until_it_is_closed(tmp_path: Path) -> None:
    with bench.new_run(tmp_path, "GPU") as run:
        run.save_info(hardware="GPU")
        with pytest.raises(UsageError, match="another program is measuring"):
            bench.find_run(tmp_path, run.directory)
    with bench.find_run(tmp_path, run.directory):
        pass


def test_what_is_stored_says_what_it_is_of(tmp_path: Path) -> None:
    with bench.new_run(tmp_path, "GPU") as run:
        run.begin({"x": "1", "y": "2"}, {"timing": "t"}, "s")
        assert run.done() == {}
        given = [result("x"), result("y")]
        shared = given[0].evaluation.environment
        evaluation = given[1].evaluation.model_copy(update={"environment": shared})
        run.store([given[0], given[1].model_copy(update={"evaluation": evaluation})])
        assert "timing" not in shared.libs, "what flashinfer-bench gave is left alone"
        assert run.info["solutions"] == {"x": "1", "y": "2"}
        stamps = {r.solution: (r.hash, r.settings, r.timing) for r in run.results()}
        assert stamps == {"x": ("1", "s", "t"), "y": ("2", "s", "t")}
        assert {name for _, name in run.done()} == {"x", "y"}


def test_an_impossible_result_is_not_done(tmp_path: Path) -> None:
    with bench.new_run(tmp_path, "GPU") as run:
        run.begin({"x": "1"}, {}, "s")
        run.store([result("x")])
        text = run.traces.read_text()
        assert '"latency_ms":1.0' in text
        run.traces.write_text(text.replace('"latency_ms":1.0', '"latency_ms":0.0'))
        assert run.done() == {}


# --- what a result is of --------------------------------------------------------------------------


def test_every_trace_says_of_which_source_run_and_settings_it_is(h200, tmp_path) -> None:
    assert h200("--workloads", "1", "7") == 0
    traces = traces_of(the_run(tmp_path))
    (x,) = [s for s in h200.solutions if s.name == "x"]
    for trace in traces:
        libs = libs_of(trace)
        assert libs["solution_hash"] == x.hash() and Trace.model_validate(trace).is_successful()
        assert libs["tolerance"] == "rtol 0.2, atol 0.1, matched ratio 0.85"
        assert f"{HARNESS_CLOCK} of 50 calls x 3 trials" in libs["timing"]
        assert libs["run"] == f"{the_run(tmp_path).name}, part 1"
    (settings,) = {libs_of(t)["settings"] for t in traces}
    shutil.rmtree(tmp_path / "traces")
    assert h200("--workloads", "1", "--warmup", "3") == 0
    assert libs_of(traces_of(the_run(tmp_path))[0])["settings"] != settings


def test_resume_does_not_certify_a_source_that_was_never_run(h200, fake, tmp_path) -> None:
    assert h200("--workloads", "1") == 0
    run, (uuid, old) = the_run(tmp_path), fake.instances[-1].ran[0]
    h200.change("x", "def run(): return 'another'\n")
    fake.interrupt_at = 0
    assert h200("--workloads", "1", "--resume") == EXIT_INTERRUPTED
    assert [libs_of(t)["solution_hash"] for t in traces_of(run)] == [solution("x").hash()]
    fake.interrupt_at = None
    assert h200("--workloads", "1", "--resume") == 0
    ((ran, content),) = fake.instances[-1].ran
    assert ran == uuid and "another" in content != old
    hashes = [libs_of(t)["solution_hash"] for t in traces_of(run)]
    assert hashes == [solution("x").hash(), h200.solutions[1].hash()]
    assert info_of(run)["solutions"] == {"x": hashes[1]}


def test_run_json_names_the_sources_that_were_measured_and_no_others(h200, fake, tmp_path) -> None:
    fake.interrupt_at = 0
    assert h200("--workloads", "1", "7") == EXIT_INTERRUPTED
    run = the_run(tmp_path)
    assert not info_of(run).get("solutions")
    fake.interrupt_at = 1
    h200.solutions.append(solution("lost"))
    assert h200("--workloads", "1", "7", "--resume") == EXIT_INTERRUPTED
    assert info_of(run)["solutions"] == {"x": solution("x").hash()}, "lost gave no result"


@pytest.mark.parametrize("key", ["solution_hash", "settings"])
def test_a_trace_of_another_source_or_setting_is_measured_again(
    h200, fake, tmp_path, key: str
) -> None:
    assert h200("--workloads", "1", "7") == 0
    run = the_run(tmp_path)
    first, second = traces_of(run)
    libs_of(first)[key] = "0" * 16
    (run / "traces.jsonl").write_text(json.dumps(first) + "\n" + json.dumps(second) + "\n")
    assert h200("--workloads", "1", "7", "--resume") == 0
    assert [uuid for uuid, _ in fake.instances[-1].ran] == [first["workload"]["uuid"]]


OUT_OF_RANGE = """--rtol=-1 --atol=inf --atol=nan --matched-ratio=1.5 --matched-ratio=0
--iterations=0 --warmup=-1 --trials=0 --timeout=0 --max-tokens=0 --seed=-1 --seed=9e30
"""


@pytest.mark.parametrize("option", OUT_OF_RANGE.split())
def test_options_that_would_measure_nothing_are_refused(monkeypatch, capsys, option: str) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.py", option])
    with pytest.raises(SystemExit) as ended:
        program.parse_arguments()
    name, value = option.split("=")
    assert ended.value.code == EXIT_USAGE
    assert f"argument {name}: {value!r} is no " in capsys.readouterr().err


@pytest.mark.parametrize(("name", "trials"), [("kimi_k2", 3), ("kimi_k2_e384", 1)])
def test_trials(monkeypatch, name: str, trials: int) -> None:
    """Fewer where flashinfer-bench has no memory for more, unless asked for."""
    for options, wanted in ([], trials), (["--trials", "2"], 2):
        monkeypatch.setattr(sys, "argv", ["bench.py", "--definition", name, *options])
        arguments = program.parse_arguments()
        assert bench.configuration(arguments, on_gpu=True).num_trials == wanted


def test_what_the_options_say_is_what_is_run(h200, tmp_path) -> None:
    options = "--iterations 7 --trials 2 --warmup 0 --rtol 0.3 --atol 0.4 --matched-ratio 0.5 "
    options += "--timeout 9 --isolated --seed 3"
    assert h200("--workloads", "1", *options.split()) == 0
    info = info_of(the_run(tmp_path))
    wanted = dict(iterations=7, num_trials=2, warmup_runs=0, rtol=0.3, atol=0.4)
    wanted |= dict(required_matched_ratio=0.5, timeout_seconds=9, use_isolated_runner=True)
    assert {k: info["configuration"][k] for k in wanted} == wanted
    assert info["seed"] == 3 and f"{HARNESS_CLOCK} of 7 calls x 2 trials" in info["timing"]
    (trace,) = traces_of(the_run(tmp_path))
    assert libs_of(trace)["tolerance"] == "rtol 0.3, atol 0.4, matched ratio 0.5"


def test_a_full_disk_costs_no_result_that_was_kept(h200, fake, tmp_path) -> None:
    def fill(call: int) -> None:
        if call == 1:
            kept = (the_run(tmp_path) / "traces.jsonl").stat().st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (kept + 100, before[1]))

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    fake.before_results = staticmethod(fill)
    try:
        with pytest.raises(OSError, match=r"File too large.*traces\.jsonl"):
            h200("--workloads", "1", "7", "14")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    run = the_run(tmp_path)
    assert [t["workload"]["axes"]["seq_len"] for t in traces_of(run)] == [7]
    kept = sorted(p.name for p in run.iterdir() if not p.name.endswith(".lock"))
    assert kept == ["run.json", "traces.jsonl"] and fake.instances[-1].closed
    fake.before_results = staticmethod(lambda call: None)
    assert h200("--workloads", "1", "7", "14", "--resume") == 0
    assert len(traces_of(run)) == 3


# --- other data sets ------------------------------------------------------------------------------


@pytest.fixture
def other_data_set(tmp_path: Path) -> Path:
    """Another data set, with a solution of its own and one that takes our name."""
    root = tmp_path / "official"
    for part in ("definitions", "workloads"):
        shutil.copytree(ROOT / part, root / part)
    theirs = root / "solutions" / "them"
    theirs.mkdir(parents=True)
    for s in (solution("theirs"), solution("theirs_too"), solution("x", "raise SystemExit\n")):
        (theirs / f"{s.name}.json").write_text(s.model_dump_json())
    return root


def tree(root: Path) -> dict[str, tuple[bytes, int]]:
    found = (p for p in sorted(root.rglob("*")) if p.is_file())
    return {str(p): (p.read_bytes(), p.stat().st_mtime_ns) for p in found}


def test_another_data_set_stays_as_it_is(h200, tmp_path, other_data_set, capsys) -> None:
    before = tree(other_data_set)
    arguments = ["--local", str(other_data_set), "--workloads", "1"]
    assert h200(*arguments) == 0
    assert tree(other_data_set) == before
    assert len(traces_of(the_run(tmp_path))) == 1
    assert "the reference of its definition is run" in capsys.readouterr().err
    assert h200(*arguments, "--store-in-dataset") == 0
    (added,) = set(tree(other_data_set)) - set(before)
    (trace,) = (json.loads(line) for line in Path(added).read_text().splitlines())
    assert trace["solution"] == "x" and libs_of(trace)["solution_hash"] == solution("x").hash()


def test_solutions_of_another_data_set_run_only_where_asked_for(
    h200, fake, tmp_path, other_data_set, capsys
) -> None:
    h200.solutions = [solution("x")]
    arguments = ["--local", str(other_data_set), "--workloads", "1", "--no-report"]
    arguments += ["--traces", str(tmp_path / "traces")]

    def ran(*more: str) -> set[str]:
        assert h200.plain(*arguments, *more) == 0
        return {s.name for s in fake.instances[-1].trace_set.solutions[DEFINITION]}

    assert ran() == {"x"}
    assert fake.instances[-1].ran[0][1] == solution("x").sources[0].content, "ours, not theirs"
    err = capsys.readouterr().err
    assert "left out: theirs, theirs_too: code of the data set" in err
    assert "x: the data set's copy differs; the current one is used" in err
    assert ran("--solutions", "*") == {"x"}
    assert ran("--solutions", "x", "theirs") == {"x", "theirs"}
    assert ran("--run-foreign") == {"x", "theirs", "theirs_too"}


def test_a_failure_sets_the_exit_status(h200) -> None:
    assert h200("--workloads", "1", "--solutions", "fails", "x") == EXIT_FAILED
    h200.solutions.append(solution("lost"))
    assert h200("--workloads", "1", "--solutions", "lost", "x") == EXIT_FAILED
