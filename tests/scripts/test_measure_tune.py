"""tune_layer off the GPU: what it tries, how it judges, and what it says."""

import itertools
import re

import pytest
import torch
from every_config import TOKENS
from moe_fp8.call import MoeInputs
from moe_fp8.kernels.architectures import BLACKWELL, HOPPER
from moe_fp8.shape import DEEPSEEK_V3

from scripts.common.program import EXIT_FAILED
from scripts.measure import TUNED_TOKENS
from scripts.measuring import cases, clock, tune
from scripts.measuring.gemm import ladder
from scripts.publishing import rows
from scripts.publishing.tables import tuned_table


def test_a_shipped_config_that_is_slower_or_did_not_run_has_an_error() -> None:
    into = rows.Writer("tune_layer", "a GPU", "m")
    for t, us in enumerate(({"a": 10.4, "b": 10.0}, {"b": 10.0}, {}, {"a": 9.0, "b": 9.5})):
        tune.add_verdict(into, {"tokens": t}, us, "a")
    errors = ["loses 4.0 %; best: b", "did not run; best: b", "did not run; best: none ran", None]
    assert [row.get("error") for row in into.rows] == errors
    assert [row["subject"] for row in into.rows] == ["a"] * 4
    assert tuned_table(into.result).frame.values.tolist() == [
        ["0", "b", "10.0", "a", "4.0 %"],
        ["1", "b", "10.0", "a", "not run"],
        ["2", "none ran", "-", "a", "not run"],
        ["3", "a", "9.0", "the best", "0.0 %"],
    ]


@pytest.mark.parametrize("architecture", [HOPPER, BLACKWELL], ids=["hopper", "blackwell"])
def test_by_default_every_pair_that_is_picked_is_tried(architecture, monkeypatch) -> None:
    monkeypatch.setattr(clock, "architecture", lambda: architecture)
    chosen = [{tune.picked(t, DEEPSEEK_V3, 1) for t in counts} for counts in (TUNED_TOKENS, TOKENS)]
    assert chosen[0] == chosen[1]
    # So is every config of the two ladders, in a pair beside one of these.
    ladders = ladder(), ladder()
    tried = {pair for shipped in chosen[0] for pair in tune.pairs(shipped, ladders)}
    assert [set(configs) for configs in zip(*tried, strict=True)] == list(map(set, ladders))


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("tokens", [1, 80, 640, 901, 14107])
def test_the_shipped_pair_is_made_as_it_ships(tokens, terms) -> None:
    pair = tune.picked(tokens, DEEPSEEK_V3, terms)
    config = tune.with_pair(pair)(tokens, DEEPSEEK_V3, terms)
    assert config == HOPPER.choose_layer(tokens, DEEPSEEK_V3, terms)
    pairs = tune.pairs(pair, (ladder(), ladder(terms)))
    assert pairs[0] == pair and len(set(pairs)) == len(pairs)


@pytest.mark.parametrize("terms", [1, 2])
def test_every_pair_is_one_that_the_kernels_take(terms) -> None:
    """The classes check a config; with its epilogue, its way to load and its terms."""
    from moe_fp8.kernels.fused import FusedMoe

    ladders = ladder(), ladder(terms)
    assert [len(set(rungs)) for rungs in ladders] == [len(rungs) for rungs in ladders]
    for pair in itertools.product(*ladders):
        for tokens in (80, 2048):
            first, second = tune.with_pair(pair)(tokens, DEEPSEEK_V3, terms)
            FusedMoe(DEEPSEEK_V3, first, second, 132, False)


def test_pairs_are_those_beside() -> None:
    ladders = ["a", "b", "c", "d"], ["x", "y"]
    assert tune.pairs(("b", "y"), ladders) == [
        ("b", "y"), ("a", "x"), ("a", "y"), ("b", "x"), ("c", "x"), ("c", "y"),
    ]  # fmt: skip
    assert tune.pairs(("a", "x"), ladders)[0] == ("a", "x")


