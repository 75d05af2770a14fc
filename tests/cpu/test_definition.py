"""The definition: its interface, and its reference against a token-by-token loop in float64."""

import json
import math
from pathlib import Path

import pytest
import torch
from flashinfer_bench import TraceSet
from flashinfer_bench.compile import BuilderRegistry
from flashinfer_bench.data import Definition
from flashinfer_bench.data.json_utils import load_json_file

from scripts.common.definitions import DEFAULT, TABLE
from scripts.programs import make_definition

ROOT = Path(__file__).resolve().parents[2]
NAME = "moe_fp8_block_scale_ds_routing_topk8_ng8_kg4_e32_h7168_i2048"
FP8 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def definition() -> Definition:
    return load_json_file(Definition, ROOT / "definitions" / "moe" / f"{NAME}.json")


def test_interface_is_that_of_the_official_definition(definition):
    assert definition.name == NAME
    assert definition.op_type == "moe"
    assert definition.var_axes == ["seq_len"]
    assert definition.const_axes == {
        "num_experts": 256,
        "num_local_experts": 32,
        "hidden_size": 7168,
        "intermediate_size": 2048,
        "gemm1_out_size": 4096,
        "num_hidden_blocks": 56,
        "num_intermediate_blocks": 16,
        "num_gemm1_out_blocks": 32,
    }
    shapes = definition.get_input_shapes({"seq_len": 5})
    dtypes = [spec.dtype.value for spec in definition.inputs.values()]
    assert list(zip(definition.inputs, shapes, dtypes, strict=True)) == [
        ("routing_logits", [5, 256], "float32"),
        ("routing_bias", [256], "bfloat16"),
        ("hidden_states", [5, 7168], "float8_e4m3fn"),
        ("hidden_states_scale", [56, 5], "float32"),
        ("gemm1_weights", [32, 4096, 7168], "float8_e4m3fn"),
        ("gemm1_weights_scale", [32, 32, 56], "float32"),
        ("gemm2_weights", [32, 7168, 2048], "float8_e4m3fn"),
        ("gemm2_weights_scale", [32, 56, 16], "float32"),
        ("local_expert_offset", None, "int32"),
        ("routed_scaling_factor", None, "float32"),
    ]
    assert list(definition.outputs) == ["output"]
    assert definition.get_output_shapes({"seq_len": 5}) == [[5, 7168]]
    assert definition.outputs["output"].dtype.value == "bfloat16"


def test_committed_files_are_what_the_program_writes(tmp_path, capsys):
    assert make_definition.main(["--check"]) == 0
    assert make_definition.main(["--root", str(tmp_path), "--check"]) == 1
    assert make_definition.main(["--root", str(tmp_path)]) == 0
    for definition in TABLE:
        written = (tmp_path / definition.path).read_text()
        assert written == (ROOT / definition.path).read_text()
    written = (tmp_path / DEFAULT.path).read_text()
    (tmp_path / DEFAULT.path).write_text(written.replace("TOP_K = 8", "TOP_K = 7"))
    assert make_definition.main(["--root", str(tmp_path), "--check"]) == 1


def test_data_set_loads_with_this_definition():
    assert TraceSet.from_path(str(ROOT)).definitions[NAME].op_type == "moe"


# Reduced geometry: the reference takes every size from its inputs.
EXPERTS, LOCAL, HIDDEN, INTER = 64, 8, 256, 128


@pytest.fixture(scope="module")
def reference(definition):
    """The reference as flashinfer-bench builds it, out of a copy with small axes."""
    document = json.loads(definition.model_dump_json())
    sizes = {
        "num_experts": EXPERTS,
        "num_local_experts": LOCAL,
        "hidden_size": HIDDEN,
        "intermediate_size": INTER,
        "gemm1_out_size": 2 * INTER,
        "num_hidden_blocks": HIDDEN // 128,
        "num_intermediate_blocks": INTER // 128,
        "num_gemm1_out_blocks": 2 * INTER // 128,
    }
    document["name"] = "reduced"
    for axis, value in sizes.items():
        document["axes"][axis]["value"] = value
    return BuilderRegistry.get_instance().build_reference(Definition(**document))


