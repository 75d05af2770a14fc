"""The figures of README and docs are those of the records that they name."""

import json
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest
from programs import call
from small_record import RATES, clocked, measurement, record, roofline, trace

from scripts.common import sources
from scripts.common.program import PACKAGE_DIR, PREFIX, ROOT, UsageError
from scripts.publishing import pages, rows, tables
from scripts.publishing.rankings import Recorded, read
from scripts.publishing.tables import Table

RECORD = ROOT / "results/nvidia-h100/2026-11-28"
BLOCK = "<!-- generated: {} -->\n\nx\n\n<!-- /generated -->\n"
FLAT = "cutedsl_moe_fp8_flat"
LADDER = PACKAGE_DIR / "ladder"


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    return read(RECORD)


@pytest.fixture
def copy(recorded: Recorded, tmp_path: Path) -> Path:
    """The record's data, to be changed."""
    return shutil.copytree(recorded.directory, tmp_path / "record")


def text_of(recorded: Recorded, *blocks: str, folder: Path = ROOT) -> str:
    """Return blocks as one line: their line breaks depend on the length of the path."""
    text = " ".join(pages.block(name, recorded, folder)[0] for name in blocks)
    return " ".join(text.split())


# --- the published figures ------------------------------------------------------------------------


def test_every_published_figure_is_what_the_records_say() -> None:
    """On failure: python3 run.py report --pages"""
    pytest.importorskip("matplotlib")
    done = call("report", "--pages", "--check")
    assert (done.stdout, done.returncode) == ("", 0)
    for page in pages.PAGES:
        assert "<!-- generated: " in page.read_text(encoding="utf-8")


FIGURES = {
    "roofline": ("latency", lambda row: row["tokens"] == 80),
    "times": ("latency", lambda row: row.get("clock") == "device" and row["tokens"] == 80),
    "bits": ("invariance", lambda row: "differ" in row),
    "sweep": ("sweep", lambda row: row.get("clock") == "device"),
    "sweep_engines": ("sweep_engines", lambda row: row.get("clock") == "device"),
    "models": ("models", lambda row: row.get("clock") == "device" and not row["peer"]),
    "gemm_layers": ("gemm_layers", lambda row: row["subject"] == "flat"),
    "gemm_study": ("gemm_study", lambda row: row["peer"]),
    "served": ("served", lambda row: row["part"] == "decode"),
}


@pytest.mark.parametrize("step", ["v1", "v2", "v3", "flat", "fused", "fused_hifi"])
def test_the_ladder_says_what_the_record_does(step: str, recorded: Recorded) -> None:
    """Its page, and each step's docstring, which also goes into the packed solution."""
    (row,) = recorded.main.summary.query(f"solution == '{PREFIX}{step}'").itertuples()
    call_ms, gpu_ms = f"{row.harness_mean_ms:.2f}", f"{row.device_mean_ms:.2f}"
    (file,) = LADDER.glob(f"v*_{step}.py" if step[0] == "f" else f"{step}_*.py")
    text = file.read_text("utf-8")
    assert f"{call_ms} ms a call" in text and f"{gpu_ms} of it on the GPU" in text
    (line,) = re.findall(rf"\({file.name}\).*", (LADDER / "README.md").read_text("utf-8"))
    assert re.search(rf"\| {call_ms}( \(\S+x\))? \| {gpu_ms}( \(\S+x\))? \|$", line)


def test_the_ladder_says_where_v3_is_slower_than_v2(recorded: Recorded) -> None:
    """Its GEMMs alone, the sum of its kernels' times, and flat as a graph, in us."""
    text = " ".join((LADDER / "README.md").read_text("utf-8").split())
    (of_v3,) = re.findall(r"^\| v3 .*", pages.block("ladder", recorded, ROOT)[0], re.M)
    ratios = re.findall(r"\((0\.\d+x)\)", of_v3)
    assert "at T=80 and 901, {} and {} (".format(*ratios) in text
    f = tables.gemm_frame(recorded.rows, "gemm_layers").query("subject == 'v3' and tokens == 80")
    ms = recorded.main.results.query("tokens == 80").set_index("solution").device
    figures = 1e3 * ms[f"{PREFIX}v3"], f.us.sum(), 1e3 * ms[FLAT]
    for words, us in zip(("sum is {} us", "take {}.", "takes {} us"), figures, strict=True):
        assert words.format(round(us)) in text


