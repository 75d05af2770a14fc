"""The per-stage timing: every stage and the whole call, in turns, and wrong outputs are noticed."""

import sys
import time
from types import SimpleNamespace

import pytest
import torch
from fake_cuda import Kernel
from moe_fp8.layer.metrics import calc_diff

from scripts.common import schemas
from scripts.common.definitions import DEFAULT
from scripts.common.project import ROOT
from scripts.measure import stages
from scripts.pack import sources
from scripts.programs import profile as program

OUTPUT = torch.zeros(4, 8, dtype=torch.bfloat16)


class Layer:
    """Takes a known time in each stage and writes a known value."""

    def __init__(self, value: float, milliseconds: float, calls: list | None = None):
        self.value, self.milliseconds = value, milliseconds
        self.calls = calls if calls is not None else []

    def __call__(self, inputs, output, mark=lambda stage: None) -> None:
        self.calls.append(self.value)
        for i, stage in enumerate(stages.STAGES):
            time.sleep(self.milliseconds * (2 if i == 1 else 1) / 1e3)
            mark(stage)
        output.fill_(self.value)


def test_stages_add_up_and_each_has_its_own_time(monkeypatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: sum(clock))
    monkeypatch.setattr(time, "sleep", clock.append)
    samples = stages.time_layers({"x": Layer(1.0, 4.0)}, None, OUTPUT, iterations=5)
    wanted = {stage: 8.0 if stage == "gemm1" else 4.0 for stage in stages.STAGES}
    wanted[stages.TOTAL] = sum(wanted.values())
    assert list(samples["x"]) == list(wanted)
    for stage, values in samples["x"].items():
        assert values == pytest.approx([wanted[stage]] * 5)


def test_on_a_gpu_a_call_begins_idle_and_cold_and_has_an_event_after_each_stage(cuda) -> None:
    kernel = Kernel(cuda, "stage")

    def layer(inputs, output, mark=lambda stage: None) -> None:
        for stage in stages.STAGES:
            kernel()
            mark(stage)

    output = SimpleNamespace(device=torch.device("cuda"))
    found = stages.time_layers({"x": layer}, None, output, iterations=1)
    begin, count = ["flush", "wait", "event"], len(stages.STAGES)
    marked = [*begin, *["stage", "event"] * count, "wait"]
    warm = stages.WARMUP * count
    assert cuda.log[warm:] == [*marked, *begin, *["stage"] * count, "event", "wait"]
    times = dict(zip(stages.STAGES, kernel.took[warm : warm + count], strict=True))
    times[stages.TOTAL] = sum(kernel.took[-count:])
    assert {stage: ms for stage, (ms,) in found["x"].items()} == pytest.approx(times)


def test_a_stage_of_several_chunks_is_their_sum(cuda) -> None:
    kernel = Kernel(cuda, "chunk")

    def layer(inputs, output, mark=lambda stage: None) -> None:
        for stage in ("gemm1", "gemm2", "gemm1"):
            kernel()
            mark(stage)

    output = SimpleNamespace(device=torch.device("cuda"))
    found = stages.time_layers({"x": layer}, None, output, iterations=1)
    warm = 3 * stages.WARMUP
    first, second, third = kernel.took[warm : warm + 3]
    assert found["x"]["gemm1"] == pytest.approx([first + third])
    assert found["x"]["gemm2"] == pytest.approx([second])


def test_layers_take_turns() -> None:
    calls: list[float] = []
    layers = {"a": Layer(1.0, 0, calls), "b": Layer(2.0, 0, calls)}
    stages.time_layers(layers, None, OUTPUT, iterations=3)
    assert calls[2 * stages.WARMUP :] == [1.0, 1.0, 2.0, 2.0] * 3


