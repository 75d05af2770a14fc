"""The Python blocks of the pages do what the pages say, on CPU tensors."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from documented import ROOT, blocks, of_section, pages, run_page
from moe_fp8 import experts, from_mxfp4, fused_moe, quantise_blocks
from moe_fp8.reference import calc_diff
from mxfp4_values import drawn
from ptxemu import build
from small_layer import EXPERTS, HIDDEN, TOKENS, WIDTH, named_tensors

from scripts.measuring.accuracy import in_float32

STAND_INS = ROOT / "tests/support/stand_ins"
BLOCKS = [block for page in pages() for block in blocks(page)]
NOT_RUN = [block for block in BLOCKS if block.why_not]


def test_every_python_block_is_run() -> None:
    """A test takes the blocks of each section with a block, or of the whole page."""
    sources = "".join(path.read_text("utf-8") for path in ROOT.glob("tests/*/test_*.py"))
    run = {*re.findall(r'(?:run_page|of_section)\(\s*"(.+?)", "(.*?)"', sources)}
    assert {(block.page, block.section) for block in BLOCKS if (block.page, "") not in run} == {
        (page, section) for page, section in run if section
    }


@pytest.mark.parametrize("block", NOT_RUN, ids=lambda block: f"{block.page}:{block.line}")
def test_a_block_that_is_not_run_here_says_why(block) -> None:
    (test,) = re.findall(r"\S+\.py", block.why_not)
    assert f'"{block.page}", "{block.section}"' in (ROOT / test).read_text("utf-8")
    pytest.skip(block.why_not)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Any]:
    """Start a group of this process alone. Use the function in place of torch's."""
    start = dist.init_process_group

    def of_one(*_: Any, **__: Any) -> None:
        start("gloo", rank=0, world_size=1, store=dist.FileStore(str(tmp_path / "store"), 1))

    yield of_one
    dist.destroy_process_group()


def operands() -> dict[str, torch.Tensor]:
    """Return a layer's tensors by the names of the pages."""
    names = named_tensors()
    return names | {"topk_ids": names["ids"], "topk_weights": names["weights"]}


def test_the_readme() -> None:
    assert run_page("README.md", "Call it")["out"].shape == (4, 512)


def test_the_long_description() -> None:
    assert run_page("docs/pypi.md", "moe_fp8")["out"].shape == (4, 512)


def test_calling_the_layer() -> None:
    run_page("docs/calling.md", "Calling the layer", **operands())


def test_gradients() -> None:
    w13, w2 = (
        torch.nn.Parameter(torch.randn(EXPERTS, n, k) / k**0.5)
        for n, k in ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH))
    )
    names = run_page("docs/calling.md", "Gradients", **operands() | {"w13": w13, "w2": w2})
    assert names["y"].requires_grad
    assert all(w.grad is not None and w.grad.any() for w in (w13, w2))


def test_mxfp4_weights() -> None:
    names = operands()
    for name, rows, width in (("w13", 2 * WIDTH, HIDDEN), ("w2", HIDDEN, WIDTH)):
        values = drawn(EXPERTS, rows, width)
        names |= dict(zip((f"{name}_values", f"{name}_exponents"), values, strict=True))
    w13, w2 = (from_mxfp4(names[f"{n}_values"], names[f"{n}_exponents"]) for n in ("w13", "w2"))
    out = run_page("docs/calling.md", "MXFP4 weights", experts=experts, **names)["out"]
    choice = names["topk_ids"], names["topk_weights"], names["x"]
    assert out.any() and torch.equal(out, experts(*choice, *w13, *w2))


