"""The ladder of the GEMM: its page, its configs, and each step in the emulator."""

import ast
import re
from dataclasses import asdict
from functools import cache
from pathlib import Path

import pytest
from markers import backends
from moe_fp8.kernels.configs import GemmConfigSm90, Schedule
from moe_fp8.kernels.heuristic_sm90 import choose
from programs import call

from scripts.common.program import EXIT_FAILED, EXIT_OK, EXIT_USAGE, PACKAGE_DIR
from scripts.measuring import emulate, gemm_ladder
from scripts.measuring.gemm_ladder import LADDER, configs
from scripts.publishing import rows

FOLDER = PACKAGE_DIR / "ladder"
LAYER, GEMM = ((FOLDER / page).read_text("utf-8") for page in ("README.md", "gemm.md"))
SYMBOL = r"`([\w/]+\.py):([\w.]+)`"
OF_LAYER = [(*symbol, "") for symbol in re.findall(SYMBOL, LAYER)]
OF_GEMM = re.findall(rf"{SYMBOL}(?:,\s+`([^`]+)`)?", GEMM)
"""File, symbol and quoted line of each reference."""


@cache
def source(path: Path, symbol: str) -> str:
    """Return the source of a class, a method or a function; an empty string if there is none."""
    text = path.read_text("utf-8")
    node: ast.AST = ast.parse(text)
    for name in symbol.split("."):
        found = [n for n in ast.iter_child_nodes(node) if getattr(n, "name", "") == name]
        if not found:
            return ""
        (node,) = found
    return ast.get_source_segment(text, node) or ""


@pytest.mark.parametrize(("file", "symbol", "line"), OF_LAYER + OF_GEMM)
def test_a_reference_names_code(file: str, symbol: str, line: str) -> None:
    path = next(p for p in (PACKAGE_DIR / file, FOLDER / file) if p.exists())
    text = source(path, symbol)
    assert text, f"{file} has no {symbol}"
    assert not line or [found.strip() for found in text.splitlines()].count(line) == 1


def test_every_step_of_the_page_has_its_reference_and_its_field() -> None:
    lines = re.findall(r"^\| (.+?) \| (.+?) \| `(\S.*?)` \| `.+?`, `.+?` \|", GEMM, re.M)
    names = {"Schedule": Schedule}
    steps = [(n, after.strip("-"), eval(f"dict({field})", names)) for n, after, field in lines]
    assert steps == [(step.name, step.after, step.fields) for step in LADDER]
    assert [symbol for _, symbol, line in OF_GEMM if not line] == ["choose"]
    assert len(OF_LAYER) > 10


def test_the_steps_lead_from_a_plain_config_to_the_shipped_ones() -> None:
    plain, made = GemmConfigSm90(), configs()
    last = {step.rows: made[step.name] for step in LADDER}
    shipped = {rows: choose(rows) for rows in (gemm_ladder.MANY, gemm_ladder.FEW)}
    assert last == shipped | {gemm_ladder.SOME: GemmConfigSm90(overlap=True, cluster_m=2)}
    for step in LADDER:
        before, after = asdict(made.get(step.after, plain)), asdict(made[step.name])
        assert {name for name in after if after[name] != before[name]} == step.fields.keys()


@backends("emulator")
def test_every_step_is_right_in_the_emulator(emulator) -> None:
    from scripts.measuring import gemm

    into = rows.Writer("x", "cpu", "m")
    gemm.emulate_ladder(into, 1)
    assert len(emulator.reports) == len(LADDER) == len(into.rows)
    assert not any(report.hazards for report in emulator.reports)
    assert all(row["calc_diff"] < 1e-6 and "error" not in row for row in into.rows)


@backends("emulator")
def test_a_step_that_promotes_wrongly_is_an_error(emulator) -> None:
    """Every product of two scales is a sum instead."""
    from mutants import all_of

    from scripts.measuring import gemm

    emulator.host.ptx_transform = all_of(lambda ptx: re.sub(r"\bmul(\.\w+)?\.f32", "add.f32", ptx))
    into = rows.Writer("x", "cpu", "m")
    gemm.emulate_ladder(into, 1)
    assert all(row["error"].startswith("wrong: calc_diff") for row in into.rows)


def test_the_program_without_a_gpu(monkeypatch, tmp_path: Path) -> None:
    """The emulator and its kernels have stand-ins."""
    from scripts.measuring import gemm

    def emulate_ladder(into: rows.Writer, seed: int) -> None:
        into.add({"rows": 84.0, "n": 512, "k": 1024}, "swapped", config="c", calc_diff=1e-15)
        into.add({"rows": 84.0, "n": 512, "k": 1024}, "overlap", config="c", error=wrong or None)

    targets: list[str] = []
    monkeypatch.setattr(emulate, "why_not", lambda: why_not)
    monkeypatch.setattr(emulate, "emulate", targets.append)
    monkeypatch.setattr(gemm, "emulate_ladder", emulate_ladder)
    run = lambda: call("measure", "gemm", "--ladder", "--out", tmp_path / rows.FILE)  # noqa: E731
    why_not, wrong = "no compiler", ""
    done = run()
    assert done.returncode == EXIT_USAGE and "no compiler" in done.stderr and not targets
    why_not = ""
    done = run()
    assert done.returncode == EXIT_OK and re.search(r"swapped +c +1\.0e-15", done.stdout)
    wrong = "deadlock"
    done = run()
    assert (
        done.returncode == EXIT_FAILED and "overlap at 84 rows, 512x1024: deadlock" in done.stderr
    )
    assert targets == ["sm_90a"] * 2
    assert "gemm_ladder" not in rows.read(tmp_path / rows.FILE).measurements, "no GPU's figures"
