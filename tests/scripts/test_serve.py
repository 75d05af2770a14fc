"""`run.py serve` on a stand-in of an engine; its loader, layer check and tables."""

import contextlib
import importlib.metadata
import json
import math
import os
import sys
import time
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from moe_fp8 import api, experts, from_mxfp4, pack_mxfp4
from moe_fp8.cache import CACHE_VARIABLE, KernelCache
from moe_fp8.kernels import compile as compiling
from moe_fp8.kernels import fused
from moe_fp8.kernels.architectures import HOPPER
from moe_fp8.reference import calc_diff, quantise_blocks, quantise_rows
from moe_fp8.serving import prepare
from moe_fp8.shape import Form, MoeShape
from mxfp4_values import drawn
from programs import call, gone

from scripts import serve
from scripts.common.program import ROOT, Failure, UsageError
from scripts.measuring.accuracy import in_float32
from scripts.publishing import tables
from scripts.publishing.rows import FILE, read
from scripts.serve import Backend
from scripts.serving import clients, engines, worker
from scripts.serving.engines import OWN, Generated, Setup, Vllm, find_model, start
from scripts.serving.worker import Measuring, TimesGraphs, checking

STAND_IN = ROOT / "tests/support/stand_ins/engines"
SMALL = MoeShape(4, 4, 256, 128, 1, 1, 2, "given")
QUICK = ["--batches", "1,2", "--prompts", "8", "--repeats", "2", "--random-weights"]


@pytest.fixture(scope="module")
def stand_in():
    """The stand-in is the engine, in this process and in those that it starts."""
    paths = (STAND_IN, ROOT, ROOT / "solutions")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(STAND_IN)
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))
        yield


@pytest.fixture(scope="module")
def served_rows(tmp_path_factory, stand_in) -> tuple[list[dict[str, Any]], str]:
    """Return the rows and the output of a run of three backends, two of them at once."""
    file = tmp_path_factory.mktemp("serve") / FILE
    options = ("--model", "qwen3-30b-a3b", "--layers", "2", "--compare", "engine,ours,accurate")
    done = call("serve", *options, *QUICK, "--together", "2", "--out", file)
    assert done.returncode == 0, done.stderr
    recorded = read(file)
    head = recorded.measurements[tables.SERVED["vllm"]]
    assert head["environment"]["versions"]["torch"] and head["method"].endswith(
        "2 backends in turns"
    )
    return recorded.rows_of(tables.SERVED["vllm"]), done.stdout


def values(rows: list[dict[str, Any]], what: str, backend: str) -> list[Any]:
    return [row["value"] for row in rows if (row["part"], row["subject"]) == (what, backend)]


def test_a_record_has_every_figure_of_every_backend(served_rows):
    rows, _ = served_rows
    for backend in ("engine", "ours", "accurate"):
        own_rows = [row for row in rows if row["subject"] == backend and "calls" in row]
        figures = [("decode", 1), ("decode", 2), ("prefill", 8), ("mixed", 2)]
        assert [(row["part"], row["size"]) for row in own_rows] == figures
        assert all(row["calls"] == 2 and row["spread"] >= 0 for row in own_rows)
        (seconds,) = values(rows, "start", backend)
        assert not values(rows, "first start", backend)
        assert seconds > 0 and values(rows, "same tokens alone and among others", backend) == [True]
    head = {"engine": "vllm", "engine_version": "0.0.stand-in", "model": "qwen3-30b-a3b",
            "layers": 2, "gpus": 1, "parallel": "tensor"}  # fmt: skip
    assert all(row.items() >= head.items() for row in rows)


def test_layers_are_compared_kernels_counted_and_tables_shown(served_rows):
    rows, text = served_rows
    assert not values(rows, "calc_diff of a layer", "engine")
    (fast,) = values(rows, "calc_diff of a layer", "ours")
    (accurate,) = values(rows, "calc_diff of a layer", "accurate")
    assert accurate < 1e-5 < fast < 1e-3
    for backend, counts in {"engine": ([], []), "ours": ([2], [1]), "accurate": ([2], [1])}.items():
        for what, count in zip(("at start", "later"), counts, strict=True):
            assert values(rows, f"our kernels compiled {what}", backend) == count
    assert values(rows, "of ours, by the engine's monitor", "ours") == [0]
    assert "2 layers: decode in ms a step, prefill in ms, mixed in tokens/s" in text
    assert "decode 1" in text and "mixed 2" in text and f"{fast:.2e} (layer 0)" in text


@pytest.mark.parametrize(("compile_", "starts"), [(0, 1), (1, 2), (2, 3), (9, 3)])
def test_both_start_until_neither_compiles(compile_, starts, monkeypatch, tmp_path, capsys):
    def backend(setup, logs, start):
        begun.append((setup.backend, start))
        compiled = [serve.COMPILED] * (setup.backend == "ours" and len(begun) <= 2 * compile_)
        return SimpleNamespace(
            setup=setup, version="", start_seconds=1.0, ready=lambda: None,
            log_lines=lambda text: compiled, close=lambda: ended.append((setup.backend, start)),
        )  # fmt: skip

    begun: list[tuple[str, str]] = []
    ended: list[tuple[str, str]] = []
    monkeypatch.setattr(serve, "Backend", backend)
    model = find_model("qwen3-30b-a3b", 2, True)
    setups = [Setup("vllm", name, model) for name in ("engine", "ours")]
    with contextlib.ExitStack() as stack:
        starting = serve.started(setups, tmp_path, stack)
        rows = []
        with pytest.raises(StopIteration) as stop:
            while True:
                rows.append(next(starting))
        assert [last.setup.backend for last in stop.value.value] == ["engine", "ours"]
        assert len(set(begun)) == len(begun) == 2 * starts and len(ended) == 2 * (starts - 1)
    assert sorted(ended) == sorted(begun)
    assert {row["subject"] for row in rows} <= {"ours"} and len(rows) == starts - 1
    assert ("slower host" in capsys.readouterr().err) == (compile_ > 3)


@pytest.mark.all
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("serves nothing", "^ours: nothing is served: the log does not name moe_fp8"),
        ("does not start", "^ours: RuntimeError: no room for the model; the end of"),
        ("dies", "^ours: the process ended; the end of"),
    ],
)
def test_a_broken_engine_is_one_error(wrong, message, stand_in, monkeypatch, tmp_path):
    monkeypatch.setenv("STAND_IN", wrong)
    setup = Setup("vllm", "ours", find_model("deepseek-v3", None, True), random_weights=True)
    with pytest.raises(Failure, match=message):
        list(serve.measure([setup], serve.Plan((1,), (8,), 1), tmp_path, {}))


