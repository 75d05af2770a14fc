"""The report: complete, self-contained, escaped, and clear about what a record lacks."""

import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from programs import call
from small_record import RATES, clocked, measurement, record, roofline, trace

from scripts.common import hashes
from scripts.common.program import RESULTS_DIR, printable
from scripts.publishing import pages, plots, rankings, tables
from scripts.publishing.rankings import Ranking, read
from scripts.publishing.rows import Rows

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

RECORD = sorted(RESULTS_DIR.glob("*/*/rows.jsonl"))[-1].parent
EVIL = "<script>alert(1)</script>"


class Page(HTMLParser):
    """Tags that never close, ids, texts of pictures, tables and what would be loaded, of a page."""

    VOID = {"meta", "br", "wbr", "link", "img", "input"}

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.loads: list[str] = []
        self.alts: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        named = dict(attrs)
        self.ids += [named["id"]] if "id" in named else []
        self.loads += [named[key] for key in ("src", "href", "xlink:href") if key in named]
        self.alts += [named["alt"]] if tag == "img" else []
        if tag == "table":
            assert self.open[-2] == "div", "in a box of its own that scrolls"
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
            self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("style", "script"):
            return
        self.words += data
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data


def some_run(path: Path, *rows: list[dict], **info: Any) -> Path:
    traces = [
        trace("cutedsl_moe_fp8_flat", 7, 1.0, extra={"matched_ratio": 0.95, "cosine": 0.999}),
        trace("cutedsl_moe_fp8_flat", 80, 2.0),
        trace("peer_a", 7, 2.0),
        trace("peer_a", 80, 1.0),
        trace("peer_b", 7, None, status="RUNTIME_ERROR", log=f"RuntimeError: {EVIL}\n"),
    ]
    return record(path, traces, *rows, **info)


def page_of(path: Path) -> tuple[str, Page]:
    text = pages.write(path).read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    return text, page


def test_a_run_with_everything(tmp_path: Path) -> None:
    """A recorded run: all sections, one file of less than two megabytes that loads nothing."""
    assert call("report", RECORD, "--out", tmp_path / "report.html").returncode == 0
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    page, recorded = Page(text), read(RECORD)
    assert len(page.ids) == len(set(page.ids))
    assert page.open == [] and len(text) < 2e6
    heads = re.findall("<h2>(.*?)</h2>", unescape(text))
    titled = {block.title: block.needs for block in pages.BLOCKS.values() if block.title}
    measured = [title for title, needs in titled.items() if needs in recorded.rows]
    assert len(measured) > 8
    assert heads[0].startswith(recorded.main.hardware) and heads[1:] == [*measured, "Environment"]
    links = {load[1:] for load in page.loads if load.startswith("#")}
    assert {f"s{n}" for n in range(1, len(heads) + 1)} <= links <= set(page.ids)
    pictures = [load for load in page.loads if load.startswith("data:image/svg+xml;base64,")]
    assert len(page.loads) == len(links) + len(pictures), "loads something"
    assert not re.search(r"@import|url\(", text)
    # Two of the ranking, a call, the GEMMs on the workloads' rows, and each sweep.
    assert len(pictures) == 2 + 1 + 1 + len(pages.SWEEPS)
    assert all(len(alt) > 40 for alt in page.alts) and len(page.alts) == len(pictures)
    assert "color-scheme: light dark" in text and 'name="viewport"' in text
    hardware, (gpu, *_) = recorded.main.hardware, recorded.info["environment"]["gpus"]
    assert hardware in page.words and gpu["driver"] in page.words
    latency = next(t for t in page.tables if "roofline / best" in t[0])
    assert len(latency) == 1 + 19 and latency[1][:2] == ["1", "e05c6c03"]
    f = recorded.main.results
    (of_flat,) = f[(f.tokens == 1) & (f.solution == "cutedsl_moe_fp8_flat")].itertuples()
    assert latency[1][latency[0].index("flat")] == f"{of_flat.harness:.4f}/{of_flat.device:.4f}"


