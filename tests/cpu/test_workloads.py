"""The 19 workloads: the committed files, the draws behind them, the program that makes them."""

import functools
import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from flashinfer_bench import TraceSet

from scripts.common.command_line import Failure, UsageError
from scripts.common.project import DEFINITION
from scripts.data import synthetic_logits, workload_specs
from scripts.data.synthetic_logits import LogitModel, draw_logits, routing_bias
from scripts.data.workload_specs import WorkloadSpec, load_specs
from scripts.programs import make_workloads as program

ROOT = Path(__file__).resolve().parents[2]

# (uuid, tokens, first expert) in the order of the official data set
OFFICIAL = [
    ("b8f4f012-a32e-4356-b4e1-7665b3d598af", 7, 192),
    ("e05c6c03-5603-4a1c-b34c-dcce0ecaeea4", 1, 32),
    ("6230e838-67ca-41dd-a9d6-6f36b7676c6b", 32, 32),
    ("8f1ff9f1-6747-41d1-a1d8-2868cdacf893", 80, 96),
    ("1a4c6ba1-3cd2-4d7d-b716-84f2d52b69fc", 901, 96),
    ("a7c2bcfd-a2f4-479e-8d32-200115df89cf", 16, 224),
    ("2e69caee-ae5c-473b-aa99-5dc6659829d4", 15, 32),
    ("8cba5890-4288-448a-93b8-42c14c6b9420", 14, 0),
    ("5e8dc11c-f2a9-42d5-8dce-9419cbf34d5d", 14107, 32),
    ("58a34f27-7995-4155-8b46-f60a7225e20e", 11948, 128),
    ("5eadab1e-a0e3-4966-b0fd-1115cd77497c", 62, 96),
    ("eedc63b2-c03b-4cf2-8d16-1f46566e3af7", 59, 160),
    ("e626d3e6-6c29-4fd8-bb7c-5b09eec61702", 58, 64),
    ("74d7ff04-0365-4cf8-a824-ce61b7131dea", 57, 96),
    ("4822167c-dae5-4bb1-bb53-e4adb256245b", 56, 64),
    ("81955b1e-086f-49c1-9f40-a18a5aaf509d", 55, 128),
    ("76010cb4-f73c-4145-8365-8642a2ce99de", 54, 128),
    ("fc378037-e8fa-4305-b00f-4af47933fd53", 53, 32),
    ("f7d6ac7c-24ec-47e4-aefc-4863a5e3e1d9", 52, 160),
]
SPECS = load_specs()
by_workload = pytest.mark.parametrize(
    "spec",
    [
        pytest.param(s, marks=[pytest.mark.all] if s.seq_len > 10000 else [], id=f"T{s.seq_len}")
        for s in SPECS
    ],
)
SMALLEST = min(SPECS, key=lambda spec: spec.seq_len)


@functools.cache
def draw_of(spec_index: int) -> synthetic_logits.Draw:
    return SPECS[spec_index].draw()


def draw(spec: WorkloadSpec) -> synthetic_logits.Draw:
    return draw_of(SPECS.index(spec))


# --- the committed files -------------------------------------------------------------------------


def test_workload_file_lists_the_official_workloads_in_order():
    traces = TraceSet.from_path(str(ROOT)).workloads[DEFINITION]
    assert [
        (
            t.workload.uuid,
            t.workload.axes["seq_len"],
            t.workload.inputs["local_expert_offset"].value,
        )
        for t in traces
    ] == OFFICIAL
    assert all(t.workload.inputs["routed_scaling_factor"].value == 2.5 for t in traces)


def test_workload_file_is_what_is_written_of_the_spec(tmp_path):
    for path in workload_specs.write_specs(SPECS, tmp_path):
        committed = json.loads if path.suffix == ".json" else str
        written = (path.read_text(), (ROOT / path.relative_to(tmp_path)).read_text())
        assert committed(written[0]) == committed(written[1])


# --- the draws -----------------------------------------------------------------------------------


@by_workload
def test_draw_has_the_bytes_and_counts_of_the_spec(spec):
    made = draw(spec)
    content = spec.blob_of(made)
    assert hashlib.sha256(content).hexdigest() == spec.sha256
    assert made.redrawn == spec.redrawn
    assert synthetic_logits.count_local(made.ids, spec.local_expert_offset) == spec.counts


