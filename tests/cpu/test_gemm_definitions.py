"""The grouped GEMMs as definitions: interface, reference, workloads, solutions, programs."""

import dataclasses
import hashlib
import json
import sys

import fake_libraries
import numpy as np
import pytest
import torch
from flashinfer_bench.data import Definition, Solution, load_json_file
from markers import more
from moe_fp8.gemms import batched, flat
from moe_fp8.layer import model
from moe_fp8.layer.metrics import calc_diff, matched_ratio
from moe_fp8.problem import DEEPSEEK_V3
from programs import packed_once
from test_definitions import listing, unpacked  # noqa: F401

from scripts.common.command_line import UsageError
from scripts.common.definitions import CONTIGUOUS, DEFAULT, GEMMS, MASKED, GemmDefinition, size_of
from scripts.common.project import BASELINES, PACKAGE_DIR, ROOT
from scripts.data import dataset, workload_specs
from scripts.measure import gemm_problems, plan
from scripts.pack import pack
from scripts.programs import bench, check
from scripts.programs import make_workloads as program

FP8, F32, I32 = "float8_e4m3fn", "float32", "int32"
every = pytest.mark.parametrize("definition", GEMMS, ids=lambda d: d.short)
ROWS = (0, 1, 17, 129, 0, 3)
EXPERTS, N, K, MAX_ROWS = len(ROWS), 256, 384, 256
"""References and solutions take every size from their arguments."""


def load(definition: GemmDefinition) -> Definition:
    return load_json_file(Definition, ROOT / definition.path)


NAMES = {
    "gemm1": ("grouped_gemm_fp8_e32_n4096_k7168", 4096, 7168),
    "gemm2": ("grouped_gemm_fp8_e32_n7168_k2048", 7168, 2048),
    "gemm1_masked": ("grouped_gemm_masked_fp8_e32_n4096_k7168", 4096, 7168),
    "gemm2_masked": ("grouped_gemm_masked_fp8_e32_n7168_k2048", 7168, 2048),
}


def test_names_and_shapes_are_the_layers() -> None:
    assert {d.short: (d.name, d.n, d.k) for d in GEMMS} == NAMES
    assert {(d.n, d.k) for d in GEMMS} == set(gemm_problems.LAYER_SHAPES.values())


