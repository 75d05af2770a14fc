"""Compiling before the first call: which kernels, where, and that what is on disk is not again.
Afterwards no call compiles or loads a kernel."""

import functools
import importlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from markers import backends
from moe_fp8 import api, experts, fused_moe, prepare
from moe_fp8.api import call_of
from moe_fp8.cache import CACHE_VARIABLE, NOT_KEPT
from moe_fp8.call import CHUNK_TOKENS, LARGEST_OFFSET, MoeInputs, RoutedInputs
from moe_fp8.kernels import architectures, fused
from moe_fp8.kernels import compile as compiling
from moe_fp8.kernels.architectures import BLACKWELL, HOPPER
from moe_fp8.reference import calc_diff, quantise_rows
from moe_fp8.serving import prepare as ahead
from moe_fp8.shape import DEEPSEEK_V3, Form, MoeShape
from programs import gone
from small_layer import HIDDEN, TOP_K, WEIGHTS
from small_layer import named_tensors as tensors

SMALL = MoeShape(4, 4, 256, 128, 1, 1, 2, "given")
FORM = Form(torch.int32, torch.float32, torch.bfloat16, gate_first=True)
SHAPES = {
    "DeepSeek-V3": replace(DEEPSEEK_V3, num_local_experts=256),
    "EP8": DEEPSEEK_V3,
    "TP8": replace(DEEPSEEK_V3, num_local_experts=256, intermediate_size=256),
    "Qwen3-30B": MoeShape(128, 128, 2048, 768, 1, 1, 8, "given"),
    "Kimi-K2": MoeShape(384, 48, 7168, 2048, 1, 1, 8),
}


def call(*arguments, **options) -> int:
    named = tensors()
    required = (named["ids"], named["weights"], named["x"], *(named[name] for name in WEIGHTS))
    return prepare(experts, *required, *arguments, **options)


@pytest.mark.all
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("architecture", [HOPPER, BLACKWELL], ids=["Hopper", "Blackwell"])
def test_all_configs_are_those_of_every_number_of_tokens(architecture, terms, shape):
    def chosen(tokens: int):
        return architecture.choose_layer(tokens, SHAPES[shape], terms)

    some = (*range(1, 2048), *range(2048, CHUNK_TOKENS + 1, 8))  # beyond, all would take a minute
    every = dict.fromkeys(map(chosen, some))
    assert ahead.all_configs(chosen, CHUNK_TOKENS) == [*every]


def test_no_more_tokens_than_asked_for():
    def chosen(tokens: int) -> str:
        asked.append(tokens)
        return "few" if tokens <= 50 else "many"

    asked: list[int] = []
    assert ahead.all_configs(chosen, 50) == ["few"]
    assert ahead.all_configs(chosen, 51) == ["few", "many"]
    assert max(asked) == 51 and min(asked) == 1


