"""Calls that flashinfer_bench.apply and FlashInfer's Trace Apply hand to the exported solutions, on
the CPU through the reference model."""

import importlib.util
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from flashinfer_bench import ApplyConfig, apply, disable_apply, enable_apply
from flashinfer_bench.compile import BuilderRegistry
from flashinfer_bench.integration import flashinfer
from one_token import arguments
from test_pack import GENERATIONS, by_its_path, unpack
from test_submit import WORKLOADS, submit, traces_of, write

import run
from scripts.common.definitions import DEFAULT, Entry, find
from scripts.common.project import DEFINITION
from scripts.data.dataset import load, tokens
from scripts.pack.pack import PackError, generations
from scripts.submit import forms
from scripts.submit.forms import export_of

FUSED, V1 = "cutedsl_moe_fp8_fused", "cutedsl_moe_fp8_v1"
TRACES = ApplyConfig(max_atol=math.inf, max_rtol=math.inf)
"""Takes every trace that passed."""
NEAREST = TRACES.model_copy(update={"on_miss_policy": "use_def_best"})


def export(place: Path, form: str, traces: list[dict], *arguments: str) -> tuple[Path, str]:
    """Return the folder that the program writes for these traces, and its output."""
    common = [
        "--gpu",
        "H200",
        "--results",
        write(place / "run", traces),
        "--output",
        place / "made",
    ]
    done = submit(form, *arguments, *common)
    assert done.returncode == 0, done.stderr
    return place / "made", done.stderr


def measured(speedups: dict[str, dict[int, float]]) -> list[dict]:
    """Traces of these solutions at these token counts, with these speed-ups and the errors that
    such outputs have."""
    made = []
    for name, of in speedups.items():
        for trace in traces_of(export_of(GENERATIONS[name])):
            if speedup := of.get(trace["workload"]["axes"]["seq_len"]):
                trace["evaluation"]["performance"]["speedup_factor"] = speedup
                errors = {"max_absolute_error": 24288.0, "max_relative_error": 4e10}
                trace["evaluation"]["correctness"] = errors
                made.append(trace)
    return made


RUN = {FUSED: {1: 12.0, 7: 5.0, 80: 2.0}, V1: {1: 8.0, 7: 6.0, 80: 3.0}}
"""fused is the fastest at T=1, v1 at 7, 80 and in the geometric mean, though not in the sum."""


@pytest.fixture(scope="module")
def data_set(tmp_path_factory) -> Path:
    made, stdout = export(tmp_path_factory.mktemp("apply"), "apply", measured(RUN), "--mix")
    assert "3 of 19 workloads passed on NVIDIA H200" in stdout
    assert "triton_moe is not exported: no traces on a GPU named H200" in stdout
    return made


def test_unless_asked_for_a_tokens_bits_do_not_depend_on_the_batchs_size(tmp_path: Path) -> None:
    made, _ = export(tmp_path, "apply", measured(RUN))
    assert [path.stem for path in made.glob("solutions/**/*.json")] == [V1]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch) -> Iterator[Path]:
    """Tables and built solutions go to a directory of the test's own."""
    monkeypatch.setenv("FIB_CACHE_PATH", str(tmp_path))
    monkeypatch.setattr(BuilderRegistry, "_instance", None)
    # It would import flashinfer, where that is installed, to patch other operations.
    monkeypatch.setattr(flashinfer, "install_flashinfer_integrations", lambda: None)
    yield tmp_path
    BuilderRegistry.get_instance().cleanup()
    disable_apply()


@pytest.fixture
def built(monkeypatch) -> list[str]:
    """The solutions that are built when they are chosen, in order."""
    found: list[str] = []
    build = BuilderRegistry.build

    def named(self: BuilderRegistry, definition: Any, solution: Any) -> Any:
        found.append(solution.name)
        return build(self, definition, solution)

    monkeypatch.setattr(BuilderRegistry, "build", named)
    return found


@pytest.mark.all
def test_a_call_runs_the_fastest_solution_for_its_tokens(data_set, cache, built) -> None:
    values, expected = arguments()
    inputs, output = tuple(values.values())[:-1], values["output"]
    with enable_apply(str(data_set), TRACES):
        built.clear()
        returned = apply(DEFINITION, args=inputs)
        torch.testing.assert_close(returned.float(), expected, rtol=0.05, atol=0)
        # An output of the caller's is written; and arguments may have names.
        assert apply(DEFINITION, args=(*inputs, output)) is None
        assert torch.equal(output, returned)
        named = apply(DEFINITION, kwargs={n: v for n, v in values.items() if n != "output"})
        assert torch.equal(named, returned)

        @apply(DEFINITION)
        def layer(*inputs: object) -> None:
            raise AssertionError("the fallback")

        assert torch.equal(layer(*inputs), returned)
        assert built == [FUSED] * 4


