"""The GEMM's bits, with the rule by which Hopper's WGMMA adds FP8 products.

The emulator adds exactly unless it is told otherwise. With the rule it has the bits of a GPU, so
the model, the emulated kernel and the GPU's are compared without a tolerance.
"""

import functools

import hopper
import pytest
import torch
from markers import backends, more
from moe_fp8 import reference
from moe_fp8.kernels import architectures
from moe_fp8.kernels.configs import GemmConfigSm90 as Sm90
from problems import FP8, Gemm, gemm
from test_gemm import HOPPER, MAX_ROWS, MOST, PER_CHANNEL, ROWS, N, launch

pytestmark = backends("emulator", "gpu")
EACH = dict.fromkeys([*HOPPER, *(config for config in PER_CHANNEL if isinstance(config, Sm90))])


@pytest.fixture(autouse=True)
def hopper_sums(backend, monkeypatch):
    monkeypatch.setattr(reference, "_scaled_product", hopper.scaled_product)
    if backend.name == "emulator":
        import ptxemu

        monkeypatch.setattr(ptxemu.options, "hopper_sums", True)
    elif architectures.of_device(torch.device("cuda")) is not architectures.HOPPER:
        pytest.skip("the rule is Hopper's")


@functools.cache
def problem_of(per_channel: bool) -> Gemm:
    return gemm(ROWS["sm_90a"], N["sm_90a"], 256, MAX_ROWS, per_channel=per_channel)


def expected_of(problem: Gemm) -> torch.Tensor:
    out = problem.output()
    operands = problem.a, problem.a_scale, problem.b, problem.b_scale
    reference.grouped_gemm(*operands, out, problem.expert_rows)
    return out


@pytest.mark.parametrize(
    "config",
    [*(c for c in EACH if c in MOST), *more(*(c for c in EACH if c not in MOST))],
    ids=str,
)
def test_each_config_has_the_bits_of_the_rule(config, backend):
    problem = problem_of(config.per_channel)
    assert torch.equal(backend.run(launch, problem, config, 4), problem.expected)


def test_every_fp8_value_has_the_bits_of_the_rule(backend):
    """Subnormal values and zeros of both signs, small products beside large ones."""
    problem = gemm((64, 5), 256, 512, 64)
    for tensor in (problem.a, problem.b):
        values = torch.randint(256, tensor.shape, dtype=torch.uint8)
        values[(values & 0x7F) == 0x7F] = 0  # NaN
        tensor[:] = values.view(FP8)
    problem.a.view(torch.uint8)[64 + 5 :] = 0x7F
    problem = problem._replace(expected=expected_of(problem))
    out = backend.run(launch, problem, Sm90(stages=3), 4)
    assert torch.equal(out, problem.expected)


def test_the_rule_differs_from_exact_sums(backend, monkeypatch):
    problem = gemm((64,), 256, 512, 64)
    monkeypatch.undo()
    assert not torch.equal(expected_of(problem), problem.expected)
