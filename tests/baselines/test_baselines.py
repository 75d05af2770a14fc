"""The baselines on public libraries: their packing, refusals, sizes and what they pass. No library
is replaced by a stand-in: `test_full_layers` and `tests/engines` have the real ones."""

import ast
import importlib.util
import inspect
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import bruteforce
import pytest
import torch
from bruteforce import TINY
from moe_fp8.baselines import (
    flashinfer_cutlass_moe,
    flashinfer_moe,
    flashinfer_prims_ts_moe,
    hpc_ops_moe,
    shared,
    supported,
)
from moe_fp8.call import signature
from moe_fp8.shape import DEEPSEEK_V3, Form
from packaging.requirements import Requirement

from scripts.common import packer

LIBRARIES = {
    "sglang_moe": ("sgl_kernel", "sglang-kernel>=0.4.3"),
    "deepgemm_moe": ("deep_gemm", "sgl-deep-gemm>=0.1.5"),
    "flashinfer_moe": ("flashinfer", "flashinfer-python"),
    "flashinfer_cutlass_moe": ("flashinfer", "flashinfer-python==0.7.4"),
    "flashinfer_prims_ts_moe": ("flashinfer", "flashinfer-python>=0.7.2"),
    "hpc_ops_moe": (
        "hpc",
        "hpc-ops@git+https://github.com/Tencent/hpc-ops@6e2ecede9d6d47b2e680e839cc7ad7422bc8d88b",
    ),
    "humming_moe": ("humming", "humming-kernels>=0.1.20"),
    "triton_fused_moe_v2": ("sgl_kernel", "sglang-kernel>=0.4.3"),
    "triton_moe": ("triton", "triton"),
}
MODULES = {name: importlib.import_module(f"moe_fp8.baselines.{name}") for name in LIBRARIES}
ON_BLACKWELL = ("flashinfer_moe", "flashinfer_prims_ts_moe")
"""Nowhere else."""
NEEDS = {name: "90" for name in MODULES}
NEEDS |= dict.fromkeys(("sglang_moe", "triton_fused_moe_v2", "triton_moe"), "90/100/103")
NEEDS |= dict.fromkeys(ON_BLACKWELL, "100/103")
every_module = pytest.mark.parametrize("name", MODULES)


def checks_of(module: ModuleType) -> ModuleType:
    """The module that asks for the GPU and for the packages."""
    return module if hasattr(module, "require_gpu") else shared


