"""The workloads of every definition: the committed files, the draws behind them, and the program
that makes their tensors."""

import functools
import hashlib
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from flashinfer_bench.bench.utils import load_safetensors
from flashinfer_bench.data import Definition, Trace, load_json_file
from programs import call

from scripts import data
from scripts.common.definitions import DEFAULT, MOE, RENORMALIZE, MoeDefinition
from scripts.common.program import ROOT
from scripts.data import LogitModel, WorkloadSpec, draw_logits, load_specs, routing_bias

OFFICIAL = "c53ef9ae0696cbb3093dbc1e6bdc4cb114618fabfe430158d4c33f54a400dbed"
"""Digest of the uuids, token counts and first experts of the official data set."""
SPECS = load_specs()
KINDS = (DEFAULT, MOE[1], MOE[3])
"""One definition of each interface, and one with a drawn bias."""
SMALLEST = min(SPECS, key=lambda spec: spec.seq_len)
every = pytest.mark.parametrize("definition", MOE, ids=lambda d: d.short or "default")
LARGE = 10000
"""Tokens from which a draw takes seconds."""
SMALL = 1024
"""Tokens of the largest workload of the other layers whose draw is looked at here."""


def some(specs: list[WorkloadSpec]) -> list:
    large = {True: [pytest.mark.all], False: []}
    return [
        pytest.param(s, marks=large[s.seq_len > LARGE], id=f"{s.definition.short}T{s.seq_len}")
        for s in specs
    ]


by_workload = pytest.mark.parametrize("spec", some(SPECS))
by_draw = pytest.mark.parametrize(
    "spec", some([*SPECS, *(s for d in MOE[1:] for s in load_specs(d) if s.seq_len <= SMALL)])
)


@functools.cache
def draw_of(uuid: str, definition: MoeDefinition) -> data.Draw:
    return next(spec for spec in load_specs(definition) if spec.uuid == uuid).draw()


def draw(spec: WorkloadSpec) -> data.Draw:
    return draw_of(spec.uuid, spec.definition)


# --- the committed files -------------------------------------------------------------------------


def test_the_default_workloads_are_the_official_ones_in_their_order() -> None:
    named = [(spec.uuid, spec.seq_len, spec.local_expert_offset) for spec in SPECS]
    assert hashlib.sha256(repr(named).encode()).hexdigest() == OFFICIAL
    assert DEFAULT.routed_scaling_factor == 2.5


@every
def test_files_are_what_is_written_of_the_specs(definition, tmp_path) -> None:
    specs = load_specs(definition)
    assert definition.tokens in ((), tuple(s.seq_len for s in specs))
    for path in data.write_specs(specs, tmp_path):
        committed = json.loads if path.suffix == ".json" else str
        written = (path.read_text(), (ROOT / path.relative_to(tmp_path)).read_text())
        assert committed(written[0]) == committed(written[1])


@pytest.mark.parametrize("definition", MOE[1:], ids=lambda d: d.short)
def test_specs_of_our_own_are_what_the_program_makes(definition, monkeypatch) -> None:
    """Check the smaller specs only: a draw of many tokens takes long."""
    small = replace(definition, tokens=tuple(t for t in definition.tokens if t <= SMALL))
    specs = data.own_specs(small)
    assert [replace(spec, definition=definition) for spec in specs] == load_specs(definition)[
        : len(specs)
    ]


# --- the draws -----------------------------------------------------------------------------------


