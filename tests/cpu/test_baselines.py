"""The baselines on public libraries: their packing, refusals and, on stand-ins for the libraries,
what they pass and what they make of it."""

import ast
import importlib.util
import inspect
import json
import re
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import bruteforce
import fake_libraries
import pytest
import torch
from bruteforce import RENORMALIZE, TINY
from markers import more
from moe_fp8.baselines import (
    deepgemm_mega_moe,
    flashinfer_cutlass_moe,
    flashinfer_moe,
    flashinfer_prims_ts_moe,
    hpc_ops_moe,
    sglang_moe,
    shared,
    supported,
)
from moe_fp8.baselines.per_stream import PerStream
from moe_fp8.call import DEEPSEEK_V3, Form, MoeInputs, signature
from packaging.requirements import Requirement

from scripts.common.metrics import calc_diff, matched_ratio
from scripts.pack import pack

LIBRARIES = {
    "sglang_moe": ("sgl_kernel", "sglang-kernel>=0.4.3"),
    "deepgemm_moe": ("deep_gemm", "sgl-deep-gemm>=0.1.5"),
    "deepgemm_mega_moe": ("deep_gemm", "sgl-deep-gemm>=0.1.5"),
    "flashinfer_moe": ("flashinfer", "flashinfer-python"),
    "flashinfer_cutlass_moe": ("flashinfer", "flashinfer-python==0.7.2.post1"),
    "flashinfer_prims_ts_moe": ("flashinfer", "flashinfer-python>=0.7.2"),
    "hpc_ops_moe": (
        "hpc",
        "hpc-ops@git+https://github.com/Tencent/hpc-ops@6e2ecede9d6d47b2e680e839cc7ad7422bc8d88b",
    ),
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


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    """Clear the caches: another test has other stand-ins."""
    flashinfer_moe.entry.cache_clear()
    for module in MODULES.values():
        for value in vars(module).values():
            if isinstance(value, PerStream):
                value.clear()


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
    generation = {g.name: g for g in pack.generations()}[name]
    solution = json.loads(pack.pack(generation))
    sources = {source["path"] for source in solution["sources"]}
    assert f"moe_fp8/baselines/{name}.py" in sources
    assert not any("sm90" in path or path.startswith("moe_fp8/kernels/") for path in sources)
    assert [Requirement(text).name for text in solution["spec"]["dependencies"]]
    assert re.split("[=>]=", LIBRARIES[name][1])[0] in str(solution["spec"]["dependencies"])


@every_module
def test_a_missing_package_is_one_line(name, monkeypatch):
    library, requirement = LIBRARIES[name]
    module = MODULES[name]
    monkeypatch.setattr(checks_of(module), "require_gpu", lambda *_: None)
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


# --- flashinfer_moe: two generations of one function ---------------------------------------------

COMMON = (
    "routing_logits routing_bias hidden_states hidden_states_scale gemm1_weights "
    "gemm1_weights_scale gemm2_weights gemm2_weights_scale num_experts top_k n_group topk_group "
    "intermediate_size local_expert_offset local_num_experts routed_scaling_factor"
).split()
# As the wheels of these releases have them: required parameters, then those with a default.
RELEASES = {
    "0.5.3": (
        [*COMMON, "tile_tokens_dim", "routing_method_type"][:16],
        "tile_tokens_dim routing_method_type use_shuffled_weight weight_layout enable_pdl "
        "tune_max_num_tokens",
    ),
    "0.6.7": (
        COMMON,
        "routing_method_type use_shuffled_weight weight_layout do_finalize enable_pdl "
        "tune_max_num_tokens fp8_quantization_type activation_type",
    ),
    "0.7.2.post1": (
        COMMON,
        "routing_method_type use_shuffled_weight weight_layout do_finalize enable_pdl "
        "tune_max_num_tokens fp8_quantization_type num_fused_shared_experts activation_type "
        "norm_topk_prob routing_replay_out gemm1_alpha gemm1_beta gemm1_clamp_limit output "
        "valid_hidden_size valid_intermediate_size gemm1_bias gemm2_bias",
    ),
}


def install(monkeypatch, fused_moe: ModuleType) -> None:
    package = ModuleType("flashinfer")
    package.__path__ = []  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.fused_moe", fused_moe)


@pytest.fixture
def small_flashinfer(monkeypatch) -> None:
    monkeypatch.setattr(flashinfer_moe, "require_gpu", lambda device, capabilities: None)
    monkeypatch.setattr(flashinfer_moe, "SHAPE", TINY)


@pytest.mark.parametrize("release", RELEASES)
def test_flashinfer_moe_calls_every_release(release, monkeypatch, small_flashinfer):
    required, optional = RELEASES[release]
    parameters = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in required]
    parameters += [
        inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
        for n in optional.split()
    ]
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

    (given,) = calls
    for name in COMMON[:8]:
        assert given[name] is getattr(inputs, name)
    assert (given["num_experts"], given["local_num_experts"], given["top_k"]) == (16, 4, 3)
    assert (given["n_group"], given["topk_group"], given["intermediate_size"]) == (4, 2, 128)
    assert given["local_expert_offset"] == 4 and given["routed_scaling_factor"] == 2.5
    assert given["routing_method_type"] == 2 and given["use_shuffled_weight"] is False
    assert given.get("tile_tokens_dim") == (8 if release == "0.5.3" else None)
    assert (given.get("output") is output) == (release == "0.7.2.post1")


