"""A kernel cache that is made without a GPU: which kernels, who can use it, where it may lie, and
what the program says. tests/engines compares the kernels with those that engines ask for."""

import json
import os
import pickle
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from moe_fp8.api import call_of
from moe_fp8.cache import CACHE_VARIABLE, NOT_KEPT
from moe_fp8.kernels import fused
from moe_fp8.kernels.architectures import BLACKWELL, HOPPER
from moe_fp8.serving import bake, plugins
from moe_fp8.serving import prepare as ahead
from moe_fp8.shape import Form

SMALL = {
    "num_experts": 4, "num_experts_per_tok": 2, "hidden_size": 256, "moe_intermediate_size": 128,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip
USER, GROUP = 54321, 65432
PACKAGES = Path(bake.__file__).parents[2]
"""The directory to import the package from."""


@pytest.fixture
def config(tmp_path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(SMALL))
    return path


@pytest.fixture(autouse=True)
def restored(monkeypatch) -> Iterator[None]:
    """The program sets the variable and the umask of its process."""
    monkeypatch.setenv(CACHE_VARIABLE, "")
    monkeypatch.setattr(fused.compile_fused, "functions", {})
    mask = os.umask(0o022)
    yield
    os.umask(mask)


def run(model: Any, output: Path, *options: str, gpu: str = "h100") -> int:
    arguments = ("--model", str(model), "--gpu", gpu, "--output", str(output), *options)
    try:
        return bake.main(arguments)
    except SystemExit as error:
        return int(error.code or 0)


# --- other users, other places --------------------------------------------------------------------

LOADING = """
import errno, fcntl, os, pickle, sys, warnings
from moe_fp8.kernels import compile as compiling, fused
from moe_fp8.serving import prepare
geometries, user, groups, locks = pickle.load(sys.stdin.buffer)
def refuse(*_, **__): raise AssertionError("compiled, or waited for a lock")
def lockless(*_): raise OSError(errno.ENOSYS, "no locks")
compiling.cute.compile = prepare.in_processes = refuse
fcntl.flock = refuse if locks else lockless
warnings.simplefilter("error", RuntimeWarning)
prepare.missing(geometries)  # Python and the sources may be in a directory of root's
try:
    os.setgroups(groups), os.setgid(user), os.setuid(user)
except PermissionError:  # a container whose root may not
    sys.exit(77)
assert prepare.compile_all(geometries) == 0
assert [*fused.compile_fused.functions] == geometries and os.getuid() == user
"""


@pytest.fixture(scope="module")
def baked() -> Iterator[SimpleNamespace]:
    """A directory with two kernels that root has made under a mask that hides them."""
    root = Path(tempfile.mkdtemp())
    root.chmod(0o755)
    model = root / "config.json"
    model.write_text(json.dumps(SMALL))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, "")
        patch.setattr(bake, "CHUNK_TOKENS", 24)
        patch.setattr(fused.compile_fused, "functions", {})
        mask = os.umask(0o077)
        status = run(model, root / "kernels")
        os.umask(mask)
        listed = bake.geometries_of([*bake.calls(bake.find_model(str(model)))], HOPPER, 132)
    yield SimpleNamespace(status=status, directory=root / "kernels", kernels=listed)
    shutil.rmtree(root)


def as_it_is(path: Path) -> None:
    pass


def read_only(path: Path) -> None:
    path.chmod(path.stat().st_mode & ~0o222)


def of_a_volume(path: Path) -> None:
    """Change a file as Kubernetes changes a volume for `fsGroup`."""
    os.chown(path, 0, GROUP)
    path.chmod(path.stat().st_mode | (0o2070 if path.is_dir() else 0o060))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
@pytest.mark.parametrize("change", [as_it_is, read_only, of_a_volume])
@pytest.mark.parametrize("locks", [True, False], ids=["", "without locks"])
def test_another_user_compiles_nothing(change, locks, baked):
    assert baked.status == 0 and len(baked.kernels) >= 2
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        directory = Path(folder) / "kernels"
        if not all(path.stat().st_mode & 0o001 for path in directory.parents):
            pytest.skip(f"another user cannot reach {folder}")
        shutil.copytree(baked.directory, directory)
        for path in (*directory.rglob("*"), directory):
            change(path)
        groups = [GROUP] * (change is of_a_volume)
        done = subprocess.run(
            [sys.executable, "-c", LOADING],
            input=pickle.dumps((baked.kernels, USER, groups, locks)),
            env={**os.environ, CACHE_VARIABLE: str(directory), "PYTHONPATH": str(PACKAGES)},
            capture_output=True,
        )
        if done.returncode == 77:
            pytest.skip("this root cannot become another user")
        assert done.returncode == 0, done.stderr.decode()[-2000:]


