"""The definitions: that what one says agrees, and that references and layers compute it."""

import json
import re
from pathlib import Path

import bruteforce
import pytest
import torch
from flashinfer_bench.data import Definition, load_json_file
from moe_fp8.call import MoeInputs, check_call, signature
from moe_fp8.ladder import v4_flat, v5_fused, v6_fused_hifi
from moe_fp8.ladder.adapter import run_of
from moe_fp8.reference import calc_diff
from moe_fp8.shape import Form, MoeShape

from scripts.common import definitions
from scripts.common.definitions import DEFAULT, FP8, MOE, MoeDefinition
from scripts.common.program import ROOT, UsageError
from scripts.measuring import cases
from scripts.publishing import rankings

KINDS = list(
    {(d.routing, d.n_group, d.top_k, d.swiglu_limit): d for d in reversed(FP8[1:])}.values()
)
"""The first of the definitions whose code differs in sizes only. `test_mxfp4_definitions` has those
with MXFP4 weights."""
NUM_EXPERTS = dict.fromkeys(
    ("", "dsv3_tp8", "glm5", "glm5_limit10", "minimax_m2", "minimax_m2_ep8"), 256
) | dict.fromkeys(("kimi_k2", "kimi_k2_e384", "kimi_k2_ep4"), 384)
"""Experts of the models. The others have 128, all of them local, and no such axis."""


def named(definition: MoeDefinition) -> str:
    return definition.short or "default"


every = pytest.mark.parametrize("definition", FP8, ids=named)


def load(definition: MoeDefinition) -> Definition:
    return load_json_file(Definition, ROOT / definition.path)


# --- what a definition says ----------------------------------------------------------------------


@every
def test_name_axes_and_inputs_are_those_that_our_solutions_take(definition) -> None:
    """Names of definitions and their inputs are those of the public data set."""
    loaded = load(definition)
    assert (loaded.name, loaded.op_type) == (definition.name, definition.op_type)
    assert list(loaded.var_axes) == ["seq_len"]
    dims = loaded.get_input_shapes({"seq_len": 256}) + loaded.get_output_shapes({"seq_len": 256})
    arguments = {
        name: torch.empty(shape, dtype=getattr(torch, spec.dtype.value), device="meta")
        if shape is not None
        else 1
        for (name, spec), shape in zip((loaded.inputs | loaded.outputs).items(), dims, strict=True)
    }
    sizes = {k: int(v) for k, v in re.findall(r"_(e|h|i|topk)(\d+)", definition.name)}
    shape, output = MoeShape(**definition.shape), arguments.pop("output")
    absent = {"routing_bias": None, "local_expert_offset": 0, "routed_scaling_factor": 1.0}
    assert check_call(MoeInputs(**(absent | arguments)), output, shape) == 256
    assert list(arguments) == [name for name in MoeInputs._fields if name in arguments]
    assert len(arguments) == (10 if shape.has_bias else 7)
    of_name = {"e": shape.num_local_experts, "h": shape.hidden_size, "i": shape.intermediate_size}
    assert of_name | {"topk": shape.top_k} == sizes
    assert loaded.const_axes.get("top_k", 8) == shape.top_k
    assert shape.num_experts == NUM_EXPERTS.get(definition.short, 128)


def sized(definition: MoeDefinition) -> tuple[str, dict[str, int]]:
    """The reference without its docstring and what clamps, and the sizes that it has of its own."""
    reference = load(definition).reference.split('"""\n', 1)[1]
    constant, clamp = (
        r"(?m)^(\w*(?:GROUP|TOP_K|LIMIT)) = (.+)\n",
        r"\n.*\.clamp\(max=SWIGLU_LIMIT.*",
    )
    constants = {name: float(value) for name, value in re.findall(constant, reference)}
    return re.sub(constant, "", re.sub(clamp, "", reference)), constants


def test_definitions_of_one_interface_have_one_reference_but_for_sizes() -> None:
    """But the default one's, which dequantises all weights first, as the public one does."""
    kinds: dict[tuple, set[str]] = {}
    for definition in FP8:
        text, constants = sized(definition)
        kinds.setdefault((definition is DEFAULT, *load(definition).inputs), set()).add(text)
        groups = {"N_GROUP": definition.n_group, "TOPK_GROUP": definition.topk_group}
        groups = groups if "ds_routing" in definition.name else {}
        assert constants.pop("SWIGLU_LIMIT", None) == definition.swiglu_limit
        assert constants == groups | {"TOP_K": definition.top_k}
    assert len(kinds) == 3 and all(len(texts) == 1 for texts in kinds.values())


