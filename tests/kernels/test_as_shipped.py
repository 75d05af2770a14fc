"""The shipped configs: DeepSeek-V3's geometry and the CTAs of a whole GPU in the emulator; every
config on a GPU, a few of them in the emulator."""

import itertools
import os
import subprocess
import sys
from concurrent.futures import as_completed

import every_config
import pytest
import torch
from every_config import Job, Sizes, shipped, wrong
from gemm_configs import SHIPPED
from markers import backends, more
from moe_fp8.call import MoeInputs
from moe_fp8.kernels import architectures
from moe_fp8.kernels.architectures import ARCHITECTURES, of_target
from moe_fp8.layer import make_call
from moe_fp8.reference import calc_diff
from moe_fp8.shape import DEEPSEEK_V3, MoeShape
from problems import by_model, fp8, use_target

from scripts.measuring.processes import process_pool

MULTIPROCESSORS = {"sm_90a": 132, "sm_100a": 148}
OFFSET, CHOSEN = 32, (3, 17, 18)
"""First local expert; the local ones that every token chooses. The other weights stay zeros, which
nobody touches: pages that take no memory."""


def inputs_of(tokens: int) -> MoeInputs:
    torch.manual_seed(tokens)
    e, h, i = DEEPSEEK_V3.num_local_experts, DEEPSEEK_V3.hidden_size, DEEPSEEK_V3.intermediate_size
    bias = torch.zeros(DEEPSEEK_V3.num_experts)
    bias[[OFFSET + expert for expert in CHOSEN]] = 2.0
    w13, w2 = (torch.zeros(e, *size, dtype=torch.float8_e4m3fn) for size in ((2 * i, h), (h, i)))
    for expert in CHOSEN:
        w13[expert], w2[expert] = fp8(2 * i, h), fp8(h, i)
    return MoeInputs(
        torch.randn(tokens, DEEPSEEK_V3.num_experts), bias.bfloat16(),
        fp8(tokens, h), torch.randn(h // 128, tokens),
        w13, torch.randn(e, 2 * i // 128, h // 128),
        w2, torch.randn(e, h // 128, i // 128), OFFSET, 2.5,
    )  # fmt: skip


@backends("emulator")
@pytest.mark.parametrize(
    ("target", "tokens", "terms", "schedule"),
    [
        ("sm_90a", 3, 1, "eager"),
        ("sm_90a", 5, 1, "lazy"),
        *more(
            ("sm_90a", 3, 2, "eager"),
            ("sm_90a", 12, 1, "eager"),
            ("sm_90a", 12, 1, "lazy"),
            ("sm_100a", 3, 1, "eager"),
            ("sm_100a", 12, 1, "lazy"),
        ),
    ],
)
def test_as_the_model(target, tokens, terms, schedule, emulator, monkeypatch):
    """GEMM2 takes tiles on demand while GEMM1 still runs, with 5 tokens and more."""
    use_target(monkeypatch, target)
    monkeypatch.setattr(architectures, "num_sms", lambda device: MULTIPROCESSORS[target])
    emulator.options.poison_races = True  # boxes with rows of the next expert, still written
    emulator.options.mode, emulator.options.dependents = schedule, "early"
    emulator.options.max_instructions = 40_000_000  # who asks for rows seldom does so in vain
    inputs = inputs_of(tokens)
    wanted = by_model(inputs, DEEPSEEK_V3, terms)
    out = torch.full_like(wanted, torch.nan)
    make_call(tokens, out.device, DEEPSEEK_V3, terms)(inputs, out)
    assert calc_diff(out, wanted) < 1e-7
    assert out.isfinite().all() and (wanted.abs().sum(dim=1) > 0).all()
    assert [report.hazards for report in emulator.reports] == 4 * [[]]


SMALL = Sizes(
    n=512,
    k=512,
    rows=(0, 1, 17, 65, 128, 200),
    shape=MoeShape(num_experts=16, num_local_experts=5, hidden_size=384, intermediate_size=256,
                   n_group=4, topk_group=2, top_k=3),
    tokens=140,
)  # fmt: skip


@pytest.mark.parametrize("target", sorted({a.target for a in ARCHITECTURES.values()}))
def test_the_jobs_have_every_config_that_ships(target: str) -> None:
    """Each job is named once. They include each config of the heuristics' tables."""
    ships = shipped(target)
    assert len(set(map(str, ships))) == len(ships)
    for tokens, terms in itertools.product((1, 7, 80, 901, 14107), (1, 2)):
        assert Job(of_target(target).choose_layer(tokens, DEEPSEEK_V3, terms), terms) in ships
    own = SHIPPED["sm_90a" if target == "sm_90a" else "sm_100a"]
    assert {Job((config,)) for config in own} <= set(ships)


@backends("emulator")
@pytest.mark.parametrize("target", ["sm_90a", *more("sm_100a")])
def test_a_few_configs(target, emulator, monkeypatch):
    use_target(monkeypatch, target)
    # The second GEMM's boxes reach into rows of the next expert, which may be written meanwhile.
    emulator.options.poison_races = True
    emulator.options.dependents = "early"
    layer, gemm = (
        next(job for job in shipped(target) if job.kind == kind)
        for kind in ("layer, terms=1", "GEMM")
    )
    assert list(wrong([gemm, layer, layer], SMALL, torch.device("cpu"))) == []
    assert all(report.hazards == [] for report in emulator.reports)


LIMIT_S = 600
"""Limit for all compilations, and for all runs."""
MOST_PROCESSES = 12


@backends("gpu")
def test_every_config():
    """Configs compile in parallel and run in one process, which names each before it begins. If the
    process ends, the last one named has hung or crashed the GPU."""
    target = architectures.of_device(torch.device("cuda")).target
    todo = shipped(target)
    workers = min(os.cpu_count() or 1, MOST_PROCESSES)
    with process_pool(workers, "spawn") as pool:
        for done in as_completed([pool.submit(every_config.compile_job, j) for j in todo], LIMIT_S):
            done.result()
    code = f"import sys; sys.path[:0] = {sys.path!r}; import every_config; every_config.main()"
    command = [sys.executable, "-c", code]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired as late:
        # The output is bytes here, although text was asked for.
        pytest.fail(f"hangs: {(late.stdout or b'').decode().splitlines()[-1:]}")
    named = ran.stdout.splitlines()
    assert ran.returncode == 0, f"the last one: {named[-1:]}\n{ran.stderr[-2000:]}"
    assert named == list(map(str, todo))
