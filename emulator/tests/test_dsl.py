"""A test of a CuTe DSL kernel: compiled as for a GPU, called with CPU tensors."""

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cuda.bindings import driver as cuda
from cutlass.cute.runtime import from_dlpack, make_fake_stream, make_fake_tensor
from ptxemu import EmulationError


class Double:
    """y = 2 x, with or without a check of the bounds."""

    def __init__(self, guarded: bool):
        self.guarded = guarded

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
        blocks = cute.ceil_div(cute.size(x), 128)
        self.kernel(x, y).launch(grid=(blocks, 1, 1), block=(128, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        i = block * 128 + thread
        if cutlass.const_expr(self.guarded):
            if i < cute.size(x):
                y[i] = x[i] * 2.0
        else:
            y[i] = x[i] * 2.0


def compiled(guarded: bool, arch: str = "sm_90a"):
    n = cute.sym_int32(divisibility=8)
    x, y = (make_fake_tensor(cutlass.Float32, (n,), stride=(1,)) for _ in "xy")
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(
        Double(guarded), x, y, stream, options=f"--enable-tvm-ffi --gpu-arch={arch}"
    )


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_both_architectures(arch, emulator):
    x, y = torch.randn(1000), torch.zeros(1000)
    compiled(True, arch)(x, y)
    assert torch.equal(y, 2 * x)
    assert [report.hazards for report in emulator.reports] == [[]]


def test_each_call_runs_its_own_ptx(emulator):
    """Two compilations have one kernel name."""
    emulator.options.strict = False
    guarded, unguarded = compiled(True), compiled(False)
    x, y = torch.randn(1024)[:1000], torch.zeros(1024)[:1000]
    unguarded(x, y)
    assert emulator.reports[-1].hazard_kinds() == {
        "global-read-outside-tensors",
        "global-write-outside-tensors",
    }
    guarded(x, y)
    assert emulator.reports[-1].hazards == []


def test_the_emulators_error_is_what_is_raised():
    with pytest.raises(EmulationError, match="outside every registered tensor"):
        compiled(False)(torch.randn(1024)[:1000], torch.zeros(1024)[:1000])


def test_hazards_as_errors(emulator):
    emulator.options.strict, emulator.options.hazards_are_errors = False, True
    with pytest.raises(EmulationError, match="hazards reported"):
        compiled(False)(torch.randn(1024)[:1000], torch.zeros(1024)[:1000])


def test_without_tvm_ffi(emulator):
    x, y = torch.randn(256), torch.zeros(256)
    arguments = from_dlpack(x), from_dlpack(y), cuda.CUstream(0)
    cute.compile(Double(True), *arguments)(*arguments)
    assert torch.equal(y, 2 * x)
    assert emulator.reports[-1].hazards == []
