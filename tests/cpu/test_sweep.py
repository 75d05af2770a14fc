"""Calls over the number of tokens: rows, what fails, the record, its tables and its section."""

import json
import shutil
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from fake_cuda import Kernel
from flashinfer_bench.data import Definition
from moe_fp8 import experts, fused_moe
from moe_fp8.layer import model
from moe_fp8.layer.metrics import calc_diff
from moe_fp8.layer.routing import choose_experts
from moe_fp8.problem import DEEPSEEK_V3, MoeInputs, MoeShape
from moe_fp8.quantise import quantise_blocks, quantise_rows
from programs import packed_once
from test_baselines_triton import DEVICE, interpreter_that_rounds

from scripts.common import schemas
from scripts.common.command_line import Failure, UsageError
from scripts.common.definitions import DEFAULT, DSV3_TP8, SHARED, find
from scripts.common.project import RESULTS_DIR, ROOT
from scripts.data.interfaces import build_definition
from scripts.data.workload_specs import load_specs
from scripts.measure import as_engines, check, floors, gpu, plan, stages, sweep, timing
from scripts.pack import pack
from scripts.programs import profile as program
from scripts.report import generated, report
from scripts.table import tables
from scripts.table.models import models_table
from scripts.table.recorded import read

RATES = {"copy_bytes_per_s": 4e12, "read_bytes_per_s": 3e12, "fp8_flops_per_s": 1.5e15}
RECORD = RESULTS_DIR / "nvidia-h200" / "2026-11-25"
__all__ = ["interpreter_that_rounds"]  # a fixture
OURS, PEER = "cutedsl_moe_fp8_fused", "triton_moe"
OUT_OF_MEMORY = "OutOfMemoryError: CUDA out of memory"


# --- the measurement ------------------------------------------------------------------------------


def out_of_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.fixture
def calls(cuda, monkeypatch):
    """Calls whose output should be 1."""
    monkeypatch.setattr(sweep, "run_reference", lambda definition, inputs: (torch.ones(2), 0.1))
    monkeypatch.setattr(check, "harness_times", lambda call, repeats: {"ms": 0.5})
    monkeypatch.setattr(check, "HARNESS_EVENTS", True)

    def call(name: str, value: float = 1.0, kind=timing.Timed) -> timing.Timed:
        kernel = Kernel(cuda, name, value=lambda n: value)
        if kind is timing.Timed:
            return kind(kernel, [kernel.out])

        def returns(out: torch.Tensor) -> torch.Tensor:
            kernel.out = torch.empty(2)
            kernel()
            return kernel.out

        return kind(returns, [torch.empty(2)])

    return {
        "right": lambda: call("right"),
        "returns": lambda: call("returns", kind=timing.Returning),
        "wrong": lambda: call("wrong", 2.0),
        "not finite": lambda: call("not finite", float("nan")),
        "nothing": lambda: timing.Timed(lambda out: None, [torch.ones(2)]),
        "large": out_of_memory,
    }


def test_only_what_is_right_is_timed_and_what_fails_costs_its_own_row(calls) -> None:
    found = sweep.solutions_on(SimpleNamespace(inputs={}), None, calls, 3)
    for name in ("right", "returns"):
        assert found[name]["device"]["method"] == "graph" and found[name]["device"]["calls"] == 3
        assert found[name]["harness"] == {"ms": 0.5} and found[name]["calc_diff"] == 0
    assert found["wrong"] == {"error": "RuntimeError: calc_diff 2.0e-01 to the reference"}
    assert found["not finite"] == {"error": "RuntimeError: calc_diff nan to the reference"}
    assert found["nothing"] == found["not finite"], "what it does not write shows"
    assert found["large"] == {"error": OUT_OF_MEMORY}


OTHER = MoeShape(num_experts=48, n_group=1, topk_group=1, top_k=3)