@pytest.mark.parametrize(
    ("ended", "status", "last_line", "decoded"),
    [
        (Failure("no memory"), 1, "error: no memory", True),
        (KeyboardInterrupt(), 130, "interrupted", False),
    ],
)
def test_the_tables_have_what_there_is(ended, status, last_line, decoded, stand_in, monkeypatch):
    def measure(group, *_):
        if group[0].backend == "ours":
            raise ended
        yield serve.row_of(named("engine"), "first start", None, 9.5, "s")
        if decoded:
            yield serve.row_of(named("engine"), "decode", 1, 2.5, "ms a step", spread=0.0)

    monkeypatch.setattr(serve, "measure", measure)
    done = call("serve", "--model", "qwen3-30b-a3b", *QUICK)
    assert done.returncode == status and done.stderr.endswith(f"{last_line}\n")
    assert ("decode 1" in done.stdout and "2.50" in done.stdout) == decoded
    assert "9.5 s" in done.stdout


@pytest.mark.parametrize("wrong", ["", "dies"])
def test_nothing_that_an_engine_has_started_goes_on(wrong, stand_in, monkeypatch, tmp_path):
    """The workers hold the GPU's memory: they end, even if the engine itself has ended before."""
    monkeypatch.setenv("STAND_IN", wrong)
    model = find_model("deepseek-v3", None, True)
    backend = Backend(Setup("vllm", "engine", model, random_weights=True), tmp_path)
    try:
        backend.ready()
        with pytest.raises(Failure) if wrong else contextlib.nullcontext():
            backend.ask("check", 9)
    finally:
        backend.close()
    (line,) = backend.log_lines("worker ")
    assert gone(int(line.split()[1])) and gone(backend.process.pid)


def test_a_backend_that_ends_before_its_turn_is_an_error(tmp_path):
    """The kernel ends such a process for its memory."""
    backend = object.__new__(Backend)
    backend.setup = Setup("vllm", "ours", find_model("qwen3-30b-a3b", 2, True))
    backend.log = tmp_path / "log"
    backend.log.write_text("the last line\n")
    backend.connection, its = Pipe()
    its.close()
    with pytest.raises(Failure, match="^ours: the process ended; .*log:\nthe last line"):
        backend.ask("check")


def test_backends_that_run_one_after_another_are_compared_with_the_first(stand_in, tmp_path):
    answers: serve.Answers = {}
    model = find_model("qwen3-30b-a3b", 2, True)
    for backend in ("engine", "accurate"):
        setup = Setup("vllm", backend, model, random_weights=True)
        plan = serve.Plan((1,), (8,), 1, True, ([5, 1, 3], [5, 4, 3]))
        rows = list(serve.measure([setup], plan, tmp_path, answers))
        ((loss, error),) = [(r["value"], r["standard_error"]) for r in rows if r["part"] == "loss"]
        half = 0.8 if backend == "accurate" else 0.7
        assert loss == pytest.approx(half / 4) and error == pytest.approx(half / 4)
        shares = values(rows, "tokens before the first other than engine's", backend)
        assert len(shares) == (backend != "engine")
        alone = values(rows, "same tokens alone and among others", backend)
        assert not alone, "with batches of one there are no others"
        late = values(rows, "our kernels compiled later", backend)
        assert late == [2] * (backend != "engine"), "what the compared prompts compile, too"
    assert 0 <= shares[0] <= 1 and [*answers] == ["engine", "accurate"]
    assert values(rows, "loss less engine's", "accurate") == pytest.approx([0.1 / 4])
    assert values(rows, "likeliest token is engine's", "accurate") == [0.75]
    assert "0.02500 ± 0.02500 nats a token" in tables.served_checks(rows).text()


def test_an_http_server_is_timed_with_clients_at_once(stand_in, tmp_path, monkeypatch):
    monkeypatch.setattr(serve, "MIXED_TOKENS", 4)
    setup = Setup("vllm", "ours", find_model("qwen3-30b-a3b", 2, True), random_weights=True)
    plan = serve.Plan((1,), (8,), 2, clients=3)
    rows = list(serve.served(setup, plan, tmp_path, "1"))
    assert [(row["part"], row["size"], row["calls"]) for row in rows] == [
        (what, 3, 2) for what in serve.HTTP
    ]
    first, token, per_s = (row["value"] for row in rows)
    assert 10 <= first < 500 and 9 <= token < 200
    assert per_s == pytest.approx(3 * (512 + 4) / (1e-3 * (first + 3 * token)), rel=0.5)
    monkeypatch.setenv("STAND_IN", "refuses")
    with pytest.raises(Failure, match="ours: .* status 400"):
        list(serve.served(setup, plan, tmp_path, "1"))
    monkeypatch.setattr(
        serve.clients, "command", lambda *_: [sys.executable, "-c", "raise OSError"]
    )
    with pytest.raises(Failure, match="(?s)the server ended; the end of .*OSError"):
        list(serve.served(setup, plan, tmp_path, "1"))


def test_a_server_has_the_options_of_the_offline_engine():
    model = find_model("qwen3-30b-a3b", 2, True)
    command = clients.command(Setup("vllm", "deep_gemm", model, batches=(1, 4)), 80)
    text = " ".join(command)
    assert f"serve {model.directory} --tokens-only --port 80" in text
    assert '--kernel-config {"moe_backend": "deep_gemm"}' in text
    assert "--no-enable-prefix-caching --disable-log-stats --tensor-parallel-size 1" in text
    text = " ".join(clients.command(Setup("sglang", "ours", model, batches=(1, 4)), 80))
    assert "sglang.launch_server --model-path" in text and "--port 80 --skip-tokenizer-init" in text
    assert "--disable-radix-cache --cuda-graph-bs-decode 1 4 --cuda" in text


@pytest.mark.parametrize(
    ("engine", "ours", "share", "difference"),
    [
        ([([1, 2, 3, 4], [-0.1, -0.2, -0.3, -9.0])], [([1, 2, 3, 5], [-0.1, -0.25, -0.3, -0.4])],
         0.75, 0.05),
        ([([1, 2], [-0.2, -0.3]), ([3, 4], [-0.1, -0.1])],
         [([1, 2], [-0.1, -0.3]), ([4, 4], [-8.0, -0.1])], 0.5, 0.1),
        ([([1], [-0.2])], [([2], [-0.3])], 0.0, 0.0),
    ],
)  # fmt: skip
def test_tokens_are_compared_until_the_first_other(engine, ours, share, difference):
    answers = {"engine": serve.Answer(engine, []), "ours": serve.Answer(ours, [])}
    rows = list(serve.compared(named("ours"), answers))
    assert [row["value"] for row in rows] == pytest.approx([share, difference])


