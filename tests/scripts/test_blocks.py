"""The figures of README and docs are those of the records that they name."""

import json
import operator
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest
from programs import call
from small_record import RATES, clocked, measurement, record, roofline, trace

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
    "roofline": ("ranking", lambda row: row["tokens"] == 80),
    "times": ("ranking", lambda row: row.get("clock") == "device" and row["tokens"] == 80),
    "bits": ("checks", lambda row: "differ" in row),
    "sweep": ("sweep", lambda row: row.get("clock") == "device"),
    "sweep_engines": ("sweep_engines", lambda row: row.get("clock") == "device"),
    "models": ("models", lambda row: row.get("clock") == "device" and not row["peer"]),
    "gemm_layers": ("gemm_layers", lambda row: row["subject"] == "flat"),
    "gemm_study": ("gemm_study", lambda row: row["peer"]),
    "batched": ("batched", lambda row: "value" in row),
    "served": ("mean_gains", lambda row: row["part"] == "decode"),
    "served_sglang": ("served_sglang", lambda row: row["part"] == "decode"),
    "served_trained": ("served_trained", lambda row: row["part"] == "loss"),
}
CHECKS = pages.Block(lambda recorded: tables.ranking_tables(recorded.main))
"""Tables of the HTML page that no block has."""


@pytest.mark.parametrize("step", ["v1", "v2", "v3", "flat", "fused", "fused_hifi"])
def test_the_ladder_says_what_the_record_does(step: str, recorded: Recorded) -> None:
    """Check its page and each step's docstring, which also goes into the packed solution."""
    (row,) = recorded.main.summary.query(f"solution == '{PREFIX}{step}'").itertuples()
    call_ms, gpu_ms = f"{row.harness_mean_ms:.2f}", f"{row.device_mean_ms:.2f}"
    (file,) = LADDER.glob(f"v*_{step}.py" if step[0] == "f" else f"{step}_*.py")
    text = file.read_text("utf-8")
    assert f"{call_ms} ms a call" in text and f"{gpu_ms} of it on the GPU" in text
    (line,) = re.findall(rf"\({file.name}\).*", (LADDER / "README.md").read_text("utf-8"))
    assert re.search(rf"\| {call_ms}( \(\S+x\))? \| {gpu_ms}( \(\S+x\))? \|$", line)


def test_the_ladder_says_where_v3_is_slower_than_v2(recorded: Recorded) -> None:
    """Compare its GEMMs alone, the sum of its kernels' times, and flat as a graph, in us."""
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
    """Change one figure in each measurement: on the HTML page, and in the pages that show it."""
    block, chosen = FIGURES[name]
    recorded_rows = recorded.rows
    info = json.loads((recorded.directory / "run.json").read_text("utf-8"))
    traces = map(json.loads, (recorded.directory / "traces.jsonl").read_text("utf-8").splitlines())
    traces = [t for t in traces if t["workload"]["axes"]["seq_len"] == 80]
    shown = any(f"<!-- generated: {block} -->" in page.read_text("utf-8") for page in pages.PAGES)

    def texts(lines: list[dict]) -> list[str]:
        measurement_lines = [recorded_rows.measurements[name], *lines]
        run = read(record(tmp_path, traces, measurement_lines, **info))
        html = pages.as_text("", ({"checks": CHECKS} | pages.BLOCKS)[block].make(run))
        return [html, text_of(run, block)] if shown else [html]

    lines = recorded_rows.rows_of(name)
    field = "differ" if name == "bits" else "value"
    changed = [row | {field: 2 * row[field] + 1} if chosen(row) else row for row in lines]
    assert changed != lines
    assert not any(map(operator.eq, texts(changed), texts(lines)))


