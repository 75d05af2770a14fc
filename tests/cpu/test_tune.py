"""tune off the GPU: what it tries of GEMM and layer, how it judges, and what it says."""

import itertools

import pytest
import torch
from gpu.every_config import Job, jobs, shipped
from moe_fp8.kernels.architectures import ARCHITECTURES, BLACKWELL, HOPPER, of_target
from moe_fp8.kernels.limits import SMEM_BYTES
from moe_fp8.kernels.sm90 import heuristic as sm90
from moe_fp8.kernels.sm90.config import GemmConfig as Hopper
from moe_fp8.kernels.sm100 import heuristic as sm100
from moe_fp8.kernels.sm100.config import TMEM_COLUMNS
from moe_fp8.kernels.sm100.config import GemmConfig as Blackwell
from moe_fp8.problem import DEEPSEEK_V3, MoeInputs
from test_measure_gemm import FLOORS, kernel, no_gpu

from scripts.common.command_line import EXIT_FAILED, EXIT_OK
from scripts.data import rows
from scripts.measure import cases, configs, gemm, gpu, tune
from scripts.measure.gemm import Timing
from scripts.measure.gemm_problems import ROWS, Problem, uneven_rows
from scripts.measure.gemm_variants import heuristic, ladder
from scripts.programs import measure as program
from scripts.table.pivots import tuned_table

__all__ = ["kernel", "no_gpu"]  # fixtures


@pytest.fixture(params=[HOPPER, BLACKWELL], ids=["hopper", "blackwell"])
def architecture(request, monkeypatch):
    """As on a GPU of each."""
    monkeypatch.setattr(gpu, "architecture", lambda: request.param)
    return request.param


TRIED = [0.5, *ROWS, 10000]


@pytest.mark.parametrize("rows", TRIED)
def test_candidates_are_legal_distinct_and_fit_the_rows(rows: float, architecture) -> None:
    found = configs.candidates(rows, gpu.architecture())
    assert 8 <= len({str(c) for c in found}) == len(found) <= 100
    assert all(type(c) is type(architecture.config) for c in found)
    assert all(2 <= c.num_stages and c.smem_bytes <= SMEM_BYTES for c in found)
    largest = 128 if architecture is HOPPER else 64  # tile_m with swapped operands
    assert any(c.swap_ab for c in found) == (rows <= 2 * largest)
    assert any(not c.swap_ab for c in found) == (rows >= 16)
    if rows >= 16:
        assert {(c.cluster_m, c.cluster_n) for c in found} == {(1, 1), (2, 1), (1, 2)}
        assert any(c.dynamic for c in found) == (rows > 64)


@pytest.mark.parametrize("rows", TRIED)
def test_candidates_of_hopper(rows: float) -> None:
    found = configs.candidates(rows, gpu.architecture())
    assert all(isinstance(c, Hopper) for c in found)
    if rows >= 16:
        assert any(c.overlap for c in found)
        assert any(c.unroll for c in found) == (rows > 64)


@pytest.mark.parametrize("rows", TRIED)
def test_candidates_of_blackwell(rows: float, monkeypatch) -> None:
    """All that its configs have, in every combination that memory has room for."""
    monkeypatch.setattr(gpu, "architecture", lambda: BLACKWELL)
    found = configs.candidates(rows, gpu.architecture())
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

    def tried(**space) -> list:
        monkeypatch.setitem(configs.SPACES, Blackwell, lambda rows: [space])
        return configs.candidates(100, gpu.architecture())

    assert tried(tile_m=(64, 128), tile_n=[64]) == [Blackwell(tile_n=64)]
    with pytest.raises(TypeError, match="overlap"):
        tried(overlap=[True])


@pytest.mark.parametrize("target", sorted({a.target for a in ARCHITECTURES.values()}))
def test_a_gpu_test_runs_every_config_that_ships_or_is_tried(target: str) -> None:
    architecture, ships, names = of_target(target), shipped(target), set(map(str, jobs(target)))
    assert set(map(str, ships)) < names and len(names) == len(jobs(target))
    for tokens in (1, 7, 80, 901, 14107):
        for terms in (1, 2):
            assert Job(architecture.choose_layer(tokens, DEEPSEEK_V3, terms), terms) in ships
    tried = {str(c) for rows in ROWS for c in configs.candidates(rows, architecture)}
    assert {f"GEMM: {config}" for config in tried} <= names
    picked = [sm90.LARGEST] if architecture is HOPPER else sm100.PICKED
    assert {Job((config,)) for config in picked} <= set(ships)
    if architecture is not HOPPER:
        assert len(tried) == 98, "docs/notes/gemm_sm100.md"


def test_the_heuristics_choice_is_always_timed(architecture) -> None:
    for many in ROWS:
        for even in (True, False):
            problem = tune.gemm_problem(many, 4096, 7168, even, 1)
            assert problem.experts == (32 if many <= 128 else 8)
            assert problem.even or not even
            names = [str(c) for c in tune.configs_of(problem)]
            assert names[0] == str(heuristic(problem))
            assert len(set(names)) == len(names)