def test_the_page_has_every_table_of_the_results() -> None:
    """So docs/results.md may leave out any of them."""
    recorded = read(RECORD)
    text = pages.render(recorded)
    for name, block in pages.BLOCKS.items():
        if not block.needs or block.needs in recorded.rows:
            for table in (part for part in block.make(recorded) if isinstance(part, tables.Table)):
                cells = table.frame.to_numpy()
                assert f"<td>{printable(str(cells[0, -1]))}</td>" in text, name


def clocked_run(path: Path, *rows: list[dict]) -> Path:
    flat = "cutedsl_moe_fp8_flat"
    traces = [clocked(flat, 7, 1.0, 0.1), clocked(flat, 80, 2.0, 1.0)]
    traces += [clocked("peer_a", 7, 2.0, 0.05), clocked("peer_a", 80, 1.0, 2.0)]
    return record(path, traces, *rows)


def test_the_page_begins_with_the_verdict_and_its_pictures(tmp_path: Path, monkeypatch) -> None:
    """Then the short table. Long parts of the page are folded, and remarks say what is not known
    of the sources."""
    monkeypatch.setattr(hashes, "current", lambda *_: {"cutedsl_moe_fp8_flat": "2"})
    gemm = {"experts": 8, "active": 8, "pairs": 8, "rows": 1, "n": 4096, "k": 7168, "value": 9.0}
    gemms = [gemm | {"subject": n, "peer": n == "p", "roofline": 1.0} for n in ("ours", "p")]
    gemms[0] |= {"solution": "cutedsl_moe_fp8_flat", "hash": "1"}
    run = clocked_run(tmp_path, measurement("gemm_study", gemms, rates=RATES))
    text, page = page_of(run)
    verdict = '<p class="verdict">All 2 solutions passed on all 2 workloads.</p>'
    bars, lines = (
        "Time of one layer over the fastest</h3>",
        "Time of all solutions over the fastest",
    )
    marks = (verdict, "<nav>", "<h2>", bars, "<img", f"{lines}</h3>", "<table", "Speed-ups</h3>")
    places = [text.index(mark) for mark in marks]
    assert places == sorted(places) and text.count("<table", 0, places[-1]) == 1
    assert text.count("<img") == 2
    shown = re.sub(r"<details>.*?</details>", "", text, flags=re.DOTALL)
    assert text.count("<details>") == 1 and shown.count("<table") == text.count("<table") - 1
    (folded,) = re.findall(r"<summary>(.*?)</summary>", text)
    assert folded.endswith(", in us")
    assert re.findall("<h2>(.*?)</h2>", text)[1:] == ["The grouped GEMM with even rows"]
    assert "It is not known which sources of flat were measured." in page.words
    assert "Since this measurement the source of flat has changed" in page.words
    _, without = page_of(some_run(tmp_path / "without"))
    assert "device" not in without.words.lower() and "gpu alone" not in without.words.lower()


def test_without_a_gpu_the_page_begins_with_this_run_and_ends_with_the_first_recorded_ranks(
    tmp_path: Path, monkeypatch
) -> None:
    environment = {"time": "2026-01-02T03:04"}
    of_gpu = read(clocked_run(tmp_path / "gpu"))
    of_gpu.info["environment"] = environment
    monkeypatch.setattr(rankings, "recorded_runs", lambda definition: [of_gpu])
    libs = {"device": "cpu", "timing": "wall clock"}
    emulated = libs | {"emulated": "sm_90a"}
    traces = [
        *(trace(name, 7, 1.0, hardware="Some CPU", libs=libs) for name in "xy"),
        trace("x", 80, None, status="INCORRECT_NUMERICAL", hardware="Some CPU", libs=libs),
        trace("y", 80, 1.0, hardware="Some CPU", libs=libs),
        trace("x", 7, 0.0, reference=0.0, hardware="Some CPU", libs=emulated),
    ]
    run = record(tmp_path / "cpu", traces, skipped={"z": "no GPU"})
    text, page = page_of(run)
    assert re.findall('<p class="verdict">(.*?)</p>', text) == [
        "1 of 2 solutions passed on all 2 workloads (reference model), x on 1; the one solution "
        "passed on the one workload (kernels for sm_90a, emulated); nothing was timed; not run: "
        "z: no GPU."
    ]
    by = "outputs of the"
    assert re.findall("<h2>(.*?)</h2>", text) == [
        f"CPU (Some CPU), workloads of T=7, 80: {by} reference model",
        f"CPU (Some CPU), workloads of T=7: {by} kernels for sm_90a, emulated",
        "Recorded: GPU A: 2 workloads, 2 solutions",
        "Environment",
    ]
    own, of_record = text.split("<h2>Recorded")
    assert "INCORRECT_NUMERICAL" in own and "Recorded 2026-01-02" in of_record
    assert own.count("<img") == 0 and of_record.count("<img") == 1
    assert of_record.count("<table") == 2, "the first ranks and the environment"
    assert [row[0] for row in page.tables[-2]] == ["solution", "flat", "peer_a"]
    both = record(tmp_path / "both", [*traces, trace("x", 7, 1.0)])
    assert "not measured in this run" not in page_of(both)[0], "it has a GPU's"