def arguments(tokens: int = 1) -> list:
    """Arguments of full size that hold nothing."""
    inputs = inspect.signature(flashinfer_moe.run).parameters
    h = DEEPSEEK_V3.hidden_size
    specs = signature(DEEPSEEK_V3, tokens, Form.usual(DEEPSEEK_V3)).specs
    dims = {name: (shape, dtype) for name, shape, dtype, *_ in specs} | {
        "routing_logits": ((tokens, DEEPSEEK_V3.num_experts), torch.float32),
        "hidden_states": ((tokens, h), torch.float8_e4m3fn),
        "hidden_states_scale": ((h // 128, tokens), torch.float32),
        "output": ((tokens, h), torch.bfloat16),
    }
    scalars = {"local_expert_offset": 32, "routed_scaling_factor": 2.5}
    return [
        scalars[name]
        if name in scalars
        else torch.empty(dims[name][0], dtype=dims[name][1], device="meta")
        for name in inputs
    ]


@every_module
def test_packs_without_our_kernels(name):
    generation = {g.name: g for g in packer.generations()}[name]
    solution = json.loads(packer.pack(generation))
    paths = {source["path"] for source in solution["sources"]}
    assert f"moe_fp8/baselines/{name}.py" in paths
    assert not any("sm90" in path or path.startswith("moe_fp8/kernels/") for path in paths)
    assert [Requirement(text).name for text in solution["spec"]["dependencies"]]
    assert re.split("[=>]=", LIBRARIES[name][1])[0] in str(solution["spec"]["dependencies"])


@every_module
def test_a_missing_package_is_one_line(name, monkeypatch):
    library, requirement = LIBRARIES[name]
    module = MODULES[name]
    monkeypatch.setattr(checks_of(module), "require_gpu", lambda *_: None)
    flashinfer_moe.entry.cache_clear()
    for loaded in [m for m in sys.modules if m.split(".")[0] == library]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(RuntimeError, match=f"^not installed: .*{re.escape(requirement)}'?$"):
        module.run(*arguments())


@every_module
def test_an_unsupported_gpu_is_one_line(name, monkeypatch):
    """The check comes before all imports, so the package may be missing."""
    module = MODULES[name]
    own = supported.require_gpu.__wrapped__
    device = torch.device("cuda", 0)
    checks = checks_of(module)
    monkeypatch.setattr(checks, "require_gpu", lambda _, capabilities: own(device, capabilities))
    monkeypatch.setattr(checks, "require", None)
    other = (9, 0) if name in ON_BLACKWELL else (8, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: other)
    sm = f"{other[0]}{other[1]}"
    with pytest.raises(RuntimeError, match=rf"^unsupported on sm_{sm} .*sm_{NEEDS[name]}\)$"):
        module.run(*arguments())


def test_the_cpu_is_refused():
    with pytest.raises(RuntimeError, match=r"^unsupported on cpu \(needs sm_90\)$"):
        supported.require_gpu(torch.device("cpu"), supported.SM90)


@every_module
def test_wrong_arguments_are_refused_first(name, monkeypatch):
    monkeypatch.setattr(checks_of(MODULES[name]), "require_gpu", None)
    wrong = arguments()
    wrong[2] = wrong[2].to(torch.bfloat16)
    with pytest.raises(ValueError, match="^hidden_states: expected dtype"):
        MODULES[name].run(*wrong)


def test_hpc_is_not_given_more_experts_than_it_numbers(monkeypatch):
    many = replace(TINY, num_experts=257, num_local_experts=257, n_group=1, topk_group=1)
    monkeypatch.setattr(hpc_ops_moe, "begin", lambda *_: (1, None))
    with pytest.raises(RuntimeError, match="num_local_experts=257"):
        hpc_ops_moe.HpcOpsLayer(many)(bruteforce.random_inputs(many, 1, 1, 0), torch.empty(1))


# --- the real packages' signatures --------------------------------------------------------------

COMMON = (
    "routing_logits routing_bias hidden_states hidden_states_scale gemm1_weights "
    "gemm1_weights_scale gemm2_weights gemm2_weights_scale num_experts top_k n_group topk_group "
    "intermediate_size local_expert_offset local_num_experts routed_scaling_factor"
).split()
RELEASES = {  # the parameters with a default that matter, as the wheels of these releases have them
    "0.5.3": "tile_tokens_dim routing_method_type use_shuffled_weight weight_layout",
    "0.6.7": "routing_method_type use_shuffled_weight weight_layout do_finalize",
    "0.7.2.post1": "routing_method_type use_shuffled_weight weight_layout do_finalize output",
}


def install(monkeypatch, fused_moe: ModuleType) -> None:
    package = ModuleType("flashinfer")
    package.__path__ = []  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.fused_moe", fused_moe)


@pytest.mark.parametrize("release", RELEASES)
def test_flashinfer_moe_calls_every_release(release, monkeypatch):
    monkeypatch.setattr(flashinfer_moe, "require_gpu", lambda device, capabilities: None)
    monkeypatch.setattr(flashinfer_moe, "SHAPE", TINY)
    flashinfer_moe.entry.cache_clear()
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind) for name in COMMON]
    parameters += [inspect.Parameter(n, kind, default=None) for n in RELEASES[release].split()]
    calls: list[dict] = []

    def function(*args, **kwargs):
        bound = inspect.Signature(parameters).bind(*args, **kwargs).arguments
        calls.append(bound)
        result = bound.get("output")
        result = torch.empty_like(output) if result is None else result
        return result.fill_(3)

    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    fused_moe = ModuleType("flashinfer.fused_moe")
    fused_moe.trtllm_fp8_block_scale_moe = function  # type: ignore[attr-defined]
    install(monkeypatch, fused_moe)
    inputs = bruteforce.random_inputs(TINY, 40, 4)
    output = torch.zeros(40, TINY.hidden_size, dtype=torch.bfloat16)
    flashinfer_moe.run(*inputs, output)
    assert (output == 3).all()

    (passed,) = calls
    for name in COMMON[:8]:
        assert passed[name] is getattr(inputs, name)
    assert (passed["num_experts"], passed["local_num_experts"], passed["top_k"]) == (16, 4, 3)
    assert (passed["n_group"], passed["topk_group"], passed["intermediate_size"]) == (4, 2, 128)
    assert passed["local_expert_offset"] == 4 and passed["routed_scaling_factor"] == 2.5
    assert passed["routing_method_type"] == 2 and passed["use_shuffled_weight"] is False
    assert passed.get("tile_tokens_dim") == (8 if release == "0.5.3" else None)
    assert (passed.get("output") is output) == (release == "0.7.2.post1")


