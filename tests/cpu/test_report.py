"""The report: complete, self-contained, escaped, and clear about what a record lacks."""

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from markers import more
from test_rank import clocked, trace, write

from scripts.common.command_line import UsageError
from scripts.common.project import ROOT, short_name
from scripts.pack import sources
from scripts.programs import report as program
from scripts.report import generated, report
from scripts.table import recorded as recorded_module
from scripts.table import tables
from scripts.table.recorded import find_run, read

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

RECORD = ROOT / "results" / "nvidia-h200" / "2026-11-25"
RATES = {"copy_bytes_per_s": 3e12, "read_bytes_per_s": 4e12, "fp8_flops_per_s": 1.5e15}
FLOORS = {
    "hardware": "GPU A",
    "floors": RATES,
    "workloads": [
        {"uuid": "aaaa0000", "tokens": 7, "hit": 2, "active": 7, "pairs": 7, "max": 1},
        {"uuid": "bbbb0000", "tokens": 80, "hit": 48, "active": 28, "pairs": 109, "max": 9},
    ],
}
EVIL = "<script>alert(1)</script>"


class Page(HTMLParser):
    """Tags that never close, ids, tables and what would be loaded, of a page."""

    VOID = {"meta", "br", "wbr", "link", "img", "input"}

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.loads: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        named = dict(attrs)
        self.ids += [named["id"] or ""] if "id" in named else []
        for key in ("src", "href", "xlink:href"):
            self.loads += [named[key] or ""] if key in named else []
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("style", "script"):
            return
        self.words += data
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data


def directory(path: Path, traces: list[dict], **files: Any) -> Path:
    write(path / "traces.jsonl", traces)
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def some_run(path: Path, **files: Any) -> Path:
    traces = [
        trace("cutedsl_moe_fp8_flat", 7, 1.0, extra={"matched_ratio": 0.95, "cosine": 0.999}),
        trace("cutedsl_moe_fp8_flat", 80, 2.0),
        trace("peer_a", 7, 2.0),
        trace("peer_a", 80, 1.0),
        trace("peer_b", 7, None, status="RUNTIME_ERROR", log=f"RuntimeError: {EVIL}\n"),
    ]
    return directory(path, traces, **files)


def page_of(path: Path) -> tuple[str, Page]:
    text = report.write(path).read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    return text, page


@pytest.fixture(scope="module")
def record_page(tmp_path_factory) -> str:
    out = tmp_path_factory.mktemp("page") / "report.html"
    return report.write(RECORD, out).read_text(encoding="utf-8")


def test_a_run_with_everything(record_page: str) -> None:
    """The recorded run: all sections, one file of less than a megabyte that loads nothing."""
    text, page = record_page, Page(record_page)
    assert len(page.ids) == len(set(page.ids))
    assert page.open == [] and len(text) < 1e6
    assert {"ranking0", "stages", "gemm", "environment"} <= set(page.ids)
    links = {load[1:] for load in page.loads if load.startswith("#")}
    assert links <= set(page.ids)
    pictures = [load for load in page.loads if load.startswith("data:image/svg+xml;base64,")]
    assert len(page.loads) == len(links) + len(pictures), "loads something"
    assert not re.search(r"@import|url\(", text)
    recorded = read(RECORD)
    # Latency by each clock, stages, and one for each record of the GEMM and of sweeps.
    assert len(pictures) == 3 + len(recorded.gemm) + len(recorded.sweeps)
    assert "color-scheme: light dark" in text and 'name="viewport"' in text
    assert "NVIDIA H200" in page.words and "580.159.04" in page.words
    latency = next(t for t in page.tables if "floor / best" in t[0])
    assert len(latency) == 1 + 19
    traces = [json.loads(line) for line in (RECORD / "traces.jsonl").read_text().splitlines()]
    flat = next(
        t["evaluation"]["performance"]["latency_ms"]
        for t in traces
        if t["solution"].endswith("_flat") and t["workload"]["uuid"].startswith("e05c6c03")
    )
    assert latency[1][:2] == ["1", "e05c6c03"]
    assert latency[1][latency[0].index("flat")].startswith(f"{flat:.3f}/")