def test_uneven_rows_keep_the_sum_and_spread() -> None:
    rows = uneven_rows(500, 32, 1)
    assert sum(rows) == 16000 and rows == uneven_rows(500, 32, 1)
    assert 1.3 < max(rows) / 500 < 3.0


@pytest.fixture
def timed(no_gpu, kernel, monkeypatch):
    """run_problem on the CPU with the model as kernel; config -> us, None where it fails, to be
    filled by the test."""
    spans: dict[str, float | None] = {}

    def clock(calls, repeats):
        found = {}
        for name in calls:
            us = spans.get(name, 20.0)
            ms = us and 1e-3 * gemm.LAUNCHES * us
            found[name] = {"ms": ms, "p10": ms, "p90": ms} if ms else {"error": "failed"}
        return found

    monkeypatch.setattr(gemm, "device_times", clock)
    return spans


PROBLEM = Problem((2,) * 4, 128, 256)


def test_what_the_heuristics_choice_loses_to_the_best(timed, architecture) -> None:
    choice, other = (str(c) for c in tune.configs_of(PROBLEM)[:2])
    timed.update({choice: 10.4, other: 10.0})
    into = rows.Writer("tune_gemm", "a GPU", "m")
    tune.tune_problem(into, PROBLEM, Timing(FLOORS, 3), 5.0)
    *_, found = into.rows
    assert (found["best"], found["subject"], found["unit"]) == (other, choice, "%")
    assert found["value"] == pytest.approx(4.0) and "error" not in found
    assert len(into.rows) == len(tune.configs_of(PROBLEM)) + 1
    for us in ({other: 10.0}, {}):
        tune.add_verdict(into, PROBLEM.case(), us, choice, 5.0)
    errors = [row["error"] for row in into.rows if "error" in row]
    assert errors == [f"did not run; best: {name}" for name in (other, "none ran")]
    table = tuned_table(into.result, "tune_gemm").frame
    assert table.loss.tolist() == ["4.0 %", "not run", "not run"]
    assert table.us.tolist() == ["10.0", "10.0", "-"]
    assert table.iloc[0, :4].to_dict() == {"experts": "4", "rows": "2", "N": "128", "K": "256"}


def test_a_loss_is_timed_again_before_it_is_believed(timed, monkeypatch) -> None:
    choice, other = (str(c) for c in tune.configs_of(PROBLEM)[:2])
    timed.update({choice: 11.0, other: 10.0})
    seen, run = [], tune.run_problem

    def noting(into, problem, variants, timing):
        seen.append(([v.name for v in variants], timing.repeats))
        if len(seen) == 2:
            timed[choice] = 10.1
        return run(into, problem, variants, timing)

    monkeypatch.setattr(tune, "run_problem", noting)
    into = rows.Writer("tune_gemm", "a GPU", "m")
    tune.tune_problem(into, PROBLEM, Timing(FLOORS, 3), 5.0)
    assert seen[1] == ([choice, other], tune.CONFIRM_REPEATS) and len(seen) == 2
    assert into.rows[-1]["value"] == pytest.approx(1.0)
    assert len(into.rows) == len(seen[0][0]) + 2 + 1


# --- the program ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("us", "status"), [(10.4, EXIT_OK), (11.0, EXIT_FAILED)])
def test_a_gemm_that_loses_fails(us, status, measure, timed, monkeypatch) -> None:
    """Not one that ships and fails in a config beside it."""
    monkeypatch.setattr(program, "LAYER_SHAPES", {"gemm1": (128, 256)})
    monkeypatch.setattr(gemm, "LAUNCHES", 2)
    monkeypatch.setattr(tune, "compile_ahead", lambda *_: None)
    problem = tune.gemm_problem(2, 128, 256, True, 1)
    choice, other, third, *_ = (str(c) for c in tune.configs_of(problem))
    timed.update({choice: us, other: 10.0, third: None})
    done, found = measure("tune_gemm", "--rows", "2", "--repeats", "3")
    configs = {row.get("config") for row in found.rows_of("tune_gemm")}
    assert done.returncode == status and {choice, other} <= configs and other in done.stdout
    assert f"error: {third} at 2 rows, 128x256: failed" in done.stderr
    lost = f"error: {choice} at 2 rows, 128x256: loses 10.0 %; best: {other}"
    assert (lost in done.stderr) == (status == EXIT_FAILED)
    assert measure("tune_gemm", "--rows", "2", "--max-loss", "20")[0].returncode == EXIT_OK


def test_what_ships_and_did_not_run_fails(measure, monkeypatch) -> None:
    def nothing(into, *_):
        tune.add_verdict(into, PROBLEM.case(), {"another": 9.0}, "shipped", 5.0)

    monkeypatch.setattr(tune, "tune_gemm", nothing)
    done, _ = measure("tune_gemm")
    assert done.returncode == EXIT_FAILED
    assert "shipped at 2 rows, 128x256: did not run; best: another" in done.stderr


