"""The definitions: that what one says agrees, and that references and layers compute it."""

import dataclasses
import json
import re
from pathlib import Path

import bruteforce
import pytest
import torch
from flashinfer_bench.data import Definition, load_json_file
from moe_fp8 import v4_flat, v5_fused, v6_fused_hifi
from moe_fp8.layer.calls import run_of
from moe_fp8.layer.metrics import calc_diff
from moe_fp8.problem import MoeInputs, MoeShape

from scripts.common import definitions
from scripts.common.command_line import UsageError
from scripts.common.definitions import DEFAULT, MASKED, MOE, TABLE, Entry, MoeDefinition
from scripts.common.project import ROOT
from scripts.data import dataset
from scripts.table import recorded

KINDS = list({(d.routing, d.n_group, d.top_k): d for d in reversed(MOE[1:])}.values())
"""Of those whose code is the same but for sizes the first."""
NUM_EXPERTS = dict.fromkeys(
    ("", "dsv3_tp8", "glm5", "minimax_m2", "minimax_m2_ep8"), 256
) | dict.fromkeys(("kimi_k2", "kimi_k2_e384", "kimi_k2_ep4"), 384)
"""Of the models; the others have 128, all of them local, and no such axis."""


def named(definition: Entry) -> str:
    return definition.short or "default"


every = pytest.mark.parametrize("definition", TABLE, ids=named)


def load(definition: Entry) -> Definition:
    return load_json_file(Definition, ROOT / definition.path)


# --- what a definition says ----------------------------------------------------------------------


