"""Calls over the number of tokens: what is called, the rows, and the program."""

import contextlib
import functools
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from flashinfer_bench.data import Definition
from moe_fp8 import experts, fused_moe, reference
from moe_fp8.call import MoeInputs
from moe_fp8.reference import calc_diff, choose_experts, quantise_blocks, quantise_rows
from moe_fp8.shape import DEEPSEEK_V3, MoeShape
from programs import RATES
from triton_interpreter import DEVICE, interpreter_that_rounds

from scripts.common.definitions import DEFAULT, DSV3_TP8, SHARED, build_definition, find
from scripts.common.program import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    FUSED,
    PREFIX,
    ROOT,
    UsageError,
)
from scripts.data import load_specs
from scripts.measuring import cases, clock, layers, subjects
from scripts.measuring.accuracy import LARGEST_DIFF
from scripts.publishing import rows, tables

__all__ = ["interpreter_that_rounds"]  # a fixture
OURS, PEER = "cutedsl_moe_fp8_fused", "triton_moe"

OTHER = MoeShape(num_experts=48, n_group=1, topk_group=1, top_k=3)


def inputs(tokens: int, local=32, experts=256) -> MoeInputs:
    hidden, width = 256, 128
    g = torch.Generator().manual_seed(tokens)
    w13, w13_scale = quantise_blocks(torch.randn(local, 2 * width, hidden, generator=g) / 8)
    w2, w2_scale = quantise_blocks(torch.randn(local, hidden, width, generator=g) / 8)
    x, scale = quantise_rows(torch.randn(tokens, hidden, generator=g))
    logits = torch.randn(tokens, experts, generator=g)
    bias = torch.rand(experts, generator=g).bfloat16()
    offset = min(32, experts - local)
    return MoeInputs(logits, bias, x, scale, w13, w13_scale, w2, w2_scale, offset, 2.5)


def test_routing_is_drawn_as_the_nearest_workload_is(monkeypatch) -> None:
    monkeypatch.setattr(cases.Inputs, "of", lambda self, workload: [workload] * 10)
    problems = cases.Problems(ROOT, "cpu", 1)
    drawn, source = problems.of(8)
    (spec,) = [s for s in load_specs() if s.seq_len == 7]
    expected = replace(spec, seq_len=8).draw().logits
    assert source == f"drawn as workload {spec.uuid[:8]} is (T=7)"
    assert torch.equal(drawn.routing_logits, torch.from_numpy(expected))
    changed = drawn.routing_bias
    assert changed.axes == {"seq_len": 8}
    assert changed.inputs["local_expert_offset"].value == spec.local_expert_offset
    assert cases.nearest_spec(DEFAULT, 3400).seq_len == 11948, "by the ratio: 901 is less far away"


def test_arguments_without_an_input_of_the_definition_have_defaults() -> None:
    problems = cases.Problems(ROOT, "cpu", 1, find("qwen3_next"))
    moe_inputs = problems.by_name(list(problems.inputs.definition.inputs))
    assert (moe_inputs.routing_bias, moe_inputs.local_expert_offset) == (None, 0)
    assert moe_inputs.routed_scaling_factor == 1.0 and moe_inputs.routing_logits == "routing_logits"


