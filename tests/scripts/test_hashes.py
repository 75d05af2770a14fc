"""Hashes of the present sources, and sources that have changed since a measurement."""

import pytest
from flashinfer_bench.data import Solution
from programs import packed_once
from small_record import ranked, trace

from scripts.common import hashes, packer
from scripts.common.definitions import MOE
from scripts.common.program import UsageError
from scripts.publishing.rows import Writer

V1, V2 = "cutedsl_moe_fp8_v1", "cutedsl_moe_fp8_v2"
GLM5, EP8, EP4 = (f"triton_moe_{short}" for short in ("glm5", "minimax_m2_ep8", "kimi_k2_ep4"))
NOW = {V1: "1", V2: "2", "triton_moe": "3", GLM5: "3", EP8: "4", EP4: "4"}


@pytest.fixture
def now(monkeypatch) -> None:
    monkeypatch.setattr(hashes, "current", lambda definition=None: NOW)


@pytest.mark.parametrize(
    ("measured", "changed", "unknown"),
    [
        ({}, "", ""),
        ({V1: "1", "triton_moe": "3"}, "", ""),
        ({V1: "0", "triton_moe": "3"}, "source of v1 has", ""),
        ({V1: "0"}, "source of v1 has", ""),
        ({V1: "0", V2: "2", "triton_moe": "0"}, "sources of v1 and triton_moe have", ""),
        ({V1: "0", V2: "0", "triton_moe": "0"}, "sources of all 3 solutions have", ""),
        # Someone else's solution, whose source is not here, and a generation that is no more.
        ({V1: "0", V2: "0", "theirs": "0"}, "sources of v1 and v2 have", ""),
        ({"cutedsl_moe_fp8_v0": "0", V1: "1", "theirs": "0"}, "source of v0 has", ""),
        ({V1: "", V2: "0", "triton_moe": "3"}, "source of v2 has", "v1"),
        ({V1: "10", "x": ""}, "source of v1 has", ""),  # measured twice
        # A solution of several definitions is named once.
        ({V1: "1", GLM5: "3", EP8: "3", EP4: "3"}, "source of triton_moe has", ""),
    ],
)
def test_changed_sources_in_a_sentence(now, measured, changed: str, unknown: str) -> None:
    """The hashes have one digit each."""
    expected = [f"Since this run the {changed} changed."] if changed else []
    expected += [f"It is not known which sources of {unknown} were measured."] if unknown else []
    measured_hashes = {name: set(was) or {""} for name, was in measured.items()}
    assert hashes.remark(measured_hashes) == " ".join(expected)


def test_a_rankings_sources_are_those_of_its_records(now, tmp_path) -> None:
    traces = [trace("triton_moe", length, 1.0, libs={"solution_hash": "3"}) for length in (7, 80)]
    traces += [trace(V1, 7, 1.0, libs={"solution_hash": "2"}), trace(V2, 7, 1.0)]
    (ranking,) = ranked(tmp_path, traces)
    assert hashes.remark(ranking.hashes) == (
        "Since this run the source of v1 has changed. It is not known which sources of v2 were "
        "measured."
    )


def test_a_measurements_sources_are_those_that_its_rows_name(now) -> None:
    changed = "Since this measurement the source of v1 has changed."
    for was, remark in (("1", ""), ("0", changed), (None, "")):
        into = Writer("stages", "a GPU", "m")
        into.add({"tokens": 1}, "a config", solution=V1, hash=was)
        into.add({"tokens": 1}, "triton_moe", hash="3" if was else None)
        assert hashes.changed_since(into.result, "stages") == remark


def test_the_present_hashes_are_those_of_what_is_packed(monkeypatch) -> None:
    monkeypatch.setattr(packer, "pack", packed_once)
    packed = {g.name: Solution.model_validate_json(packed_once(g)) for g in packer.generations()}
    assert hashes.current() == {name: s.hash() for name, s in packed.items()}
    assert len(set(hashes.current().values())) == len(packed) > 4
    # Of another definition's too.
    name, others = MOE[1].packed_name("triton_moe"), hashes.current(MOE[1])
    assert hashes.remark({name: {others[name]}}) == ""
    assert "the source of triton_moe has changed" in hashes.remark({name: {"another"}})
    assert {g.name for g in packer.every_generation()} >= {*others, *packed}


def test_sources_that_cannot_be_packed_are_one_line(monkeypatch) -> None:
    def generations(definition: object) -> list[packer.Generation]:
        raise packer.PackError("gen.py: no docstring")

    monkeypatch.setattr(packer, "generations", generations)
    with pytest.raises(UsageError, match="cannot be packed: gen.py: no docstring"):
        hashes.packed.__wrapped__()