# --- which kernels --------------------------------------------------------------------------------


@pytest.fixture
def compiled(monkeypatch) -> list[Any]:
    """The kernels that the program would compile; nothing is."""
    kernels: list[Any] = []
    monkeypatch.setattr(bake, "compile_all", lambda needed: kernels.extend(needed) or len(needed))
    monkeypatch.setattr("moe_fp8.kernels.compile.is_on_disk", lambda *_: True)
    return kernels


@pytest.mark.parametrize(
    ("gpu", "options", "target", "num_sms", "local"),
    [
        ("h100", (), "sm_90a", 132, 4),
        ("h200", (), "sm_90a", 132, 4),
        ("b200", (), "sm_100a", 148, 4),
        ("h100", ("--multiprocessors", "114"), "sm_90a", 114, 4),
        ("h100", ("--tensor-parallel", "2", "--expert-parallel"), "sm_90a", 132, 2),
    ],
)
def test_the_gpus_decide_kernels(
    gpu, options, target, num_sms, local, config, compiled, tmp_path, capsys
):
    assert run(config, tmp_path / "out", *options, gpu=gpu) == 0
    assert {geometry[3:5] for geometry in compiled} == {(num_sms, target)}
    printed = capsys.readouterr().out
    assert f"GPU       {gpu}, {target}, {num_sms} multiprocessors\n" in printed
    assert f"layers    {local} of 4 experts, top 2, 256 x 128\n" in printed
    assert f"use it    {CACHE_VARIABLE}={tmp_path / 'out'}\n" in printed
    architecture = BLACKWELL if gpu == "b200" else HOPPER
    for tokens in (1, 37, 16384):
        pair = architecture.choose_layer(tokens, compiled[0][0], 1)
        assert pair in [geometry[1:3] for geometry in compiled]


def forms(*calls: bake.Call) -> list[tuple[int, int, int, Form]]:
    """Return (experts, local experts, width, form) of each call's layer."""
    layers = [call_of(call.function, *call.arguments, **call.options)[0] for call in calls]
    return [
        (
            layer.shape.num_experts,
            layer.shape.num_local_experts,
            layer.shape.intermediate_size,
            layer.actual_form,
        )
        for layer in layers
    ]


I32, I64, F32, BF16, FP8 = (
    torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.float8_e4m3fn
)  # fmt: skip
USUAL = Form(I32, F32, BF16, gate_first=True)
MAPPED = Form(I32, F32, BF16, gate_first=True, has_map=True)
MODEL = bake.Model("a", 10, 4, 256, 768, shared=1)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [(10, 10, 768, USUAL)]),
        ({"tensor_parallel": 2}, [(10, 10, 384, USUAL)]),
        ({"tensor_parallel": 2, "data_parallel": 3}, [(10, 10, 128, USUAL)]),
        ({"tensor_parallel": 1, "expert_parallel": True}, [(10, 10, 768, USUAL)]),
        ({"tensor_parallel": 5, "expert_parallel": True}, [(10, 2, 768, MAPPED)]),
        (
            {"tensor_parallel": 4, "expert_parallel": True},
            [(10, 2, 768, MAPPED), (10, 3, 768, MAPPED)],
        ),
        (
            {"data_parallel": 2, "expert_parallel": True, "exchange": "deepep_high_throughput"},
            [(10, 5, 768, Form(I64, F32, FP8, True, gate_first=True, has_map=True))],
        ),
        (
            {"data_parallel": 2, "expert_parallel": True, "exchange": "nixl_ep"},
            [(5, 5, 768, Form(I32, None, FP8, gate_first=True, batched=True))],
        ),
        ({"engine": "sglang"}, [(10, 10, 768, USUAL), (11, 11, 768, USUAL)]),
        (
            {"engine": "sglang", "tensor_parallel": 2, "expert_parallel": True},
            [(10, 5, 768, USUAL), (11, 6, 768, USUAL)],
        ),
        ({"engine": "transformers"}, [(10, 10, 768, Form(I64, F32, BF16, gate_first=True))]),
    ],
)
def test_the_engine_and_the_split_decide_kernels(options, expected):
    assert forms(*bake.calls(MODEL, **options)) == expected