def test_tags_say_ranks_where_there_are_several() -> None:
    api = "fi_api:flashinfer.fused_moe.trtllm_fp8_block_scale_moe"
    for definition in MOE:
        tags, ranks = load(definition).tags, definition.num_experts // definition.num_local_experts
        assert (f"ep:{ranks}" in tags) == (ranks > 1)
        assert f"quantization:{'mxfp4' if definition.mxfp4 else 'float8_e4m3fn'}" in tags
        assert (api in tags) == ("ds_routing" in definition.name), "FlashInfer's has a bias"
        assert any(tag.startswith("model:") for tag in tags)


def test_every_file_is_in_the_table_and_no_name_twice() -> None:
    files = {path.relative_to(ROOT) for path in (ROOT / "definitions").rglob("*.json")}
    assert files == {d.path for d in MOE} and MOE[0] is DEFAULT
    assert len({d.short for d in MOE}) == len(MOE)


def test_names_are_found_in_full_and_in_short() -> None:
    for definition in MOE:
        assert definitions.find(definition.name) is definition
        assert definitions.full_name(definition.short or definition.name) == definition.name
    assert definitions.full_name("theirs") == "theirs"
    for unknown in ("", "theirs"):
        with pytest.raises(UsageError, match="there are: .*kimi_k2"):
            definitions.find(unknown)


def test_the_layer_of_no_data_set_has_its_own_sizes() -> None:
    shared = definitions.SHARED
    definition = Definition(**definitions.build_definition(shared))
    assert definition.name == shared.name and definition.const_axes["num_gemm1_out_blocks"] == 4
    by_name = dict(zip(definition.inputs, definition.get_input_shapes({"seq_len": 1}), strict=True))
    shape = MoeShape(**shared.shape)
    *of_inputs, _ = signature(shape, 1, Form.usual(shape)).specs
    for name, dims, *_ in of_inputs:
        assert list(dims) == by_name[name]
    for line in ("N_GROUP = 1", "TOPK_GROUP = 1", "TOP_K = 9"):
        assert f"\n{line}\n" in definition.reference
    assert definitions.find_layer(shared.short) is shared


def test_the_size_of_a_workload_is_its_tokens() -> None:
    assert [definitions.size_of({axis: 7}) for axis in ("seq_len", "batch")] == [7, 0]
    for wrong in ("many", [7]):
        with pytest.raises((TypeError, ValueError)):
            definitions.size_of({"seq_len": wrong})


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


def reference(definition: MoeDefinition):
    namespace: dict = {}
    exec(compile(load(definition).reference, "reference", "exec"), namespace)
    return namespace["run"]


def arguments_of(definition: MoeDefinition, inputs: MoeInputs) -> list:
    """Return the inputs in the order of the definition."""
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
            if limit := shape.swiglu.limit:
                up, gate = up.clamp(-limit, limit), gate.clamp(max=limit)
            second = scaled(inputs.gemm2_weights[local], inputs.gemm2_weights_scale[local])
            out[token] += weight * (second @ (gate / (1 + torch.exp(-gate)) * up))
    return out


def of_cases(cases: list) -> pytest.MarkDecorator:
    ids = [f"{named(d)}-{offset}" for d, offset in cases]
    return pytest.mark.parametrize(("definition", "offset"), cases, ids=ids)


CASES = [(d, offset) for d in KINDS for offset in ((0, 22, -3, 24) if not all_local(d) else (0,))]
EVERY_CASE = [*((DEFAULT, offset) for offset in (0, 56, 60, -3, -8, 64, -100, 1000)), *CASES]


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
    run = run_of(module.layer_at(shape), shape)
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
    trace_set, _ = cases.load(ROOT, definition)
    trace = json.loads(trace_set.workloads[definition.name][0].model_dump_json())
    environment = {"hardware": "GPU", "libs": {}}
    failed = {"status": "RUNTIME_ERROR", "log": "a", "timestamp": "2026"}
    trace |= {"solution": "x", "evaluation": failed | {"environment": environment}}
    (tmp_path / "traces.jsonl").write_text(json.dumps(trace) + "\n")
    with pytest.raises(UsageError, match="no results"):
        rankings.read(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps({"definition": definition.name}))
    read = rankings.read(tmp_path)
    assert len(read.main.results) and read.definition == definition.name
    assert rankings.recorded_runs() and rankings.recorded_runs(definition=definition.name) == []
