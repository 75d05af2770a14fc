"""v1 to flat on the CPU: whole layers against brute force, the definition and each other; where
their rows go, what their host waits for, and what they launch."""

import types
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import bruteforce
import pytest
import torch
from bruteforce import TINY
from markers import more
from moe_fp8 import call as call_module
from moe_fp8 import routing
from moe_fp8.call import GroupedRows, MoeInputs
from moe_fp8.kernels import architectures
from moe_fp8.kernels.configs import GemmConfigSm90 as GemmConfig
from moe_fp8.ladder import steps
from moe_fp8.ladder import v1_loop_padding as v1
from moe_fp8.ladder import v2_vectorised as v2
from moe_fp8.ladder import v3_clustered as v3
from moe_fp8.ladder import v4_flat as v4
from moe_fp8.ladder import v5_fused as v5
from moe_fp8.ladder import v6_fused_hifi as v6
from moe_fp8.ladder.adapter import run_of
from moe_fp8.layer import FusedLayer
from moe_fp8.reference import calc_diff, group_rows
from moe_fp8.shape import DEEPSEEK_V3, MoeShape, expected_rows
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from scripts.measuring.accuracy import matched_ratio

# Routing as in the definition, so that its reference applies; 0.3 MB of weights an expert.
SMALL = MoeShape(hidden_size=256, intermediate_size=256)
MODULES = {"v1": v1, "v2": v2, "v3": v3, "flat": v4, "fused": v5, "hifi": v6}
LAYERS = {name: MODULES[name].moe for name in ("v1", "v2", "v3", "flat")}
FUSED = FusedLayer(SMALL)
every_layer = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
OFFSETS = [0, 32, 224, 250, -5, 256, -32, 1000, -(2**31), 2**31 - 1]
GEMMS = ["grouped_gemm", "swiglu_quant", "grouped_gemm", "combine"]
STEPS = {"v1": ["route", *GEMMS], "v2": ["route", *GEMMS]}
STEPS |= dict.fromkeys(("v3", "flat"), ["route", "permute", *GEMMS])
Called = list[tuple[str, tuple[Any, ...]]]


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return bruteforce.random_weights(SMALL)


@pytest.fixture
def called(monkeypatch) -> Called:
    """Every call of a step, with its arguments."""
    calls: Called = []
    for name in dict.fromkeys(STEPS["flat"]):

        def recorded(*arguments: Any, name: str, step: Callable[..., Any], **options: Any) -> Any:
            calls.append((name, arguments))
            return step(*arguments, **options)

        module = routing if name == "route" else steps
        monkeypatch.setattr(module, name, partial(recorded, name=name, step=getattr(module, name)))
    return calls


@pytest.fixture
def no_kernels(monkeypatch) -> None:
    """Steps that compute nothing, but for the routing."""
    for name in dict.fromkeys(STEPS["flat"][1:]):
        monkeypatch.setattr(steps, name, lambda *arguments: None)


def output_of(layer: Any, inputs: MoeInputs, shape: MoeShape = SMALL) -> torch.Tensor:
    """The output of one call into memory that was full of NaN."""
    out = torch.full(inputs.hidden_states.shape, torch.nan, dtype=torch.bfloat16)
    layer(inputs, out, *(() if isinstance(layer, FusedLayer) else (shape,)))
    return out


# --- results ------------------------------------------------------------------------------------


@every_layer
@pytest.mark.parametrize(("tokens", "offset"), [(1, 0), (12, 4), (13, -2), (5, 14), (4, 99)])
def test_layer_matches_brute_force(layer, tokens, offset):
    favourite = max(offset, 0) + 1 if offset < 16 else None
    inputs = bruteforce.random_inputs(TINY, tokens, offset, tokens, favourite=favourite)
    wanted = torch.from_numpy(bruteforce.layer(inputs, TINY))
    got = output_of(layer, inputs, TINY)
    assert calc_diff(got, wanted) < 1e-5
    assert matched_ratio(got, wanted, rtol=0.02, atol=0.02) > 0.99
    assert bool(wanted.abs().sum() > 0) == (favourite is not None)


