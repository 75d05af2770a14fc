"""`bench` by what it writes, says and ends with, on a small definition. flashinfer-bench's
Benchmark, which needs a GPU, is stood in for, and the emulator where it is not what is tested."""

import functools
import json
import logging
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import small
import small_record
import torch
from flashinfer_bench.bench import BenchmarkConfig
from flashinfer_bench.data import Evaluation, Solution, Trace, TraceSet
from programs import Done, call
from safetensors.torch import save
from small import solution

from scripts.common import machine, packer, program
from scripts.common.definitions import MoeDefinition, find
from scripts.common.program import DEFINITION, ENDING, ROOT
from scripts.measuring import cases, emulate, harness, layers
from scripts.measuring.clock import HARNESS_CLOCK
from scripts.publishing import pages as report
from scripts.publishing import rankings
from scripts.publishing.rows import read_results

DIED = "worker died: out of memory"
LOST = "Baseline handle not found"  # as flashinfer-bench writes it
NO_COMPILER = "it needs a C++17 compiler"
LOAD_WITH_OURS = cases.load_with_ours
SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]


class FakeBenchmark:
    """A stand-in for flashinfer-bench's `Benchmark`, which reads the trace set at run_all.

    A solution's name tells how it ends: `fails`, `lost` (`lost n`: in the n-th call), `silent`,
    `exits`, like a reference, which flashinfer-bench runs in this process, and `ends`, which ends
    the worker process: the second solution after it and later ones fail.
    """

    def __init__(self, bench: "Bench", trace_set: TraceSet, config: BenchmarkConfig):
        self.bench, self.trace_set, self.calls, self.closed = bench, trace_set, 0, False
        self.spawned_with = [signal.getsignal(each) for each in ENDING]
        self.ran: list[tuple[int, str]] = []
        bench.benchmarks.append(self)

    def run_all(self, dump_traces: bool = True, resume: bool = False) -> TraceSet:
        assert dump_traces is False, "would write into the data set"
        self.bench.before_results(self.calls)
        self.calls += 1
        ((trace,),) = self.trace_set.workloads.values()
        traces, shared = [], evaluation("PASSED").environment
        since_end = -math.inf  # solutions since the worker's end
        for s in self.trace_set.solutions[DEFINITION]:
            if s.name == "exits":
                sys.exit(0)
            elif s.name in ("lost", f"lost {self.calls}"):
                logging.getLogger("flashinfer_bench.bench").error(DIED)
            elif s.name != "silent":
                self.ran.append((trace.workload.axes["seq_len"], s.sources[0].content))
                since_end = 0 if s.name == "ends" else since_end + 1
                failed = s.name in ("fails", "ends") or since_end > 1
                result = evaluation("RUNTIME_ERROR" if failed else "PASSED")
                if since_end > 1:
                    result = result.model_copy(update={"log": f"Unexpected error: {LOST}: 1f"})
                result = result.model_copy(update={"environment": shared})
                traces.append(trace.model_copy(update={"solution": s.name, "evaluation": result}))
        assert "timing" not in shared.libs, "what flashinfer-bench gave is left alone"
        return TraceSet(traces={DEFINITION: traces})

    def close(self) -> None:
        self.closed = True


def evaluation(status: str) -> Evaluation:
    trace = small_record.trace("x", 7, 1.0, 5.0, status, hardware="GPU", libs={"torch": "1"})
    return Evaluation.model_validate(trace["evaluation"])


class Bench:
    """Runs `bench` on a small data set. A test may change the attributes before the call."""

    def __init__(self, place: Path):
        self.place, self.root = place / "traces", Path("/nonexistent")
        self.ours, self.theirs = [solution("x")], [solution("theirs")]
        self.reference = small.REFERENCE
        self.set_lengths(1, 7, 14)
        self.asked: list[tuple[str, list[str]]] = []
        self.benchmarks: list[FakeBenchmark] = []
        self.before_results: Callable[[int], object] = lambda call: None
        """Called with the number of a benchmark's call."""

    def set_lengths(self, *lengths: int) -> None:
        self.workloads = small.trace_set(lengths=lengths).workloads[DEFINITION]

    def load(self, root: Path, definition: Any) -> tuple[TraceSet, list[Solution]]:
        trace_set = small.trace_set(self.reference)
        trace_set.root, trace_set.workloads = self.root, {DEFINITION: self.workloads}
        trace_set.solutions[DEFINITION] = [*self.ours, *self.theirs]
        return trace_set, self.ours

    def __call__(self, *arguments: str | Path, status: int = 0) -> Done:
        done = call("bench", "--traces", self.place, "--no-report", *arguments)
        assert done.returncode == status, done.stderr
        return done

    @property
    def run(self) -> Path:
        (run,) = self.place.iterdir()
        return run

    @property
    def traces(self) -> Path:
        return self.run / "traces.jsonl"

    @property
    def info(self) -> dict[str, Any]:
        return json.loads((self.run / "run.json").read_text())

    def results(self) -> list[Any]:
        return list(read_results([self.traces] if self.traces.exists() else []).itertuples())

    def labels(self) -> list[str]:
        """Return the solution and the token count of every result, in order."""
        return [f"{r.solution}{r.tokens}" for r in self.results()]

    def libs(self) -> list[dict[str, str]]:
        return [r.trace["evaluation"]["environment"]["libs"] for r in self.results()]