def inputs(tokens: int, hidden=256, width=128, local=32, experts=256) -> MoeInputs:
    g = torch.Generator().manual_seed(tokens)
    w13, w13_scale = quantise_blocks(torch.randn(local, 2 * width, hidden, generator=g) / 8)
    w2, w2_scale = quantise_blocks(torch.randn(local, hidden, width, generator=g) / 8)
    x, scale = quantise_rows(torch.randn(tokens, hidden, generator=g))
    logits = torch.randn(tokens, experts, generator=g)
    bias = torch.rand(experts, generator=g).bfloat16()
    offset = min(32, experts - local)
    return MoeInputs(logits, bias, x, scale, w13, w13_scale, w2, w2_scale, offset, 2.5)


def test_a_row_has_the_routing_and_the_floor(monkeypatch) -> None:
    problems = SimpleNamespace(
        of=lambda length: (inputs(length), "drawn"),
        inputs=SimpleNamespace(definition=None),
        layer=DEFAULT,
    )

    def reading(found, repeats, layer):
        assert layer.gemms == ((4096, 7168), (7168, 2048))
        return {found[0].uuid: 0.04}

    monkeypatch.setattr(floors, "measure_reading", reading)
    monkeypatch.setattr(sweep, "solutions_on", lambda *_: {"x": {"error": "no"}})
    row = sweep.measure(problems, lambda drawn: (drawn, {"x": None}), 8, RATES, True, 3)
    assert (row["tokens"], row["routing"], row["floor_ms"]) == (8, "drawn", 0.04)
    assert row["definition"] == DEFAULT.name
    assert 0 < row["active"] <= row["pairs"] and row["solutions"] == {"x": {"error": "no"}}
    monkeypatch.setattr(sweep, "solutions_on", out_of_memory)
    row = sweep.measure(problems, lambda drawn: (drawn, {"x": 0, "y": 0}), 8, RATES, False, 3)
    assert row["solutions"] == dict.fromkeys("xy", {"error": OUT_OF_MEMORY})
    assert 0 < row["floor_ms"] < 0.1 and "read_ms" not in row


def test_routing_is_drawn_as_the_nearest_workload_is(monkeypatch) -> None:
    monkeypatch.setattr(stages.Inputs, "of", lambda self, workload: [workload] * 10)
    problems = stages.Problems(ROOT, "cpu", 1)
    drawn, said = problems.of(8)
    (spec,) = [s for s in load_specs() if s.seq_len == 7]
    expected = replace(spec, seq_len=8).draw().logits
    assert said == f"drawn as workload {spec.uuid[:8]} is (T=7)"
    assert torch.equal(drawn.routing_logits, torch.from_numpy(expected))
    changed = drawn.routing_bias
    assert changed.axes == {"seq_len": 8}
    assert changed.inputs["local_expert_offset"].value == spec.local_expert_offset


def test_two_small_layers_are_measured_one_after_the_other(monkeypatch) -> None:
    """The layer that no definition has too, by its true routing, reference and call of given
    experts."""

    def times(calls, repeats):
        return {n: c if isinstance(c, dict) else {"device": {"ms": 1.0}} for n, c in calls.items()}

    sizes = {"hidden_size": 256, "intermediate_size": 128}
    few, shared = replace(DSV3_TP8, **sizes, num_local_experts=64), replace(SHARED, **sizes)
    monkeypatch.setattr(sweep, "SHARED", shared)
    monkeypatch.setattr(sweep, "both_times", times)
    drawn = inputs(8, local=64)
    problems = {
        few: SimpleNamespace(
            of=lambda length: (drawn, "drawn"),
            layer=few,
            inputs=SimpleNamespace(definition=Definition(**build_definition(few))),
        ),
        shared: sweep.problems_of(shared, ROOT, "cpu", 1),
    }
    calls = {
        few: lambda inputs: (inputs, {"experts": lambda: sweep.given_experts(few, inputs)}),
        shared: sweep.of_definition(shared, sweep.Chosen(None, {}, {}, {}, {})),
    }
    rows = [sweep.measure(problems[of], calls[of], 8, RATES, False, 3) for of in (few, shared)]
    assert [row["definition"] for row in rows] == [few.short, shared.short]
    for row in rows:
        assert 0 < row["solutions"]["experts"]["calc_diff"] < 1e-3
        weights = row["active"] * 3 * 256 * 128 * (1 + 4 / 128**2)
        assert 1e-3 * row["floor_ms"] > weights / RATES["copy_bytes_per_s"]
    assert rows[1]["pairs"] == 8 * 9 and rows[1]["max"] >= 8