@every_layer
@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_layer_matches_the_reference_on_reduced_geometry(layer, tokens, weights, reference):
    """The reference has neither bfloat16 nor FP8 between its stages: hence the distance."""
    inputs = bruteforce.random_inputs(SMALL, tokens, 32, seed=3, weights=weights, favourite=40)
    wanted = reference(*inputs)
    got = output_of(layer, inputs)
    assert (wanted.float().abs().sum(dim=1) > 0).all(), "every token chooses the favourite"
    assert calc_diff(got, wanted) < 1e-3
    assert matched_ratio(got, wanted, rtol=0.2, atol=0.1) > 0.85


@pytest.mark.parametrize("offset", OFFSETS)
def test_offsets(offset, weights, reference):
    some_local = -32 < offset < 256
    favourite = max(offset, 0) + 2 if some_local else None
    inputs = bruteforce.random_inputs(SMALL, 9, offset, 4, weights, favourite)
    wanted, got = reference(*inputs), output_of(v2.moe, inputs)
    for layer in LAYERS.values():
        assert torch.equal(got, output_of(layer, inputs))
    zero = (wanted == 0).all(dim=1)
    assert (got[zero] == 0).all(), "a token without a local expert gets zeros"
    assert calc_diff(got, wanted) < 1e-3
    assert bool(zero.all()) == (not some_local)


@pytest.mark.parametrize(
    ("tokens", "favourite"),  # with a favourite, which all tokens choose, 128 rows fill a tile
    [
        *((1, None), (17, None), (211, None), (2, 33), (127, 33), (128, 33), (129, 33)),
        *more((2, None), (3, None), (127, None), (128, None), (129, None)),
        *more((1, 33), (3, 33), (17, 33), (211, 33)),
    ],
)
def test_generations_are_bitwise_equal(tokens, favourite, weights):
    inputs = bruteforce.random_inputs(SMALL, tokens, 32, tokens, weights, favourite)
    first = output_of(v1.moe, inputs)
    assert first.isfinite().all()
    for name, layer in LAYERS.items():
        assert torch.equal(first, output_of(layer, inputs)), name
    assert torch.equal(first, output_of(v1.moe, inputs)), "not deterministic"


_new_empty = torch.Tensor.new_empty


def new_poisoned(self: torch.Tensor, *args, **kwargs) -> torch.Tensor:
    """`new_empty` as bad as it may be: NaN everywhere."""
    out = _new_empty(self, *args, **kwargs)
    if out.dtype == torch.uint8:  # memory for views of any type: NaN in all of ours
        out.fill_(0xFF)
    elif out.dtype == torch.float8_e4m3fn:
        out.view(torch.uint8).fill_(0x7F)
    elif out.dtype == torch.int64:  # FP8 or bfloat16 rows
        out.view(torch.uint8).fill_(0x7F)
    elif out.is_floating_point():
        out.fill_(torch.nan)
    return out


@every_layer
def test_uninitialised_memory_reaches_nothing(layer, weights, monkeypatch):
    inputs = bruteforce.random_inputs(SMALL, 31, 32, 5, weights)
    clean = output_of(layer, inputs)
    monkeypatch.setattr(torch.Tensor, "new_empty", new_poisoned)
    assert torch.equal(output_of(layer, inputs), clean)


def test_inputs_are_not_written(weights):
    inputs = bruteforce.random_inputs(SMALL, 20, 32, 8, weights)
    before = [x.clone() for x in inputs[:8]]
    for layer in LAYERS.values():
        output_of(layer, inputs)
    for x, copy in zip(inputs[:8], before, strict=True):
        assert torch.equal(x.view(torch.uint8), copy.view(torch.uint8))


@every_layer
@pytest.mark.parametrize("chunk", [5, 26, *more(1, 13)])
def test_chunks_of_tokens_change_nothing(layer, chunk, weights, called, monkeypatch):
    inputs = bruteforce.random_inputs(SMALL, 27, 32, 8, weights, favourite=40)
    whole = output_of(layer, inputs)
    assert (whole != 0).any(dim=1).all()
    called.clear()
    monkeypatch.setattr(call_module, "CHUNK_TOKENS", chunk)
    assert torch.equal(output_of(layer, inputs), whole)
    parts = [arguments[0] for name, arguments in called if name == "route"]
    assert all(x.is_contiguous() for part in parts for x in part[:8])
    assert [len(part.routing_logits) for part in parts] == [
        len(range(27)[i : i + chunk]) for i in range(0, 27, chunk)
    ]