@by_workload
def test_counts_are_close_to_the_captured_ones(spec):
    captured, ours = spec.captured, spec.counts
    if spec.seq_len < 100:
        assert ours["pairs"] == captured["pairs"]
        assert abs(ours["hit"] - captured["hit"]) <= 1
    else:
        assert abs(ours["pairs"] / captured["pairs"] - 1) <= 0.01
        assert abs(ours["hit"] / captured["hit"] - 1) <= 0.01
    assert abs(ours["active"] - captured["active"]) <= 1
    assert (captured["max"] is None) == (spec.seq_len < 100)
    if captured["max"] is not None:
        assert abs(ours["max"] / captured["max"] - 1) <= 0.1


@by_workload
def test_moments_and_grid(spec):
    logits = draw(spec).logits
    assert logits.dtype == np.float32 and logits.shape == (spec.seq_len, 256)
    assert abs(logits.mean(dtype=np.float64) + 1.6706) < 2e-3
    assert abs(logits.std(dtype=np.float64) - 0.6560) < 2e-3
    as_torch = torch.from_numpy(logits)
    assert torch.equal(as_torch.to(torch.bfloat16).float(), as_torch)


@by_workload
def test_no_choice_hangs_on_a_small_margin(spec):
    """In float32 and in torch: another implementation than the generator's own."""
    made = draw(spec)
    biased = torch.from_numpy(made.logits).sigmoid() + torch.from_numpy(routing_bias())
    grouped = biased.view(-1, 8, 32)
    group_score = grouped.topk(2).values.sum(-1)
    ranked, order = group_score.sort(descending=True)
    assert (ranked[:, 3] - ranked[:, 4]).min() >= 1e-4
    dropped = torch.zeros_like(group_score).scatter_(1, order[:, 4:], 1).bool()
    candidates = grouped.masked_fill(dropped[..., None], 0).flatten(1)
    ranked, order = candidates.sort(descending=True)
    assert (ranked[:, 7] - ranked[:, 8]).min() >= 1e-4
    assert np.array_equal(order[:, :8].sort().values.numpy(), made.ids)


@by_workload
def test_margin_threshold_is_far_from_every_margin(spec):
    """Or a different rounding of exp could redraw another row on another machine."""
    assert draw(spec).margin_gap > workload_specs.MIN_MARGIN_GAP


def test_redraw_replaces_the_rows_without_margin_and_no_others(monkeypatch):
    spec = next(spec for spec in SPECS if spec.seq_len == 901)
    final = draw(spec)
    monkeypatch.setattr(synthetic_logits, "MIN_MARGIN", -1.0)
    first = spec.draw()
    assert first.redrawn == 0 and final.redrawn > 0
    _, margin = synthetic_logits.route(first.logits, routing_bias())
    assert np.array_equal((first.logits != final.logits).any(axis=1), margin < 1.05e-4)


def test_draw_gives_up_where_no_row_can_have_a_margin(monkeypatch):
    monkeypatch.setattr(synthetic_logits, "MIN_MARGIN", 10.0)
    with pytest.raises(RuntimeError, match="margin"):
        draw_logits(LogitModel(seed=1), 1, 0)


# --- routing against brute force -----------------------------------------------------------------


def choose_by_hand(logits, bias):
    """(chosen experts, margin) of one token by plain sorting."""
    score = [
        1 / (1 + np.exp(-np.float64(x))) + np.float64(b) for x, b in zip(logits, bias, strict=True)
    ]
    group_score = [sum(sorted(score[g * 32 : g * 32 + 32])[-2:]) for g in range(8)]
    groups = sorted(range(8), key=lambda g: -group_score[g])
    group_margin = group_score[groups[3]] - group_score[groups[4]]
    candidates = sorted(
        (e for g in groups[:4] for e in range(g * 32, g * 32 + 32)), key=lambda e: -score[e]
    )
    return sorted(candidates[:8]), min(group_margin, score[candidates[7]] - score[candidates[8]])


@pytest.mark.parametrize("tokens", [0, 1, 60])
def test_routing_against_sorting(tokens):
    rng = np.random.default_rng(tokens)
    logits = rng.normal(-1.7, 0.7, (tokens, 256)).astype(np.float32)
    bias = rng.normal(5, 0.02, 256).astype(np.float32)
    ids, margin = synthetic_logits.route(logits, bias)
    assert ids.shape == (tokens, 8)
    for t in range(tokens):
        expected, expected_margin = choose_by_hand(logits[t], bias)
        assert ids[t].tolist() == expected
        assert margin[t] == pytest.approx(expected_margin, abs=1e-12)


