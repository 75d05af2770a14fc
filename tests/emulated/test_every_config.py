"""The GPU tests' check of every config, on a few configs."""

import itertools

import pytest
import torch
from every_config import Job, Sizes, shipped, wrong
from markers import more
from moe_fp8.call import DEEPSEEK_V3, MoeShape
from moe_fp8.kernels import heuristic_sm90 as sm90
from moe_fp8.kernels import heuristic_sm100 as sm100
from moe_fp8.kernels.architectures import ARCHITECTURES, of_target
from problems import use_target

SMALL = Sizes(
    n=512,
    k=512,
    rows=(0, 1, 17, 65, 128, 200),
    shape=MoeShape(num_experts=16, num_local_experts=5, hidden_size=384, intermediate_size=256,
                   n_group=4, topk_group=2, top_k=3),
    tokens=140,
)  # fmt: skip


@pytest.mark.parametrize("target", sorted({a.target for a in ARCHITECTURES.values()}))
def test_every_config_that_ships_is_run(target: str) -> None:
    """Every config ships once, by its text."""
    ships = shipped(target)
    assert len(set(map(str, ships))) == len(ships)
    for tokens, terms in itertools.product((1, 7, 80, 901, 14107), (1, 2)):
        assert Job(of_target(target).choose_layer(tokens, DEEPSEEK_V3, terms), terms) in ships
    picked = [sm90.LARGEST] if target == "sm_90a" else sm100.PICKED
    assert {Job((config,)) for config in picked} <= set(ships)


@pytest.mark.parametrize("target", ["sm_90a", *more("sm_100a")])
def test_right_ones(target, emulator, monkeypatch):
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