def test_other_token_counts_are_the_fallbacks_or_the_most_frequent_winners(
    data_set, cache, built
) -> None:
    values, _ = arguments()
    two = values | {
        "routing_logits": values["routing_logits"].repeat(2, 1),
        "hidden_states": values["hidden_states"].float().repeat(2, 1).to(torch.float8_e4m3fn),
        "hidden_states_scale": values["hidden_states_scale"].repeat(1, 2),
    }
    inputs = tuple(two.values())[:-1]
    fallback = lambda *given: ("fallback", len(given))  # noqa: E731
    with enable_apply(str(data_set), TRACES):
        assert apply(DEFINITION, args=inputs, fallback=fallback) == ("fallback", 10)
        with pytest.raises(RuntimeError, match="Apply miss"):
            apply(DEFINITION, args=inputs)
    with enable_apply(str(data_set), NEAREST):
        built.clear()
        assert apply(DEFINITION, args=inputs, fallback=fallback).shape == (2, 7168)
        assert built == [V1]
    # The usual bounds, 0.01 and 1e-5, are of errors of outputs that reach 1e6.
    with enable_apply(str(data_set)), pytest.raises(RuntimeError, match="Apply miss"):
        apply(DEFINITION, args=inputs)


def test_the_directory_holds_what_apply_reads_and_only_what_is_backed(data_set: Path) -> None:
    below = f"moe-fp8-cutedsl/moe/{DEFINITION}"
    assert {p.relative_to(data_set).as_posix() for p in data_set.rglob("*") if p.is_file()} == {
        f"definitions/moe/{DEFINITION}.json",
        f"solutions/{below}/{FUSED}.json",
        f"solutions/{below}/{V1}.json",
        f"traces/{below}.jsonl",
    }
    definition = load(data_set)[0].definitions[DEFINITION]
    assert definition == load(run.ROOT)[0].definitions[DEFINITION]


def test_nothing_is_exported_without_traces_of_the_present_sources(tmp_path: Path) -> None:
    made = measured({FUSED: {7: 5.0}})
    made[0]["evaluation"]["environment"]["libs"]["solution_hash"] = "0123"
    with pytest.raises(AssertionError, match="(?s)measured with source.*no traces on a GPU"):
        export(tmp_path, "apply", made)
    assert not (tmp_path / "made").exists()


# --- FlashInfer's Trace Apply ---------------------------------------------------------------------