@pytest.mark.parametrize("name", FIGURES)
def test_a_changed_figure_of_a_row_is_noticed(
    name: str, recorded: Recorded, tmp_path: Path
) -> None:
    """Change one figure in each measurement that the pages show."""
    block, chosen = FIGURES[name]
    recorded_rows = recorded.rows
    info = json.loads((recorded.directory / "run.json").read_text("utf-8"))
    traces = map(json.loads, (recorded.directory / "traces.jsonl").read_text("utf-8").splitlines())
    traces = [t for t in traces if t["workload"]["axes"]["seq_len"] == 80]

    def text(lines: list[dict]) -> str:
        measurement_lines = [recorded_rows.measurements[name], *lines]
        return text_of(read(record(tmp_path, traces, measurement_lines, **info)), block)

    lines = recorded_rows.rows_of(name)
    field = "differ" if name == "bits" else "value"
    changed = [row | {field: 2 * row[field] + 1} if chosen(row) else row for row in lines]
    assert changed != lines and text(changed) != text(lines)


def test_a_changed_page_picture_or_row_fails_the_check(
    copy: Path, recorded: Recorded, monkeypatch
) -> None:
    pytest.importorskip("matplotlib")
    lines = (copy / rows.FILE).read_text().splitlines(keepends=True)
    page, other = copy.parent / "README.md", copy.parent / "other.md"
    monkeypatch.setattr(pages, "README", page)
    monkeypatch.setattr(pages, "PAGES", [page, other])
    page.write_text(
        f"<!-- record: {copy} -->\n" + BLOCK.format("latency") + BLOCK.format("latency_plot")
    )
    small = record(copy.parent / "small", [trace(FLAT, 7, 1.0)])
    ladders = [f"<!-- record: {run} -->\n" + BLOCK.format("ladder") for run in (small, copy)]
    other.write_text("".join(ladders))

    def check() -> list[str]:
        done = call("report", "--pages", "--check")
        assert done.returncode == bool(done.stdout)
        return done.stdout.splitlines()

    stale = [line.split(":")[0] for line in check()]
    missing = f"latency.svg in {copy}"
    ladder = "other.md, block ladder"
    stale_blocks = ["README.md, block latency", "README.md, block latency_plot", ladder, ladder]
    assert stale == [*stale_blocks, missing]
    assert call("report", "--pages").stdout == f"{copy / 'latency.svg'}\n"
    written = page.read_text()
    assert check() == []
    page.write_text(re.sub(r"\d %", lambda m: f"{(int(m[0][0]) + 1) % 10} %", written, count=1))
    assert [line.split(": not what ")[0] for line in check()] == ["README.md, block latency"]
    page.write_text(written)
    last = json.loads(lines[-1])  # which is in no block here
    (copy / rows.FILE).write_text("".join(lines[:-1]) + json.dumps(last | {"value": 5.0}) + "\n")
    assert check() == [f"{missing}: drawn from other data"]
    (copy / "latency.svg").unlink()
    assert check() == [f"{missing}: missing"]
    assert page.read_text() == written, "a check writes nothing"
    third = record(copy.parent / "third", [trace(FLAT, 7, 1.0)])
    assert call("report", "--pages", "--record", third).returncode == 0
    named = [re.findall("record: (.*) -->", path.read_text()) for path in (page, other)]
    names = [[Path(path).name for path in paths] for paths in named]
    assert names == [["third"], ["small", "third"]], "in place of that of the README alone"