@by_draw
def test_a_draw_has_the_tensors_counts_and_moments_of_the_spec(spec) -> None:
    routing, definition = draw(spec), spec.definition
    assert data.digest(spec.tensors(routing)) == spec.sha256
    assert routing.redrawn == spec.redrawn
    local = routing.ids - spec.local_expert_offset
    here = (local >= 0) & (local < definition.num_local_experts)
    rows = Counter(local[here].tolist())
    assert spec.counts == {
        "pairs": here.sum(),
        "hit": here.any(1).sum(),
        "active": len(rows),
        "max": max(rows.values()),
    }
    # Or a different rounding of exp could redraw another row on another machine.
    assert routing.margin_gap > data.MIN_MARGIN_GAP
    mean, std = (0, 1) if definition.routing == RENORMALIZE else (-1.6706, 0.6560)
    assert abs(routing.logits.mean(dtype=np.float64) - mean) < 2e-3
    assert abs(routing.logits.std(dtype=np.float64) - std) < 2e-3
    assert routing.logits.shape == (spec.seq_len, definition.num_experts)
    logits = torch.from_numpy(routing.logits)
    assert torch.equal(logits.to(torch.bfloat16).float(), logits)


@by_workload
def test_counts_are_close_to_the_captured_ones(spec) -> None:
    captured, ours = spec.captured, spec.counts
    few = spec.seq_len < 100
    assert abs(ours["pairs"] / captured["pairs"] - 1) <= (0 if few else 0.01)
    assert abs(ours["hit"] - captured["hit"]) <= (1 if few else 0.01 * captured["hit"])
    assert abs(ours["active"] - captured["active"]) <= 1
    assert (captured["max"] is None) == few
    assert few or abs(ours["max"] / captured["max"] - 1) <= 0.1


@by_draw
def test_no_choice_hangs_on_a_small_margin(spec) -> None:
    """Recompute in torch and float32, unlike the generator."""
    routing, definition = draw(spec), spec.definition
    scores = torch.from_numpy(routing.logits)
    if definition.routing != RENORMALIZE:
        scores = scores.sigmoid() + torch.from_numpy(routing_bias(definition))
    if definition.topk_group < definition.n_group:
        grouped = scores.view(len(scores), definition.n_group, -1)
        ranked, order = grouped.topk(2).values.sum(-1).sort(descending=True)
        k = definition.topk_group
        assert (ranked[:, k - 1] - ranked[:, k]).min() >= 1e-4
        dropped = torch.zeros_like(ranked).scatter_(1, order[:, k:], 1).bool()
        scores = grouped.masked_fill(dropped[..., None], 0).flatten(1)
    ranked, order = scores.sort(descending=True)
    k = definition.top_k
    assert (ranked[:, k - 1] - ranked[:, k]).min() >= 1e-4
    assert np.array_equal(order[:, :k].sort().values.numpy(), routing.ids)


def test_the_gap_of_margins_counts_rows_that_are_drawn_again(monkeypatch) -> None:
    monkeypatch.setattr(data, "MIN_MARGIN", 3e-3)
    route, of_draw = data.route, []

    def noted(*arguments):
        ids, margin = route(*arguments)
        of_draw.append(float(np.abs(margin - data.MIN_MARGIN).min()))
        return ids, margin

    monkeypatch.setattr(data, "route", noted)
    among_redrawn = 0
    for seed in range(20):
        of_draw.clear()
        assert draw_logits(LogitModel(seed=seed), 16, 0).margin_gap == min(of_draw)
        among_redrawn += min(of_draw) < of_draw[0]
    assert among_redrawn > 1


def test_a_draw_without_margins_ends(monkeypatch) -> None:
    monkeypatch.setattr(data, "MIN_MARGIN", 10.0)
    with pytest.raises(RuntimeError, match="margin"):
        draw_logits(LogitModel(seed=1), 1, 0)


# --- making the files ----------------------------------------------------------------------------


def test_the_captured_bias() -> None:
    bias = routing_bias().tolist()
    assert {bias[0], bias[2], bias[255]} == {4.9375}
    assert {bias[3], bias[90], bias[253]} == {4.96875} and bias.count(4.96875) == 101


