"""Transformers' FP8 experts by the fused layer: values, sentinels, whole models, and refusals."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from documented import run_page
from installed import engine
from moe_fp8 import experts as own_experts
from moe_fp8.kernels.architectures import GPUS
from moe_fp8.reference import calc_diff
from moe_fp8.serving import bake
from reference import Weights, kernels_of, layer

from scripts.common.program import ROOT

fp8 = engine("transformers.integrations.finegrained_fp8")
from moe_fp8.serving import huggingface  # noqa: E402
from transformers import FineGrainedFP8Config, Qwen3MoeConfig, Qwen3MoeForCausalLM  # noqa: E402

E, H, WIDTH, K, T = 8, 256, 128, 3, 7
BLOCKS = FineGrainedFP8Config(weight_block_size=(128, 128))


def config(**options) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=512, hidden_size=H, intermediate_size=256, moe_intermediate_size=WIDTH,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        num_experts=E, num_experts_per_tok=K, norm_topk_prob=True, pad_token_id=0, **options,
    )  # fmt: skip


def with_fp8_experts(model: torch.nn.Module) -> torch.nn.Module:
    """Replace a model's experts as loading a block-quantised checkpoint does, and quantise them."""
    from moe_fp8 import quantise_blocks

    others = [name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    old = {name: m for name, m in model.named_modules() if name.endswith(".experts")}
    fp8.replace_with_fp8_linear(model, others, BLOCKS)
    for name, experts in old.items():
        new = model.get_submodule(name)
        for part in ("gate_up_proj", "down_proj"):
            values, scales = quantise_blocks(getattr(experts, part).detach().float())
            setattr(new, part, torch.nn.Parameter(values, requires_grad=False))
            setattr(new, f"{part}_scale_inv", torch.nn.Parameter(scales, requires_grad=False))
    return model


def module(implementation: str = "moe_fp8", **options) -> tuple[torch.nn.Module, Weights]:
    """Return an `FP8Experts` module as a model has it, and its weights."""
    model_config = config(experts_implementation=implementation)
    for name, value in options.items():
        setattr(model_config, name, value)
    model = torch.nn.Module()
    model.config, model.experts = model_config, torch.nn.Module()
    holder = torch.nn.Module()
    holder.layer = model
    holder.config = model_config
    fp8.replace_with_fp8_linear(holder, None, BLOCKS)
    experts, weights = holder.layer.experts, Weights(E, H, WIDTH)
    for name, value in (
        ("gate_up_proj", weights.w13), ("gate_up_proj_scale_inv", weights.w13_scale),
        ("down_proj", weights.w2), ("down_proj_scale_inv", weights.w2_scale),
    ):  # fmt: skip
        setattr(experts, name, torch.nn.Parameter(value, requires_grad=False))
    experts.config._experts_implementation = implementation
    return experts, weights


def call() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(T, H, generator=generator).bfloat16()
    ids = torch.rand(T, E, generator=generator).topk(K).indices
    return x, ids, torch.rand(T, K, generator=generator).bfloat16()


@pytest.mark.parametrize("scale_fmt", ["", "ue8m0"])
@pytest.mark.parametrize("implementation", huggingface.NAMES)
def test_experts_with_ids_of_other_ranks(implementation, scale_fmt, monkeypatch):
    """Transformers numbers the experts of other ranks `num_experts`, after the last local one. The
    kernels are those that `python -m moe_fp8.prepare` makes."""
    asked = []

    def noted(*call, **options):
        asked.append(kernels_of(own_experts, *call, **options))
        return own_experts(*call, **options)

    monkeypatch.setattr(huggingface, "experts", noted)
    experts, weights = module(implementation)
    if scale_fmt:
        for part, name in (("gate_up_proj", "w13_scale"), ("down_proj", "w2_scale")):
            exponents = getattr(weights, name).to(torch.float8_e8m0fnu)
            parameter = torch.nn.Parameter(exponents, requires_grad=False)
            setattr(experts, f"{part}_scale_inv", parameter)
            setattr(weights, name, exponents.float())
    x, ids, scores = call()
    ids[2, 1] = ids[5] = E
    out = experts(x, ids, scores)
    expected = layer(x, ids.masked_fill(ids == E, -1), scores.float(), weights)
    accurate = "accurate" in implementation
    model = bake.Model("", E, K, H, WIDTH, scale_fmt=scale_fmt)
    calls = bake.calls(model, "transformers", accurate=accurate)
    assert asked == [{*bake.geometries_of([*calls], *GPUS["h100"])}]
    # `layer` rounds tokens with scales that are no powers of two.
    limit = 4e-3 if scale_fmt else 1e-5 if accurate else 2e-3
    assert out.dtype is torch.bfloat16 and calc_diff(out.double(), expected) < limit
    assert not out[5].any()


@pytest.mark.parametrize(("alpha", "beta"), [(None, 0.0), (1.7, 1.0)])
def test_the_clamped_activations(alpha, beta):
    experts, weights = module(swiglu_limit=0.5, swiglu_alpha=alpha)
    x, ids, scores = call()

    def activation(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.clamp(max=0.5), up.clamp(-0.5, 0.5)
        return gate * torch.sigmoid((alpha or 1.0) * gate) * (up + beta)

    expected = layer(x, ids, scores.float(), weights, activation)
    assert calc_diff(experts(x, ids, scores).double(), expected) < 2e-3
    gate_up = torch.randn(3, 2 * WIDTH)
    theirs = experts._apply_gate(gate_up)
    assert torch.allclose(theirs, activation(*gate_up.chunk(2, -1)), atol=1e-6)


def test_a_model_answers_as_in_bfloat16():
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config()).bfloat16().eval()
    prompt = torch.randint(1, 512, (2, 33))
    with torch.no_grad():
        expected = model(prompt).logits.float()
        model = with_fp8_experts(model)
        model.set_experts_implementation("moe_fp8")
        calls = []
        huggingface.ALL_FP8_EXPERTS_FUNCTIONS.register(
            "moe_fp8_counted", lambda *a: calls.append(1) or huggingface.experts_forward(*a)
        )
        logits = model(prompt).logits.float()
        model.set_experts_implementation("moe_fp8_counted")
        assert torch.equal(model(prompt).logits.float(), logits) and len(calls) == 2
        tokens = model.generate(prompt, max_new_tokens=4, do_sample=False)
    assert tokens.shape == (2, 37) and len(calls) == 2 + 2 * 4
    assert torch.nn.functional.cosine_similarity(logits, expected, dim=-1).min() > 0.99


@pytest.mark.parametrize("implementation", huggingface.NAMES)
def test_a_model_with_experts_left_in_bfloat16_is_refused(implementation):
    """Transformers asks another interface for those, and runs both kinds by grouped_mm."""
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config()).bfloat16().eval()
    (first, experts), *_ = [(n, m) for n, m in model.named_modules() if n.endswith(".experts")]
    model = with_fp8_experts(model)
    model.set_submodule(first, experts)
    model.set_experts_implementation(implementation)
    with pytest.raises(NotImplementedError, match="^moe_fp8: experts .* of torch.bfloat16"):
        model(torch.randint(1, 512, (2, 33)))


