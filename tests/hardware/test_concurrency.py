"""Every solution under two streams, four threads, graphs that outlive other calls, and on a device
that is not the current one."""

import importlib.util
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from deepseek import LIBRARIES, MODULES, graph_of, new_output, output_of, part_of, v1, v2, v3, v4
from markers import backends
from moe_fp8.kernels.combine import compile_combine

pytestmark = backends("gpu")
WAITING = {v1, v2, v3}
"""Their host waits for the routing, so their calls cannot be captured."""


@pytest.fixture(params=[*MODULES.values(), *LIBRARIES], ids=lambda module: module.SOLUTION["name"])
def module(request):
    library = LIBRARIES.get(request.param)
    if library is not None and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    return request.param


def test_a_graph_outlives_a_call_of_another_size(module, make_inputs):
    """The graph must not write to memory that the later call has freed."""
    if module in WAITING:
        pytest.skip("waits for the routing: cannot be captured")
    inputs, other = make_inputs(80), make_inputs(81, seed=2)
    wanted = output_of(module, inputs)
    output = new_output(inputs)
    graph = graph_of(module, inputs, output)
    output_of(module, other)
    # Whatever is free now is taken and filled.
    blocks = [torch.full((2**28,), 1e30, device="cuda") for _ in range(4)]
    blocks += [torch.full((2**n,), 1e30, device="cuda") for n in range(4, 24) for _ in range(8)]
    for _ in range(3):
        output.fill_(torch.nan)
        graph.replay()
        assert torch.equal(output, wanted)
    assert all(bool((block == 1e30).all()) for block in blocks), "the graph wrote to others' memory"


def test_two_streams_and_four_threads_at_once(module, make_inputs):
    """Each thread works on its own tokens, two threads on each of two streams."""
    cases = [make_inputs(tokens, seed=seed) for seed, tokens in enumerate((80, 80, 61, 7), 1)]
    wanted = [output_of(module, inputs) for inputs in cases]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    together = threading.Barrier(len(cases))

    def work(i: int) -> list[torch.Tensor]:
        outputs = []
        with torch.cuda.stream(streams[i % 2]):
            module.run(*cases[i], new_output(cases[i]))  # what a thread does first
            together.wait()
            for _ in range(12):
                outputs.append(new_output(cases[i]))
                module.run(*cases[i], outputs[-1])
        return outputs

    with ThreadPoolExecutor(len(cases)) as pool:
        outputs_by_thread = list(pool.map(work, range(len(cases))))
    torch.cuda.synchronize()
    for outputs, expected in zip(outputs_by_thread, wanted, strict=True):
        assert all(torch.equal(output, expected) for output in outputs)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current_one(module, make_inputs):
    inputs = make_inputs(61)
    wanted = output_of(module, inputs)
    there = torch.device("cuda", 1)
    moved = type(inputs)(*(x.to(there) if isinstance(x, torch.Tensor) else x for x in inputs))
    output = new_output(inputs).to(there)
    assert torch.cuda.current_device() == 0
    if LIBRARIES.get(module) == "deep_gemm":
        with pytest.raises(RuntimeError, match="one GPU a process: it was first used on cuda:0"):
            module.run(*moved, output)
        assert torch.equal(output_of(module, inputs), wanted)
        return
    for _ in range(3):
        output.fill_(torch.nan)
        module.run(*moved, output)
        assert torch.cuda.current_device() == 0
        assert torch.equal(output.cpu(), wanted.cpu())
    assert torch.equal(output_of(module, inputs), wanted), "and the first device still works"


def test_a_first_call_within_a_capture_is_refused(make_inputs, monkeypatch):
    inputs = make_inputs(61)
    wanted = output_of(v4, inputs)
    output = new_output(inputs)
    monkeypatch.setattr(compile_combine, "functions", {})
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match="warm up by a call with as many tokens"),
        torch.cuda.graph(graph),
    ):
        v4.run(*inputs, output)
    torch.cuda.synchronize()
    assert torch.equal(output_of(v4, inputs), wanted)
    graph = graph_of(v4, inputs, output)
    output.fill_(torch.nan)
    graph.replay()
    assert torch.equal(output, wanted)


def test_131072_tokens_in_bounded_memory(make_inputs):
    """18.6 GB of buffers if all were computed at once."""
    inputs = make_inputs(131072)
    output_of(v4, make_inputs(16384))  # compiles
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output = output_of(v4, inputs)
    assert torch.cuda.max_memory_allocated() - before < output.nbytes + 3.5e9
    assert output.isfinite().all()
    for first in (0, 16000, 131072 - 384):  # across the border of two chunks, and the last
        part = slice(first, first + 768)
        assert torch.equal(output_of(v4, part_of(inputs, part)), output[part])
