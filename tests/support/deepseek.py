"""The layer at the geometry of DeepSeek-V3 on a GPU: weights, inputs, every generation's output."""

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from moe_fp8.baselines import (
    deepgemm_moe,
    flashinfer_cutlass_moe,
    hpc_ops_moe,
    humming_moe,
    sglang_moe,
    triton_fused_moe_v2,
    triton_moe,
)
from moe_fp8.call import MoeInputs
from moe_fp8.kernels import architectures
from moe_fp8.ladder import v1_loop_padding as v1
from moe_fp8.ladder import v2_vectorised as v2
from moe_fp8.ladder import v3_clustered as v3
from moe_fp8.ladder import v4_flat as v4
from moe_fp8.ladder import v5_fused as v5
from moe_fp8.ladder import v6_fused_hifi as v6
from moe_fp8.reference import calc_diff
from moe_fp8.shape import DEEPSEEK_V3 as SHAPE
from moe_fp8.shape import MoeShape

FP8 = torch.float8_e4m3fn
OFFSET = 64
LOCAL = slice(OFFSET, OFFSET + SHAPE.num_local_experts)

# Routing made by raising or lowering the bias of experts; scores lie in 0..1.
ROUTINGS = {
    "random": {},
    "all_to_one": {70: 8.0},
    "all_local": {expert: 4.0 for expert in range(64, 72)},
    "none_local": {expert: -4.0 for expert in range(64, 96)},
    "first_and_last": {64: 8.0, 95: 8.0},
}
TOKENS = [1, 2, 7, 61, 127, 128, 129, 257, 1009]
UNFUSED = {"v1": v1, "v2": v2, "v3": v3, "flat": v4}
MODULES = {**UNFUSED, "fused": v5, "hifi": v6}
LIBRARIES = {
    sglang_moe: "sgl_kernel",
    deepgemm_moe: "deep_gemm",
    flashinfer_cutlass_moe: "flashinfer",
    hpc_ops_moe: "hpc",
    humming_moe: "humming",
    triton_moe: "triton",
    triton_fused_moe_v2: "sgl_kernel",
}
"""The package that each peer needs."""
every_module = pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)

STAGE_DIFF = 1e-5
"""Bound for each stage against the model, on the same inputs."""

LAYER_DIFF = 3e-4
"""Bound for the whole layer against the model.

The tensor cores of Hopper add FP8 products in an accumulator of about 14 bits, the model adds them
exactly. That makes a relative difference of 1.7e-3 in the first GEMM's output (calc_diff 1.4e-6,
measured on an H200), which is little. But the requantisation to FP8, whose steps are 2**-3 of a
value, turns some of it into steps: what lies next to the middle between two FP8 values goes one
way here and the other way there. At the layer's output that is a calc_diff of about 1e-4.
"""


def random_fp8(generator: torch.Generator, *dims: int) -> torch.Tensor:
    """Normal values clamped to +-2, made in pieces: float32 takes four times the memory."""
    out = torch.empty(dims, dtype=FP8, device=generator.device)
    for piece in out if len(dims) > 2 else [out]:
        piece.copy_(normal(generator, *piece.shape).clamp_(-2, 2))
    return out


def normal(generator: torch.Generator, *dims: int) -> torch.Tensor:
    return torch.randn(dims, generator=generator, device=generator.device)