def test_a_changed_page_picture_or_row_fails_the_check(
    copy: Path, recorded: Recorded, monkeypatch
) -> None:
    pytest.importorskip("matplotlib")
    lines = (copy / rows.FILE).read_text().splitlines(keepends=True)
    page, other = copy.parent / "README.md", copy.parent / "other.md"
    monkeypatch.setattr(pages, "README", page)
    monkeypatch.setattr(pages, "PAGES", [page, other])
    page.write_text(
        f"<!-- record: {copy} -->\n" + BLOCK.format("ranking") + BLOCK.format("latency_plot")
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
    stale_blocks = ["README.md, block ranking", "README.md, block latency_plot", ladder, ladder]
    assert stale == [*stale_blocks, missing]
    assert call("report", "--pages").stdout == f"{copy / 'latency.svg'}\n"
    written = page.read_text()
    assert check() == []
    page.write_text(re.sub(r"\d %", lambda m: f"{(int(m[0][0]) + 1) % 10} %", written, count=1))
    assert [line.split(": not what ")[0] for line in check()] == ["README.md, block ranking"]
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


def test_unknown_blocks_and_records_are_refused(tmp_path: Path, monkeypatch) -> None:
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


def test_bits_are_of_the_sources_that_were_timed(tmp_path: Path) -> None:
    bit = {"subject": FLAT, "part": "again", "compared": 7, "differ": 1}
    bits = [bit | {"hash": "1", "tokens": 7, "largest": 1e-3},
            bit | {"hash": "2", "tokens": 80, "largest": 0.5}]  # fmt: skip
    traces = [trace(FLAT, 7, 1.0, libs={"solution_hash": "1"})]
    table = tables.checks_table(read(record(tmp_path, traces, measurement("bits", bits))).main)
    assert table.note.endswith(" T=7; the largest relative difference of any token is 1.0e-03.")


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
    lines = first.get_xgridlines()[0], first.get_ygridlines()[0]
    assert [line.get_visible() for line in lines] == [True, False], "to read times by"


def test_failures_stand_below_a_sweep(tmp_path: Path) -> None:
    figures = {"clock": "device", "value": 0.1}, {"error": "no|room"}, {"error": "no|room"}
    same = {"subject": FLAT, "active": 7, "pairs": 7, "roofline": 0.05}
    rows_of = [same | {"tokens": 2**n} | figure for n, figure in enumerate(figures)]
    for count, failed in ((1, ""), (3, "Failed: flat at T=2, 4 (no\\|room).")):
        run = record(tmp_path, [trace(FLAT, 7, 1.0)], measurement("sweep", rows_of[:count]))
        text = text_of(read(run), "sweep")
        assert failed in text and ("Failed" in text) == (count > 1)


def test_both_clocks_are_shown_and_named_where_the_record_has_them(tmp_path: Path) -> None:
    blocks = ("ranking", "latency_plot", "first_ranking")
    one_clock = read(record(tmp_path / "one", [trace(FLAT, 7, 1.0)]))
    both_clocks = read(record(tmp_path / "both", [clocked(FLAT, 7, 1.0, 0.5)], roofline()))
    without, both = text_of(one_clock, *blocks), text_of(both_clocks, *blocks)
    assert "| solution | of | harness ms |" in without and "evice" not in without
    assert "so no roofline: over the fastest." in without
    assert "| solution | of | harness ms | device ms | of the limit |" in both
    assert "| flat | ours | 1.000 | 0.500 |" in both
    assert "Time on the GPU alone over the roofline: flat" in both
    assert "Harness: host included; device: the GPU alone." in both
    page = pages.as_text("", pages.ranking_parts(both_clocks.main))
    assert page.count("(replay of a CUDA graph)") == 2 and "1.0000*/0.5000*" in page


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


@pytest.mark.parametrize("name", ["gemm_study", "models", "served"])
def test_folded_tables_are_in_the_html_page_alone(name: str, recorded: Recorded) -> None:
    tables_of = [p for p in pages.BLOCKS[name].make(recorded) if isinstance(p, Table)]
    text = pages.block(name, recorded, ROOT)[0]
    assert {table.folded for table in tables_of} >= {True}
    assert [pages.table(table) in text for table in tables_of] == [not t.folded for t in tables_of]


def test_tables_of_the_pages_have_at_most_seven_columns() -> None:
    """The HTML page and rows.jsonl have the other columns."""
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        lines = page.read_text(encoding="utf-8").splitlines()
        rules = [line for line in lines if re.fullmatch(r"[|: -]+", line) and "|" in line]
        assert all(line.count("|") <= 7 + 1 for line in rules), page.name


def test_the_short_sweep_has_the_best_peer_by_name(tmp_path: Path) -> None:
    """Every second number of tokens; a call without a peer's or our time has a dash."""
    times = {"a": (1.0, 3.0, 5.0), "b": (2.0, 2.0, None), "p": (4.0, 1.5, None),
             "q": (3.0, None, None)}  # fmt: skip
    rows_of = [
        {"subject": name, "peer": name in "pq", "tokens": tokens, "active": 1, "pairs": 1,
         "roofline": 0.5, "clock": "device", "value": ms}
        for name, of_name in times.items()
        for tokens, ms in zip((1, 2, 4), of_name, strict=True)
        if ms is not None
    ]  # fmt: skip
    recorded = read(record(tmp_path, [trace(FLAT, 7, 1.0)], measurement("sweep", rows_of)))
    frame = tables.brief_sweep(recorded.rows, "sweep").frame
    assert list(frame) == ["T", "roofline", "a", "b", "best peer", "best peer / ours"]
    assert frame.to_numpy().tolist() == [
        ["1", "0.500", "1.0000", "2.0000", "3.0000 q", "3.00x"],
        ["4", "0.500", "5.0000", "-", "-", "-"],
    ]


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