def test_pictures_are_linked_from_where_the_page_lies(recorded: Recorded) -> None:
    assert "](docs/pictures/" in text_of(recorded, "latency_plot")
    assert "](pictures/" in text_of(recorded, "latency_plot", folder=ROOT / "docs")


def test_the_hash_in_a_picture_is_of_the_data_alone(copy: Path, recorded: Recorded) -> None:
    """The hash depends neither on the place nor on other files there."""
    (copy / ".traces.jsonl.lock").touch()
    assert pages.data_hash(copy) == pages.data_hash(recorded.directory)


def test_what_cannot_be_generated_is_refused(tmp_path: Path, monkeypatch) -> None:
    only_traces = read(record(tmp_path, [trace("x", 7, 1.0)]))
    (page := tmp_path / "page.md").write_text(BLOCK.format("ranking") + "<!-- record: x -->\n")
    monkeypatch.setattr(pages, "PAGES", [page])
    with pytest.raises(UsageError, match="page.md, block ranking: no <!-- record: "):
        pages.publish(check=True)
    with pytest.raises(UsageError, match="no block absent; there are first_picture, "):
        text_of(only_traces, "absent")


@pytest.mark.parametrize("name", [name for name, block in pages.BLOCKS.items() if block.needs])
def test_a_block_says_that_its_measurement_is_not_recorded(name: str, tmp_path: Path) -> None:
    assert text_of(read(record(tmp_path, [trace("x", 7, 1.0)])), name) == "Not recorded."


def test_best_cells_are_bold_and_bars_escaped() -> None:
    frame = pd.DataFrame([["1", "0.5*/0.7"], ["2", "x|y"]], columns=["T", "a|b"])
    text = pages.table(Table(frame, left=0))
    assert "**0.5**/0.7" in text and "x\\|y" in text


# --- what is said -----------------------------------------------------------------------------


def test_which_sources_have_changed_is_said(tmp_path: Path, monkeypatch) -> None:
    now = {FLAT: "1", "cutedsl_moe_fp8_v3": "1"}
    monkeypatch.setattr(sources, "current", lambda *_: now)
    sweep = [
        {"subject": name, "hash": "1", "tokens": 7, "active": 7, "pairs": 7, "clock": "device",
         "value": 0.1, "roofline": 0.05}
        for name in now
    ]  # fmt: skip
    options = {"libs": {"solution_hash": "1"}}
    traces = [trace(name, 7, 1.0, **options) for name in (*now, "cutedsl_moe_fp8_v1")]
    recorded = read(record(tmp_path, traces[:2], measurement("sweep", sweep)))
    assert "changed" not in text_of(recorded, "ranking", "sweep")
    recorded = read(record(tmp_path, [*traces, trace("x", 7, 1.0)], measurement("sweep", sweep)))
    now |= {FLAT: "2", "cutedsl_moe_fp8_v1": "1"}
    text = text_of(recorded, "ranking", "sweep")
    assert text.count("Since this run the source of flat has changed.") == 1
    assert text.count("Since this measurement the source of flat has changed.") == 1


def test_bits_are_of_the_sources_that_were_timed(tmp_path: Path) -> None:
    bit = {"subject": FLAT, "part": "again", "compared": 7, "differ": 1}
    bits = [bit | {"hash": "1", "tokens": 7, "largest": 1e-3},
            bit | {"hash": "2", "tokens": 80, "largest": 0.5}]  # fmt: skip
    traces = [trace(FLAT, 7, 1.0, libs={"solution_hash": "1"})]
    text = text_of(read(record(tmp_path, traces, measurement("bits", bits))), "invariance")
    assert ", T=7. Where not" in text and "difference of any token is 1.0e-03." in text


