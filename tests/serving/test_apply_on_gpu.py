"""A user's own calls through flashinfer_bench.apply: the solution that the traces choose runs, to
the bit.

The traces are made up: what is measured is not asked here, only what is done with it.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import small_record
import torch
from deepseek import new_output, output_of
from flashinfer_bench import ApplyConfig, apply, enable_apply
from flashinfer_bench.compile import BuilderRegistry
from flashinfer_bench.integration import flashinfer as integration
from markers import backends
from moe_fp8.call import MoeInputs
from moe_fp8.ladder import v4_flat as v4
from moe_fp8.ladder import v5_fused as v5
from programs import call

from scripts.common.program import DEFINITION, ROOT
from scripts.common.sources import current
from scripts.measuring.cases import load

pytestmark = backends("gpu")

FLAT, FUSED = "cutedsl_moe_fp8_flat", "cutedsl_moe_fp8_fused"
SPEEDUPS = {FLAT: {7: 40.0, 80: 30.0}, FUSED: {7: 30.0, 80: 40.0, 1: 50.0}}
"""Speed-ups by T: flat is the fastest at T=7, fused elsewhere, also for T that was not measured."""


@pytest.fixture(scope="module")
def data_set(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("apply")
    traces = [
        {
            "definition": DEFINITION,
            "workload": trace.workload.model_dump(mode="json"),
            "solution": name,
            "evaluation": {
                "status": "PASSED",
                "environment": {
                    "hardware": "this GPU",
                    "libs": {"solution_hash": current()[name]},
                },
                "timestamp": "2026-01-01T00:00:00",
                "correctness": {"max_relative_error": 4e10, "max_absolute_error": 24288.0},
                "performance": {
                    "latency_ms": 1.0,
                    "reference_latency_ms": speedup,
                    "speedup_factor": speedup,
                },
            },
        }
        for name, by_tokens in SPEEDUPS.items()
        for trace in load(ROOT)[0].workloads[DEFINITION]
        if (speedup := by_tokens.get(trace.workload.axes["seq_len"]))
    ]
    results = small_record.write(place / "traces.jsonl", traces)
    export = ["--to", "apply", "--mix", "--results", results, "--output", place / "apply"]
    done = call("pack", *SPEEDUPS, *export)
    assert done.returncode == 0, done.stderr
    return place


@pytest.fixture
def enabled(data_set, tmp_path, monkeypatch) -> Iterator[None]:
    monkeypatch.setenv("FIB_CACHE_PATH", str(tmp_path))
    monkeypatch.setattr(BuilderRegistry, "_instance", None)
    # It would import flashinfer, where that is installed, to patch other operations.
    monkeypatch.setattr(integration, "install_flashinfer_integrations", lambda: None)
    config = ApplyConfig(max_atol=math.inf, max_rtol=math.inf, on_miss_policy="use_def_best")
    with enable_apply(str(data_set / "apply"), config):
        yield
    BuilderRegistry.get_instance().cleanup()


@pytest.mark.parametrize(("tokens", "module"), [(7, v4), (80, v5), (61, v5)])
def test_a_call_runs_the_fastest_solution_for_its_tokens(tokens, module, make_inputs, enabled):
    inputs = make_inputs(tokens)
    wanted = output_of(module, inputs)
    other = output_of(v4 if module is v5 else v5, inputs)
    assert not torch.equal(wanted, other), "the bits say which one ran"
    assert torch.equal(apply(DEFINITION, args=tuple(inputs)), wanted)
    output = new_output(inputs)
    assert apply(DEFINITION, args=(*inputs, output)) is None
    assert torch.equal(output, wanted)


def test_in_a_graph(make_inputs, enabled):
    inputs, other = make_inputs(80), make_inputs(80, seed=2)
    static = inputs._replace(
        **{name: getattr(inputs, name).clone() for name in MoeInputs._fields[:4]}
    )
    output = new_output(static)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        apply(DEFINITION, args=(*static, output))
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        apply(DEFINITION, args=(*static, output))
    for name in MoeInputs._fields[:4]:
        getattr(static, name).copy_(getattr(other, name))
    graph.replay()
    assert torch.equal(output, output_of(v5, other))