@pytest.mark.parametrize("others_matter", [False, True])
def test_a_request_is_to_have_the_same_tokens_alone_and_among_others(others_matter, tmp_path):
    def generate(prompts, tokens):
        token = len(prompts) * others_matter
        return [Generated([len(prompt), token], []) for prompt in prompts]

    measuring = Measuring(SimpleNamespace(version="", generate=generate), 1000)
    answers = {"check": None, "alone": measuring.alone()}
    (tmp_path / "layers-1.txt").write_text("0.0002\n")
    backend = named("ours", directory=tmp_path, ask=lambda what, *_: answers[what])
    backend.setup = replace(backend.setup, batches=(1, 2))
    (same,) = values(serve.check(backend), "same tokens alone and among others", "ours")
    assert same is not others_matter


def test_kernels_of_ours_that_a_request_waited_for_are_counted():
    lines = [f"Triton {kernel} {serve.COMPILED_LATE}" for kernel in ("FusedMoeA", "rms_norm")]
    backend = named("engine", log_lines={serve.COMPILED_LATE: lines}.get)
    assert [row["value"] for row in serve.counted(backend, 0)] == [1]


VLLM = {
    "enable_prefix_caching": False, "max_model_len": 4096 + 256, "max_num_batched_tokens": 4096,
    "max_num_seqs": 8, "gpu_memory_utilization": 0.45, "tensor_parallel_size": 2,
    "enable_expert_parallel": True, "compilation_config": {"cudagraph_capture_sizes": [1, 8]},
    "load_format": "dummy", "hf_overrides": {"num_hidden_layers": 2}, "dtype": "bfloat16",
}  # fmt: skip
SGLANG = {
    "disable_radix_cache": True, "context_length": 4096 + 256, "chunked_prefill_size": 4096,
    "max_prefill_tokens": 4096, "max_running_requests": 8, "mem_fraction_static": 0.45,
    "max_total_tokens": 8 * (512 + 64), "cuda_graph_max_bs_prefill": 4096,
    "tp_size": 2, "ep_size": 2, "cuda_graph_bs_decode": [1, 8], "load_format": "dummy",
    "json_model_override_args": '{"num_hidden_layers": 2}', "dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize(
    ("engine", "expected", "asked"),
    [("vllm", VLLM, {"kernel_config": {"moe_backend": "triton"}}),
     ("sglang", SGLANG, {"moe_runner_backend": "triton"})],
)  # fmt: skip
def test_all_backends_of_an_engine_get_the_same_options(engine, expected, asked, monkeypatch):
    """The options differ in the kernel alone. Prefix caches are off."""
    module = SimpleNamespace(__version__="1", __file__="", SamplingParams=None)
    module.LLM = module.Engine = lambda **options: options
    monkeypatch.setitem(sys.modules, engine, module)
    monkeypatch.setattr(engines, "use_tuned_files", lambda folder: None)
    model = find_model("qwen3-30b-a3b", 2, True)
    setup = Setup(engine, "engine", model, True, 4096, (1, 8), 2, True, 0.45)
    options_by_backend = {}
    for backend in ("engine", *OWN, "triton", *["tuned"] * (engine == "vllm")):
        started = start(replace(setup, backend=backend))
        options_by_backend[backend] = started.llm if engine == "vllm" else started.engine
    assert options_by_backend["engine"].items() >= expected.items()
    assert options_by_backend.pop("triton") == options_by_backend["engine"] | asked
    assert all(options == options_by_backend["engine"] for options in options_by_backend.values())


def test_tuned_files_are_those_of_this_gpu_and_else_of_an_h200(tmp_path, monkeypatch):
    configs = tmp_path / "vllm/model_executor/layers/fused_moe/configs"
    configs.mkdir(parents=True)
    for sizes, gpu, dtype in (
        ("E=8,N=1", "H200", "fp8_w8a8"), ("E=8,N=1", "H100", "fp8_w8a8"),
        ("E=8,N=2", "H200", "fp8_w8a8"), ("E=8,N=3", "H200", "int8_w8a8"),
    ):  # fmt: skip
        name = f"{sizes},device_name=NVIDIA_{gpu},dtype={dtype}.json"
        (configs / name).write_text(f"{sizes} {gpu}")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    monkeypatch.setenv(engines.DIRECTORY, str(tmp_path))
    monkeypatch.setenv("VLLM_TUNED_CONFIG_FOLDER", "")
    engines.use_tuned_files(tmp_path / "vllm")
    files = Path(os.environ["VLLM_TUNED_CONFIG_FOLDER"]).iterdir()
    assert {file.name: file.read_text() for file in files} == {
        f"{sizes},device_name=NVIDIA_H100,dtype=fp8_w8a8.json": f"{sizes} {gpu}"
        for sizes, gpu in (("E=8,N=1", "H100"), ("E=8,N=2", "H200"))
    }


def named(backend: str, **more: Any) -> Any:
    setup = Setup("vllm", backend, find_model("qwen3-30b-a3b", None, True))
    defaults = {"log_lines": lambda text: [text], "ask": lambda *asked: None}
    return SimpleNamespace(setup=setup, version="", start_seconds=1.0, **defaults | more)


@pytest.mark.parametrize("wrong", ["0.9", "nan", "inf"])
def test_a_layer_that_computes_something_else_is_an_error(wrong, tmp_path):
    (tmp_path / "layers-1.txt").write_text(f"0.0002\n{wrong}\n")
    rows = []
    with pytest.raises(Failure, match="^ours: a layer's calc_diff is "):
        for row in serve.check(named("ours", directory=tmp_path)):
            rows.append(row)
    figures = ["0.0002", *(wrong for _ in range(wrong == "0.9"))]
    assert [str(row["value"]) for row in rows[1:]] == figures, "a row has no NaN"


def test_a_layer_of_which_no_call_was_seen_is_an_error(tmp_path):
    with pytest.raises(Failure, match="^ours: no call of .* tokens was seen"):
        list(serve.check(named("ours", directory=tmp_path)))


