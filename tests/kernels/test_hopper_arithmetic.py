"""The bits of the GEMM, by the rule by which Hopper's WGMMA adds FP8 products, and those of
ex2.approx and rcp.approx.

The emulator computes exactly unless it is told otherwise. With Hopper's arithmetic it has the bits
of a GPU, so the model, the emulated kernel and the GPU's are compared without a tolerance.
"""

import functools
from collections.abc import Callable, Iterator

import cutlass.cute as cute
import hopper
import pytest
import torch
from cutlass import Float32
from cutlass.cute.runtime import make_fake_stream
from markers import backends, more
from moe_fp8 import reference
from moe_fp8.kernels import architectures
from moe_fp8.kernels.compile import COMPILE_OPTIONS, Extent, Tensor, fakes
from moe_fp8.kernels.configs import GemmConfigSm90 as Sm90
from problems import FP8, Gemm, gemm
from test_gemm import HOPPER, MAX_ROWS, MOST, PER_CHANNEL, ROWS, N, launch

pytestmark = backends("emulator", "gpu")
EACH = dict.fromkeys([*HOPPER, *(config for config in PER_CHANNEL if isinstance(config, Sm90))])


@pytest.fixture(autouse=True)
def hopper_arithmetic(backend, monkeypatch):
    monkeypatch.setattr(reference, "_scaled_product", hopper.scaled_product)
    if backend.name == "emulator":
        import ptxemu

        monkeypatch.setattr(ptxemu.options, "hopper_arithmetic", True)
    elif architectures.of_device(torch.device("cuda")) is not architectures.HOPPER:
        pytest.skip("the arithmetic is Hopper's")


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


class Approximations:
    """A kernel that writes ex2.approx.ftz and rcp.approx.ftz of float32 numbers."""

    @cute.jit
    def __call__(self, x: cute.Tensor, ex2: cute.Tensor, rcp: cute.Tensor, stream):
        blocks = cute.ceil_div(cute.size(x), 128)
        self.kernel(x, ex2, rcp).launch(grid=(blocks, 1, 1), block=(128, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, ex2: cute.Tensor, rcp: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        i = block * 128 + thread
        if i < cute.size(x):
            ex2[i] = cute.math.exp2(x[i], fastmath=True)
            rcp[i] = cute.arch.rcp_approx(x[i])


def compile_approximations() -> Callable[..., None]:
    vector = Tensor(Float32, (Extent("numbers"),), align=4)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    options = COMPILE_OPTIONS.format(arch="sm_90a")
    return cute.compile(Approximations(), *fakes((vector,) * 3), stream, options=options)


def numbers(backend) -> Iterator[torch.Tensor]:
    """All 2**32 float32 numbers, in parts; in the emulator random ones and neighbours of powers of
    two."""
    if backend.name == "gpu":
        for first in range(-(2**31), 2**31, 2**23):
            part = torch.arange(first, first + 2**23, device=backend.device)
            yield part.int().view(torch.float32)
        return
    powers = torch.arange(-(2**31), 2**31, 2**22)
    bits = torch.cat([powers, powers + 1, powers - 1, torch.randint(-(2**31), 2**31, (2**16,))])
    small = torch.randn(2**16) * 8  # where both results are normal
    yield torch.cat([bits.int().view(torch.float32), small])


def test_ex2_and_rcp_have_the_bits_of_the_model(backend):
    function, wrong = compile_approximations(), []
    for x in numbers(backend):
        results = {"ex2": torch.empty_like(x), "rcp": torch.empty_like(x)}
        function(x, *results.values())
        for name, result in results.items():
            bits, expected = result.view(torch.int32), getattr(hopper, name)(x)
            first = (bits != expected).nonzero().flatten()[:2]
            columns = (column[first].tolist() for column in (x, bits, expected))
            wrong += [
                f"{name}({argument:.9g}) is {found:#x}, expected {wanted:#x}"
                for argument, found, wanted in zip(*columns, strict=True)
            ]
    assert not wrong, "\n".join(wrong)
