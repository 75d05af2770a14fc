"""The peers on MXFP4 weights: their packing, refusals, sorted pairs and what they pass. The
libraries themselves need a GPU."""

import ast
import importlib
import importlib.util
import json
import re
import sys
import types
from pathlib import Path

import pytest
import torch
from moe_fp8.baselines import humming_moe, marlin_moe, supported
from moe_fp8.four_bits.weights import signature
from moe_fp8.ladder.adapter import run_of
from moe_fp8.shape import DEEPSEEK_V3, MoeShape
from triton_interpreter import DEVICE, interpreter_that_rounds

from scripts.common import packer
from scripts.common.definitions import find

__all__ = ["interpreter_that_rounds"]  # a fixture
MODULES = {"humming_moe": humming_moe, "marlin_moe": marlin_moe}
LIBRARIES = {"humming_moe": "humming", "marlin_moe": "vllm"}
SHAPE = MoeShape(**find("v4_pro").shape)
every_module = pytest.mark.parametrize("name", MODULES)


def arguments(tokens: int = 1) -> list:
    """Arguments of full size that hold nothing, in the definition's order."""
    *inputs, output = (
        torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        for spec in signature(SHAPE, tokens).specs
    )
    return [*inputs, 48, output]


@every_module
def test_packs_without_our_kernels(name) -> None:
    for short in ("v4_flash", "v4_pro"):
        definition = find(short)
        generation = {g.name: g for g in packer.generations(definition=definition)}
        solution = json.loads(packer.pack(generation[f"{name}_{short}"]))
        paths = {source["path"] for source in solution["sources"]}
        assert f"moe_fp8/baselines/{name}.py" in paths
        assert not any(path.startswith("moe_fp8/kernels/") for path in paths)
        assert "moe_fp8/mxfp4.py" not in paths and "moe_fp8/api.py" not in paths


@every_module
def test_a_missing_package_is_one_line(name, monkeypatch) -> None:
    module = MODULES[name]
    monkeypatch.setattr(module, "require_gpu", lambda *_: None)
    for loaded in [m for m in sys.modules if m.split(".")[0] == LIBRARIES[name]]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, LIBRARIES[name], None)
    wanted = f"^not installed: pip install '{re.escape(module.REQUIREMENT)}'$"
    with pytest.raises(RuntimeError, match=wanted):
        run_of(module.layer_at(SHAPE), SHAPE)(*arguments())