def test_ratios_reasons_and_failures(tmp_path: Path) -> None:
    info = {"skipped": {"flashinfer_moe": "unsupported on sm_90 (needs sm_100/103)"}}
    _, page = page_of(some_run(tmp_path, run=info, floors=FLOORS))
    ranking = page.tables[0]
    assert ranking[0][-1] == "vs best peer" and ranking[1][1] == "flat"
    assert "flashinfer_moe: unsupported on sm_90 (needs sm_100/103)" in page.words
    latency = next(t for t in page.tables if "best peer / ours" in t[0])
    assert [row[-1] for row in latency[1:]] == ["2.00x", "0.50x"]
    failed = next(t for t in page.tables if "reason" in t[0])
    assert failed[1] == ["peer_b", "7", "aaaa0000", "RUNTIME_ERROR", EVIL]


def test_what_traces_say_is_escaped(tmp_path: Path) -> None:
    text, _ = page_of(some_run(tmp_path))
    assert EVIL not in text and "&lt;script&gt;alert(1)" in text
    libs = {"timing": EVIL, "tolerance": EVIL}
    text, _ = page_of(directory(tmp_path, [trace("x", 7, 1.0, hardware=EVIL, libs=libs)]))
    assert EVIL not in text and text.count("&lt;script&gt;alert(1)") > 3


def test_without_rates_there_is_no_floor_and_the_page_says_so(tmp_path: Path) -> None:
    text, page = page_of(some_run(tmp_path))
    assert "no floor is drawn" in page.words and "floor / best" not in text
    other = FLOORS | {"hardware": "GPU B"}
    text, page = page_of(some_run(tmp_path, floors=other))
    assert "no floor is drawn" in page.words, "rates of another GPU are no floor of this one"
    text, page = page_of(some_run(tmp_path, floors=FLOORS))
    assert "no floor is drawn" not in page.words and "floor / best" in page.words


def test_machines_stay_apart(tmp_path: Path) -> None:
    traces = [trace("x", 7, 1.0), trace("x", 7, 2.0, hardware="GPU B")]
    _, page = page_of(directory(tmp_path, traces, floors=FLOORS))
    assert {"ranking0", "ranking1"} <= set(page.ids)
    assert "GPU A: 1 workloads" in page.words and "GPU B: 1 workloads" in page.words
    assert "no floor is drawn" in page.words, "on the GPU that has none"


def test_solutions_that_all_failed_still_make_a_page(tmp_path: Path) -> None:
    traces = [trace("x", 7, None, status="TIMEOUT", log="Evaluation timeout after 1 seconds")]
    text, page = page_of(directory(tmp_path, traces))
    assert "TIMEOUT" in page.words and "<img" not in text


def test_latency_figure_draws_what_was_measured(tmp_path: Path) -> None:
    from scripts.report.plots import latency_figure

    recorded = read(some_run(tmp_path, floors=FLOORS))
    ranking = recorded.main
    (ax,) = latency_figure(ranking, recorded.floor_ms(ranking)).axes
    lines = {line.get_label(): line for line in ax.get_lines()}
    assert set(lines) == {"flat", "peer_a", "floor"}, "peer_b has no time"
    assert list(lines["flat"].get_ydata()) == [1.0, 2.0]
    assert list(lines["floor"].get_ydata()) == list(recorded.floor_ms(ranking).values())
    assert (lines["flat"].get_linestyle(), lines["peer_a"].get_linestyle()) == ("-", "--")


def test_stages_figure_stacks_the_stages() -> None:
    from scripts.report.plots import stages_figure

    stages = {"routing": 1.0, "gemm1": 2.0, "fused": 0.5, "end to end": 3.25}
    record = {
        "hardware": "GPU A",
        "results": [{"tokens": 7, "solutions": {"x": {"median_ms": stages}}}],
    }
    (ax,) = stages_figure(record).axes
    widths = [patch.get_width() for patch in ax.patches]
    assert widths == [1.0, 2.0, 0.5]
    assert [patch.get_x() for patch in ax.patches] == [0.0, 1.0, 3.0]
    (total,) = ax.get_lines()
    assert list(total.get_xdata()) == [3.25, 3.25]