def test_tile_tokens_of_older_releases():
    tiles = [flashinfer_moe.tile_tokens(t, DEEPSEEK_V3) for t in (1, 256, 257, 288, 1024, 14107)]
    assert tiles == [8, 8, 8, 16, 32, 64]


def installed_file(*parts: str) -> Path:
    """Return a file of FlashInfer. The package is not imported: that takes seconds."""
    spec = importlib.util.find_spec("flashinfer")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("flashinfer is not installed")
    return Path(spec.submodule_search_locations[0]).joinpath(*parts)


def installed_signature(
    function: str, parts: tuple[str, ...] = ("fused_moe", "core.py")
) -> tuple[list[str], set[str]]:
    """Parameters of FlashInfer's function as installed, and those without default."""
    source = installed_file(*parts)
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            names = [a.arg for a in node.args.args]
            required = set(names[: len(names) - len(node.args.defaults)])
            for a, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
                names.append(a.arg)
                required |= {a.arg} if default is None else set()
            return names, required
    raise AssertionError(f"no {function} in {source}")


def test_the_installed_flashinfer_takes_what_flashinfer_moe_passes():
    names, required = installed_signature("trtllm_fp8_block_scale_moe")
    assert required - {"tile_tokens_dim"} == set(COMMON)
    assert {"routing_method_type", "use_shuffled_weight"} <= set(names)


PRIMS_TS = ("fused_moe", "backends", "prims_ts", "fp8_op.py")


def test_the_installed_flashinfer_takes_what_flashinfer_prims_ts_moe_passes():
    if not installed_file(*PRIMS_TS).is_file():
        pytest.skip("an older flashinfer is installed")
    names, required = installed_signature("prims_ts_fp8_block_scale_moe", PRIMS_TS)
    assert required == set(COMMON)
    assert {"routing_method_type", "use_shuffled_weight", "output"} <= set(names)
    fake = inspect.signature(fake_libraries.fused_moe(TINY).prims_ts_fp8_block_scale_moe)
    assert set(fake.parameters) <= set(names)


def test_the_installed_kernels_want_16_rows_shuffled():
    """The order of the rows follows from the rows of the epilogue: 32 in turns for 128 of them."""
    configs = installed_file("prims_ts", "moe", "prims_ts_moe_configs.json")
    if not configs.is_file():
        pytest.skip("an older flashinfer is installed")
    found = json.loads(configs.read_text("utf-8"))
    template = "BatchedGemmDeepSeekFp8LowLatency"
    assert found["templates"][template]["use_deepseek_fp8"] is True
    assert found["templates"][template]["epi_tile_m"] == 64
    others = [c for c in found["configs"] if c.get("use_deepseek_fp8")]
    own = [c for c in found["configs"] if c["_template"] == template]
    assert len(own) == 2 and not others and not any("epi_tile_m" in str(c) for c in own)


def test_shuffled_rows():
    weights = torch.arange(2 * 32).view(2, 32, 1).repeat(1, 1, 3)
    out = torch.empty_like(weights)
    flashinfer_prims_ts_moe.shuffle(weights, out)
    block = [0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15]
    assert out[1, :, 2].tolist() == [32 + b + r for b in (0, 16) for r in block]


def test_a_flashinfer_without_the_function_is_one_line(monkeypatch):
    monkeypatch.setattr(flashinfer_prims_ts_moe, "require_gpu", lambda device, capabilities: None)
    install(monkeypatch, ModuleType("flashinfer.fused_moe"))
    with pytest.raises(RuntimeError, match="^too old: .*flashinfer-python>=0.7.2$"):
        flashinfer_prims_ts_moe.run(*arguments())


def test_the_installed_flashinfer_takes_what_flashinfer_cutlass_moe_passes():
    stand_in = fake_libraries.fused_moe(DEEPSEEK_V3)
    for function in ("cutlass_fused_moe", "cutlass_fused_moe_workspace_size"):
        names, required = installed_signature(function)
        passed = list(inspect.signature(getattr(stand_in, function)).parameters)
        if "workspace_buffer" not in installed_signature("cutlass_fused_moe")[0]:
            pytest.skip("an older flashinfer is installed")
        assert required <= set(passed) <= set(names)
        positional = [n for n in passed if n in required]
        assert names[: len(positional)] == positional