@every_module
def test_an_unsupported_gpu_is_one_line(name, monkeypatch) -> None:
    """The check comes before all imports, so the package may be missing."""
    module, own = MODULES[name], supported.require_gpu.__wrapped__
    device = torch.device("cuda", 0)
    monkeypatch.setattr(module, "require_gpu", lambda _, capabilities: own(device, capabilities))
    monkeypatch.setattr(module, "require", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(RuntimeError, match=r"^unsupported on sm_80 \(needs sm_90\)$"):
        run_of(module.layer_at(SHAPE), SHAPE)(*arguments())


@every_module
def test_wrong_arguments_are_refused_first(name, monkeypatch) -> None:
    module = MODULES[name]
    monkeypatch.setattr(module, "require_gpu", None)
    wrong = arguments()
    wrong[3] = wrong[3].to(torch.uint8)
    with pytest.raises(ValueError, match="^gemm1_weights: expected dtype torch.int8"):
        run_of(module.layer_at(SHAPE), SHAPE)(*wrong)


PASSED = {  # where in a package, function: parameters by position, parameters by name
    ("vllm/model_executor/layers/fused_moe/experts/marlin_moe.py", "fused_marlin_moe"): (
        9,
        "quant_type_id global_num_experts expert_map activation_config workspace output".split(),
    ),
    (
        "vllm/model_executor/layers/quantization/utils/marlin_utils_fp4.py",
        "prepare_moe_mxfp4_layer_for_marlin",
    ): (7, []),
    (
        "vllm/model_executor/layers/quantization/utils/marlin_utils.py",
        "get_marlin_workspace",
    ): (1, []),
    ("humming/forward.py", "humming_forward"): (
        2,
        "weight weight_scale weight_scale_2 input_scale outputs sorted_ids expert_ids "
        "num_tokens_padded expert_layout locks valid_shape_m top_k tuning_config "
        "compute_config".split(),
    ),
    ("humming/forward.py", "may_process_input"): (
        1,
        "inputs outputs group_scales activation_type activation_impl layout scatter_idx "
        "num_valid_tokens".split(),
    ),
    ("humming/transform.py", "prepare_and_transform_humming_tensors"): (
        0,
        "tensors shape_n shape_k weight_schema input_schema num_experts torch_dtype device".split(),
    ),
    ("humming/tune/__init__.py", "get_heuristics_config"): (1, ["shape_m", "gemm_type", "device"]),
}
"""The arguments that the peers pass to the functions of a package."""


@pytest.mark.parametrize(("path", "function"), PASSED)
def test_the_installed_package_takes_what_a_peer_passes(path, function) -> None:
    package, *inner = path.split("/")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    part = Path(spec.submodule_search_locations[0]).joinpath(*inner)
    (found,) = (
        node.args
        for node in ast.walk(ast.parse(part.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name == function
    )
    by_position, by_name = PASSED[path, function]
    positional = [a.arg for a in found.args]
    required = set(positional[: len(positional) - len(found.defaults)])
    for a, default in zip(found.kwonlyargs, found.kw_defaults, strict=True):
        required |= {a.arg} if default is None else set()
    named = {*positional[by_position:], *(a.arg for a in found.kwonlyargs)}
    assert by_position <= len(positional) and {*by_name} <= named
    assert required <= {*positional[:by_position], *by_name}


# --- the pairs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "offset"), [(1, 0), (9, 4), (40, 0), (40, 20), (40, 100)])
@pytest.mark.parametrize("tiles", [(8, 24), (16, 16)])
def test_sorted_pairs_fill_tiles_of_their_expert(tiles, tokens, offset) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from moe_fp8.baselines.triton_pairs import Scales, count_pairs, sort_pairs

    shape = MoeShape(24, 6 if offset else 24, 256, 128, 1, 1, 3, "given")
    generator = torch.Generator().manual_seed(tokens + offset)
    ids = torch.rand((tokens, 24), generator=generator).topk(3).indices.int().to(DEVICE)
    b = humming_moe.buffers(tokens, humming_moe.INDEXED, tiles, shape, DEVICE)
    routed, pair_row = b.tables.routed._replace(ids=ids), b.tables.rows.pair_row
    for table in (routed.block_counts, pair_row, *(t for each in b.sorted.values() for t in each)):
        table.fill_(-77)
    source = torch.randn((2, tokens), generator=generator).to(DEVICE)
    count_pairs(routed, offset)
    sort_pairs(routed, offset, pair_row, b.sorted, Scales(source, b.q_scale))
    assert torch.equal(b.q_scale, source.t())
    flat, pairs = ids.flatten().cpu(), ids.numel()
    local = (flat >= offset) & (flat < offset + shape.num_local_experts)
    wanted = torch.where(local, torch.arange(pairs), -1)
    assert pair_row.flatten().tolist() == wanted.tolist()
    assert set(b.sorted) == set(tiles)
    for tile, (sorted_ids, expert_ids, used) in b.sorted.items():
        rows = sorted_ids[: int(used)].cpu().view(-1, tile)
        experts = expert_ids[: len(rows)].tolist()
        assert experts == sorted(experts)
        for expert in range(shape.num_local_experts):
            mine = rows[[e == expert for e in experts]].flatten().tolist()
            chosen = (flat == expert + offset).nonzero()[:, 0].tolist()
            padding = -len(chosen) % tile
            assert mine == chosen + padding * [pairs], "in the order of the tokens, padding last"


@pytest.mark.parametrize(
    ("packed", "tokens", "layout", "tile", "stream_k"),
    [
        (False, 1, humming_moe.INDEXED, (8, 256), True),
        (False, 16, humming_moe.INDEXED, (8, 256), False),
        (False, 901, humming_moe.INDEXED, (8, 256), True),
        (False, 1344, humming_moe.INDEXED, (64, 256), False),
        (False, 1920, humming_moe.GROUPED, (8, 256), True),
        (False, 2048, humming_moe.GROUPED, (8, 256), True),
        (False, 3000, humming_moe.INDEXED, (64, 256), False),
        (False, 4096, humming_moe.GROUPED, (8, 256), False),
        (False, 16384, humming_moe.INDEXED, (8, 256), True),
        (True, 1, humming_moe.INDEXED, (8, 128), False),
        (True, 2048, humming_moe.INDEXED, (64, 256), False),
        (True, 4096, humming_moe.INDEXED, (8, 256), True),
    ],
)
def test_humming_runs_faster_kernels_than_the_heuristics(
    packed, tokens, layout, tile, stream_k, monkeypatch
) -> None:
    chosen = {"block_shape": (8, 256, 128), "warp_shape": (8, 32, 128), "use_stream_k": True}
    monkeypatch.setattr(humming_moe, "tuning", lambda *arguments: dict(chosen))
    shape = MoeShape(256, 256, 4096, 2048, 1, 1, 6, "given") if packed else DEEPSEEK_V3
    layer = humming_moe.HummingLayer(shape)
    layer.configs = [None, None]
    plan = layer.plan(tokens, DEVICE)
    assert plan.layout == layout and plan.tiles == (tile[0], tile[0])
    for text in plan.tunings:
        options = json.loads(text)
        assert options["block_shape"] == [*tile, 128] and options["use_stream_k"] == stream_k


def test_humming_expects_the_pairs_of_this_rank_and_at_least_one() -> None:
    layer = humming_moe.HummingLayer(MoeShape(384, 48, 7168, 3072, 1, 1, 6, "given"))
    assert [layer.expected_pairs(tokens) for tokens in (1, 3, 4, 64)] == [1, 3, 3, 48]


@pytest.mark.parametrize(
    ("local", "offset", "expected"),
    [(6, 0, None), (6, 2, [-1, -1, 0, 1, 2, 3]), (2, 0, [0, 1] + 4 * [-1])],
)
def test_marlin_gets_a_map_unless_every_id_is_local(local, offset, expected, monkeypatch) -> None:
    library = types.SimpleNamespace(get_marlin_workspace=lambda device: torch.zeros(1))
    monkeypatch.setattr(marlin_moe, "require", lambda *_: library)
    shape = MoeShape(6, local, 256, 128, 1, 1, 3, "given")
    expert_map, _ = marlin_moe.map_and_locks.make(offset, shape, torch.device("cpu"))
    assert (expert_map if expected is None else expert_map.tolist()) == expected


@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("limit", [10.0, None])
def test_hummings_activation_is_that_of_the_definition(limit, gate_first) -> None:
    """Its text is C++: evaluate it in Python."""
    text = humming_moe.activation(limit, gate_first)["activation_impl"]
    python = re.sub(r"(\d)\.?f\b", r"\1", text)
    names = {"fminf": min, "fmaxf": max, "expf": lambda x: float(torch.tensor(x).exp())}
    for gate, up in ((12.0, -11.0), (-3.0, 2.0), (0.5, 30.0)):
        a, b = (gate, up) if gate_first else (up, gate)
        if limit:
            gate, up = min(gate, limit), min(max(up, -limit), limit)
        expected = torch.nn.functional.silu(torch.tensor(gate)) * up
        assert eval(python, {**names, "a": a, "b": b}) == pytest.approx(float(expected), rel=1e-6)