def make_inputs(tokens: int, offset: int, factor: float = 2.5, seed: int = 0) -> list:
    """As flashinfer-bench draws them: FP8 values within +-2, scales of either sign."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    def fp8(*shape):
        return normal(*shape).clamp_(-2, 2).to(FP8)

    return [
        normal(tokens, EXPERTS),
        (0.1 * normal(EXPERTS)).to(torch.bfloat16),
        fp8(tokens, HIDDEN),
        normal(HIDDEN // 128, tokens),
        fp8(LOCAL, 2 * INTER, HIDDEN),
        normal(LOCAL, 2 * INTER // 128, HIDDEN // 128),
        fp8(LOCAL, HIDDEN, INTER),
        normal(LOCAL, HIDDEN // 128, INTER // 128),
        offset,
        factor,
    ]


def choose_by_hand(logits: list[float], bias: list[float]) -> dict[int, float]:
    """Weights of the experts that one token chooses, before the scaling factor."""
    s = [1 / (1 + math.exp(-x)) for x in logits]
    score = [a + b for a, b in zip(s, bias, strict=True)]
    size = len(s) // 8
    groups = [range(g * size, (g + 1) * size) for g in range(8)]
    by_score = sorted(groups, key=lambda g: sum(sorted(score[e] for e in g)[-2:]), reverse=True)
    candidates = sorted((e for g in by_score[:4] for e in g), key=lambda e: score[e])
    chosen = candidates[-8:]
    total = sum(s[e] for e in chosen) + 1e-20
    return {e: s[e] / total for e in chosen}


def layer_by_hand(inputs: list) -> tuple[torch.Tensor, int]:
    """The layer in float64, one token and one element-wise scaled weight at a time."""
    logits, bias, x, x_scale, w13, w13_scale, w2, w2_scale, offset, factor = inputs
    out = torch.zeros(x.shape, dtype=torch.float64)
    pairs = 0
    for t in range(x.shape[0]):
        token = x[t].double()
        for h in range(HIDDEN):
            token[h] *= x_scale[h // 128, t].double()
        for expert, weight in choose_by_hand(logits[t].tolist(), bias.tolist()).items():
            local = expert - offset
            if not 0 <= local < LOCAL:
                continue
            pairs += 1
            rows = torch.arange(2 * INTER)[:, None] // 128
            first = (
                w13[local].double() * w13_scale[local].double()[rows, torch.arange(HIDDEN) // 128]
            )
            rows = torch.arange(HIDDEN)[:, None] // 128
            second = w2[local].double() * w2_scale[local].double()[rows, torch.arange(INTER) // 128]
            g = first @ token
            up, gate = g[:INTER], g[INTER:]
            out[t] += factor * weight * (second @ (gate / (1 + torch.exp(-gate)) * up))
    return out, pairs


@pytest.mark.parametrize(
    ("offset", "exists"),
    [(0, 8), (24, 8), (56, 8), (-3, 5), (60, 4), (-8, 0), (64, 0), (-100, 0), (1000, 0)],
)
def test_reference_against_loop(reference, offset, exists):
    inputs = make_inputs(tokens=12, offset=offset, seed=offset % 7)
    expected, pairs = layer_by_hand(inputs)
    assert (pairs > 0) == (exists > 0)
    got = reference(*inputs)
    assert got.dtype == torch.bfloat16 and got.shape == (12, HIDDEN)
    assert torch.equal(got.double() == 0, expected == 0)  # tokens without a local expert
    # bfloat16 holds 8 bits; float32 sums of a few hundred terms may cancel a little.
    torch.testing.assert_close(
        got.double(), expected, rtol=2**-7, atol=1e-4 * expected.std().item()
    )


def test_reference_scaling_factor_is_linear_and_inputs_stay(reference):
    inputs = make_inputs(tokens=9, offset=16)
    before = [v.clone() if isinstance(v, torch.Tensor) else v for v in inputs]
    once = reference(*inputs).float()
    for value, copy in zip(inputs, before, strict=True):
        if isinstance(value, torch.Tensor):
            assert torch.equal(value.view(torch.uint8), copy.view(torch.uint8))
    inputs[-1] = 5.0
    assert once.abs().max() > 0
    torch.testing.assert_close(reference(*inputs).float(), 2 * once, rtol=2**-7, atol=0)


def test_reference_takes_scalars_as_tensors(reference):
    inputs = make_inputs(tokens=4, offset=8)
    expected = reference(*inputs)
    inputs[-2:] = torch.tensor(8, dtype=torch.int32), torch.tensor(2.5)
    assert torch.equal(reference(*inputs), expected)


def test_reference_without_tokens(reference):
    got = reference(*make_inputs(tokens=0, offset=0))
    assert got.shape == (0, HIDDEN) and got.dtype == torch.bfloat16