def test_every_engine_that_served_is_named(tmp_path: Path) -> None:
    case = {"model": "m", "layers": 2, "gpus": 1, "parallel": "tensor", "part": "decode", "size": 1,
            "unit": "ms a step", "spread": 0.01, "engine_version": "1"}  # fmt: skip
    measurements = []
    for engine, name, ms in (("vllm", "served", 3.0), ("sglang", "served_sglang", 4.0)):
        both = [case | {"subject": "engine", "engine": engine, "value": ms},
                case | {"subject": "ours", "engine": engine, "value": 2.0}]  # fmt: skip
        measurements += measurement(name, both)
    recorded = read(record(tmp_path, [trace(FLAT, 7, 1.0)], measurements))
    text = text_of(recorded, "mean_gains")
    assert text.startswith("GPU A, vllm 1, sglang 1: speed-up over the best of the engine's own")
    assert "| m, 2 layers, in vLLM | 1.50x | | m, 2 layers, in SGLang | 2.00x |" in text


def test_a_kernel_that_begins_before_the_last_one_ends_overlaps_on_the_time_line(tmp_path: Path):
    parts = (("route", 3.0, None), ("gemm1", 40.0, -2.0), ("combine", 6.0, 1.0))
    rows_of = [
        {"subject": "cutedsl_moe_fp8_fused", "tokens": tokens, "part": part, "kernel": part,
         "value": us, "unit": "us"} | ({} if gap is None else {"gap": gap})
        for tokens in (1, 901) for part, us, gap in parts
    ]  # fmt: skip
    span = {"subject": "cutedsl_moe_fp8_fused", "tokens": 1, "part": "span", "value": 48.0}
    recorded = read(
        record(tmp_path, [trace(FLAT, 7, 1.0)], measurement("kernels", [*rows_of, span]))
    )
    f = tables.launches(recorded.rows, "cutedsl_moe_fp8_fused", 1)
    assert f.to_numpy().tolist() == [
        ["route", 0.0, 3.0], ["gemm1", 1.0, 41.0], ["combine", 42.0, 48.0]
    ]  # fmt: skip
    (picture,) = pages.timeline(recorded)
    (first, _) = picture.draw().axes
    bars = [(bar.get_x(), bar.get_width()) for bar in first.patches]
    assert bars == [(0.0, 3.0), (1.0, 40.0), (42.0, 6.0)]


def test_what_failed_stands_below_a_sweep(tmp_path: Path) -> None:
    figures = {"clock": "device", "value": 0.1}, {"error": "no|room"}, {"error": "no|room"}
    same = {"subject": FLAT, "active": 7, "pairs": 7, "roofline": 0.05}
    rows_of = [same | {"tokens": 2**n} | figure for n, figure in enumerate(figures)]
    for count, failed in ((1, ""), (3, "Failed: flat at T=2, 4 (no\\|room).")):
        run = record(tmp_path, [trace(FLAT, 7, 1.0)], measurement("sweep", rows_of[:count]))
        text = text_of(read(run), "sweep")
        assert failed in text and ("Failed" in text) == (count > 1)


def test_both_clocks_are_shown_and_named_where_the_record_has_them(tmp_path: Path) -> None:
    blocks = ("short_ranking", "ranking", "latency", "latency_plot", "first_ranking")
    without = text_of(read(record(tmp_path, [trace(FLAT, 7, 1.0)])), *blocks)
    assert "Time in ms, the fastest in bold" in without and "evice" not in without
    assert "so no roofline: over the fastest." in without
    assert "The time on the GPU alone is not recorded." in without
    both = text_of(read(record(tmp_path, [clocked(FLAT, 7, 1.0, 0.5)], roofline())), *blocks)
    assert "Harness/device time in ms, the fastest in bold; roofline: a measured read" in both
    assert both.count("(replay of a CUDA graph)") == 2 and "**1.000**/**0.500**" in both
    assert "Time on the GPU alone over the roofline: flat" in both
    assert "Harness: host included; device: the GPU alone." in both


