"""How benchmark drives flashinfer-bench, whose Benchmark needs a GPU and is stood in for."""

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path

import availability
import benchmark
import dataset
import flashinfer_bench.bench
import pytest
from common import DEFINITION, EXIT_INTERRUPTED, ROOT, Progress, UsageError
from flashinfer_bench.bench import BenchmarkConfig
from flashinfer_bench.data import Evaluation, Solution, Trace, TraceSet
from test_dataset import solution


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
    spawned_with: list[object]

    def __init__(self, trace_set: TraceSet, config: BenchmarkConfig):
        self.trace_set, self.calls, self.closed = trace_set, 0, False
        self.log_dir = Path(config.log_dir)
        self.spawned_with = [signal.getsignal(signal.SIGINT)]
        FakeBenchmark.instances.append(self)

    def run_all(self, dump_traces: bool = True, resume: bool = False) -> TraceSet:
        assert dump_traces is False, "would write into the data set"
        if self.calls == self.interrupt_at:
            raise KeyboardInterrupt
        if self.calls == self.signal_at:
            os.kill(os.getpid(), signal.SIGINT)
        self.calls += 1
        (workload,) = self.trace_set.workloads[DEFINITION]
        traces = []
        for s in self.trace_set.solutions[DEFINITION]:
            if s.name == "lost":
                logging.getLogger("flashinfer_bench.bench").error("worker died: out of memory")
                continue
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
def fake(monkeypatch) -> type[FakeBenchmark]:
    monkeypatch.setattr(FakeBenchmark, "instances", [])
    monkeypatch.setattr(FakeBenchmark, "interrupt_at", None)
    monkeypatch.setattr(FakeBenchmark, "signal_at", None)
    monkeypatch.setattr(flashinfer_bench.bench, "Benchmark", FakeBenchmark)
    return FakeBenchmark


def drive(names: list[str], stored: list[list[Trace]]) -> list[str]:
    trace_set, _ = dataset.load(ROOT)
    workloads = dataset.select_workloads(trace_set.workloads[DEFINITION], ["1", "7"])
    solutions = [solution(n) for n in names]
    pairs = [(t, solutions) for t in workloads]
    progress = Progress(len(pairs), quiet=True)
    config, libs = BenchmarkConfig(), {"timing": "test"}
    return benchmark.run_on_gpu(trace_set, pairs, config, libs, stored.append, progress)


def test_one_benchmark_serves_all_workloads_and_each_is_stored_at_once(fake) -> None:
    stored: list[list[Trace]] = []
    assert drive(["x", "fails"], stored) == []
    (instance,) = fake.instances
    assert instance.calls == 2 and instance.closed
    assert [[t.solution for t in traces] for traces in stored] == [["x", "fails"]] * 2
    assert {t.workload.axes["seq_len"] for traces in stored for t in traces} == {1, 7}
    libs = stored[0][0].evaluation.environment.libs
    assert libs == {"torch": "1", "timing": "test"}


def test_a_result_that_never_came_is_an_error_with_its_reason(fake) -> None:
    errors = drive(["x", "lost"], [])
    assert len(errors) == 2
    assert "lost" in errors[0] and "out of memory" in errors[0]


def test_an_interrupt_keeps_what_was_stored_and_closes_the_workers(fake) -> None:
    fake.interrupt_at = 1
    stored: list[list[Trace]] = []
    with pytest.raises(KeyboardInterrupt):
        drive(["x"], stored)
    assert len(stored) == 1 and fake.instances[0].closed


def test_resume_skips_only_results_of_the_same_sources(tmp_path: Path) -> None:
    run = benchmark.new_run(tmp_path, "NVIDIA H100 80GB HBM3")
    assert run.directory.name.endswith("-nvidia-h100-80gb-hbm3")
    run.save_info(solutions={"same": "1", "changed": "1"})
    trace_set, _ = dataset.load(ROOT)
    workload = trace_set.workloads[DEFINITION][0].workload
    with run.traces.open("w") as file:
        for name in ("same", "changed"):
            trace = Trace(
                definition=DEFINITION, workload=workload, solution=name, evaluation=evaluation()
            )
            file.write(trace.model_dump_json() + "\n")
    found = benchmark.find_run(tmp_path, None)
    assert found.directory == run.directory
    assert found.done({"same": "1", "changed": "2"}) == {(workload.uuid, "same")}
    assert benchmark.new_run(tmp_path, "NVIDIA H100 80GB HBM3").directory != run.directory
    with pytest.raises(UsageError, match="no run to resume"):
        benchmark.find_run(tmp_path / "absent", None)


