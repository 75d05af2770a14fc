"""The roofline: bytes and FLOPs by hand, and what is measured of it."""

import math
import statistics
import sys
import types
from typing import Any

import pytest
import torch
from fake_cuda import Kernel

from scripts import measure
from scripts.common.command_line import UsageError
from scripts.common.project import ROOT
from scripts.common.roofline import pair_flops, roofline_ms, stepwise_ms, weight_bytes
from scripts.data import rows
from scripts.measuring import clock, layers
from scripts.measuring.cases import Histogram

RATES = {"copy_bytes_per_s": 3e12, "read_bytes_per_s": 4e12, "fp8_flops_per_s": 1.5e15}
RECORD = ROOT / "results" / "nvidia-h200" / "2026-11-25"


def test_sizes_are_those_of_the_layer() -> None:
    weights = 4096 * 7168 + 7168 * 2048
    assert weights == 44_040_192 and pair_flops() == 2 * weights == 88_080_384
    assert weight_bytes() == weights + 4 * (32 * 56 + 56 * 16)


def test_it_is_bytes_over_the_better_bandwidth_or_flops_over_the_rate() -> None:
    few = {"tokens": 2, "hit": 1, "active": 3, "pairs": 3}
    size = 3 * weight_bytes() + (7168 + 224) + 2 * (4 * 256 + 2 * 7168)
    memory, compute = roofline_ms(few, RATES, None)
    assert memory == pytest.approx(1e3 * size / 4e12)
    assert compute == pytest.approx(1e3 * 3 * 88_080_384 / 1.5e15)
    many = {"tokens": 14107, "hit": 8004, "active": 32, "pairs": 16099}
    memory, compute = roofline_ms(many, RATES, None)
    assert compute > memory and compute == pytest.approx(0.9453, abs=1e-3)


def test_step_by_step_each_waits_for_memory_or_for_the_tensor_cores() -> None:
    """3 pairs read weights, 10000 multiply; rows are written and read again."""
    for pairs, active in ((3, 3), (10_000, 32)):
        case = {"tokens": 9000, "hit": 5000, "active": active, "pairs": pairs}
        inner, rows = pairs * (2048 + 64), pairs * 2 * 7168
        moved = 5000 * (7168 + 224) + inner, inner + rows
        weights = 4 * 32 * 56 + 4096 * 7168, 4 * 56 * 16 + 7168 * 2048
        by_bytes = [(active * w + m) / 4e12 for w, m in zip(weights, moved, strict=True)]
        by_flops = [2 * pairs * n / 1.5e15 for n in (4096 * 7168, 7168 * 2048)]
        combine = (9000 * (4 * 256 + 2 * 7168) + rows) / 4e12
        wanted = sum(map(max, zip(by_bytes, by_flops, strict=True))) + combine
        assert stepwise_ms(case, RATES) == pytest.approx(1e3 * wanted)


def test_a_measured_reading_takes_the_place_of_bytes_over_bandwidth() -> None:
    few = {"tokens": 2, "hit": 1, "active": 3, "pairs": 3, "uuid": "a"}
    without = roofline_ms(few, RATES, None)
    assert roofline_ms(few, RATES, 0.5) == (0.5, without[1])


def test_the_faster_order_of_reading_counts(monkeypatch) -> None:
    """Either tensor once a replay."""
    import torch

    from scripts.measuring import gemm

    monkeypatch.setattr(clock, "gpu_arch", lambda: "sm_90a")
    layer: Any = types.SimpleNamespace(gemms=((256, 128), (128, 256)))
    properties = type("Properties", (), {"multi_processor_count": 4})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for name in ("empty", "randint", "tensor"):
        real = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, real=real, device=None, **k: real(*a, **k))
    asked, launched = [], []

    def readers(weights, experts, read, arch):
        asked.append((tuple(weights.shape), experts.tolist()))
        return [lambda: launched.append("read")] * 2

    monkeypatch.setattr(gemm, "readers", readers)
    spans = {"a 0": 0.06, "a 1": 0.04, "b 0": 0.1, "b 1": 0.12}

    def timed(calls, repeats):
        launched.clear()
        next(iter(calls.values()))()
        assert launched == ["read"] * 2, "both tensors"
        return {name: {"ms": spans[name]} for name in calls}

    monkeypatch.setattr(layers, "device_times", timed)
    found = [
        Histogram("a", 1, (0, 1, 2)),
        Histogram("b", 2, (1, 0, 0)),
        Histogram("none", 3, (0, 0, 0)),
    ]
    read = layers.measure_reading(found, 3, layer)
    assert read == pytest.approx({"a": 0.040, "b": 0.100, "none": 0.0})
    assert asked == [
        ((3, 256, 128), [1, 2]), ((3, 128, 256), [1, 2]),
        ((3, 256, 128), [0]), ((3, 128, 256), [0]),
    ]  # fmt: skip