def options(*more: str) -> Any:
    return serve.arguments(["--model", "qwen3-30b-a3b", *more])


def test_an_engine_that_is_absent_is_named(monkeypatch):
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="^sglang is not installed for .*pip install -e"):
        serve.setups(options("--engine", "sglang"))
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: name)
    with pytest.raises(UsageError, match="^--batch-invariant: with --engine vllm only"):
        serve.setups(options("--engine", "sglang", "--batch-invariant"))
    with pytest.raises(UsageError, match="^--compare engine,: a name between commas is empty"):
        serve.setups(options("--compare", "engine,"))
    with pytest.raises(UsageError, match="^--http: the backend tuned has no server"):
        serve.setups(options("--random-weights", "--compare", "engine, tuned", "--http", "2"))


def test_a_plugin_that_the_engine_does_not_find(monkeypatch):
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(serve, "is_installed", lambda engine: False)
    with pytest.raises(UsageError, match="^vllm does not find the plugin"):
        serve.setups(options("--random-weights"))
    assert len(serve.setups(options("--random-weights", "--compare", "engine"))) == 1


def test_the_bf16_weights_are_a_backend_of_their_own(monkeypatch, tmp_path):
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: name)
    for name in ("fp8", "bf16"):
        (tmp_path / name).mkdir()
        config = {"num_hidden_layers": 2, "vocab_size": 300, "name": name}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    both = ("--compare", "bf16,engine", "--bf16", str(tmp_path / "bf16"))
    bf16, engine = serve.setups(options("--model", str(tmp_path / "fp8"), *both))
    assert bf16.model.directory.name == "bf16" and bf16.model.name == engine.model.name == "fp8"
    for wrong in (both[:2], both[2:]):
        with pytest.raises(UsageError, match="need each other"):
            serve.setups(options("--model", str(tmp_path / "fp8"), "--compare", "engine", *wrong))
    with pytest.raises(UsageError, match="random weights say nothing"):
        serve.setups(options("--random-weights", *both))


def test_a_text_is_read_in_whole_windows(monkeypatch, tmp_path):
    def from_pretrained(directory):
        return lambda text, add_special_tokens: {"input_ids": [*text.encode()]}

    tokenizer = SimpleNamespace(from_pretrained=from_pretrained)
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoTokenizer=tokenizer))
    model, text = find_model("qwen3-30b-a3b", 2, True), tmp_path / "text"
    text.write_bytes(b"a" * serve.WINDOW + b"b" * serve.WINDOW + b"c")
    first, second = serve.windows_of(text, model)
    assert {*first} == {*b"a"} and {*second} == {*b"b"} and len(second) == serve.WINDOW
    text.write_bytes(b"a" * serve.WINDOW)
    with pytest.raises(UsageError, match="1024 tokens; two windows need 2048"):
        serve.windows_of(text, model)
    with pytest.raises(UsageError, match="No such file"):
        serve.windows_of(tmp_path / "missing", model)


def test_setups_follow_the_options(monkeypatch):
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: name)
    arguments = ("--random-weights", "--compare", "engine, deep_gemm,ours", "--together", "2",
                 "--batches", "1,4", "--prompts", "512", "--tensor-parallel", "2",
                 "--expert-parallel", "--batch-invariant")  # fmt: skip
    first, second, third = serve.setups(options(*arguments))
    assert (first.backend, second.backend, third.backend) == ("engine", "deep_gemm", "ours")
    assert first.most_tokens == engines.CHECK_TOKENS["vllm"] and first.share == 0.45
    assert first.variables == {"MOE_FP8_VLLM": "0", "VLLM_BATCH_INVARIANT": "1"}
    assert third.variables["MOE_FP8_VLLM"] == "1" and third.expert_parallel
    of_sglang = Setup("sglang", "accurate", first.model)
    assert of_sglang.variables == {"MOE_FP8_SGLANG": "accurate", "MOE_FP8_MXFP4": "exact"}


@pytest.mark.parametrize(
    ("engine", "options", "head"),
    [
        ("vllm", {"tensor_parallel": 2}, {"gpus": 2, "dense": "DeepGEMM"}),
        ("vllm", {"tensor_parallel": 2, "expert_parallel": True}, {"gpus": 2, "parallel": "expert",
         "dense": "DeepGEMM"}),
        ("vllm", {"batch_invariant": True}, {"batch_invariant": True, "dense": "DeepGEMM"}),
        ("sglang", {}, {}),
    ],
)  # fmt: skip
def test_a_row_says_how_the_model_was_served(engine, options, head, monkeypatch):
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "1")
    setup = Setup(engine, "ours", find_model("qwen3-30b-a3b", 2, True), **options)
    backend = SimpleNamespace(setup=setup, version="1")
    usual = {"gpus": 1, "parallel": "tensor", "batch_invariant": None, "dense": None}
    row = serve.row_of(backend, "decode", 1, 2.0, "ms", calls=3)
    # DeepGEMM runs dense layers alone: vLLM takes the variable as a choice of the experts' kernel.
    asked = setup.variables.get("VLLM_MOE_USE_DEEP_GEMM")
    assert asked == ("0" if engine == "vllm" else None)
    assert row == usual | head | {
        "engine": engine, "engine_version": "1", "model": "qwen3-30b-a3b", "layers": 2,
        "subject": "ours", "part": "decode", "size": 1, "value": 2.0, "unit": "ms", "calls": 3,
    }  # fmt: skip
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "0")
    assert serve.row_of(backend, "decode", 1, 2.0, "ms")["dense"] is None


@pytest.mark.parametrize("name", engines.MODELS)
def test_known_models(name):
    model = find_model(name, None, True)
    assert json.loads((model.directory / "config.json").read_text()) == model.config
    assert model.layers <= model.published and model.vocabulary > 10_000
    assert model.overrides.get("num_hidden_layers", model.published) == model.layers
    quantisation = model.config["quantization_config"]
    if name.endswith("mxfp4"):  # tests/engines lets vLLM read it
        assert quantisation["quant_method"] == "compressed-tensors"
        return
    assert quantisation["weight_block_size"] == [128, 128]
    # vLLM quantises Qwen3's routers unless they are named.
    routers = [f"model.layers.{i}.mlp.gate" for i in range(model.published)]
    assert quantisation["modules_to_not_convert"] == [
        "lm_head",
        *(routers if name.startswith("qwen3") else ()),
    ]