def test_the_shared_expert_is_every_tokens_with_a_weight_of_one(monkeypatch) -> None:
    monkeypatch.setattr(sweep, "SHARED", replace(SHARED, hidden_size=128, intermediate_size=128))
    problems = sweep.problems_of(sweep.SHARED, ROOT, "cpu", 1)
    drawn, _ = problems.of(64)
    shape = MoeShape(**problems.layer.shape)
    factor = drawn.routed_scaling_factor
    ids, weights = choose_experts(drawn.routing_logits, drawn.routing_bias, factor, shape)
    (spec,) = [s for s in load_specs(DSV3_TP8) if s.seq_len == 64]
    assert ids[:, :8].tolist() == spec.draw().ids.tolist() and (ids[:, 8] == 256).all()
    assert torch.allclose(weights[:, 8], torch.ones(64), atol=1e-5)
    assert torch.allclose(weights[:, :8].sum(1), torch.full((64,), 2.5), atol=1e-5)


# --- as engines -----------------------------------------------------------------------------------


def test_the_quantiser_is_that_of_the_layer() -> None:
    x = torch.randn(5, 7168).bfloat16().to(DEVICE)
    x[2, :128] = 0
    for got, wanted in zip(as_engines.quantise(x), quantise_rows(x), strict=True):
        assert got.shape == wanted.shape and got.is_contiguous()
        assert calc_diff(got.float(), wanted.float()) < 1e-8


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a sweep checks its outputs")
@pytest.mark.parametrize("shape", [DEEPSEEK_V3, OTHER], ids=["deepseek_v3", "another"])
def test_every_form_gives_the_layer(shape, monkeypatch) -> None:
    def engine(weights, places):
        return lambda ids, given, x: experts(ids, given, x, *weights, expert_map=places)

    def absent(weights, places):
        raise ModuleNotFoundError("No module named 'absent'")

    def solution(logits, bias, x, scale, *rest):
        *weights, offset, factor, out = rest
        how = dict(local_expert_offset=offset, routed_scaling_factor=factor)
        how |= {name: getattr(shape, name) for name in ("n_group", "topk_group", "top_k")}
        fused_moe(logits, bias, x, scale, *weights, **how, out=out)

    monkeypatch.setattr(as_engines, "ENGINES", {"an engine": engine, "absent": absent})
    engines = as_engines.Engines(None, {})
    engines.shape = shape
    engines.runnables["a peer + quantiser"] = solution
    given, prepare = engines(inputs(6, experts=shape.num_experts))
    wanted = torch.empty(6, 256, dtype=torch.bfloat16)
    model.fused(given, wanted, replace(shape, hidden_size=256, intermediate_size=128), 2)
    assert len(prepare) == 8 and list(prepare) == list(engines.peers)
    assert [name for name, peer in engines.peers.items() if peer] == list(prepare)[-2:]
    assert engines.skipped == {"absent": "ModuleNotFoundError: No module named 'absent'"}
    for name, make in prepare.items():
        call = make()
        assert isinstance(call, timing.Returning) == (name == "an engine")
        call.output.fill_(float("nan"))
        call()
        assert calc_diff(call.output, wanted) < sweep.LARGEST_DIFF, name


# --- the program ----------------------------------------------------------------------------------