def test_gemm_table_compares_the_variants_of_a_problem() -> None:
    same = {"experts": 8, "rows": 128, "n": 4096, "k": 7168, "tflops": 900.0, "gbytes": 3500.0}
    rows = [
        same | {"variant": "ours", "peer": False, "us": 70.0, "vs_best_peer": 0.9},
        same | {"variant": "p", "peer": True, "us": 63.0},
        same | {"variant": "ours", "peer": False, "us": 9.0, "rows": 1},
    ]
    table = tables.gemm_table(rows)
    header, cells = table.header, table.rows
    assert header[:6] == ["experts", "rows", "N", "K", "ours", "p"]
    assert cells == [
        ["8", "128", "4096", "7168", "70.0", "63.0*", "0.90x", "900", "3.50"],
        ["8", "1", "4096", "7168", "9.0*", "-", "-", "900", "3.50"],
    ]


def test_gemm_table_shows_the_shipped_config_and_the_best_known() -> None:
    same = {"experts": 8, "rows": 1, "n": 4096, "k": 7168, "tokens": 7}
    same |= {"tflops": 9.0, "gbytes": 3500.0}
    rows = [
        same | {"variant": "flat", "peer": False, "us": 50.0, "vs_best_peer": 0.9},
        same | {"variant": "v3", "peer": False, "us": 60.0, "vs_best_peer": 0.75},
        same | {"variant": "flat, next smaller", "peer": False, "us": 40.0, "vs_best_peer": 1.1},
        same | {"variant": "flat, next larger", "peer": False, "us": 70.0, "vs_best_peer": 0.6},
        same | {"variant": "p", "peer": True, "us": 45.0},
    ]
    table = tables.gemm_table(rows)
    header, cells = table.header, table.rows
    assert header[5:] == [
        *("flat", "v3", "p", "flat, best known", "best peer / ours", "TFLOP/s", "TB/s")
    ]
    assert cells[0][5:] == ["50.0", "60.0", "45.0*", "40.0", "0.90x", "9", "3.50"]


def test_environment_table_says_what_was_seen(tmp_path: Path) -> None:
    gpu = {"name": "GPU A", "driver": "580.1", "memory": "1 MiB", "sm_clock": "345 MHz"}
    source = {"commit": "abc", "modified": True, "hash": "0123"}
    info = {
        "environment": {"gpus": [gpu], "versions": {"triton": "3.6.0"}, "source": source},
        "gpus_after": [gpu | {"sm_clock": "1980 MHz"}],
        "command": ["--solutions", "x"],
    }
    recorded = read(some_run(tmp_path, run=info))
    found = dict(tables.environment_table(recorded).rows)
    assert found["environment gpus 0 sm_clock"] == "345 MHz"
    assert found["gpus_after 0 sm_clock"] == "1980 MHz"
    assert found["environment source commit"] == "abc"
    assert found["environment source modified"] == "True"
    assert found["environment versions triton"] == "3.6.0"
    assert found["command"] == "run.py bench --solutions x"