def test_a_flashinfer_without_the_function_is_one_line(monkeypatch):
    monkeypatch.setattr(flashinfer_prims_ts_moe, "require_gpu", lambda device, capabilities: None)
    install(monkeypatch, ModuleType("flashinfer.fused_moe"))
    with pytest.raises(RuntimeError, match="^too old: .*flashinfer-python>=0.7.2$"):
        flashinfer_prims_ts_moe.run(*arguments())


LAYER = [*COMMON, "routing_method_type", "use_shuffled_weight"]
SIGNATURES = {  # where in a package, function: parameters by position, parameters by name
    ("sgl_kernel", "moe_fused_gate"): (8, []),
    ("sgl_kernel", "prepare_moe_input"): (9, []),
    ("sgl_kernel", "shuffle_rows"): (3, []),
    ("sgl_kernel", "fp8_blockwise_scaled_grouped_mm"): (18, []),
    ("sgl_kernel", "silu_and_mul"): (2, []),
    ("sgl_kernel", "sgl_per_token_group_quant_8bit"): (7, []),
    ("sgl_kernel", "apply_shuffle_mul_sum"): (4, []),
    ("deep_gemm", "m_grouped_fp8_fp4_gemm_nt_masked"): (3, ["masked_m", "expected_m", "recipe"]),
    ("deep_gemm", "m_grouped_fp8_fp4_gemm_nt_contiguous"): (3, ["grouped_layout", "recipe"]),
    ("hpc", "group_gemm_blockwise_fp8"): (
        6,
        ["num_seq_per_group_avg", "output", "task_map_workspace"],
    ),
    ("flashinfer/fused_moe/core.py", "trtllm_fp8_block_scale_moe"): (0, LAYER),
    ("flashinfer/fused_moe/backends/prims_ts", "prims_ts_fp8_block_scale_moe"): (
        0,
        [*LAYER, "output"],
    ),
    ("flashinfer/fused_moe/core.py", "cutlass_fused_moe"): (
        7,
        "ep_size ep_rank output use_deepseek_fp8_block_scale workspace_buffer".split(),
    ),
    ("flashinfer/fused_moe/core.py", "cutlass_fused_moe_workspace_size"): (
        5,
        "x_dtype weight_dtype output_dtype ep_size use_deepseek_fp8_block_scale device".split(),
    ),
}
"""The arguments that the baselines pass to the functions of a package."""


def installed(path: str) -> Path:
    """Return a part of a package. The package is not imported: that takes seconds, or a GPU."""
    package, *inner = path.split("/")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    part = Path(spec.submodule_search_locations[0]).joinpath(*inner)
    if not part.exists():
        pytest.skip(f"{path} is not in the installed release")
    return part


@pytest.mark.parametrize(("path", "function"), SIGNATURES)
def test_the_installed_package_takes_what_a_baseline_passes(path, function):
    part, mark = installed(path), f"def {function}("
    files = [part] if part.is_file() else sorted(part.rglob("*.py"))
    texts = [text for text in (file.read_text("utf-8") for file in files) if mark in text]
    if function == "moe_fused_gate" and not texts:
        pytest.skip("only older releases have it; with others a Triton kernel routes")
    (definition, *_) = (
        node.args
        for node in ast.walk(ast.parse(texts[0]))
        if isinstance(node, ast.FunctionDef) and node.name == function
    )
    by_position, by_name = SIGNATURES[path, function]
    positional = [a.arg for a in definition.args]
    required = set(positional[: len(positional) - len(definition.defaults)])
    for a, default in zip(definition.kwonlyargs, definition.kw_defaults, strict=True):
        required |= {a.arg} if default is None else set()
    named = {*positional[by_position:], *(a.arg for a in definition.kwonlyargs)}
    assert by_position <= len(positional) and {*by_name} <= named
    # Older releases need the tile; the baseline passes it if there is such a parameter.
    assert required - {"tile_tokens_dim"} <= {*positional[:by_position], *by_name}


