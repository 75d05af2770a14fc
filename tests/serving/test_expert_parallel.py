"""The layer over several ranks: on the CPU with gloo and the reference model at a reduced size, on
GPUs at the true geometry."""

import contextlib
import importlib.util
import json
import multiprocessing
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from markers import backends, more
from moe_fp8.api import fused_moe
from moe_fp8.call import MoeInputs
from moe_fp8.reference import calc_diff, choose_experts
from moe_fp8.serving.expert_parallel import deep_ep_buffer, expert_parallel_moe
from small_layer import ROUTING, SHAPE, tensors_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from scripts.common.program import ROOT

STAND_INS = ROOT / "tests/support/stand_ins"
LOCAL, HIDDEN = SHAPE.num_local_experts, SHAPE.hidden_size
TENSORS = MoeInputs._fields[:8]


def run(
    *arguments: str, more_path: str = "", by: Sequence[str] = ()
) -> subprocess.CompletedProcess:
    program = [sys.executable, *by, "examples/expert_parallel.py", "--check", "--cpu", *arguments]
    path = f"{ROOT / 'solutions'}:{ROOT}:{more_path}"
    env = {"PYTHONPATH": path, "PATH": "", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=1800, env=env)


@pytest.mark.parametrize(
    ("ranks", "options"), [(2, []), *more((4, ["--accurate"]), (4, ["--deep-ep"]))]
)
def test_the_ranks_together_are_one_that_has_all_experts(ranks, options):
    sizes = ["--tokens", "1", "9"]
    if ranks != 2:  # the default on the CPU
        sizes += ["--ranks", str(ranks)]
    done = run(*sizes, *options, more_path=str(STAND_INS))
    assert done.returncode == 0, done.stderr
    diffs = dict(
        re.findall(r"^(\d+) tokens a rank, calc_diff to one rank (\S+)$", done.stdout, re.M)
    )
    assert list(diffs) == ["1", "9"]
    # Not 0: the parts of a token are rounded; and well below one part that is missing.
    assert all(0 < float(diff) < 1e-5 for diff in diffs.values())
    exchange = "gloo, DeepEP" if "--deep-ep" in options else "gloo"
    assert f"{ranks} ranks (CPU, reference model, {exchange})" in done.stdout


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def test_torchrun_s_ranks_are_the_ranks():
    """Each line once, as of one program."""
    done = run("--tokens", "1", "9", by=TORCHRUN)
    assert done.returncode == 0, done.stderr
    header, *lines = done.stdout.splitlines()
    assert header == "2 ranks (CPU, reference model, gloo), 16 experts"
    assert [line.split(" tokens a rank, calc_diff to ")[0] for line in lines] == ["1", "9"]


def test_torchrun_s_ranks_are_not_others():
    done = run("--ranks", "4", by=TORCHRUN)
    assert done.returncode == 1 and "--ranks 4: torchrun has started 2\n" in done.stderr


@pytest.mark.parametrize("value", [0.0, 1.0, float("nan"), None])
def test_the_example_fails_where_its_output_is_another(value, monkeypatch):
    """This process is the one rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    names = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1,
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
    for name, number in names.items():
        monkeypatch.setenv(name, str(number))
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    example: Any = importlib.import_module("expert_parallel")
    monkeypatch.setattr(sys, "argv", ["expert_parallel.py", "--check", "--cpu", "--tokens", "3"])
    if value is not None:
        layer = example.expert_parallel_moe

        def another(*arguments: Any, **options: Any) -> torch.Tensor:
            return layer(*arguments, **options).fill_(value)

        monkeypatch.setattr(example, "expert_parallel_moe", another)
    with pytest.raises(SystemExit) if value is not None else contextlib.nullcontext():
        example.main()
    assert not dist.is_initialized()


def test_ranks_that_do_not_divide_the_experts():
    done = run("--ranks", "3")
    assert done.returncode == 2 and "expected a divisor of 16 experts" in done.stderr


@pytest.mark.all
@pytest.mark.skipif(importlib.util.find_spec("deep_ep") is not None, reason="DeepEP is installed")
def test_an_absent_deep_ep_is_named():
    done = run("--deep-ep", "--tokens", "1")
    assert done.returncode == 1 and "No module named 'deep_ep'" in done.stderr


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """A group of this process alone."""
    monkeypatch.syspath_prepend(STAND_INS)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    yield
    dist.destroy_process_group()


def one_of_a_world(rank: int, of_rank: Callable, ranks: int, folder: str, *arguments: Any) -> None:
    torch.set_num_threads(1)
    sys.path.insert(0, str(STAND_INS))
    store, patience = dist.FileStore(f"{folder}/store", ranks), timedelta(minutes=10)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, store=store, timeout=patience)
    of_rank(rank, ranks, *arguments)
    dist.destroy_process_group()


def world(of_rank: Callable, ranks: int, folder: object, *arguments: Any) -> None:
    """Call `of_rank(rank, ranks, *arguments)` in a process for each rank, forked from one that has
    imported torch."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch"])
    process_arguments = of_rank, ranks, str(folder), *arguments
    torch.multiprocessing.start_processes(
        one_of_a_world, process_arguments, ranks, start_method="forkserver"
    )


