"""How benchmark drives flashinfer-bench, whose Benchmark needs a GPU and is stood in for."""

import json
import logging
from pathlib import Path

import benchmark
import dataset
import flashinfer_bench.bench
import pytest
from common import DEFINITION, ROOT, Progress, UsageError
from flashinfer_bench.bench import BenchmarkConfig
from flashinfer_bench.data import Evaluation, Trace, TraceSet
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

    def __init__(self, trace_set: TraceSet, config: BenchmarkConfig):
        self.trace_set, self.calls, self.closed = trace_set, 0, False
        FakeBenchmark.instances.append(self)

    def run_all(self, dump_traces: bool = True, resume: bool = False) -> TraceSet:
        assert dump_traces is False, "would write into the data set"
        if self.calls == self.interrupt_at:
            raise KeyboardInterrupt
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