GEOMETRY = {"top_k": 8, "n_group": 8, "topk_group": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    traces = measured({FUSED: {tokens(t.workload): 2.0 for t in WORKLOADS}})
    return export(tmp_path_factory.mktemp("trace_apply"), "flashinfer", traces, FUSED)[0]


def test_the_solution_takes_names_and_returns_its_output(folder: Path, tmp_path: Path) -> None:
    (path,) = (folder / "solutions").rglob("*.json")
    content = json.loads(path.read_text())
    assert content["spec"]["destination_passing_style"] is False
    values, expected = arguments()
    del values["output"]
    solution = by_its_path(unpack(path.read_bytes(), tmp_path / "sources")).run
    returned = solution(**values, **GEOMETRY)
    torch.testing.assert_close(returned.float(), expected, rtol=0.05, atol=0)
    assert returned.dtype == torch.bfloat16
    for error, message, changed in (
        (TypeError, "gemm1_alpha: None is expected", {"gemm1_alpha": torch.ones(32)}),
        (TypeError, "clamp_limit: None is expected", {"gemm1_clamp_limit": torch.ones(32)}),
        (TypeError, "topk_group: 4 is expected", {"topk_group": 8}),
        (
            ValueError,
            "gemm1_weights: expected shape",
            {"gemm1_weights": values["gemm1_weights"][:, :2048]},
        ),
    ):
        with pytest.raises(error, match=message):
            solution(**values | GEOMETRY | changed)
    # Otherwise it is the solution that was measured.
    both = zip(export_of(GENERATIONS[FUSED]).content["sources"], content["sources"], strict=True)
    ((was, entry),) = (pair for pair in both if pair[0] != pair[1])
    assert was["path"] == "main.py" and entry["content"].startswith(was["content"])


QWEN, LIMITED = find("qwen3_235b"), find("glm5_limit10")
WAYS = {1: "renormalize", 4: "renormalize_naive"}


def exported(place: Path, of: Entry) -> Path:
    (generation,) = (g for g in generations(definition=of) if g.name == of.packed_name(FUSED))
    workloads = load(run.ROOT, of)[0].workloads[of.name]
    traces = traces_of(export_of(generation), workloads=workloads)
    made, stdout = export(place, "flashinfer", traces, "v5_fused", "--definition", of.short)
    assert "8 of 8 workloads passed" in stdout
    return made


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Path:
    """Exported for both names that FlashInfer has for the routing."""
    return exported(tmp_path_factory.mktemp("qwen"), QWEN)


@pytest.fixture(scope="module")
def limited(tmp_path_factory) -> Path:
    return exported(tmp_path_factory.mktemp("limited"), LIMITED)


def test_qwen_s_routing_has_flashinfers_names(qwen: Path, tmp_path: Path) -> None:
    names = [f"moe_fp8_block_scale_{way}_routing_topk8_e128_h4096_i1536" for way in WAYS.values()]
    assert sorted(p.stem for p in qwen.glob("definitions/moe/*")) == sorted(names)
    paths = sorted(qwen.glob("solutions/**/*.json"), key=lambda path: path.stem)
    assert [json.loads(p.read_text())["definition"] for p in paths] == names
    assert [p.stem for p in paths] == [f"{FUSED}_{QWEN.short}_{way}" for way in WAYS.values()]
    values, expected = arguments(run.ROOT / QWEN.path)
    del values["output"]
    solution = by_its_path(unpack(paths[0].read_bytes(), tmp_path / "sources")).run
    reference: dict[str, Any] = {}
    text = json.loads((qwen / f"definitions/moe/{names[0]}.json").read_text())["reference"]
    exec(text, reference)
    given = {"top_k": 8, "local_expert_offset": 0, "routed_scaling_factor": 1.0}
    wrong = {
        "local_expert_offset": 1,
        "routed_scaling_factor": 2.5,
        "routing_bias": torch.zeros(128),
    }
    for called in solution, reference["run"]:
        torch.testing.assert_close(called(**values, **given).float(), expected, rtol=0.05, atol=0)
        for name, other in wrong.items():
            with pytest.raises(TypeError, match=f"{name}: .* is expected"):
                called(**values, **given | {name: other})


def test_a_limit_is_compared_once_for_a_tensor_and_what_was_written(
    limited: Path, tmp_path: Path, monkeypatch
) -> None:
    (path,), (definition,) = limited.glob("solutions/**/*.json"), limited.glob("definitions/moe/*")
    assert f"{definition.stem}_limit10" == LIMITED.name  # FlashInfer's names know no limit
    values, expected = arguments(run.ROOT / LIMITED.path)
    del values["output"]
    reference: dict[str, Any] = {}
    exec(json.loads(definition.read_text())["reference"], reference)
    equal, compared = torch.equal, []
    monkeypatch.setattr(torch, "equal", lambda a, b: compared.append(a) or equal(a, b))
    solution = by_its_path(unpack(path.read_bytes(), tmp_path / "sources")).run
    for called in solution, reference["run"]:
        with torch.inference_mode():
            without_version = torch.full((32,), 10.0)
        for limit in without_version, torch.full((32,), 10.0):
            compared.clear()
            for _ in range(2):
                got = called(**values, gemm1_clamp_limit=limit)
                torch.testing.assert_close(got.float(), expected, rtol=0.05, atol=0)
            assert len(compared) == 1
        with pytest.raises(TypeError, match="gemm1_beta: None is expected"):
            called(**values, gemm1_clamp_limit=limit, gemm1_beta=torch.ones(32))
        limit[31] = 9.0
        for wrong in None, limit, limit[:31], torch.full((32,), 10.0, dtype=torch.float64):
            with pytest.raises(TypeError, match="gemm1_clamp_limit: 32 float32 values of 10.0 are"):
                called(**values, gemm1_clamp_limit=wrong)


def test_what_flashinfer_has_no_function_for_is_refused(tmp_path: Path) -> None:
    gemm = find("gemm1")
    generation = generations(definition=gemm)[0]
    definition = load(run.ROOT, gemm)[0].definitions[gemm.name]
    with pytest.raises(PackError, match="Trace Apply has no grouped_gemm_fp8"):
        forms.flashinfer_files([export_of(generation)], definition)


def test_the_inputs_are_those_of_flashinfers_own_traces(
    folder: Path, limited: Path, qwen: Path
) -> None:
    """Names and order are equal, so that calls by position reach ours."""
    templates = pytest.importorskip("flashinfer.trace.templates.moe")
    for place, way in (folder, "ds"), (limited, "ds"), *((qwen, way) for way in WAYS.values()):
        template = getattr(templates, f"trtllm_fp8_block_scale_moe_{way}_routing_trace")
        (path,) = place.glob(f"definitions/moe/{template.name_prefix}_*.json")
        inputs = json.loads(path.read_text())["inputs"]
        assert list(inputs) == list(template.inputs)
        absent = {name for name, spec in template.inputs.items() if getattr(spec, "optional", 0)}
        assert {name for name, spec in inputs.items() if spec.get("optional")} == absent


PROGRAM = """
import sys
from pathlib import Path
import torch
sys.path[:0] = [{tests!r}]
torch.cuda.is_current_stream_capturing = lambda: False  # torch without CUDA has none
import flashinfer
from flashinfer import trace_apply
from one_token import arguments

values, expected = arguments(Path({definition!r}))
del values["output"]

def call(method, **more):
    given = values | {{"routing_method_type": method}} | {given!r} | more
    return flashinfer.fused_moe.trtllm_fp8_block_scale_moe(**given)

def right(got):
    return bool(abs(got.float() - expected).max() < 0.05)

{calls}
print(trace_apply.stats())
"""


CALLS = """
got = call(2)
print(right(got))
output = torch.full_like(got, 3.0)
returned = call(2, output=output)
print(bool((output == 3).all()), torch.equal(returned, got))
print(torch.equal(call(2, use_shuffled_weight=True), got))
for method, more in (2, {"gemm1_alpha": torch.ones(32)}), (1, {}):
    try:
        call(method, **more)
        print("nothing raised")
    except Exception as error:
        print(type(error).__name__, str(error).splitlines()[0])
"""
PRINTED = [
    "True",
    "True True",  # the caller's output is not written, the result is returned
    "True",  # what is no input of the definition is not passed on
    "TypeError .*gemm1_alpha",
    "(?!nothing|TypeError)",  # what stays FlashInfer's, which has nothing to run here
    ".*'hit': 3.*'error': 1|.*'error': 1.*'hit': 3",
]
SIZES = {"num_experts": 256, "intermediate_size": 2048, "local_num_experts": 32}
QWENS = {"num_experts": 128, "intermediate_size": 1536, "local_num_experts": 128, "top_k": 8}
QWENS |= dict.fromkeys(("n_group", "topk_group", "routing_bias", "routed_scaling_factor"))
BOTH = "print(right(call(1)), right(call(4)))"
LIMIT = "print(right(call(2, gemm1_clamp_limit=torch.full((32,), 10.0))))"
GLM = GEOMETRY | SIZES | dict.fromkeys(("n_group", "topk_group"), 1)


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="no flashinfer")
@pytest.mark.all
@pytest.mark.parametrize(
    ("which", "definition", "given", "calls", "printed"),
    [
        ("folder", DEFAULT, GEOMETRY | SIZES, CALLS, PRINTED),
        ("qwen", QWEN, QWENS | {"local_expert_offset": 0}, BOTH, ["True True", ".*'hit': 2"]),
        ("limited", LIMITED, GLM, LIMIT, ["True", ".*'hit': 1"]),
    ],
)
def test_flashinfers_function_is_ours_before_it_looks_for_a_gpu(
    which, definition: Entry, given: dict, calls: str, printed: list[str], request, tmp_path: Path
) -> None:
    tests, path = str(Path(__file__).parent), str(run.ROOT / definition.path)
    text = PROGRAM.format(tests=tests, definition=path, given=given, calls=calls)
    env = run.environment() | {"FLASHINFER_TRACE_APPLY": "1", "HOME": str(tmp_path)}
    env["FLASHINFER_TRACE_APPLY_PATH"] = str(request.getfixturevalue(which))
    env["FLASHINFER_WORKSPACE_BASE"] = str(tmp_path)
    command = [sys.executable, "-c", text]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for line, wanted in zip(done.stdout.splitlines()[-len(printed) :], printed, strict=True):
        assert re.match(wanted, line), line