@pytest.fixture
def geometries(tmp_path, monkeypatch) -> list[tuple]:
    """Geometries of two kernels that are not compiled yet, on two cores."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "kernels"))
    monkeypatch.setattr(fused.compile_fused, "functions", {})
    monkeypatch.setattr(ahead, "cores", lambda: 2)
    configs = (HOPPER.choose_layer(tokens, SMALL, 1) for tokens in (1, 400))
    return [(SMALL, *pair, 132, "sm_90a", FORM) for pair in configs]


@pytest.fixture
def compiled_here(monkeypatch) -> list[str]:
    """The kernels that this process compiles, where a serving engine would notice."""

    class Compiler:
        def __call__(self, kernel, *arguments, **options):
            kernels.append(type(kernel).__name__)
            return real(kernel, *arguments, **options)

    kernels: list[str] = []
    real = compiling.cute.compile
    monkeypatch.setattr(compiling.cute, "compile", Compiler())
    return kernels


def test_processes_compile_and_this_one_loads(geometries, compiled_here, monkeypatch, tmp_path):
    """Nothing that lies in the working directory is imported."""
    (tmp_path / "tqdm.py").write_text("raise SystemExit")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "")
    assert ahead.compile_all(geometries) == 2 and not compiled_here
    first = dict(fused.compile_fused.functions)
    assert [*first] == geometries and ahead.compile_all(geometries) == 0
    fused.compile_fused.functions.clear()
    assert ahead.compile_all(geometries) == 0 and not compiled_here
    assert [*fused.compile_fused.functions] == geometries


@pytest.mark.parametrize(
    "why", ["no directory", "one core", "a directory of others", "a file in its place", "failure"]
)
def test_where_processes_cannot_help_this_one_compiles(why, geometries, monkeypatch, tmp_path):
    asked, compiled = [], []
    monkeypatch.setattr(ahead, "in_processes", asked.append)  # and makes nothing
    monkeypatch.setattr(fused, "compiled", lambda *call: compiled.append(call) or "function")
    if why == "no directory":
        monkeypatch.setenv(CACHE_VARIABLE, "")
    elif why == "one core":
        monkeypatch.setattr(ahead, "cores", lambda: 1)
    elif why == "a directory of others":
        (tmp_path / "kernels").mkdir()
        (tmp_path / "kernels").chmod(0o777)
    elif why == "a file in its place":
        (tmp_path / "kernels").touch()
    assert ahead.compile_all(geometries) == 2
    assert compiled == [fused.describe_fused(*geometry) for geometry in geometries]
    assert len(asked) == (why == "failure")


def test_of_processes_that_prepare_at_once_one_compiles(geometries, monkeypatch, tmp_path):
    """The second one waits, and finds what the first one has made."""

    def compile_them(left) -> None:
        compiled.append(left)
        second.start()
        second.join(0.5)
        assert second.is_alive()
        for geometry in left:
            fused.compile_fused.functions[geometry] = "function"

    compiled: list[list[tuple]] = []
    second = threading.Thread(target=ahead.compile_all, args=[geometries])
    monkeypatch.setattr(ahead, "in_processes", compile_them)
    assert ahead.compile_all(geometries) == 2
    second.join()
    assert compiled == [geometries]


@pytest.fixture
def gpu(monkeypatch) -> SimpleNamespace:
    """Record what `prepare` compiles and launches. All tensors seem to be on GPU `index`."""

    def on_gpu(function, *arguments, **options):
        layer, inputs, out = call_of(function, *arguments, **options)
        device = torch.device("cuda", recorder.index)
        stand_in = {"is_cuda": True, "device": device, "get_device": lambda: recorder.index}
        return layer, inputs, SimpleNamespace(numel=out.numel, **stand_in)

    def fused_call(tokens, device, shape, terms, configs, form):
        return lambda inputs, out: recorder.launched.append((tokens, device.index, configs))

    def compile_all(geometries: list) -> int:
        recorder.compiled += geometries
        return len(geometries)

    recorder = SimpleNamespace(index=0, compiled=[], launched=[])
    api._layer.cache_clear()
    api._layers_seen.cache_clear()
    for module, name, value in (
        (ahead, "call_of", on_gpu),
        (architectures, "has_kernels", lambda device: True),
        (architectures, "on_device", lambda device: nullcontext()),
        (architectures, "of_device", lambda device: HOPPER),
        (ahead, "compile_all", compile_all),
        (architectures, "num_sms", lambda device: 132),
        (ahead, "make_call", fused_call),
    ):
        monkeypatch.setattr(module, name, value)
    yield recorder
    api._layer.cache_clear()
    api._layers_seen.cache_clear()


def test_prepared_kernels_are_loaded_once_on_every_gpu(gpu):
    few = call(tokens=4)
    assert few == len(gpu.compiled)
    assert gpu.launched == [(1, 0, [*geometry[1:3]]) for geometry in gpu.compiled]
    assert call(tokens=4) == call(tokens=2) == 0 and len(gpu.launched) == few
    more = call(tokens=8192)
    assert more > few and gpu.compiled[few:][:few] == gpu.compiled[:few]
    assert call(tokens=8192) == call(tokens=4) == 0
    gpu.index = 1
    assert call(tokens=4) == few and len(gpu.compiled) == len(gpu.launched) == 2 * few + more
    assert [index for _, index, _ in gpu.launched] == (few + more) * [0] + few * [1]


def test_nothing_is_kept_of_what_is_prepared_with(gpu):
    """After `prepare` the weights may be freed, moved or overwritten."""
    named = tensors()
    references = [weakref.ref(tensor) for tensor in named.values()]
    arguments = (named["ids"], named["weights"], named["x"], *(named[name] for name in WEIGHTS))
    assert prepare(experts, *arguments, tokens=4)
    del named, arguments
    assert not any(tensor() is not None for tensor in references)


def test_nothing_is_to_do_on_the_cpu(monkeypatch):
    monkeypatch.setattr(ahead, "compile_all", None)
    assert call() == call(tokens=8192) == call(accurate=True) == 0
    named = tensors()
    arguments = named["logits"], named["bias"], named["x"], None, *(named[n] for n in WEIGHTS)
    assert prepare(fused_moe, *arguments, n_group=4, topk_group=2, top_k=TOP_K) == 0


@pytest.mark.parametrize("tokens", [0, -1, 2.0, True, None])
def test_a_wrong_number_of_tokens_is_refused(tokens):
    with pytest.raises(ValueError, match=r"^tokens=.*: expected a positive integer"):
        call(tokens=tokens)


def test_calls_that_are_wrong():
    named = tensors()
    with pytest.raises(TypeError, match="^expected fused_moe, experts or batched_exp"):
        prepare(torch.add, named["x"], named["x"])
    with pytest.raises(TypeError, match="missing"):
        prepare(experts, named["ids"])
    arguments = (named["ids"], named["weights"], named["x"])
    with pytest.raises(ValueError, match=r"^w2_scale: expected shape \[16, 2, 1\]"):
        prepare(experts, *arguments, *(named[n] for n in WEIGHTS[:3]), named["w2_scale"][:, :1])
    with pytest.raises(ValueError, match=r"^out: expected dtype torch.bfloat16"):
        call(out=torch.empty(named["x"].shape))
    with pytest.raises(ValueError, match="at least one token, got none"):
        prepare(experts, *(tensor[:0] for tensor in arguments), *(named[n] for n in WEIGHTS))


def test_a_call_without_pairs():
    """The call that loads a kernel's code has one token and reads no expert's weights."""
    named = tensors()
    weights = [named[name] for name in WEIGHTS]
    routed = RoutedInputs(named["ids"], named["weights"], named["x"], None, *weights, 4, None)
    one = ahead.without_pairs(routed)
    assert one.topk_ids.tolist() == [[-1] * TOP_K] and one.local_expert_offset == 0
    assert one.topk_ids.dtype == named["ids"].dtype and one.x.shape == (1, HIDDEN)
    fused = MoeInputs(named["logits"], named["bias"], named["x"], None, *weights, 4, 2.5)
    one = ahead.without_pairs(fused)
    assert len(one.routing_logits) == 1 and one.local_expert_offset == LARGEST_OFFSET


@pytest.mark.parametrize("name", ["moe_fp8", "_renamed"])
def test_the_program_of_the_processes(name, geometries, monkeypatch, tmp_path):
    """The program runs wherever the package is, also in a directory of another name, and prints its
    progress to stderr."""
    pickled, program = pickle.dumps((os.getpid(), geometries[:1]), protocol=0), ahead.MAIN
    if name != "moe_fp8":
        shutil.copytree(Path(ahead.__file__).parents[1], tmp_path / "torch-cuda")
        spec = spec_from_file_location(name, tmp_path / "torch-cuda/__init__.py")
        monkeypatch.setitem(sys.modules, name, module_from_spec(spec))
        program = importlib.import_module(f"{name}.serving.prepare").MAIN
        pickled = pickled.replace(b"moe_fp8.", name.encode() + b".")
    process = subprocess.run(
        [sys.executable, "-c", program], input=pickled, capture_output=True,
        env={**os.environ, "PYTHONPATH": ""},
    )  # fmt: skip
    assert process.returncode == 0 and b"1/1" in process.stderr, process.stderr
    assert ahead.missing(geometries) == geometries[1:]


def test_a_worker_stops_at_a_kernel_that_cannot_be_stored(geometries, monkeypatch, tmp_path):
    """The disk is full, or the directory is none: no other kernel could be stored either."""
    (tmp_path / "kernels").touch()
    monkeypatch.setattr(compiling.cute, "compile", lambda *_, **__: "function")
    with pytest.raises(RuntimeWarning, match=f"{NOT_KEPT} in .*Not a directory"):
        ahead.compile_one(geometries[0])


SLEEPING = """
import os, time
from pathlib import Path
from moe_fp8.kernels import fused
from moe_fp8.serving import prepare as ahead
ahead.cores = lambda: 2
started = Path(os.environ["STAND_IN_STARTED"])
fused.compile_fused = lambda work: (started / str(os.getpid())).touch() or work()
ahead.main()
"""
CALLER = f"""
import time
from functools import partial
from moe_fp8.serving import prepare as ahead
ahead.MAIN = {SLEEPING!r}
ahead.in_processes(2 * [(partial(time.sleep, 1000),)])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_compiler_outlives_the_process_that_prepares(number, tmp_path):
    """Not even for as long as the compiler holds Python's lock."""
    paths = {"PYTHONPATH": str(Path(ahead.__file__).parents[2]), "STAND_IN_STARTED": str(tmp_path)}
    heeds = functools.partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    command = [sys.executable, "-c", CALLER]
    with subprocess.Popen(command, env={**os.environ, **paths}, preexec_fn=heeds) as caller:
        while len(workers := list(tmp_path.iterdir())) < 2 and caller.poll() is None:
            time.sleep(0.05)
        pool = Path(f"/proc/{workers[0].name}/stat").read_text().split()[3]
        caller.send_signal(number)
    assert len(workers) == 2 and pool != str(caller.pid)
    assert all(gone(int(pid)) for pid in (pool, *(worker.name for worker in workers)))