@pytest.fixture
def on_cpu(monkeypatch, tmp_path: Path) -> Bench:
    """Return a `Bench` for a machine without a GPU and without a compiler for the emulator."""
    bench = Bench(tmp_path)
    monkeypatch.setenv("FIB_CACHE_PATH", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cases, "hardware_from_device", lambda device: "GPU")
    monkeypatch.setattr(cases, "this_machine", lambda gpu: machine.Machine(None, str))
    monkeypatch.setattr(cases, "make_missing_workloads", lambda root, traces: None)
    monkeypatch.setattr(cases, "load_with_ours", bench.load)
    monkeypatch.setattr(emulate, "memory_needed", lambda definition: 0)
    monkeypatch.setattr(emulate, "why_not", lambda: NO_COMPILER)
    monkeypatch.setattr(harness, "add_measurements", lambda *_: pytest.fail("needs a GPU"))
    monkeypatch.setattr(rankings, "recorded_runs", lambda **_: [])
    return bench


@pytest.fixture
def gpu(on_cpu, monkeypatch) -> Iterator[Bench]:
    """Make the machine seem to have an H200, in a program that both signals interrupt."""
    before = [signal.signal(each, program.interrupt) for each in ENDING]
    h200 = machine.Machine((9, 0), machine.installed_version)
    monkeypatch.setattr(program, "interrupted_by", signal.SIGINT)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cases, "this_machine", lambda use_gpu: h200)
    monkeypatch.setattr(harness, "Benchmark", functools.partial(FakeBenchmark, on_cpu))
    monkeypatch.setattr(harness, "add_measurements", lambda *_: None)
    yield on_cpu
    for each, handler in zip(ENDING, before, strict=True):
        signal.signal(each, handler)


def signalled(number: signal.Signals, at: int) -> Callable[[int], object]:
    return lambda call: os.kill(os.getpid(), number) if call == at else None


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


# --- a run on a GPU -------------------------------------------------------------------------------


def test_each_workload_is_kept_at_once_with_what_it_is_of(gpu) -> None:
    labels_before: list[list[str]] = []
    gpu.before_results = lambda _: labels_before.append(gpu.labels())
    done = gpu("--solutions", "x", "--workloads", "1", "7")
    assert labels_before == [[], ["x1"]] and gpu.labels() == ["x1", "x7"]
    (benchmark,) = gpu.benchmarks
    assert benchmark.calls == 2 and benchmark.closed
    for libs in gpu.libs():
        assert libs["solution_hash"] == gpu.ours[0].hash() and libs["torch"] != "1"
        assert libs["tolerance"] == "rtol 0.2, atol 0.1, matched ratio 0.85"
        assert f"{HARNESS_CLOCK} of 50 calls x 3 trials" in libs["timing"]
        assert libs["run"] == f"{gpu.run.name}, part 1"
    info = gpu.info
    assert info["finished"] and info["seconds"] >= 0
    assert info["ended"] >= info["environment"]["time"]
    assert info["peers"] == {"x": False, "theirs": True}
    assert info["solutions"] == {"x": gpu.ours[0].hash()}
    first, second = (line for line in done.stderr.splitlines() if "elapsed" in line)
    assert first == "[1/2] T=1 (uuid-1-0): 1 solutions   elapsed 00:00, remaining ?"
    assert re.match(r"\[2/2\] T=7 \(uuid-7-1\): .*, remaining \d\d:\d\d$", second)
    assert "not run: " not in done.stderr, "they were chosen"
    assert "x: PASSED 5.00x 1.0000 ms" in done.stderr
    assert "2 workloads, 1 solutions" in done.stdout


def test_of_a_large_definition_a_benchmark_serves_one_workload(gpu, monkeypatch) -> None:
    """The earlier benchmark is closed and its memory released before the next one begins."""
    order: list[object] = []
    monkeypatch.setattr(MoeDefinition, "large", True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: order.append("collected"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: order.append("emptied"))
    gpu.before_results = lambda n: order.append((n, [b.closed for b in gpu.benchmarks]))
    gpu("--workloads", "1", "7")
    freed = ["collected", "emptied"]
    assert order == [(0, [False]), *freed, (0, [True, False]), *freed]
    assert gpu.benchmarks[-1].closed and "x 1 trials" in gpu.info["timing"]


@pytest.mark.parametrize(
    ("names", "traces", "errors"),
    [
        (["fails", "x"], ["fails1", "x1", "fails7", "x7"], []),
        (["lost 1", "silent", "x"], ["x1", "lost 17", "x7"],
         [f"T=1 (uuid-1-0): lost 1, silent: {DIED}", "T=7 (uuid-7-1): silent: no result"]),
        (["lost"], [], [f"T=1 (uuid-1-0): lost: {DIED}", f"T=7 (uuid-7-1): lost: {DIED}"]),
        (["exits"], [], [f"{workload}: exits: the reference of {DEFINITION} calls sys.exit(0)"
                         for workload in ("T=1 (uuid-1-0)", "T=7 (uuid-7-1)")]),
    ],
)  # fmt: skip
def test_failed_and_lost_results_have_a_reason_and_status_1(gpu, names, traces, errors) -> None:
    gpu.ours = [solution(name) for name in names]
    logger = logging.getLogger("flashinfer_bench")
    handlers = list(logger.handlers)
    done = gpu("--workloads", "1", "7", status=1)
    assert (gpu.labels(), gpu.info["errors"]) == (traces, errors)
    assert gpu.info.get("solutions", {}).keys() == {r.solution for r in gpu.results()}
    assert all(f"error: {error}\n" in done.stderr for error in errors)
    assert ("nothing was measured" in done.stderr) == (not traces) == ("traces:" not in done.stderr)
    assert logger.handlers == handlers and logger.propagate
    assert gpu.benchmarks[-1].closed


UNREADABLE = {
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
                r"a pointer of git-lfs .*; get it anew \(git lfs pull"),
    "garbage": (b"\xff" * 64, ".*eader.*; get it anew"),
    "shape": (save({"x": torch.zeros(3, small.WIDTH + 1)}),
              "'x' expected .3, 8., got .3, 9.; get it anew"),
    "absent": (None, "No such file.*; get it anew"),
}  # fmt: skip
"""Contents of a workload's tensor file by the workload's name, and the message."""