# --- whole layers on stand-ins -------------------------------------------------------------------


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
STAND_INS = [n for n in MODULES if n != "flashinfer_moe" and "triton" not in n]
STAND_INS += ["deepgemm_moe contiguous", "sglang_moe newest", "deepgemm_mega_moe newest"]
IN_TRITON = ["triton narrow", "triton tma", "triton wide", "triton v2"]


@pytest.fixture(params=STAND_INS + IN_TRITON)
def layer(request, monkeypatch) -> Callable[..., None]:
    """A baseline's layer of the tiny shape, called with inputs and output."""
    pytest.importorskip("triton", reason="triton is not installed")
    from test_baselines_triton import layer_of, rounded
    from triton.runtime import interpreter

    if DEVICE.type == "cpu":
        monkeypatch.setattr(interpreter, "_convert_float", rounded)
    if request.param in IN_TRITON:
        return layer_of(request.param.split()[1], monkeypatch)
    if DEVICE.type == "cuda":
        pytest.skip("the stand-ins work on CPU tensors, Triton on the GPU's")
    name = request.param.split()[0]
    module = MODULES[name]
    monkeypatch.setattr(checks_of(module), "require_gpu", lambda *_: None)
    for library in (fake_libraries.sgl_kernel, fake_libraries.deep_gemm):
        fake = library(TINY, newest=request.param.endswith("newest"))
        monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.setitem(sys.modules, "hpc", fake_libraries.hpc(TINY))
    install(monkeypatch, fake_libraries.fused_moe(TINY))
    if request.param.endswith("contiguous"):
        monkeypatch.setattr(module, "MASKED_ROWS", 0)
    if hasattr(module, "layer_at"):
        return module.layer_at(TINY)
    classes = {"sglang_moe": "SglangLayer", "triton_fused_moe_v2": "FusedMoeV2Layer"}
    if name in classes:
        layer = getattr(module, classes[name])()
        layer.shape = TINY
        return layer
    monkeypatch.setattr(module, "SHAPE", TINY)
    return module.call


def output_of(layer, inputs: MoeInputs) -> torch.Tensor:
    inputs = MoeInputs(*(x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in inputs))
    shape = inputs.hidden_states.shape
    out = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=DEVICE)
    layer(inputs, out)
    return out.cpu()


@pytest.mark.parametrize(
    ("tokens", "offset"), [(13, -2), (4, 99), *more((1, 0), (12, 4), (9, 3), (5, 14))]
)
def test_layer_matches_brute_force(layer, tokens, offset):
    favourite = max(offset, 0) + 1 if offset < 16 else None
    inputs = bruteforce.random_inputs(TINY, tokens, offset, tokens, favourite=favourite)
    for scale in (s for name, s in inputs._asdict().items() if name.endswith("_scale")):
        scale.view(-1)[::7] = 0.0  # which the definition allows
    wanted = torch.from_numpy(bruteforce.layer(inputs, TINY))
    got = output_of(layer, inputs)
    assert got.isfinite().all()
    if favourite is None:
        assert (got == 0).all() and (wanted == 0).all()
        return
    # FlashInfer's CUTLASS path quantises twice, SGLang's rounds to bfloat16 before it quantises.
    bound = 1e-2 if layer is flashinfer_cutlass_moe.call else 1e-4
    bound = 1e-3 if isinstance(layer, sglang_moe.SglangLayer) else bound
    if "triton" in type(layer).__module__:
        bound = 1e-5 if DEVICE.type == "cpu" else 1e-3
        assert matched_ratio(got, wanted, rtol=0.02, atol=0.02) > 0.95
    assert wanted.abs().sum() > 0 and calc_diff(got, wanted) < bound


@pytest.mark.all
@pytest.mark.parametrize("layer", IN_TRITON, indirect=True)
def test_layer_with_renormalize_matches_brute_force(layer):
    layer.shape = RENORMALIZE
    inputs = bruteforce.random_inputs(RENORMALIZE, 9, seed=9)
    wanted = torch.from_numpy(bruteforce.layer(inputs, RENORMALIZE))
    bound = 1e-5 if DEVICE.type == "cpu" else 1e-3
    assert calc_diff(output_of(layer, inputs), wanted) < bound


@pytest.mark.all
def test_the_routing_changes_between_calls_of_as_many_tokens(layer):
    """Buffers are kept: nothing of the call before must show."""
    few = bruteforce.random_inputs(TINY, 12, 4, 12)
    many = bruteforce.random_inputs(TINY, 12, 4, 12, favourite=6)
    none = many._replace(local_expert_offset=99)
    first = [output_of(layer, inputs) for inputs in (few, many)]
    assert not torch.equal(*first)
    assert (output_of(layer, none) == 0).all()
    for inputs, wanted in zip((few, many), first, strict=True):
        again = output_of(layer, inputs)
        assert calc_diff(again, wanted) < 1e-5  # slots in another order


