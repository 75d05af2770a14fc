"""Reference models and kernels on the CPU: what is shared stays equal, and the processes of the
emulator end with their program."""

import io
import os
import re
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import small
import torch
from flashinfer_bench.bench import BenchmarkConfig
from flashinfer_bench.data import Definition, Solution
from moe_fp8 import reference
from programs import gone
from small import solution

from run import environment
from scripts.common.definitions import DEFAULT, DSV3_TP8, build_definition, find
from scripts.common.program import ENDING, ROOT
from scripts.measuring import cases, emulate
from scripts.measuring.layers import run_reference

SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
SOURCE = "from . import call"
SHAPE = dict(hidden_size=256, intermediate_size=128)


def weights(*shape: int, seed: int = 0) -> torch.Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return drawn.clamp_(-2, 2).to(torch.float8_e4m3fn)


# --- shared inputs --------------------------------------------------------------------------------


def test_a_shared_tensor_is_copied_page_by_page_where_it_is_written(monkeypatch) -> None:
    monkeypatch.setattr(emulate, "LARGE", 4097)
    x, few = weights(3, 4096), weights(16, 4)
    before = [x.clone(), few.clone()]
    emulate.share([x, few, 2.5])
    mine, other = (emulate.fresh([x, few, 2.5]) for _ in range(2))
    assert mine[2] == 2.5 and mine[1].data_ptr() != few.data_ptr()
    for copy in mine[:2], other[:2], [x, few]:
        assert all(
            emulate.bits(a).equal(emulate.bits(b)) for a, b in zip(copy, before, strict=True)
        )
    assert not emulate.written(mine[0]), "it was only read"
    mine[0].view(torch.uint8)[2, 7] ^= 1
    assert emulate.written(mine[0]) and not emulate.written(other[0])
    for unchanged in x, other[0]:
        assert emulate.bits(unchanged).equal(emulate.bits(before[0]))