def laid_out(folder: Path, known: dict[str, Any]) -> Path:
    """Run the commands of docs/engines.md for the CPU; return the kernel's repository. `known` has
    the dependencies that the library knows."""
    (commands,) = re.findall(
        r"```sh\n(.*?)```", (ROOT / "docs/engines.md").read_text("utf-8"), re.S
    )
    ((usual, depends, for_the_cpu),) = re.findall(
        r"^(backend=cuda depends='(.+)')  # .*: (backend=.*)$", commands, re.M
    )
    assert {*json.loads(f"[{depends}]")} <= {*known["general"], *known["backends"]["cuda"]}
    commands = commands.replace(usual, for_the_cpu).replace("/tmp", str(folder))
    subprocess.run(["sh", "-e", "-c", commands], check=True, cwd=ROOT)
    return folder / "moe-fp8"


def test_a_model_with_experts_that_the_kernels_library_loads(tmp_path, monkeypatch):
    """Load the kernel as docs/engines.md describes. It is a module separate from the package."""
    kernels = pytest.importorskip("kernels")
    if not kernels.__file__:  # a folder of that name, such as tests/kernels
        pytest.skip("the library is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    known = (Path(kernels.__file__).parent / "python_depends.json").read_text("utf-8")
    repository = laid_out(tmp_path, json.loads(known))
    torch.manual_seed(0)
    model = with_fp8_experts(Qwen3MoeForCausalLM(config()).bfloat16().eval())
    prompt = torch.randint(1, 512, (2, 33))
    registered = dict(huggingface.ALL_FP8_EXPERTS_FUNCTIONS)
    with torch.no_grad():
        model.set_experts_implementation("moe_fp8")
        expected = model(prompt).logits
        place = "/tmp", str(tmp_path)
        names = run_page("docs/engines.md", "In Hugging Face Transformers", place, model=model)
        loaded = huggingface.ALL_FP8_EXPERTS_FUNCTIONS["moe_fp8"]
        assert loaded.func.__module__ == "_moe_fp8_cpu.serving.huggingface"
        assert torch.equal(model(prompt).logits, expected)
    monkeypatch.setenv("LOCAL_KERNELS", f"owner/moe-fp8={repository}")
    assert kernels.get_kernel("owner/moe-fp8", version=0) is names["kernel"]
    for name in huggingface.NAMES:
        huggingface.ALL_FP8_EXPERTS_FUNCTIONS.register(name, registered[name])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"has_gate": False}, "experts without a gate"),
        ({"block_size": (1, 128)}, r"blocks \(1, 128\): expected \(128, 128\)"),
        ({"block_size": None}, "blocks None"),
        ({"activation_scheme": "static"}, "activation_scheme 'static'"),
        ({"act_fn": torch.nn.GELU()}, "activation GELU: expected SiLU"),
        ({"gate_up_proj": torch.zeros(E, 4, 4, dtype=torch.int8)}, "int8; moe_fp8.from_mxfp4"),
    ],
)
def test_layers_that_are_not_served_are_refused(change, message):
    experts, _ = module()
    for name, value in change.items():
        if isinstance(value, torch.Tensor):
            value = torch.nn.Parameter(value, requires_grad=False)
        setattr(experts, name, value)
    with pytest.raises(NotImplementedError, match=f"^moe_fp8: .*{message}"):
        experts(*call())


def test_other_types_are_refused():
    experts, _ = module()
    x, ids, scores = call()
    with pytest.raises(NotImplementedError, match="hidden_states of torch.float32"):
        experts(x.float(), ids, scores)


def test_gradients_of_what_is_not_an_expert():
    """FP8 weights get no gradients, though Transformers makes them with `requires_grad`."""
    experts, weights = module()
    for parameter in experts.parameters():
        parameter.requires_grad_()
    x, ids, scores = call()
    tokens, shares = x.clone().requires_grad_(), scores.clone().requires_grad_()
    out = experts(tokens, ids, shares)
    assert torch.equal(out, experts(x, ids, scores)) and not experts(x, ids, scores).requires_grad
    out.backward(direction := torch.randn(T, H).bfloat16())
    leaf = scores.double().requires_grad_()
    alone = torch.stack(
        [layer(x, ids[:, k : k + 1], torch.ones(T, 1), weights) for k in range(K)], 1
    )
    (leaf.unsqueeze(2) * alone * direction.unsqueeze(1)).sum().backward()
    assert calc_diff(shares.grad, leaf.grad) < 1e-3 and tokens.grad.any(dim=1).all()
    assert all(parameter.grad is None for parameter in experts.parameters())