def row(tokens: int, **solutions: dict) -> dict:
    counts = {"tokens": tokens, "hit": 1, "active": 1, "pairs": 1, "max": 1, "uuid": f"T={tokens}"}
    return {**counts, "routing": "drawn", "floor_ms": 0.04, "solutions": solutions}


def both(ms: float) -> dict:
    figures = {"ms": ms, "p10": ms, "p90": ms, "calls": 20}
    harness = figures | {"ms": ms + 0.03}
    return {"calc_diff": 3e-4, "device": {"method": "graph", **figures}, "harness": harness}


ROWS = {
    1: row(1, **{OURS: both(0.05), PEER: both(0.08)}),
    2: row(2, **{OURS: both(0.06), PEER: {"error": OUT_OF_MEMORY}}),
}


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """The program's record of two numbers of tokens, and what it printed."""
    solutions = [SimpleNamespace(name=n, hash=lambda n=n: f"hash of {n}") for n in (OURS, PEER)]
    seen: dict = {}

    def choose(local, use_gpu, definition, **kind):
        seen.update(kind)
        name = definition.packed_name
        return SimpleNamespace(
            trace_set=SimpleNamespace(definitions={"d": None}),
            solutions=[SimpleNamespace(name=name(s.name), hash=s.hash) for s in solutions],
            peers={name(OURS): False, name(PEER): True},
            skipped={"hpc_ops_moe": "not installed"} if definition is DEFAULT else {},
        )

    def run(*arguments: str) -> tuple[dict, dict]:
        out = tmp_path / "sweep.json"
        words = ["profile.py", "--sweep", "--tokens", "1", "2", *arguments, "--json", str(out)]
        monkeypatch.setattr(sys, "argv", words)
        assert program.main() == 0
        return schemas.read(out, schemas.Sweep), seen

    monkeypatch.setattr(plan, "choose", choose)
    monkeypatch.setattr(gpu, "require_gpu", lambda: "a GPU")
    monkeypatch.setattr(gpu, "measure_rates", lambda: RATES)
    monkeypatch.setattr(sweep, "problems_of", lambda layer, *_: layer)
    monkeypatch.setattr(sweep, "measure", lambda problems, calls, length, *_: ROWS[length])
    return run


def test_the_program_keeps_and_prints_every_row(measured, capsys) -> None:
    record, seen = measured("--markdown")
    assert seen["solutions"] == [*sweep.SOLUTIONS]
    assert record["solutions"] == {name: f"hash of {name}" for name in (OURS, PEER)}
    assert record["peers"] == {OURS: False, PEER: True}
    assert record["skipped"] == {"hpc_ops_moe": "not installed"}
    assert [r["tokens"] for r in record["results"]] == [1, 2] and record["seed"] == 2026
    printed = capsys.readouterr().out
    assert "### Harness/device time in ms, * the fastest" in printed
    assert "| 1 | 1 | 1 | 0.040 | 0.0800*/0.0500* | 0.1100/0.0800 | 50 %/80 % | 1.38x/1.60x |" in [
        " ".join(line.split()) for line in printed.splitlines()
    ]
    assert "### Floor over device time" in printed and "| 80 % | 50 % |" in " ".join(
        printed.split()
    )
    assert OUT_OF_MEMORY in printed and "not run: hpc_ops_moe: not installed" in printed


def test_it_fails_where_one_of_ours_does(measured, monkeypatch) -> None:
    wrong = row(1, **{OURS: {"error": "RuntimeError: calc_diff 0.1 to the reference"}})
    monkeypatch.setattr(sweep, "measure", lambda *_: wrong)
    with pytest.raises(Failure, match=f"failed: {OURS}"):
        measured()


def test_as_engines_ours_need_no_peer(measured, monkeypatch) -> None:
    engines = SimpleNamespace(skipped={"vllm fused_experts": "no vllm"}, peers={OURS: False})
    engines.peers[PEER] = True
    monkeypatch.setattr(
        as_engines, "Engines", lambda definition, peers, _: setattr(engines, "of", peers) or engines
    )
    record, seen = measured("--as", "engines")
    assert seen["solutions"][0] == OURS and [*engines.of] == [PEER]
    assert record["form"] == "engines" and set(record["skipped"]) == {
        "vllm fused_experts",
        "hpc_ops_moe",
    }