def test_texts_of_traces_are_escaped(tmp_path: Path) -> None:
    libs = {"timing": EVIL, "tolerance": EVIL}
    text, _ = page_of(record(tmp_path, [trace("x", 7, 1.0, hardware=EVIL, libs=libs)]))
    assert EVIL not in text and text.count("&lt;script&gt;alert(1)") > 3
    text, page = page_of(some_run(tmp_path, skipped={"flashinfer_moe": EVIL}))
    assert f"not run: flashinfer_moe: {EVIL}" in page.words and EVIL not in text
    failed = next(t for t in page.tables if "reason" in t[0])
    assert failed[1] == ["peer_b", "7", "aaaa0000", "RUNTIME_ERROR", EVIL]


def test_without_rates_of_this_gpu_times_are_over_the_fastest_and_the_page_says_so(
    tmp_path: Path,
) -> None:
    text, page = page_of(some_run(tmp_path / "no rates"))
    assert "so no roofline: over the fastest" in page.words and "roofline / best" not in text
    traces = [trace("x", 7, 1.0), trace("x", 7, 2.0, hardware="GPU B")]
    _, page = page_of(record(tmp_path / "rates of GPU A", traces, roofline()))
    assert "GPU A: 1 workloads" in page.words and "GPU B: 1 workloads" in page.words
    assert page.words.count("so no roofline") == 1, "on the GPU that has none"
    assert page.words.count("roofline / best") == 1


def test_solutions_that_all_failed_still_make_a_page(tmp_path: Path) -> None:
    traces = [trace("x", 7, None, status="TIMEOUT", log="Evaluation timeout after 1 seconds")]
    text, page = page_of(record(tmp_path, traces))
    assert "TIMEOUT" in page.words and "<img" not in text
    assert re.findall("<h2>(.*?)</h2>", text)[1:] == [], "nothing was measured"


def lines_of(picture: pages.Picture) -> list[dict[str, Any]]:
    """Return the lines of each panel by their labels."""
    return [
        {line.get_label(): line for line in ax.get_lines() if line.get_label()[0] != "_"}
        for ax in picture.draw().axes
    ]


def latency_of(ranking: Ranking) -> list[dict[str, Any]]:
    (picture,) = pages.latency_pictures(ranking)
    return lines_of(picture)


def test_times_are_drawn_over_the_roofline(tmp_path: Path) -> None:
    ranking = read(some_run(tmp_path, roofline())).main
    (lines,) = latency_of(ranking)
    assert set(lines) == {"flat", "peer_a"}, "peer_b has no time"
    assert list(lines["flat"].get_ydata()) == list([1.0, 2.0] / ranking.limits.roofline)
    assert (lines["flat"].get_linestyle(), lines["peer_a"].get_linestyle()) == ("-", "--")
    gap = [trace("x", 7, 1.0), trace("x", 80, None, status="TIMEOUT"), trace("x", 901, 3.0)]
    (lines,) = latency_of(read(record(tmp_path / "gap", gap)).main)
    assert list(lines["x"].get_ydata()) == [1.0, 1.0], "one line, over the fastest"
    clocks = latency_of(read(clocked_run(tmp_path / "clocks", roofline())).main)
    assert [list(panel["flat"].get_ydata() * ranking.limits.roofline) for panel in clocks] == [
        pytest.approx([0.1, 1.0]), pytest.approx([1.0, 2.0])
    ]  # fmt: skip


