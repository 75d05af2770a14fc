"""The layer over several ranks, on the CPU: gloo, the torch model, a reduced size."""

import json
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from moe_fp8.expert_parallel import deep_ep_buffer, expert_parallel_moe
from moe_fp8.functional import fused_moe
from moe_fp8.layer.metrics import calc_diff
from test_functional import ROUTING, SHAPE, tensors_of

from scripts.common.project import ROOT

STAND_INS = ROOT / "tests/cpu/stand_ins"


def run(*arguments: str, more_path: str = "") -> subprocess.CompletedProcess:
    program = [sys.executable, "scripts/benchmark/expert_parallel.py", "--cpu", *arguments]
    path = f"{ROOT / 'solutions'}:{ROOT}:{more_path}"
    env = {"PYTHONPATH": path, "PATH": "", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=300, env=env)


@pytest.mark.parametrize(
    ("ranks", "more"), [(2, []), (4, ["--accurate"]), (2, ["--deep-ep"]), (4, ["--deep-ep"])]
)
def test_the_ranks_together_are_one_that_has_all_experts(ranks, more, tmp_path):
    record = tmp_path / "record.json"
    sizes = ["--ranks", str(ranks), "--tokens", "1", "9"]
    done = run(*sizes, *more, "--json", str(record), more_path=str(STAND_INS))
    assert done.returncode == 0, done.stderr
    results = json.loads(record.read_text())["results"]
    assert [result["tokens"] for result in results] == [1, 9]
    # Not 0: the parts of a token are rounded; and well below one part that is missing.
    assert all(0 < result["calc_diff"] < 1e-5 for result in results)
    how = "gloo, DeepEP" if "--deep-ep" in more else "gloo"
    assert f"{ranks} ranks (CPU, torch model, {how})" in done.stdout


def test_ranks_that_do_not_divide_the_experts():
    done = run("--ranks", "3")
    assert done.returncode == 2 and "expected a divisor of 16 experts" in done.stderr


def test_deep_ep_is_not_installed():
    done = run("--deep-ep")
    assert done.returncode == 2 and "--deep-ep: not installed" in done.stderr


@pytest.fixture
def alone(tmp_path):
    """A group of this process alone."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    yield
    dist.destroy_process_group()


def test_one_rank_is_the_layer(alone):
    logits, bias, *others = tensors_of(11)
    held = SHAPE.num_local_experts
    arguments = logits[:, :held].contiguous(), bias[:held].contiguous(), *others
    routing = ROUTING | {"n_group": 2, "topk_group": 2}
    wanted = fused_moe(*arguments, **routing)
    assert torch.equal(expert_parallel_moe(*arguments, **routing), wanted)
    assert wanted.abs().sum() > 0


@pytest.mark.parametrize("tokens", [0, 1, 11])
def test_deep_ep_brings_a_token_to_its_experts(alone, monkeypatch, tokens):
    """A rank's own tokens come back as they are, however many, each sent once; with the scales of
    its values, whose number is not a multiple of what DeepEP copies."""
    monkeypatch.syspath_prepend(STAND_INS)
    logits, bias, *others = tensors_of(tokens)
    held = SHAPE.num_local_experts
    arguments = logits[:, :held].contiguous(), bias[:held].contiguous(), *others
    routing = ROUTING | {"n_group": 2, "topk_group": 2}
    buffer = deep_ep_buffer(held, SHAPE.hidden_size)
    output = expert_parallel_moe(*arguments, **routing, buffer=buffer)
    assert torch.equal(output, fused_moe(*arguments, **routing))


def uneven_rank(rank: int, ranks: int, folder: str) -> None:
    """A rank that has tokens and experts of its own, and knows the weights of all."""
    sys.path.insert(0, str(STAND_INS))
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, store=store)
    logits, bias, x, x_scale, *_ = tensors_of(7 * rank, seed=rank)
    weights = [torch.cat([tensors_of(0, seed=r)[4 + i] for r in range(ranks)]) for i in range(4)]
    held = SHAPE.num_local_experts
    given = logits[:, : ranks * held].contiguous(), tensors_of(0)[1][: ranks * held], x, x_scale
    routing = ROUTING | {"n_group": 4, "topk_group": 2}
    buffer = deep_ep_buffer(ranks * held, SHAPE.hidden_size)
    mine = [tensor[rank * held : (rank + 1) * held] for tensor in weights]
    output = expert_parallel_moe(*given, *mine, **routing, buffer=buffer)
    wanted = fused_moe(*given, *weights, **routing)
    assert output.shape == wanted.shape == (7 * rank, SHAPE.hidden_size)
    assert calc_diff(output, wanted) < 1e-5
    dist.destroy_process_group()


def test_deep_ep_takes_as_many_tokens_as_a_rank_has(tmp_path):
    torch.multiprocessing.spawn(uneven_rank, (3, str(tmp_path)), nprocs=3)


def test_experts_of_nobody(alone):
    with pytest.raises(ValueError, match="expected 4 experts, 4 of each of 1 ranks, got 16"):
        expert_parallel_moe(*tensors_of(3), **ROUTING)