@pytest.mark.parametrize("tokens", [7, 40])
def test_fused_quantises_float32(tokens, weights):
    """The intermediate of fused is float32 until it is quantised, that of flat bfloat16."""
    inputs = bruteforce.random_inputs(SMALL, tokens, 32, 12, weights, favourite=40)
    fused, flat = output_of(FUSED, inputs), output_of(v4.moe, inputs)
    assert calc_diff(fused, flat) < 2e-3 and not torch.equal(fused, flat)


@pytest.fixture(scope="module")
def full_size(reference) -> tuple[MoeInputs, torch.Tensor]:
    """Inputs of eight tokens and the reference's output; it treats tokens on their own.

    Of the rank's experts only the last eight are chosen, three of them: the reference, which makes
    float32 weights of all that it is given, needs no others. Those of the others are NaN.
    """
    last = bruteforce.random_weights(replace(DEEPSEEK_V3, num_local_experts=8))
    # Every token chooses expert 90, so that each, also one alone, has a row to compute.
    inputs = bruteforce.random_inputs(DEEPSEEK_V3, 8, 88, seed=11, weights=last, favourite=90)
    inputs.routing_bias[64:88] = -8.0
    inputs.routing_bias[88:96] += 1.0
    weights = {}
    for name, tensor in last.items():
        weights[name] = tensor.new_empty(DEEPSEEK_V3.num_local_experts, *tensor.shape[1:])
        weights[name].view(torch.uint8).fill_(0xFF)
        weights[name][-8:] = tensor
    return inputs._replace(local_expert_offset=64, **weights), reference(*inputs)


@pytest.mark.large_memory
@pytest.mark.parametrize(("first", "end"), [(0, 1), (1, 8)], ids=["T=1", "T=7"])
def test_layers_match_the_reference_on_the_true_geometry(first, end, full_size):
    """Takes 3 GB, half of it the float32 weights of the reference."""
    inputs, wanted = full_size
    tokens = slice(first, end)
    wanted = wanted[tokens]
    inputs = inputs._replace(
        routing_logits=inputs.routing_logits[tokens],
        hidden_states=inputs.hidden_states[tokens],
        hidden_states_scale=inputs.hidden_states_scale[:, tokens].contiguous(),
    )
    outputs = []
    for module in MODULES.values():
        outputs.append(torch.full(wanted.shape, torch.nan, dtype=torch.bfloat16))
        module.run(*inputs, outputs[-1])
    *unfused, fused, hifi = outputs
    assert all(torch.equal(unfused[0], other) for other in unfused)
    assert (wanted.abs().sum(dim=1) > 0).all()
    for got in (unfused[0], fused, hifi):
        assert calc_diff(got, wanted) < 1e-3
        assert matched_ratio(got, wanted, rtol=0.2, atol=0.1) > 0.85
        assert matched_ratio(got, wanted, rtol=0.3, atol=1.0) > 0.9


# --- `run` --------------------------------------------------------------------------------------


@pytest.mark.parametrize("routing", ["deepseek_v3", "renormalize"])
def test_run_takes_the_definitions_inputs_by_position(routing):
    calls: list[tuple] = []
    run = run_of(lambda *call: calls.append(call), replace(DEEPSEEK_V3, routing=routing, n_group=1,
                                                       topk_group=1))  # fmt: skip
    if routing == "deepseek_v3":
        assert run(*range(11)) is None
        assert calls == [(MoeInputs(*range(10)), 10)]
    else:  # neither bias nor offset nor factor
        assert run(*range(8)) is None
        assert calls == [(MoeInputs(0, None, *range(1, 7), 0, 1.0), 7)]


@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
def test_generation_runs_on_the_full_shape(module, weights):
    inputs = bruteforce.random_inputs(SMALL, 3, 0, 1, weights)
    with pytest.raises(ValueError, match=r"hidden_states: expected shape \[3, 7168\]"):
        module.run(*inputs, torch.empty(3, 256, dtype=torch.bfloat16))