@pytest.mark.parametrize("definition", KINDS, ids=lambda d: d.short or "default")
def test_inputs_of_a_workload(definition, tmp_path) -> None:
    """Make the tensors by the program and load them through flashinfer-bench."""
    loaded_definition = load_json_file(Definition, ROOT / definition.path)
    specs = {s.uuid: s for s in load_specs(definition) if s.seq_len <= 16}
    definition_option = ["--definition", definition.short] if definition.short else []
    done = call("data", "--root", tmp_path, *definition_option, "--workloads", *specs)
    assert done.returncode == 0 and len(list(tmp_path.rglob("*.safetensors"))) == len(specs)
    for line in (ROOT / data.workloads_path(definition)).read_text().splitlines():
        trace = Trace.model_validate_json(line)
        if (spec := specs.get(trace.workload.uuid)) is None:
            continue
        inputs = trace.workload.inputs
        loaded = load_safetensors(loaded_definition, trace.workload, tmp_path)
        assert list(inputs) == list(loaded_definition.inputs)
        assert set(loaded) == {name for name in inputs if name.startswith("routing")}
        assert np.array_equal(loaded["routing_logits"].float().numpy(), draw(spec).logits)
        if "routing_bias" in loaded:
            bias = loaded["routing_bias"].float().numpy()
            assert np.array_equal(bias, routing_bias(definition))
        pinned = {name: i.value for name, i in inputs.items() if i.type == "scalar"}
        factor = pinned.get("routed_scaling_factor", 1.0)
        assert factor == definition.routed_scaling_factor
        assert pinned.get("local_expert_offset", 0) == spec.local_expert_offset


def test_tensors_that_are_damaged_are_made_again_and_those_of_another_origin_kept(tmp_path) -> None:
    smallest = ["data", "--root", tmp_path, "--workloads", SMALLEST.uuid]
    assert call(*smallest).stderr.endswith("made\n")
    (path,) = tmp_path.rglob("*.safetensors")
    content, stamp = path.read_bytes(), path.stat().st_mtime_ns
    assert call(*smallest).stderr.endswith("up to date\n") and path.stat().st_mtime_ns == stamp
    tensors = safetensors.torch.load(content)
    for damaged in (b"", content[:5], content[:700], content[:-1] + b"\1", b"\xff" * 64):
        path.write_bytes(damaged)
        assert call(*smallest).stderr.endswith("made\n")
        again = safetensors.torch.load_file(path)
        assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())
    captured = {"routing_logits": torch.zeros(1, 256), "routing_bias": torch.zeros(256).bfloat16()}
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1576\n"
    for other in (safetensors.torch.save(captured), pointer):
        path.write_bytes(other)
        assert "kept: not written by this program" in call(*smallest).stderr
        assert path.read_bytes() == other
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # no temporary file stays


def test_content_that_differs_from_the_spec_is_refused(tmp_path, monkeypatch) -> None:
    wrong = [replace(spec, model=replace(spec.model, seed=99)) for spec in SPECS]
    monkeypatch.setattr(data, "load_specs", lambda definition: wrong)
    done = call("data", "--root", tmp_path, "--workloads", SMALLEST.uuid)
    assert done.returncode == 1 and re.search(f"{SMALLEST.uuid}.* out of step", done.stderr)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_the_program(tmp_path: Path) -> None:
    root = ["--root", tmp_path / "new"]
    assert call("data", *root, "--workloads", "e05c", "8f1f", "--max-tokens", "79").returncode == 0
    (path,) = (tmp_path / "new").rglob("*.safetensors")
    assert path == tmp_path / "new" / data.blob_path(SMALLEST)
    (tmp_path / "file").write_text("")
    for arguments, message in (
        ([*root, "--workloads", "nope"], "no workload matches nope"),
        (["--definition", "nope"], "no definition 'nope'"),
        (["--specs"], "captured workloads"),
        (["--specs", "--workloads", "80"], "leave --workloads and --max-tokens out"),
        (["--root", tmp_path / "file", "--max-tokens", "1"], "file"),
    ):
        done = call("data", *arguments)
        assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
    done = call("data", *root, "--specs", "--definition", "qwen3_next")
    assert done.returncode == 0
    for line in done.stdout.splitlines():
        assert Path(line).read_text() == (ROOT / Path(line).relative_to(root[1])).read_text()
