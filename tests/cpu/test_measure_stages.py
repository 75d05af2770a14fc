"""The per-stage timing: every stage and the whole call, in turns, and wrong outputs are noticed."""

from types import SimpleNamespace

import pytest
import torch
from fake_cuda import Kernel
from moe_fp8.layer.metrics import calc_diff

from scripts.common.command_line import EXIT_FAILED, UsageError
from scripts.common.definitions import DEFAULT
from scripts.common.project import ROOT
from scripts.data import rows
from scripts.measure import cases, stages
from scripts.pack import sources
from scripts.table.pivots import stages_table

OUTPUT = torch.zeros(4, 8, dtype=torch.bfloat16)


class Layer:
    """Writes a known value."""

    def __init__(self, value: float, calls: list | None = None):
        self.value, self.calls = value, calls if calls is not None else []

    def __call__(self, inputs, output, mark=lambda stage: None) -> None:
        self.calls.append(self.value)
        for stage in stages.STAGES:
            mark(stage)
        output.fill_(self.value)


def test_on_a_gpu_a_call_begins_idle_and_cold_and_has_an_event_after_each_stage(cuda) -> None:
    kernel = Kernel(cuda, "stage")

    def layer(inputs, output, mark=lambda stage: None) -> None:
        for stage in stages.STAGES:
            kernel()
            mark(stage)

    found = stages.time_layers({"x": layer}, None, OUTPUT, iterations=1)
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

    found = stages.time_layers({"x": layer}, None, OUTPUT, iterations=1)
    warm = 3 * stages.WARMUP
    first, second, third = kernel.took[warm : warm + 3]
    assert found["x"]["gemm1"] == pytest.approx([first + third])
    assert found["x"]["gemm2"] == pytest.approx([second])


def test_layers_take_turns(cuda) -> None:
    calls: list[float] = []
    layers = {"a": Layer(1.0, calls), "b": Layer(2.0, calls)}
    stages.time_layers(layers, None, OUTPUT, iterations=3)
    assert calls[2 * stages.WARMUP :] == [1.0, 1.0, 2.0, 2.0] * 3


def test_outputs_are_compared_with_the_first() -> None:
    values = {"a": 1.0, "same": 1.0, "half": 0.5, "nan": float("nan"), "again": 1.0}
    layers = {name: Layer(value) for name, value in values.items()}
    layers["nothing"] = lambda inputs, output: None
    layers["one"] = lambda inputs, output: output.fill_(1.0)[0, :1].fill_(float("nan"))
    said = stages.compare_outputs(layers, None, OUTPUT.clone())
    difference = calc_diff(torch.full((4, 8), 0.5), torch.ones(4, 8))
    assert said == {
        "a": "first",
        "same": "bitwise equal to the first",
        "half": f"calc_diff {difference:.1e} to the first",
        "nan": "not finite",
        "again": "bitwise equal to the first",
        "nothing": "not finite",
        "one": "not finite",
    }


def test_table_shows_the_ratio_to_the_first_solution() -> None:
    into = rows.Writer("stages", "a GPU", "m")
    for name, ms, parts in (("a", 2.0, stages.STAGES), ("b", 0.5, (*stages.STAGES, "fused"))):
        for part in (*parts, stages.TOTAL):
            into.add({"tokens": 4}, name, part=part, value=ms, unit="ms")
    table = stages_table(into.result.frame("stages")).frame
    assert list(table) == ["stage", "a", "b", "b vs first"]
    assert table.iloc[0].tolist() == ["routing", "2.000", "0.500", "4.00x"]
    assert table.iloc[-2].tolist() == ["fused", "-", "0.500", "-"]
    assert table.stage.iloc[-1] == stages.TOTAL


@pytest.mark.all
def test_layers_are_those_of_the_generations() -> None:
    layers = stages.load_layers(["cutedsl_moe_fp8_v2"])
    assert list(layers) == ["cutedsl_moe_fp8_v2"]
    of_two = {"cutedsl_moe_fp8_v1", "cutedsl_moe_fp8_v2"}
    assert set(stages.load_layers([])) >= of_two == set(stages.load_layers(["cutedsl_*_v[12]"]))
    with pytest.raises(UsageError, match="no generation named absent"):
        stages.load_layers(["absent"])


def test_the_rows_name_the_sources_that_were_timed(cuda, measure, monkeypatch) -> None:
    def problem(self, length: int):
        return SimpleNamespace(hidden_states=torch.zeros(length, 8)), "drawn"

    kernel, right = Kernel(cuda, "x"), Layer(1.0)
    layers = {
        "triton_moe": lambda *of, **mark: (kernel(), right(*of, **mark)),
        "cutedsl_moe_fp8_flat": Layer(float("nan")),
    }
    monkeypatch.setattr(stages, "load_layers", lambda names: layers)
    monkeypatch.setattr(cases.Problems, "__init__", lambda self, *arguments: None)
    monkeypatch.setattr(cases.Problems, "layer", DEFAULT, raising=False)
    monkeypatch.setattr(cases.Problems, "of", problem)
    done, found = measure("stages", "--tokens", "4", "--repeats", "3")
    assert done.returncode == EXIT_FAILED
    assert "cutedsl_moe_fp8_flat at T=4: not finite" in done.stderr
    assert found.hashes("stages") == {name: sources.current()[name] for name in layers}
    total = {r["subject"]: r["output"] for r in found.rows if r["part"] == stages.TOTAL}
    assert total == {"triton_moe": "first", "cutedsl_moe_fp8_flat": "not finite"}
    assert all(r["least"] <= r["value"] <= r["most"] and r["calls"] == 3 for r in found.rows)
    whole = next(r for r in found.rows if r["part"] == stages.TOTAL)
    assert whole["value"] == pytest.approx(kernel.took[-3]), "the median of every second run"


@pytest.mark.parametrize(("length", "nearest"), [(7, 7), (24, 32), (300, 901), (10**6, 14107)])
def test_the_nearest_workload_is_that_by_ratio(length: int, nearest: int) -> None:
    assert cases.nearest_spec(DEFAULT, length).seq_len == nearest


@pytest.mark.large_memory
def test_inputs_of_any_token_count() -> None:
    problems = cases.Problems(ROOT, "cpu", seed=1)
    drawn, said = problems.of(24)
    assert said == "drawn as workload 6230e838 is (T=32)"
    assert drawn.routing_logits.shape == (24, 256) and drawn.hidden_states.shape == (24, 7168)
    assert abs(float(drawn.routing_logits.mean()) + 1.6706) < 0.05
    assert abs(float(drawn.routing_logits.std()) - 0.6560) < 0.05
    workload, said = problems.of(7)
    assert said == "workload b8f4f012" and workload.local_expert_offset == 192
    # The weights are drawn once, whatever the token count.
    assert workload.gemm1_weights.data_ptr() == drawn.gemm1_weights.data_ptr()