def interface(definition: Entry) -> tuple[dict[str, int], dict[str, tuple[list | None, str]]]:
    """Values of axes, and inputs with the output for a variable axis of 256, as the public data set
    has them for a definition of that name."""
    sizes = {k: int(v) for k, v in re.findall(r"_(e|h|i|n|k|topk)(\d+)", definition.name)}
    fp8, f32, bf16 = "float8_e4m3fn", "float32", "bfloat16"
    e = sizes["e"]
    if not isinstance(definition, MoeDefinition):
        n, k = sizes["n"], sizes["k"]
        axes = {"num_experts": e, "n": n, "k": k}
        axes |= {"num_n_blocks": n // 128, "num_k_blocks": k // 128}
        weights = {"b": ([e, n, k], fp8), "b_scale": ([e, n // 128, k // 128], f32)}
        if "masked" in definition.name:
            a = {"a": ([e, 256, k], fp8), "a_scale": ([e, k // 128, 256], f32)}
            rows = {"masked_m": ([e], "int32"), "expected_m": (None, "int32")}
            return axes, a | weights | rows | {"out": ([e, 256, n], bf16)}
        axes["len_indptr"] = e + 1
        a = {"a": ([256, k], fp8), "a_scale": ([k // 128, 256], f32)}
        return axes, a | weights | {"m_indptr": ([e + 1], "int32"), "out": ([256, n], bf16)}
    h, i, experts = sizes["h"], sizes["i"], NUM_EXPERTS.get(definition.short)
    blocks = {"hidden": h // 128, "intermediate": i // 128, "gemm1_out": 2 * i // 128}
    axes = {"num_local_experts": e, "hidden_size": h, "intermediate_size": i}
    axes["gemm1_out_size"] = 2 * i
    axes |= {f"num_{side}_blocks": count for side, count in blocks.items()}
    axes |= {"top_k": sizes["topk"]} if definition is not DEFAULT else {}
    axes |= {"num_experts": experts} if experts else {}
    tensors = {
        "routing_logits": ([256, experts or e], f32 if experts else bf16),
        "routing_bias": ([experts], bf16),
        "hidden_states": ([256, h], fp8),
        "hidden_states_scale": ([h // 128, 256], f32),
        "gemm1_weights": ([e, 2 * i, h], fp8),
        "gemm1_weights_scale": ([e, 2 * i // 128, h // 128], f32),
        "gemm2_weights": ([e, h, i], fp8),
        "gemm2_weights_scale": ([e, h // 128, i // 128], f32),
        "local_expert_offset": (None, "int32"),
        "routed_scaling_factor": (None, f32),
        "output": ([256, h], bf16),
    }
    absent = () if experts else ("routing_bias", "local_expert_offset", "routed_scaling_factor")
    return axes, {name: tensor for name, tensor in tensors.items() if name not in absent}


@every
def test_name_axes_and_inputs_agree(definition) -> None:
    loaded, (axes, tensors) = load(definition), interface(definition)
    (var,) = loaded.var_axes
    assert (loaded.name, loaded.op_type) == (definition.name, definition.op_type)
    assert loaded.const_axes == axes and var in ("seq_len", "total_rows", "max_rows")
    shapes = loaded.get_input_shapes({var: 256}) + loaded.get_output_shapes({var: 256})
    specs = loaded.inputs | loaded.outputs
    types = [spec.dtype.value for spec in specs.values()]
    assert list(zip(specs, shapes, types, strict=True)) == [(n, *of) for n, of in tensors.items()]
    if not isinstance(definition, MoeDefinition):
        assert (definition.experts, definition.n, definition.k) == tuple(axes.values())[:3]
        assert (definition.rows == MASKED) == ("zero in the output" in loaded.description)
        return
    shape = MoeShape(**definition.shape)
    assert shape.num_experts == axes.get("num_experts", 128) and shape.top_k == int(
        re.search(r"_topk(\d+)_", definition.name)[1]
    )
    of_shape = {name: list(dims) for name, dims, *_ in shape.weight_specs}
    assert of_shape == {name: dims for name, (dims, _) in tensors.items() if name in of_shape}


def sized(definition: Entry) -> tuple[str, dict[str, int]]:
    """The reference without its docstring, and the sizes that it has of its own."""
    reference = load(definition).reference.split('"""\n', 1)[1]
    constants = re.findall(r"(?m)^(\w*(?:GROUP|TOP_K)) = (\d+)$", reference)
    return re.sub(r"(?m)^\w*(GROUP|TOP_K) = \d+$", "", reference), {n: int(v) for n, v in constants}


def test_definitions_of_one_interface_have_one_reference_but_for_sizes() -> None:
    """But the default one's, which dequantises all weights first, as the public one does."""
    kinds: dict[tuple, set[str]] = {}
    for definition in TABLE:
        text, constants = sized(definition)
        kinds.setdefault((definition is DEFAULT, *load(definition).inputs), set()).add(text)
        if isinstance(definition, MoeDefinition):
            groups = {"N_GROUP": definition.n_group, "TOPK_GROUP": definition.topk_group}
            groups = groups if "ds_routing" in definition.name else {}
            assert constants == groups | {"TOP_K": definition.top_k}
    assert len(kinds) == 5 and all(len(texts) == 1 for texts in kinds.values())


def test_tags_say_ranks_where_there_are_several() -> None:
    api = "fi_api:flashinfer.fused_moe.trtllm_fp8_block_scale_moe"
    for definition in MOE:
        tags, ranks = load(definition).tags, definition.num_experts // definition.num_local_experts
        assert (f"ep:{ranks}" in tags) == (ranks > 1) and "quantization:float8_e4m3fn" in tags
        assert (api in tags) == ("ds_routing" in definition.name), "FlashInfer's has a bias"
        assert any(tag.startswith("model:") for tag in tags)


def test_every_file_is_in_the_table_and_no_name_twice() -> None:
    files = {path.relative_to(ROOT) for path in (ROOT / "definitions").rglob("*.json")}
    assert files == {d.path for d in TABLE} and TABLE[0] is DEFAULT
    assert len({d.short for d in TABLE}) == len(TABLE)


def test_names_are_found_in_full_and_in_short() -> None:
    for definition in TABLE:
        assert definitions.find(definition.name) is definition
        assert definitions.full_name(definition.short or definition.name) == definition.name
    assert definitions.full_name("theirs") == "theirs"
    for unknown in ("", "theirs"):
        with pytest.raises(UsageError, match="there are: .*kimi_k2"):
            definitions.find(unknown)


def test_the_layer_of_no_data_set_has_its_own_sizes() -> None:
    shared = definitions.SHARED
    made = Definition(**definitions.build_definition(shared))
    assert made.name == shared.name and made.const_axes["num_gemm1_out_blocks"] == 4
    by_name = dict(zip(made.inputs, made.get_input_shapes({"seq_len": 1}), strict=True))
    for name, dims, *_ in MoeShape(**shared.shape).weight_specs:
        assert list(dims) == by_name[name]
    for line in ("N_GROUP = 1", "TOPK_GROUP = 1", "TOP_K = 9"):
        assert f"\n{line}\n" in made.reference
    with pytest.raises(UsageError, match="is a grouped GEMM"):
        definitions.find_layer("gemm1")
    assert definitions.find_layer(shared.short) is shared


@pytest.mark.parametrize("axis", ["seq_len", "total_rows", "max_rows"])
def test_the_size_of_a_workload(axis) -> None:
    assert definitions.size_of({axis: 7}) == 7 and definitions.size_of({"batch": 7}) == 0
    for wrong in ("many", [7]):
        with pytest.raises((TypeError, ValueError)):
            definitions.size_of({axis: wrong})


# --- the references and the layers ---------------------------------------------------------------

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


def reference(definition: Entry):
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
    ids = [f"{named(d)}-{offset}" for d, offset in cases]
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


@pytest.mark.parametrize("definition", [DEFAULT, *KINDS], ids=named)
def test_reference_without_tokens(definition) -> None:
    inputs = small_inputs(small_shape(definition), 0, 0)
    got = reference(definition)(*arguments_of(definition, inputs))
    assert got.shape == (0, HIDDEN) and got.dtype == torch.bfloat16


@pytest.mark.parametrize("definition", MOE[:2], ids=named)
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


# --- records of them -----------------------------------------------------------------------------


def test_a_run_of_another_definition_is_read_as_that(tmp_path: Path) -> None:
    definition = MOE[1]
    trace_set, _ = dataset.load(ROOT, definition)
    trace = json.loads(trace_set.workloads[definition.name][0].model_dump_json())
    environment = {"hardware": "GPU", "libs": {}}
    failed = {"status": "RUNTIME_ERROR", "log": "a", "timestamp": "2026"}
    trace |= {"solution": "x", "evaluation": failed | {"environment": environment}}
    (tmp_path / "traces.jsonl").write_text(json.dumps(trace) + "\n")
    with pytest.raises(UsageError, match="no results"):
        recorded.read(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps({"definition": definition.name}))
    read = recorded.read(tmp_path)
    assert read.main.records and read.definition == definition.name
    assert recorded.recorded_runs() and recorded.recorded_runs(definition=definition.name) == []