@pytest.mark.parametrize("cpu", [[], ["--cpu"]], ids=["gpu", "cpu"])
def test_a_workload_that_cannot_be_read_costs_no_other(gpu, tmp_path: Path, cpu) -> None:
    """The workload has no result on a GPU, and failed results on a CPU."""
    gpu.root = tmp_path
    for name, (content, _) in UNREADABLE.items():
        if content:
            (tmp_path / name).write_bytes(content)
        trace = small.json_of(small.workload(3, name))
        trace["workload"]["inputs"]["x"] = dict(type="safetensors", path=name, tensor_key="x")
        gpu.workloads.insert(1, Trace.model_validate(trace))
    stderr = gpu(*cpu, status=1).stderr
    assert [r.uuid for r in gpu.results() if r.passed] == ["uuid-1-0", "uuid-7-1", "uuid-14-2"]
    failed = {r.uuid: r.reason for r in gpu.results() if not r.passed}
    assert failed.keys() == (UNREADABLE.keys() if cpu else set())
    for name, (_, reason) in UNREADABLE.items():
        reason = rf"workload {name}: {tmp_path}/{name}: {reason}"
        assert re.search(reason, stderr) and (not cpu or re.match(reason, failed[name])), reason


def test_a_solution_that_ends_its_worker_costs_no_other(gpu) -> None:
    gpu.ours = [solution(name) for name in ("a", "ends", "b", "c", "d")]
    gpu("--workloads", "1", "7", status=1)
    passed = {(r.solution, r.tokens) for r in gpu.results() if r.passed}
    assert passed == {(name, tokens) for name in "abcd" for tokens in (1, 7)}
    assert len(gpu.results()) == 10, "each pair has one result"
    (benchmark,) = gpu.benchmarks
    assert benchmark.calls == 4


@pytest.mark.parametrize(("number", "status"), SIGNALS)
def test_ctrl_c_keeps_the_workload_under_way_and_resume_goes_on(gpu, number, status: int) -> None:
    """flashinfer-bench evaluates the rest of a workload's solutions before it lets go; what fails
    meanwhile may fail for that."""
    gpu.ours.append(solution("fails"))
    gpu.before_results = signalled(number, at=1)
    done = gpu(status=status)
    assert gpu.labels() == ["x1", "fails1", "x7"] and not gpu.info["finished"]
    assert "finishing this workload" in done.stderr
    assert "\ninterrupted; 3 results are kept\n" in done.stderr
    assert "2 workloads, 2 solutions" in done.stdout
    assert gpu.info["solutions"].keys() == {"x", "fails"}
    (first,) = gpu.benchmarks
    assert first.calls == 2 and first.closed
    assert first.spawned_with == [signal.SIG_IGN, program.interrupt], (
        "the workers must not stop at Ctrl-C; SIGTERM is what ends them"
    )
    assert {signal.getsignal(each) for each in ENDING} == {program.interrupt}

    gpu.before_results = lambda call: None
    done = gpu("--resume", status=1)
    assert gpu.labels()[3:] == ["fails7", "x14", "fails14"] and "2 workloads to run" in done.stderr
    (earlier,) = gpu.info["earlier"]
    assert gpu.info["finished"] and set(earlier) == {"command", "environment", "seconds"}
    assert "--resume" in gpu.info["command"] and "--resume" not in earlier["command"]
    assert gpu.libs()[-1]["run"] == f"{gpu.run.name}, part 2"


def test_ignored_signals_stay_ignored(gpu) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gpu.before_results = signalled(signal.SIGINT, at=0)
    gpu.ours.append(solution("fails"))  # which an interrupted workload would not keep
    gpu("--workloads", "1", "7", status=1)
    assert gpu.labels() == ["x1", "fails1", "x7", "fails7"]
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


@pytest.mark.parametrize(("number", "status"), SIGNALS)
def test_the_second_ctrl_c_ends_the_program_and_its_workers(
    gpu, number, status: int, monkeypatch
) -> None:
    class Left(BaseException):
        pass

    def leave(status: int) -> None:
        raise Left(status)

    worker = subprocess.Popen(["sleep", "60"])
    monkeypatch.setattr(harness.multiprocessing, "active_children", lambda: [worker])
    monkeypatch.setattr(harness.os, "_exit", leave)
    gpu.before_results = lambda call: [os.kill(os.getpid(), number) for _ in range(2)]
    with pytest.raises(Left, match=f"^{status}$"):
        gpu()
    assert worker.wait(timeout=10) != 0 and gpu.labels() == []


