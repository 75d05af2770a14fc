"""The README's figures are those of the record that it names."""

import json
import shutil
import sys
from pathlib import Path

import pandas as pd
import pytest

from scripts.common.command_line import UsageError
from scripts.common.project import ROOT
from scripts.pack import sources
from scripts.programs import readme_tables
from scripts.report import generated
from scripts.table.recorded import Recorded, read
from scripts.table.tables import Table

RESULTS = ROOT / "docs" / "results.md"
TEXT = generated.passages(RESULTS.read_text(encoding="utf-8"))[1]
STUDY = ROOT / "results" / "nvidia-h200" / "2026-11-25"
"""A record with GEMMs of even rows."""

BLOCK = "<!-- generated: {} -->\n\nx\n\n<!-- /generated -->\n"


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    return read(generated.record_of(TEXT))


@pytest.mark.parametrize("page", generated.PAGES, ids=lambda page: page.name)
def test_pages_and_pictures_are_current(page: Path) -> None:
    """On failure: python3 run.py readme_tables"""
    _, *passages = generated.passages(page.read_text(encoding="utf-8"))
    assert passages
    for text in passages:
        recorded = read(generated.record_of(text))
        assert generated.stale(text, recorded, page) == []
        assert generated.BLOCK.findall(text)


def test_a_changed_figure_is_noticed(recorded: Recorded) -> None:
    (block,) = [m[0] for m in generated.BLOCK.finditer(TEXT) if m[2] == "latency"]
    digit = block.rindex(" %") - 1
    changed = block[:digit] + str((int(block[digit]) + 1) % 10) + block[digit + 1 :]
    (problem,) = generated.stale(TEXT.replace(block, changed), recorded, RESULTS)
    assert problem.startswith("results.md, block latency")


def test_a_changed_record_is_noticed(recorded: Recorded, tmp_path: Path) -> None:
    for path in recorded.directory.iterdir():
        shutil.copy(path, tmp_path)
    traces = tmp_path / "traces.jsonl"
    lines = traces.read_text().splitlines(keepends=True)
    traces.write_text("".join(lines[1:]))
    shutil.copy(generated.pictures_of(recorded) / "latency.png", tmp_path)
    text = generated.generate(TEXT, read(tmp_path), RESULTS.parent)
    problems = generated.stale(TEXT + text, read(tmp_path), RESULTS)
    assert any("block latency" in p for p in problems)
    assert any("latency.png of" in p and "drawn from other data" in p for p in problems)
    (tmp_path / "latency.png").unlink()
    problems = generated.stale(text, read(tmp_path), RESULTS)
    assert any("latency.png of" in p and "missing" in p for p in problems)


def test_generating_twice_changes_nothing(recorded: Recorded) -> None:
    once = generated.generate(TEXT, recorded, RESULTS.parent)
    assert generated.generate(once, recorded, RESULTS.parent) == once


def test_pictures_are_linked_from_where_the_page_lies(recorded: Recorded) -> None:
    text = BLOCK.format("latency_plot")
    assert "](docs/pictures/" in generated.generate(text, recorded)
    assert "](pictures/" in generated.generate(text, recorded, ROOT / "docs")
    assert generated.shown(generated.generate(text, recorded), recorded)


def test_figures_without_a_record_are_refused() -> None:
    with pytest.raises(UsageError, match="must follow"):
        generated.passages(BLOCK.format("ranking") + "<!-- record: x -->\n")