def test_what_takes_one_shape_is_left_out(measured, monkeypatch) -> None:
    monkeypatch.setattr(pack, "pack", packed_once)
    record, _ = measured("--definition", "glm5", "--solutions", OURS, PEER, "sglang_moe")
    assert "one shape" in record["skipped"]["sglang_moe"]


def test_layers_have_their_own_rows_in_one_table(measured, monkeypatch, capsys) -> None:
    def measure(layer, calls, length, *_):
        return ROWS[length] | {"definition": layer.short}

    monkeypatch.setattr(sweep, "measure", measure)
    monkeypatch.setattr(pack, "pack", packed_once)
    record, seen = measured("--definition", "glm5", SHARED.short, "--markdown")
    assert f"{PEER}_dsv3_tp8" in seen["solutions"] and len(seen["solutions"]) == 6
    assert record["skipped"] == {}
    assert {*record["solutions"]} == {
        layer.packed_name(name) for layer in (find("glm5"), DSV3_TP8) for name in (OURS, PEER)
    }
    of = [(r["definition"], r["tokens"]) for r in record["results"]]
    assert of == [(short, t) for short in ("glm5", SHARED.short) for t in (1, 2)]
    (made, failed) = models_table(record)
    assert made.header[4:6] == ["fused", PEER]
    assert made.rows[0] == ["glm5", "1", "1", "40.0", "50.0*", "80.0", "80 %", "1.60x"]
    assert made.rows[3] == [SHARED.short, "2", "1", "40.0", "60.0*", "-", "67 %", "-"]
    assert failed.rows == [[s, "2", PEER, OUT_OF_MEMORY] for s in ("glm5", SHARED.short)]
    printed = " ".join(capsys.readouterr().out.split())
    assert "| glm5 | 1 | 1 | 40.0 | 50.0* | 80.0 | 80 % | 1.60x |" in printed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--sweep", "--definition", "gemm1"], "expected a layer"),
        (["--stages", "--definition", "glm5"], "not with --stages"),
        (["--workloads", "1", "--definition", SHARED.short], "has no workloads"),
        (["--sweep", "--as", "engines", "--definition", "qwen3_next"], "renormalisation"),
        (["--sweep", "--solutions", "sglang_moe", "--definition", "glm5"], "none of sglang_moe"),
    ],
)
def test_what_no_layer_has_is_refused(measured, arguments, said, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["profile.py", *arguments])
    with pytest.raises(UsageError, match=said):
        program.main()