# --- what is resumed ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda info: info.update(hardware="GPU B"), "", "hardware 'GPU B' then, 'GPU' now"),
        (lambda info: info["environment"]["versions"].update(torch="1.0"), "", "torch 1.0 then"),
        (lambda info: info["environment"].update(cuda="9.0"), "", "CUDA 9.0 then"),
        (lambda info: info.pop("seed"), "", "seed None then"),
        (lambda info: info.clear(), "", "hardware None then"),
        (lambda info: info.update(environment=5), "", r"run\.json: environment: "),
        (len, "--warmup 3", "configuration"),
        (len, "--cpu --emulate sm_100a", "emulate None then, 'sm_100a' now"),
    ],
)
def test_a_run_of_another_machine_or_setting_is_not_resumed(gpu, change, options, message) -> None:
    gpu("--workloads", "1")
    info = gpu.info
    change(info)
    (gpu.run / "run.json").write_text(json.dumps(info))
    assert re.search(message, gpu("--resume", *options.split(), status=2).stderr)
    assert len(gpu.traces.read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("then", "instead", "lengths"),
    [
        ("", "", []),
        (solution("x").hash(), "0" * 16, [1]),
        ('"latency_ms":1.0', '"latency_ms":0.0', [1]),
    ],
)
def test_resume_measures_what_has_no_result_of_the_present_source(
    gpu, then, instead, lengths
) -> None:
    gpu("--workloads", "1", "7")
    gpu.traces.write_text(gpu.traces.read_text().replace(then, instead, 1))
    gpu("--workloads", "1", "7", "--resume")
    assert [length for length, _ in gpu.benchmarks[-1].ran] == lengths
    own = gpu.ours[0].hash()
    assert gpu.info["solutions"] == {"x": own}
    assert [libs["solution_hash"] for libs in gpu.libs()[2:]] == [own] * len(lengths)


def test_a_changed_source_is_measured_anew_and_named_once_it_was(gpu) -> None:
    gpu("--workloads", "1", "7")
    then, gpu.ours = gpu.ours[0].hash(), [solution("x", small.RIGHT + "# another\n")]
    gpu.before_results = interrupted
    gpu("--workloads", "1", "7", "--resume", status=130)
    assert gpu.labels() == ["x1", "x7"] and gpu.info["solutions"] == {"x": then}
    gpu.before_results = lambda call: None
    gpu("--workloads", "1", "7", "--resume")
    content, now = gpu.ours[0].sources[0].content, gpu.ours[0].hash()
    assert gpu.benchmarks[-1].ran == [(1, content), (7, content)]
    assert gpu.info["solutions"] == {"x": now}
    assert [libs["solution_hash"] for libs in gpu.libs()] == [then, then, now, now]


def test_the_latest_run_or_the_named_one_is_resumed_by_one_program_alone(gpu) -> None:
    assert "no run to resume in" in gpu("--resume", status=2).stderr
    gpu("--workloads", "1")
    first = gpu.run
    shutil.copytree(first, gpu.place / "9")
    for named, place in (([], gpu.place / "9"), ([first], first)):
        done = gpu("--workloads", "1", "--resume", *named)
        assert f"0 workloads to run, results in {place}\n" in done.stderr
    assert "no run to resume in /absent" in gpu("--resume", "/absent", status=2).stderr
    with harness.resumed(first):
        stderr = gpu("--resume", first, status=2).stderr
        assert f"{first}: another program is measuring" in stderr


def test_runs_that_start_at_once_get_a_directory_each(tmp_path: Path) -> None:
    begin = threading.Barrier(16)

    def start(_: int) -> str:
        begin.wait()
        return harness.new_run(tmp_path, "NVIDIA H100 80GB HBM3").directory.name

    with ThreadPoolExecutor(16) as pool:
        names = set(pool.map(start, range(16)))
    assert len(names) == 16 and all("-nvidia-h100-80gb-hbm3" in name for name in names)