def test_weights_by_channel_have_kernels_of_their_own():
    model = bake.Model("a", 10, 4, 256, 768, per_channel=True)
    form = replace(USUAL, per_channel=True)
    assert forms(*bake.calls(model)) == [(10, 10, 768, form)]
    ranks = {"data_parallel": 2, "expert_parallel": True}
    (sent,) = forms(*bake.calls(model, **ranks, exchange="deepep_high_throughput"))
    assert sent == (10, 5, 768, replace(MAPPED, choice=I64, per_channel=True))
    for refused in ({**ranks, "exchange": "nixl_ep"}, {"engine": "transformers"},
                    {"engine": "sglang", "exchange": "deepep_normal"}):  # fmt: skip
        with pytest.raises(bake.UsageError, match="got each channel"):
            forms(*bake.calls(model, **refused))


def test_options_reach_the_kernels(config, compiled, tmp_path):
    config.joinpath("config.json").write_text(json.dumps({**SMALL, "swiglu_limit": 7.0}))
    assert run(config, tmp_path / "out", "--accurate") == 0
    assert {geometry[2].terms for geometry in compiled} == {2}
    assert {geometry[0].swiglu.limit for geometry in compiled} == {7.0}


# --- models ---------------------------------------------------------------------------------------


def test_every_known_model_is_served(monkeypatch) -> None:
    assert len(bake.MODELS) >= 7
    monkeypatch.setenv(plugins.MXFP4, "exact")
    for name in bake.MODELS:
        assert forms(*bake.calls(bake.find_model(name)))
    model = bake.find_model("deepseek-v3")
    assert model == bake.Model("deepseek-v3", 256, 8, 7168, 2048, shared=1)
    assert bake.find_model("minimax-m2") == bake.Model("minimax-m2", 256, 8, 3072, 1536)


