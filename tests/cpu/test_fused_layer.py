"""The fused layer's way to its compiled function: what is compared on the way, and what is not."""

import types

import pytest
import torch
from moe_fp8.layer import fused as layer_fused
from moe_fp8.layer import pipeline
from moe_fp8.layer.fused import FusedLayer, fused_configs
from moe_fp8.layer.problem import MoeInputs, MoeShape

SHAPE = MoeShape(num_experts=16, num_local_experts=4, hidden_size=256, intermediate_size=128,
                 n_group=4, topk_group=2, top_k=3)  # fmt: skip
LAYER = FusedLayer(fused_configs, SHAPE)


class OnGpu(types.SimpleNamespace):
    """As much of a tensor as is looked at before the compiled function is called."""

    is_cuda = True

    def get_device(self) -> int:
        return self.device.index


def call(tokens: int = 5, gpu: int = 0, **changed) -> tuple[MoeInputs, OnGpu]:
    def tensor() -> OnGpu:
        return OnGpu(device=torch.device("cuda", gpu), shape=(tokens, 256))

    inputs = MoeInputs(*(tensor() for _ in range(8)), 4, 2.5)
    return inputs._replace(**changed), tensor()


@pytest.fixture
def called(monkeypatch) -> list:
    """What is called, on a machine whose current GPU is number 0."""
    calls: list = []
    operations = types.SimpleNamespace(fused=lambda *arguments: calls.append("fused"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(layer_fused, "select", lambda device: operations)

    def validated(inputs, output, shape) -> int:
        calls.append("validated")
        return 0

    monkeypatch.setattr(pipeline, "validate", validated)
    monkeypatch.setattr(pipeline, "select", lambda device: None)
    return calls


def test_the_usual_call_compares_nothing_twice(called):
    marks: list[str] = []
    LAYER(*call(), mark=marks.append)
    assert called == ["fused"] and marks == ["fused"]


@pytest.mark.parametrize(
    ("inputs", "output"),
    [
        call(tokens=0),
        call(tokens=pipeline.CHUNK_TOKENS + 1),
        call(gpu=1),
        call(local_expert_offset=4.0),
        call(local_expert_offset=True),
        call(routed_scaling_factor=2),
        call(gemm2_weights=OnGpu(device=torch.device("cuda", 1), shape=())),
        call(routing_bias=None),
        (call()[0], None),
        (call()[0], OnGpu(device=torch.device("cuda", 0), shape=())),
        (call()[0], torch.zeros(5, 256)),
    ],
    ids=["no token", "many tokens", "another current GPU", "a float offset", "a bool offset",
         "a whole factor", "another GPU", "no tensor", "no output", "a scalar output", "the CPU"],
)  # fmt: skip
def test_every_other_call_is_validated_first(inputs, output, called, monkeypatch):
    if output is None or not hasattr(output, "device"):
        monkeypatch.setattr(pipeline, "validate", refuse)
        with pytest.raises(ValueError, match="said why"):
            LAYER(inputs, output)
        assert called == []
        return
    LAYER(inputs, output)
    assert called == ["validated"]


def refuse(*arguments) -> int:
    raise ValueError("said why")


def test_what_the_compiled_function_refuses_is_explained(called, monkeypatch):
    def refused(*arguments) -> None:
        raise TypeError("argument 7")

    monkeypatch.setattr(layer_fused, "select", lambda device: types.SimpleNamespace(fused=refused))
    monkeypatch.setattr(layer_fused, "validate", refuse)
    with pytest.raises(ValueError, match="said why"):
        LAYER(*call())


def test_another_error_of_a_good_call_stays_what_it_is(called, monkeypatch):
    def fails(*arguments) -> None:
        raise MemoryError("workspace")

    monkeypatch.setattr(layer_fused, "select", lambda device: types.SimpleNamespace(fused=fails))
    monkeypatch.setattr(layer_fused, "validate", lambda *arguments: 5)
    with pytest.raises(MemoryError, match="workspace"):
        LAYER(*call())