def test_a_full_disk_costs_no_result_that_was_kept(gpu) -> None:
    def fill(call: int) -> None:
        if call == 1:
            limit = gpu.traces.stat().st_size + 100
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    gpu.before_results = fill
    try:
        done = gpu(status=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert re.search(r"error: .*traces\.jsonl: File too large", done.stderr)
    files = {p.name for p in gpu.run.iterdir() if p.suffix != ".lock"}
    assert files == {"run.json", "traces.jsonl"}
    assert gpu.labels() == ["x1"] and gpu.benchmarks[-1].closed
    gpu.before_results = lambda call: None
    gpu("--resume")
    assert gpu.labels() == ["x1", "x7", "x14"]


# --- options --------------------------------------------------------------------------------------


OPTIONS = """--iterations 7 --trials 2 --warmup 0 --isolated --timeout 9 --rtol 0.3 --atol 0.4
--matched-ratio 0.5 --seed 3"""


@pytest.mark.parametrize(
    ("options", "configuration"),
    [
        ("", dict(iterations=50, num_trials=3, warmup_runs=10, use_isolated_runner=False)),
        ("--cpu --trials 2", dict(iterations=1, num_trials=1)),
        (OPTIONS, dict(iterations=7, num_trials=2, warmup_runs=0, use_isolated_runner=True,
                       timeout_seconds=9, rtol=0.3, atol=0.4, required_matched_ratio=0.5)),
    ],
)  # fmt: skip
def test_options_set_the_configuration(gpu, options: str, configuration: dict) -> None:
    stderr = gpu("--workloads", "1", *options.split()).stderr
    assert gpu.info["configuration"].items() >= configuration.items()
    (result,), (libs,), cpu = gpu.results(), gpu.libs(), "--cpu" in options
    assert result.cpu == (libs["timing"] == emulate.MODEL) == cpu
    assert (gpu.benchmarks == []) == cpu
    assert ("as asked (--cpu): the solutions run as" in stderr) == cpu
    if options == OPTIONS:
        assert f"{HARNESS_CLOCK} of 7 calls x 2 trials" in libs["timing"]
        assert libs["tolerance"] == "rtol 0.3, atol 0.4, matched ratio 0.5"
        assert gpu.info["seed"] == 3


def test_solutions_for_other_machines_are_left_out_with_the_reason(gpu) -> None:
    for name, spec in {
        "b": {"target_hardware": ["NVIDIA B200", "NVIDIA B300"]},
        "p": {"dependencies": ["torch", "no-such-package==1.5"]},
    }.items():
        fields = solution(name).model_dump()
        gpu.ours.append(Solution.model_validate(fields | {"spec": fields["spec"] | spec}))
    why = "unsupported on sm_90 (needs sm_100/103)"
    missing = "not installed: pip install no-such-package==1.5"
    done = gpu("--workloads", "1", "--solutions", "x", "b", "p")
    assert gpu.labels() == ["x1"] and gpu.info["skipped"] == {"b": why, "p": missing}
    assert all(reason in done.stdout and reason in done.stderr for reason in (why, missing))
    stderr = gpu("--solutions", "b", status=2).stderr
    assert f"no solution can run here:\n  b: {why}\n" in stderr
    assert len(gpu.benchmarks) == 1


def test_passes_and_report_follow_a_run(gpu, monkeypatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(harness, "add_measurements", lambda *_: done.append("passes"))
    monkeypatch.setattr(report, "write", lambda run: done.append("report"))
    arguments = ["--workloads", "1", "--solutions", "x", "--traces", gpu.place]
    result = call("bench", *arguments)
    assert result.returncode == 0 and done == ["passes", "report"]
    assert "left out" not in result.stderr, "nothing is"
    gpu(*arguments)
    assert done == ["passes", "report", "passes"]
    gpu(*arguments, "--only-harness")
    assert len(done) == 3


@pytest.mark.parametrize(
    ("slow", "expected"),
    [([[1], []], ["x1", "x7", "x7"]), ([[0], [0], [0]], ["x1", "x7", "x1", "x1"])],
    ids=["once", "not without end"],
)
def test_workloads_of_a_slow_host_run_again(slow, expected, gpu, monkeypatch) -> None:
    uuids = [trace.workload.uuid for trace in gpu.workloads]
    answers = iter([{uuids[n] for n in places} for places in slow])
    monkeypatch.setattr(harness, "slow_workloads", lambda results: next(answers))
    gpu("--solutions", "x", "--workloads", "1", "7")
    assert gpu.labels() == expected


def test_a_host_is_slow_if_every_solution_waits_for_it() -> None:
    def results(waits: dict[str, list[float]]) -> pd.DataFrame:
        """Each solution's wait, ms, by workload; the slower solution waits less."""
        return pd.DataFrame(
            {"uuid": f"w{n}", "solution": name, "passed": True, "device": 1.0, "harness": 1.0 + ms}
            for name, each in waits.items()
            for n, ms in enumerate(each)
        )

    quiet, slow = [0.03, 0.03, 0.03], [0.03, 0.03, 0.045]
    assert harness.slow_workloads(results({"x": slow, "y": [ms / 2 for ms in quiet]})) == set()
    both = results({"x": slow, "y": [0.0, 0.0, 0.011]})
    assert harness.slow_workloads(both) == {"w2"}
    again = pd.concat([both, results({"x": quiet, "y": [0.0] * 3})])
    assert harness.slow_workloads(again) == set(), "of repeated results the last counts"
    failed = both.assign(device=both.device.where(both.uuid != "w2"))
    assert harness.slow_workloads(failed) == set(), "without a device time nothing is known"


@pytest.mark.parametrize("foreign", [False, True])
def test_the_passes_have_the_options_of_the_run(foreign, monkeypatch, tmp_path, capsys) -> None:
    """The first pass succeeds, the others fail."""
    commands: list[list[str]] = []

    def run(command: list[str], stdout: int) -> subprocess.CompletedProcess[str]:
        assert command[1:3] == ["-m", "scripts.measure"] and stdout == subprocess.DEVNULL
        commands.append(command[3:])
        return subprocess.CompletedProcess(command, len(commands) - 1)

    monkeypatch.setattr(harness.subprocess, "run", run)
    definition, names = find("kimi_k2"), ("roofline", "times", "bits")
    args = types.SimpleNamespace(local=ROOT, seed=7, definition=definition)
    with harness.new_run(tmp_path, "GPU") as new_run:
        harness.add_measurements(new_run, args, foreign)
    options = f"--local {ROOT} --run {new_run.directory} --seed 7".split()
    options += ["--definition", definition.name]
    foreigns = [["--run-foreign"] * (foreign and name != "roofline") for name in names]
    assert commands == [[n, *options, *more] for n, more in zip(names, foreigns, strict=True)]
    assert capsys.readouterr().err.splitlines() == [
        f"measure {command[0]} failed; its figures are incomplete: run.py measure "
        + " ".join(command)
        for command in commands[1:]
    ]


# --- other data sets ------------------------------------------------------------------------------


def test_another_data_set_stays_as_it_is_and_its_solutions_run_only_where_asked_for(
    gpu, tmp_path, monkeypatch
) -> None:
    """One of its solutions has the name of ours; two of its files cannot be read."""
    root = tmp_path / "official"
    for part in ("definitions", "workloads"):
        shutil.copytree(ROOT / part, root / part)
    (root / "solutions" / "folder.json").mkdir(parents=True)
    (root / "solutions" / "gone.json").symlink_to(root / "absent")
    for s in (solution("theirs"), solution("theirs_too"), solution("x", "raise SystemExit\n")):
        (root / "solutions" / f"{s.name}.json").write_text(s.model_dump_json())
    monkeypatch.setattr(cases, "load_with_ours", LOAD_WITH_OURS)
    monkeypatch.setattr(packer, "write_packed", lambda **_: [])
    monkeypatch.setattr(cases, "packed_solutions", lambda packed: gpu.ours)
    monkeypatch.setattr(harness, "load_tensors", lambda *_: None)

    def files() -> dict[Path, tuple[bytes, int]]:
        paths = (p for p in root.rglob("*") if p.is_file())
        return {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in paths}

    def ran(*more: str) -> tuple[set[str], str]:
        done = gpu("--local", root, "--workloads", "1", *more)
        solutions = gpu.benchmarks[-1].trace_set.solutions[DEFINITION]
        return {s.name for s in solutions}, done.stderr

    before = files()
    names, stderr = ran()
    assert names == {"x"}
    assert gpu.benchmarks[-1].ran[0][1] == gpu.ours[0].sources[0].content
    assert gpu.libs()[0]["solution_hash"] == gpu.ours[0].hash()
    for line in (
        f"{root}: the reference of its definition is run",
        "left out: theirs, theirs_too: code of the data set",
        "x: the data set's copy differs; the current one is used",
        f"passed over: {root}/solutions/gone.json: No such file or directory",
        f"passed over: {root}/solutions/folder.json: Is a directory",
    ):
        assert line in stderr
    assert ran("--solutions", "*")[0] == {"x"}
    assert ran("--solutions", "x", "theirs")[0] == {"x", "theirs"}
    assert ran("--run-foreign")[0] == {"x", "theirs", "theirs_too"}
    assert files() == before


# --- a run on the CPU -----------------------------------------------------------------------------


def test_without_a_gpu_the_small_workloads_run_on_the_cpu(on_cpu) -> None:
    """The peers of this checkout need a GPU; no line says that they are skipped."""
    peer = solution("peer").model_dump()
    peer["sources"].append({"path": "moe_fp8/baselines/peer.py", "content": "pass"})
    on_cpu.ours.append(Solution.model_validate(peer))
    on_cpu.theirs = []
    on_cpu.set_lengths(1, 16, 17)
    stderr = on_cpu().stderr
    assert on_cpu.labels() == ["x1", "x16"] and on_cpu.info["skipped"] == {}
    assert (
        "not run: 1 workloads (T=17)" in stderr
        and "\n        T=1 x: PASSED, reference model\n" in stderr
    )
    assert "no GPU is visible: the solutions run as their reference model on the CPU" in stderr
    assert "[1/2] T=1 (uuid-1-0): the reference, then 1 models   elapsed" in stderr
    for result in on_cpu.results():
        evaluation = result.trace["evaluation"]
        libs, extra = evaluation["environment"]["libs"], evaluation["correctness"]["extra"]
        assert libs["device"] == "cpu" and int(libs["threads"]) >= 1
        assert extra["matched_ratio"] == 1.0 and extra["cosine"] > 0.9999 and extra["seed"] == 2026
        assert set(extra["matched_ratios"]) == {"0.2/0.1", "0.3/1", "0.01/0.01"}
    shutil.rmtree(on_cpu.place)
    on_cpu("--workloads", "17")
    assert on_cpu.labels() == ["x17"]


EXITS = "import sys; sys.exit(0)"
NOT_FINITE = "NaN or infinite values in the output"
OFF = small.RIGHT + "    output[:1] *= 2\n"


def returning(value: str) -> str:
    return f"import torch\n\ndef run(x, w, factor):\n    return {value}\n"


CONTENTS = {
    "right": (small.RIGHT, "PASSED", ""),
    "raises": ("def run(x, w, factor, output): raise KeyError('a')\n", "RUNTIME_ERROR",
               "KeyError: 'a'"),
    "exits": (small.RIGHT + f"    {EXITS}\n", "RUNTIME_ERROR", "SystemExit: 0"),
    "import exits": (EXITS + small.RIGHT, "COMPILE_ERROR", "SystemExit: 0"),
    "import fails": ("raise ImportError('no')\n", "COMPILE_ERROR", "Failed importing module"),
    "changes x": (small.RIGHT + "    x.zero_()\n", "RUNTIME_ERROR",
                  "the solution changes its inputs: x"),
    "changes both": (small.RIGHT + "    x[0, 0] += 1; w.mul_(2)\n", "RUNTIME_ERROR",
                     "the solution changes its inputs: x, w"),
    "resizes w": (small.RIGHT + "    w.resize_(2, 2)\n", "RUNTIME_ERROR",
                  "the solution changes its inputs: w"),
    "nan": (small.RIGHT + "    output[-1, -1] = float('nan')\n", "INCORRECT_NUMERICAL", NOT_FINITE),
    "inf": (small.RIGHT + "    output[-1, -1] = float('inf')\n", "INCORRECT_NUMERICAL", NOT_FINITE),
    "writes nothing": ("def run(x, w, factor, output): pass\n", "INCORRECT_NUMERICAL", NOT_FINITE),
    "off": (OFF, "INCORRECT_NUMERICAL", "matched ratio 0.6667 is too low"),
    # 23 % off the reference, which would be 19 % of its own values.
    "1.23 times": (small.RIGHT.replace("* factor", "* factor * 1.23"), "INCORRECT_NUMERICAL",
                   "matched ratio 0.0"),
    "shape": (returning("torch.zeros(1, 2, dtype=torch.bfloat16)"), "INCORRECT_SHAPE", ""),
    "dtype": (returning("x @ w.float() * factor"), "INCORRECT_DTYPE", ""),
    "returns": (returning("(x @ w.float() * factor).to(torch.bfloat16)"), "PASSED", ""),
}  # fmt: skip


def test_a_failing_solution_has_its_reason_and_harms_no_other(on_cpu, monkeypatch) -> None:
    """Outputs are allocated with the right values in them, as an earlier call may leave them."""

    def allocated(definition, inputs, device):
        x, w, factor = inputs
        return [(x.float() @ w.float() * factor).to(torch.bfloat16)]

    monkeypatch.setattr(layers, "allocate_outputs", allocated)
    on_cpu.workloads = [small.workload(3, "a")]
    on_cpu.ours = [
        solution(name, content, dps="return" not in content)
        for name, (content, *_) in CONTENTS.items()
    ]
    done = on_cpu("--atol", "0.001", status=1)
    rows = {r.solution: r for r in on_cpu.results()}
    assert list(rows) == list(CONTENTS)
    for name, (_, status, reason) in CONTENTS.items():
        assert (rows[name].status, reason in rows[name].reason) == (status, True), rows[name]
        assert "changes its inputs" not in reason or rows[name].reason == reason
    assert re.search(r"nan +3 +a +INCORRECT_NUMERICAL +NaN or infinite", done.stdout)
    on_cpu("--solutions", "off", "--matched-ratio", "0.6")


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        (small.REFERENCE.replace("    return", f"    {EXITS}\n    return"), "SystemExit: 0"),
        (EXITS + small.REFERENCE, "SystemExit: 0"),
        (small.REFERENCE.replace("return", "return x.absent or"), "AttributeError: 'Tensor'"),
    ],
)
def test_a_reference_that_exits_or_fails_is_said_of_every_result(on_cpu, reference, reason) -> None:
    on_cpu.reference = reference
    on_cpu("--workloads", "1", "7", status=1)
    assert [r.status for r in on_cpu.results()] == ["RUNTIME_ERROR"] * 2
    message = f"the reference of {DEFINITION} fails: {reason}"
    assert all(r.reason.startswith(message) for r in on_cpu.results())