def test_workloads_are_counted_from_their_routing(tmp_path, monkeypatch, capsys) -> None:
    """The recorded rooflines are those of the workloads as they are."""

    def reading(found, repeats, layer):
        return {h.uuid: 1e-4 * h.tokens for h in found}

    monkeypatch.setattr(layers, "measure_reading", reading)
    monkeypatch.setattr(clock, "measure_rates", lambda: RATES)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("flashinfer_bench.utils.hardware_from_device", lambda device: "a GPU")
    monkeypatch.setattr(sys, "argv", ["measure.py", "roofline", "--run", str(tmp_path)])
    assert measure.main() == 0
    made = rows.read(tmp_path)
    counted = {row["tokens"]: row for row in made.rows}
    assert len(counted) == 19 and counted[7]["value"] == pytest.approx(7e-4)
    assert [counted[1][key] for key in ("hit", "active", "pairs")] == [1, 3, 3]
    assert [counted[7][key] for key in ("hit", "active", "pairs", "max")] == [2, 7, 7, 1]
    assert all(row["max"] <= row["pairs"] and row["hit"] <= row["tokens"] for row in made.rows)
    recorded = rows.read(RECORD)
    told = ("uuid", "tokens", "hit", "active", "pairs", "max", "definition")
    assert [[row[key] for key in told] for row in made.rows] == [
        [row[key] for key in told] for row in recorded.rows_of("roofline")
    ]
    printed = capsys.readouterr().out
    bound = {line.split()[0]: line.split()[-1] for line in filter(str.strip, printed.splitlines())}
    assert "FP8 matmul 1500 TFLOP/s" in printed and bound["1"] == "compute"
    assert bound["7"] == "memory"
    absent = tmp_path / "absent"
    monkeypatch.setattr(sys, "argv", ["measure.py", "roofline", "--run", str(absent)])
    with pytest.raises(UsageError, match="absent has no traces.jsonl"):
        measure.main()
    assert not absent.exists()


def test_rates_are_of_all_that_is_moved_and_multiplied(cuda, monkeypatch) -> None:
    """Medians of ten, after two that do not count."""
    names = ("copy", "read", "multiply")
    kernels = {name: Kernel(cuda, name) for name in names}
    tensor = types.SimpleNamespace(copy_=kernels["copy"])
    tensor.view = tensor.to = tensor.t = lambda *dtype: tensor
    for name in ("randint", "empty_like", "randn", "ones"):
        monkeypatch.setattr(torch, name, lambda *size, **kind: tensor)
    monkeypatch.setattr(torch, "sum", kernels["read"])
    monkeypatch.setattr(torch, "_scaled_mm", lambda a, b, **kind: kernels["multiply"]())
    seconds = {}
    found = clock.measure_rates.__wrapped__()
    for name, kernel in kernels.items():
        assert len(kernel.took) == 12
        seconds[name] = 1e-3 * statistics.median(kernel.took[-10:])
    size = 4 * 2**30
    assert found == pytest.approx(
        {
            "copy_bytes_per_s": 2 * size / seconds["copy"],
            "read_bytes_per_s": size / seconds["read"],
            "fp8_flops_per_s": 2 * math.prod(clock.PRODUCT) / seconds["multiply"],
        }
    )
