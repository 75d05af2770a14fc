"""The floors: bytes and FLOPs by hand, and records that are none."""

import json
import statistics
import sys
import types
from typing import Any

import pytest
import torch
from fake_cuda import Kernel

from scripts.common import schemas
from scripts.common.command_line import UsageError
from scripts.common.floors import floor_ms, pair_flops, weight_bytes
from scripts.common.project import ROOT
from scripts.measure import floors, gpu
from scripts.measure.gemm_problems import Histogram
from scripts.programs import check

RATES = {"copy_bytes_per_s": 3e12, "read_bytes_per_s": 4e12, "fp8_flops_per_s": 1.5e15}
RECORD = ROOT / "results" / "nvidia-h200" / "2026-11-25"


def test_sizes_are_those_of_the_layer() -> None:
    weights = 4096 * 7168 + 7168 * 2048
    assert weights == 44_040_192 and pair_flops() == 2 * weights == 88_080_384
    assert weight_bytes() == weights + 4 * (32 * 56 + 56 * 16)


def test_floor_is_bytes_over_the_better_bandwidth_or_flops_over_the_rate() -> None:
    few = {"tokens": 2, "hit": 1, "active": 3, "pairs": 3}
    size = 3 * weight_bytes() + (7168 + 224) + 2 * (4 * 256 + 2 * 7168)
    memory, compute = floor_ms(few, RATES)
    assert memory == pytest.approx(1e3 * size / 4e12)
    assert compute == pytest.approx(1e3 * 3 * 88_080_384 / 1.5e15)
    many = {"tokens": 14107, "hit": 8004, "active": 32, "pairs": 16099}
    memory, compute = floor_ms(many, RATES)
    assert compute > memory and compute == pytest.approx(0.9453, abs=1e-3)


def test_a_measured_reading_takes_the_place_of_bytes_over_bandwidth() -> None:
    few = {"tokens": 2, "hit": 1, "active": 3, "pairs": 3, "uuid": "a"}
    without = floor_ms(few, RATES)
    assert floor_ms({**few, "read_ms": 0.5}, RATES) == (0.5, without[1])


def test_the_faster_order_of_reading_counts(monkeypatch) -> None:
    """Either tensor once a replay: the time of one launch counts twice."""
    import torch

    from scripts.measure import gemm_variants

    monkeypatch.setattr(gpu, "gpu_arch", lambda: "sm_90a")
    layer: Any = types.SimpleNamespace(gemms=((256, 128), (128, 256)))
    properties = type("Properties", (), {"multi_processor_count": 4})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for name in ("empty", "randint", "tensor"):
        real = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, real=real, device=None, **k: real(*a, **k))
    asked = []

    def readers(weights, experts, read, arch):
        asked.append((tuple(weights.shape), experts.tolist()))
        return [lambda: None, lambda: None]

    monkeypatch.setattr(gemm_variants, "readers", readers)
    spans = {"a 0": 30.0, "a 1": 20.0, "b 0": 50.0, "b 1": 60.0}

    def clock(calls, repeats):
        assert all(len(launches) == 2 for launches in calls.values())
        return {name: ([1.0, spans[name], 1000.0], "graph") for name in calls}

    monkeypatch.setattr(floors, "time_variants", clock)
    found = [
        Histogram("a", 1, (0, 1, 2)),
        Histogram("b", 2, (1, 0, 0)),
        Histogram("none", 3, (0, 0, 0)),
    ]
    read = floors.measure_reading(found, 3, layer)
    assert read == pytest.approx({"a": 0.040, "b": 0.100, "none": 0.0})
    assert asked == [
        ((3, 256, 128), [1, 2]), ((3, 128, 256), [1, 2]),
        ((3, 256, 128), [0]), ((3, 128, 256), [0]),
    ]  # fmt: skip


def test_workloads_are_counted_from_their_routing(tmp_path, monkeypatch, capsys) -> None:
    """With the rates of a record; the recorded floors are those of the workloads as they are."""
    arguments = ["--rates", str(RECORD / "gemm_layers.json"), "--run", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["check.py", "--only", "floors", *arguments])
    assert check.main() == 0
    made = json.loads((tmp_path / "floors.json").read_text())
    counted = {w["tokens"]: w for w in made["workloads"]}
    assert len(counted) == 19
    assert [counted[1][key] for key in ("hit", "active", "pairs")] == [1, 3, 3]
    assert [counted[7][key] for key in ("hit", "active", "pairs", "max")] == [2, 7, 7, 1]
    assert all(w["max"] <= w["pairs"] and w["hit"] <= w["tokens"] for w in made["workloads"])
    recorded = schemas.read(RECORD / "floors.json", schemas.Floors)
    counts = ("uuid", "tokens", "hit", "active", "pairs", "max")
    assert made["workloads"] == [{key: w[key] for key in counts} for w in recorded["workloads"]]
    assert "NVIDIA H200" in capsys.readouterr().out


def test_rates_come_from_a_record_or_from_a_gpu(tmp_path, monkeypatch) -> None:
    (tmp_path / "x.json").write_text("{}")
    arguments = ["--only", "floors", "--rates", str(tmp_path / "x.json")]
    monkeypatch.setattr(sys, "argv", ["check.py", *arguments])
    with pytest.raises(UsageError, match="no measured rates"):
        check.main()


def test_rates_are_of_all_that_is_moved_and_multiplied(cuda, monkeypatch) -> None:
    """Medians of ten, after three that do not count."""
    names = ("copy", "read", "multiply")
    kernels = {name: Kernel(cuda, name) for name in names}
    tensor = types.SimpleNamespace(copy_=kernels["copy"])
    tensor.view = tensor.to = tensor.t = lambda *dtype: tensor
    for name in ("randint", "empty_like", "randn", "ones"):
        monkeypatch.setattr(torch, name, lambda *size, **kind: tensor)
    monkeypatch.setattr(torch, "sum", kernels["read"])
    monkeypatch.setattr(torch, "_scaled_mm", lambda a, b, **kind: kernels["multiply"]())
    seconds = {}
    found = gpu.measure_rates.__wrapped__()
    for name, kernel in kernels.items():
        assert len(kernel.took) == 13
        seconds[name] = 1e-3 * statistics.median(kernel.took[-10:])
    size = 4 * 2**30
    assert found == pytest.approx(
        {
            "copy_bytes_per_s": 2 * size / seconds["copy"],
            "read_bytes_per_s": size / seconds["read"],
            "fp8_flops_per_s": 2 * 8192**3 / seconds["multiply"],
        }
    )