def test_counts_of_a_known_routing():
    ids = np.array([[0, 1, 40, 41, 63, 64, 70, 71], [33, 40, 100, 101, 102, 103, 104, 105]])
    ids = np.vstack([ids, np.arange(200, 208)])
    counts = synthetic_logits.count_local(ids, 32)
    assert counts == {"pairs": 5, "hit": 2, "active": 4, "max": 2}
    assert synthetic_logits.count_local(ids, 224)["pairs"] == 0


# --- making the files ----------------------------------------------------------------------------


def test_the_captured_bias():
    bias = routing_bias().tolist()
    assert {bias[0], bias[2], bias[255]} == {4.9375}
    assert {bias[3], bias[90], bias[253]} == {4.96875}
    assert bias.count(4.96875) == 101


def test_up_to_date_blob_is_left_and_damaged_one_made_again(tmp_path, capsys):
    (path,) = workload_specs.make_workloads(tmp_path, [SMALLEST.uuid])
    assert "made" in capsys.readouterr().err
    content, stamp = path.read_bytes(), path.stat().st_mtime_ns
    assert workload_specs.make_workloads(tmp_path, [SMALLEST.uuid]) == [path]
    assert "up to date" in capsys.readouterr().err
    assert path.stat().st_mtime_ns == stamp
    for damaged in (b"", content[:5], content[:700], content[:-1] + b"\1", b"\xff" * 64):
        path.write_bytes(damaged)
        workload_specs.make_workloads(tmp_path, [SMALLEST.uuid])
        assert path.read_bytes() == content
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # no temporary file stays


def test_tensors_of_another_origin_are_kept(tmp_path, capsys):
    safetensors = pytest.importorskip("safetensors.torch")
    path = tmp_path / workload_specs.blob_path(SMALLEST)
    path.parent.mkdir(parents=True)
    captured = {"routing_logits": torch.zeros(1, 256), "routing_bias": torch.zeros(256).bfloat16()}
    safetensors.save_file(captured, path)
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1576\n"
    for content in (path.read_bytes(), pointer):
        path.write_bytes(content)
        workload_specs.make_workloads(tmp_path, [SMALLEST.uuid])
        assert "kept" in capsys.readouterr().err
        assert path.read_bytes() == content


def test_content_that_differs_from_the_spec_is_refused(tmp_path, monkeypatch):
    wrong = [replace(spec, model=replace(spec.model, seed=99)) for spec in SPECS]
    monkeypatch.setattr(workload_specs, "load_specs", lambda definition: wrong)
    with pytest.raises(RuntimeError, match=SMALLEST.uuid):
        workload_specs.make_workloads(tmp_path, [SMALLEST.uuid])
    with pytest.raises(Failure, match="out of step"):
        program.main(["--root", str(tmp_path), "--workloads", SMALLEST.uuid])
    assert not list(tmp_path.rglob("*.safetensors"))


def test_selection(tmp_path, monkeypatch):
    monkeypatch.setattr(workload_specs, "_make_blob", lambda spec, path: "")

    def chosen(*selection) -> list[int]:
        paths = workload_specs.make_workloads(tmp_path, *selection)
        return [s.seq_len for s in SPECS if tmp_path / workload_specs.blob_path(s) in paths]

    assert chosen(None, 15) == [7, 1, 15, 14]
    assert chosen(["e05c", "8f1f"], None) == [1, 80]
    assert chosen(["8f1f"], 79) == []


def test_command_line(tmp_path):
    root = ["--root", str(tmp_path)]
    assert program.main([*root, "--max-tokens", "1"]) == 0
    assert (tmp_path / workload_specs.blob_path(SMALLEST)).is_file()
    (tmp_path / "file").write_text("")
    for arguments, error, said in (
        ([*root, "--workloads", "nope"], UsageError, "'nope'"),
        (["--definition", "nope"], UsageError, "no definition 'nope'"),
        (["--specs"], UsageError, "captured workloads"),
        (["--root", str(tmp_path / "file"), "--max-tokens", "1"], OSError, "file"),
    ):
        with pytest.raises(error, match=said):
            program.main(arguments)