@every
def test_interface(definition) -> None:
    loaded = load(definition)
    _, n, k = NAMES[definition.short]
    weights = [("b", [32, n, k], FP8), ("b_scale", [32, n // 128, k // 128], F32)]
    if definition.rows == MASKED:
        sizes, out = {"max_rows": 256}, [32, 256, n]
        inputs = [("a", [32, 256, k], FP8), ("a_scale", [32, k // 128, 256], F32), *weights]
        inputs += [("masked_m", [32], I32), ("expected_m", None, I32)]
    else:
        sizes, out = {"total_rows": 5}, [5, n]
        inputs = [("a", [5, k], FP8), ("a_scale", [k // 128, 5], F32), *weights]
        inputs += [("m_indptr", [33], I32)]
    assert loaded.op_type == "grouped_gemm" and loaded.var_axes == list(sizes)
    shapes = loaded.get_input_shapes(sizes)
    dtypes = [spec.dtype.value for spec in loaded.inputs.values()]
    assert list(zip(loaded.inputs, shapes, dtypes, strict=True)) == inputs
    assert loaded.get_output_shapes(sizes) == [out]
    assert [o.dtype.value for o in loaded.outputs.values()] == ["bfloat16"]
    assert "zero in the output" in loaded.description or definition.rows == CONTIGUOUS


# --- the references and the solutions -------------------------------------------------------------


def fp8(generator: torch.Generator, *dims: int) -> torch.Tensor:
    return torch.randn(dims, generator=generator).clamp_(-2, 2).to(torch.float8_e4m3fn)


def arguments(layout: str, rows: tuple[int, ...] = ROWS) -> list:
    """In the definition's order; reserved rows that are not an expert's hold NaN."""
    generator = torch.Generator().manual_seed(sum(rows))

    def normal(*dims: int) -> torch.Tensor:
        return torch.randn(dims, generator=generator)

    weights = [fp8(generator, len(rows), N, K), normal(len(rows), N // 128, K // 128)]
    counts = torch.tensor(rows, dtype=torch.int32)
    if layout == CONTIGUOUS:
        ends = counts.cumsum(0, dtype=torch.int32)
        m_indptr = torch.cat([ends.new_zeros(1), ends])
        return [fp8(generator, sum(rows), K), normal(K // 128, sum(rows)), *weights, m_indptr]
    a, a_scale = fp8(generator, len(rows), MAX_ROWS, K), normal(len(rows), K // 128, MAX_ROWS)
    reserved = torch.arange(MAX_ROWS) >= counts.unsqueeze(1)
    a.view(torch.uint8)[reserved] = 0x7F  # NaN
    a_scale.transpose(1, 2)[reserved] = torch.nan
    return [a, a_scale, *weights, counts, 25]


def new_output(inputs: list) -> torch.Tensor:
    return torch.full((*inputs[0].shape[:-1], N), torch.nan, dtype=torch.bfloat16)


def row_by_row(layout: str, inputs: list) -> torch.Tensor:
    """In float64, one row and one scale block after the other."""
    a, a_scale, b, b_scale, rows = inputs[:5]
    wanted = torch.zeros(*a.shape[:-1], N, dtype=torch.float64)
    for expert in range(len(b)):
        first = int(rows[expert]) if layout == CONTIGUOUS else 0
        end = int(rows[expert + 1]) if layout == CONTIGUOUS else int(rows[expert])
        x, scale, out = (a, a_scale, wanted) if a.dim() == 2 else (
            a[expert], a_scale[expert], wanted[expert]
        )  # fmt: skip
        for row in range(first, end):
            for kb in range(K // 128):
                columns = slice(128 * kb, 128 * kb + 128)
                products = b[expert, :, columns].double() @ x[row, columns].double()
                factors = b_scale[expert, :, kb].double().repeat_interleave(128)
                out[row] += float(scale[kb, row]) * factors * products
    return wanted


def reference(definition: GemmDefinition):
    namespace: dict = {}
    exec(compile(load(definition).reference, "reference", "exec"), namespace)
    return namespace["run"]


def test_both_shapes_have_one_reference() -> None:
    one, two, masked_one, masked_two = (load(definition).reference for definition in GEMMS)
    assert one == two != masked_one == masked_two


@pytest.mark.parametrize("rows", [ROWS, (0, 0), (1,), (0, 130)], ids=str)
@pytest.mark.parametrize("definition", GEMMS[::2], ids=lambda d: d.short)
def test_reference_against_loop(definition, rows) -> None:
    inputs = arguments(definition.rows, rows)
    got, wanted = reference(definition)(*inputs), row_by_row(definition.rows, inputs)
    assert got.dtype == torch.bfloat16 and got.shape == wanted.shape
    assert bool((wanted != 0).any()) == (sum(rows) > 0)
    torch.testing.assert_close(got.double(), wanted, rtol=2**-8, atol=1e-4)


def is_right(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Within a rounding of bfloat16, and the same rows zero."""
    same_rows = torch.equal(got.ne(0).any(-1), wanted.ne(0).any(-1))
    return bool(got.isfinite().all()) and same_rows and calc_diff(got, wanted) < 1e-6


@pytest.mark.all
@every
def test_packed_solutions(definition, unpacked) -> None:  # noqa: F811
    """A bundle of ours computes, a peer's asks for a GPU."""
    found = pack.generations(definition=definition)
    ours, theirs = ("flat", "contiguous") if definition.rows == CONTIGUOUS else ("batched", MASKED)
    assert {g.path.stem for g in found} == {ours, f"deepgemm_{theirs}"}
    for generation in found:
        packed = json.loads(packed_once(generation))
        assert packed["definition"] == definition.name
        assert packed["name"] == f"{generation.metadata['name']}_{definition.short}"
        run, inputs = unpacked(generation), arguments(definition.rows)
        output = new_output(inputs)
        if generation.path.parent.name == BASELINES:
            with pytest.raises(RuntimeError, match="unsupported on cpu"):
                run(*inputs, output)
            continue
        for rows in (ROWS, (0, 0), (1,), (0, 130)):
            inputs = arguments(definition.rows, rows)
            output = new_output(inputs)
            run(*inputs, output)
            assert is_right(output, reference(definition)(*inputs))


FAULTS = {
    "the next row's scale": lambda a, s, b, t, out, rows: (a, s.roll(1, 1), b, t, out, rows),
    "the next block's scale": lambda a, s, b, t, out, rows: (a, s.roll(1, 0), b, t, out, rows),
    "the next expert's scale": lambda a, s, b, t, out, rows: (a, s, b, t.roll(1, 0), out, rows),
    "half the scale": lambda a, s, b, t, out, rows: (a, s / 2, b, t, out, rows),
    "the next expert": lambda a, s, b, t, out, rows: (a, s, b.roll(1, 0), t, out, rows),
    "a row less": lambda a, s, b, t, out, rows: (
        a, s, b, t, out, torch.stack([rows[0], (rows[1] - 1).maximum(rows[0])])
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", [CONTIGUOUS, MASKED])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_noticed(layout, fault, monkeypatch) -> None:
    """By what the tests here and on the GPU compare with."""
    definition = next(d for d in GEMMS if d.rows == layout)
    inputs = [x.nan_to_num() if isinstance(x, torch.Tensor) and x.dtype == torch.float32 else x
              for x in arguments(layout)]  # fmt: skip
    if layout == MASKED:  # a fault shows by itself, not by the NaN that it spreads
        inputs[0].view(torch.uint8)[inputs[0].isnan()] = 0x30
    right, wrong, wanted = new_output(inputs), new_output(inputs), reference(definition)(*inputs)
    module = flat if layout == CONTIGUOUS else batched

    def faulty(*operands) -> None:
        operands, _ = operands[:6], wrong.zero_()
        model.grouped_gemm(*FAULTS[fault](*operands))

    module.run(*inputs, right)
    assert is_right(right, wanted)
    backend = type("Backend", (), {"grouped_gemm": staticmethod(faulty)})
    monkeypatch.setattr(module, "select", lambda device: backend)
    module.run(*inputs, wrong)
    assert not is_right(wrong, wanted) and matched_ratio(wrong, wanted, 0.01, 0.01) < 1


WRONG = {
    "a": [lambda x: x.float(), lambda x: x[..., :-128], lambda x: x.unsqueeze(0), lambda x: None],
    "a_scale": [lambda x: x.half(), lambda x: x[..., :-1], lambda x: x.transpose(-1, -2)],
    "b": [lambda x: x[0], lambda x: x[:, :-1], lambda x: x.view(torch.int8), lambda x: 3],
    "b_scale": [lambda x: x[:-1], lambda x: x.to("meta"), lambda x: x.double()],
    "rows": [lambda x: x.long(), lambda x: x[1:], lambda x: x.tolist()],
    "out": [lambda x: x.float(), lambda x: x[..., :-1], lambda x: x.transpose(-1, -2)],
}


@pytest.mark.parametrize("layout", [CONTIGUOUS, MASKED])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(layout, name) -> None:
    inputs = arguments(layout)
    run, place = (flat.run if layout == CONTIGUOUS else batched.run), list(WRONG).index(name)
    place = -1 if name == "out" else place
    said = {"rows": "m_indptr" if layout == CONTIGUOUS else "masked_m"}.get(name, name)
    for wrong in WRONG[name]:
        given = [*inputs, new_output(inputs)]
        given[place] = wrong(given[place])
        with pytest.raises(ValueError, match=f"^{said}: expected .*, got "):
            run(*given)
        assert given[-1] is None or bool(given[-1].isnan().all()), "nothing was written"


def test_wrong_rows_of_the_masked_layout_are_named() -> None:
    inputs = arguments(MASKED)
    given = [*inputs, new_output(inputs)]
    for wrong in (2.5, None, True, torch.tensor(3)):
        given[5] = wrong
        with pytest.raises(ValueError, match="^expected_m: expected an integer, got "):
            batched.run(*given)
    a, out = given[0][:, :100].contiguous(), given[-1][:, :100].contiguous()
    with pytest.raises(ValueError, match="^a: expected max_rows a multiple of 128, got 100"):
        batched.run(a, *given[1:5], 3, out)


@pytest.mark.parametrize("expected", [-5, 0, 1, 10**6])
def test_the_expected_rows_change_nothing(expected) -> None:
    inputs = arguments(MASKED)
    outputs = [new_output(inputs) for _ in range(2)]
    batched.run(*inputs, outputs[0])
    batched.run(*inputs[:5], expected, outputs[1])
    assert torch.equal(*outputs)


@pytest.mark.parametrize("rows", [(0, 0), *more((ROWS,))], ids=str)
@pytest.mark.parametrize("layout", [CONTIGUOUS, MASKED])
def test_peers_on_a_stand_in_for_the_library(layout, rows, monkeypatch) -> None:
    """Triton in its interpreter; the masked stand-in stores whole tiles, as the real kernel."""
    pytest.importorskip("triton", reason="triton is not installed")
    from moe_fp8.baselines import deepgemm_contiguous, deepgemm_masked

    library = fake_libraries.deep_gemm(DEEPSEEK_V3)
    masked = library.m_grouped_fp8_fp4_gemm_nt_masked

    def whole_tiles(a, b, d, masked_m, **rest) -> None:
        for expert, count in enumerate(masked_m.tolist()):
            d[expert, count : -(-count // 64) * 64] = torch.nan
        masked(a, b, d, masked_m, **rest)

    monkeypatch.setattr(library, "m_grouped_fp8_fp4_gemm_nt_masked", whole_tiles)
    monkeypatch.setitem(sys.modules, "deep_gemm", library)
    module = deepgemm_contiguous if layout == CONTIGUOUS else deepgemm_masked
    monkeypatch.setattr(module, "require_gpu", lambda device, capabilities: None)
    monkeypatch.setattr(module, "require_first_device", lambda device: None)
    inputs = arguments(layout, rows)
    output, definition = new_output(inputs), next(d for d in GEMMS if d.rows == layout)
    if layout == MASKED:
        output.zero_()  # rows of no tile; what the real kernel leaves there is not known either
        output[:, 64:].fill_(torch.nan)
    module.run(*inputs, output)
    assert is_right(output, reference(definition)(*inputs))


def test_peers_pack_without_our_kernels() -> None:
    for definition in GEMMS:
        for generation in pack.generations(definition=definition):
            if generation.path.parent.name != BASELINES:
                continue
            sources = {s["path"] for s in json.loads(packed_once(generation))["sources"]}
            assert not any(path.startswith("moe_fp8/kernels/") for path in sources)


def test_a_packed_solution_is_one_of_flashinfer_bench() -> None:
    for generation in pack.generations(definition=GEMMS[0]):
        content = pack.pack(generation)
        pack.validate(content, ROOT / GEMMS[0].path)
        assert Solution.model_validate_json(content).name == generation.name
        assert generation.path.is_relative_to(PACKAGE_DIR)


# --- the workloads --------------------------------------------------------------------------------


@every
def test_workload_files_are_what_the_script_writes(definition, tmp_path) -> None:
    committed = workload_specs.load_specs(definition)
    drawn = workload_specs.own_specs(definition, 901)
    assert committed[: len(drawn)] == drawn
    assert tuple(s.seq_len for s in committed) == definition.tokens
    for path in workload_specs.write_specs(committed, tmp_path):
        assert path.read_text() == (ROOT / path.relative_to(tmp_path)).read_text()
    for spec in committed:
        layer = next(s for s in workload_specs.load_specs() if s.uuid == spec.layer)
        counts = layer.counts
        assert (sum(spec.rows), max(spec.rows)) == (counts["pairs"], counts["max"])
        assert sum(r > 0 for r in spec.rows) == counts["active"] and layer.seq_len == spec.seq_len


def test_rows_are_those_of_the_layers_own_routing(tmp_path) -> None:
    """By torch instead of the generator's NumPy."""
    trace_set, _ = dataset.load(ROOT)
    (found,) = dataset.select_workloads(trace_set.workloads[DEFAULT.name], ["80"])
    workload_specs.make_workloads(tmp_path, [found.workload.uuid])
    trace_set = dataclasses.replace(trace_set, root=tmp_path)
    rows = gemm_problems.histogram(trace_set, found.workload).rows
    for definition in GEMMS:
        specs = workload_specs.load_specs(definition)
        assert next(s for s in specs if s.seq_len == 80).rows == rows


@every
def test_inputs_of_a_workload(definition, tmp_path) -> None:
    """As flashinfer-bench loads what the definition says."""
    from flashinfer_bench.bench.utils import load_safetensors

    trace_set, _ = dataset.load(ROOT, definition)
    traces = trace_set.workloads[definition.name]
    arguments = ["--root", str(tmp_path), "--definition", definition.short]
    assert program.main(arguments) == 0
    specs = workload_specs.load_specs(definition)
    assert len(list(tmp_path.rglob("*.safetensors"))) == len(specs) == len(traces)
    for trace, spec in zip(traces, specs, strict=True):
        content = (tmp_path / workload_specs.blob_path(spec)).read_bytes()
        assert hashlib.sha256(content).hexdigest() == spec.sha256
        loaded = load_safetensors(load(definition), trace.workload, tmp_path)
        ((name, tensor),) = loaded.items()
        axes = trace.workload.axes
        if definition.rows == MASKED:
            assert name == "masked_m" and tuple(tensor.tolist()) == spec.rows
            assert max(spec.rows) <= axes["max_rows"] and axes["max_rows"] % 128 == 0
            assert trace.workload.inputs["expected_m"].value == -(-spec.seq_len // 32)
        else:
            assert name == "m_indptr" and tuple(np.diff(tensor)) == spec.rows
            assert tensor[0] == 0 and tensor[-1] == axes["total_rows"]
        assert dataset.tokens(trace.workload) == next(iter(axes.values()))


# --- the programs ---------------------------------------------------------------------------------


def test_the_size_of_a_workload() -> None:
    assert size_of({"seq_len": 7}) == size_of({"total_rows": 7}) == size_of({"max_rows": 7}) == 7
    assert size_of({"batch": 7}) == 0
    for wrong in ("many", [7]):
        with pytest.raises((TypeError, ValueError)):
            size_of({"seq_len": wrong})


@every
def test_bench_lists_what_there_is_for_the_definition(definition, listing) -> None:  # noqa: F811
    listed = listing(definition)
    assert all(g.name in listed for g in pack.generations(definition=definition))
    assert "cutedsl_moe" not in listed and "needs a GPU" in listed


@pytest.mark.all
@every
def test_the_cpu_has_workloads_of_its_own_accord(definition, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.py", "--cpu", "--definition", definition.short])
    monkeypatch.setattr(pack, "validate", lambda *_: None)
    monkeypatch.setattr(plan, "make_missing_workloads", lambda *_: None)
    chosen = bench.make_plan(bench.parse_arguments(), False)
    assert len(chosen.workloads) >= 2
    assert all("cutedsl_gemm_fp8" in s.name for s in chosen.solutions) and chosen.solutions


def test_batches_are_of_tokens(monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["check.py", "--only", "bits", "--definition", "gemm1"])
    with pytest.raises(UsageError, match="only a layer has tokens"):
        check.main()
