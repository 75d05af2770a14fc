"""The definitions with MXFP4 weights: that what one says agrees, that its reference and our layers
compute it, and that weights are prepared once."""

import re
from dataclasses import replace

import pytest
import torch
from flashinfer_bench.bench.utils import load_safetensors
from flashinfer_bench.data import Trace
from moe_fp8 import experts, from_mxfp4
from moe_fp8.four_bits import packed, reencoded, weights
from moe_fp8.four_bits.weights import Prepared, signature
from moe_fp8.ladder.adapter import run_of
from moe_fp8.shape import MoeShape
from mxfp4_values import SOLUTION_SHAPE as SHAPE
from mxfp4_values import arguments, decoded
from test_definitions import load

from scripts import data
from scripts.common.definitions import MXFP4, find, weight_bytes
from scripts.common.program import ROOT
from scripts.measuring import cases

LIMIT = 10.0
every = pytest.mark.parametrize("definition", MXFP4, ids=lambda d: d.short)


# --- what a definition says ----------------------------------------------------------------------


@every
def test_name_axes_and_inputs_are_those_that_our_solutions_take(definition) -> None:
    loaded, shape = load(definition), MoeShape(**definition.shape)
    assert (loaded.name, loaded.op_type, list(loaded.var_axes)) == (
        definition.name,
        "moe",
        ["seq_len"],
    )
    tensors = {n: s for n, s in (loaded.inputs | loaded.outputs).items() if s.shape}
    dims = loaded.get_input_shapes({"seq_len": 256}) + loaded.get_output_shapes({"seq_len": 256})
    got = {
        name: (tuple(shape), getattr(torch, spec.dtype.value))
        for (name, spec), shape in zip((loaded.inputs | loaded.outputs).items(), dims, strict=True)
        if name in tensors
    }
    assert got == {spec.name: (spec.shape, spec.dtype) for spec in signature(shape, 256).specs}
    assert [n for n in loaded.inputs if n not in got] == ["local_expert_offset"]
    sizes = {k: int(v) for k, v in re.findall(r"_(e|h|i|topk|limit)(\d+)", definition.name)}
    assert sizes == {
        "topk": 6, "e": shape.num_local_experts, "h": shape.hidden_size,
        "i": shape.intermediate_size, "limit": LIMIT,
    }  # fmt: skip
    assert shape.swiglu.limit == LIMIT and shape.top_k == loaded.const_axes["top_k"] == 6
    values = shape.num_local_experts * definition.expert_weights
    assert shape.num_local_experts * weight_bytes(definition) == values * 17 // 32
    assert not definition.large


def test_references_differ_in_their_docstrings_alone() -> None:
    assert len({load(definition).reference.split('"""\n', 1)[1] for definition in MXFP4}) == 1


