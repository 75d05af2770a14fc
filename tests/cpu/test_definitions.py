"""The layers as definitions: interface, reference, workloads and packed solutions."""

import dataclasses
import hashlib
import importlib
import inspect
import json
import shutil
import sys
from pathlib import Path

import bruteforce
import numpy as np
import pytest
import torch
from flashinfer_bench.data import Definition, TraceSet, load_json_file
from moe_fp8 import v4_flat, v5_fused, v6_fused_hifi
from moe_fp8.layer.calls import run_of
from moe_fp8.layer.metrics import calc_diff
from moe_fp8.problem import MoeInputs, MoeShape
from one_token import arguments
from programs import packed_once

from scripts.common import definitions
from scripts.common.command_line import UsageError
from scripts.common.definitions import DEFAULT, MOE, TABLE, MoeDefinition
from scripts.common.project import BASELINES, DEFINITION, ROOT
from scripts.data import dataset, workload_specs
from scripts.data.synthetic_logits import routing_bias
from scripts.pack import pack, sources
from scripts.programs import bench, make_definition
from scripts.programs import make_workloads as program
from scripts.table import recorded

FP8, F32, BF16 = "float8_e4m3fn", "float32", "bfloat16"
OTHERS = MOE[1:]
every = pytest.mark.parametrize("definition", OTHERS, ids=lambda d: d.short)
every_layer = pytest.mark.parametrize("definition", MOE, ids=lambda d: d.short or "default")
KINDS = list({(d.routing, d.n_group, d.top_k): d for d in reversed(OTHERS)}.values())
"""Of those whose code is the same but for sizes the first."""
one_of_a_kind = pytest.mark.parametrize("definition", KINDS, ids=lambda d: d.short)
SMALL = 1024
"""Tokens of the largest workload whose draw is looked at here."""


def load(definition: MoeDefinition) -> Definition:
    return load_json_file(Definition, ROOT / definition.path)


