"""The reference line of hpc-ops' own layer: what it passes to the library, and what it refuses."""

import sys
import types

import bruteforce
import fake_libraries
import pytest
import torch
from moe_fp8.layer.metrics import calc_diff
from moe_fp8.layer.problem import MoeInputs
from test_baselines import TINY, interpreter_that_rounds  # noqa: F401

from scripts.common.command_line import UsageError
from scripts.measure import device_time, prepared_weights
from scripts.measure.device_time import Timed
from scripts.measure.second_pass import Pass


@pytest.fixture
def layer(monkeypatch, interpreter_that_rounds) -> prepared_weights.HpcOps:  # noqa: F811
    if torch.cuda.is_available():
        pytest.skip("the stand-ins work on CPU tensors, Triton on the GPU's")
    monkeypatch.setitem(sys.modules, "hpc", fake_libraries.hpc(TINY))
    return prepared_weights.HpcOps(TINY)


def output_of(layer, inputs: MoeInputs) -> torch.Tensor:
    output = torch.full(inputs.hidden_states.shape, float("nan"), dtype=torch.bfloat16)
    layer(*prepared_weights.gate_before_up(inputs), output)
    return output


@pytest.mark.parametrize(("tokens", "offset"), [(1, 0), (12, 4), (13, -2), (9, 3)])
def test_it_computes_the_layer(layer, tokens, offset) -> None:
    inputs = bruteforce.random_inputs(TINY, tokens, offset, tokens, favourite=max(offset, 0) + 1)
    wanted = torch.from_numpy(bruteforce.layer(inputs, TINY))
    assert calc_diff(output_of(layer, inputs), wanted) < 1e-4


def test_the_halves_are_swapped_with_their_scales() -> None:
    inputs = bruteforce.random_inputs(TINY, 2, 4)
    prepared = prepared_weights.gate_before_up(inputs)
    half, i = TINY.intermediate_size, TINY.intermediate_size // 128
    for now, before, n in (
        (prepared.gemm1_weights, inputs.gemm1_weights, half),
        (prepared.gemm1_weights_scale, inputs.gemm1_weights_scale, i),
    ):
        assert now.dtype == before.dtype and now.is_contiguous()
        assert torch.equal(now[:, :n].float(), before[:, n:].float())
        assert torch.equal(now[:, n:].float(), before[:, :n].float())
    assert prepared.gemm2_weights is inputs.gemm2_weights


def writes(value: float) -> Timed:
    return Timed(lambda output: output.fill_(value), [torch.zeros(4, 8, dtype=torch.bfloat16)])


def test_another_output_is_refused() -> None:
    prepared_weights.refuse_wrong(writes(2.0), writes(2.0))
    for wrong in (1.0, float("nan")):
        with pytest.raises(RuntimeError, match="prepared weights: calc_diff"):
            prepared_weights.refuse_wrong(writes(wrong), writes(2.0))


@pytest.mark.parametrize("right", [True, False])
def test_a_wrong_output_has_no_time(layer, right, monkeypatch) -> None:
    inputs = bruteforce.random_inputs(TINY, 9, 4, favourite=5)
    wanted = torch.from_numpy(bruteforce.layer(inputs, TINY)).to(torch.bfloat16)

    def solution(*arguments) -> None:
        arguments[-1].copy_(wanted if right else -wanted)

    monkeypatch.setattr(
        prepared_weights,
        "timed",
        lambda definition, solution_, inputs: Timed(solution, [*inputs, torch.empty_like(wanted)]),
    )
    monkeypatch.setattr(prepared_weights.Inputs, "__init__", lambda self, *arguments: None)
    monkeypatch.setattr(prepared_weights.Inputs, "of", lambda self, workload: list(inputs))
    figures = device_time.summary([1.0])
    monkeypatch.setattr(
        device_time, "device_times", lambda calls, repeats: dict.fromkeys(calls, figures)
    )
    monkeypatch.setattr(device_time, "harness_times", lambda call, repeats: figures)
    workload = types.SimpleNamespace(uuid="u", axes={"seq_len": 9})
    what = Pass(
        types.SimpleNamespace(definitions={prepared_weights.DEFINITION: None}),  # type: ignore
        [types.SimpleNamespace(name="x")],  # type: ignore[list-item]
        [types.SimpleNamespace(workload=workload)],  # type: ignore[list-item]
        set(),
        "a GPU",
        None,
    )
    results = prepared_weights.measure(what, layer, seed=1, repeats=1)
    assert results["u", "x"] == {"device": figures, "harness": figures}
    rows = {row["name"]: row for row in prepared_weights.record(what, results)}
    assert rows["x"]["tokens"] == 9
    assert ("error" not in rows[prepared_weights.NAME]) == right


def test_without_the_library_it_is_one_line(monkeypatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setitem(sys.modules, "hpc", None)
    monkeypatch.setattr(prepared_weights, "require_gpu", lambda: "a GPU")
    monkeypatch.setattr(sys, "argv", ["prepared_weights.py"])
    with pytest.raises(UsageError, match=r"^not installed: pip install hpc-ops@git"):
        prepared_weights.main()