PUBLISHED = {
    "deepseek-v3": 671, "glm-5": 744, "kimi-k2": 1026.5, "minimax-m2": 229,
    "qwen3-235b-a22b": 235.1, "qwen3-30b-a3b": 30.53, "qwen3-30b-a3b-mxfp4": 30.53,
}  # fmt: skip
"""Billions of parameters."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_known_model_has_as_many_parameters_as_published(name) -> None:
    of, model = bake.MODELS[name], bake.find_model(name)
    hidden, heads = of["hidden_size"], of["num_attention_heads"]
    if "kv_lora_rank" in of:
        rank, rope, value = of["kv_lora_rank"], of["qk_rope_head_dim"], of["v_head_dim"]
        key = of["qk_nope_head_dim"]
        attention = of["q_lora_rank"] * (hidden + heads * (key + rope)) + hidden * (rank + rope)
        attention += heads * (rank * (key + value) + value * hidden)
    else:
        attention = 2 * hidden * of["head_dim"] * (heads + of["num_key_value_heads"])
    experts = 3 * hidden * model.intermediate * (model.experts + model.shared)
    # The published DeepSeek-V3 and GLM-5 have three dense layers.
    dense = {"deepseek-v3": 3, "glm-5": 3, "kimi-k2": 1}.get(name, 0)
    layers, embeddings = of["num_hidden_layers"], 2 * of["vocab_size"] * hidden
    total = layers * attention + (layers - dense) * experts + embeddings
    total += dense * 3 * hidden * of["intermediate_size"]
    assert total / 1e9 == pytest.approx(PUBLISHED[name], rel=3e-3)


GROUPS = {"group_0": {"weights": {"strategy": "block", "block_structure": [128, 128]}}}


def fp8(**more: Any) -> dict[str, Any]:
    return {"quantization_config": {**SMALL["quantization_config"], **more}}


@pytest.mark.parametrize(
    "config",
    [
        {"text_config": SMALL},
        {"text_config": {**SMALL, "quantization_config": None},
         "quantization_config": SMALL["quantization_config"]},
        {**SMALL, "quantization_config": None},
        {**SMALL, "quantization_config": {
            "quant_method": "compressed-tensors", "config_groups": GROUPS}},
        {**SMALL, "swiglu_limit": None, "intermediate_size": 999},
        {**SMALL, "swiglu_limit": 0, "hidden_act": "silu", "n_shared_experts": 0},
        {**SMALL, "num_local_experts": 4, "expert_ffn_hidden_size": 128},
        {**SMALL, "moe_intermediate_size": None, "intermediate_size": 128,
         "shared_expert_intermediate_size": 64, "moe_inter_dim": None},
        {**SMALL, **fp8(activation_scheme="dynamic", fmt="e4m3", scale_fmt=None)},
        {**SMALL, **fp8(scale_fmt="")},
        {**SMALL, **fp8(scale_fmt="float")},  # as Transformers stores it
        {**SMALL, **fp8(ignored_layers=["lm_head", "re:.*mlp.shared_experts.*",
                                        "model.layers.61.mlp.experts.0.up_proj"])},
    ],
)  # fmt: skip
def test_a_configuration_is_read(config):
    assert bake.read_model("a", config) == bake.Model("a", 4, 2, 256, 128)


CHANNELS = {"strategy": "channel", "type": "float", "num_bits": 8}


def by_channel(weights: Any = CHANNELS, dynamic: bool = True, **more: Any) -> dict[str, Any]:
    group = {"weights": weights, "input_activations": {"strategy": "token", "dynamic": dynamic}}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group} | more}


def test_a_configuration_by_channel_is_read():
    read = bake.read_model("a", {**SMALL, "quantization_config": by_channel()})
    assert read == bake.Model("a", 4, 2, 256, 128, per_channel=True)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"quantization_config": by_channel(dynamic=False)}, "compressed-tensors' of 'channel'"),
        ({"quantization_config": by_channel({**CHANNELS, "type": "int"})}, "of 'channel'"),
        ({"quantization_config": by_channel(b={"weights": CHANNELS})}, "of 'channel'"),
        ({"quantization_config": {"config_groups": {"a": {"weights": {
            "type": "int", "num_bits": 8, "block_structure": [128, 128]}}}}}, "got None of"),
        *((fp8(quant_method=method), re.escape(f"got {method!r} of"))
          for method in ("blockwise_int8", "w8a8_fp8", "modelopt", "quark", None, ["fp8"])),
        (fp8(weight_block_size=128), "got 'fp8' of 128"),
        (fp8(config_groups={"a": {"weights": {"num_bits": 4}}}), "got 'fp8' of"),
        (fp8(config_groups={"a": {"input_activations": {"dynamic": False}}}), "got 'fp8' of"),
        (fp8(config_groups=[1]), "config_groups: expected an object, got list"),
        (fp8(config_groups={"a": {"weights": 8}}), "weights: expected an object, got int"),
        (fp8(activation_scheme="static"), "activation_scheme='static': expected dynamic"),
        (fp8(fmt="e5m2"), "fmt='e5m2': expected e4m3"),
        (fp8(scale_fmt={"a": 1}), "scale_fmt={'a': 1}: expected ue8m0"),
        (fp8(ignore=["re:.*mlp.experts.*"]), "ignore: 're:.*mlp.experts.*': experts that are not"),
        (fp8(modules_to_not_convert="experts"), "modules_to_not_convert='experts': expected a l"),
        ({"quantization_config": [128, 128]}, "quantization_config: expected an object, got list"),
        *(({"num_experts": wrong}, "num_experts=.*: expected a whole number from 1 to 1048576")
          for wrong in (-1, 0, 2**40, 10**400, "4", 4.0, True, [4, 4], {"a": 4})),
        ({"moe_intermediate_size": [128, 128], "intermediate_size": 256},
         r"moe_intermediate_size=\[128, 128\]: .*, the same for all layers"),
        ({"moe_topk": 4}, "num_experts_per_tok=2, moe_topk=4: expected one number"),
        ({"moe_intermediate_size": None, "intermediate_size": 256, "moe_inter_dim": 128},
         "moe_inter_dim: a width of experts that this program does not know"),
        ({"moe_intermediate_size": None, "moe_ffn_hidden_size": 128},
         "no moe_intermediate_size or expert_ffn_hidden_size"),
        ({"n_shared_experts": [1, 1]}, r"n_shared_experts=\[1, 1\]: expected a whole number"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act='gelu_pytorch_tanh': expected silu"),
        ({"mlp_hidden_act": "relu2"}, "mlp_hidden_act='relu2': expected silu"),
        *(({"swiglu_limit": wrong}, "swiglu_limit=.*: expected a number")
          for wrong in ("7", [7.0], {"a": 7}, True, float("nan"), float("inf"))),
        ({"model_type": "gpt_oss"}, "experts with a bias"),
        ({"mlp_bias": True}, "experts with a bias"),
        ({"torch_dtype": "float16"}, "tokens of float16"),
        ({"num_experts": None}, "no n_routed_experts or num_experts or"),
        (fp8(weight_block_size=None), "got 'fp8' of None"),
        (fp8(weight_block_size=[1, 128]), r"blocks of \[128, 128\], .* got 'fp8' of \[1, 128\]"),
        ({"quantization_config": {"config_groups": {"a": {"weights": {"strategy": "channel"}}}}},
         "got None of 'channel'"),
        ({"swiglu_limits": [1, 2]}, "swiglu_limits: expected one"),
    ],
)  # fmt: skip
def test_a_model_that_is_not_served_is_refused(changes, why):
    with pytest.raises(ValueError, match=why):
        bake.read_model("a", {**SMALL, **changes})


V4 = {
    "model_type": "deepseek_v4", "expert_dtype": "fp4", "n_routed_experts": 256,
    "num_experts_per_tok": 6, "hidden_size": 4096, "moe_intermediate_size": 2048,
    "n_shared_experts": 1, "swiglu_limit": 10.0, "hidden_act": "silu",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3",
                            "activation_scheme": "dynamic", "scale_fmt": "ue8m0"},
}  # fmt: skip
"""The part of DeepSeek-V4-Flash's config.json about experts."""
W4A8 = bake.MODELS["qwen3-30b-a3b-mxfp4"]["quantization_config"]