def test_a_far_slower_solution_does_not_flatten_the_others(tmp_path: Path) -> None:
    times = {"fast": 1.0, "second": 1.2, "third": 3.0, "far": 30.0}
    traces = [trace(name, n, ms) for name, ms in times.items() for n in (7, 80)]
    (picture,) = pages.latency_pictures(read(record(tmp_path, traces, roofline())).main)
    assert set(lines_of(picture)[0]) == {"fast", "second", "third"}
    assert picture.note.endswith("Not drawn where it is far slower: far.")
    traces += [trace("fast", 901, 1.0), trace("second", 901, 1e3)]
    (picture,) = pages.latency_pictures(read(record(tmp_path, traces)).main)
    assert picture.draw().axes[0].get_ylim()[1] < 10, "one far slower time"


def test_the_bars_are_ours_and_the_fastest_peers_on_the_gpu(tmp_path: Path) -> None:
    """Whoever they are: a peer that joins the record joins the picture."""
    ours = dict.fromkeys(("ours", "slower"), False)
    times = {"ours": 1.0, "slower": 1.5} | {f"p{n}": 2.0 + n for n in range(5)} | {"humming": 1.2}
    traces = [clocked(name, n, 9.0, ms * n) for name, ms in times.items() for n in (7, 80)]
    traces += [clocked("half", 80, 9.0, 1.0)]
    (picture,) = pages.first_pictures(read(record(tmp_path, traces, roofline(), peers=ours)).main)
    figure = picture.draw()
    assert not figure.axes[1].axison, "no frame without bars"
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names == ["ours", "humming", "p0", "p1", "p2", "p3"]
    assert [ax.get_title() for ax in figure.axes if ax.patches] == ["80 tokens"], "7 is not shown"
    assert "80 tokens, of ours and of the peers humming, p0" in picture.alt
    assert picture.alt.endswith("ours is the fastest at each.")
    limit = read(tmp_path).main.limits.roofline.iloc[-1]
    labels = [text.get_text() for text in figure.axes[0].texts]
    assert labels[:2] == [f"{80.0 / limit:.2f}", f"{96.0 / limit:.2f}"]
    alone = read(record(tmp_path / "alone", [clocked("ours", 80, 9.0, 1.0)], peers=ours))
    assert pages.first_pictures(alone.main) == [], "no peer"


def test_pictures_of_long_names_are_not_cut(tmp_path: Path) -> None:
    """The legend has as many columns as fit."""
    names = [f"{'a_solution_with_a_long_name'}_{n}" for n in range(12)]
    traces = [trace(name, n, 1.0) for name in names for n in (7, 80)]
    (picture,) = pages.latency_pictures(read(record(tmp_path, traces)).main)
    figure = picture.draw()
    figure.draw_without_rendering()
    (legend,), page = figure.legends, figure.bbox
    extent = legend.get_window_extent()
    assert len(legend.get_texts()) == 12
    assert page.x0 <= extent.x0 and extent.x1 <= page.x1 and page.y0 <= extent.y0
    assert extent.y1 <= figure.axes[0].get_tightbbox().y0, "below the panel"


def test_a_picture_follows_the_readers_setting_and_repeats_its_bytes() -> None:
    (picture,) = pages.first_pictures(read(RECORD).main)
    text = plots.image(picture.draw, "some data").decode()
    assert "prefers-color-scheme: dark" in text and "some data" in text
    assert "triton_moe" in text, "text stays text"
    assert plots.image(picture.draw, "some data").decode() == text


def in_memory(name: str, rows: list[dict], **more: Any) -> Rows:
    head, *lines = measurement(name, rows, **more)
    return Rows({head["id"]: head}, lines)


