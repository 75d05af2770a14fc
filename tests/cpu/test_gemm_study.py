"""Autotune, ablation and plots of the GEMM off the GPU: what they try, leave out, say and draw."""

import json
import subprocess
import sys
import types

import pytest
import torch
from moe_fp8.kernels.architectures import ARCHITECTURES, BLACKWELL, HOPPER
from moe_fp8.kernels.limits import SMEM_BYTES
from moe_fp8.kernels.sm90.config import GemmConfig as Hopper
from moe_fp8.kernels.sm100.config import TMEM_COLUMNS
from moe_fp8.kernels.sm100.config import GemmConfig as Blackwell
from moe_fp8.layer import model

import run
from scripts.common.command_line import EXIT_FAILED, EXIT_OK, UsageError
from scripts.measure import (
    ablation,
    autotune,
    gpu,
    plot_gemm,
    shipped_configs,
    timing,
    tuning,
)
from scripts.measure.operands import weights
from scripts.measure.problems import LAYER_SHAPES, Problem, uneven_rows
from scripts.measure.variants import Reading, heuristic, ours

FLOORS = {"copy_bytes_per_s": 4e12, "read_bytes_per_s": 4e12, "fp8_flops_per_s": 1.5e15}


@pytest.mark.parametrize("program", ["gemm_bench", "autotune", "ablation", "plot_gemm"])
def test_help(program: str) -> None:
    result = subprocess.run(
        [sys.executable, str(run.programs()[program]), "--help"],
        env=run.environment(),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0 and "usage:" in result.stdout, result.stderr


@pytest.fixture(params=[HOPPER, BLACKWELL], ids=["hopper", "blackwell"])
def architecture(request, monkeypatch):
    """As on a GPU of each."""
    monkeypatch.setattr(gpu, "architecture", lambda: request.param)
    return request.param


def test_every_architecture_has_configs_to_try(monkeypatch) -> None:
    for architecture in ARCHITECTURES.values():
        monkeypatch.setattr(gpu, "architecture", lambda found=architecture: found)
        assert isinstance(architecture.config, tuning.tuning().GemmConfig)


TRIED = [0.5, *autotune.ROWS, 10000]


@pytest.mark.parametrize("rows", TRIED)
def test_candidates_are_legal_distinct_and_fit_the_rows(rows: float, architecture) -> None:
    found = autotune.candidates(rows)
    assert 8 <= len({str(c) for c in found}) == len(found) <= 100
    assert all(type(c) is type(architecture.config) for c in found)
    assert all(2 <= c.num_stages and c.smem_bytes <= SMEM_BYTES for c in found)
    largest = tuning.tuning().FEW_ROWS
    assert any(c.swap_ab for c in found) == (rows <= 2 * largest)
    assert any(not c.swap_ab for c in found) == (rows >= 16)
    if rows >= 16:
        assert {(c.cluster_m, c.cluster_n) for c in found} == {(1, 1), (2, 1), (1, 2)}
        assert any(c.dynamic for c in found) == (rows > 64)


@pytest.mark.parametrize("rows", TRIED)
def test_candidates_of_hopper(rows: float) -> None:
    found = autotune.candidates(rows)
    assert all(isinstance(c, Hopper) for c in found)
    if rows >= 16:
        assert any(c.overlap for c in found)
        assert any(c.unroll for c in found) == (rows > 64)


@pytest.mark.parametrize("rows", TRIED)
def test_candidates_of_blackwell(rows: float, monkeypatch) -> None:
    """All that its configs have, in every combination that memory has room for."""
    monkeypatch.setattr(gpu, "architecture", lambda: BLACKWELL)
    found = autotune.candidates(rows)
    assert all(c.tmem_columns <= TMEM_COLUMNS for c in found)
    swapped = [c for c in found if c.swap_ab]
    if swapped:
        assert {c.num_accumulators for c in swapped} == {2, 4}
        assert {(c.cluster_m, c.cluster_n) for c in swapped} == {(1, 1), (1, 2)}
    ways = {(1, 1, 1), (2, 1, 1), (2, 1, 2), (1, 2, 1)}
    for tile_n in (64, 128, 256) if rows >= 16 else ():
        wide = [c for c in found if c.tile_n == tile_n and not c.swap_ab]
        assert {(c.cluster_m, c.cluster_n, c.mma_ctas) for c in wide} == ways
        assert {c.num_accumulators for c in wide} == ({2} if tile_n == 256 else {2, 4})
        assert len({c.num_stages for c in wide}) > 1
    if rows > 64:
        # The heuristic's for many rows are among them.
        assert set(map(str, (BLACKWELL.choose(r, 4096, 7168) for r in (100, 200)))) <= set(
            map(str, found)
        )


def test_a_field_of_another_architecture_is_no_candidate(monkeypatch) -> None:
    """What a config class refuses by value is left out; what it does not know is a mistake."""
    monkeypatch.setattr(gpu, "architecture", lambda: BLACKWELL)
    module = types.SimpleNamespace(
        GemmConfig=Blackwell, candidates=lambda rows: [{"tile_m": 64}, {"tile_n": 64}]
    )
    monkeypatch.setattr(tuning, "MODULES", (module,))
    assert tuning.candidates(100) == [Blackwell(tile_n=64)]
    module.candidates = lambda rows: [{"overlap": True}]
    with pytest.raises(TypeError, match="overlap"):
        tuning.candidates(100)


def test_the_heuristics_choice_is_always_timed(architecture) -> None:
    for rows in autotune.ROWS:
        for even in (True, False):
            problem = autotune.problem_of(rows, 4096, 7168, None, even, 1)
            assert problem.experts == (32 if rows <= 128 else 8)
            assert problem.even or not even
            names = [str(c) for c in autotune.configs_of(problem)]
            assert names[0] == str(heuristic(problem))
            assert len(set(names)) == len(names)


def test_uneven_rows_keep_the_sum_and_spread() -> None:
    rows = uneven_rows(500, 32, 1)
    assert sum(rows) == 16000 and rows == uneven_rows(500, 32, 1)
    assert 1.3 < max(rows) / 500 < 3.0


@pytest.fixture
def timed(monkeypatch):
    """run_problem on the CPU with the model as kernel; config -> us, to be filled by the test."""
    spans: dict[str, float] = {}

    def clock(calls, repeats):
        return {name: ([spans.get(name, 20.0)] * repeats, "graph") for name in calls}

    cache = types.SimpleNamespace(L2_cache_size=2**20)
    source = weights
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: cache)
    monkeypatch.setattr(timing, "time_variants", clock)
    monkeypatch.setattr("moe_fp8.kernels.operations.grouped_gemm", model.grouped_gemm)
    monkeypatch.setattr(
        timing, "weights", lambda e, n, k, device, seed: source(e, n, k, "cpu", seed)
    )
    reading = Reading(lambda: None, torch.zeros(1))
    monkeypatch.setattr(timing, "readings", lambda x: [reading])
    return spans