def test_pictures_carry_the_hash_of_their_data(recorded: Recorded, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for path in recorded.directory.glob("*.json*"):
        shutil.copy(path, tmp_path)
    copy = read(tmp_path)
    names = ["latency.png", "gemm_layers.png"]
    written = generated.draw(copy, names)
    assert written == [tmp_path / name for name in names]
    source = generated.data_hash(tmp_path).encode()
    assert all(source in p.read_bytes() for p in written)
    assert source.decode() == generated.data_hash(recorded.directory), "not of the place"
    with pytest.raises(UsageError, match="nothing to draw absent.png"):
        generated.draw(copy, ["absent.png"])
    (tmp_path / ".traces.jsonl.lock").touch()
    assert source.decode() == generated.data_hash(tmp_path), "of the data alone"


def test_best_cells_are_bold_and_bars_escaped() -> None:
    frame = pd.DataFrame([["1", "0.5*/0.7"], ["2", "x|y"]], columns=["T", "a|b"])
    text = generated.table(Table(frame, left=0))
    assert "**0.5**/0.7" in text and "x\\|y" in text


def test_a_block_or_record_that_is_not_there(recorded: Recorded, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no block absent"):
        generated.generate("<!-- generated: absent -->\n<!-- /generated -->\n", recorded)
    with pytest.raises(UsageError, match="must name one record"):
        generated.record_of("# no record")
    shutil.copy(recorded.directory / "traces.jsonl", tmp_path)
    only_traces = read(tmp_path)
    with pytest.raises(UsageError, match="gemm_study.json"):
        generated.generate(BLOCK.format("gemm_study"), only_traces)


# --- what is said of sources and clocks -----------------------------------------------------------


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A record's data, to be changed."""
    for path in STUDY.glob("*.json*"):
        shutil.copy(path, tmp_path)
    return tmp_path


def change_json(path: Path, **fields) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def sources_are(monkeypatch, copy: Path, **changed: str) -> Recorded:
    """The record with its sources as those of now, but for the changed ones."""
    measured = json.loads((copy / "run.json").read_text())["solutions"]
    now = measured | {f"cutedsl_moe_fp8_{name}": value for name, value in changed.items()}
    monkeypatch.setattr(sources, "current", lambda: now)
    for path in copy.glob("gemm*.json"):
        change_json(path, solutions=measured)
    return read(copy)


def test_a_readme_that_does_not_say_which_sources_changed_is_stale(
    monkeypatch, copy: Path, capsys
) -> None:
    same = sources_are(monkeypatch, copy)
    text = f"<!-- record: {copy} -->\n" + "".join(
        BLOCK.format(n) for n in ("ranking", "gemm_study")
    )
    silent = generated.generate(text, same)
    assert "changed" not in silent
    changed = sources_are(monkeypatch, copy, v3="x", flat="x")
    said = generated.generate(text, changed)
    sentence = "the sources of flat and v3 have changed."
    assert " ".join(said.split()).count(f"Since this run {sentence}") == 1
    assert " ".join(said.split()).count(f"Since this measurement {sentence}") == 1

    monkeypatch.setattr(generated, "README", copy / "README.md")
    monkeypatch.setattr(generated, "PAGES", [copy / "README.md"])
    monkeypatch.setattr(sys, "argv", ["readme_tables.py", "--check"])
    (copy / "README.md").write_text(silent)
    assert readme_tables.main() == 1
    assert "README.md, block ranking: not what" in capsys.readouterr().out
    (copy / "README.md").write_text(said)
    assert readme_tables.main() == 0


def test_both_clocks_are_shown_and_named_where_the_record_has_them(copy: Path) -> None:
    path = copy / "traces.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for trace in lines:
        for clock in ("device", "harness"):
            trace["evaluation"]["correctness"]["extra"].pop(clock, None)
    path.write_text("".join(json.dumps(trace) + "\n" for trace in lines))
    text = BLOCK.format("ranking") + BLOCK.format("latency") + BLOCK.format("latency_plot")
    without = generated.generate(text + BLOCK.format("first_plot"), read(copy))
    assert "Time in ms, the fastest in bold" in without and "evice" not in without
    for trace in lines:
        figures = {"ms": 0.5, "p10": 0.49, "p90": 0.51, "calls": 100}
        extra = trace["evaluation"]["correctness"]["extra"]
        extra |= {"device": {"method": "graph", **figures}, "harness": figures}
    path.write_text("".join(json.dumps(trace) + "\n" for trace in lines))
    made = generated.generate(text + BLOCK.format("first_plot"), read(copy))
    made = " ".join(made.split())  # where lines end depends on the length of the path
    assert "Harness/device time in ms, the fastest in bold" in made
    assert "(replay of a CUDA graph)" in made and "/**0.500**" in made
    assert made.index("/latency.png") < made.index("/latency_device.png")


def test_the_gemms_are_those_that_flat_ships(copy: Path) -> None:
    """The configs beside them only say what would have been better."""
    path = copy / "gemm_layers.json"
    record = json.loads(path.read_text())
    mine = [r for r in record["results"] if r["variant"] == "flat"]
    for row in mine:
        row["vs_best_peer"] = 0.5
    mine[0]["vs_best_peer"] = 0.25
    beside = [r | {"variant": "flat, next larger", "us": r["us"] / 2} for r in mine[:2]]
    for row in beside:
        row["vs_best_peer"] = 2.0
    other = [r | {"variant": "v3", "vs_best_peer": 0.01} for r in mine]
    peers = [r for r in record["results"] if r["peer"]]
    path.write_text(json.dumps(record | {"results": mine + beside + other + peers}))
    text = generated.gemm_layers(read(copy)).replace("\n", " ")
    first = f"GEMM1 at T={mine[0]['tokens']}"
    assert (
        "the two GEMMs of flat, with the configs that it ships, are 0.50x the best peer in the "
        f"median, 0.25x at the least ({first}); with the best configs known 0.50x and 0.50x"
    ) in text
    assert "% of the rate of a kernel that only reads them" in text
    path.write_text(json.dumps(record | {"results": peers}))
    with pytest.raises(UsageError, match="no timing of ours"):
        generated.gemm_layers(read(copy))


def test_configurations_below_the_best_peer_are_counted() -> None:
    recorded = read(STUDY)
    rows = recorded.gemm["gemm_study"]["results"]
    below = sum(not r["peer"] and r["vs_best_peer"] < 1.0 for r in rows)
    assert f"{below} of them are below 1.0x" in generated.gemm_study(recorded)


def test_the_ladder_compares_with_the_generation_above(recorded: Recorded, monkeypatch) -> None:
    monkeypatch.setattr(generated, "GENERATIONS", ("v1", "none of ours", "fused"))
    *_, v1, missing, fused = generated.ladder(recorded).splitlines()
    uuid = next(uuid for length, uuid in recorded.main.workloads if length == 1)
    above, ms = (
        recorded.main.figure(uuid, f"cutedsl_moe_fp8_{name}", "device") for name in ("v1", "fused")
    )
    assert above and ms and above > ms
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (v1, missing, fused)]
    assert [cell[1] for cell in cells] == [f"{above:.3f}", "-", f"{ms:.3f} ({above / ms:.2f}x)"]
