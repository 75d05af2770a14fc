"""Selecting solutions and workloads, other data sets, and the inputs that the CPU path draws."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from small import solution

from scripts.common import options
from scripts.common.definitions import DEFAULT
from scripts.common.program import DEFINITION, ROOT, UsageError
from scripts.measuring import cases


@pytest.fixture(scope="module")
def ours():
    trace_set, remarks = cases.load(ROOT)
    assert remarks == []
    return trace_set


WORKLOADS = {
    "": [7, 1, 32, 80, 901, 16, 15, 14, 14107, 11948, 62, 59, 58, 57, 56, 55, 54, 53, 52],
    "901 T=7": [7, 901],
    "e05c6c03 5e8d": [1, 14107],
    "--max-tokens 15": [7, 1, 15, 14],
    "6230": [32],  # all digits and no workload of that length: the beginning of a uuid
    "T=3": "no workload matches T=3",
    "zzzz": "no workload matches zzzz",
    "901 --max-tokens 10": "no workload is left",
}


@pytest.mark.parametrize("chosen", WORKLOADS)
def test_workloads_are_selected_by_length_and_by_uuid(chosen: str, ours) -> None:
    selectors, _, limit = chosen.partition("--max-tokens ")
    call_args = ours.workloads[DEFINITION], selectors.split(), int(limit) if limit else None
    if isinstance(wanted := WORKLOADS[chosen], str):
        with pytest.raises(UsageError, match=wanted):
            cases.select_workloads(*call_args)
    else:
        traces = cases.select_workloads(*call_args)
        assert [cases.tokens(t.workload) for t in traces] == wanted


def test_solutions_are_selected_by_whole_or_short_names_and_by_patterns() -> None:
    every = [solution("cutedsl_moe_fp8_v1"), solution("cutedsl_moe_fp8_v2"), solution("b")]
    for patterns, chosen in (
        (["v1"], every[:1]),
        (["v*"], every[:2]),
        (["b", "cutedsl_moe_fp8_v1"], [every[0], every[2]]),
        ([], every),
    ):
        assert cases.select_solutions(every, patterns) == chosen
    with pytest.raises(UsageError, match="^no solution c, d\\*; there are: v1, v2, b$"):
        cases.select_solutions(every, ["v1", "c", "d*"])
    names = [s.name for s in every]
    assert options.select_names(names, ["b", "v1", "v*"]) == names, "each once, in their order"
    assert options.one_name(names, "v2", "--against") == names[1]
    with pytest.raises(UsageError, match="^--against v.: names .*_v1, .*_v2; name one$"):
        options.one_name(names, "v?", "--against")


def test_another_data_set_is_completed_in_memory_only(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "definitions").mkdir()
    shutil.copy(ROOT / DEFAULT.path, tmp_path / "definitions")
    theirs = tmp_path / "solutions" / "them" / "moe" / DEFINITION
    theirs.mkdir(parents=True)
    (theirs / "peer.json").write_text(solution("peer").model_dump_json())
    (theirs / "same.json").write_text(solution("same", "def run(): return 1\n").model_dump_json())
    other = solution("other", f"# not of {DEFINITION}").model_copy(update={"definition": "another"})
    (theirs / "other.json").write_text(other.model_dump_json())
    (theirs / "future.json").write_text(json.dumps({"definition": DEFINITION, "schema": 9}))
    before = sorted(p.name for p in tmp_path.rglob("*"))

    ours = [solution("same"), solution("new")]
    monkeypatch.setattr(cases.packer, "write_packed", lambda **_: [])
    monkeypatch.setattr(cases, "packed_solutions", lambda paths: ours)
    trace_set, solutions = cases.load_with_ours(tmp_path)
    assert solutions == ours
    future, same = capsys.readouterr().err.split("\n", 1)
    assert "future.json" in future
    assert same == "same: the data set's copy differs; the current one is used\n"
    by_name = {s.name: s for s in trace_set.solutions[DEFINITION]}
    assert sorted(by_name) == ["new", "peer", "same"]
    assert by_name["same"] == ours[0]
    assert sorted(p.name for p in tmp_path.rglob("*")) == before


def test_a_broken_data_set_is_named_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no data set with the definition"):
        cases.load(tmp_path)
    with pytest.raises(UsageError, match="not a directory"):
        cases.load(tmp_path / "absent")
    shutil.copytree(ROOT / "definitions", tmp_path / "definitions")
    shutil.copytree(ROOT / "workloads", tmp_path / "workloads")
    index = tmp_path / "workloads" / "moe" / f"{DEFINITION}.jsonl"
    good = index.read_bytes()
    for content in (good + b'{"definition": 5}\n', good + b"\xff\n", b"{broken\n"):
        index.write_bytes(content)
        with pytest.raises(UsageError, match=rf"{index.name} cannot be read: [^\n]*$"):
            cases.load(tmp_path)
    index.write_bytes(good)
    (tmp_path / DEFAULT.path).write_text("{}")
    with pytest.raises(UsageError, match=rf"{DEFAULT.path.name} cannot be read: [^\n]*$"):
        cases.load(tmp_path)


def test_only_tensors_that_are_missing_are_made_and_never_another_data_sets(
    ours, tmp_path: Path, monkeypatch
) -> None:
    requested: list[list[str]] = []
    monkeypatch.setattr(cases, "make_workloads", lambda _, uuids, **__: requested.append(uuids))
    first, second = ours.workloads[DEFINITION][:2]
    path = tmp_path / first.workload.inputs["routing_logits"].path
    path.parent.mkdir(parents=True)
    path.touch()
    with monkeypatch.context() as here:
        here.setattr(cases, "ROOT", tmp_path)
        for traces in [first], [first, second]:
            cases.make_missing_workloads(tmp_path, traces)
    assert requested == [[second.workload.uuid]]
    with pytest.raises(UsageError, match="lacks the tensors of 1 workloads"):
        cases.make_missing_workloads(tmp_path / "theirs", [first])


def test_draws_are_reproducible_and_look_like_flashinfer_benchs(ours) -> None:
    definition = ours.definitions[DEFINITION]
    cpu = torch.device("cpu")

    def fp8(name: str, seed: int) -> torch.Tensor:
        return cases.draw(definition, name, (4, 128, 256), cpu, seed)

    first = fp8("gemm1_weights", 1)
    assert first.dtype == torch.float8_e4m3fn
    assert torch.equal(first.view(torch.uint8), fp8("gemm1_weights", 1).view(torch.uint8))
    for other in (fp8("gemm1_weights", 2), fp8("gemm2_weights", 1)):
        assert not torch.equal(first.view(torch.uint8), other.view(torch.uint8))
    assert not torch.equal(first[0].view(torch.uint8), first[1].view(torch.uint8))
    values = first.float()
    assert values.abs().max() == 2 and abs(values.mean()) < 0.02
    assert 0.9 < values.std() < 1.0  # a clamped normal
    scales = cases.draw(definition, "hidden_states_scale", (56, 100), cpu, 1)
    assert scales.dtype == torch.float32 and (scales < 0).any() and 0.95 < scales.std() < 1.05