@pytest.mark.parametrize(
    "config",
    [
        V4,
        {**V4, "expert_dtype": None},
        {**SMALL, "expert_dtype": "fp4"},
        {**SMALL, **fp8(expert_dtype="fp4")},
        {**SMALL, "quantization_config": W4A8},
    ],
)
def test_experts_in_mxfp4_are_packed_as_by_the_server(config, monkeypatch):
    model = bake.read_model("a", config)
    assert model.mxfp4
    wanted = {"exact": {True}, "both": {True, False}, "lossy": {True, False}}
    for mode, packed in wanted.items():
        monkeypatch.setenv(plugins.MXFP4, mode)
        for engine in ("vllm", "sglang"):
            assert {form.packed for *_, form in forms(*bake.calls(model, engine))} == packed
        with pytest.raises(bake.UsageError, match="MXFP4: expected --engine vllm or sglang"):
            forms(*bake.calls(model, "transformers"))
    monkeypatch.setenv(plugins.MXFP4, "0")
    with pytest.raises(bake.UsageError, match="MXFP4: expected MOE_FP8_MXFP4=exact, both or lossy"):
        forms(*bake.calls(model))


@pytest.mark.parametrize(
    "changes", [{"num_bits": 8}, {"group_size": 16}, {"type": "int"}, {"strategy": "channel"}]
)
def test_four_bits_of_another_kind_are_refused_in_one_group_too(changes):
    (group,) = W4A8["config_groups"].values()
    changed = {**group, "weights": group["weights"] | changes}
    changed = {**W4A8, "config_groups": {"a": group, "b": changed}}
    with pytest.raises(ValueError, match="quantization_config: expected FP8 in blocks"):
        bake.read_model("a", {**SMALL, "quantization_config": changed})


def test_deepseek_v4_in_fp8_needs_no_packed_kernels():
    assert not bake.read_model("a", {**V4, "expert_dtype": "fp8"}).mxfp4


