"""The README's figures are those of the record that it names."""

import shutil
from pathlib import Path

import pytest
import readme_tables
import report_data
from common import ROOT, UsageError
from report_data import Recorded

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    return report_data.read(readme_tables.record_of(TEXT))


def test_readme_and_pictures_are_current(recorded: Recorded) -> None:
    """On failure: python3 run.py readme_tables"""
    assert readme_tables.stale(TEXT, recorded) == []
    assert len(readme_tables.BLOCK.findall(TEXT)) >= 5


def test_a_changed_figure_is_noticed(recorded: Recorded) -> None:
    (block,) = [m[0] for m in readme_tables.BLOCK.finditer(TEXT) if m[2] == "latency"]
    digit = block.rindex(" %") - 1
    changed = block[:digit] + str((int(block[digit]) + 1) % 10) + block[digit + 1 :]
    (problem,) = readme_tables.stale(TEXT.replace(block, changed), recorded)
    assert problem.startswith("README.md, block latency")


def test_a_changed_record_is_noticed(recorded: Recorded, tmp_path: Path) -> None:
    for path in recorded.directory.iterdir():
        shutil.copy(path, tmp_path)
    traces = tmp_path / "traces.jsonl"
    lines = traces.read_text().splitlines(keepends=True)
    traces.write_text("".join(lines[1:]))
    text = TEXT.replace(readme_tables.relative(recorded), tmp_path.as_posix())
    problems = readme_tables.stale(text, report_data.read(tmp_path))
    assert any("block latency" in p for p in problems)
    assert any("latency.png: drawn from other data" in p for p in problems)
    (tmp_path / "latency.png").unlink()
    problems = readme_tables.stale(text, report_data.read(tmp_path))
    assert any("latency.png: missing" in p for p in problems)


def test_generating_twice_changes_nothing(recorded: Recorded) -> None:
    once = readme_tables.generate(TEXT, recorded)
    assert readme_tables.generate(once, recorded) == once


def test_pictures_carry_the_hash_of_their_data(recorded: Recorded, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for path in recorded.directory.glob("*.json*"):
        shutil.copy(path, tmp_path)
    copy = report_data.read(tmp_path)
    written = readme_tables.draw(copy)
    assert {p.name for p in written} <= set(readme_tables.PICTURES)
    source = readme_tables.data_hash(tmp_path).encode()
    assert all(source in p.read_bytes() for p in written)
    assert source.decode() == readme_tables.data_hash(recorded.directory), "not of the place"


def test_best_cells_are_bold_and_bars_escaped() -> None:
    text = readme_tables.table(["T", "a|b"], [["1", "0.5*"], ["2", "x|y"]], left=0)
    assert "**0.5**" in text and "x\\|y" in text


def test_a_block_or_record_that_is_not_there(recorded: Recorded, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no block absent"):
        readme_tables.generate("<!-- generated: absent -->\n<!-- /generated -->\n", recorded)
    with pytest.raises(UsageError, match="must name one record"):
        readme_tables.record_of("# no record")
    shutil.copy(recorded.directory / "traces.jsonl", tmp_path)
    only_traces = report_data.read(tmp_path)
    for name, missing in (("stages", "stages.json"), ("gemm", "gemm.json")):
        with pytest.raises(UsageError, match=missing):
            text = f"<!-- generated: {name} -->\n<!-- /generated -->\n"
            readme_tables.generate(text, only_traces)
