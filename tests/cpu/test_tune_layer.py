"""The sweep of the fused layer's configs, off the GPU: which pairs, how they are made and told."""

import json
import sys

import pytest
import torch
from moe_fp8.kernels.architectures import HOPPER
from moe_fp8.layer.fused import fused_configs
from moe_fp8.layer.problem import DEEPSEEK_V3, MoeInputs

from scripts.common.command_line import UsageError
from scripts.measure import gpu, tune_layer
from scripts.measure.shipped_configs import ladder


@pytest.fixture(autouse=True)
def hopper(monkeypatch) -> None:
    monkeypatch.setattr(gpu, "architecture", lambda: HOPPER)


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("tokens", [1, 80, 640, 901, 14107])
def test_the_shipped_pair_is_made_as_it_ships(tokens, terms) -> None:
    pair = tune_layer.picked(tokens, DEEPSEEK_V3, terms)
    made = tune_layer.with_pair(pair)(tokens, DEEPSEEK_V3, None, terms)
    assert made == fused_configs(tokens, DEEPSEEK_V3, HOPPER.choose, terms)
    found = tune_layer.pairs(pair, (ladder("gemm1"), ladder("gemm2", terms=terms)), 1)
    assert found[0] == pair and len(set(found)) == len(found)


@pytest.mark.parametrize("terms", [1, 2])
def test_every_pair_is_one_that_the_kernels_take(terms) -> None:
    """The classes check a config; with its epilogue, its way to load and its terms."""
    from moe_fp8.kernels.fused import FusedMoe

    ladders = ladder("gemm1"), ladder("gemm2", terms=terms)
    assert [len(set(rungs)) for rungs in ladders] == [len(rungs) for rungs in ladders]
    for pair in tune_layer.pairs((ladders[0][0], ladders[1][0]), ladders, 100):
        for tokens in (80, 2048):
            first, second = tune_layer.with_pair(pair)(tokens, DEEPSEEK_V3, None, terms)
            classes = HOPPER.gemm(), HOPPER.swiglu(terms), HOPPER.gather(first)
            FusedMoe(DEEPSEEK_V3, first, second, 132, *classes)


def test_pairs_are_those_beside() -> None:
    ladders = ["a", "b", "c", "d"], ["x", "y"]
    assert tune_layer.pairs(("b", "y"), ladders, 1) == [
        ("b", "y"), ("a", "x"), ("a", "y"), ("b", "x"), ("c", "x"), ("c", "y"),
    ]  # fmt: skip
    assert tune_layer.pairs(("a", "x"), ladders, 1)[0] == ("a", "x")
    assert len(tune_layer.pairs(("a", "x"), ladders, 3)) == 8


def timed(ms: float) -> dict:
    return {"method": "graph", "ms": ms, "p10": ms, "p90": ms, "calls": 1}


def test_what_is_told() -> None:
    names = [{"first": f"f{i}", "second": f"s{i}"} for i in range(3)]
    measured = {
        "tokens": 7,
        "pairs": [names[0] | timed(0.103), names[1] | timed(0.1), names[2] | {"error": "no"}],
    }
    assert tune_layer.loss(measured) == pytest.approx(3.0)
    header, rows = tune_layer.table([measured])
    assert [row[:4] for row in rows] == [
        ["7", "f1", "s1", "100.0"], ["7 *", "f0", "s0", "103.0"], ["7", "f2", "s2", "no"],
    ]  # fmt: skip
    assert all(len(row) == len(header) for row in rows) and rows[0][-1] == "0.971"
    measured["pairs"][0] = names[0] | {"error": "no"}
    assert tune_layer.loss(measured) is None


class Problems:
    def __init__(self, *arguments) -> None: ...

    def of(self, tokens: int):
        nothing = torch.zeros(tokens, 8)
        return MoeInputs(*8 * (nothing,), 0, 1.0), "drawn"


@pytest.mark.parametrize(("gain", "status"), [(1.01, 0), (1.05, 1)])
@pytest.mark.parametrize("wrong", [False, True])
def test_the_program(gain, status, wrong, monkeypatch, tmp_path, capsys) -> None:
    """The second of the pairs is the faster one; the third may write something else."""

    def device_times(calls, repeats):
        for i, call in enumerate(calls.values()):
            call.output.fill_(float(wrong and i == 2))
        faster = (0.1 / gain if i == 1 else 0.1 for i in range(len(calls)))
        return dict(zip(calls, map(timed, faster), strict=True))

    monkeypatch.setattr(gpu, "require_gpu", lambda: "a GPU")
    monkeypatch.setattr(tune_layer, "Problems", Problems)
    monkeypatch.setattr(tune_layer, "device_times", device_times)
    record = tmp_path / "record.json"
    argv = ["tune_layer.py", "--tokens", "3", "901", "--json", str(record)]
    monkeypatch.setattr(sys, "argv", argv)
    assert tune_layer.main() == (1 if wrong else status)
    told = capsys.readouterr()
    assert "a GPU: the fused layer" in told.out and "901 *" in told.out
    assert ("T=901: another pair is 5.0 % faster" in told.err) == (status == 1)
    results = json.loads(record.read_text())["results"]
    assert [one["tokens"] for one in results] == [3, 901]
    errors = [pair.get("error") for pair in results[0]["pairs"]]
    assert errors.count("not the output of the shipped pair") == wrong


def test_it_needs_a_gpu(monkeypatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    monkeypatch.setattr(sys, "argv", ["tune_layer.py"])
    with pytest.raises(UsageError, match="no GPU is visible"):
        tune_layer.main()