def test_missing_packages_are_one_line(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(report, "NEEDED", ("jinja2", "no_such_package"))
    with pytest.raises(UsageError, match="no_such_package"):
        report.write(some_run(tmp_path))


def test_which_run(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(recorded_module, "TRACES_DIR", tmp_path)
    with pytest.raises(UsageError, match="no run in"):
        find_run(None)
    for name in ("1", "2"):
        some_run(tmp_path / name)
    assert find_run(None) == tmp_path / "2"
    assert find_run(tmp_path / "1" / "traces.jsonl") == tmp_path / "1"
    with pytest.raises(UsageError, match="no traces.jsonl"):
        report.write(tmp_path)


def test_command_line(tmp_path: Path, monkeypatch, capsys) -> None:
    run = some_run(tmp_path / "run")
    out = tmp_path / "out" / "page.html"
    arguments = [str(run), "--out", str(out), "--peers", "peer_b"]
    monkeypatch.setattr(sys, "argv", ["report.py", *arguments])
    assert program.main() == 0
    assert str(out) in capsys.readouterr().out
    assert "vs best peer" not in Page(out.read_text()).words, "the only peer did not pass"


def test_short_names_are_told() -> None:
    assert short_name("cutedsl_moe_fp8_flat") == "flat"
    assert short_name("triton_moe") == "triton_moe"


# --- two clocks, sources, and the floor -----------------------------------------------------------


def clocked_run(path: Path, **files: Any) -> Path:
    flat = "cutedsl_moe_fp8_flat"
    traces = [clocked(flat, 7, 1.0, 0.1), clocked(flat, 80, 2.0, 1.0)]
    traces += [clocked("peer_a", 7, 2.0, 0.05), clocked("peer_a", 80, 1.0, 2.0)]
    return directory(path, traces, **files)


def test_device_times_have_their_figure_and_columns(tmp_path: Path) -> None:
    text, page = page_of(clocked_run(tmp_path, floors=FLOORS))
    assert text.count("<img") == 2, "latencies by each clock"
    assert "Latency, over the workloads" in page.words
    assert "Device time, over the workloads" in page.words
    (latency,) = [t for t in page.tables if "best peer / ours" in t[0]]
    assert latency[0][2:4] == ["reference", "floor"]
    shares = [("8 %/154 %", "2.00x/0.50x"), ("31 %/31 %", "0.50x/2.00x")]
    assert latency[0][-2] == "floor / best" and [tuple(r[-2:]) for r in latency[1:]] == shares
    flat = latency[0].index("flat")
    assert [row[flat] for row in latency[1:]] == ["1.000*/0.100", "2.000/1.000*"]
    short = dict(zip(*page.tables[0][:2], strict=True))
    assert (short["solution"], short["device ms"]) == ("flat", "0.550")
    assert short["of the limit"] == "54 %"  # 77 % of 0.1 ms and 31 % of 1.0 ms
    _, without = page_of(some_run(tmp_path / "without"))
    assert "device" not in without.words.lower()


def test_the_page_says_which_sources_have_changed(tmp_path: Path, monkeypatch) -> None:
    stages = {
        "hardware": "GPU A",
        "timing": "t",
        "iterations": 1,
        "environment": {"source": {"hash": "old"}},
        "results": [
            {"tokens": 7, "routing": "r", "solutions": {"x": {"median_ms": {"routing": 1.0}}}}
        ],
    }
    info = {"solutions": {"cutedsl_moe_fp8_flat": "1", "peer_a": "1", "peer_b": "1"}}
    now = {"cutedsl_moe_fp8_flat": "2"}
    monkeypatch.setattr(sources, "current", lambda: now)
    _, page = page_of(some_run(tmp_path, run=info, stages=stages))
    assert "the source of flat has changed" in page.words
    assert "the project's sources have changed" in page.words
    now["cutedsl_moe_fp8_flat"] = "1"
    stages["solutions"] = {"cutedsl_moe_fp8_flat": "1"}
    _, page = page_of(some_run(tmp_path, run=info, stages=stages))
    assert "changed." not in page.words and "not known" not in page.words


# --- names and files that are not as they should be -----------------------------------------------


@pytest.mark.parametrize("name", ["$\\frac$", *more("$x$", "a$b$c", "\\alpha_{", "x\x1b[31m")])
def test_names_are_no_formulas(tmp_path: Path, name: str) -> None:
    run = directory(tmp_path, [trace(name, 7, 1.0, hardware=f"GPU {name}")])
    text, page = page_of(run)
    shown = name.replace("\x1b", "\\x1b")
    assert shown in page.words and "\x1b" not in text
    assert generated.draw(read(run), ["latency.png"])


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("stages", {"results": 5}, r"stages\.json: "),
        ("stages", {"hardware": "G", "timing": "t", "iterations": 1, "results": [{}]}, "tokens"),
        ("gemm_layers", {"results": [{"us": 1.0}]}, r"gemm_layers\.json: "),
        ("gemm", [], r"gemm\.json: the whole"),
        ("run", {"environment": {"gpus": ["H200"]}}, r"run\.json: environment\.gpus\.0"),
        ("run", {"environment": None}, r"run\.json: environment"),
    ],
)
def test_a_broken_file_is_named_in_one_line(tmp_path: Path, file, content, said) -> None:
    run = some_run(tmp_path)
    (run / f"{file}.json").write_text(json.dumps(content))
    with pytest.raises(UsageError, match=rf"{said}[^\n]*$"):
        report.write(run)
    (run / f"{file}.json").write_bytes(b"\xff")
    with pytest.raises(UsageError, match=rf"{file}\.json is no JSON"):
        report.write(run)


def test_an_empty_run_json_still_makes_a_page(tmp_path: Path) -> None:
    _, page = page_of(some_run(tmp_path, run={}))
    assert "flat" in page.words


def test_several_peers_are_named(tmp_path: Path, monkeypatch, capsys) -> None:
    run = some_run(tmp_path / "run")
    monkeypatch.setattr(sys, "argv", ["report.py", str(run), "--peers", "peer_a", "peer_b"])
    assert program.main() == 0
    assert (run / "report.html").is_file()
