"""The floors: bytes and FLOPs by hand, and records that are none."""

import json
import sys
from pathlib import Path

import floors
import pytest
from common import ROOT, UsageError

RATES = {"copy_bytes_per_s": 3e12, "read_bytes_per_s": 4e12, "fp8_flops_per_s": 1.5e15}
RECORD = ROOT / "results" / "nvidia-h200" / "2026-11-21"


def test_sizes_are_those_of_the_layer() -> None:
    weights = 4096 * 7168 + 7168 * 2048
    assert weights == 44_040_192 and floors.PAIR_FLOPS == 2 * weights == 88_080_384
    assert floors.WEIGHT_BYTES == weights + 4 * (32 * 56 + 56 * 16)
    assert floors.TOKEN_BYTES == 7168 + 4 * 56


def test_floor_is_bytes_over_the_better_bandwidth_or_flops_over_the_rate() -> None:
    few = {"tokens": 2, "hit": 1, "active": 3, "pairs": 3}
    size = 3 * floors.WEIGHT_BYTES + (7168 + 224) + 2 * (4 * 256 + 2 * 7168)
    memory, compute = floors.floor_ms(few, RATES)
    assert memory == pytest.approx(1e3 * size / 4e12)
    assert compute == pytest.approx(1e3 * 3 * 88_080_384 / 1.5e15)
    many = {"tokens": 14107, "hit": 8004, "active": 32, "pairs": 16099}
    memory, compute = floors.floor_ms(many, RATES)
    assert compute > memory and compute == pytest.approx(0.9453, abs=1e-3)
    content = {"floors": RATES, "workloads": [few | {"uuid": "a"}, many | {"uuid": "b"}]}
    assert floors.by_workload(content) == {
        "a": max(floors.floor_ms(few, RATES)),
        "b": max(floors.floor_ms(many, RATES)),
    }
    assert floors.by_workload(None) == {}


def test_a_file_that_is_no_record_is_named(tmp_path: Path) -> None:
    assert floors.read_floors(tmp_path) is None
    (tmp_path / "floors.json").write_text('{"workloads": [{"tokens": 1}], "floors": {}}')
    with pytest.raises(UsageError, match=r"floors\.json"):
        floors.read_floors(tmp_path)


def test_workloads_are_counted_from_their_routing(tmp_path, monkeypatch, capsys) -> None:
    """With the rates of a record; the recorded floors are those of the workloads as they are."""
    out = tmp_path / "floors.json"
    arguments = ["--rates", str(RECORD / "gemm_layers.json"), "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["floors.py", *arguments])
    assert floors.main() == 0
    made = json.loads(out.read_text())
    counted = {w["tokens"]: w for w in made["workloads"]}
    assert len(counted) == 19
    assert [counted[1][key] for key in ("hit", "active", "pairs")] == [1, 3, 3]
    assert [counted[7][key] for key in ("hit", "active", "pairs", "max")] == [2, 7, 7, 1]
    assert all(w["max"] <= w["pairs"] and w["hit"] <= w["tokens"] for w in made["workloads"])
    assert made["workloads"] == floors.read_floors(RECORD)["workloads"]
    assert "NVIDIA H200" in capsys.readouterr().out


def test_rates_come_from_a_record_or_from_a_gpu(tmp_path, monkeypatch) -> None:
    (tmp_path / "x.json").write_text("{}")
    monkeypatch.setattr(sys, "argv", ["floors.py", "--rates", str(tmp_path / "x.json")])
    with pytest.raises(UsageError, match="no measured rates"):
        floors.main()