def gemms(
    *subjects: tuple[str, float], n: int = 4096, k: int = 7168, length: int = 7
) -> list[dict]:
    """Rows of one GEMM: subjects with their us, of a peer 10.0 us."""
    counts = {
        "experts": 32,
        "active": pages.MANY_EXPERTS,
        "pairs": 40,
        "rows": 2.0,
        "tokens": length,
    }
    ours = [{"subject": name, "value": us, "peer": False} for name, us in subjects]
    peer = {"subject": "deepgemm", "value": 10.0, "peer": True}
    return [counts | {"n": n, "k": k, "roofline": 5.0, "read": 5.0} | row for row in (*ours, peer)]


def test_the_gemms_are_those_that_flat_ships(tmp_path: Path) -> None:
    """The configs beside them only say what would have been better."""

    def sentence(*rows_of: dict) -> str:
        gemm_layers = measurement("gemm_layers", list(rows_of), rates=RATES)
        return text_of(read(record(tmp_path, [trace(FLAT, 7, 1.0)], gemm_layers)), "gemm_layers")

    first = gemms(("flat", 40.0), ("flat, next larger", 20.0), ("v3", 1.0))
    second = gemms(("flat", 12.5), ("flat, next larger", 25.0), n=7168, k=2048)
    third = gemms(("flat", 20.0), length=80)
    assert (
        "On the rows of the 2 workloads (flat rows, measure gemm --layers) the two GEMMs of "
        "flat, with the configs that it ships, are 0.50x the best peer in the median, 0.25x at "
        "the least (GEMM1 at T=7); with the best configs known 0.50x and 0.50x. From 16 active "
        "experts on, where reading bounds it, GEMM1 reads its weights at 12 to 25 % of the rate "
        "of a kernel that only reads them."
    ) in sentence(*first, *second, *third)
    assert sentence(first[-1]) == "Not recorded.", "without a timing of ours beside a peer's"
    of_grid = measurement("gemm_study", [*first, *second, *gemms(("flat", 5.0))], rates=RATES)
    study = text_of(read(record(tmp_path, [trace(FLAT, 7, 1.0)], of_grid)), "gemm_study")
    assert "the median is 0.80x, the least 0.25x; 2 of them are below 1.0x." in study


def test_folded_tables_are_in_the_pages_of_whole_blocks_alone(recorded: Recorded) -> None:
    for name, whole in (("gemm_study", False), ("served", True)):
        tables_of = [p for p in pages.BLOCKS[name].make(recorded) if isinstance(p, Table)]
        folded = [table for table in tables_of if table.folded]
        assert pages.BLOCKS[name].whole == whole and folded
        text = pages.block(name, recorded, ROOT)[0]
        assert [pages.table(table) in text for table in folded] == [whole] * len(folded)


def test_the_first_screen_is_short() -> None:
    text = pages.README.read_text(encoding="utf-8")
    assert len(text.split()) <= 650 and len(re.findall(r"\d+\.\d+", text)) <= 40
    blocks = {match["name"]: match[0] for match in pages.MARK.finditer(text)}
    assert "first_picture" in blocks
    lines = [line for line in blocks["first_ranking"].splitlines() if line.startswith("|")]
    assert 2 < len(lines) <= 2 + 6 and lines[0].count("|") == 5 + 1
    assert "noisy" not in blocks["first_ranking"].lower()


def test_the_ladder_compares_with_the_generation_above(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(pages, "GENERATIONS", ("v1", "none of ours", "fused"))
    traces = [
        clocked(f"cutedsl_moe_fp8_{n}", 80, 9.0, ms) for n, ms in {"v1": 3, "fused": 2}.items()
    ]
    (table,) = pages.ladder(read(record(tmp_path, traces)))
    assert list(table.frame) == ["", "T=80"]
    assert list(table.frame["T=80"]) == ["3.000", "-", "2.000 (1.50x)"]
    assert pages.ladder(read(record(tmp_path, traces[:1]))) == [], "one generation"