def test_a_process_whose_parent_has_ended_ends_at_once():
    program = "from moe_fp8.serving.prepare import end_with; end_with(-1); print('goes on')"
    paths = {"PYTHONPATH": str(Path(ahead.__file__).parents[2])}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env={**os.environ, **paths}, stdout=PIPE)
    assert (done.returncode, done.stdout) == (1, b"")


# --- on a GPU -------------------------------------------------------------------------------------


WIDE = 512
TOKENS = (1, 5, 40, 200, 700, 1500)


@functools.cache
def tensors_on_a_gpu(tokens: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a layer with 16 experts, top 4."""
    named = tensors(tokens, tokens, hidden=WIDE, width=256, top_k=4)
    return {name: tensor.cuda() for name, tensor in named.items()}


def call_on_a_gpu(kind: str, tokens: int) -> tuple[Any, tuple, dict[str, Any]]:
    """Return a function, its arguments and its options."""
    named, weights = tensors_on_a_gpu(tokens), [tensors_on_a_gpu(1)[name] for name in WEIGHTS]
    if kind == "fused_moe":
        routing = {"n_group": 1, "topk_group": 1, "top_k": 4}
        return fused_moe, (named["logits"], None, named["x"], None, *weights), routing
    x, options = named["x"], {"accurate": kind == "accurate"}
    if kind == "fp8, scales by token":
        x, scale = quantise_rows(x)
        # `contiguous` would leave the strides of one token, which are those of both layouts.
        options["x_scale"] = scale.new_empty(scale.shape[::-1]).copy_(scale.t()).t()
    return experts, (named["ids"].int(), named["weights"], x, *weights), options


@backends("gpu")
@pytest.mark.parametrize("kind", ["bfloat16", "accurate", "fp8, scales by token", "fused_moe"])
def test_nothing_is_compiled_or_loaded_afterwards(kind, monkeypatch, tmp_path):
    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a kernel is compiled or loaded")

    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(fused.compile_fused, "functions", {})
    function, arguments, options = call_on_a_gpu(kind, 3)
    assert prepare(function, *arguments, **options, tokens=2048) >= 3
    monkeypatch.setattr(fused, "compiled", refuse)
    for tokens in TOKENS:
        function, arguments, options = call_on_a_gpu(kind, tokens)
        result = function(*arguments, **options)
        on_cpu = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        wanted = function(*(a if a is None else a.cpu() for a in arguments), **on_cpu)
        assert calc_diff(result.cpu(), wanted) < 1e-4
    assert prepare(function, *arguments, **options, tokens=2048) == 0

    function, arguments, options = call_on_a_gpu(kind, 77)  # as many as no call had
    graph, out = torch.cuda.CUDAGraph(), result.new_full((77, WIDE), torch.nan)
    with torch.cuda.graph(graph):
        function(*arguments, **options, out=out)
    graph.replay()
    assert torch.equal(out, function(*arguments, **options))