def test_the_loss_of_the_heuristic_decides_the_status(timed, architecture, capsys) -> None:
    problem = autotune.problem_of(2, 128, 256, 4, True, 1)
    choice, other = (str(c) for c in autotune.configs_of(problem)[:2])
    timed.update({choice: 10.4, other: 10.0})
    rows, said = autotune.tune(problem, FLOORS, timing.Timing(2, 3), "flat")
    assert (said["best"], said["choice"]) == (other, choice)
    assert said["loss"] == pytest.approx(4.0) and "confirmed" not in said
    assert len(rows) == len(autotune.configs_of(problem))
    assert autotune.report([said], rows) == EXIT_OK
    assert "at most 5 %" in capsys.readouterr().out

    timed[choice] = 11.0
    rows, said = autotune.tune(problem, FLOORS, timing.Timing(2, 3), "batched")
    assert said["loss"] == pytest.approx(10.0) and said["confirmed"]
    assert autotune.report([said], rows) == EXIT_FAILED
    assert f"loses 10.0 % ({choice}; best: {other})" in capsys.readouterr().out
    assert len(autotune.table_row(said)) == len(autotune.HEADER)

    failed = [{**row} for row in rows if row["config"] != choice]
    lost = {**problem.describe(), **autotune.verdict(failed, choice)}
    assert lost["loss"] is None and autotune.report([lost], []) == EXIT_FAILED
    assert autotune.table_row(lost)[-1] == "not run"


