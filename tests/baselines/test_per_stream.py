"""The buffers of the baselines: kept for the next call, never shared by two calls at once."""

import importlib
import pkgutil
import threading
from types import SimpleNamespace

import pytest
import torch
from moe_fp8 import baselines
from moe_fp8.baselines import (
    deepgemm_device,
    deepgemm_moe,
    flashinfer_cutlass_moe,
    flashinfer_prims_ts_moe,
    hpc_ops_moe,
    humming_moe,
    sgl_grouped_gemm,
    sglang_moe,
    triton_fused_moe_v2,
    triton_moe,
)
from moe_fp8.baselines.per_stream import REUSE, STREAMS, PerStream
from moe_fp8.baselines.supported import on_its_device

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def per_stream() -> PerStream:
    """A `PerStream` whose function makes a new object at every call."""
    return PerStream(lambda tokens, device: SimpleNamespace(tokens=tokens))


@pytest.fixture
def gpu(monkeypatch) -> SimpleNamespace:
    """A GPU whose current stream and whether it is captured can be set."""
    state = SimpleNamespace(stream=1, capturing=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=state.stream)
    )
    return state


def test_kept_until_the_arguments_change(per_stream):
    first = per_stream(80, CPU)
    assert per_stream(80, CPU) is first
    other = per_stream(81, CPU)
    assert other is not first and other.tokens == 81
    assert per_stream(80, CPU) is not first, "one set a stream is kept: they are large"


def test_each_stream_has_its_own(per_stream, gpu):
    first = per_stream(80, GPU)
    gpu.stream = 2
    second = per_stream(80, GPU)
    assert second is not first
    gpu.stream = 1
    assert per_stream(80, GPU) is first


def test_the_stream_used_longest_ago_is_forgotten(per_stream, gpu):
    objects = {}
    for gpu.stream in range(STREAMS + 1):
        objects[gpu.stream] = per_stream(80, GPU)
    gpu.stream = STREAMS
    assert per_stream(80, GPU) is objects[STREAMS]
    gpu.stream = 0
    assert per_stream(80, GPU) is not objects[0]


def test_a_capture_gets_its_own(per_stream, gpu):
    """A graph needs its buffers for as long as it lives: a call of another size would free the
    stream's."""
    first = per_stream(80, GPU)
    gpu.capturing = True
    captured = per_stream(80, GPU)
    assert captured is not first and per_stream(80, GPU) is not captured
    gpu.capturing = False
    assert per_stream(80, GPU) is first


def test_a_capture_that_is_measured_gets_its_streams(per_stream, gpu, monkeypatch):
    """Buffers that a replay fills, and a call does not, are no part of the call's time."""
    first = per_stream(80, GPU)
    gpu.capturing = True
    monkeypatch.setenv(REUSE, "1")
    assert per_stream(80, GPU) is first
    other = per_stream(81, GPU)
    assert other.tokens == 81 and per_stream(81, GPU) is not other, "nothing of the graph is kept"
    assert per_stream(80, GPU) is first


def test_each_thread_has_its_own(per_stream):
    pairs, together = [], threading.Barrier(4)

    def call() -> None:
        first = per_stream(80, CPU)
        together.wait()
        pairs.append((first, per_stream(80, CPU)))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(first is again for first, again in pairs)
    assert len({id(first) for first, _ in pairs}) == 4


def test_everything_that_a_baseline_writes_to_is_held_so():
    modules = [
        (triton_moe, ["buffers"]),
        (triton_fused_moe_v2, ["buffers"]),
        (deepgemm_moe, ["tables", "masked_buffers"]),
        (flashinfer_cutlass_moe, ["buffers"]),
        (flashinfer_prims_ts_moe, ["shuffled_weights"]),
        (hpc_ops_moe, ["buffers"]),
        (humming_moe, ["buffers"]),
        (sgl_grouped_gemm, ["scratch"]),
        (sglang_moe, ["expert_sizes"]),
    ]
    for module, names in modules:
        assert all(isinstance(getattr(module, name), PerStream) for name in names)
    # What these keep is not written to.
    shared = {"tile_table", "require_gpu", "entry", "processors"}
    for info in pkgutil.iter_modules(baselines.__path__):
        module = importlib.import_module(f"{baselines.__name__}.{info.name}")
        cached = {name for name, value in vars(module).items() if hasattr(value, "cache_clear")}
        assert cached <= shared, f"{info.name} keeps {cached - shared} for everyone"


def test_calls_run_on_the_device_of_the_output(monkeypatch):
    entered = []

    class Guard:
        def __init__(self, device):
            entered.append(device)

        __enter__ = __exit__ = lambda *_: None

    monkeypatch.setattr(torch.cuda, "device", Guard)
    seen = []
    call = on_its_device(lambda inputs, output: seen.append(output))
    output = torch.empty(3)
    call(("inputs",), output)
    assert seen == [output] and not entered, "nothing to do for the CPU"

    class OnGpu(torch.Tensor):
        device = GPU

    call(("inputs",), output.as_subclass(OnGpu))
    assert entered == [GPU] and len(seen) == 2
    call(("inputs",), "no tensor")  # whose error is the call's own
    assert seen[-1] == "no tensor"


def test_deepgemm_serves_the_first_device_alone(monkeypatch):
    monkeypatch.setattr(deepgemm_device, "_first", [])
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    for _ in range(2):
        deepgemm_device.require_first_device(first)
    with pytest.raises(RuntimeError, match="it was first used on cuda:0, not on cuda:1"):
        deepgemm_device.require_first_device(second)
    deepgemm_device.require_first_device(first)