def weights_of(shape: MoeShape, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Draw a layer's weights as flashinfer-bench does."""
    e, h, i = shape.num_local_experts, shape.hidden_size, shape.intermediate_size
    return {
        "gemm1_weights": random_fp8(generator, e, 2 * i, h),
        "gemm1_weights_scale": normal(generator, e, 2 * i // 128, h // 128),
        "gemm2_weights": random_fp8(generator, e, h, i),
        "gemm2_weights_scale": normal(generator, e, h // 128, i // 128),
    }


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return weights_of(SHAPE, torch.Generator("cuda").manual_seed(0))


@pytest.fixture(scope="module")
def make_inputs(weights) -> Callable[..., MoeInputs]:
    def make(tokens: int, routing: str = "random", offset: int = OFFSET, seed: int = 1):
        generator = torch.Generator("cuda").manual_seed(1000 * seed + tokens)
        bias = torch.zeros(SHAPE.num_experts, device="cuda")
        for expert, value in ROUTINGS[routing].items():
            bias[expert] = value
        h = SHAPE.hidden_size
        return MoeInputs(
            routing_logits=normal(generator, tokens, 256),
            routing_bias=bias.bfloat16(),
            hidden_states=random_fp8(generator, tokens, h),
            hidden_states_scale=normal(generator, h // 128, tokens),
            **weights,
            local_expert_offset=offset,
            routed_scaling_factor=2.5,
        )

    return make


def new_output(inputs: MoeInputs) -> torch.Tensor:
    """Garbage: what is not written shows."""
    return torch.full(inputs.hidden_states.shape, torch.nan, dtype=torch.bfloat16, device="cuda")


def output_of(module, inputs: MoeInputs) -> torch.Tensor:
    output = new_output(inputs)
    module.run(*inputs, output)
    return output


def model_of(inputs: MoeInputs, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """The output of the layer's reference model on the GPU."""
    with monkeypatch.context() as patch:
        patch.setattr(architectures, "has_kernels", lambda device: False)
        return output_of(v2, inputs)


def graph_of(module, inputs: MoeInputs, output: torch.Tensor) -> torch.cuda.CUDAGraph:
    """Capture a call of a solution."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        module.run(*inputs, output)  # warm up outside the capture
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        module.run(*inputs, output)
    return graph


def check_replays(module, cases: list[MoeInputs], wanted: list[torch.Tensor]) -> None:
    """The whole call, routing included, captured once with the first inputs and replayed for all,
    which have as many tokens."""
    changing = ("routing_logits", "routing_bias", "hidden_states", "hidden_states_scale")
    static = cases[0]._replace(**{name: getattr(cases[0], name).clone() for name in changing})
    output = new_output(static)
    graph = graph_of(module, static, output)
    for inputs, expected in zip(cases, wanted, strict=True):
        for name in changing:
            getattr(static, name).copy_(getattr(inputs, name))
        output.fill_(torch.nan)
        graph.replay()
        assert torch.equal(output, expected)


def part_of(inputs: MoeInputs, part: slice | torch.Tensor) -> MoeInputs:
    """Some of the tokens."""
    # View as bytes: torch does not index float8.
    states = inputs.hidden_states.view(torch.uint8)[part].view(FP8)
    return inputs._replace(
        routing_logits=inputs.routing_logits[part],
        hidden_states=states,
        hidden_states_scale=inputs.hidden_states_scale[:, part].contiguous(),
    )


def waits_of(module, inputs: MoeInputs) -> list[str]:
    """Return torch's warnings of calls in which the host waits, in a second run."""
    output = new_output(inputs)
    module.run(*inputs, output)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            module.run(*inputs, output)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    messages = [str(warning.message) for warning in caught]
    return [message for message in messages if "called a synchronizing" in message]


class Worst:
    """The worst calc_diff of everything that was compared under a name."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}

    def compare(self, name: str, got: torch.Tensor, wanted: torch.Tensor) -> float:
        if not (wanted != 0).any():  # no token chose a local expert
            assert torch.equal(got, wanted)
            return 0.0
        diff = calc_diff(got, wanted)
        self.found[name] = max(diff, self.found.get(name, 0.0))
        return diff


@pytest.fixture(scope="module")
def worst(request) -> Iterator[Worst]:
    """Collects over the module's tests and prints at their end, past pytest's capture."""
    worst = Worst()
    yield worst
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(*(f"\n{name}: worst calc_diff {most:.2e}" for name, most in worst.found.items()))