@pytest.mark.parametrize(
    ("name", "layers", "random", "message"),
    [
        ("nothing", None, True, "--model nothing: expected a directory, or one of deepseek-v3"),
        ("kimi-k2", None, False, "--model kimi-k2 has no weights: give --random-weights"),
        ("qwen3-30b-a3b", 49, True, "--layers 49: qwen3-30b-a3b has 48"),
    ],
)
def test_models_that_cannot_be_served(name, layers, random, message):
    with pytest.raises(UsageError, match=f"^{message}"):
        find_model(name, layers, random)


def test_a_part_of_trained_weights_is_refused():
    with pytest.raises(UsageError, match="^--layers: a part of trained weights says nothing"):
        find_model(str(engines.directory_of("kimi-k2")), 2, False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text_config": {}, "vocab_size": 9}', "KeyError: 'num_hidden_layers'"),
        ('{"num_hidden_layers": 4}', "KeyError: 'vocab_size'"),
        ("{", "JSONDecodeError: "),
        ("[]", "TypeError: "),
    ],
)
def test_a_configuration_that_says_too_little(content, message, tmp_path):
    """A configuration with separate sizes for text and pictures is one of these."""
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UsageError, match=f"config.json: {message}"):
        find_model(str(tmp_path), None, False)


def test_random_weights_follow_from_names_and_have_a_sane_spread():
    def draw(name: str, *size: int, dtype=torch.float32) -> torch.Tensor:
        p = torch.zeros(size, dtype=dtype)
        worker.fill([(name, p)])
        return p

    k = 512
    w = draw("layers.1.experts.w13_weight", 4, 256, k, dtype=torch.float8_e4m3fn)
    again = draw("layers.1.experts.w13_weight", 4, 256, k, dtype=torch.float8_e4m3fn)
    other = draw("layers.2.experts.w13_weight", 4, 256, k, dtype=torch.float8_e4m3fn)
    assert torch.equal(w.float(), again.float()) and not torch.equal(w.float(), other.float())
    scale = draw("layers.1.experts.w13_weight_scale_inv", 4, 2, k // 128)
    assert 0.4 < float(scale.std() / scale.mean()) * 12**0.5 < 1.6  # drawn evenly, 0.5 to 1.5
    spread = (w.float() * scale.repeat_interleave(128, 1).repeat_interleave(128, 2)).std()
    assert abs(float(spread) * k**0.5 - 1) < 0.15
    down = draw("layers.1.experts.w2_weight_scale_inv", 4, 2, k // 128)
    assert float(down.mean() / scale.mean()) == pytest.approx(3, rel=0.3)
    for name, wanted in {"q_proj": 1.0, "lm_head": 3.0, "embed_tokens": 0.5 * k**0.5}.items():
        assert float(draw(f"{name}.weight", 64, k).std()) * k**0.5 == pytest.approx(wanted, rel=0.1)
    assert draw("layers.0.input_layernorm.weight", 8).tolist() == [1.0] * 8
    bias = draw("layers.0.gate.e_score_correction_bias", 64)
    assert 0 <= float(bias.min()) < float(bias.max()) <= 0.1
    assert float(draw("attn.k_scale", 1)) == 0.0, "as the engine made it"
    assert draw("some.int", 4, dtype=torch.int32).tolist() == [0] * 4
    assert draw("some.bytes", 4, dtype=torch.uint8).tolist() == [0] * 4


@pytest.mark.parametrize(
    ("values", "scale", "types"),
    [
        ("weight", "weight_scale", (torch.uint8, torch.uint8)),  # vLLM
        ("weight_packed", "weight_scale", (torch.uint8, torch.uint8)),  # by compressed-tensors
        ("weight", "weight_scale_inv", (torch.int8, torch.float32)),  # SGLang
    ],
)
@pytest.mark.parametrize("scale_first", [False, True])
def test_random_mxfp4_weights_are_codes_and_powers_of_two(values, scale, types, scale_first):
    """All codes, exponents that can be packed, and the spread of other weights."""
    k, spread = 512, {}
    for w in ("w13", "w2"):
        parameters = [
            (f"mlp.experts.{w}_{values}", torch.zeros(4, 256, k // 2, dtype=types[0])),
            (f"mlp.experts.{w}_{scale}", torch.ones(4, 256, k // 32).to(types[1])),
        ]
        worker.fill(reversed(parameters) if scale_first else parameters)
        (_, codes), (_, exponents) = parameters
        if exponents.dtype is torch.float32:
            exponents = exponents.to(torch.float8_e8m0fnu)
        assert len(codes.view(torch.uint8).unique()) == 256
        assert len(exponents.view(torch.uint8).unique()) == 7
        assert pack_mxfp4(codes, exponents)
        fp8, block_scales = from_mxfp4(codes, exponents)
        wide = block_scales.repeat_interleave(128, 1).repeat_interleave(128, 2)
        spread[w] = float((fp8.float() * wide).std()) * k**0.5
    assert 0.7 < spread["w13"] < 1.42 and 0.7 < spread["w2"] / worker.DOWN < 1.42


def experts_of(tokens: int = 9) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    ids = torch.randint(6, (tokens, 3), generator=generator)
    weights = (*quantise_blocks(random(4, 256, 256)), *quantise_blocks(random(4, 256, 128)))
    return (ids, random(tokens, 3).abs(), random(tokens, 256).bfloat16(), *weights), {}


def test_the_check_of_a_layer_unpacks_mxfp4(monkeypatch):
    """The values of packed weights are compared, not the function's own arithmetic."""
    (ids, weights, x, *_), options = experts_of()
    packed, fp8 = [], []
    for shape, gated in (((4, 256, 256), True), ((4, 256, 128), False)):
        values, exponents = drawn(*shape, lowest=116, span=6)
        packed += [pack_mxfp4(values, exponents, gated=gated), None]
        fp8 += from_mxfp4(values, exponents)
    diffs: list[float] = []
    for run in (experts, lambda *arguments, **named: 2 * experts(*arguments, **named)):
        checking(run, 9, diffs.append)(ids, weights, x, *packed, **options)
        checking(run, 9, diffs.append)(ids, weights, x, *fp8, **options)
    right, right_fp8, wrong, wrong_fp8 = diffs
    assert right == right_fp8 < 1e-3 and wrong == wrong_fp8 > 0.1


def test_memory_is_reported_while_a_model_is_loaded_and_after(tmp_path, monkeypatch):
    """Each rank reports; the rows have the largest."""
    monkeypatch.setenv(engines.DIRECTORY, str(tmp_path))
    gib = {"max": 0, "now": 0}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: gib.update(max=gib["now"]))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: gib["max"] * 2**30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: gib["now"] * 2**30)

    class Loader:
        def load_model(self, most: int, after: int) -> str:
            gib.update(max=most, now=after)
            return "model"

    for _ in range(2):  # as an engine may register a plugin
        Loader.load_model = worker.weighing(Loader.load_model)
    for rank, (most, after) in enumerate([(7, 4), (6, 5)]):
        gib["max"] = 99  # before the model
        monkeypatch.setattr(os, "getpid", lambda rank=rank: rank)
        assert Loader().load_model(most, after) == "model"
    backend = named("engine", directory=tmp_path, log_lines=lambda text: [])
    rows = {row["part"]: (row["value"], row["unit"]) for row in serve.check(backend)}
    assert rows["memory while loading"] == (7.0, "GiB")
    assert rows["memory after loading"] == (5.0, "GiB")


def test_backends_of_mxfp4_experts(monkeypatch):
    """Ours packs by default; `both` adds FP8 copies; others go by the engine's name."""
    monkeypatch.delenv(engines.MXFP4, raising=False)
    model = find_model("qwen3-30b-a3b-mxfp4", 2, True)
    names = ("ours", "both", "humming", "marlin")
    ours, both, humming, marlin = (Setup("vllm", name, model) for name in names)
    assert ours.variables.items() >= {"MOE_FP8_VLLM": "1", "MOE_FP8_MXFP4": "exact"}.items()
    assert both.variables.items() >= {"MOE_FP8_VLLM": "1", "MOE_FP8_MXFP4": "both"}.items()
    for setup in (humming, marlin):
        assert setup.variables["MOE_FP8_VLLM"] == "0"
        assert engines.engine_options(setup)["kernel_config"] == {"moe_backend": setup.backend}
    monkeypatch.setenv(engines.MXFP4, "lossy")
    assert ours.variables["MOE_FP8_MXFP4"] == "lossy" != both.variables["MOE_FP8_MXFP4"]


KINDS = "plain", "offset", "map", "fp8", "clamped", "ue8m0", "e8m0"


@pytest.mark.parametrize("kind", [*KINDS, "no ids", "up first", "per channel"])
def test_the_layer_in_float32(kind):
    arguments, options = experts_of()
    if kind == "offset":
        options["local_expert_offset"] = 2
    elif kind in ("map", "no ids"):
        options["expert_map"] = torch.tensor([3, -1, 0, -1, 1, 2], dtype=torch.int32)
        for at, none in enumerate((-1, 6) if kind == "no ids" else ()):  # as engines pad
            arguments[0][at:5, at], arguments[1][at:5, at] = none, math.nan
    elif kind == "up first":
        options["gate_first"] = False
    elif kind == "fp8":
        q, options["x_scale"] = quantise_rows(arguments[2])
        arguments = (*arguments[:2], q, *arguments[3:])
    elif kind == "clamped":
        options |= {"swiglu_limit": 12.0, "swiglu_alpha": 1.702, "swiglu_beta": 1.0}
    elif kind == "ue8m0":
        options["ue8m0"] = True
    elif kind == "e8m0":
        exponents = [arguments[place].to(torch.float8_e8m0fnu) for place in (4, 6)]
        arguments = (*arguments[:4], exponents[0], arguments[5], exponents[1])
    elif kind == "per channel":
        *tokens, w13, _, w2, _ = arguments
        arguments = (*tokens, w13, torch.rand(4, 256, 1), w2, torch.rand(4, 256, 1))
    output = experts(*arguments, **options, accurate=True)
    assert calc_diff(output, in_float32(*arguments, **options)) < 1e-5


def test_one_call_of_a_layer_is_checked():
    differences: list[float] = []
    checked = checking(experts, 9, differences.append)
    calls = [experts_of(tokens) for tokens in (10, 9, 8, 9)]  # of weights of their own
    for arguments, options in (*calls, *calls):
        assert torch.equal(checked(*arguments, **options), experts(*arguments, **options))
    assert len(differences) == 2 and all(1e-5 < value < 1e-3 for value in differences)
    arguments, options = experts_of()
    broken = checking(lambda *a, **k: 1.5 * experts(*a, **k), 9, differences.append)
    for _ in range(2):
        broken(*arguments, **options)
    assert len(differences) == 3 and differences[-1] > 0.05


def row(backend: str, what: str, size: Any, value: Any, unit: str = "ms", **more: Any) -> dict:
    head = {
        "engine": "vllm",
        "model": "m",
        "layers": 2,
        "gpus": 1,
        "parallel": "tensor",
        "subject": backend,
    }
    return head | {"part": what, "size": size, "value": value, "unit": unit, "spread": 0.01} | more


def test_gains_are_over_the_best_of_the_engine_s_own():
    rows = [
        row("engine", "decode", 1, 4.0, "ms a step"), row("tuned", "decode", 1, 3.0, "ms a step"),
        row("ours", "decode", 1, 2.0, "ms a step"),
        row("accurate", "decode", 1, 1.0, "ms a step"), row("both", "decode", 1, 0.5, "ms a step"),
        row("engine", "mixed", 128, 1e3, "tokens/s"),
        row("tuned", "mixed", 128, 2e3, "tokens/s", spread=0.02),
        row("ours", "mixed", 128, 3e3, "tokens/s"), row("ours", "prefill", 8, 1.0),
    ]  # fmt: skip
    (table,) = tables.timed_tables(rows)
    assert table.title == "m, 2 layers: decode in ms a step, mixed in tokens/s, prefill in ms"
    assert list(table.frame) == ["backend", "decode 1", "mixed 128", "prefill 8"]
    assert table.frame[2:].to_numpy().tolist() == [
        ["ours", "2.00", "3,000", "1.00"],
        ["accurate", "1.00", "-", "-"],
        ["both", "0.50", "-", "-"],
        ["gain", "1.50x", "1.50x", "-"],
        ["spread", "1 %", "2 %", "1 %"],
    ]


def test_the_gain_of_the_fastest_repeats_stands_beside_that_of_the_medians():
    rows = [
        row("engine", "decode", 1, 4.0, "ms a step", least=1.5, most=9.0),
        row("ours", "decode", 1, 2.0, "ms a step", least=1.0, most=3.0),
        row("engine", "mixed", 2, 50.0, "tokens/s", least=10.0, most=100.0),
        row("ours", "mixed", 2, 80.0, "tokens/s", least=1.0, most=120.0),
    ]
    (table,) = tables.timed_tables(rows)
    assert table.frame.to_numpy().tolist()[2:4] == [
        ["gain", "2.00x", "1.60x"], ["gain, fastest", "1.50x", "1.20x"]
    ]  # fmt: skip


def test_the_gain_of_prefill_is_that_of_long_prompts():
    rows = []
    for size, others, ours in ((8, 9.0, 1.0), (4096, 3.0, 2.0), (8192, 4.0, 2.0)):
        rows += [row("engine", "prefill", size, others), row("ours", "prefill", size, ours)]
    frame = tables.gains_table(rows).frame
    assert list(frame["prefill from 4096 tokens"]) == ["1.50 to 2.00x"]


def of_decode(gain: float, size: int = 1, spread: float = 0.01, **case: Any) -> list[dict]:
    """Rows of a decode step in which ours gains on the engine's own."""
    return [row("engine", "decode", size, gain, "ms a step", spread=spread, **case),
            row("ours", "decode", size, 1.0, "ms a step", **case)]  # fmt: skip


def test_a_size_whose_repeats_spread_too_far_does_not_count():
    """There is no gain if fewer than half of the sizes are left."""
    noisy, quiet, quieter = of_decode(9.0, 1, 0.2), of_decode(1.2, 2, 0.15), of_decode(1.4, 4)
    for rows, cell, mean in (
        (noisy + quiet + quieter, "1.20 to 1.40x", "1.30x"),
        (noisy + quiet, "1.20x", "1.20x"),
        (noisy + quiet + of_decode(9.0, 4, 0.9), "-", "-"),
    ):
        assert list(tables.gains_table(rows).frame["a decode step"]) == [cell]
        assert list(tables.mean_gains_table(rows).frame["a decode step"]) == [mean]


def test_the_mean_gains_have_a_line_a_model_with_the_most_layers_on_one_gpu():
    cases: list[dict[str, Any]] = [
        {"layers": 2}, {"layers": 4}, {"layers": 8, "dense": "DeepGEMM"}, {"layers": 9, "gpus": 2},
        {"model": "n", "layers": 1}, {"engine": "sglang"},
    ]  # fmt: skip
    rows = [r for case in cases for r in of_decode(2.0, **case)]
    rows[4]["subject"] = "deep_gemm"
    rows += [row("engine", "mixed", 1, 2.0, "tokens/s"), row("ours", "mixed", 1, 4.0, "tokens/s")]
    assert len(tables.gains_table(rows).frame) == 6
    first = tables.mean_gains_table(rows).frame
    assert list(first.served) == ["m, 4 layers, in vLLM", "n, 1 layers, in vLLM",
                                  "m, 2 layers, in SGLang"]  # fmt: skip
    assert list(first) == ["served", "a decode step"]


def test_of_the_layers_the_worst_is_named():
    what = "calc_diff of a layer"
    rows = [row("ours", what, n, value, "") for n, value in enumerate((1e-4, 3e-4, 2e-4))]
    rows += [row("ours", "start", None, 12.5, "s"), row("engine", "start", None, 8.0, "s"),
             row("ours", "same tokens", None, False, "", gpus=2, parallel="expert"),
             row("ours", "same tokens", None, True, "", batch_invariant=True),
             row("ours", "same tokens", None, True, "", dense="DeepGEMM")]  # fmt: skip
    table = tables.served_checks(rows).frame
    assert list(table) == ["model", "backend", what, "start", "same tokens"]
    assert table.to_numpy().tolist() == [
        ["m, 2 layers", "ours", "3.00e-04 (layer 1)", "12.5 s", "-"],
        ["m, 2 layers", "engine", "-", "8 s", "-"],
        ["m, 2 layers, 2 GPUs, expert parallel, without FlashInfer", "ours", "-", "-", "no"],
        ["m, 2 layers, batch invariant", "ours", "-", "-", "yes"],
        ["m, 2 layers, dense layers by DeepGEMM", "ours", "-", "-", "yes"],
    ]


def test_a_step_takes_what_a_further_token_takes(monkeypatch):
    """The engine takes 5 s for the prompts and 2 s for every token after the first."""

    def generate(prompts, tokens):
        generated.append(tokens)
        clock.append(5.0 + 2.0 * (tokens - 1))

    clock, generated = [0.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: sum(clock))
    measuring = Measuring(SimpleNamespace(version="", generate=generate), 1000)
    assert measuring.decode(2, 0) == pytest.approx(2000.0) and measuring.prefill(8, 0) == 5000.0
    assert measuring.mixed(3, 0) == pytest.approx(3 * (512 + 64) / (5 + 2 * 63))
    assert generated == [1, 1 + 128, 1, 64]


@pytest.mark.parametrize("what", ["decode", "graph", "prefill", "mixed"])
def test_every_repeat_has_prompts_of_its_own_and_every_backend_the_same(what: str):
    calls: list[list[list[int]]] = []

    def noted(prompts, tokens):
        calls.append(prompts)
        return []

    engine = SimpleNamespace(version="", generate=noted, graph_times=noted)
    for repeat in (0, 1, 0):
        getattr(Measuring(engine, 1000), what)(4, repeat)
    first, second, again = calls[:: len(calls) // 3]
    assert first == again != second
    assert calls == [prompts for prompts in (first, second, again) for _ in range(len(calls) // 3)]


class Clock:
    """The clock of a GPU that runs all in order; `_sleep` and graphs move it, events read it."""

    now = 0.0

    def sleep(self, cycles: int) -> None:
        self.now += 1000.0

    def event(self, enable_timing: bool) -> SimpleNamespace:
        def record() -> None:
            event.at = self.now

        event = SimpleNamespace(record=record, elapsed_time=lambda end: end.at - event.at)
        return event


@pytest.mark.parametrize(
    ("graphs_of_a_step", "expected"), [([2.0], [2.0] * 32), ([2.0, 3.0], []), ([], [])]
)
def test_the_graph_of_a_step_is_what_is_replayed_in_every_step(
    graphs_of_a_step, expected, monkeypatch
):
    """The prefill has a graph of its own; a step has one graph, two, or none."""

    @dataclass(eq=False)
    class Graph:
        duration: float

        def replay(self) -> None:
            clock.now += self.duration

    clock, steps = Clock(), [Graph(duration) for duration in graphs_of_a_step]
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "_sleep", clock.sleep)
    monkeypatch.setattr(torch.cuda, "Event", clock.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    replay, worker = Graph.replay, TimesGraphs()
    worker.time_graphs(32)
    for graph in (Graph(7.0), *steps * 32):
        graph.replay()
    assert worker.graph_times() == expected
    assert Graph.replay is replay


@pytest.mark.parametrize(("of_ranks", "expected"), [
    ([[5.0, 2.0, 9.0], [4.0, 3.0, 8.0]], 4.0), ([[], []], math.nan),
])  # fmt: skip
def test_a_step_takes_what_the_rank_takes_that_begins_last(of_ranks, expected):
    vllm = object.__new__(Vllm)
    vllm.llm = SimpleNamespace(collective_rpc=lambda method, args=(): of_ranks)
    vllm.generate = lambda prompts, tokens: None
    assert Measuring(vllm, 1000).graph(2, 0) == pytest.approx(expected, nan_ok=True)


def test_sglang_s_ranks_leave_their_times_in_files(tmp_path, monkeypatch):
    """Two ranks report twice; the earlier call's files do not count."""
    monkeypatch.setenv(engines.DIRECTORY, str(tmp_path))
    times = iter([[[9.0], [8.0]], [[5.0, 2.0, 9.0], [4.0, 3.0, 8.0]], [[], []]])
    asked = []

    def collective_rpc(method: str, **arguments: int) -> None:
        asked.append((method, arguments))
        if method == "report_graph_times":
            for rank, of_rank in enumerate(next(times)):
                monkeypatch.setattr(worker.os, "getpid", lambda rank=rank: rank)
                scheduler = worker.TimesGraphs()
                scheduler.graphs_are_timed = contextlib.ExitStack()
                scheduler.graph_milliseconds = lambda of_rank=of_rank: of_rank
                worker.report_graph_times(scheduler)

    sglang = object.__new__(engines.Sglang)
    sglang.engine = SimpleNamespace(collective_rpc=collective_rpc)
    sglang.generate = lambda prompts, tokens: asked.append("generate")
    graphs = [Measuring(sglang, 1000).graph(2, repeat) for repeat in range(3)]
    assert graphs == pytest.approx([8.0, 4.0, math.nan], nan_ok=True)
    assert asked[:3] == [("time_graphs", {"steps": 16}), "generate", ("report_graph_times", {})]


def test_an_unknown_time_has_no_row():
    def backend(name: str) -> SimpleNamespace:
        asked = iter(range(100))
        unknown = name == "engine"
        return named(name, ask=lambda what, *_: math.nan if what == "graph" and unknown
                     else 1.0 + next(asked))  # fmt: skip

    figures = serve.Plan((1,), (), 2).figures
    rows = list(serve.timed([backend("engine"), backend("ours")], figures, 2))
    assert [(row["part"], row["subject"]) for row in rows] == [
        ("decode", "engine"), ("decode", "ours"), ("graph", "ours"),
        ("mixed", "engine"), ("mixed", "ours"),
    ]  # fmt: skip
    assert (rows[2]["value"], rows[2]["least"], rows[2]["most"]) == (5.5, 5.0, 6.0), "no warm-up"
    assert rows[2]["spread"] == pytest.approx(1 / 5.5, abs=1e-4)


def test_the_engine_finds_what_watches_it(tmp_path: Path, monkeypatch):
    """SGLang loads the worker as an entry point, in any of its processes."""
    serve.publish(tmp_path, "sglang")
    monkeypatch.syspath_prepend(tmp_path)
    entries = importlib.metadata.entry_points(group="sglang.srt.plugins")
    (plugin,) = (entry for entry in entries if "serve" in entry.name)
    assert plugin.load() is worker.register_sglang


def test_ranks_that_are_forks_of_the_process_that_watches_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.setenv(engines.DIRECTORY, str(tmp_path))
    monkeypatch.setitem(worker.CHECK_TOKENS, "vllm", 9)
    monkeypatch.setattr(api, "experts", experts)  # what `watch` replaces
    monkeypatch.setattr(worker, "CALLERS", ("api",))
    monkeypatch.setattr(worker, "count", lambda: None)
    for _ in range(2):  # as an engine may register a plugin
        worker.watch("vllm")
    calls = [experts_of() for _ in range(4)]  # of weights of their own
    for rank, (arguments, options) in zip((1, 1, 2, 2), calls, strict=True):
        monkeypatch.setattr(os, "getpid", lambda rank=rank: rank)
        api.experts(*arguments, **options)
    assert [len(of_rank) for of_rank in serve.layers_of(tmp_path)] == [2, 2]


@pytest.mark.parametrize(("cached", "counts"), [(True, [3, 3, 6]), (False, [3, 6, 9])])
def test_compiled_kernels_are_counted_in_every_process(cached, counts, tmp_path, monkeypatch):
    """The first of three kernels in a process of `prepare`'s, where kernels are kept; then what is
    found on disk, then what has gone from there."""

    def in_processes(left: list[tuple]) -> None:
        with monkeypatch.context() as its:
            its.setattr(compiling, "fakes", fakes)
            compiling.compiled(*fused.describe_fused(*left[0]))

    fakes, cache = compiling.fakes, KernelCache(tmp_path / "kernels")
    monkeypatch.setenv(engines.DIRECTORY, str(tmp_path))
    monkeypatch.setenv(CACHE_VARIABLE, str(cache.directory) if cached else "")
    monkeypatch.setattr(compiling.cute, "compile", lambda kernel, *arguments, **options: kernel)
    monkeypatch.setattr(compiling, "_export", lambda function, path: path.write_text("kernel"))
    monkeypatch.setattr(compiling, "_load", lambda path: path.read_text())
    monkeypatch.setattr(compiling, "fakes", fakes)  # what `count` replaces
    monkeypatch.setattr(prepare, "compile_all", prepare.compile_all)
    monkeypatch.setattr(prepare, "in_processes", in_processes)
    monkeypatch.setattr(prepare, "cores", lambda: 2)
    monkeypatch.setattr(fused.compile_fused, "functions", {})
    worker.count()
    pair, form = HOPPER.choose_layer(1, SMALL, 1), Form.usual(SMALL)
    geometries = [(SMALL, *pair, multiprocessors, "sm_90a", form) for multiprocessors in (1, 2, 3)]
    for step, count in enumerate(counts):
        if step == 2:
            cache.trim(0)
        fused.compile_fused.functions.clear()
        prepare.compile_all(geometries)
        assert serve.compilations(tmp_path) == count