def weights_of(e: int, h: int, i: int) -> list[tuple[str, list[int], str]]:
    return [
        ("gemm1_weights", [e, 2 * i, h], FP8),
        ("gemm1_weights_scale", [e, 2 * i // 128, h // 128], F32),
        ("gemm2_weights", [e, h, i], FP8),
        ("gemm2_weights_scale", [e, h // 128, i // 128], F32),
    ]


def deepseek_v3(t: int, experts: int, e: int, h: int, i: int) -> list[tuple]:
    return [
        ("routing_logits", [t, experts], F32),
        ("routing_bias", [experts], BF16),
        ("hidden_states", [t, h], FP8),
        ("hidden_states_scale", [h // 128, t], F32),
        *weights_of(e, h, i),
        ("local_expert_offset", None, "int32"),
        ("routed_scaling_factor", None, F32),
    ]


def renormalize(t: int, e: int, h: int, i: int) -> list[tuple]:
    return [
        ("routing_logits", [t, e], BF16),
        ("hidden_states", [t, h], FP8),
        ("hidden_states_scale", [h // 128, t], F32),
        *weights_of(e, h, i),
    ]


PUBLIC = {
    DEFINITION: (
        {"num_experts": 256, "num_local_experts": 32},
        deepseek_v3(5, 256, 32, 7168, 2048),
    ),
    "moe_fp8_block_scale_ds_routing_topk8_ng1_kg1_e48_h7168_i2048": (
        {"num_experts": 384, "num_local_experts": 48, "top_k": 8},
        deepseek_v3(5, 384, 48, 7168, 2048),
    ),
    "moe_fp8_block_scale_ds_routing_topk8_ng1_kg1_e384_h7168_i2048": (
        {"num_experts": 384, "num_local_experts": 384, "top_k": 8},
        deepseek_v3(5, 384, 384, 7168, 2048),
    ),
    "moe_fp8_block_scale_renorm_topk8_e128_h4096_i1536": (
        {"num_local_experts": 128, "top_k": 8},
        renormalize(5, 128, 4096, 1536),
    ),
    "moe_fp8_block_scale_renorm_topk8_e128_h2048_i768": (
        {"num_local_experts": 128, "top_k": 8},
        renormalize(5, 128, 2048, 768),
    ),
    "moe_fp8_block_scale_renorm_topk10_e128_h2048_i512": (
        {"num_local_experts": 128, "top_k": 10},
        renormalize(5, 128, 2048, 512),
    ),
    "moe_fp8_block_scale_ds_routing_topk8_ng8_kg4_e256_h7168_i256": (
        {"num_experts": 256, "num_local_experts": 256, "top_k": 8},
        deepseek_v3(5, 256, 256, 7168, 256),
    ),
    "moe_fp8_block_scale_ds_routing_topk8_ng1_kg1_e32_h6144_i2048": (
        {"num_experts": 256, "num_local_experts": 32, "top_k": 8},
        deepseek_v3(5, 256, 32, 6144, 2048),
    ),
    "moe_fp8_block_scale_ds_routing_topk8_ng1_kg1_e256_h3072_i1536": (
        {"num_experts": 256, "num_local_experts": 256, "top_k": 8},
        deepseek_v3(5, 256, 256, 3072, 1536),
    ),
    "moe_fp8_block_scale_ds_routing_topk8_ng1_kg1_e32_h3072_i1536": (
        {"num_experts": 256, "num_local_experts": 32, "top_k": 8},
        deepseek_v3(5, 256, 32, 3072, 1536),
    ),
    "moe_fp8_block_scale_ds_routing_topk8_ng1_kg1_e96_h7168_i2048": (
        {"num_experts": 384, "num_local_experts": 96, "top_k": 8},
        deepseek_v3(5, 384, 96, 7168, 2048),
    ),
}
"""Axes that are not sizes of a tensor's blocks, and inputs, as the public data set has them."""


def test_the_table_has_the_public_names() -> None:
    assert [d.name for d in MOE] == list(PUBLIC)
    assert len({d.short for d in TABLE}) == len(TABLE) and TABLE[0] is DEFAULT


def test_tags_say_ranks_where_there_are_several() -> None:
    tags = {d.short: d.all_tags for d in MOE}
    api = "fi_api:flashinfer.fused_moe.trtllm_fp8_block_scale_moe"
    assert tags[""][2:] == ("ep:8", api, "status:verified")
    assert tags["kimi_k2_e384"] == ("model:kimi-k2", api)
    assert tags["qwen3_235b"] == ("model:qwen3-235b-a22b",), "no bias, which FlashInfer's has"


def test_committed_files_are_what_the_program_writes(tmp_path: Path) -> None:
    assert make_definition.main(["--check"]) == 0
    assert make_definition.main(["--root", str(tmp_path), "--check"]) == 1
    assert make_definition.main(["--root", str(tmp_path)]) == 0
    for definition in TABLE:
        written = (tmp_path / definition.path).read_text()
        assert written == (ROOT / definition.path).read_text()
    written = (tmp_path / DEFAULT.path).read_text()
    (tmp_path / DEFAULT.path).write_text(written.replace("TOP_K = 8", "TOP_K = 7"))
    assert make_definition.main(["--root", str(tmp_path), "--check"]) == 1


@every_layer
def test_interface_is_that_of_the_public_definition(definition) -> None:
    axes, inputs = PUBLIC[definition.name]
    loaded = load(definition)
    h, i = definition.hidden_size, definition.intermediate_size
    assert loaded.name == definition.name and loaded.op_type == "moe"
    assert loaded.var_axes == ["seq_len"]
    assert loaded.const_axes == axes | {
        "hidden_size": h,
        "intermediate_size": i,
        "gemm1_out_size": 2 * i,
        "num_hidden_blocks": h // 128,
        "num_intermediate_blocks": i // 128,
        "num_gemm1_out_blocks": 2 * i // 128,
    }
    shapes = loaded.get_input_shapes({"seq_len": 5})
    dtypes = [spec.dtype.value for spec in loaded.inputs.values()]
    assert list(zip(loaded.inputs, shapes, dtypes, strict=True)) == inputs
    assert loaded.get_output_shapes({"seq_len": 5}) == [[5, h]]
    assert [o.dtype.value for o in loaded.outputs.values()] == ["bfloat16"]


@every
def test_the_layers_shape_is_the_definitions(definition) -> None:
    shape, loaded = MoeShape(**definition.shape), load(definition)
    by_name = dict(zip(loaded.inputs, loaded.get_input_shapes({"seq_len": 1}), strict=True))
    for name, dims, dtype, *_ in shape.weight_specs:
        assert list(dims) == by_name[name]
        assert str(dtype) == f"torch.{loaded.inputs[name].dtype.value}"


def test_names_are_found_in_full_and_in_short() -> None:
    for definition in TABLE:
        assert definitions.find(definition.name) is definition
        assert definitions.full_name(definition.short or definition.name) == definition.name
    assert definitions.full_name("theirs") == "theirs"
    for unknown in ("", "theirs"):
        with pytest.raises(UsageError, match="there are: .*kimi_k2"):
            definitions.find(unknown)


# --- the references ------------------------------------------------------------------------------

HIDDEN, INTER = 256, 128
"""References take every size but those of the routing from their inputs."""


def all_local(definition: MoeDefinition) -> bool:
    return "local_expert_offset" not in load(definition).inputs


def small_shape(definition: MoeDefinition) -> MoeShape:
    experts, local = (64, 8) if definition.n_group > 1 else (24, 6)
    local = experts if all_local(definition) else local
    sizes = {"num_local_experts": local, "hidden_size": HIDDEN, "intermediate_size": INTER}
    return MoeShape(**{**definition.shape, "num_experts": experts, **sizes})


def small_inputs(shape: MoeShape, tokens: int, offset: int) -> MoeInputs:
    favourite = shape.num_experts - 2
    return bruteforce.random_inputs(shape, tokens, offset, seed=3, favourite=favourite)


def reference(definition: MoeDefinition):
    namespace: dict = {}
    exec(compile(load(definition).reference, "reference", "exec"), namespace)
    return namespace["run"]


def arguments_of(definition: MoeDefinition, inputs: MoeInputs) -> list:
    """In the order of the definition."""
    return [getattr(inputs, name) for name in load(definition).inputs]


def by_hand(inputs: MoeInputs, shape: MoeShape) -> torch.Tensor:
    """The layer in float64, one token and one expert after the other."""

    def scaled(w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return w.double() * scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)

    scales = inputs.hidden_states_scale.t().double().repeat_interleave(128, 1)
    x, offset = inputs.hidden_states.double() * scales, int(inputs.local_expert_offset)
    routes = bruteforce.route(
        inputs.routing_logits, inputs.routing_bias, inputs.routed_scaling_factor, shape
    )
    out = torch.zeros_like(x)
    for token, chosen in enumerate(routes):
        for expert, weight in chosen.weights.items():
            local = expert - offset
            if not 0 <= local < shape.num_local_experts:
                continue
            g = scaled(inputs.gemm1_weights[local], inputs.gemm1_weights_scale[local]) @ x[token]
            up, gate = g.chunk(2)
            second = scaled(inputs.gemm2_weights[local], inputs.gemm2_weights_scale[local])
            out[token] += weight * (second @ (gate / (1 + torch.exp(-gate)) * up))
    return out


CASES = [(d, offset) for d in KINDS for offset in ((0, 22, -3, 24) if not all_local(d) else (0,))]
EVERY_CASE = [*((DEFAULT, offset) for offset in (0, 56, 60, -3, -8, 64, -100, 1000)), *CASES]


def of_cases(cases: list) -> pytest.MarkDecorator:
    ids = [f"{d.short or 'default'}-{offset}" for d, offset in cases]
    return pytest.mark.parametrize(("definition", "offset"), cases, ids=ids)


@of_cases(EVERY_CASE)
def test_reference_against_loop(definition, offset) -> None:
    shape = small_shape(definition)
    inputs = small_inputs(shape, 9, offset)
    expected, got = by_hand(inputs, shape), reference(definition)(*arguments_of(definition, inputs))
    assert got.dtype == torch.bfloat16 and got.shape == expected.shape
    assert torch.equal(got.double() == 0, expected == 0)  # tokens without a local expert
    exists = -shape.num_local_experts < offset < shape.num_experts
    assert exists or not (expected != 0).any()
    chosen = shape.num_experts - 2 - offset  # by every token
    assert (expected != 0).any() or chosen not in range(shape.num_local_experts)
    tolerance = 1e-4 * expected.std().item()
    torch.testing.assert_close(got.double(), expected, rtol=2**-7, atol=tolerance)


@pytest.mark.parametrize("module", [v4_flat, v5_fused, v6_fused_hifi])
@of_cases(CASES)
def test_layers_against_brute_force(definition, offset, module) -> None:
    shape = small_shape(definition)
    inputs = small_inputs(shape, 9, offset)
    wanted = torch.from_numpy(bruteforce.layer(inputs, shape))
    output = torch.full(wanted.shape, torch.nan, dtype=torch.bfloat16)
    run = run_of(module.LAYER, **dataclasses.asdict(shape))
    run(*arguments_of(definition, inputs), output)
    if offset < shape.num_experts:
        # The brute force rounds up and gate to bfloat16 as flat does, and has one FP8 term.
        assert calc_diff(output, wanted) < (1e-4 if module is v4_flat else 1e-3)
    else:
        assert torch.equal(output, torch.zeros_like(output))


@pytest.mark.parametrize("definition", [DEFAULT, *KINDS], ids=lambda d: d.short or "default")
def test_reference_without_tokens(definition) -> None:
    inputs = small_inputs(small_shape(definition), 0, 0)
    got = reference(definition)(*arguments_of(definition, inputs))
    assert got.shape == (0, HIDDEN) and got.dtype == torch.bfloat16


@pytest.mark.parametrize("definition", [DEFAULT, OTHERS[0]], ids=["default", "kimi_k2"])
def test_reference_leaves_its_inputs_and_takes_scalars_as_tensors(definition) -> None:
    shape = small_shape(definition)
    offset = shape.num_experts - shape.num_local_experts
    inputs = arguments_of(definition, small_inputs(shape, 9, offset))
    before = [v.clone() if isinstance(v, torch.Tensor) else v for v in inputs]
    once = reference(definition)(*inputs)
    for value, copy in zip(inputs, before, strict=True):
        if isinstance(value, torch.Tensor):
            assert torch.equal(value.view(torch.uint8), copy.view(torch.uint8))
    inputs[-2:] = torch.tensor(offset, dtype=torch.int32), torch.tensor(2.5)
    assert torch.equal(reference(definition)(*inputs), once)
    inputs[-1] = 5.0
    assert once.abs().max() > 0
    twice = reference(definition)(*inputs).float()
    torch.testing.assert_close(twice, 2 * once.float(), rtol=2**-7, atol=0)


# --- the workloads -------------------------------------------------------------------------------


@every
def test_workload_files_are_what_the_script_writes(definition, tmp_path) -> None:
    arguments = ["--root", str(tmp_path), "--definition", definition.short]
    specs = workload_specs.load_specs(definition)
    drawn = workload_specs.own_specs(definition, SMALL)
    assert drawn == specs[: len(drawn)] and drawn[-1].seq_len <= SMALL
    for spec in drawn:
        assert spec.draw().margin_gap > workload_specs.MIN_MARGIN_GAP
    for path in workload_specs.write_specs(specs, tmp_path):
        assert path.read_text() == (ROOT / path.relative_to(tmp_path)).read_text()
    index = (ROOT / workload_specs.workloads_path(definition)).read_text()
    assert [json.loads(line)["workload"]["axes"]["seq_len"] for line in index.splitlines()] == list(
        definition.tokens
    )
    assert program.main([*arguments, "--max-tokens", str(definition.tokens[1])]) == 0
    assert len(list(tmp_path.rglob("*.safetensors"))) == 2


@every
def test_no_choice_hangs_on_a_small_margin(definition) -> None:
    """In float32 and in torch: another implementation than the generator's own."""
    for spec in workload_specs.load_specs(definition):
        if spec.seq_len > SMALL:
            continue
        made = spec.draw()
        logits = torch.from_numpy(made.logits)
        assert torch.equal(logits.bfloat16().float(), logits)
        scores = logits
        if definition.routing == "deepseek_v3":
            scores = logits.sigmoid() + torch.from_numpy(routing_bias(definition))
        if definition.topk_group < definition.n_group:
            grouped = scores.view(len(scores), definition.n_group, -1)
            ranked, order = grouped.topk(2).values.sum(-1).sort(descending=True)
            k = definition.topk_group
            assert (ranked[:, k - 1] - ranked[:, k]).min() >= 1e-4
            dropped = torch.zeros_like(ranked).scatter_(1, order[:, k:], 1).bool()
            scores = grouped.masked_fill(dropped[..., None], 0).flatten(1)
        ranked, order = scores.sort(descending=True)
        k = definition.top_k
        assert (ranked[:, k - 1] - ranked[:, k]).min() >= 1e-4
        assert np.array_equal(order[:, :k].sort().values.numpy(), made.ids)
        content = spec.blob_of(made)
        assert hashlib.sha256(content).hexdigest() == spec.sha256


@every_layer
def test_inputs_of_a_workload(definition, tmp_path) -> None:
    """As flashinfer-bench loads what the definition says."""
    from flashinfer_bench.bench.utils import load_safetensors

    trace_set, _ = dataset.load(ROOT, definition)
    assert dataset.definition_of(trace_set).name == definition.name
    traces = trace_set.workloads[definition.name]
    trace = sorted(traces, key=lambda t: t.workload.axes["seq_len"])[1]
    uuid = trace.workload.uuid
    workload_specs.make_workloads(tmp_path, [uuid], definition=definition)
    loaded = load_safetensors(load(definition), trace.workload, tmp_path)
    pinned = {n for n, spec in trace.workload.inputs.items() if spec.type == "safetensors"}
    assert set(loaded) == pinned == {n for n in load(definition).inputs if "routing" in n}
    for name, tensor in loaded.items():
        assert str(tensor.dtype) == f"torch.{load(definition).inputs[name].dtype.value}"
    (spec,) = (spec for spec in workload_specs.load_specs(definition) if spec.uuid == uuid)
    assert np.array_equal(loaded["routing_logits"].float().numpy(), spec.draw().logits)
    assert list(trace.workload.inputs) == list(load(definition).inputs)
    scalars = {n: s.value for n, s in trace.workload.inputs.items() if s.type == "scalar"}
    if "routed_scaling_factor" in load(definition).inputs:
        assert scalars["routed_scaling_factor"] == definition.routed_scaling_factor


# --- the packed solutions ------------------------------------------------------------------------


@pytest.fixture
def unpacked(tmp_path, monkeypatch):
    """Imports a packed solution: its `run`."""

    def load_run(generation: pack.Generation):
        directory = tmp_path / generation.name
        for source in json.loads(packed_once(generation))["sources"]:
            path = directory / source["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source["content"], encoding="utf-8")
        sys.modules.pop("main", None)
        monkeypatch.syspath_prepend(str(directory))
        return importlib.import_module("main").run

    yield load_run
    # Only what lies here: a library that is imported meanwhile may not be importable twice.
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.all
@one_of_a_kind
def test_packed_solutions(definition, unpacked) -> None:
    """A bundle of ours computes, a peer's asks for a GPU; what is in them is `test_layers`'s."""
    found = pack.generations(definition=definition)
    names = {g.path.stem for g in found}
    peers = {"triton_moe", "deepgemm_moe", "hpc_ops_moe"}
    assert {"v4_flat", "v5_fused", "v6_fused_hifi", *peers} == names
    loaded = load(definition)
    values, expected = arguments(ROOT / definition.path)
    *inputs, output = values.values()
    for generation in found:
        assert generation.name == f"{generation.metadata['name']}_{definition.short}"
        if generation.path.stem not in ("v5_fused", "triton_moe"):
            continue
        packed = json.loads(packed_once(generation))
        assert (packed["definition"], packed["name"]) == (definition.name, generation.name)
        run = unpacked(generation)
        assert list(inspect.signature(run).parameters) == [*loaded.inputs, *loaded.outputs]
        if generation.path.parent.name == BASELINES:
            with pytest.raises(RuntimeError, match="unsupported on cpu"):
                run(*inputs, output)
            continue
        run(*inputs, output)
        torch.testing.assert_close(output.float(), expected, rtol=0.05, atol=0)


def test_packing_a_definition(tmp_path, monkeypatch) -> None:
    """Into a directory of its own, from which packing another definition removes nothing."""
    monkeypatch.setattr(pack, "PACKED_DIR", tmp_path / "data/solutions")
    monkeypatch.setattr(pack, "OLD_PACKED_DIR", tmp_path / "data/solutions/packed")
    definition, root = OTHERS[0], tmp_path / "package"
    (root / "layer").mkdir(parents=True)
    for name in ("__init__.py", "layer/__init__.py", "layer/calls.py"):
        (root / name).write_text('"""Empty."""\n')
    text = '"""It."""\n\nSOLUTION = {"name": "NAME", "routings": ("deepseek_v3",)}\n'
    for name in ("it", "gone"):
        (root / f"{name}.py").write_text(text.replace("NAME", name))
    paths = pack.write_packed(root=root, build=False, definition=definition)
    below = tmp_path / "data/solutions/moe-fp8-cutedsl/moe"
    folder = below / definition.name
    assert paths == [folder / "gone_kimi_k2.json", folder / "it_kimi_k2.json"]
    assert pack.stale_files([], folder, root, definition) == []
    (root / "gone.py").unlink()
    assert pack.write_packed(root=root, build=False) == [below / DEFAULT.name / "it.json"]
    assert paths[0].is_file(), "of another definition"
    pack.write_packed(root=root, build=False, definition=definition)
    assert not paths[0].is_file()
    # What lies where ours once lay would be a second one of its name.
    old = tmp_path / "data/solutions/packed/kimi_k2/it_kimi_k2.json"
    old.parent.mkdir(parents=True)
    old.write_bytes(paths[1].read_bytes())
    old.with_name("theirs.json").write_bytes(paths[1].read_bytes())
    said = pack.stale_files(root=root, definition=definition)
    assert said == ["it_kimi_k2.json: no generation of that name"]
    pack.write_packed(root=root, build=False, definition=definition)
    assert not old.exists() and old.with_name("theirs.json").exists() and paths[1].is_file()
    old.with_name("theirs.json").unlink()
    for path in (DEFAULT.path, definition.path):
        (tmp_path / "data" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / "data" / path)
    found = TraceSet.from_path(str(tmp_path / "data")).solutions
    assert {name: [s.name for s in of] for name, of in found.items()} == {
        DEFAULT.name: ["it"],
        definition.name: ["it_kimi_k2"],
    }
    # Those of two definitions can lie in one directory.
    pack.write_packed(output=folder, root=root, build=False)
    for of in (DEFAULT, definition):
        assert pack.stale_files([], folder, root, of) == []


def test_sources_of_another_definition_are_known_as_ours(monkeypatch) -> None:
    monkeypatch.setattr(sources, "pack", packed_once)
    definition = OTHERS[0]
    name, hashes = definition.packed_name("triton_moe"), sources.current(definition)
    assert sources.remark({name: {hashes[name]}}) == ""
    assert "the source of triton_moe has changed" in sources.remark({name: {"another"}})
    names = {g.name for g in pack.every_generation()}
    assert names >= {*hashes, *sources.current()}


# --- the programs --------------------------------------------------------------------------------


@pytest.fixture
def listing(monkeypatch, capsys):
    """What `bench --list` prints for a definition, on a CPU."""

    monkeypatch.setattr(pack, "pack", packed_once)

    def of(definition: definitions.Entry) -> str:
        argv = ["bench.py", "--cpu", "--list", "--definition", definition.short]
        monkeypatch.setattr(sys, "argv", argv)
        monkeypatch.setattr(pack, "validate", lambda *_: None)
        assert bench.main() == 0
        return capsys.readouterr().out

    return of


@pytest.mark.all
@one_of_a_kind
def test_bench_lists_what_there_is_for_the_definition(definition, listing) -> None:
    listed = listing(definition)
    names = [g.name for g in pack.generations(definition=definition)]
    assert all(name in listed for name in names) and "sglang_moe" not in listed
    assert listed.count("-") > len(definition.tokens)
    assert str(definition.tokens[-1]) in listed


def test_a_run_of_another_definition_is_read_as_that(tmp_path: Path) -> None:
    definition = OTHERS[0]
    trace_set, _ = dataset.load(ROOT, definition)
    trace = json.loads(trace_set.workloads[definition.name][0].model_dump_json())
    trace |= {
        "solution": "x",
        "evaluation": {
            "status": "RUNTIME_ERROR",
            "log": "a",
            "timestamp": "2026",
            "environment": {"hardware": "GPU", "libs": {}},
        },
    }
    (tmp_path / "traces.jsonl").write_text(json.dumps(trace) + "\n")
    with pytest.raises(UsageError, match="no results"):
        recorded.read(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps({"definition": definition.name}))
    read = recorded.read(tmp_path)
    assert read.main.records and read.definition == definition.name


def test_records_of_another_definition_stand_beside_none() -> None:
    assert recorded.recorded_runs()
    assert recorded.recorded_runs(definition=OTHERS[0].name) == []
