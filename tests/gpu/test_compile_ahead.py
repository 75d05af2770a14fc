"""After `prepare` no call compiles or loads a kernel, and a graph captures any number of tokens."""

from typing import Any

import pytest
import torch
from moe_fp8 import experts, fused_moe, prepare
from moe_fp8.cache import CACHE_VARIABLE
from moe_fp8.kernels import fused
from moe_fp8.reference import quantise_blocks, quantise_rows

from scripts.common.metrics import calc_diff

EXPERTS, HIDDEN, WIDTH, TOP_K = 16, 512, 256, 4
TOKENS = (1, 5, 40, 200, 700, 1500)


def weights() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device="cuda")

    return (
        *quantise_blocks(random(EXPERTS, 2 * WIDTH, HIDDEN)),
        *quantise_blocks(random(EXPERTS, HIDDEN, WIDTH)),
    )


def tokens_of(tokens: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(tokens)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device="cuda")

    scores = random(tokens, EXPERTS)
    return {
        "logits": scores,
        "ids": scores.topk(TOP_K).indices.int(),
        "weights": random(tokens, TOP_K).abs(),
        "x": random(tokens, HIDDEN).bfloat16(),
    }


def call(kind: str, tokens: int, of: tuple[torch.Tensor, ...]) -> tuple[Any, tuple, dict[str, Any]]:
    """A function, its arguments and options."""
    given = tokens_of(tokens)
    if kind == "fused_moe":
        routing = {"n_group": 1, "topk_group": 1, "top_k": TOP_K}
        return fused_moe, (given["logits"], None, given["x"], None, *of), routing
    x, options = given["x"], {"accurate": kind == "accurate"}
    if kind == "fp8, scales by token":
        x, scale = quantise_rows(x)
        # `contiguous` would leave the strides of one token, which are those of both layouts.
        options["x_scale"] = scale.new_empty(scale.shape[::-1]).copy_(scale.t()).t()
    return experts, (given["ids"], given["weights"], x, *of), options


@pytest.mark.parametrize("kind", ["bfloat16", "accurate", "fp8, scales by token", "fused_moe"])
def test_nothing_is_compiled_or_loaded_afterwards(kind, monkeypatch, tmp_path):
    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a kernel is compiled or loaded")

    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(fused.compile_fused, "functions", {})
    of = weights()
    function, arguments, options = call(kind, 3, of)
    assert prepare(function, *arguments, **options, tokens=2048) >= 3
    monkeypatch.setattr(fused, "compiled", refuse)
    for tokens in TOKENS:
        function, arguments, options = call(kind, tokens, of)
        made = function(*arguments, **options)
        on_cpu = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        wanted = function(*(a if a is None else a.cpu() for a in arguments), **on_cpu)
        assert calc_diff(made.cpu(), wanted) < 1e-4
    assert prepare(function, *arguments, **options, tokens=2048) == 0

    function, arguments, options = call(kind, 77, of)  # as many as no call had
    graph, out = torch.cuda.CUDAGraph(), made.new_full((77, HIDDEN), torch.nan)
    with torch.cuda.graph(graph):
        function(*arguments, **options, out=out)
    graph.replay()
    assert torch.equal(out, function(*arguments, **options))