@pytest.mark.parametrize("terms", [1, 2])
def test_with_few_rows_other_depths_are_tried(terms) -> None:
    ladders = ladder(), ladder(terms)
    trials = tune.candidates(tune.picked(4, DEEPSEEK_V3, terms), ladders)
    assert next(iter(trials.values()))(4, DEEPSEEK_V3, terms) == HOPPER.choose_layer(
        4, DEEPSEEK_V3, terms
    )
    first, second = trials["shipped, 4 and 6 stages"](4, DEEPSEEK_V3, terms)
    assert (first.stages, second.stages) == (4, 6) and len([n for n in trials if "stages" in n]) > 9
    many = tune.candidates(tune.picked(14107, DEEPSEEK_V3, terms), ladders)
    assert not any(name.startswith("shipped, ") for name in many)


class Problems:
    def __init__(self, layer, *_) -> None:
        self.layer = layer

    def of(self, tokens: int):
        nothing = torch.zeros(tokens, 8)
        return MoeInputs(*8 * (nothing,), 0, 1.0), "drawn"


def timed_alike(calls, repeats: int) -> dict:
    assert repeats == 10
    for call in calls.values():
        call.output.zero_()
    return {name: {"ms": 0.1, "p10": 0.1, "p90": 0.1, "calls": 1} for name in calls}


@pytest.mark.parametrize("terms", [1, 2])
def test_the_pairs_are_those_of_the_terms(terms: int, measure, monkeypatch) -> None:
    monkeypatch.setattr(cases, "problems_of", Problems)
    monkeypatch.setattr(tune, "device_times", timed_alike)
    done, recorded = measure("tune_layer", "--tokens", "901", *["--accurate"] * (terms - 1))
    ladders = ladder(), ladder(terms)
    wanted = tune.candidates(tune.picked(901, DEEPSEEK_V3, terms), ladders)
    assert done.returncode == 0 and {row["subject"] for row in recorded.rows} == set(wanted)


def test_a_shipped_config_that_did_not_run_fails(measure, monkeypatch) -> None:
    def device_times(calls, repeats: int) -> dict:
        return {**timed_alike(calls, repeats), next(iter(calls)): {"error": "no memory"}}

    monkeypatch.setattr(cases, "problems_of", Problems)
    monkeypatch.setattr(tune, "device_times", device_times)
    done, _ = measure("tune_layer", "--tokens", "901")
    assert done.returncode == EXIT_FAILED and " not run" in done.stdout
    assert re.search(r"^error: .* at T=901: did not run; best: \d", done.stderr, re.M)


@pytest.mark.parametrize(("gain", "status"), [(1.01, 0), (1.05, 1)])
@pytest.mark.parametrize("wrong", [False, True])
def test_a_layer_that_loses_or_computes_something_else_fails(
    gain, status, wrong, measure, monkeypatch
) -> None:
    """The second pair is the faster one; the third writes another output if `wrong`."""

    def device_times(calls, repeats):
        for i, call in enumerate(calls.values()):
            call.output.fill_(float(wrong and i == 2))
        faster = (0.1 / gain if i == 1 else 0.1 for i in range(len(calls)))
        figures = ({"ms": ms, "p10": 0.01, "p90": 0.5, "calls": 1} for ms in faster)
        return dict(zip(calls, figures, strict=True))

    monkeypatch.setattr(cases, "problems_of", Problems)
    monkeypatch.setattr(tune, "device_times", device_times)
    definition = ["--definition", "dsv3_tp8"] if wrong else []
    done, recorded = measure("tune_layer", "--tokens", "3", "901", *definition)
    assert done.returncode == (1 if wrong else status) and "\n901 " in done.stdout
    assert ("at T=901: loses 5.0 %" in done.stderr) == (status == 1)
    rows = recorded.rows_of("tune_layer")
    assert {(row["tokens"], row["terms"]) for row in rows} == {(3, 1), (901, 1)}
    first, second = [row for row in rows if row["tokens"] == 3][:2]
    assert first["value"] / second["value"] == pytest.approx(gain) and second["unit"] == "us"
    assert (second["p10"], second["p90"]) == pytest.approx((10.0, 500.0))
    errors = [row.get("error") for row in rows if row["tokens"] == 3]
    assert errors.count("not the output of the shipped pair") == wrong
    tried = [row for row in rows if "best" not in row]
    assert all(row.get("clock") == (None if "error" in row else "device") for row in tried)