@every
def test_pinned_scales_are_powers_of_two_that_fp8_holds(definition, tmp_path) -> None:
    """The file is the one that every workload names; flashinfer-bench loads it."""
    small = replace(definition, num_local_experts=2)
    scales = data.weight_scales(small)
    for name, (n, k) in zip(scales, definition.gemms, strict=True):
        assert scales[name].shape == (2, n, k // 32) and scales[name].dtype == torch.int8
        exponents, counts = scales[name].unique(return_counts=True)
        assert exponents.tolist() == [117, 118, 119, 120, 121]
        shares = counts.double() / counts.sum()
        assert (shares - torch.tensor([1, 4, 6, 4, 1]) / 16).abs().max() < 1e-2
    first, second = scales.values()
    assert not torch.equal(first.flatten()[:4096], second.flatten()[:4096])
    path = f"./{data.scales_path(definition).as_posix()}"
    lines = (ROOT / data.workloads_path(definition)).read_text().splitlines()
    for trace in map(Trace.model_validate_json, lines):
        named = {n: i for n, i in trace.workload.inputs.items() if i.type == "safetensors"}
        assert {n for n, i in named.items() if i.path == path} == scales.keys()
        assert set(named) - scales.keys() == {"topk_ids", "topk_weights"}


@every
def test_tensors_of_a_workload(definition, tmp_path, monkeypatch) -> None:
    """The chosen experts are in order, their weights add up to the factor, and the file of scales
    is made beside theirs."""
    made = {"gemm1_weights_scale": torch.zeros(2, dtype=torch.int8)}
    monkeypatch.setattr(data, "weight_scales", lambda definition: made)
    stored = data.read(data.spec_path(definition))
    changed = stored | {"scales_sha256": data.digest(made)}
    monkeypatch.setattr(
        data, "read", lambda path: changed if path == data.spec_path(definition) else stored
    )
    spec = next(s for s in data.load_specs(definition) if s.seq_len == 16)
    paths = data.make_workloads(tmp_path, [spec.uuid], definition)
    assert paths == [tmp_path / data.blob_path(spec), tmp_path / data.scales_path(definition)]
    assert all(path.is_file() for path in paths)
    lines = (ROOT / data.workloads_path(definition)).read_text().splitlines()
    (trace,) = (t for t in map(Trace.model_validate_json, lines) if t.workload.uuid == spec.uuid)
    chosen = {n: i for n, i in trace.workload.inputs.items() if n.startswith("topk")}
    workload = trace.workload.model_copy(update={"inputs": chosen})
    loaded = load_safetensors(load(definition), workload, tmp_path)
    ids, factors = loaded["topk_ids"], loaded["topk_weights"]
    assert ids.tolist() == spec.draw().ids.tolist()
    assert (ids.diff(dim=1) > 0).all() and 0 <= ids.min() and ids.max() < definition.num_experts
    total = torch.full((16,), definition.routed_scaling_factor)
    torch.testing.assert_close(factors.sum(1), total, rtol=2**-7, atol=0)
    assert torch.equal(factors, factors.bfloat16().float()) and (factors > 0).all()
    offset = trace.workload.inputs["local_expert_offset"].value
    rows = cases.of_ids(spec.uuid, ids, offset, definition).counts()
    assert rows == {"tokens": 16, **spec.counts}


def test_random_weights_have_every_code() -> None:
    """A normal draw rounds to bytes from -4 to 4: few of the 256."""
    definition = load(find("v4_pro"))
    w = cases.draw(definition, "gemm1_weights", (2, 128, 64), torch.device("cpu"), 1)
    assert w.dtype == torch.int8 and len(w.unique()) == 256
    assert torch.equal(w, cases.draw(definition, "gemm1_weights", w.shape, w.device, 1))


def test_constant_inputs_of_a_file_are_read_once(monkeypatch) -> None:
    """So that weights and scales stay those that a solution has prepared. Both scales lie in one
    file."""
    definition = load(find("v4_pro"))
    line = (ROOT / data.workloads_path(find("v4_pro"))).read_text().splitlines()[0]
    workload = Trace.model_validate_json(line).workload
    pinned = [name for name, spec in workload.inputs.items() if spec.type == "safetensors"]
    tensors = {name: torch.tensor([value]) for value, name in enumerate(pinned)}
    shapes = [None if spec.shape is None else (1,) for spec in definition.inputs.values()]
    fresh = lambda *_: ({n: t.clone() for n, t in tensors.items()}, shapes)  # noqa: E731
    monkeypatch.setattr(cases, "load_tensors", fresh)
    monkeypatch.setattr(cases, "definition_of", lambda trace_set: definition)
    inputs = cases.Inputs(None, "cpu", 1)  # type: ignore[arg-type]
    once, again = inputs.of(workload), inputs.of(workload)
    named = dict(zip(definition.inputs, once, strict=True))
    assert {name: named[name] for name in pinned} == tensors
    same = {n for n, a, b in zip(definition.inputs, once, again, strict=True) if a is b}
    assert {n for n in definition.inputs if n.startswith("gemm")} <= same
    assert not {"topk_ids", "topk_weights", "hidden_states"} & same


# --- the reference and our layers ----------------------------------------------------------------


def by_hand(a: dict) -> torch.Tensor:
    """The layer in float64, one token and one expert after the other."""
    w13, w2 = (
        decoded(a[name].view(torch.uint8), a[f"{name}_scale"])
        for name in ("gemm1_weights", "gemm2_weights")
    )
    x = a["hidden_states"].double()
    out = torch.zeros_like(x)
    for token, (ids, factors) in enumerate(zip(a["topk_ids"], a["topk_weights"], strict=True)):
        for expert, factor in zip(ids.tolist(), factors.tolist(), strict=True):
            local = expert - a["local_expert_offset"]
            if 0 <= local < len(w13):
                gate, up = (w13[local] @ x[token]).chunk(2)
                gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
                out[token] += factor * (w2[local] @ (gate / (1 + torch.exp(-gate)) * up))
    return out


@pytest.mark.parametrize("offset", [0, 18, -3, 30])
def test_reference_against_loop(offset) -> None:
    namespace: dict = {}
    exec(compile(load(MXFP4[0]).reference, "reference", "exec"), namespace)
    a = arguments(9, offset)
    wanted, got = by_hand(a), namespace["run"](**a)
    assert got.dtype == torch.bfloat16 and torch.equal(got.double() == 0, wanted == 0)
    assert (wanted != 0).any() == (offset < 24)
    tolerance = 1e-4 * float(wanted.std())
    torch.testing.assert_close(got.double(), wanted, rtol=2**-7, atol=tolerance)
    without = namespace["run"](
        **a | {k: a[k][:0] for k in ("topk_ids", "topk_weights", "hidden_states")}
    )
    assert without.shape == (0, SHAPE.hidden_size)


@pytest.mark.parametrize("offset", [0, 18, -3, 30])
def test_packed_and_reencoded_layers_give_the_bits_of_experts(offset) -> None:
    a = arguments(9, offset)
    u8 = [a[name].view(torch.uint8) for name in list(a)[3:7]]
    fp8 = *from_mxfp4(*u8[:2]), *from_mxfp4(*u8[2:])
    options = dict(local_expert_offset=offset, num_experts=24, swiglu_limit=LIMIT)
    wanted = experts(a["topk_ids"], a["topk_weights"], a["hidden_states"], *fp8, **options)
    assert (wanted != 0).any() == (offset < 24)
    for module in (packed, reencoded):
        output = torch.full_like(wanted, torch.nan)
        run_of(module.layer_at(SHAPE), SHAPE)(*a.values(), output)
        assert torch.equal(output, wanted), module.__name__


def test_on_the_cpu_the_chosen_experts_alone_are_prepared() -> None:
    a = arguments(1, 0)
    a["topk_ids"] = torch.tensor([[2, 5, 23]], dtype=torch.int32)
    prepared: list[int] = []

    def make(w13, *rest):
        (expert,) = (e for e in range(6) if torch.equal(w13[0], whole[0][e].view(torch.uint8)))
        prepared.append(expert)
        return reencoded.encode(w13, *rest)

    layer = reencoded.layer_at(SHAPE)
    layer.prepared.make = make
    whole = [a[name] for name in list(a)[3:7]]
    run_of(layer, SHAPE)(*a.values(), torch.empty(1, 256, dtype=torch.bfloat16))
    assert prepared == [2, 5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topk_ids": lambda t: t.long()}, "topk_ids: expected dtype torch.int32, got torch.int64"),
        ({"topk_weights": lambda t: t[:, :2]}, r"topk_weights: expected shape \[9, 3\]"),
        ({"hidden_states": lambda t: t.float()}, "hidden_states: expected dtype torch.bfloat16"),
        ({"gemm1_weights": lambda t: t.view(torch.uint8)}, "gemm1_weights: expected dtype torch.i"),
        ({"gemm1_weights_scale": lambda t: t[:5]}, r"gemm1_weights_scale: expected shape \[6, 25"),
        ({"gemm2_weights": lambda t: t.mT.contiguous().mT}, "gemm2_weights: expected a contiguous"),
        ({"gemm2_weights_scale": lambda t: t - t - 1}, "scales: expected powers of two, got NaN"),
        ({"local_expert_offset": lambda t: 0.5}, "local_expert_offset: expected an integer"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("module", [packed, reencoded])
def test_wrong_arguments_are_refused_by_name(module, change, message) -> None:
    a = arguments(9, 0)
    a |= {name: edit(a[name]) for name, edit in change.items()}
    with pytest.raises(ValueError, match=f"^{message}"):
        run_of(module.layer_at(SHAPE), SHAPE)(
            *a.values(), torch.empty(9, 256, dtype=torch.bfloat16)
        )


# --- weights that are prepared once --------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """The values that were prepared, on CPU tensors as on a GPU."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    capturing = False
    return []


@pytest.fixture
def prepared(calls) -> Prepared:
    def make(w, scale):
        calls.append(int(w[0, 0]))
        return (w + scale,)

    return Prepared(make)


def pair(value: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((2, 8), value, dtype=torch.int8), torch.ones((2, 8), dtype=torch.int8)


def test_equal_weights_are_prepared_once(prepared, calls, monkeypatch) -> None:
    """Also copies in other memory, as flashinfer-bench passes them, which are compared once."""
    first = pair(1)
    copies = tuple(w.clone() for w in first)
    made = prepared(first)
    assert prepared(first) is prepared(copies) is made
    monkeypatch.setattr(weights, "_equal", None)
    assert prepared(copies) is made and calls == [1] and made[0].tolist() == [[2] * 8] * 2


@pytest.mark.parametrize("place", [0, 1])
def test_one_other_byte_is_prepared_anew(place, prepared, calls) -> None:
    first = pair(1)
    prepared(first)
    other = tuple(w.clone() for w in first)
    other[place][1, 7] += 1
    assert prepared(other)[0][1, 7] == 3 and prepared(first)[0][1, 7] == 2
    assert calls == [1, 1, 1]


def test_weights_that_changed_in_place_are_prepared_anew(prepared, calls) -> None:
    """Also those that are compared with them: the kept tensors are no longer the prepared ones."""
    first = pair(1)
    prepared(first)
    first[0].fill_(5)
    assert prepared(tuple(w.clone() for w in first))[0][0, 0] == 6
    prepared(first)
    with torch.inference_mode():
        first[0].fill_(7)
        assert prepared(first)[0][0, 0] == 8
    assert calls == [1, 5, 7]


def test_tensors_of_inference_mode_are_always_prepared(prepared, calls) -> None:
    """torch does not count their changes."""
    with torch.inference_mode():
        first = pair(1)
    prepared(first)
    with torch.inference_mode():
        first[0].fill_(5)
    assert prepared(first)[0][0, 0] == 6 and calls == [1, 5]


def test_a_captured_call_takes_the_last_tensors_alone(prepared, calls, monkeypatch) -> None:
    """A comparison would make the host wait, which a capture forbids."""
    first = pair(1)
    prepared(first)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(weights, "_equal", None)
    assert prepared(first)[0][0, 0] == 2
    with pytest.raises(RuntimeError, match="^weights: expected those of an earlier call"):
        prepared(tuple(w.clone() for w in first))
    assert calls == [1]