def test_outputs_are_compared_with_the_first() -> None:
    layers = {"a": Layer(1.0, 0), "same": Layer(1.0, 0), "half": Layer(0.5, 0)}
    layers["nan"] = Layer(float("nan"), 0)
    layers["again"], layers["nothing"] = Layer(1.0, 0), lambda inputs, output: None
    said = stages.compare_outputs(layers, None, OUTPUT.clone())
    difference = calc_diff(torch.full((4, 8), 0.5), torch.ones(4, 8))
    assert said == {
        "a": "first",
        "same": "bitwise equal to the first",
        "half": f"calc_diff {difference:.1e} to the first",
        "nan": "not finite",
        "again": "bitwise equal to the first",
        "nothing": "not finite",
    }


def test_table_shows_the_ratio_to_the_first_solution() -> None:
    def solution(factor: float, *extra: str) -> dict:
        return {"median_ms": {s: factor for s in (*stages.STAGES, *extra, stages.TOTAL)}}

    frame = stages.table({"solutions": {"a": solution(2.0), "b": solution(0.5, "fused")}})
    rows = frame.values.tolist()
    assert list(frame) == ["stage", "a", "b", "b vs first"]
    assert rows[0] == ["routing", "2.0000", "0.5000", "4.00x"]
    assert rows[-2] == ["fused", "-", "0.5000", "-"]
    assert rows[-1][0] == stages.TOTAL


@pytest.mark.all
def test_layers_are_those_of_the_generations() -> None:
    layers = stages.load_layers(["cutedsl_moe_fp8_v2"])
    assert list(layers) == ["cutedsl_moe_fp8_v2"]
    assert set(stages.load_layers([])) >= {"cutedsl_moe_fp8_v1", "cutedsl_moe_fp8_v2"}
    without_gpu = stages.load_layers([], use_gpu=False)
    assert all(name.startswith("cutedsl_moe_fp8_") for name in without_gpu), "peers need a GPU"


def test_the_record_names_the_sources_that_were_timed(monkeypatch, tmp_path) -> None:
    def problem(self, length: int):
        inputs = type("Inputs", (), {"hidden_states": torch.zeros(length, 8)})()
        return inputs, "drawn"

    monkeypatch.setattr(stages, "load_layers", lambda names, use_gpu: {"triton_moe": Layer(1.0, 0)})
    monkeypatch.setattr(stages.Problems, "__init__", lambda self, *arguments: None)
    monkeypatch.setattr(stages.Problems, "of", problem)
    out = tmp_path / "stages.json"
    arguments = ["--stages", "--cpu", "--tokens", "4", "--repeats", "2"]
    monkeypatch.setattr(sys, "argv", ["profile.py", *arguments, "--json", str(out)])
    assert program.main() == 0
    record = schemas.read(out, schemas.Stages)
    assert record["solutions"] == {"triton_moe": sources.current()["triton_moe"]}
    assert record["results"][0]["solutions"]["triton_moe"]["output"] == "first"


@pytest.mark.parametrize(("length", "nearest"), [(7, 7), (24, 32), (300, 901), (10**6, 14107)])
def test_the_nearest_workload_is_that_by_ratio(length: int, nearest: int) -> None:
    assert stages.nearest_spec(DEFAULT, length).seq_len == nearest


@pytest.mark.large_memory
def test_inputs_of_any_token_count() -> None:
    problems = stages.Problems(ROOT, "cpu", seed=1)
    drawn, said = problems.of(24)
    assert said == "drawn as workload 6230e838 is (T=32)"
    assert drawn.routing_logits.shape == (24, 256) and drawn.hidden_states.shape == (24, 7168)
    assert abs(float(drawn.routing_logits.mean()) - DEFAULT.logits_mean) < 0.05
    assert abs(float(drawn.routing_logits.std()) - DEFAULT.logits_std) < 0.05
    workload, said = problems.of(7)
    assert said == "workload b8f4f012" and workload.local_expert_offset == 192
    # The weights are drawn once, whatever the token count.
    assert workload.gemm1_weights.data_ptr() == drawn.gemm1_weights.data_ptr()