def test_the_speedup_is_the_references_time_over_the_solutions(on_cpu, monkeypatch) -> None:
    clock = types.SimpleNamespace(now=100.0)
    monkeypatch.setattr(emulate.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr("builtins.CLOCK", clock, raising=False)
    on_cpu.reference = small.REFERENCE.replace("return", "CLOCK.now += 0.25\n    return")
    on_cpu.reference += "\nCLOCK.now += 8.0  # to build it takes long, and does not count\n"
    on_cpu.ours = [solution("x", small.RIGHT + "    CLOCK.now += 0.0625\n")]
    on_cpu("--workloads", "1")
    (result,) = on_cpu.results()
    wanted = {"reference_latency_ms": 250.0, "latency_ms": 62.5, "speedup_factor": 4.0}
    assert result.trace["evaluation"]["performance"] == wanted


def test_every_solution_has_its_own_copies_and_every_workload_its_own_tokens(
    on_cpu, monkeypatch
) -> None:
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    tensors: list[torch.Tensor] = []

    def see(x: torch.Tensor, w: torch.Tensor) -> None:
        assert x.data_ptr() not in {each.data_ptr() for each in tensors}
        seen.append((x.clone(), w.clone()))
        tensors.append(x)

    monkeypatch.setattr("builtins.SEE", see, raising=False)
    content = small.RIGHT + "    SEE(x, w)\n"
    on_cpu.ours = [solution("a", content), solution("b", content)]
    on_cpu.set_lengths(3, 3)
    on_cpu()
    (a, w), (b, _), (c, w_of_c), _ = seen
    assert torch.equal(a, b) and not torch.equal(a, c) and torch.equal(w, w_of_c)
    on_cpu("--seed", "6")
    assert not torch.equal(a, seen[4][0]) and not torch.equal(w, seen[4][1])


def test_an_interrupted_workload_keeps_what_it_has(on_cpu) -> None:
    on_cpu.ours.append(solution("stops", "def run(*a): raise KeyboardInterrupt\n"))
    done = on_cpu(status=130)
    assert on_cpu.labels() == ["x1"] and "\ninterrupted; 1 results are kept\n" in done.stderr
    on_cpu("--solutions", "stops", "--resume", status=130)
    assert on_cpu.labels() == ["x1"], "nothing is no result"


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [  # GB: peaks of runs of 16 tokens; of the third, which no machine could run, the weights
        (DEFINITION, 3.6, 7),
        ("kimi_k2", 4.7, 8),
        ("kimi_k2_e384", 28.2, 40),
        ("qwen3_30b", 1.6, 5),
    ],
)
def test_the_memory_asked_for_is_what_the_definition_needs(name, least, most) -> None:
    trace_set, _ = cases.load(ROOT, find(name))
    assert least < emulate.memory_needed(cases.definition_of(trace_set)) / 1e9 < most