@pytest.mark.parametrize("name", ["flat", "fused", "hifi"])
def test_a_layer_at_another_shape(name, weights):
    inputs = bruteforce.random_inputs(SMALL, 3, 32, 1, weights, favourite=40)
    out = torch.full((3, 256), torch.nan, dtype=torch.bfloat16)
    run_of(MODULES[name].layer_at(SMALL), SMALL)(*inputs, out)
    wanted = v4.moe if name == "flat" else FusedLayer(SMALL, 2 if name == "hifi" else 1)
    assert torch.equal(out, output_of(wanted, inputs)) and (out != 0).any()


def test_the_device_of_the_tensors_is_made_the_current_one(monkeypatch):
    """Launches, allocations and streams go by the current device."""
    entered: list[Any] = []

    class Guard:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            entered.append(self.device)

        def __exit__(self, *_):
            entered.append("left")

    device = torch.device("cuda", 1)
    output = types.SimpleNamespace(device=device, shape=(3, 7168))
    monkeypatch.setattr(torch.cuda, "device", Guard)
    monkeypatch.setattr(steps, "check_call", lambda *arguments: 3)
    monkeypatch.setattr(architectures, "has_kernels", lambda device: True)
    steps.layer(lambda *arguments: entered.append(arguments))("inputs", output)
    assert entered == [device, ("inputs", output, DEEPSEEK_V3), "left"]


# --- steps, waits and launches ------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYERS)
def test_steps(name, weights, called):
    output_of(LAYERS[name], bruteforce.random_inputs(SMALL, 5, 32, 7, weights, favourite=40))
    assert [step for step, _ in called] == STEPS[name]


@every_layer
def test_no_token_launches_nothing(layer, weights, called):
    out = output_of(layer, bruteforce.random_inputs(SMALL, 0, 32, 6, weights))
    assert out.shape == (0, 256) and called == []


@pytest.mark.parametrize("name", ["v1", "v2", "v3"])
def test_no_pair_zeroes_the_output_and_launches_nothing_else(name, weights, called):
    """Flat cannot know: its kernels find nothing to do, and the combine writes the zeros."""
    inputs = bruteforce.random_inputs(SMALL, 5, 512, 6, weights)
    assert (output_of(LAYERS[name], inputs) == 0).all()
    assert [step for step, _ in called] == ["route"]


class CountReads(TorchFunctionMode):
    """Counts the reads of values on the host, each of which stalls it on a GPU."""

    READS = {"__int__", "__float__", "__bool__", "item", "tolist", "cpu", "numpy"}
    reads = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.reads += getattr(func, "__name__", "") in self.READS
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "reads"), [("v1", SMALL.num_local_experts), ("v2", 1), ("v3", 1), ("flat", 0)]
)
def test_the_host_waits_as_often_as_its_text_says(name, reads, weights, no_kernels):
    inputs = bruteforce.random_inputs(SMALL, 9, 32, 12, weights, favourite=40)
    with CountReads() as count:
        output_of(LAYERS[name], inputs)
    assert count.reads == reads


def test_flat_reads_nothing_on_the_host(no_kernels):
    """Fake tensors hold no values, so a read, or a shape that depends on one, would raise. Only the
    checks before need addresses, which are no reads."""
    with FakeTensorMode():
        inputs = MoeInputs(
            torch.empty(9, 256), torch.empty(256, dtype=torch.bfloat16),
            torch.empty(9, 256, dtype=torch.float8_e4m3fn), torch.empty(2, 9),
            torch.empty(32, 512, 256, dtype=torch.float8_e4m3fn), torch.empty(32, 4, 2),
            torch.empty(32, 256, 256, dtype=torch.float8_e4m3fn), torch.empty(32, 2, 2), 32, 2.5,
        )  # fmt: skip
        v4.moe.__wrapped__(inputs, torch.empty(9, 256, dtype=torch.bfloat16), SMALL)


