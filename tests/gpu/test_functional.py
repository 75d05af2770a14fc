"""The layer as a function on a GPU: compiled, and on another device than the current one."""

import deepseek
import pytest
import torch
from deepseek import output_of
from moe_fp8 import api
from moe_fp8.api import fused_moe
from moe_fp8.ladder import v5_fused as v5

weights, make_inputs = deepseek.weights, deepseek.make_inputs


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend, make_inputs):
    """The code around the call is compiled with it. The bits are those of a call alone."""

    def layer(*tensors: torch.Tensor) -> torch.Tensor:
        out = fused_moe(*tensors, local_expert_offset=64, routed_scaling_factor=2.5)
        return out.float() * 2

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for tokens in (7, 61, 80):
        inputs = make_inputs(tokens, offset=64)
        assert torch.equal(compiled(*inputs[:8]), 2 * output_of(v5, inputs).float())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current_one(make_inputs):
    inputs = make_inputs(61)
    there = [x.to("cuda:1") for x in inputs[:8]]
    got = fused_moe(*there, local_expert_offset=64, routed_scaling_factor=2.5)
    assert torch.cuda.current_device() == 0 and got.get_device() == 1
    assert torch.equal(got.cpu(), output_of(v5, inputs).cpu())


def test_later_calls_of_other_types_and_sizes_compute_what_first_calls_do(make_inputs):
    """A call that looks like an earlier one goes a short way, which compares neither types nor
    layouts: the compiled function refuses another call's, and the call goes the long way."""

    def call(tokens: int, change: dict[int, object]) -> torch.Tensor:
        tensors = list(make_inputs(tokens, offset=64)[:8])
        for place, value in change.items():
            tensors[place] = value(tensors[place]) if callable(value) else value
        return fused_moe(*tensors, local_expert_offset=64, routed_scaling_factor=2.5)

    to_e8m0 = lambda x: x.to(torch.float8_e8m0fnu)  # noqa: E731
    forms: list[dict[int, object]] = [
        {},
        {0: torch.Tensor.bfloat16},
        {1: None},
        {1: torch.Tensor.float},
        {2: torch.Tensor.bfloat16, 3: None},
        {3: lambda x: x.t().contiguous().t()},
        {5: to_e8m0, 7: to_e8m0},
        {0: lambda x: x[:, :128].contiguous(), 1: lambda x: x[:128].contiguous()},
    ]
    cases = [(tokens, form) for form in forms for tokens in (7, 61)]
    first = []
    for tokens, form in cases:
        api._layer.cache_clear()
        api._layers_seen.cache_clear()
        first.append(call(tokens, form))
    answers = [*zip(cases, first, strict=True)]
    for (tokens, form), right in [*answers, *reversed(answers)]:
        for _ in range(2):
            assert torch.equal(call(tokens, form), right), (tokens, form)
    wrong = ({0: torch.Tensor.half}, {2: torch.Tensor.bfloat16}, {3: None}, {5: to_e8m0}, {6: None})
    for form in wrong:
        for _ in range(2):
            call(7, {})
            with pytest.raises(ValueError, match="expected"):
                call(7, form)