def test_too_little_memory_is_said_before_anything_runs(on_cpu, monkeypatch) -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert total / 1000 < emulate.available_memory() < total
    monkeypatch.setattr(emulate, "memory_needed", lambda definition: 10 * 2**30)
    monkeypatch.setattr(emulate, "available_memory", lambda: 2**30)
    stderr = on_cpu(status=2).stderr
    assert "needs about 10 GiB of memory and 1.0 GiB are available" in stderr
    assert on_cpu.results() == []
    monkeypatch.setattr(emulate, "available_memory", lambda: math.inf)
    on_cpu("--resume")


# --- by emulated kernels --------------------------------------------------------------------------


@pytest.fixture
def by_kernels(on_cpu, monkeypatch) -> Bench:
    """Runs with a stand-in for the emulator: `asked` holds the target and the solution of every
    evaluation, and the solution `wrong` fails."""

    class Kernels(emulate.Kernels):
        def _start(self) -> None: ...

        def _submit(self, case, config, s, model) -> Future:
            on_cpu.asked.append((self.emulation.target, s.name))
            fields, _ = emulate.evaluate(case, config, s)
            wrong = {"status": "RUNTIME_ERROR", "log": "EmulationError: hazards reported: x"}
            future: Future = Future()
            future.set_result(wrong if s.name == "wrong" else fields | {"performance": {}})
            return future

    monkeypatch.setattr(emulate, "Kernels", Kernels)
    monkeypatch.setattr(emulate, "why_not", lambda: "")
    on_cpu.ours = [solution("a"), solution("b")]
    on_cpu.set_lengths(7, 9)
    return on_cpu


