"""What the GPU tests do with every config, with a few of them."""

import itertools

import pytest
import torch
from gpu.every_config import Job, Sizes, shipped, wrong
from markers import more
from moe_fp8.kernels import operations
from moe_fp8.kernels.architectures import ARCHITECTURES, of_target
from moe_fp8.kernels.sm90 import heuristic as sm90
from moe_fp8.kernels.sm100 import heuristic as sm100
from moe_fp8.layer import model
from moe_fp8.problem import DEEPSEEK_V3, MoeShape
from test_mutations import replace

SMALL = Sizes(
    n=512,
    k=512,
    rows=(0, 1, 17, 65, 128, 200),
    shape=MoeShape(num_experts=16, num_local_experts=5, hidden_size=384, intermediate_size=256,
                   n_group=4, topk_group=2, top_k=3),
    tokens=140,
)  # fmt: skip


def found(jobs: list[Job], target: str, monkeypatch) -> list[str]:
    monkeypatch.setattr(operations, "target_of", lambda device: target)
    monkeypatch.setattr(operations, "multiprocessors_of", lambda device: 4)
    return list(wrong(jobs, SMALL, torch.device("cpu")))


@pytest.mark.parametrize("target", sorted({a.target for a in ARCHITECTURES.values()}))
def test_every_config_that_ships_is_run(target: str) -> None:
    """Each once by what it says of itself."""
    ships = shipped(target)
    assert len(set(map(str, ships))) == len(ships)
    for tokens, terms in itertools.product((1, 7, 80, 901, 14107), (1, 2)):
        assert Job(of_target(target).choose_layer(tokens, DEEPSEEK_V3, terms), terms) in ships
    picked = [sm90.LARGEST] if target == "sm_90a" else sm100.PICKED
    assert {Job((config,)) for config in picked} <= set(ships)


def gemms(target: str) -> list[Job]:
    return [job for job in shipped(target) if job.kind == "GEMM"]


@pytest.mark.parametrize("target", ["sm_90a", *more("sm_100a")])
def test_right_ones(target, emulator, monkeypatch):
    # The second GEMM's boxes reach into rows of the next expert, which may be written meanwhile.
    emulator.options.poison_races = True
    emulator.options.dependents = "early"
    layer = shipped(target)[0]
    assert layer.kind == "layer, terms=1"
    assert found([gemms(target)[0], layer, layer], target, monkeypatch) == []
    assert all(report.hazards == [] for report in emulator.reports)


@pytest.mark.parametrize(
    ("kind", "said"), [("GEMM", "not as the model in "), *more(("layer, terms=1", "calc_diff "))]
)
def test_a_wrong_one_is_named(kind, said, emulator, monkeypatch):
    """Its products are not added up."""
    emulator.host.ptx_transform = replace(r"(fma\.rn\.f32\s[^;]*), %\w+;", r"\1, 0f00000000;")
    job = next(job for job in shipped("sm_90a") if job.kind == kind)
    assert found([job], "sm_90a", monkeypatch)[0].startswith(f"{job}: {said}")


def test_other_bits_are_named(monkeypatch):
    """Of layers alone: what the GEMM must give is exact."""
    spoilt = iter([0, 0, 1])

    def fused_call(tokens, device, shape, terms, configs):
        def call(inputs, out) -> None:
            model.fused(inputs, out, shape, terms)
            out.view(torch.int16)[3, 5] += next(spoilt)

        return call

    monkeypatch.setattr(operations, "fused_call", fused_call)
    layers = [job for job in shipped("sm_90a") if job.kind == "layer, terms=1"][:3]
    said = list(wrong(layers, SMALL, torch.device("cpu")))
    assert said == [f"{layers[2]}: other bits than the first config of its kind"]