# --- the layer ------------------------------------------------------------------------------------


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("tokens", [1, 80, 640, 901, 14107])
def test_the_shipped_pair_is_made_as_it_ships(tokens, terms) -> None:
    pair = tune.picked(tokens, DEEPSEEK_V3, terms)
    made = tune.with_pair(pair)(tokens, DEEPSEEK_V3, terms)
    assert made == HOPPER.choose_layer(tokens, DEEPSEEK_V3, terms)
    found = tune.pairs(pair, (ladder("gemm1"), ladder("gemm2", terms=terms)))
    assert found[0] == pair and len(set(found)) == len(found)


@pytest.mark.parametrize("terms", [1, 2])
def test_every_pair_is_one_that_the_kernels_take(terms) -> None:
    """The classes check a config; with its epilogue, its way to load and its terms."""
    from moe_fp8.kernels.fused import FusedMoe

    ladders = ladder("gemm1"), ladder("gemm2", terms=terms)
    assert [len(set(rungs)) for rungs in ladders] == [len(rungs) for rungs in ladders]
    for pair in itertools.product(*ladders):
        for tokens in (80, 2048):
            first, second = tune.with_pair(pair)(tokens, DEEPSEEK_V3, terms)
            classes = HOPPER.gemm(), HOPPER.swiglu(first), HOPPER.gather(first)
            FusedMoe(DEEPSEEK_V3, first, second, 132, *classes)


def test_pairs_are_those_beside() -> None:
    ladders = ["a", "b", "c", "d"], ["x", "y"]
    assert tune.pairs(("b", "y"), ladders) == [
        ("b", "y"), ("a", "x"), ("a", "y"), ("b", "x"), ("c", "x"), ("c", "y"),
    ]  # fmt: skip
    assert tune.pairs(("a", "x"), ladders)[0] == ("a", "x")


@pytest.mark.parametrize("terms", [1, 2])
def test_with_few_rows_other_depths_are_tried(terms) -> None:
    ladders = ladder("gemm1"), ladder("gemm2", terms=terms)
    found = tune.candidates(tune.picked(4, DEEPSEEK_V3, terms), ladders)
    assert next(iter(found.values()))(4, DEEPSEEK_V3, terms) == HOPPER.choose_layer(
        4, DEEPSEEK_V3, terms
    )
    first, second = found["shipped, 4 and 6 stages"](4, DEEPSEEK_V3, terms)
    assert (first.stages, second.stages) == (4, 6) and len([n for n in found if "stages" in n]) > 9
    many = tune.candidates(tune.picked(14107, DEEPSEEK_V3, terms), ladders)
    assert not any(name.startswith("shipped, ") for name in many)


class Problems:
    def __init__(self, layer, *_) -> None:
        self.layer = layer

    def of(self, tokens: int):
        nothing = torch.zeros(tokens, 8)
        return MoeInputs(*8 * (nothing,), 0, 1.0), "drawn"


def timed_alike(calls, repeats: int) -> dict:
    for call in calls.values():
        call.output.zero_()
    return {name: {"ms": 0.1, "p10": 0.1, "p90": 0.1, "calls": 1} for name in calls}


@pytest.mark.parametrize("terms", [1, 2])
def test_the_pairs_are_those_of_the_terms(terms: int, measure, monkeypatch) -> None:
    monkeypatch.setattr(cases, "problems_of", Problems)
    monkeypatch.setattr(tune, "device_times", timed_alike)
    done, found = measure("tune_layer", "--tokens", "901", *["--accurate"] * (terms - 1))
    ladders = ladder("gemm1"), ladder("gemm2", terms=terms)
    wanted = tune.candidates(tune.picked(901, DEEPSEEK_V3, terms), ladders)
    assert done.returncode == 0 and {row["subject"] for row in found.rows} == set(wanted)


@pytest.mark.parametrize(("gain", "status"), [(1.01, 0), (1.05, 1)])
@pytest.mark.parametrize("wrong", [False, True])
def test_a_layer_that_loses_or_computes_something_else_fails(
    gain, status, wrong, measure, monkeypatch
) -> None:
    """The second of the pairs is the faster one; the third may write something else."""

    def device_times(calls, repeats):
        for i, call in enumerate(calls.values()):
            call.output.fill_(float(wrong and i == 2))
        faster = (0.1 / gain if i == 1 else 0.1 for i in range(len(calls)))
        figures = ({"ms": ms, "p10": ms, "p90": ms, "calls": 1} for ms in faster)
        return dict(zip(calls, figures, strict=True))

    monkeypatch.setattr(cases, "problems_of", Problems)
    monkeypatch.setattr(tune, "device_times", device_times)
    definition = ["--definition", "dsv3_tp8"] if wrong else []
    done, found = measure("tune_layer", "--tokens", "3", "901", *definition)
    assert done.returncode == (1 if wrong else status) and "\n901 " in done.stdout
    assert ("at T=901: loses 5.0 %" in done.stderr) == (status == 1)
    made = found.rows_of("tune_layer")
    assert {row["tokens"] for row in made} == {3, 901}
    first, second = [row for row in made if row["tokens"] == 3][:2]
    assert first["value"] / second["value"] == pytest.approx(gain) and second["unit"] == "us"
    assert second["p10"] == second["p90"] == second["value"]
    errors = [row.get("error") for row in made if row["tokens"] == 3]
    assert errors.count("not the output of the shipped pair") == wrong