def targets(bench: Bench) -> list[tuple[str, str]]:
    return [(f"{r.solution}{r.tokens}", r.emulated) for r in bench.results()]


def test_ours_run_by_their_kernels_once_the_model_is_right(by_kernels) -> None:
    """Foreign solutions do not run: they need a GPU."""
    by_kernels.ours += [solution("wrong"), solution("off", OFF.replace("[:1]", ""))]
    done = by_kernels("--run-foreign", status=1)
    assert by_kernels.asked == [("sm_90a", name) for name in ("a", "b", "wrong")]
    assert "up to T=7 also by the kernels for sm_90a" in done.stderr
    notes = [line.strip() for line in done.stderr.splitlines() if line.startswith("     ")]
    assert notes[:6] == [
        *(
            f"T=7 {name}: PASSED, {what}"
            for name in "ab"
            for what in ("reference model", "kernels")
        ),
        "T=7 wrong: PASSED, reference model",
        "T=7 wrong: RUNTIME_ERROR, kernels",
    ]
    assert "\nemulated kernels 0/4   elapsed 00:00, remaining ?\n" in done.stderr
    first, larger = by_kernels.results()[:4], by_kernels.results()[4:]
    outcomes = {r.solution: (r.status, r.emulated, pd.isna(r.harness)) for r in first}
    assert outcomes["a"] == outcomes["b"] == ("PASSED", "sm_90a", True)
    assert outcomes["wrong"] == ("RUNTIME_ERROR", "sm_90a", True)
    assert outcomes["off"] == ("INCORRECT_NUMERICAL", "", True)
    assert not any(r.emulated for r in larger) and len(larger) == 4
    assert by_kernels.libs()[0]["timing"] == "kernels, sm_90a, emulated"
    assert {r.timing for r in larger} == {emulate.MODEL} and first[0].cpu


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ("--emulate sm_100a --workloads 9", [("sm_100a", "a"), ("sm_100a", "b")]),
        ("--max-tokens 100", [("sm_90a", "a"), ("sm_90a", "b")] * 2),
        ("--emulate none", []),
    ],
)
def test_the_options_choose_what_is_emulated(by_kernels, monkeypatch, options, asked) -> None:
    """Emulate nothing if the emulator cannot be built, and say why in a line."""
    by_kernels.set_lengths(7, 9, 81)
    by_kernels(*options.split())
    assert by_kernels.asked == asked
    shutil.rmtree(by_kernels.place)
    monkeypatch.setattr(emulate, "why_not", lambda: NO_COMPILER)
    stderr = by_kernels(*options.split()).stderr
    assert by_kernels.asked == asked
    assert (f"no kernel is emulated: {NO_COMPILER}\n" in stderr) == bool(asked)


def test_resume_makes_up_the_kernels_that_have_not_run(by_kernels, monkeypatch) -> None:
    """Solutions lack an emulated result after an interrupt, without a compiler, or if fewer tokens
    were asked for. No result of the model takes its place."""

    def the_first_alone(self, case, config, s, model) -> Future:
        return every(self, case, config, s, model) if s.name == "a" else Future()

    def wait(futures, timeout, return_when):
        if timeout is None:
            raise KeyboardInterrupt
        return real_wait(futures, timeout, return_when)

    every, real_wait = emulate.Kernels._submit, emulate.wait
    with monkeypatch.context() as here:
        here.setattr(emulate, "wait", wait)
        here.setattr(emulate.Kernels, "_submit", the_first_alone)
        by_kernels(status=130)
    assert targets(by_kernels) == [("a7", "sm_90a"), ("a9", ""), ("b9", "")]
    with monkeypatch.context() as here:
        here.setattr(emulate, "why_not", lambda: NO_COMPILER)
        by_kernels("--resume")
    assert targets(by_kernels)[3:] == [("b7", "")]
    for _ in range(2):  # the second time nothing is left
        by_kernels("--resume")
        assert targets(by_kernels)[4:] == [("b7", "sm_90a")]
    by_kernels("--resume", "--workloads", "9")
    assert targets(by_kernels)[5:] == [("a9", "sm_90a"), ("b9", "sm_90a")]
