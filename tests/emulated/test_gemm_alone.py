"""The solutions of the grouped GEMMs alone, as compiled for sm_90a: any number of rows."""

from types import SimpleNamespace

import pytest
import torch
from moe_fp8.gemms import batched, flat
from moe_fp8.kernels import operations
from moe_fp8.kernels.sm90.config import GemmConfig
from problems import UNTOUCHED, gemm

CONFIGS = [
    GemmConfig(tile_m=8, swap_ab=True),
    GemmConfig(tile_m=64, cluster_n=2, overlap=True, stages=3),
    GemmConfig(tile_m=192, cluster_n=2, stages=2, dynamic=True, unroll=True),
]


@pytest.fixture(autouse=True)
def on_the_emulator(monkeypatch):
    monkeypatch.setattr(operations, "_target", lambda device: "sm_90a")
    monkeypatch.setattr(operations, "_multiprocessors", lambda device: 4)


def choose(monkeypatch, module, config: GemmConfig) -> None:
    architecture = SimpleNamespace(choose=lambda rows, n, k: config)
    fake = SimpleNamespace(of_device=lambda device: architecture)
    monkeypatch.setattr(module, "architectures", fake)


@pytest.mark.parametrize("rows", [(3, 129, 0, 1, 66, 6), (0, 1), (17, 0, 129)], ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_flat(config, rows, mode, emulator, monkeypatch):
    """What belongs to no expert any more is cut off: nothing lies behind the last row."""
    total = sum(rows)
    problem = gemm(rows, 256, 512, 256, exact=True, layout="flat")
    m_indptr = torch.tensor([0, *rows], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    monkeypatch.setattr(flat, "select", lambda device: operations)
    choose(monkeypatch, flat, config)
    a, a_scale = problem.a[:total].clone(), problem.a_scale[:, :total].clone()
    out = torch.full((total, 256), UNTOUCHED, dtype=torch.bfloat16)
    flat.run(a, a_scale, problem.b, problem.b_scale, m_indptr, out)
    assert torch.equal(out, problem.expected[:total])
    assert emulator.reports[-1].hazards == []


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_batched(config, mode, emulator, monkeypatch):
    """Rows from a count on hold NaN, and are zero in the output."""
    rows, max_rows = (0, 1, 17, 128, 129, 64), 256
    problem = gemm(rows, 256, 512, max_rows, exact=True)
    experts, counts = len(rows), torch.tensor(rows, dtype=torch.int32)
    monkeypatch.setattr(batched, "select", lambda device: operations)
    choose(monkeypatch, batched, config)
    a_scale = problem.a_scale.view(-1, experts, max_rows).transpose(0, 1).contiguous()
    out = torch.full((experts, max_rows, 256), UNTOUCHED, dtype=torch.bfloat16)
    a = problem.a.view(experts, max_rows, 512)
    batched.run(a, a_scale, problem.b, problem.b_scale, counts, 30, out)
    wanted = problem.expected.view(out.shape).clone()
    wanted[torch.arange(max_rows) >= counts.unsqueeze(1)] = 0
    assert torch.equal(out, wanted)
    assert emulator.reports[-1].hazards == []