def test_the_program_bakes_packed_kernels(config, compiled, tmp_path, monkeypatch, capsys):
    small = {**V4, "n_routed_experts": 4, "hidden_size": 256, "moe_intermediate_size": 128,
             "num_experts_per_tok": 2}  # fmt: skip
    config.joinpath("config.json").write_text(json.dumps(small))
    assert run(config, tmp_path / "out") == 2 and not compiled
    monkeypatch.setenv(plugins.MXFP4, "exact")
    assert run(config, tmp_path / "out") == 0
    assert {geometry[-1].packed for geometry in compiled} == {True}
    assert {geometry[0].swiglu.limit for geometry in compiled} == {10.0}
    assert "experts in MXFP4, MOE_FP8_MXFP4=exact" in capsys.readouterr().out


def test_a_model_of_the_hub(config, compiled, tmp_path, monkeypatch, capsys):
    def download(name: str, file: str) -> str:
        assert (name, file) == ("someone/a-model", "config.json")
        return str(config / file)

    hub = SimpleNamespace(hf_hub_download=download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert run("someone/a-model", tmp_path / "out") == 0 and compiled
    hub.hf_hub_download = lambda *_: next(iter(()))
    assert run("someone/a-model", tmp_path / "out") == 2
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert run("someone/a-model", tmp_path / "out") == 2
    assert capsys.readouterr().err.count("no such directory, and the download failed") == 2


# --- the program ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tensor-parallel", "2"), "--tensor-parallel 2: a GPU would have 64 of an expert's 128 "
         "columns, expected a multiple of 128; with --expert-parallel experts stay whole\n"),
        (("--tensor-parallel", "3", "--data-parallel", "2"),
         "--tensor-parallel 3 --data-parallel 2: a GPU would have 21.3333 of"),
        (("--tensor-parallel", "3", "--expert-parallel", "--engine", "sglang"),
         "--tensor-parallel 3 --expert-parallel: expected a divisor of 4 experts\n"),
        (("--output", ""), "argument --output: expected a name or a path"),
        (("--model", ""), "argument --model: expected a name or a path"),
        (("--exchange", "nixl_ep"),
         "--exchange nixl_ep: expected --engine vllm --expert-parallel"),
        (("--exchange", "nixl_ep", "--engine", "sglang", "--expert-parallel"), "--engine vllm"),
        (("--data-parallel", "2", "--engine", "sglang"), "--data-parallel 2: expected --engine"),
        (("--tensor-parallel", "0"), "0: expected at least 1"),
        (("--gpu", "a100"), "a100"),
    ],
)  # fmt: skip
def test_options_that_are_wrong(options, message, config, compiled, tmp_path, capsys):
    assert run(config, tmp_path / "out", *options) == 2
    assert message in capsys.readouterr().err and not compiled and not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [None, "{", "[" * 100_000, "9" * 5000, "a pipe"])
def test_a_configuration_that_cannot_be_read(content, config, tmp_path, capsys):
    path = config / "config.json"
    path.unlink() if content in (None, "a pipe") else path.write_text(content)
    if content == "a pipe":
        os.mkfifo(path)
    assert run(config, tmp_path / "out") == 2
    assert f"--model {config}: expected a" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("[1]", "--model {}: the configuration: expected an object, got list"),
        (json.dumps({**SMALL, "moe_intermediate_size": 100}),
         "the layer is not served: intermediate_size=100: expected a positive multiple of 128"),
        (json.dumps({**SMALL, "num_experts_per_tok": 5}), "--model {}: 5 of 4 experts of a token"),
        (json.dumps({**SMALL, "swiglu_limit": -1}), "the layer is not served: swiglu_limit=-1"),
    ],
)  # fmt: skip
def test_a_model_that_is_not_understood_is_a_failure(
    content, why, config, compiled, tmp_path, capsys
):
    config.joinpath("config.json").write_text(content)
    assert run(config, tmp_path / "out") == 1 and not compiled and not (tmp_path / "out").exists()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {why.format(config)}") and ";" not in line


