"""The GEMM comparison off the GPU: what it parses, and that every peer gets the same problem."""

import dataclasses
import importlib
import math
import multiprocessing
import sys
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import fake_libraries
import pytest
import torch
from moe_fp8 import reference
from moe_fp8.baselines import humming_moe
from moe_fp8.kernels.architectures import BLACKWELL, HOPPER
from moe_fp8.ladder import v3_clustered, v4_flat
from moe_fp8.shape import DEEPSEEK_V3

from scripts.common.program import EXIT_FAILED, EXIT_OK, ROOT
from scripts.measuring import clock, gemm, gemm_ladder
from scripts.measuring.cases import Histogram, histograms
from scripts.measuring.clock import Timed
from scripts.measuring.gemm import (
    BLOCK,
    LAYER_SHAPES,
    LAYOUTS,
    Checker,
    Operands,
    Problem,
    Variant,
    Weights,
    heuristic,
    layer_problems,
    ours,
    run_problem,
    weights,
)
from scripts.measuring.gemm_ladder import LADDER
from scripts.publishing import rows, tables

CPU = torch.device("cpu")


def test_work_of_a_problem() -> None:
    problem = Problem((128,) * 8, n=4096, k=7168)
    assert problem.flops == 2 * 8 * 128 * 4096 * 7168
    weights, tokens, out = 8 * 4096 * 7168, 8 * 128 * 7168, 8 * 128 * 4096 * 2
    scales = 4 * (weights / BLOCK**2 + tokens / BLOCK)
    assert problem.bytes == weights + tokens + out + scales
    assert Problem((130,) * 8, 128, 128).max_rows == 256
    # An expert without rows is not read.
    uneven = Problem((256, 0, 512, 0, 256), n=4096, k=7168)
    assert (uneven.experts, uneven.active, uneven.pairs, uneven.even) == (5, 3, 1024, False)
    assert uneven.flops == problem.flops
    assert uneven.bytes == problem.bytes * 1.0 - 5 * (4096 * 7168 + 4 * 4096 * 7168 / BLOCK**2)
    assert Problem((0, 7, 7), 128, 128).even


@pytest.fixture
def peers(monkeypatch):
    """Return stand-ins for the peers, and the `expected_m` of every call of DeepGEMM."""
    deep_gemm, expected = fake_libraries.deep_gemm(), []
    masked = deep_gemm.m_grouped_fp8_fp4_gemm_nt_masked

    def noting(a, b, d, masked_m, expected_m, recipe):
        expected.append(expected_m)
        masked(a, b, d, masked_m, expected_m, recipe)

    deep_gemm.m_grouped_fp8_fp4_gemm_nt_masked = noting
    monkeypatch.setitem(sys.modules, "deep_gemm", deep_gemm)
    monkeypatch.setitem(sys.modules, "sgl_kernel", fake_libraries.sgl_kernel())
    variants = gemm.deepgemm_variants() + gemm.sgl_variants()
    return SimpleNamespace(variants=variants, expected=expected)


UNEVEN = (5, 0, 130, 1, 0)


def operands(rows: tuple[int, ...]) -> Operands:
    n, k = 256, 384
    weights = Weights(len(rows), n, k, CPU, seed=1)
    return Operands(Problem(rows, n, k), weights)


@pytest.fixture
def kernel(monkeypatch):
    """The reference model in our kernel's place; the (layout, config) of its calls."""
    calls = []

    def grouped_gemm(a, a_scale, b, b_scale, out, expert_rows, config):
        calls.append((expert_rows.tolist(), config))
        reference.grouped_gemm(a, a_scale, b, b_scale, out, expert_rows)

    monkeypatch.setattr("moe_fp8.ladder.steps.grouped_gemm", grouped_gemm)
    return calls


@pytest.mark.parametrize("rows", [(128,) * 3, (17,) * 3, (200,) * 3, UNEVEN])
def test_every_variant_is_given_the_problem_of_the_model(peers, kernel, rows) -> None:
    x = operands(rows)
    chosen, checker = heuristic(x.problem), Checker(x)
    own = [ours(name, chosen, name) for name in ("batched", "aligned", "flat")]
    for variant in (*peers.variants, *own):
        assert checker.calc_diff(variant) < 1e-5, variant.name
        assert variant.prepare(x).result().shape == (sum(rows), 256)
    assert peers.expected == [round(sum(rows) / sum(r > 0 for r in rows))]
    flat = [x.m_indptr[:-1].tolist(), x.m_indptr[1:].tolist()]
    batched = [[e * x.problem.max_rows for e in range(len(rows))], []]
    batched[1] = [start + count for start, count in zip(batched[0], rows, strict=True)]
    assert kernel == [(there, chosen) for there in (batched, x.aligned.rows.tolist(), flat)]