def test_the_installed_kernels_want_16_rows_shuffled():
    """An epilogue of 64 rows wants groups of 16 rows shuffled; one of 128 rows, groups of 32."""
    configs = installed("flashinfer/prims_ts/moe/prims_ts_moe_configs.json")
    contents = json.loads(configs.read_text("utf-8"))
    template = "BatchedGemmDeepSeekFp8LowLatency"
    assert contents["templates"][template]["use_deepseek_fp8"] is True
    assert contents["templates"][template]["epi_tile_m"] == 64
    others = [c for c in contents["configs"] if c.get("use_deepseek_fp8")]
    own = [c for c in contents["configs"] if c["_template"] == template]
    assert len(own) == 2 and not others and not any("epi_tile_m" in str(c) for c in own)


# --- sizes and orders ---------------------------------------------------------------------------


def test_shuffled_rows():
    weights = torch.arange(2 * 32).view(2, 32, 1).repeat(1, 1, 3)
    out = torch.empty_like(weights)
    flashinfer_prims_ts_moe.shuffle(weights, out)
    block = [0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15]
    assert out[1, :, 2].tolist() == [32 + b + r for b in (0, 16) for r in block]


def test_tile_tokens_of_older_releases():
    tiles = [flashinfer_moe.tile_tokens(t, DEEPSEEK_V3) for t in (1, 256, 257, 288, 1024, 14107)]
    assert tiles == [8, 8, 8, 16, 32, 64]


@pytest.mark.parametrize("offset", [0, 32, 224, 100, 7, -1, -32, 250, 256, 2**31 - 1, -(2**31)])
def test_ids_and_rank_of_the_window(offset):
    ids = torch.arange(256, dtype=torch.int32).view(-1, 8)
    mapped, rank = flashinfer_cutlass_moe.local_ids(ids, offset, DEEPSEEK_V3)
    assert mapped.dtype == torch.int32 and 0 <= rank < 8
    assert int(mapped.min()) >= 0 and int(mapped.max()) < 256
    local = mapped - 32 * rank
    is_local = (local >= 0) & (local < 32)
    wanted = (ids.long() >= offset) & (ids.long() < offset + 32)
    assert torch.equal(is_local, wanted)
    assert torch.equal(local[wanted].long(), ids[wanted].long() - offset)


@pytest.mark.parametrize(
    ("tokens", "tile"),
    [(1, 8), (287, 8), (288, 16), (901, 32), (1600, 64), (2080, 48), (4096, 32), (4640, 64),
     (14107, 64)],
)  # fmt: skip
def test_rows_of_hpcs_tiles(tokens, tile):
    assert hpc_ops_moe.tile_rows(hpc_ops_moe.mean_rows(tokens, DEEPSEEK_V3)) == tile


@pytest.mark.parametrize(("tokens", "tiles"), [(1, 8), (80, 108)])
def test_hpcs_list_has_room_for_the_worst_routing(tokens, tiles):
    """8 experts with a row each; 640 rows on 32 experts, each with one row in its last tile. The
    second GEMM has 56 column tiles; an entry a CTA ends the list. The room is the same for every
    number of tokens."""
    pytest.importorskip("triton", reason="triton is not installed")
    from moe_fp8.baselines.triton_stages import processors

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tasks = hpc_ops_moe.buffers(tokens, DEEPSEEK_V3, device)[-1]
    assert tasks.shape[0] * tasks.shape[1] >= tiles * 56 + processors(device)
    assert tasks.shape == hpc_ops_moe.buffers(287, DEEPSEEK_V3, device)[-1].shape