def test_the_program_names_the_fields_it_read(config, compiled, tmp_path, capsys) -> None:
    more = {"swiglu_limit": 7.0, "hidden_act": "silu", "n_shared_experts": 1}
    config.joinpath("config.json").write_text(json.dumps({**SMALL, **more}))
    assert run(config, tmp_path / "out") == 0
    assert capsys.readouterr().out.startswith(
        "model     num_experts 4, num_experts_per_tok 2, hidden_size 256, moe_intermediate_size "
        "128, n_shared_experts 1; hidden_act silu, swiglu_limit 7.0; FP8 in blocks of 128 x 128\n"
    )
    for quantisation, read in ((None, "weights that the engine"), (by_channel(), "FP8 by channel")):
        config_of = {**SMALL, "quantization_config": quantisation}
        assert f"SwiGLU (no activation is named); {read}" in bake.read_model("a", config_of).read


@pytest.mark.parametrize("there", ["a file", "a link to nothing", "a pipe", "below a file"])
def test_an_output_that_is_no_directory(there, config, compiled, tmp_path, capsys) -> None:
    out = tmp_path / "out"
    if there == "a link to nothing":
        out.symlink_to(tmp_path / "missing")
    elif there == "a pipe":
        os.mkfifo(out)
    else:
        out.touch()
    asked = out / "kernels" if there == "below a file" else out
    assert run(config, asked) == 2 and not compiled
    why = f"error: --output {asked}: {out}: no directory, nor a link to one\n"
    assert capsys.readouterr().err == why


@pytest.mark.all
def test_a_full_disk_ends_the_first_compilation(config, tmp_path, capfd, monkeypatch) -> None:
    """Not all kernels are compiled before it is noticed."""
    monkeypatch.setattr(bake, "CHUNK_TOKENS", 24)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))  # for the processes, too
    try:
        assert run(config, tmp_path / "out") == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = capfd.readouterr().err
    why = f"{NOT_KEPT} in {tmp_path}/out"
    assert "100%" not in said and f"moe_fp8: {why}" in said
    assert said.splitlines()[-1].startswith(f"error: RuntimeWarning: {why}")


def test_the_number_of_compiled_kernels_counts_damaged_ones(baked, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bake, "CHUNK_TOKENS", 24)
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    shutil.copytree(baked.directory, tmp_path / "out")
    (tmp_path / "out").chmod(0o755)
    next((tmp_path / "out").glob("*/kernel.o")).write_bytes(b"damaged")
    for compiled in (1, 0):
        monkeypatch.setattr(fused.compile_fused, "functions", {})
        assert run(tmp_path, tmp_path / "out") == 0
        assert f"{len(baked.kernels)}, {compiled} compiled in " in capsys.readouterr().out


COMPILES_NOTHING = """
import sys
from moe_fp8.kernels import compile
from moe_fp8.serving import bake
bake.compile_all, compile.is_on_disk = len, lambda *_: True
sys.exit(bake.main())
"""


def test_letters_that_the_locale_lacks_are_escaped(config, tmp_path) -> None:
    place = config.rename(tmp_path / "mod\u00e8le")
    command = [sys.executable, "-c", COMPILES_NOTHING, "--gpu", "h100", "--model", place]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGES), "PYTHONIOENCODING": "ascii:strict"}
    done = subprocess.run(
        [*command, "--output", place], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and "mod\\xe8le\n" in done.stdout, done.stderr


def test_a_directory_that_others_can_write_to(config, compiled, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out").chmod(0o777)
    assert run(config, tmp_path / "out") == 2 and not compiled
    assert "can be written by other users (mode 777" in capsys.readouterr().err


def fails(*_: Any) -> None:
    raise RuntimeError("the compiler has crashed")


@pytest.mark.parametrize(
    ("make", "why"),
    [(fails, "RuntimeError: the compiler has crashed"), (len, "lacks")],
)
def test_kernels_that_are_not_there_are_a_failure(make, why, config, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bake, "compile_all", make)
    assert run(config, tmp_path / "out") == 1
    assert why in capsys.readouterr().err


def test_an_interruption(config, monkeypatch, tmp_path):
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bake, "compile_all", interrupt)
    assert run(config, tmp_path / "out") == 130


def test_the_name_of_the_program_is_that_of_the_function() -> None:
    import moe_fp8.prepare

    assert moe_fp8.prepare is ahead.prepare
    environment = {**os.environ, "PYTHONPATH": str(PACKAGES)}
    command = [sys.executable, "-m", "moe_fp8.prepare", "--help"]
    done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True)
    assert done.returncode == 0 and "usage: python -m moe_fp8.prepare" in done.stdout