@pytest.fixture
def sweep_of(monkeypatch):
    """Rows of calls on 8 tokens, timed by a clock of our own."""

    def both_times(calls, repeats):
        figures = {"ms": 1.0, "p10": 1.0, "p90": 1.0, "calls": repeats}
        return {name: {"device": {"method": "graph", **figures}} for name in calls}

    monkeypatch.setattr(layers, "both_times", both_times)
    monkeypatch.setattr(layers, "on_own_stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def run(layer, problems, called) -> list[dict]:
        into = rows.Writer("sweep", "a GPU", "m")
        subjects.measure(into, layer, problems, called, 8, RATES, 3)
        return into.rows

    return run


def test_two_small_layers_are_measured_one_after_the_other(sweep_of, monkeypatch) -> None:
    """The second layer is in no data set: it has its own routing, reference and call of given
    experts."""

    def reading(histograms, repeats, layer):
        assert layer.gemms == ((256, 256), (256, 128))
        return {histograms[0].uuid: 0.04}

    sizes = {"hidden_size": 256, "intermediate_size": 128}
    few, shared = replace(DSV3_TP8, **sizes, num_local_experts=64), replace(SHARED, **sizes)
    monkeypatch.setattr(layers, "measure_reading", reading)
    for module in (cases, subjects):
        monkeypatch.setattr(module, "SHARED", shared)
    drawn, definition = inputs(8, local=64), Definition(**build_definition(few))
    problems = cases.Problems.__new__(cases.Problems)
    problems.layer, problems.of = few, lambda length: (drawn, "drawn")
    problems.inputs = SimpleNamespace(definition=definition)

    def given_experts(drawn):
        negated = drawn._replace(routing_logits=-drawn.routing_logits)
        return negated, {"experts": (lambda: subjects.given_experts(few, negated), {})}

    def nothing(drawn):
        return drawn, {"x": (lambda: clock.Timed(torch.zero_, [torch.empty_like(drawn[2])]), {})}

    chosen = subjects.Chosen(Definition(**build_definition(shared)), {}, {}, {})
    of_shared = functools.partial(subjects.of_solutions, shared, chosen)
    rows_of_layers = [
        sweep_of(few, problems, given_experts),
        sweep_of(shared, cases.problems_of(shared, ROOT, "cpu", 1), of_shared),
    ]
    assert "calc_diff 1.0e+00" in sweep_of(few, problems, nothing)[0]["error"]
    for layer, (checked, timed) in zip((few, shared), rows_of_layers, strict=True):
        assert checked["definition"] == layer.short and 0 < checked["calc_diff"] < 1e-3
        assert checked["subject"] == timed["subject"] == "experts"
        assert (timed["value"], timed["clock"], timed["roofline"]) == (1.0, "device", 0.04)
        assert 0 < timed["active"] <= timed["pairs"]
    assert rows_of_layers[0][0]["routing"] == "drawn" and rows_of_layers[1][0]["peer"] is False
    assert rows_of_layers[1][0]["pairs"] == 8 * 9 and rows_of_layers[1][0]["max"] >= 8


def test_the_shared_expert_is_every_tokens_with_a_weight_of_one(monkeypatch) -> None:
    monkeypatch.setattr(cases, "SHARED", replace(SHARED, hidden_size=128, intermediate_size=128))
    problems = cases.problems_of(cases.SHARED, ROOT, "cpu", 1)
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
    for got, wanted in zip(subjects.quantise(x), quantise_rows(x), strict=True):
        assert got.shape == wanted.shape and got.is_contiguous()
        assert calc_diff(got.float(), wanted.float()) < 1e-8


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a sweep checks its outputs")
@pytest.mark.parametrize("shape", [DEEPSEEK_V3, OTHER], ids=["deepseek_v3", "another"])
def test_every_form_gives_the_layer(shape, monkeypatch) -> None:
    def engine(weights, places):
        return lambda ids, topk_weights, x: experts(
            ids, topk_weights, x, *weights, expert_map=places
        )

    def absent(weights, places):
        raise ModuleNotFoundError("No module named 'absent'")

    def solution(logits, bias, x, scale, *rest):
        *weights, offset, factor, out = rest
        options = dict(local_expert_offset=offset, routed_scaling_factor=factor)
        options |= {name: getattr(shape, name) for name in ("n_group", "topk_group", "top_k")}
        fused_moe(logits, bias, x, scale, *weights, **options, out=out)

    for name in ("ENGINES", "CHANNEL_ENGINES"):
        monkeypatch.setattr(subjects, name, {"an engine": engine, "absent": absent})
    recorded = {"a peer": {"peer": True, "hash": "1"}, FUSED: {"peer": False, "hash": "2"}}
    monkeypatch.setattr(
        subjects,
        "BuilderRegistry",
        SimpleNamespace(get_instance=lambda: SimpleNamespace(build=lambda definition, s: s)),
    )
    chosen = subjects.Chosen(None, {"a peer": solution, FUSED: None}, recorded, {})
    v1 = {f"{PREFIX}v1": None}
    other = chosen._replace(solutions=v1, fields={f"{PREFIX}v1": {"peer": False}})
    with pytest.raises(UsageError, match="v1: of ours, only cutedsl_moe_fp8_fused is called"):
        subjects.Engines(DEFAULT, other)
    engines = subjects.Engines(DEFAULT, chosen)
    engines.shape = shape
    layer_inputs, calls = engines(inputs(6, experts=shape.num_experts))
    wanted = torch.empty(6, 256, dtype=torch.bfloat16)
    reference.fused(layer_inputs, wanted, replace(shape, hidden_size=256, intermediate_size=128), 2)
    fields = {name: fields for name, (_, fields) in calls.items()}
    assert len(calls) == 8
    assert [name for name in calls if fields[name]["peer"]] == ["a peer + quantiser", "an engine"]
    assert fields["a peer + quantiser"]["hash"] == "1"
    assert fields["experts bf16"]["hash"] == "2"
    assert chosen.skipped == {"absent": "ModuleNotFoundError: No module named 'absent'"}
    orders: list[tuple[bool, bool]] = []  # of the weights and the scales of ours

    def noted(*arguments, gate_first, x_scale, **options):
        orders.append((gate_first, x_scale is None or x_scale.is_contiguous()))
        return experts(*arguments, gate_first=gate_first, x_scale=x_scale, **options)

    monkeypatch.setattr(subjects, "experts", noted)
    for name, (make, _) in calls.items():
        call = make()
        assert isinstance(call, clock.Returning) == (name == "an engine")
        call.output.fill_(float("nan"))
        call()
        assert calc_diff(call.output, wanted) < LARGEST_DIFF, name
    names = [name for name in calls if name.startswith("experts")]
    assert orders == [(n != "experts fp8 up first", "token-major" not in n) for n in names]
    # Weights with a scale for each channel, and the same in blocks.
    called = subjects.Channels(DEFAULT, chosen._replace(solutions={FUSED: None}))
    called.shape = shape
    layer_inputs, calls = called(inputs(6, experts=shape.num_experts))
    reference.fused(layer_inputs, wanted, replace(shape, hidden_size=256, intermediate_size=128), 2)
    assert [*calls] == ["experts per channel", "experts in blocks", "experts per channel, accurate",
                       "an engine per channel"]  # fmt: skip
    asked: list[tuple[tuple[int, ...], bool]] = []  # the shape of the scales, `accurate`

    def of_scales(ids, weights, x, w13, w13_scale, *arguments, **options):
        asked.append((tuple(w13_scale.shape), options["accurate"]))
        return experts(ids, weights, x, w13, w13_scale, *arguments, **options)

    monkeypatch.setattr(subjects, "experts", of_scales)
    for name, (make, fields) in calls.items():
        call = make()
        call()
        assert calc_diff(call.output, wanted) < LARGEST_DIFF, name
        assert fields["peer"] == name.startswith("an engine")
    assert asked == [((32, 256, 1), False), ((32, 2, 2), False), ((32, 256, 1), True)]


# --- the program ----------------------------------------------------------------------------------


class Problems:
    def __init__(self, layer, *_) -> None:
        self.inputs = SimpleNamespace(definition=SimpleNamespace(inputs=[]))

    def of(self, length: int):
        return MoeInputs(*[length] * 10), "drawn"

    def histogram(self, drawn: MoeInputs) -> cases.Histogram:
        return cases.Histogram("", drawn.routing_logits, (1,), 1)


@pytest.fixture
def sweep(measure, monkeypatch):
    """The program on two numbers of tokens: how it ended, its rows, and what was chosen. A peer has
    no memory for the second."""
    solutions = [SimpleNamespace(name=n, hash=lambda n=n: f"hash of {n}") for n in (OURS, PEER)]
    seen: dict = {}

    def choose(local, use_gpu, definition, **kind):
        seen.update(kind)
        name = definition.packed_name
        return SimpleNamespace(
            trace_set=SimpleNamespace(definitions={"d": SimpleNamespace(inputs=[])}),
            solutions=[
                SimpleNamespace(name=name(s.name), hash=s.hash)
                for s in solutions
                if name(s.name) in kind["solutions"]
            ],
            peers={name(OURS): False, name(PEER): True},
            skipped={"hpc_ops_moe": "not installed"} if definition is DEFAULT else {},
        )

    def measured(into, case, definition, inputs, called, repeats, roofline, limit):
        length = case["tokens"]
        times = {OURS: 0.04 + length / 100, PEER: 0.045}
        for name, ms in ((name, times[name]) for name in called if name in times):
            add = functools.partial(into.add, case, name, **called[name][1])
            if name == PEER and length == 2:
                add(roofline=roofline, error="OutOfMemoryError: CUDA")
                continue
            add(calc_diff=3e-4)
            for name_of_clock, more in (("device", 0.0), ("harness", 0.03)):
                add(value=ms + more, unit="ms", clock=name_of_clock, roofline=roofline)

    monkeypatch.setattr(cases, "choose", choose)
    monkeypatch.setattr(cases, "problems_of", Problems)
    monkeypatch.setattr(layers, "least_ms", lambda *_: 0.04)
    monkeypatch.setattr(layers, "measure_calls", measured)
    return lambda *arguments: (*measure("sweep", "--tokens", "1", "2", "1", *arguments), seen)


TIMES = "0.040 | 0.0800/0.0500 | 0.0750*/0.0450* | 53 %/89 % | 0.94x/0.90x |"
SAID = {
    "": [
        "Harness/device time in ms, * the fastest",
        f"| 1 | 1 | 1 | {TIMES}",
        "| 2 | 1 | 1 | 0.040 | 0.0900*/0.0600* | -/- |",
        "| triton_moe | 2 | OutOfMemoryError: CUDA |",
    ],
    f"--definition glm5 {SHARED.short}": [
        f"| glm5 | 1 | 1 | {TIMES}",
        f"| {SHARED.short} | 2 | 1 | 0.040 | 0.0900*/0.0600* | -/- | 44 %/67 % | -/- |",
        f"| {SHARED.short} | triton_moe | 2 | OutOfMemoryError: CUDA |",
    ],
}


@pytest.mark.parametrize("arguments", SAID)
def test_the_tables_of_one_layer_and_of_several_have(arguments: str, sweep) -> None:
    done, recorded, _ = sweep("--markdown", *arguments.split())
    text = " ".join(done.stdout.split())
    assert done.returncode == EXIT_OK and all(line in text for line in SAID[arguments])
    assert ("| layer | call | T | error |" in text) == bool(arguments), "where there are several"
    if arguments:
        lines = [table.frame.iloc[0].tolist() for table in tables.models_tables(recorded, "models")]
        assert lines == [
            ["glm5", "50.0 (0.90x)", "60.0 (-)"],
            ["glm5", "50.0 (80%, 80%, 0.90x)", "60.0 (67%, 67%, -)"],
        ], "of ours"


GLM5 = [find("glm5").packed_name(name) for name in (OURS, PEER)]
TP8 = [DSV3_TP8.packed_name(name) for name in (OURS, PEER)]
ROWS = [  # options, measurement, solutions that have rows, wanted ones, and what was not tried
    ("", "sweep", [OURS, PEER], [*subjects.SOLUTIONS], {"hpc_ops_moe": "not installed"}),
    (f"--definition glm5 {SHARED.short}", "models", [*GLM5, *TP8], None,
     {subjects.FLASHINFER: "is not packed for the layer"}),
    ("--as engines", "sweep_engines", [OURS, PEER], [OURS, *subjects.PEERS],
     {"vllm fused_experts": "no", "hpc_ops_moe": "not installed"}),
    ("--as channels", "sweep_channels", [OURS], [OURS],
     {"vllm fused_experts": "no", "hpc_ops_moe": "not installed"}),
    (f"--definition glm5 --solutions {PEER} {OURS} sglang_moe", "sweep", GLM5[::-1], GLM5[::-1],
     {"sglang_moe": "is not packed for the layer"}),
]  # fmt: skip


@pytest.mark.parametrize(("options", "name", "solutions", "wanted", "not_tried"), ROWS)
def test_the_rows_are_of(options, name, solutions, wanted, not_tried, sweep, monkeypatch) -> None:
    """`--as channels` needs no peer. The layer in no data set uses the solutions of TP8."""

    def engines(layer, chosen):
        chosen.skipped["vllm fused_experts"] = "no"
        return functools.partial(subjects.of_solutions, layer, chosen)

    monkeypatch.setattr(subjects, "Engines", engines)
    monkeypatch.setattr(subjects, "Channels", engines)
    done, recorded, seen = sweep(*options.split())
    assert done.returncode == EXIT_OK and list(recorded.measurements) == [name]
    assert len({str(row) for row in recorded.rows}) == len(recorded.rows), "each T once"
    assert recorded.measurements[name]["rates"] == RATES
    hashes = {s: f"hash of {OURS if s.startswith(OURS) else PEER}" for s in solutions}
    assert list(recorded.hashes(name).items()) == list(hashes.items()), "in the order of the names"
    assert {r["subject"]: r["not_tried"] for r in recorded.rows if "not_tried" in r} == not_tried
    assert wanted is None or seen["solutions"] == wanted
    if wanted is None:
        assert f"{PEER}_dsv3_tp8" in seen["solutions"] and len(seen["solutions"]) == 7


def test_it_fails_where_one_of_ours_does(sweep, monkeypatch) -> None:
    def wrong(into, case, *_):
        into.add(case, OURS, error="wrong", peer=False)

    monkeypatch.setattr(layers, "measure_calls", wrong)
    done, *_ = sweep()
    assert done.returncode == EXIT_FAILED and f"error: {OURS} at T=2: wrong" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--as engines --definition qwen3_next", "--as engines: not of a layer that clamps or"),
        ("--as channels --definition qwen3_next", "--as channels: not of a layer that clamps or"),
        ("--definition qwen3_next v4_pro", "sweep: not of a layer with given experts"),
        (f"--as channels --solutions {PEER}", "no solution takes such weights"),
        ("--as engines --definition glm5_limit10", "a layer that clamps"),
        ("--solutions triton_moe --definition glm5_limit10", "none of triton_moe is packed"),
        ("--solutions sglang_moe --definition glm5", "none of sglang_moe"),
        ("--solutions fused fusd --definition glm5", "no solution fusd; there are: "),
    ],
)
def test_arguments_that_no_layer_has_are_refused(sweep, arguments: str, message: str) -> None:
    done, *_ = sweep(*arguments.split())
    assert done.returncode == 2 and message in done.stderr


def test_rows_before_the_end_are_kept(sweep, monkeypatch) -> None:
    real = layers.measure_calls

    def until_the_first(into, case, *rest):
        if case["tokens"] == 2:
            raise KeyboardInterrupt
        real(into, case, *rest)

    monkeypatch.setattr(layers, "measure_calls", until_the_first)
    done, recorded, _ = sweep()
    assert done.returncode == EXIT_INTERRUPTED and {row["tokens"] for row in recorded.rows} == {1}
    tail = re.search(r"^interrupted\n(\d+) rows added to .*\n\Z", done.stderr, re.MULTILINE)
    assert tail and int(tail[1]) == len(recorded.rows), (
        "and nothing is said to be kept without --out"
    )