def test_a_failure_is_no_time_and_replaces_none() -> None:
    """The last time counts. A subject without a time has no column, every case has a line."""
    rows: list[dict] = [
        {"subject": subject, "tokens": tokens} | outcome
        for subject, tokens, outcome in (
            ("x", 7, {"value": 1.0}), ("x", 7, {"value": 2.0}), ("x", 7, {"error": "no memory"}),
            ("y", 7, {"error": "no memory"}), ("y", 80, {"error": "no memory"}),
        )
    ]  # fmt: skip
    f = tables.wide(in_memory("gemm_layers", rows).frame("gemm_layers"), {"T": "tokens"}, None)
    assert [*f.columns] == ["x"]
    assert f.x.iloc[0] == 2.0 and f.x.isna().tolist() == [False, True]


def test_the_picture_of_gemms_has_a_panel_for_each_weight() -> None:
    case = {"experts": 8, "active": 8, "pairs": 8, "rows": 1.0, "roofline": 5.0}
    rows = [
        case | {"tokens": tokens, "n": n, "k": k, "subject": name, "peer": peer, "value": by * us}
        for name, peer, by in (("flat", False, 1), ("flat, next larger", False, 3), ("p", True, 2))
        for n, k in ((4096, 7168), (7168, 2048))
        for tokens, us in ((80, 8.0), (7, 10.0), (None, 9.0))
    ]
    f = tables.gemm_frame(in_memory("gemm_layers", rows, rates=RATES), "gemm_layers")
    (picture,) = pages.gemm_pictures(f)
    for panel in lines_of(picture):
        assert set(panel) == {"flat", "p"}
        assert list(panel["flat"].get_ydata()) == [2.0, 1.6]
        assert list(panel["p"].get_ydata()) == [4.0, 3.2]
    assert len(lines_of(picture)) == 2


def test_a_call_whose_tokens_are_quantised_before_is_not_compared() -> None:
    """The last counts of two figures for the same case."""
    times = (
        ("experts fp8", False, 1.0),
        ("experts bf16", False, 9.0),
        ("experts bf16", False, 4.0),
    )
    case = {"tokens": 7, "active": 1, "pairs": 1, "roofline": 2.0, "clock": "device"}
    rows = [
        case | {"subject": name, "peer": peer, "value": ms}
        for name, peer, ms in (*times, ("a peer", True, 6.0))
    ]
    (line,) = tables.sweep_table(in_memory("sweep", rows), "sweep").frame.to_dict("records")
    assert line == {
        "T": "7", "active": "1", "pairs": "1", "roofline": "2.000", "experts fp8": "-/1.0000",
        "experts bf16": "-/4.0000*", "a peer": "-/6.0000", "roofline / best": "-/50 %",
        "best peer / our best": "-/1.50x",
    }  # fmt: skip