class CountOperations(TorchDispatchMode):
    """Counts what costs the host a launch or an allocation; views are free of both."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "most"), [("v2", 28), ("v3", 5), ("flat", 1)])
def test_operations(name, most, weights, no_kernels, monkeypatch):
    """Each costs several microseconds of host time, which is most of a call at small T.

    After the routing, which is a kernel. Allocations included: nine of v2, one of the others. The
    copies between host and device, one in v2, two in v3, none in flat, do not show here. None has a
    shape that follows from values, which the host would wait for.
    """
    inputs = bruteforce.random_inputs(SMALL, 9, 32, 12, weights, favourite=40)
    routed = routing.route(inputs, SMALL)
    monkeypatch.setattr(routing, "route", lambda *arguments, **options: routed)
    output = torch.empty(9, 256, dtype=torch.bfloat16)
    with CountOperations() as count:
        LAYERS[name](inputs, output, SMALL)
    assert len(count.names) <= most, (len(count.names), count.names)
    assert not {"aten::nonzero", "aten::masked_select", "aten::unique_dim"} & {*count.names}


# --- rows of v1 and v2 --------------------------------------------------------------------------

COUNTS = [
    [1],
    [0, 3, 0],
    [128, 127, 129, 0, 1],
    [0, 0, 0, 257],
    [5, 0, 130, 1, 64, 65, 63, 0],
]


def counted(counts: list[int]) -> tuple[MoeShape, MoeInputs, GroupedRows]:
    """A layer's shape, inputs and routing that gives the experts these numbers of tokens."""
    experts, tokens = len(counts), max(*counts, 1)
    shape = MoeShape(max(experts, 2), experts, 256, 128, 1, 1, min(experts, 2))
    ids = torch.full((tokens, experts), experts)  # not local
    for expert, count in enumerate(counts):
        ids[tokens - count :, expert] = expert  # the last ones, so that token and row differ
    rows = group_rows(ids, torch.rand(ids.shape), 0, experts)
    return shape, bruteforce.random_inputs(shape, tokens, 0, sum(counts)), rows


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("name", ["v1", "v2"])
def test_padded_rows(name, counts, called, monkeypatch):
    """Both GEMMs get every expert's rows at a multiple of `max_rows`, in order, with their scales.
    Padding is not written, and what the GEMMs write there reaches nothing."""
    shape, inputs, rows = counted(counts)
    monkeypatch.setattr(routing, "route", lambda *arguments: rows)
    monkeypatch.setattr(torch.Tensor, "new_empty", new_poisoned)
    out = torch.empty(inputs.hidden_states.shape, dtype=torch.bfloat16)
    LAYERS[name](inputs, out, shape)
    (_, gemm1), (_, swiglu), (_, gemm2), (_, combine) = called
    max_rows, total = -(-max(counts) // 128) * 128, sum(counts)
    starts = [e * max_rows for e in range(len(counts))]
    ends = [start + count for start, count in zip(starts, counts, strict=True)]
    places = [e * max_rows + i for e, count in enumerate(counts) for i in range(count)]
    padding = torch.ones(len(counts) * max_rows, dtype=torch.bool)
    padding[places] = False
    tokens = rows.token_of_row[:total].long()
    flat1 = inputs.hidden_states.view(torch.uint8)[tokens], inputs.hidden_states_scale[:, tokens]
    flat2 = swiglu[1].view(torch.uint8), swiglu[2]
    for gemm, (values, scales) in ((gemm1, flat1), (gemm2, flat2)):
        a, a_scale, _, _, padded, expert_rows, config = gemm
        assert expert_rows.tolist() == [starts, ends] and expert_rows.dtype == torch.int32
        assert len(a) == len(padded) == a_scale.shape[1] == len(padding) and a.is_contiguous()
        assert torch.equal(bits(a)[places], values) and torch.equal(a_scale[:, places], scales)
        assert (bits(a)[padding] == 0x7F).all() and a_scale[:, padding].isnan().all()
        assert not a_scale[:, ~padding].isnan().any()
        assert config == MODULES[name].CONFIGS["sm_90a"] == GemmConfig()
    for unpadded, gemm in ((swiglu[0], gemm1), (combine[0], gemm2)):
        assert torch.equal(bits(unpadded), bits(gemm[4][places])) and len(unpadded) == total


# --- rows of v3 ---------------------------------------------------------------------------------


class Choose:
    """A config, and a record of what was asked."""

    def __init__(self, config: GemmConfig):
        self.config = config
        self.asked: list[float] = []

    def __call__(self, rows_per_expert: float) -> GemmConfig:
        self.asked.append(rows_per_expert)
        return self.config


def use(monkeypatch, choose: Choose) -> None:
    fake = types.SimpleNamespace(choose=choose, target="sm_90a")
    monkeypatch.setattr(architectures, "of_device", lambda device: fake)


@pytest.mark.parametrize("tile", [8, 64, 192])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_aligned_rows(counts, tile, called, monkeypatch):
    """A row of a tile must not be another expert's."""
    shape, inputs, rows = counted(counts)
    many = GemmConfig(tile_m=192, cluster_n=2)
    choose = Choose(many if tile == 192 else GemmConfig(tile_m=tile, swap_ab=True))
    use(monkeypatch, choose)
    monkeypatch.setattr(routing, "route", lambda *arguments, with_tokens: rows)
    LAYERS["v3"](inputs, torch.empty(inputs.hidden_states.shape, dtype=torch.bfloat16), shape)
    (_, permute), (_, gemm1), (_, swiglu), (_, gemm2), (_, combine) = called
    padded = [-(-count // tile) * tile for count in counts]
    starts = [sum(padded[:expert]) for expert in range(len(counts))]
    ends = [start + count for start, count in zip(starts, counts, strict=True)]
    for gemm in (gemm1, gemm2):
        assert gemm[5].tolist() == [starts, ends] and gemm[5].dtype == torch.int32
        assert len(gemm[0]) == len(gemm[4]) == sum(padded) and gemm[6] is choose.config
    assert int(swiglu[3][-1]) == sum(padded) and sum(padded) % 4 == 0
    wanted = torch.full_like(rows.pair_row, -1)
    for expert, count in enumerate(counts):
        own = torch.arange(starts[expert], starts[expert] + count, dtype=torch.int32)
        wanted[wanted.shape[0] - count :, expert] = own
    assert permute[2] is combine[1] and combine[2] is rows.weights
    assert torch.equal(combine[1], wanted) and combine[1].dtype == torch.int32
    assert combine[1].is_contiguous()


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_clustered_chooses_by_the_mean_rows_of_experts_that_have_any(counts):
    choose = Choose(GemmConfig())
    assert v3.counted_config(counts, choose) is choose.config
    assert choose.asked == [sum(counts) / sum(count > 0 for count in counts)]


# --- rows of flat -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "expected"),
    # With x = T / 32 rows an expert on average, x / (1 - exp(-x)) for those that have any.
    [(1, 1.0157), (80, 2.7236), (3, 1.0476), (4096, 128.0)],
)
def test_flat_config_follows_from_the_number_of_tokens(tokens, expected):
    choose = Choose(GemmConfig())
    assert v4.flat_config(tokens, DEEPSEEK_V3, choose) is choose.config
    assert choose.asked == [pytest.approx(expected, abs=1e-4)]


@pytest.mark.parametrize(("local", "rows"), [(32, 56), (3, 24)])
def test_flat_rows(local, rows, called, weights, monkeypatch):
    """Rows lie as the routing numbers them. There are as many as 7 tokens can have: each has at
    most 8 experts and at most those that are here, in all a multiple of 4."""
    shape, choose = replace(SMALL, num_local_experts=local), Choose(GemmConfig(tile_m=64))
    use(monkeypatch, choose)
    some = {name: tensor[:local] for name, tensor in weights.items()}
    inputs = bruteforce.random_inputs(shape, 7, 32, 3, some, favourite=33)
    output_of(v4.moe, inputs, shape)
    _, (_, permute), (_, gemm1), (_, swiglu), (_, gemm2), (_, combine) = called
    routed = routing.route(inputs, shape, with_tokens=False)
    for gemm in (gemm1, gemm2):
        assert len(gemm[0]) == len(gemm[4]) == rows and gemm[6] is choose.config
        assert gemm[5].tolist() == [routed.m_indptr[:-1].tolist(), routed.m_indptr[1:].tolist()]
        assert gemm[5].stride() == (1, 1), "a view: no launch and no copy"
    assert torch.equal(swiglu[3], routed.m_indptr) and torch.equal(permute[2], routed.pair_row)
    assert torch.equal(combine[1], routed.pair_row) and torch.equal(combine[2], routed.weights)


@pytest.mark.parametrize("tokens", [1, 7, 32, 80])
def test_flat_expects_the_rows_of_experts_that_have_any(tokens):
    """Against the mean over drawn routings in which every expert is as likely."""
    generator = torch.Generator().manual_seed(tokens)
    scores = torch.rand(2000 // tokens, tokens, 256, generator=generator)
    ids = scores.topk(8, dim=-1).indices.flatten(1)
    counts = torch.stack([row.bincount(minlength=256) for row in ids]).double()
    measured = float(counts.sum() / (counts > 0).sum())
    assert expected_rows(tokens * 8, 256) == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("offset", [32, 512], ids=["some_local", "none_local"])
def test_flat_rows_without_a_pair_are_not_written(offset, weights, monkeypatch):
    tensors: list[Any] = []
    workspace = steps.workspace

    def keep(*arguments: Any) -> Any:
        tensors.append(workspace(*arguments))
        return tensors[0]

    monkeypatch.setattr(torch.Tensor, "new_empty", new_poisoned)
    monkeypatch.setattr(steps, "workspace", keep)
    inputs = bruteforce.random_inputs(SMALL, 21, offset, 5, weights)
    output_of(v4.moe, inputs)
    total = int(routing.route(inputs, SMALL).m_indptr[-1])
    q, q_scale = tensors[0].q, tensors[0].q_scale
    assert q.shape[0] == 21 * 8 and (total == 0) == (offset == 512)
    assert (q.view(torch.uint8)[total:] == 0xFF).all() and q_scale[:, total:].isnan().all()
    assert q[:total].float().isfinite().all() and q_scale[:, :total].isfinite().all()
    if total == 0:  # `o` lies over the other buffers, which are not written either then
        assert tensors[0].o.isnan().all()


# --- workspace of v3 and flat -------------------------------------------------------------------

WIDE = MoeShape(hidden_size=2048, intermediate_size=128)
"""`o` is larger than `a`, `a_scale` and `g`, over which it lies."""


@pytest.mark.parametrize(
    "shape", [SMALL, TINY, WIDE, DEEPSEEK_V3], ids=["small", "tiny", "wide", "v3"]
)
@pytest.mark.parametrize("rows", [4, 132])
def test_the_parts_of_the_workspace_lie_apart(shape, rows):
    workspace = steps.workspace(torch.empty(0), rows, shape)
    h, i = shape.hidden_size, shape.intermediate_size
    fp8, f32, bf16 = torch.float8_e4m3fn, torch.float32, torch.bfloat16
    assert [(tuple(x.shape), x.dtype) for x in workspace] == [
        ((rows, h), fp8), ((h // 128, rows), f32), ((rows, 2 * i), bf16),
        ((rows, i), fp8), ((i // 128, rows), f32), ((rows, h), bf16),
    ]  # fmt: skip
    memory = workspace.a.untyped_storage()
    begin = {name: x.data_ptr() - memory.data_ptr() for name, x in workspace._asdict().items()}
    end = {name: begin[name] + x.nbytes for name, x in workspace._asdict().items()}
    for x in workspace:
        assert x.is_contiguous() and x.untyped_storage().data_ptr() == memory.data_ptr()
    assert all(at % 16 == 0 for at in begin.values()) and max(end.values()) <= memory.nbytes()
    # In the order of their lives; `o` is written when only `q` and `q_scale` are still read.
    for alive in (("a", "a_scale", "g"), ("g", "q", "q_scale"), ("q", "q_scale", "o")):
        spans = sorted((begin[name], end[name]) for name in alive)
        assert all(left[1] <= right[0] for left, right in zip(spans, spans[1:], strict=False))


def test_memory_of_many_tokens_is_bounded():
    """The workspace of a chunk at the true geometry if all its tokens' experts are local."""
    with FakeTensorMode():
        rows = call_module.CHUNK_TOKENS * DEEPSEEK_V3.top_k
        workspace = steps.workspace(torch.empty(0), rows, DEEPSEEK_V3)
    assert workspace.a.untyped_storage().nbytes() < 2.5e9