def problem_at(rows: int, tokens: int = 80) -> Problem:
    return Problem((rows,) * 4, 128, 256, tokens)


@pytest.mark.parametrize("tokens", [1, 80, 500, 700, 2000, 14107])
def test_an_ablation_changes_one_thing_and_explains_what_it_leaves_out(
    tokens: int, architecture
) -> None:
    problem = problem_at(max(1, tokens // 32), tokens)
    timed, left_out = ablation.variants_of(problem)
    base = shipped_configs.shipped("flat", problem)
    assert timed[:2] == [("base", base, "flat"), ("layout batched", base, "batched")]
    names = [name for name, *_ in timed] + [name for name, _ in left_out]
    assert len(set(names)) == len(names)
    assert {"cluster 1x1", "cluster 2x1", "cluster 1x2"} < set(names)
    assert {"tile_n 64", "tile_n 128", "stages 2", "stages max"} < set(names)
    assert any(n.startswith("swap_ab") for n in names)
    assert all(type(config) is type(architecture.config) for _, config, _ in timed)
    assert all(str(config) != str(base) for _, config, _ in timed[2:])
    assert all(reason for _, reason in left_out)


def ablated(tokens: int) -> tuple[dict, dict]:
    """(name -> config of what is timed, name -> reason of what is left out) on this GPU."""
    timed, left_out = ablation.variants_of(problem_at(max(1, tokens // 32), tokens))
    return {name: config for name, config, _ in timed}, dict(left_out)


def test_an_ablation_on_blackwell(monkeypatch) -> None:
    """What that back end has: accumulators, and CTAs of an MMA with the cluster that they need."""
    monkeypatch.setattr(gpu, "architecture", lambda: BLACKWELL)
    timed, left_out = ablated(901)
    assert timed["base"].num_accumulators == 4 and left_out["accumulators 4"] == "is the base"
    assert [timed[f"accumulators {n}"].num_accumulators for n in (2, 3)] == [2, 3]
    assert left_out["accumulators 1"].startswith("accumulators=1: expected 0")
    assert (timed["mma_ctas 2"].mma_ctas, timed["mma_ctas 2"].cluster_m) == (2, 2)
    assert timed["cluster 2x1"].mma_ctas == 1 and timed["swap_ab on"].tile_m == 64
    assert timed["stages 2"].num_stages == 2 and left_out["stages max"] == "is the base"

    timed, left_out = ablated(14107)
    assert timed["base"].mma_ctas == 2 and left_out["cluster 2x1"] == "is the base"
    assert (timed["mma_ctas 1"].mma_ctas, timed["mma_ctas 1"].cluster_m) == (1, 2)
    assert {timed[f"cluster 1x{n}"].mma_ctas for n in (1, 2)} == {1}
    assert "at most 64 rows" in left_out["swap_ab on"] and "dynamic off" in timed
    assert "quantises" in ablated(80)[1]["tile_n 256"]
    assert {"overlap off", "unroll on"}.isdisjoint([*timed, *left_out])


def test_an_ablation_on_hopper() -> None:
    timed, left_out = ablated(14107)
    assert {"overlap on", "unroll off", "dynamic off"} <= {*timed, *left_out}
    assert "at most 128 rows" in left_out["swap_ab on"]


def test_an_ablation_as_tables(timed) -> None:
    problem = Problem((4,) * 2, 4096, 7168, 80)
    rows = [
        {**problem.describe(), "variant": "base", "config": "8x128", "us": 10.0},
        {**problem.describe(), "variant": "stages 2", "config": "8x128", "us": 20.0},
        {**problem.describe(), "variant": "unroll on", "config": "8x64", "error": "wrong"},
    ]
    rows = ablation.with_ratios(rows)
    assert [row.get("vs_base") for row in rows] == [1.0, 0.5, None]
    ((title, header, cells),) = ablation.tables(rows)
    assert "gemm1" in title and header == ["variant", "T=80"]
    assert cells == [
        ["base is", "8x128"],
        ["base", "10.0"],
        ["stages 2", "20.0 (0.50x)"],
        ["unroll on", "failed"],
    ]
    entries = [{"tokens": t, "variant": "x", "reason": "y"} for t in (1, 32, 1)]
    assert ablation.reasons(entries) == ["x (T=1, 32): y"]


def test_an_ablation_is_timed_and_checked(timed, architecture) -> None:
    plan, _ = ablation.variants_of(problem_at(4))
    timed["base"] = 10.0
    variants = [ours(*one) for one in plan]
    rows = timing.run_problem(problem_at(4), variants, FLOORS, timing.Timing(2, 3))
    assert all(row["calc_diff"] < 1e-6 for row in rows)
    assert {row["vs_base"] for row in ablation.with_ratios(rows)} == {1.0, 0.5}


def measured(problem: Problem, variant: str, us: float, best: float) -> dict:
    row = {**problem.describe(), "variant": variant, "peer": not variant.startswith("ours")}
    row.update(timing.figures(problem, [us], FLOORS, 200.0), vs_best_peer=best / us)
    return row


def record(tmp_path, name: str, rows: list[dict]):
    path = tmp_path / f"{name}.json"
    content = {"hardware": "GPU", "floors": FLOORS, "results": rows}
    path.write_text(json.dumps(content))
    return path


def test_plots_are_made_from_the_json(tmp_path, monkeypatch, capsys) -> None:
    pytest.importorskip("matplotlib")
    grid = [
        measured(Problem((m,) * e, n, 2048), name, us, 11.0)
        for m in (64, 128)
        for e in (1, 8)
        for n in (2048, 4096)
        for name, us in (("ours default", 10.0), ("sgl_kernel", 11.0))
    ]
    grid.append({**Problem((64,), 256, 256).describe(), "error": "wrong"})
    layers = [
        measured(Problem((m,) * 32, n, k, tokens), name, us * (1 + m / 50), 300.0)
        for n, k in LAYER_SHAPES.values()
        for m, tokens in ((1, 32), (4, 80), (500, 14107))
        for name, us in (("ours default", 260.0), ("sgl_kernel", 300.0))
    ]
    files = [record(tmp_path, "grid", grid), record(tmp_path, "layers", layers)]
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["plot_gemm", *map(str, files), "--output", str(out)])
    assert plot_gemm.main() == EXIT_OK
    assert capsys.readouterr().out.split() == [
        str(out / "gemm_grid.png"),
        str(out / "gemm_layers.png"),
    ]
    for path in out.iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")
    rows, head = plot_gemm.load(files)
    assert len(plot_gemm.grid_figure(rows, head["hardware"]).axes) == 2
    assert len(plot_gemm.layers_figure(rows, FLOORS, "GPU").axes) == 4  # two scales a panel


def test_a_file_that_is_no_measurement_is_a_usage_error(tmp_path) -> None:
    path = tmp_path / "x.json"
    for text in ("", "[]", '{"results": []}'):
        path.write_text(text)
        with pytest.raises(UsageError):
            plot_gemm.load([path])