def test_rows_before_the_end_are_kept(measured, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(sweep, "measure", lambda problems, calls, length, *_: ROWS.get(length, 1))
    real = program.files.write_json

    def until_the_first(path, content):
        real(path, content)
        raise KeyboardInterrupt

    monkeypatch.setattr(program.files, "write_json", until_the_first)
    with pytest.raises(KeyboardInterrupt):
        measured()
    (kept,) = schemas.read(tmp_path / "sweep.json", schemas.Sweep)["results"]
    assert kept["tokens"] == 1


# --- a recorded sweep -----------------------------------------------------------------------------


@pytest.fixture
def copy(measured, tmp_path):
    """A record with a sweep."""
    for path in RECORD.glob("*.json*"):
        shutil.copy(path, tmp_path)
    for name in ("models", "sweep_engines"):
        (tmp_path / f"{name}.json").unlink()
    measured()
    return tmp_path


TEXT = "<!-- record: {} -->\n<!-- generated: sweep -->\n<!-- /generated -->\n"


def test_a_record_with_a_sweep_has_its_section(copy) -> None:
    recorded = read(copy)
    text = generated.generate(TEXT.format(copy), recorded)
    assert "## Over the number of tokens" in text and "hpc_ops_moe: not installed" in text
    assert "**0.0800**/**0.0500**" in text and "OutOfMemoryError" in text
    assert generated.shown(text, recorded) == ["sweep.png"]
    engines = TEXT.replace("sweep", "sweep_engines").format(copy)
    assert "##" not in generated.generate(engines, recorded)


def test_calls_as_engines_make_them_have_a_short_table(copy) -> None:
    """Of every other number of tokens, and what the forms of `experts` cost in a sentence."""
    record = json.loads((copy / "sweep.json").read_text())
    first, second = record["results"]
    for row, form_ms in ((first, 0.04), (second, 0.06)):
        row["solutions"]["experts bf16"] = {"device": {"ms": 0.05}, "harness": {"ms": 0.08}}
        row["solutions"]["experts fp8"] = {"device": {"ms": form_ms}, "harness": {"ms": 0.08}}
    record["peers"] |= {"experts bf16": False, "experts fp8": False}
    (copy / "sweep_engines.json").write_text(json.dumps(record))
    text = TEXT.replace("sweep", "sweep_engines").format(copy)
    made = " ".join(generated.generate(text, read(copy)).split())
    assert "that of experts bf16: experts fp8 0.80 to 1.20." in made
    assert "| T |" in made and "| 1 |" in made and "| 2 |" not in made.split("Failed")[0]
    assert "| experts bf16 |" in made and "| experts fp8 |" not in made


def test_layers_of_a_record_are_a_table_in_few_words(copy) -> None:
    text = TEXT.replace("sweep", "models").format(copy)
    assert "|" not in generated.generate(text, read(copy))
    record = json.loads((copy / "sweep.json").read_text())
    for row in record["results"]:
        row["definition"] = "glm5"
    (copy / "models.json").write_text(json.dumps(record))
    made = " ".join(generated.generate(text, read(copy)).split())
    assert "(floor over it, best peer's time over it)" in made
    assert "| glm5 | 50.0 (80%, 1.60x) | 60.0 (67%, -) |" in made


def test_without_a_sweep_nothing_is_said(copy) -> None:
    (copy / "sweep.json").unlink()
    recorded = read(copy)
    assert recorded.sweeps == {}
    text = generated.generate(TEXT.format(recorded.directory), recorded)
    assert "".join(text.split()) == "".join(
        f"<!-- record: {generated.relative(recorded)} -->{TEXT[20:]}".split()
    )


def test_a_sweep_is_drawn_over_the_tokens(copy) -> None:
    pytest.importorskip("matplotlib")
    recorded = read(copy)
    (ax,) = report.plots.sweep_figure(recorded.sweeps["sweep"]).axes
    lines = {line.get_label(): list(line.get_xdata()) for line in ax.lines}
    assert lines == {"fused": [1, 2], PEER: [1], "floor": [1, 2]}
    assert ax.get_xscale() == ax.get_yscale() == "log"
    (path,) = generated.draw(recorded, ["sweep.png"])
    assert path.read_bytes().startswith(b"\x89PNG")
    assert "Over the number of tokens" in [s.title for s in report.sweep_section(recorded)]


def test_a_sweep_of_another_shape_is_refused(copy) -> None:
    path = copy / "sweep.json"
    content = json.loads(path.read_text())
    content["results"][0]["solutions"][OURS]["device"]["ms"] = -1
    path.write_text(json.dumps(content))
    with pytest.raises(UsageError, match="results.0.solutions.*device.ms"):
        read(copy)


def test_a_floor_alone_is_a_table_too() -> None:
    record = {"hardware": "a GPU", "method": "m", "peers": {}, "skipped": {}, "results": []}
    record["peers"], record["results"] = {OURS: False}, [row(1, **{OURS: {"error": "X: no"}})]
    times, shares, failed = tables.sweep_tables(record)
    assert times.frame[["T", "fused"]].values.tolist() == [["1", "X"]]
    assert failed.rows == [[OURS, "1", "X: no"]]
