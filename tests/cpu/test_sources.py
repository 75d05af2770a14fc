"""Whether the sources of what was measured are those of now."""

import pytest
from flashinfer_bench.data import Solution
from programs import packed_once
from small_record import ranked, trace

from scripts.common.command_line import UsageError
from scripts.common.definitions import MOE
from scripts.data.rows import Writer
from scripts.pack import pack, sources

V1, V2 = "cutedsl_moe_fp8_v1", "cutedsl_moe_fp8_v2"
NOW = {V1: "1", V2: "2", "triton_moe": "3"}


@pytest.fixture
def now(monkeypatch) -> None:
    monkeypatch.setattr(sources, "current", lambda definition=None: NOW)


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        ({V1: "1", "triton_moe": "3"}, ""),
        ({}, ""),
        ({V1: "0", "triton_moe": "3"}, "Since this run the source of v1 has changed."),
        ({V1: "0"}, "Since this run the source of v1 has changed."),
        (
            {V1: "0", V2: "2", "triton_moe": "0"},
            "Since this run the sources of v1 and triton_moe have changed.",
        ),
        (
            {V1: "0", V2: "0", "triton_moe": "0"},
            "Since this run the sources of all 3 solutions have changed.",
        ),
        (
            {V1: "0", V2: "0", "theirs": "0"},
            "Since this run the sources of v1 and v2 have changed.",
        ),
        # A generation that is no more, and someone else's solution, whose source is not here.
        (
            {"cutedsl_moe_fp8_v0": "0", V1: "1", "theirs": "0"},
            "Since this run the source of v0 has changed.",
        ),
        (
            {V1: "", V2: "0", "triton_moe": "3"},
            "Since this run the source of v2 has changed. It is not known which sources of v1 were "
            "measured.",
        ),
        ({V1: "10", "x": ""}, "Since this run the source of v1 has changed."),
    ],
)
def test_changed_sources_in_a_sentence(now, measured: dict[str, str], said: str) -> None:
    """Of hashes of one digit each."""
    assert sources.remark({name: set(was) or {""} for name, was in measured.items()}) == said


def test_a_solution_of_several_definitions_is_named_once(now, monkeypatch) -> None:
    names = ["triton_moe_glm5", "triton_moe_minimax_m2_ep8", "triton_moe_kimi_k2_ep4"]
    for name, digest in zip(names, "344", strict=True):
        monkeypatch.setitem(NOW, name, digest)
    measured = {V1: {"1"}} | dict.fromkeys(names, {"3"})
    assert sources.remark(measured) == "Since this run the source of triton_moe has changed."


def test_a_rankings_sources_are_those_of_its_records(now, tmp_path) -> None:
    made = [trace("triton_moe", length, 1.0, libs={"solution_hash": "3"}) for length in (7, 80)]
    made += [trace(V1, 7, 1.0, libs={"solution_hash": "2"}), trace(V2, 7, 1.0)]
    (ranking,) = ranked(tmp_path, made)
    assert sources.remark(ranking.hashes) == (
        "Since this run the source of v1 has changed. It is not known which sources of v2 were "
        "measured."
    )


@pytest.mark.parametrize(
    ("hashes", "said"),
    [
        ({V1: "1"}, ""),
        ({V1: "0", "triton_moe": "3"}, "Since this measurement the source of v1 has changed."),
        ({}, ""),
    ],
)
def test_measurements(now, hashes: dict[str, str], said: str) -> None:
    into = Writer("stages", "a GPU", "m")
    into.add({"tokens": 1}, "a config", solution=V1, hash=hashes.get(V1))
    for name, of in hashes.items():
        into.add({"tokens": 1}, name, hash=of)
    assert sources.changed_since(into.result, "stages") == said


def test_the_present_hashes_are_those_of_what_is_packed(monkeypatch) -> None:
    monkeypatch.setattr(sources, "pack", packed_once)
    packed = {g.name: Solution.model_validate_json(packed_once(g)) for g in pack.generations()}
    assert sources.current() == {name: s.hash() for name, s in packed.items()}
    assert len(set(sources.current().values())) == len(packed) > 4
    # Of another definition's too.
    name, hashes = MOE[1].packed_name("triton_moe"), sources.current(MOE[1])
    assert sources.remark({name: {hashes[name]}}) == ""
    assert "the source of triton_moe has changed" in sources.remark({name: {"another"}})
    assert {g.name for g in pack.every_generation()} >= {*hashes, *packed}


def test_sources_that_cannot_be_packed_are_one_line(monkeypatch) -> None:
    def generations(definition: object) -> list[pack.Generation]:
        raise pack.PackError("gen.py: no docstring")

    monkeypatch.setattr(sources, "generations", generations)
    with pytest.raises(UsageError, match="cannot be packed: gen.py: no docstring"):
        sources.current.__wrapped__()