def test_fp8_operands() -> None:
    """Their layer's differences to float32 are those of the page's section on options."""
    names = operands()
    up, gate = torch.randn(2, EXPERTS, WIDTH, HIDDEN) / HIDDEN**0.5
    down, tokens = torch.randn(EXPERTS, HIDDEN, WIDTH) / WIDTH**0.5, torch.randn(TOKENS, HIDDEN)
    given = {"up": up, "gate": gate, "down": down, "tokens": tokens}
    names |= run_page("docs/calling.md", "FP8 operands", **given)
    choice = names["ids"], names["weights"]
    parts = [names[name] for name in ("x", "w13", "w13_scale", "w2", "w2_scale")]
    options = {"x_scale": names["x_scale"], "gate_first": False}
    ones = [torch.ones_like(names[name]) for name in ("w13_scale", "w2_scale")]
    whole = tokens, torch.cat([up, gate], dim=1), ones[0], down, ones[1]
    unrounded = options | {"x_scale": torch.ones_like(names["x_scale"])}
    rounded = in_float32(*choice, *parts, **options)
    plain = in_float32(*choice, *whole, **unrounded)
    text = (ROOT / "docs/calling.md").read_text("utf-8")
    first, second = re.findall(r"is (\S+e-\d) instead of\s+(\S+e-\d)", text)
    for accurate, documented in zip((True, False), zip(first, second, strict=True), strict=True):
        out = experts(*choice, *parts, **options, accurate=accurate)
        found = [calc_diff(out, reference) for reference in (rounded, plain)]
        assert found == pytest.approx([float(value) for value in documented], rel=0.6), accurate


@pytest.mark.parametrize("rank", [0, 1])
def test_shards(rank: int) -> None:
    """A shard of 192 of 384 columns is the layer of these columns."""
    names, columns = operands(), slice(192 * rank, 192 * rank + 192)
    touched = slice(columns.start // 128, -(-columns.stop // 128))
    w13, w13_scale = quantise_blocks(torch.randn(EXPERTS, 2 * 384, HIDDEN) / HIDDEN**0.5)
    w2, w2_scale = quantise_blocks(torch.randn(EXPERTS, HIDDEN, 384) / 384**0.5)
    whole = w13.clone(), w13_scale, w2, w2_scale
    for half in whole[0].view(torch.uint8).chunk(2, 1):
        half[:, : columns.start] = half[:, columns.stop :] = 0
    shard = {
        "w13": torch.cat([half[:, columns] for half in w13.chunk(2, 1)], 1),
        "w13_scale": torch.cat([half[:, touched] for half in w13_scale.chunk(2, 1)], 1),
        "w2": w2[:, :, columns].contiguous(),
        "w2_scale": w2_scale[:, :, touched].contiguous(),
    }
    padded = run_page("docs/calling.md", "Shards", rank=rank, **shard)
    tokens = names["ids"], names["weights"], names["x"]
    assert padded["w2"].shape == (EXPERTS, HIDDEN, 256)
    out = experts(*tokens, *(padded[name] for name in shard), accurate=True)
    assert calc_diff(out, experts(*tokens, *whole, accurate=True)) < 1e-5


def test_several_gpus(alone, monkeypatch) -> None:
    """One rank on the CPU, with a stand-in for DeepEP."""
    monkeypatch.syspath_prepend(STAND_INS)
    monkeypatch.setattr(dist, "init_process_group", alone)
    given = operands() | {"tokens": torch.randn(TOKENS, HIDDEN), "rank": 0}
    names = run_page("docs/calling.md", "Several GPUs", **given, experts=EXPERTS, hidden=HIDDEN)
    parts = "logits", "bias", "x", "x_scale", "w13", "w13_scale", "w2", "w2_scale"
    assert torch.equal(names["output"], fused_moe(*(names[name] for name in parts)))


def test_an_order_without_nccl(alone) -> None:
    alone()
    part = torch.randn(TOKENS, HIDDEN).bfloat16()
    names = run_page("docs/determinism.md", "Several GPUs", part=part, ranks=1)
    assert torch.equal(names["total"], part.float())


KERNEL = """
import cutlass.cute as cute
import torch
from cuda.bindings import driver as cuda
from cutlass import Float32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor


@cute.kernel
def add(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor):
    i = cute.arch.thread_idx()[0]
    c[i] = a[i] + b[i]


@cute.jit
def my_jit_function(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream: cuda.CUstream):
    add(a, b, c).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


fake_tensors = [make_fake_tensor(Float32, (32,), stride=(1,)) for _ in "abc"]
a, b, c = torch.randn(32), torch.randn(32), torch.zeros(32)
reference = torch.add
"""


def test_a_test_on_the_emulator(tmp_path: Path) -> None:
    """The two files of the emulator's page, in a directory of their own."""
    try:
        build.library()
    except build.NoCompiler as error:
        pytest.skip(str(error))
    conftest, test = of_section("emulator/README.md", "Write a test")
    (tmp_path / "conftest.py").write_text(conftest.code)
    (tmp_path / "test_mine.py").write_text(KERNEL + test.code)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "4 passed" in done.stdout, done.stdout