BESIDE = [("flat, next smaller", False, 40.0), ("flat, next larger", False, 70.0)]
GEMMS = {
    "subjects of a problem": (
        [("ours", False, 70.0), ("p", True, 63.0)], {},
        {"experts": "8", "rows": "128", "N": "4096", "K": "7168", "ours": "70.0", "p": "63.0*",
         "best peer / ours": "0.90x", "TFLOP/s": "859", "TB/s": "3.58"},
    ),
    "a problem without a peer": (
        [("ours", False, 70.0), ("p", True, 63.0)], {"rows": 1.0, "pairs": 8},
        {"rows": "1", "N": "4096", "K": "7168", "ours": "9.0*", "p": "-", "best peer / ours": "-"},
    ),
    "the shipped config and the best known": (
        [("flat", False, 50.0), ("v3", False, 60.0), *BESIDE, ("p", True, 45.0)], {"tokens": 7},
        {"T": "7", "flat": "50.0", "v3": "60.0", "p": "45.0*", "flat, best known": "40.0",
         "best peer / ours": "0.90x"},
    ),
    "a config beside one that failed": (
        [BESIDE[1], ("v3", False, 60.0), ("p", True, 45.0)], {"tokens": 7},
        {"T": "7", "v3": "60.0", "p": "45.0*", "v3, best known": "60.0",
         "best peer / ours": "0.75x"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GEMMS)
def test_the_table_of_gemms_has(name: str) -> None:
    subjects, more, expected = GEMMS[name]
    same = {"experts": 8, "active": 8, "pairs": 1024, "rows": 128, "n": 4096, "k": 7168}
    same |= {"tokens": 7} if "tokens" in more else {}
    rows = [
        same | {"subject": subject, "peer": peer, "value": us, "roofline": 1.0}
        for subject, peer, us in subjects
    ]
    rows.append(rows[0] | {"rows": 1.0, "pairs": 8, "value": 9.0})
    f = tables.gemm_frame(in_memory("gemm_study", rows), "gemm_study")
    row = tables.gemm_table(f).frame.to_dict("records")[int("rows" in more)]
    assert row.items() >= expected.items()
    assert [column for column in row if column in expected] == list(expected)
    assert not any(", next" in column for column in row), "they only say what is best known"


def test_the_environment_is_what_was_seen(tmp_path: Path) -> None:
    info = {
        "environment": {
            "gpus": [{"sm_clock": "345 MHz"}],
            "versions": {"triton": "3.6.0"},
            "source": {"commit": "abc", "modified": True},
        },
        "gpus_after": [{"sm_clock": "1980 MHz"}],
        "command": ["--solutions", "x"],
    }
    _, page = page_of(some_run(tmp_path, **info))
    assert page.tables[-1][1:] == [
        ["environment gpus 0 sm_clock", "345 MHz"],
        ["environment versions triton", "3.6.0"],
        ["environment source commit", "abc"],
        ["environment source modified", "True"],
        ["gpus_after 0 sm_clock", "1980 MHz"],
        ["command", "run.py bench --solutions x"],
    ]


def test_missing_packages_are_one_line(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(pages, "NEEDED", ("jinja2", "no_such_package"))
    done = call("report", some_run(tmp_path))
    assert done.returncode == 2 and "without no_such_package: " in done.stderr


def test_the_run_is_the_given_one_or_the_latest(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(rankings, "RUNS_DIR", tmp_path)
    assert "no run in" in call("report").stderr
    runs = [some_run(tmp_path / name) for name in ("1", "2")]
    for run, arguments in ((runs[1], []), (runs[0], [runs[0] / "traces.jsonl"])):
        assert call("report", *arguments).returncode == 0
        assert [path.parent for path in tmp_path.glob("*/report.html")] == [run]
        (run / "report.html").unlink()
    assert "no traces.jsonl" in call("report", tmp_path).stderr


def test_the_page_of_a_record_is_not_written_among_the_results(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(pages, "RUNS_DIR", tmp_path / "runs")
    monkeypatch.setattr(pages, "RESULTS_DIR", tmp_path / "results")
    run = some_run(tmp_path / "results" / "gpu-a" / "2026-01-02")
    before = sorted(run.iterdir())
    assert pages.write(run) == tmp_path / "runs" / "gpu-a-2026-01-02" / "report.html"
    assert sorted(run.iterdir()) == before


def test_the_page_goes_where_it_is_told_and_compares_the_peers_that_are_named(
    tmp_path: Path,
) -> None:
    run, out = some_run(tmp_path / "run"), tmp_path / "out" / "page.html"
    assert str(out) in call("report", run, "--out", out, "--peers", "peer_b").stdout
    assert "vs best peer" not in Page(out.read_text()).words, "the only peer did not pass"


def test_names_are_no_formulas(tmp_path: Path) -> None:
    names = ["$\\frac$", "$x$", "a$b$c", "\\alpha_{", "x\x1b[31m"]
    gpu = "GPU " + " ".join(names)
    run = record(tmp_path, [trace(name, 7, 1.0, hardware=gpu) for name in names])
    text, page = page_of(run)  # with pictures of all names
    assert "\x1b" not in text
    for name in names:
        assert name.replace("\x1b", "\\x1b") in page.words
    assert pages.latency_pictures(read(run).main)