def test_no_token(layer):
    assert output_of(layer, bruteforce.random_inputs(TINY, 0, 4)).shape == (0, TINY.hidden_size)


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


@pytest.mark.parametrize("layer", ["deepgemm_mega_moe"], indirect=True)
def test_prepared_weights_are_not_prepared_again(layer):
    inputs = bruteforce.random_inputs(TINY, 12, 4, 12)
    weights = deepgemm_mega_moe.own_weights(TINY, DEVICE)
    deepgemm_mega_moe.interleave_weights(inputs, weights)
    of_others = torch.zeros_like(inputs.gemm1_weights_scale)
    got = output_of(
        lambda given, out: deepgemm_mega_moe.call_prepared(given, out, weights),
        inputs._replace(gemm1_weights_scale=of_others),
    )
    assert torch.equal(got, output_of(layer, inputs)) and got.any()


def test_capacities_are_few():
    rooms = [deepgemm_mega_moe.capacity(t) for t in (1, 80, 128, 129, 901, 11948, 14107, 16385)]
    assert rooms == [128, 128, 128, 256, 1024, 16384, 16384, 32768]


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


@pytest.mark.parametrize("layer", ["hpc_ops_moe"], indirect=True)
def test_hpc_is_not_given_more_experts_than_it_numbers(layer, monkeypatch):
    many = replace(TINY, num_experts=257, num_local_experts=257, n_group=1, topk_group=1)
    monkeypatch.setattr(layer, "shape", many)
    with pytest.raises(RuntimeError, match="num_local_experts=257"):
        output_of(layer, bruteforce.random_inputs(many, 1, 1, 0))


@pytest.mark.all
@pytest.mark.parametrize("layer", ["hpc_ops_moe"], indirect=True)
@pytest.mark.parametrize(("tokens", "tile"), [(60, 16), (220, 48)])
def test_hpc_takes_larger_tiles(layer, tokens, tile):
    """Experts begin at multiples of them, where the library looks for the scales."""
    assert hpc_ops_moe.tile_rows(hpc_ops_moe.mean_rows(tokens, TINY)) == tile
    inputs = bruteforce.random_inputs(TINY, tokens, 4, tokens, favourite=6)
    got = output_of(layer, inputs)
    wanted = torch.from_numpy(bruteforce.layer(inputs, TINY))
    assert calc_diff(got, wanted) < 1e-4
    assert torch.equal(output_of(layer, inputs), got)


@pytest.mark.parametrize("layer", ["hpc_ops_moe"], indirect=True)
def test_hpc_without_a_list_is_not_called_without_a_row(layer):
    """It would divide by the number of tiles."""
    assert (output_of(layer, bruteforce.random_inputs(TINY, 50, 99, 1)) == 0).all()


class Addresses:
    """A caching allocator in place of `Tensor.new_empty`: it hands out the first free address of a
    size."""

    def __init__(self) -> None:
        self.taken: dict[int, list[weakref.ref]] = {}

    def of(self, tensor: torch.Tensor) -> int:
        taken = self.taken[tensor.nbytes]
        return next(i for i, ref in enumerate(taken) if ref() is tensor)

    def new_empty(self, tensor: torch.Tensor, *arguments, **options) -> torch.Tensor:
        made = NEW_EMPTY(tensor, *arguments, **options)
        taken = self.taken.setdefault(made.nbytes, [])
        free = next((i for i, ref in enumerate(taken) if ref() is None), len(taken))
        taken[free : free + 1] = [weakref.ref(made)]
        return made


NEW_EMPTY = torch.Tensor.new_empty


@pytest.mark.parametrize("layer", ["hpc_ops_moe"], indirect=True)
@pytest.mark.parametrize(("tokens", "listed"), [(50, False), (13, True)])
def test_hpcs_second_gemm_has_descriptors_of_its_own_without_a_list(
    layer, tokens, listed, monkeypatch
):
    """The library allocates them, two of 128 bytes for each expert, and frees them with the call.
    With its list of tiles it acquires them."""
    hpc, memory, at = sys.modules["hpc"], Addresses(), list[int]()
    multiply = hpc.group_gemm_blockwise_fp8

    def with_descriptors(x, weight, *arguments, **options):
        descriptors = x.new_empty(2 * 128 * len(weight), dtype=torch.int8)
        at.append(memory.of(descriptors))
        return multiply(x, weight, *arguments, **options)

    monkeypatch.setattr(hpc, "group_gemm_blockwise_fp8", with_descriptors)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: memory.new_empty(*a, **k))
    output_of(layer, bruteforce.random_inputs(TINY, tokens, 4, tokens))
    first, second = at
    assert (first == second) == listed