def test_accuracy_figures_are_merged_into_the_traces(tmp_path: Path) -> None:
    import accuracy

    trace_set, _ = dataset.load(ROOT)
    workload = trace_set.workloads[DEFINITION][0].workload
    path = tmp_path / "traces.jsonl"
    lines = []
    for name, status in (("good", "PASSED"), ("bad", "RUNTIME_ERROR")):
        trace = Trace(
            definition=DEFINITION,
            workload=workload,
            solution=name,
            evaluation=evaluation(status),
        )
        lines.append(trace.model_dump_json())
    path.write_text("\n".join(lines) + "\n")
    assert accuracy.passed_pairs(path) == {(workload.uuid, "good")}
    results = {(workload.uuid, n): {"cosine": 0.5, "seed": 1} for n in ("good", "bad")}
    assert accuracy.merge_into_traces(path, results) == 1
    good, bad = (json.loads(line) for line in path.read_text().splitlines())
    assert good["evaluation"]["correctness"]["extra"] == {"cosine": 0.5, "seed": 1}
    assert bad["evaluation"]["correctness"] is None
    assert Trace.model_validate(good).is_successful()


def test_ctrl_c_finishes_and_keeps_the_workload_under_way(fake, capfd) -> None:
    """flashinfer-bench evaluates the rest of a workload's solutions before it lets go."""
    before = signal.getsignal(signal.SIGINT)
    fake.signal_at = 0
    stored: list[list[Trace]] = []
    with pytest.raises(KeyboardInterrupt):
        drive(["x", "y", "fails"], stored)
    (instance,) = fake.instances
    assert instance.calls == 1 and instance.closed
    assert [[t.solution for t in traces] for traces in stored] == [["x", "y"]]
    assert "finishing this workload" in capfd.readouterr().err
    assert instance.spawned_with == [signal.SIG_IGN], "the workers must not stop at Ctrl-C"
    assert signal.getsignal(signal.SIGINT) == before


def test_a_solution_is_announced_when_its_worker_opens_the_log(tmp_path: Path, capfd) -> None:
    (tmp_path / f"old_{time.time() - 60}.log").touch()
    with benchmark.announce(tmp_path, ["old", "my_x", "y"], Progress(1)):
        (tmp_path / f"my_x_{time.time()}.log").touch()
        (tmp_path / f"other_{time.time()}.log").touch()
        deadline = time.monotonic() + 10
        said = ""
        while "running" not in said and time.monotonic() < deadline:
            time.sleep(0.05)
            said += capfd.readouterr().err
    said += capfd.readouterr().err
    assert "running my_x (1 of 3), elapsed" in said
    assert "old" not in said and "other" not in said


# --- the whole program, on a machine that seems to have an H200 -----------------------------------


def blackwell_only(name: str) -> Solution:
    made = solution(name).model_dump()
    made["spec"] |= {"target_hardware": ["NVIDIA B200", "NVIDIA B300"]}
    return Solution.model_validate(made)


def needs_package(name: str) -> Solution:
    made = solution(name).model_dump()
    made["spec"] |= {"dependencies": ["torch", "no-such-package==1.5"]}
    return Solution.model_validate(made)


@pytest.fixture
def h200(fake, monkeypatch, tmp_path: Path):
    """Runs the program with these arguments; the GPU, its Benchmark and the solutions are fakes."""
    import flashinfer_bench.utils
    import torch

    machine = availability.Machine((9, 0), availability.installed_version)
    made = [solution("fails"), solution("x"), blackwell_only("b"), needs_package("p")]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(flashinfer_bench.utils, "hardware_from_device", lambda device: "GPU")
    monkeypatch.setattr(benchmark, "this_machine", lambda use_gpu: machine)
    monkeypatch.setattr(benchmark, "write_packed", lambda: [])
    monkeypatch.setattr(benchmark, "packed_solutions", lambda packed: made)
    monkeypatch.setattr(benchmark, "make_missing_workloads", lambda root, traces: None)
    monkeypatch.setattr(benchmark, "add_measurements", lambda run, args: None)

    def run(*arguments: str) -> int:
        options = ["--traces", str(tmp_path / "traces"), "--no-report"]
        if "--solutions" not in arguments:
            options += ["--solutions", *(s.name for s in made if s.name != "fails")]
        monkeypatch.setattr(sys, "argv", ["benchmark.py", *options, *arguments])
        return benchmark.main()

    return run


def the_run(tmp_path: Path) -> Path:
    (run,) = (tmp_path / "traces").iterdir()
    return run


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


def test_only_solutions_that_cannot_run_are_a_usage_error(h200) -> None:
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda info: info.update(hardware="GPU B"), "hardware 'GPU B' then, 'GPU' now"),
        (lambda info: info["environment"]["versions"].update(torch="1.0"), "torch 1.0 then"),
        (lambda info: info["environment"].update(cuda="9.0"), "CUDA 9.0 then"),
        (lambda info: info["configuration"].update(iterations=7), "configuration"),
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