def test_torchao_gets_the_layouts_that_it_asks_for(monkeypatch) -> None:
    def grouped_mm(a, b, a_scale, b_scale, ends, out_dtype):
        m, k = a.shape
        experts, _, n = b.shape
        assert (a.stride(), b.stride()) == ((k, 1), (n * k, 1, k)) and ends.dtype is torch.int32
        assert (a_scale.shape, a_scale.stride()) == ((m, k // BLOCK), (1, m))
        assert b_scale.shape == (experts, k // BLOCK, n // BLOCK) and b_scale.stride()[1] == 1
        out = torch.empty((m, n), dtype=out_dtype)
        rows = reference.flat_rows(torch.cat([ends.new_zeros(1), ends]))
        w, scales = b.transpose(1, 2), b_scale.transpose(1, 2)
        reference.grouped_gemm(a, a_scale.t(), w, scales, out, rows)
        return out

    name = "torchao.prototype.blockwise_fp8_training"
    peer = SimpleNamespace(cutedsl_fp8_blockwise_scaled_grouped_mm_2d_3d=grouped_mm)
    for module in ("torchao", "torchao.prototype"):
        monkeypatch.setitem(sys.modules, module, SimpleNamespace())
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(cutedsl_grouped_gemm=peer))
    monkeypatch.setenv("TORCHAO_ENABLE_CUTEDSL_FP8_BLOCKWISE_GROUPED_MM", "0")
    (variant,) = gemm.torchao_variants()
    x = operands((128,) * 4)
    assert Checker(x).calc_diff(variant) < 1e-6
    several = clock.one_after_another([variant.prepare(x)] * 2)
    several.poison()
    several()
    assert several.result().isfinite().all(), "the output is the one that the last call returned"


def test_humming_gets_flat_rows_and_its_own_weights(monkeypatch) -> None:
    calls = []

    def multiply(
        config, a, weight, weight_scale, outputs, input_scale, expert_layout, locks,
        valid_shape_m, compute_config, tuning_config,
    ):  # fmt: skip
        calls.append((config, valid_shape_m, compute_config, tuning_config))
        assert input_scale.is_contiguous() and input_scale.shape == (len(a), a.shape[1] // BLOCK)
        assert not locks.any() and locks.dtype is expert_layout.dtype is torch.int32
        rows = reference.flat_rows(expert_layout)
        reference.grouped_gemm(a, input_scale.t(), weight, weight_scale, outputs, rows)

    def transformed(weight, scale, packed):
        assert not packed
        return "config", {"weight": weight, "weight_scale": scale}

    monkeypatch.setattr(humming_moe, "transformed", transformed)
    monkeypatch.setattr(humming_moe, "tuning", lambda *arguments: arguments)
    for module in ("humming", "humming.forward"):
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(humming_forward=multiply))
    (variant,) = gemm.humming_variants()
    assert Checker(operands(UNEVEN)).calc_diff(variant) < 1e-6
    layout = "grouped_contiguous"
    assert calls == [("config", 136, {"gemm_type": layout}, ("config", layout, 136, CPU))]


def test_the_check_sees_a_wrong_expert_and_a_row_that_is_not_written(kernel) -> None:
    x = operands(UNEVEN)
    checker = Checker(x)
    good = ours("good", None)
    assert checker.calc_diff(good) < 1e-6

    def broken(spoil):
        def prepare(operands):
            call = good.prepare(operands)
            return Timed(lambda out: (call(), spoil(out)), call.arguments, rows=call.rows)

        return dataclasses.replace(good, prepare=prepare)

    assert checker.calc_diff(broken(lambda out: out[100].fill_(float("nan")))) == float("inf")
    assert checker.calc_diff(broken(lambda out: out[135].neg_())) > 1


def test_problems_are_both_gemms_of_each_workload_with_rows() -> None:
    problems = layer_problems(histograms(ROOT, [1, 7]) + [Histogram("x", 1, (0,) * 32)])
    assert [(p.n, p.k, p.tokens) for p in problems] == [
        (n, k, tokens) for n, k in ((4096, 7168), (7168, 2048)) for tokens in (7, 1)
    ]


def written(*ratios: tuple[float | None, float, int | None], peer_us: float = 10.0) -> rows.Rows:
    """Rows of our config and of a peer, by our ratio to it, rows an expert and tokens."""
    into = rows.Writer("gemm_quick", "a GPU", "m", rates=FLOORS)
    for number, (ratio, each, tokens) in enumerate(ratios, 1):
        case = Problem((int(each),) * 8 + (0,), 256, 256 * number, tokens).case()
        mine = {"peer": False, "config": "128x128"}
        if ratio is None:
            into.add(case, "ours default", error="wrong: calc_diff 1", **mine)
            continue
        into.add(case, "ours default", value=peer_us / ratio, unit="us", roofline=2.0, **mine)
        into.add(case, "a peer", value=peer_us, unit="us", roofline=2.0, peer=True)
        into.add(case, "slow peer", value=2 * peer_us, unit="us", roofline=2.0, peer=True)
    return into.result


def test_the_ratios_to_the_best_peer() -> None:
    few, many = [(r, 64, None) for r in (0.8, 1.2, 1.1)], [(0.9, 128, None), (2.0, 128, None)]
    f = tables.gemm_frame(written(*few, *many, (None, 64, None)), "gemm_quick")
    assert tables.ratios_table(f).frame.to_numpy().tolist() == [
        ["ours default", "all", "5", "1.100x", "0.800x", "2"],
        ["ours default", "64 rows", "3", "1.100x", "0.800x", "1"],
        ["ours default", "128 rows", "2", "1.450x", "0.900x", "1"],
    ]
    of_workload = tables.gemm_frame(written((1.0, 64, 7)), "gemm_quick")
    equal = tables.ratios_table(of_workload).frame
    assert equal["of"].tolist() == ["all", "256x256"] and equal["below 1.0"][0] == "0"


def test_the_table_has_the_rates_of_ours() -> None:
    f = tables.gemm_frame(written((2.0, 128, 7), (0.5, 64, 9)), "gemm_quick")
    problem = Problem((128,) * 8, 256, 256, 7)
    assert f.tflops[0] == pytest.approx(problem.flops / 5e-6 / 1e12)
    assert f.gbytes[0] == pytest.approx(problem.bytes / 5e-6 / 1e9) and f.percent[0] == 40.0
    table = tables.gemm_table(f).frame
    shown = table.iloc[0]
    assert (shown["T"], shown["ours default"], shown["a peer"]) == ("7", "5.0*", "10.0")
    assert (shown["best peer / ours"], shown["experts"]) == ("2.00x", "8")
    assert table["a peer"][1] == "10.0*"


def test_the_ladders_table_has_rates_and_the_gain_where_a_step_should_help() -> None:
    into = rows.Writer("gemm_ladder", "a GPU", "m", rates=FLOORS)
    for problem in gemm.ladder_problems():
        for number, variant in enumerate(gemm.ladder_variants()):
            time = {"value": 1e3 - 100 * number, "unit": "us", "roofline": 2.0}
            into.add(problem.case(), variant.name, **variant.labels(), **time)
        into.add(problem.case(), "a peer", value=500.0, unit="us", roofline=2.0, peer=True)
    many, some, few = gemm.ladder_problems()
    table = tables.gemm_ladder_table(into.result).frame.set_index("step")
    assert [*table.index] == [step.name for step in LADDER] + ["a peer"]
    assert [*table] == [
        "config", "8 x 2048 rows, TFLOP/s", "8 x 512 rows, TFLOP/s", "8 x 8 rows, TB/s"
    ]  # fmt: skip
    computes, again, reads = (table[name] for name in [*table][1:])
    assert computes["four stages"] == f"{many.flops / 1e9:.0f}"
    assert computes["all of shared memory"] == f"{many.flops / 9e8:.0f} (1.11x)"
    assert again["overlap"] == f"{some.flops / 4e8:.0f} (2.25x)", "over the step that it changes"
    assert again["unrolled"] == f"{some.flops / 5e8:.0f}"
    assert reads["swapped"] == f"{few.bytes / 2e8:.2f}* (4.50x)"
    assert reads["a peer"] == f"{few.bytes / 5e8:.2f}" and table.config["a peer"] == "peer"


def test_a_step_that_failed_has_no_rate() -> None:
    into = rows.Writer("gemm_ladder", "a GPU", "m", rates=FLOORS)
    for problem in gemm.ladder_problems():
        case, time = problem.case(), {"value": 9.0, "unit": "us", "roofline": 2.0, "peer": False}
        into.add(case, "four stages", **time)
        into.add(case, "all of shared memory", error="wrong", peer=False)
        into.add(case, "shared tokens", **time)
    table = tables.gemm_ladder_table(into.result).frame
    assert [*table.step] == ["four stages", "shared tokens"] and "x)" not in table.to_string()


def timed(calls, repeats):
    """Replace the timing: a launch of ours takes 10 us, the n-th other n more."""
    for call in calls.values():
        call()
    ms = {name: 1e-3 * gemm.LAUNCHES * (10 + n) for n, name in enumerate(calls)}
    return {n: {"ms": t, "p10": t, "p90": t, "method": "graph"} for n, t in ms.items()}


FLOORS = {"copy_bytes_per_s": 4e12, "read_bytes_per_s": 4e12, "fp8_flops_per_s": 1e15}


@pytest.fixture
def no_gpu(monkeypatch):
    """run_problem on the CPU, with made-up times."""
    cache = SimpleNamespace(L2_cache_size=2**20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: cache)
    monkeypatch.setattr(gemm, "device_times", timed)
    source = weights
    monkeypatch.setattr(gemm, "weights", lambda e, n, k, device, seed: source(e, n, k, "cpu", seed))

    def readings(*_):
        return [Timed(lambda out: None, [torch.zeros(1)]) for _ in range(2)]

    monkeypatch.setattr(gemm, "readings", readings)


def test_a_problem_is_checked_timed_and_compared(no_gpu, kernel, peers) -> None:
    problem = Problem(UNEVEN, 256, 384, tokens=7)
    good = ours("ours", heuristic(problem))
    more = lambda x: lambda out: (good.prepare(x)(), out.mul_(1.1))  # noqa: E731
    wrong = Variant("wrong", lambda x: Timed(more(x), [x.out], rows=x.flat.index))
    variants = [good, *peers.variants, wrong]
    into = rows.Writer("gemm_quick", "a GPU", "m")
    run_problem(into, problem, variants, FLOORS, 3, 2026)
    records = list(into.rows)
    assert [r["subject"] for r in records] == [v.name for v in variants]
    assert records[0]["value"] == pytest.approx(10.0) and records[0]["method"] == "graph"
    assert records[0]["config"] == str(heuristic(problem)) and not records[0]["peer"]
    facts = {"tokens": 7, "pairs": 136, "active": 3, "max": 130}.items()
    assert all(r.items() >= facts for r in records)
    # Two readings after the four variants that are right: 14 and 15 us, the faster one counts.
    assert all(r["read"] == r["roofline"] == pytest.approx(14.0) for r in records[:-1])
    assert "value" not in records[-1] and records[-1]["error"].startswith("wrong: calc_diff")
    (mine, *_), ratio = records, tables.gemm_frame(into.result, "gemm_quick").vs_best_peer[0]
    assert ratio == pytest.approx(1.1) and "hash" not in mine
    slow = FLOORS | {"fp8_flops_per_s": 1e9}
    run_problem(into, problem, variants[:1], slow, 3, 2026)
    assert into.rows[-1]["roofline"] == problem.flops / 1e3


def test_launches_rotate_over_more_operands_than_the_cache_holds(
    no_gpu, kernel, monkeypatch
) -> None:
    """Our launches and the readings both rotate, so that none finds its operands in the cache."""
    seen: list[list[int]] = []

    def rotated(calls):
        real(calls)()
        seen.append([id(call) for call in calls])
        return calls[0]

    real = gemm.rotated
    monkeypatch.setattr(gemm, "rotated", rotated)
    monkeypatch.setattr(gemm, "LAUNCHES", 40)
    problem = Problem(UNEVEN, 256, 384)
    into = rows.Writer("gemm_quick", "a GPU", "m")
    run_problem(into, problem, [ours("ours", None)], FLOORS, 3, 2026)
    assert len(seen) == 3, "ours, and the reading in two orders"
    for operands_of in seen:
        sets = len(set(operands_of))
        assert (sets - 1) * problem.bytes >= 4 * 2**20, "four times the cache before it comes again"
    assert len(weights(5, 256, 384, "cpu", 2026).sets) >= sets, "each with weights of its own"
    order: list[int] = []
    timed_calls = [Timed(lambda out, n=n: order.append(n), [torch.zeros(1)]) for n in range(3)]
    real(timed_calls)()
    assert order == [n % 3 for n in range(40)]


def test_a_step_is_compiled_by_a_call_of_its_config(no_gpu, kernel, monkeypatch) -> None:
    monkeypatch.setattr(gemm, "peer_variants", lambda *_: [])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(gemm, "ladder_problems", lambda: [Problem((3, 8), 256, 384)] * 2)
    gemm.compile_step("overlap")
    assert [config for _, config in kernel] == [gemm_ladder.configs()["overlap"]] * 2


def test_compiling_ahead_reports_and_survives_failures(capfd, monkeypatch) -> None:
    monkeypatch.setattr(gemm, "WORKERS", 2)
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    gemm.compile_ahead(math.factorial, [3, -1, 4])
    stderr = capfd.readouterr().err
    assert "3 compiled ahead in 2 processes" in stderr and "1 failed" in stderr
    assert stderr.startswith("problems 0/3   elapsed 00:00, remaining ?\n")


def test_an_interrupt_ends_what_is_compiled_ahead(monkeypatch) -> None:
    monkeypatch.setattr(gemm, "WORKERS", 2)
    monkeypatch.setattr("os.cpu_count", lambda: 3)

    def interrupted(futures: list[Future]) -> list[Future]:
        while not any(future.running() for future in futures):
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(gemm, "as_completed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        gemm.compile_ahead(time.sleep, [600.0] * 9)
    assert not multiprocessing.active_children()


def test_a_peer_that_is_not_there_is_said_and_skipped(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "sgl_kernel", None)
    gemm.peer_variants.cache_clear()
    monkeypatch.setattr(gemm, "PEERS", {"sgl": gemm.sgl_variants})
    variants = gemm.collect_variants(False, Problem((1,), 128, 128))
    assert [v.name for v in variants] == ["ours default"]
    assert "sgl: not measured" in capsys.readouterr().err


WORKLOADS = [  # tokens, and rows that the routing could give
    (1, (1, 0, 1) + (0,) * 28 + (1,)),
    (53, (2, 0, 6, 1) * 8),
    (80, (9, 0, 3, 4) * 8),
    (901, (41, 20, 76, 30) * 8),
    (14107, (500, 300, 1035, 200) * 8),
]


@pytest.mark.parametrize(("tokens", "rows"), WORKLOADS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_shipped_configs_are_those_of_a_call_of_the_solution(name, tokens, rows, monkeypatch):
    """The layer passes these configs to its GEMMs; kernels and routing are stand-ins."""
    from moe_fp8 import routing
    from moe_fp8.call import GroupedRows, MoeInputs
    from moe_fp8.ladder import steps

    launched: list[Any] = []
    rows_of = torch.tensor([0, *rows]).cumsum(0).int()
    module = {"flat": v4_flat, "v3": v3_clustered}[name]
    grouped = GroupedRows(
        None, rows_of, torch.full((tokens, 8), -1, dtype=torch.int32), torch.zeros(tokens, 8)
    )
    monkeypatch.setattr(routing, "route", lambda *arguments, **options: grouped)
    monkeypatch.setattr(steps, "grouped_gemm", lambda *arguments: launched.append(arguments[-1]))
    for step in ("permute", "swiglu_quant", "combine"):
        monkeypatch.setattr(steps, step, lambda *arguments: None)
    inputs = MoeInputs(*[None] * 8, 0, 1.0)
    output = torch.empty(tokens, DEEPSEEK_V3.hidden_size, dtype=torch.bfloat16, device="meta")
    module.moe.__wrapped__(inputs, output, DEEPSEEK_V3)
    shapes = LAYER_SHAPES.values()
    configs = [gemm.shipped(name, Problem(rows, n, k, tokens)) for n, k in shapes]
    assert configs == launched
    if name == "v3":  # flat knows the tokens alone
        assert configs == [heuristic(Problem(rows, n, k, tokens)) for n, k in shapes]


def test_beside_flats_config_stand_those_next_to_it(monkeypatch) -> None:
    """Rows name the solutions whose kernel was timed."""
    monkeypatch.setattr(gemm, "peer_variants", list)
    n, k = LAYER_SHAPES["gemm1"]
    rungs = list(map(str, gemm.ladder()))

    def tried(tokens: int) -> dict[tuple[str, str], int]:
        variants = gemm.collect_variants(True, Problem((1,) * 32, n, k, tokens))
        assert all(len(v.labels()["hash"]) == 40 for v in variants)
        at = rungs.index(variants[0].config)
        return {(v.name, v.solution[-4:]): rungs.index(v.config) - at for v in variants[:-1]}

    larger, smaller = ("flat, next larger", "flat"), ("flat, next smaller", "flat")
    assert tried(1) == {("flat", "flat"): 0, larger: 1}
    assert tried(80) == {("flat", "flat"): 0, smaller: -1, larger: 1}
    for layers, problem in ((True, Problem((1,) * 32, n, k, 80)), (False, Problem((1,), 128, 128))):
        v3 = gemm.collect_variants(layers, problem)[-1]
        assert v3.name == ("v3" if layers else "ours default")
        assert v3.labels()["solution"] == "cutedsl_moe_fp8_v3"


def test_triton_is_a_peer_with_the_tiles_it_ships(monkeypatch) -> None:
    pytest.importorskip("triton")
    from moe_fp8.baselines import triton_moe

    n, k = LAYER_SHAPES["gemm1"]
    for tokens in (1, 80, 14107):
        pair = triton_moe.tiles(tokens)
        assert gemm.shipped_tile(Problem((1,) * 32, n, k, tokens)) == pair[0]
        assert gemm.shipped_tile(Problem((1,) * 32, k, n, tokens)) == pair[1]
    even = Problem((64,) * 8, n, k)
    assert gemm.shipped_tile(even) == triton_moe.tiles(2048)[0]
    assert [v.name for v in gemm.triton_variants()] == ["triton_moe"]


@pytest.mark.parametrize("name", ["sm90", "sm100"])
def test_each_architectures_own_configs_are_timed(name, monkeypatch) -> None:
    """The ladder is its heuristic's; the shipped configs and those beside them are its own."""
    rules = importlib.import_module(f"moe_fp8.kernels.heuristic_{name}")
    architecture = HOPPER if name == "sm90" else BLACKWELL
    monkeypatch.setattr(clock, "architecture", lambda: architecture)
    n, k = LAYER_SHAPES["gemm1"]
    rungs = gemm.ladder()
    assert rungs == [config for _, config in (*rules.FEW_ROWS, *rules.MANY_ROWS)] + [rules.LARGEST]
    for tokens in (1, 80, 901, 14107):
        problem = Problem((tokens,) * 32, n, k, tokens)
        chosen = [heuristic(problem), *(gemm.shipped(s, problem) for s in LAYOUTS)]
        assert {type(config) for config in chosen} == {type(rules.LARGEST)}
        tried = gemm.solution_variants("flat", problem)
        assert {variant.config for variant in tried} <= set(map(str, rungs))


@pytest.mark.parametrize(
    ("arguments", "wrong", "status", "where"),
    [
        ("--layers --tokens 1", "", EXIT_OK, ""),
        ("--layers --tokens 1", "v3", EXIT_FAILED, "T=1"),
        ("", "ours default", EXIT_FAILED, "128 rows, 4096x7168"),
        ("--grid quick", "a peer", EXIT_OK, "128 rows, 4096x7168"),  # no failure of ours
        ("--ladder", "", EXIT_OK, ""),
        ("--ladder", "swapped", EXIT_FAILED, "2048 rows, 4096x7168"),
    ],
)
def test_the_program(arguments, wrong, status, where, measure, monkeypatch) -> None:
    """Run everything but the timing."""

    def run_problem(into, problem, variants, *_):
        for number, variant in enumerate(variants):
            time = {"value": 10.0 - number, "unit": "us", "roofline": 5.0}
            more = {"error": "wrong"} if variant.name == wrong else time
            into.add(problem.case(), variant.name, **variant.labels(), **more)

    monkeypatch.setattr(gemm, "run_problem", run_problem)
    monkeypatch.setattr(gemm, "compile_ahead", lambda *_: None)
    monkeypatch.setattr(gemm, "peer_variants", lambda *_: [Variant("a peer", print, peer=True)])
    done, recorded = measure("gemm", *arguments.split())
    assert done.returncode == status
    assert f"error: {wrong} at {where}: wrong" in done.stderr or not wrong
    layers, ladder = "--layers" in arguments, "--ladder" in arguments
    (name,) = recorded.measurements
    own = {"flat", "v3", "flat, next larger"} if layers else {"ours default"}
    own = {step.name for step in LADDER} if ladder else own
    assert name == ("gemm_layers" if layers else "gemm_ladder" if ladder else "gemm_quick")
    assert {row["subject"] for row in recorded.rows_of(name)} == {*own, "a peer"}
    solutions = ["cutedsl_moe_fp8_flat"] * layers + ["cutedsl_moe_fp8_v3"]
    assert [n for n in recorded.hashes(name)] == solutions
    assert ("flat, best known" in done.stdout) == layers
    assert "FP8 matmul 1500 TFLOP/s" in done.stdout