def rank_inputs(rank: int, ranks: int, tokens: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Return a rank's tokens and experts. All ranks share a bias, so small that choices differ."""
    logits, _, x, x_scale, *_ = tensors_of(tokens, 100 * seed + rank)
    bias, weights = tensors_of(0)[1] / 8, tensors_of(0, seed=rank)[4:]
    experts = ranks * LOCAL
    return logits[:, :experts].contiguous(), bias[:experts].contiguous(), x, x_scale, *weights


def added_in_order(everybody: list[tuple[torch.Tensor, ...]], **routing: Any) -> torch.Tensor:
    """Return the output of all ranks' tokens. The ranks' experts are added in rank order."""
    logits, _, x, _ = (torch.cat([inputs[i] for inputs in everybody]) for i in range(4))
    x_scale = torch.cat([inputs[3] for inputs in everybody], dim=1)
    total = torch.zeros(x.shape)
    for rank, (_, bias, _, _, *weights) in enumerate(everybody):
        tokens = logits, bias, x, x_scale
        total += fused_moe(*tokens, *weights, local_expert_offset=LOCAL * rank, **routing)
    return total.bfloat16()


def test_scales_of_channels(alone):
    *tokens, w13, _, w2, _ = rank_inputs(0, 1, 5)
    weights = w13, torch.rand(w13.shape[:2]), w2, torch.rand(w2.shape[:2])
    routing = {"n_group": 1, "topk_group": 1, "top_k": 2}
    output = expert_parallel_moe(*tokens, *weights, **routing)
    assert output.any() and torch.equal(output, fused_moe(*tokens, *weights, **routing))


def sum_of_rank(rank: int, ranks: int) -> None:
    """Every token has the same expert on every rank with the same weight; ranks 1 and 2 cancel, and
    are so large that the sum shows its order and its precision."""
    routing = {"n_group": 1, "topk_group": 1, "top_k": ranks}
    everybody = []
    for other, factor in zip(range(ranks), (1, 2**20, -(2**20), 3), strict=False):
        inputs = list(rank_inputs(other, ranks, 5))
        inputs[0] = torch.full((5, ranks, LOCAL), -10.0)
        inputs[0][torch.arange(5), :, torch.arange(5) % LOCAL] = 0
        inputs[0], inputs[1] = inputs[0].flatten(1), torch.zeros_like(inputs[1])
        inputs[4:] = tensors_of(0)[4:]
        inputs[7] = inputs[7] * factor
        everybody.append(tuple(inputs))
    wanted = added_in_order(everybody, **routing)[5 * rank : 5 * rank + 5]
    output = expert_parallel_moe(*everybody[rank], **routing)
    assert torch.equal(output, wanted)
    parts = [
        fused_moe(*everybody[rank][:4], *inputs[4:], local_expert_offset=LOCAL * other, **routing)
        for other, inputs in enumerate(everybody)
    ]
    assert not torch.equal(torch.stack(parts[::-1]).float().sum(0).bfloat16(), wanted)
    assert not torch.equal(sum(parts[1:], parts[0]), wanted)  # in bfloat16


@pytest.mark.parametrize("ranks", [3, 4])
def test_the_sum_is_in_float32_in_the_order_of_the_ranks(ranks, tmp_path):
    world(sum_of_rank, ranks, tmp_path)


TOP_2 = {"n_group": 1, "topk_group": 1, "top_k": 2}


def none_of(inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return the inputs without tokens, as empty views with the strides of the full tensors."""
    logits, bias, x, x_scale, *weights = inputs
    return logits.t().contiguous().t()[:0], bias, x[:0], x_scale[:, :0], *weights


def in_form(name: str) -> dict[str, Any]:
    """Return arguments of one rank, one of them in the form `name`."""
    tokens, experts = {
        "0 tokens": (0, 4),
        "1 token": (1, 4),
        "2 experts": (1, 2),
        "3 experts": (1, 3),
    }.get(name, (9, 4))
    logits, bias, x, x_scale, *weights = rank_inputs(0, 1, tokens)
    # Behind the logits of 2 or 3 experts the values are not where the layer could read them.
    logits, bias = logits[:, :experts].contiguous(), bias[:experts]
    tensors = logits, bias, x, x_scale, *(tensor[:experts] for tensor in weights)
    if name == "one of several":  # whose scales have the strides of all
        tensors = logits[3:4], bias, x[3:4], x_scale[:, 3:4], *weights
    if name == "none of several":
        tensors = none_of(tensors)
    arguments: dict[str, Any] = dict(zip(TENSORS, tensors, strict=True))
    if name == "bfloat16 tokens":
        generator = torch.Generator().manual_seed(3)
        arguments["hidden_states"] = torch.randn(9, HIDDEN, generator=generator).bfloat16()
        arguments["hidden_states_scale"] = None
    elif name == "bfloat16 logits":
        arguments["routing_logits"] = logits.bfloat16()
    elif name == "float32 bias":  # that bfloat16 cannot tell apart
        arguments["routing_bias"] = 7 + bias.float() / 100
    elif name == "no bias":
        arguments["routing_bias"] = None
    elif name == "scales by token":
        arguments["hidden_states_scale"] = x_scale.t().contiguous().t()
    return arguments | TOP_2 | OPTIONS.get(name, {})


OPTIONS: dict[str, dict[str, Any]] = {
    "bfloat16 tokens": {"ue8m0": True},
    "gate first": {"gate_first": True},
    "a factor": {"routed_scaling_factor": 2.5},
    "clamped": {"swiglu_limit": 1.5, "swiglu_alpha": 1.702, "swiglu_beta": 1.0},
    "ue8m0": {"ue8m0": True},
}


SIZES = ("0 tokens", "1 token", "2 experts", "3 experts", "one of several", "none of several")
TYPES = ("bfloat16 logits", "scales by token", "float32 bias", "no bias", *OPTIONS)


@pytest.mark.parametrize("with_buffer", [False, True])
@pytest.mark.parametrize("form", ["usual", *SIZES, *TYPES])
def test_one_rank_is_the_layer(alone, with_buffer, form):
    """A rank's own tokens come back as they are, however many, each sent once; with the scales of
    its values, whose number is not a multiple of what DeepEP copies."""
    arguments = in_form(form)
    buffer = deep_ep_buffer(len(arguments["gemm1_weights"]), HIDDEN) if with_buffer else None
    wanted = fused_moe(**arguments)
    assert torch.equal(expert_parallel_moe(**arguments, buffer=buffer), wanted)
    assert wanted.any() or not len(wanted)
    if form in TYPES[2:]:
        assert not torch.equal(wanted, fused_moe(**in_form("usual")))


@pytest.mark.parametrize("name", TENSORS)
def test_a_dtensor_is_refused_by_name(alone, name):
    """A DTensor has the shape of all ranks' parts together, and no address."""
    arguments = dict(zip(TENSORS, rank_inputs(0, 1, 9), strict=True))
    mesh = init_device_mesh("cpu", (1,))
    arguments[name] = DTensor.from_local(arguments[name], mesh, [Replicate()])
    options: dict[str, Any] = dict(TOP_2)
    for layer, rank in ((fused_moe, ""), (expert_parallel_moe, "rank 0: ")):
        message = f"^{rank}{name}: expected memory that a kernel can read, got DTensor"
        with pytest.raises(ValueError, match=message):
            layer(**arguments, **options)


def uneven_rank(rank: int, ranks: int) -> None:
    """The first rank has no tokens; the others send each of theirs to the ranks of its experts."""
    inputs = rank_inputs(rank, ranks, 7 * rank) if rank else none_of(rank_inputs(rank, ranks, 5))
    weights_of_ranks = (rank_inputs(r, ranks, 0)[4:] for r in range(ranks))
    weights = [torch.cat(parts) for parts in zip(*weights_of_ranks, strict=True)]
    routing = {"n_group": 6, "topk_group": 2, "top_k": 3}
    buffer = deep_ep_buffer(ranks * LOCAL, HIDDEN)
    sent, dispatch = [], buffer.dispatch
    buffer.dispatch = lambda *args, **named: sent.append(named) or dispatch(*args, **named)
    output = expert_parallel_moe(*inputs, **routing, buffer=buffer)
    wanted = fused_moe(*inputs[:4], *weights, **routing)
    assert output.shape == wanted.shape == (7 * rank, HIDDEN)
    assert calc_diff(output, wanted) < 1e-5

    def ranks_of(topk_group: int) -> torch.Tensor:
        shape = replace(SHAPE, num_experts=ranks * LOCAL, **routing | {"topk_group": topk_group})
        experts = choose_experts(*inputs[:2], 1.0, shape)[0]
        return torch.stack([(experts // LOCAL == r).any(1) for r in range(ranks)], dim=1)

    assert torch.equal(sent[0]["is_token_in_rank"], ranks_of(2))
    assert rank == 0 or not any(torch.equal(ranks_of(2), ranks_of(n)) for n in (3, 4, 6))


def test_deep_ep_sends_a_token_to_the_ranks_of_its_experts(tmp_path):
    world(uneven_rank, 3, tmp_path)


def rank_of_a_subgroup(rank: int, ranks: int) -> None:
    """Two layers run at once, each over two of the ranks and with its own number of tokens."""
    groups = [dist.new_group([first, first + 2]) for first in range(2)]
    mine, group, tokens = rank // 2, groups[rank % 2], 3 + rank % 2
    routing = {"n_group": 4, "topk_group": 2, "top_k": 3}
    everybody = [rank_inputs(member, 2, tokens, seed=1 + rank % 2) for member in range(2)]
    wanted = added_in_order(everybody, **routing)[tokens * mine :][:tokens]
    gather, dist.all_gather_object = dist.all_gather_object, None  # slow, only for what is wrong
    assert torch.equal(expert_parallel_moe(*everybody[mine], **routing, group=group), wanted)
    buffer = deep_ep_buffer(2 * LOCAL, HIDDEN, group)
    options: dict[str, Any] = {**routing, "group": group, "buffer": buffer}
    assert calc_diff(expert_parallel_moe(*everybody[mine], **options), wanted) < 1e-5
    dist.all_gather_object = gather
    if rank == 3:
        options["top_k"] = "3"
    if rank % 2:  # the other layer goes on
        with pytest.raises(ValueError, match="^rank 1: top_k='3': expected an integer"):
            expert_parallel_moe(*everybody[mine], **options)
    else:
        assert calc_diff(expert_parallel_moe(*everybody[mine], **options), wanted) < 1e-5


def test_subgroups_are_layers_of_their_own(tmp_path):
    world(rank_of_a_subgroup, 4, tmp_path)


def twice(dim: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: torch.cat([x, x], dim)


def wider(dims: list[int | None]) -> dict[str, Callable]:
    """Return changes that double one dimension of a tensor, by its name. None: no change."""
    pairs = zip(TENSORS, dims, strict=True)
    return {name: twice(dim) for name, dim in pairs if dim is not None}


SAME = "expected the same on every rank, got"
DTYPE = "expected dtype"
REFUSED: dict[str, tuple[dict[int, dict[str, Callable]], str]] = {
    # name: what changes the arguments of which ranks of three, and what every rank says.
    "e5m2": ({1: {"hidden_states": lambda x: x.float().to(torch.float8_e5m2)}},
             f"rank 1: hidden_states: {DTYPE} torch.float8_e4m3fn or torch.bfloat16, got"),
    "uint8": ({2: {"hidden_states": lambda x: x.view(torch.uint8)}},
              f"rank 2: hidden_states: {DTYPE} torch.float8_e4m3fn or torch.bfloat16, got"),
    "int32 logits": ({0: {"routing_logits": lambda x: x.int()}},
                     f"rank 0: routing_logits: {DTYPE} torch.float32 or torch.bfloat16, got"),
    "int32 scales": ({1: {"hidden_states_scale": lambda x: x.int()}},
                     "rank 1: hidden_states_scale: expected dtype torch.float32"),
    **{f"no {name}": ({1: {name: lambda _: None}}, f"rank 1: {name}: expected a ")
       for name in TENSORS if name != "routing_bias"},
    "scales of one dimension": ({1: {"hidden_states_scale": lambda x: x[0]}},
                                r"rank 1: hidden_states_scale: expected shape \[2, 5\]"),
    "a limit that no float holds": ({1: {"swiglu_limit": lambda _: 10**400}},
                                    r"rank 1: swiglu_limit=10+\.\.\.: expected a finite"),
    "scales of other tokens": ({1: {"hidden_states_scale": twice(1)}},
                               r"rank 1: hidden_states_scale: expected shape \[2, 5\]"),
    "float32 weights": ({2: {"gemm1_weights": lambda x: x.float()}},
                        "rank 2: gemm1_weights: expected dtype torch.float8_e4m3fn"),
    "weights of another width": ({2: {"gemm2_weights": twice(1)}},
                                 r"rank 2: gemm2_weights: expected shape \[4, 256, 128\]"),
    "experts": ({2: {"gemm1_weights": twice(0)}},
                r"rank 2: gemm1_weights_scale: expected shape \[8, 2, 2\]"),
    "experts of others": ({2: {name: twice(0) for name in TENSORS[4:]}},
                          "rank 2: routing_logits: expected 24 experts, 8 of each of 3 ranks, got"),
    "device": ({1: dict.fromkeys(TENSORS, lambda x: x.to("meta"))},
               "rank 1: unsupported device meta"),
    "a derivative": ({1: {"gemm2_weights_scale": lambda x: x.clone().requires_grad_()}},
                     "rank 1: gemm2_weights_scale: expected a tensor without derivative"),
    "accurate": ({1: {"accurate": lambda _: "no"}}, "rank 1: accurate: expected True or False"),
    "top_k": ({1: {"top_k": lambda _: "8"}}, "rank 1: top_k='8': expected an integer"),
    "n_group": ({1: {"n_group": lambda _: [4]}}, r"rank 1: n_group=\[4\]: expected an integer"),
    "scaling": ({1: {"routed_scaling_factor": lambda _: "2"}}, "rank 1: routed_scaling_factor: "),
    "buffer": ({1: {"buffer": lambda _: "yes"}}, "rank 1: buffer: expected DeepEP's of 3 ranks"),
    "two wrong": ({2: {"top_k": lambda _: 0}, 1: {"topk_group": lambda _: 0}},
                  "rank 1: topk_group=0: expected"),
    "all wrong": (dict.fromkeys(range(3), {"top_k": lambda _: 0}), "rank 0: top_k=0: expected"),
    "more tokens": ({1: wider([0, None, 0, 1, *4 * [None]])},
                    rf"hidden_states.shape\[0\]: {SAME} 5, 10, 5 on ranks 0 to 2"),
    "no tokens": ({2: {"routing_logits": lambda x: x[:0], "hidden_states": lambda x: x[:0],
                       "hidden_states_scale": lambda x: x[:, :0]}},
                  rf"hidden_states.shape\[0\]: {SAME} 5, 5, 0 "),
    "more experts": ({1: wider([1, 0, None, None, 0, 0, 0, 0])},
                     rf"routing_logits.shape\[1\]: {SAME} 12, 24, 12 "),
    "wider tokens": ({2: wider([None, None, 1, 0, 2, 2, 1, 1])},
                     rf"hidden_states.shape\[1\]: {SAME} 256, 256, 512 "),
    "wider experts": ({0: wider([*4 * [None], 1, 1, 2, 2])},
                      rf"gemm2_weights.shape\[2\]: {SAME} 256, 128, 128 "),
    "one buffer": ({1: {"buffer": lambda _: deep_ep_buffer(3 * LOCAL, HIDDEN)}},
                   f"buffer is None: {SAME} True, False, True "),
    **{f"another {name}": ({1: {name: lambda _, value=value: value}},
                           f"{name}: {SAME} {usual}, {value}, {usual} ")
       for name, usual, value in [("n_group", 6, 3), ("topk_group", 2, 3), ("top_k", 3, 2),
                                  ("routed_scaling_factor", 1.0, 2.5), ("accurate", False, True),
                                  ("swiglu_limit", None, 2.0), ("swiglu_alpha", 1.0, 1.702),
                                  ("swiglu_beta", 0.0, 1.0), ("ue8m0", False, True)]},
}  # fmt: skip


def refused_rank(rank: int, ranks: int, folder: object) -> None:
    """Write the message that a rank gets in every case; the last call succeeds."""
    usual = dict(zip(TENSORS, rank_inputs(rank, ranks, 5), strict=True))
    options = {"n_group": 6, "topk_group": 2, "top_k": 3}
    messages = {}
    for name, (changes, _) in REFUSED.items():
        arguments: dict[str, Any] = usual | options
        for argument, change in changes.get(rank, {}).items():
            arguments[argument] = change(arguments.get(argument))
        try:
            expert_parallel_moe(**arguments)
        except ValueError as error:
            messages[name] = str(error)
    assert expert_parallel_moe(**usual, **options).shape == (5, HIDDEN)
    Path(f"{folder}/{rank}.json").write_text(json.dumps(messages))


@pytest.fixture(scope="module")
def messages(tmp_path_factory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("refused")
    world(refused_rank, 3, folder, folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(3)]


@pytest.mark.parametrize("name", REFUSED)
def test_every_rank_says_what_is_wrong_on_one(name, messages):
    first, *others = (of_rank.get(name) for of_rank in messages)
    assert re.match(REFUSED[name][1], str(first))
    assert others == [first, first]


def test_more_experts_than_the_ranks_have_are_refused(alone):
    with pytest.raises(ValueError, match="expected 4 experts, 4 of each of 1 ranks, got 16"):
        expert_parallel_moe(*tensors_of(3), **ROUTING)


WITH_DEEP_EP = pytest.mark.skipif(
    importlib.util.find_spec("deep_ep") is None, reason="DeepEP is not installed"
)


@backends("gpu")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], id="fused"),
        pytest.param(["--accurate"], id="hifi"),
        pytest.param(["--deep-ep"], id="deep_ep", marks=WITH_DEEP_EP),
    ],
)
def test_two_ranks_are_one_that_has_all_experts(options):
    program = [sys.executable, "examples/expert_parallel.py", "--check", "--ranks", "2"]
    done = subprocess.run(
        [*program, "--tokens", "1", "128", *options], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" ms (in a graph ") == 2 * ("--deep-ep" not in options)


@backends("gpu")
@pytest.mark.parametrize("exchange", ["nccl", "cpu:gloo,cuda:nccl"])
def test_one_rank_captured_in_a_graph(exchange, make_inputs, tmp_path):
    """Nothing waits for the GPU with a backend for the CPU, and a graph can capture the call."""
    logits, bias, *others = make_inputs(80)[:8]
    arguments = logits[:, :32].contiguous(), bias[:32].contiguous(), *others
    wanted = fused_moe(*arguments)
    store, gpu = dist.FileStore(str(tmp_path / "store"), 1), torch.device("cuda", 0)
    dist.init_process_group(exchange, rank=0, world_size=1, store=store, device_id=gpu)
    try:
        assert torch.equal(expert_parallel_moe(*arguments), wanted)
        none = logits[:0, :32], arguments[1], others[0][:0], others[1][:, :0], *others[2:]
        assert expert_parallel_moe(*none).shape == (0, wanted.shape[1])
        with pytest.raises(ValueError, match="^rank 0: routing_logits: expected dtype"):
            expert_parallel_moe(arguments[0].int(), *arguments[1:])
        if exchange == "nccl":
            return
        torch.cuda.set_sync_debug_mode("error")
        expert_parallel_moe(*arguments)
        torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = expert_parallel_moe(*arguments)
        graph.replay()
        assert torch.equal(output, wanted)
        graph.reset()  # before the communicator that it holds
    finally:
        torch.cuda.set_sync_debug_mode("default")
        dist.destroy_process_group()