def test_a_solution_that_writes_to_a_shared_input_fails(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("FIB_CACHE_PATH", str(tmp_path))
    monkeypatch.setattr(emulate, "LARGE", 128)
    x, w = torch.ones(2, small.WIDTH), torch.ones(small.WIDTH, small.WIDTH).bfloat16()
    inputs = [x, w, 2.0]
    emulate.share(inputs)
    expected = (x @ w.float() * 2).bfloat16()
    case = emulate.Case(small.definition(), inputs, expected, 1.0, 0)
    for name, content, status in [
        ("right", small.RIGHT, "PASSED"),
        ("writes", small.RIGHT + "    w[0, 0] = 3\n", "RUNTIME_ERROR"),
        ("writes what was there", small.RIGHT + "    w[0, 0] = 1\n", "PASSED"),
    ]:
        fields, _ = emulate.evaluate(case, BenchmarkConfig(), solution(name, content))
        assert fields["status"] == status, fields
        assert "changes its inputs: w" in fields.get("log", "changes its inputs: w")


def test_tensors_reach_another_process(monkeypatch) -> None:
    monkeypatch.setattr(emulate, "LARGE", 4096)
    x, few = weights(2, 4096), weights(16, 5).t()
    emulate.share([x])
    data = io.BytesIO()
    emulate._Pickler(data).dump((x, few, torch.tensor(3)))
    assert len(data.getvalue()) < 4096
    again, also, three = emulate._Unpickler(io.BytesIO(data.getvalue())).load()
    assert emulate.bits(again).equal(emulate.bits(x)) and three == 3
    assert also.dtype == few.dtype and also.float().equal(few.float())
    x.view(torch.uint8)[1, 1] ^= 1
    assert emulate.bits(again).equal(emulate.bits(x)), "the same memory"


# --- reference and reference models ---------------------------------------------------------------


def layer(**sizes: int) -> tuple[Definition, list[Any]]:
    """Return a small definition with DEFAULT's reference, and inputs of five tokens."""
    definition = Definition(**build_definition(replace(DEFAULT, **SHAPE, **sizes)))
    h, i, local = SHAPE["hidden_size"], SHAPE["intermediate_size"], 32
    generator = torch.Generator().manual_seed(1)

    def scales(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator) / 16

    logits = torch.randn(5, 256, generator=generator)
    inputs = [
        logits, torch.zeros(256).bfloat16(), weights(5, h), scales(h // 128, 5),
        weights(local, 2 * i, h, seed=2), scales(local, 2 * i // 128, h // 128),
        weights(local, h, i, seed=3), scales(local, h // 128, i // 128), 32, 2.5,
    ]  # fmt: skip
    return definition, inputs


@pytest.mark.parametrize("name", [DEFAULT.name, DSV3_TP8.name])
def test_the_reference_of_shared_weights_has_equal_bits(monkeypatch, name) -> None:
    """The reference dequantises only experts that have tokens, each once."""
    monkeypatch.setattr(emulate, "LARGE", 2**17)
    definition, inputs = layer()
    trace_set, _ = cases.load(ROOT, find(name))
    text = cases.definition_of(trace_set).reference
    definition = definition.model_copy(update={"reference": text})
    expected, _ = run_reference(definition, inputs)
    assert expected.abs().max() > 0
    emulate.share(inputs)
    read = []
    getitem = emulate.ByExpert.__getitem__
    monkeypatch.setattr(
        emulate.ByExpert,
        "__getitem__",
        lambda self, e: read.append(getattr(e, "start", e)) or getitem(self, e),
    )
    output, seconds = emulate.reference_of(definition, inputs)
    assert output.equal(expected) and seconds > 0
    used = sorted({int(e) for e in range(32) if read.count(e)})
    assert 0 < len(used) < 32 and read == [e for e in used for _ in range(2)]

    whole = text.replace("    x = deq", "    gemm1_weights.sum\n    x = deq")
    assert whole != text
    changed = definition.model_copy(update={"reference": whole, "name": "whole"})
    assert emulate.reference_of(changed, inputs)[0].equal(expected), "weights that are read whole"


def test_reference_models_share_products_of_equal_operands(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(emulate, "LARGE", 2**17)
    definition, inputs = layer()
    emulate.share(inputs)
    source = "BLOCK = 128"
    products, calls = emulate.Products(inputs), []

    def gemm1(
        name: str, content: str, mine: list[Any], rows: torch.Tensor, b: Any = None
    ) -> torch.Tensor:
        """Return GEMM1 of three rows of experts 1 and 4, as the model of a bundle computes it."""
        path = tmp_path / name / "reference.py"
        path.parent.mkdir()
        for file, text in {"__init__.py": "", "call.py": content, path.name: SOURCE}.items():
            (path.parent / file).write_text(text)
        model: Any = types.ModuleType(f"{name}.moe_fp8_0a.reference")
        model.__file__ = str(path)

        def grouped_gemm(*arguments: Any) -> None:
            calls.append(name)
            reference.grouped_gemm(*arguments)

        model.grouped_gemm = grouped_gemm
        names = {f"{name}.moe_fp8_0a": model, model.__name__: model}
        bundle = types.SimpleNamespace(metadata=types.SimpleNamespace(misc={}))
        bundle.metadata.misc["module_name"] = f"{name}.main"
        out = torch.zeros(8, 256, dtype=torch.bfloat16)
        a, a_scale = torch.zeros(8, 256).to(torch.float8_e4m3fn), torch.zeros(2, 8)
        for (first, end), at in zip(rows.t()[[1, 4]].tolist(), ([0, 1], [2]), strict=True):
            a[first:end], a_scale[:, first:end] = mine[2][at], mine[3][:, at]
        with mock.patch.dict(sys.modules, names):
            products.use(bundle, mine)
            model.grouped_gemm(a, a_scale, mine[4] if b is None else b, mine[5], out, rows)
        return torch.cat([out[first:end] for first, end in rows.t().tolist()])

    flat = torch.tensor([[0, 0, 2, 2, 2], [0, 2, 2, 2, 3]])
    padded = torch.tensor([[0, 1, 3, 4, 6], [0, 3, 3, 4, 7]])
    wanted = torch.empty(3, 256, dtype=torch.bfloat16)
    reference.grouped_gemm(inputs[2][:3], inputs[3][:, :3], inputs[4], inputs[5], wanted, flat)
    assert gemm1("a", source, emulate.fresh(inputs), flat).equal(wanted)
    assert calls == ["a", "a"] and products.saved == 0
    assert gemm1("b", source, emulate.fresh(inputs), padded).equal(wanted)
    assert calls == ["a", "a"] and products.saved > 0, "the same operands at other places"
    assert gemm1("c", source + "\n", emulate.fresh(inputs), flat).equal(wanted)
    assert calls[2:] == ["c", "c"], "another source may compute something else"
    other = emulate.fresh(inputs)
    other[3][0, 2] *= 2
    assert not gemm1("d", source, other, flat).equal(wanted) and calls[4:] == ["d"]
    assert gemm1("e", source, inputs, flat, inputs[4].clone()).equal(wanted)
    assert calls[5:] == ["e"], "weights that are not shared may differ"


def test_models_run_while_kernels_do_and_the_smallest_workload_comes_first(
    monkeypatch, tmp_path
) -> None:
    monkeypatch.setenv("FIB_CACHE_PATH", str(tmp_path))
    monkeypatch.setattr(emulate, "memory_needed", lambda definition: 0)
    futures: list[Future] = []

    class Kernels(emulate.Kernels):
        def _start(self) -> None: ...

        def submit(self, *arguments: Any) -> Future:
            futures.append(Future())
            if len(futures) == 2:  # the next workload's model is done: now the first kernels end
                for future in futures:
                    future.set_result({"status": "RUNTIME_ERROR", "log": "x"})
            return futures[-1]

    monkeypatch.setattr(emulate, "Kernels", Kernels)
    trace_set = small.trace_set(lengths=(3, 1))
    (traces,) = trace_set.workloads.values()
    stored: list[int] = []
    emulate.run(
        trace_set,
        [(trace, [solution("a")]) for trace in traces],
        BenchmarkConfig(),
        0,
        lambda results: stored.extend(t.workload.axes["seq_len"] for t in results),
        emulate.Emulation("sm_90a", 7),
    )
    assert stored == [1, 3]


def test_a_compiler_that_lacks_or_fails_is_a_reason(monkeypatch, tmp_path: Path) -> None:
    from ptxemu import build

    monkeypatch.setenv(build.DIRECTORY_VARIABLE, str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setattr(build, "_processor", lambda: "another")
    assert re.match("false cannot build the PTX emulator: .*", emulate.why_not())
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    assert "needs a C++17 compiler" in emulate.why_not()


# --- the processes that emulate -------------------------------------------------------------------


def evaluate(
    case: None, config: None, solution: Solution, call: Callable
) -> tuple[dict[str, Any], torch.Tensor | None]:
    """Evaluate like `emulate.evaluate`; a solution's name tells how it ends."""
    output = call(*"xyz")
    if solution.name in ("passes", "differs"):
        fields = {"status": "PASSED", "correctness": {"max_absolute_error": 0.25}}
        return fields | {"performance": {"latency_ms": 3.0}}, output
    for number in {"dies": [signal.SIGKILL], "is signalled": ENDING}.get(solution.name, ()):
        os.kill(os.getpid(), number)
    return {"status": "RUNTIME_ERROR", "log": f"went on in {os.getpid()}"}, None


def evaluated(kernels: emulate.Kernels, *names: str) -> dict[str, dict[str, Any]]:
    """Return the evaluations of these solutions, without the emulator itself."""
    models = {name: torch.tensor([[3.0 if name == "differs" else 2.0]]) for name in names}
    futures = {
        name: kernels.submit(name, None, None, solution(name), models[name]) for name in names
    }
    return {name: emulate.fields_of(future) for name, future in futures.items()}


def test_the_fields_come_back_without_times(monkeypatch) -> None:
    monkeypatch.setattr(emulate, "emulate", lambda target: None)
    monkeypatch.setattr(emulate, "_run", lambda *_: torch.tensor([[2.0]]))
    monkeypatch.setattr(emulate, "evaluate", evaluate)
    with emulate.Kernels(emulate.Emulation("sm_90a", 7), 4) as kernels:
        results = evaluated(kernels, "passes", "fails", "differs", "is signalled")
        correctness = {"max_absolute_error": 0.25}
        assert results["passes"] == {
            "status": "PASSED", "correctness": correctness, "performance": {},
        }  # fmt: skip
        assert results["differs"]["status"] == "RUNTIME_ERROR"
        assert "not the reference model's" in results["differs"]["log"]
        for name in ("fails", "is signalled"):  # what ends both is left to the one that waits
            assert results[name].keys() == {"status", "log"}
            text, pid = results[name]["log"].rsplit(maxsplit=1)
            assert text == "went on in" and int(pid) != os.getpid()

        fields = evaluated(kernels, "dies")["dies"]  # and hangs nothing
        assert fields["status"] == "RUNTIME_ERROR" and "terminated abruptly" in fields["log"]
        assert evaluated(kernels, "passes") == {"passes": results["passes"]}, "in new processes"


LASTING = """
import os, signal, sys, time
from pathlib import Path
import small
from scripts.common import program
from scripts.measuring import emulate

def evaluate(case, config, solution, call):
    Path(sys.argv[1], str(os.getpid())).touch()
    time.sleep(900)

def main():
    with emulate.Kernels(emulate.Emulation("sm_90a", 7), 4) as kernels:
        solutions = [small.solution(str(i)) for i in range(4)]
        futures = [kernels.submit(s.name, None, None, s, None) for s in solutions]
        return len([future.result() for future in futures])

assert "cutlass" not in sys.modules
emulate.emulate, emulate.evaluate = lambda target: None, evaluate
for each in program.ENDING:
    signal.signal(each, program.interrupt)
program.run_main(main)
"""


@pytest.mark.parametrize(("number", "status"), [*SIGNALS, (signal.SIGKILL, -9)])
def test_no_process_stays_behind_one_that_is_ended(number, status: int, tmp_path: Path) -> None:
    """Processes are forked from one without the DSL, before whose import the emulator must be in
    place."""
    paths = os.pathsep.join([environment()["PYTHONPATH"], small.__file__.rpartition("/")[0]])
    command = [sys.executable, "-c", LASTING, str(tmp_path)]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths})
    while not (started := list(tmp_path.iterdir())) and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(600) == status
    assert started and all(gone(int(path.name)) for path in tmp_path.iterdir())


def test_a_token_that_is_not_the_models_is_named() -> None:
    model = torch.arange(1.0, 33).view(4, 8).bfloat16()
    output = model.clone()
    output[0, 0] += 2**-7  # the last place
    for most in (emulate.ROUNDING, emulate.HOPPER_ROUNDING):
        assert emulate.unlike(model, model, most) == emulate.unlike(output, model, most) == ""
    worse = output.clone()
    worse[2, 0] += 2**-2
    assert emulate.unlike(worse, model, emulate.ROUNDING).endswith("up to 1e-06), in tokens 2")
    assert not emulate.unlike(worse, model, emulate.HOPPER_ROUNDING)
    output[2, :4] = 0
    why = emulate.unlike(output, model, emulate.HOPPER_ROUNDING)
    assert why.startswith("the output is not the reference model's") and why.endswith("tokens 2")
    output[1, 3] = torch.nan
    why = emulate.unlike(output, model, emulate.HOPPER_ROUNDING)
    assert "calc_diff nan" in why and why.endswith("in tokens 1, 2")


def test_the_launches_of_an_earlier_call_do_not_count(monkeypatch) -> None:
    import ptxemu

    monkeypatch.setattr(ptxemu, "reports", ["of another call"])
    monkeypatch.setattr(emulate, "run_solution", lambda *_: "output")
    with pytest.raises(RuntimeError, match="no kernel was launched"):
        emulate._run("solution", [], "cpu")
    launch = ptxemu.reports.append
    monkeypatch.setattr(emulate, "run_solution", lambda *_: launch("a kernel") or "output")
    assert emulate._run("solution", [], "cpu") == "output"
