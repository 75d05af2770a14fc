"""Whether the sources of what was measured are those of now."""

import pytest
from programs import packed_once
from test_rank import ranked, trace

from scripts.common import environment
from scripts.common.command_line import UsageError
from scripts.pack import pack, sources

NOW = {"cutedsl_moe_fp8_v1": "1", "cutedsl_moe_fp8_v2": "2", "triton_moe": "3"}


@pytest.fixture(autouse=True)
def now(monkeypatch) -> None:
    monkeypatch.setattr(sources, "current", lambda: NOW)


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        ({"cutedsl_moe_fp8_v1": {"1"}, "triton_moe": {"3"}}, ""),
        ({}, ""),
        (
            {"cutedsl_moe_fp8_v1": {"0"}, "triton_moe": {"3"}},
            "Since this run the source of v1 has changed.",
        ),
        ({"cutedsl_moe_fp8_v1": {"0"}}, "Since this run the source of v1 has changed."),
        (
            {"cutedsl_moe_fp8_v1": {"0"}, "cutedsl_moe_fp8_v2": {"2"}, "triton_moe": {"0"}},
            "Since this run the sources of v1 and triton_moe have changed.",
        ),
        (
            {"cutedsl_moe_fp8_v1": {"0"}, "cutedsl_moe_fp8_v2": {"0"}, "triton_moe": {"0"}},
            "Since this run the sources of all 3 solutions have changed.",
        ),
        # A generation that is no more, and someone else's solution, whose source is not here.
        (
            {"cutedsl_moe_fp8_v0": {"0"}, "cutedsl_moe_fp8_v1": {"1"}, "theirs": {"0"}},
            "Since this run the source of v0 has changed.",
        ),
        (
            {"cutedsl_moe_fp8_v1": {""}, "cutedsl_moe_fp8_v2": {"0"}, "triton_moe": {"3"}},
            "Since this run the source of v2 has changed. It is not known which sources of v1 were "
            "measured.",
        ),
        (
            {"cutedsl_moe_fp8_v1": {"1", "0"}, "x": {""}},
            "Since this run the source of v1 has changed.",
        ),
    ],
)
def test_changed_sources_in_a_sentence(measured: dict[str, set[str]], said: str) -> None:
    assert sources.remark(measured) == said


def test_a_solution_of_several_definitions_is_named_once(monkeypatch) -> None:
    monkeypatch.setattr(sources, "current", lambda definition=None: NOW)
    names = ["triton_moe_glm5", "triton_moe_minimax_m2_ep8", "triton_moe_kimi_k2_ep4"]
    measured = {"cutedsl_moe_fp8_v1": {"1"}} | dict.fromkeys(names, {"3"})
    monkeypatch.setitem(NOW, "triton_moe_glm5", "3")
    for name in names[1:]:
        monkeypatch.setitem(NOW, name, "4")
    assert sources.remark(measured) == "Since this run the source of triton_moe has changed."


def test_a_rankings_sources_are_those_of_its_records(tmp_path) -> None:
    made = [trace("triton_moe", length, 1.0, libs={"solution_hash": "3"}) for length in (7, 80)]
    made += [trace("cutedsl_moe_fp8_v1", 7, 1.0, libs={"solution_hash": "2"})]
    made += [trace("cutedsl_moe_fp8_v2", 7, 1.0)]
    (ranking,) = ranked(tmp_path, made)
    assert sources.changed_sources(ranking.records.values()) == (
        "Since this run the source of v1 has changed. It is not known which sources of v2 were "
        "measured."
    )


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (
            {"solutions": {"cutedsl_moe_fp8_v1": "1"}, "environment": {"source": {"hash": "old"}}},
            "",
        ),
        (
            {"solutions": {"cutedsl_moe_fp8_v1": "0", "triton_moe": "3"}},
            "Since this measurement the source of v1 has changed.",
        ),
        ({"environment": {"source": {"hash": "now"}}}, ""),
        (
            {"environment": {"source": {"hash": "old"}}},
            "Since this measurement the project's sources have changed.",
        ),
        ({"environment": {"source": {}}}, "It is not known which sources were measured."),
        ({"environment": {}}, "It is not known which sources were measured."),
        ({}, "It is not known which sources were measured."),
    ],
)
def test_records_of_stages_and_gemms(monkeypatch, record: dict, said: str) -> None:
    monkeypatch.setattr(environment, "source_hash", lambda: "now")
    assert sources.changed_since(record) == said


def test_the_present_hashes_are_those_of_what_is_packed(monkeypatch) -> None:
    monkeypatch.undo()
    from flashinfer_bench.data import Solution

    monkeypatch.setattr(sources, "pack", packed_once)
    packed = {g.name: Solution.model_validate_json(packed_once(g)) for g in pack.generations()}
    assert sources.current() == {name: s.hash() for name, s in packed.items()}
    assert len(set(sources.current().values())) == len(packed) > 4


def test_sources_that_cannot_be_packed_are_one_line(monkeypatch) -> None:
    monkeypatch.undo()

    def generations(definition: object) -> list[pack.Generation]:
        raise pack.PackError("gen.py: no docstring")

    monkeypatch.setattr(sources, "generations", generations)
    with pytest.raises(UsageError, match="cannot be packed: gen.py: no docstring"):
        sources.current.__wrapped__()
