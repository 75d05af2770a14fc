"""The fused layer's kernels against its reference model: all configs give one result, and a token's
bits are its own."""

import dataclasses
import os
import re
from itertools import product

import pytest
import torch
from cuda.bindings import driver as cuda
from deepseek import (
    LAYER_DIFF,
    ROUTINGS,
    TOKENS,
    new_output,
    output_of,
    part_of,
    v4,
    v5,
    v6,
)
from deepseek import SHAPE as DEEPSEEK
from faults import FAULTS
from markers import backends, more
from moe_fp8 import layer
from moe_fp8.call import MoeInputs
from moe_fp8.kernels import architectures
from moe_fp8.kernels.configs import Schedule
from moe_fp8.kernels.fused import (
    compile_fused,
    max_rows,
    offsets,
    workspace_bytes,
    workspace_parts,
)
from moe_fp8.layer import make_call
from moe_fp8.reference import calc_diff, route
from moe_fp8.shape import MoeShape
from problems import (
    BLACKWELL,
    HOPPER,
    OVERWRITTEN,
    SHAPE,
    TOLERANCE,
    by_model,
    few_local_rows,
    fused_output,
    fused_output_of,
    inputs_of,
    layer_inputs,
    messages,
    use_target,
    with_local_rows,
)

in_the_emulator, on_a_gpu = backends("emulator"), backends("gpu")

MOST = [("8 swapped, early", 1), ("64 overlapped", 2), ("192 on demand", 1)]
"""Name and terms of what is tested by default: compiling takes longer than running."""


ON_BLACKWELL = ("16 swapped", "32 swapped", "16 swapped in pairs", "128", "256 by two CTAs")
EVERY = [*MOST, *(case for case in product(HOPPER, (1, 2)) if case not in MOST)]
CASES = [
    *(("sm_90a", *case, 41, 4) for case in EVERY),
    *(("sm_90a", *case, *size) for case in EVERY for size in ((1, 4), (9, 100))),
    *(("sm_100a", name, *case, 4) for name in ON_BLACKWELL for case in ((1, 1), (1, 41), (2, 41))),
    *(("sm_100a", name, 2, 9, 100) for name in ("16 swapped", "128")),
]


@in_the_emulator
@pytest.mark.parametrize(
    ("target", "name", "terms", "tokens", "offset"),
    [*CASES[: len(MOST)], *more(*CASES[len(MOST) :])],
)
def test_as_the_model(target, name, terms, tokens, offset, mode, emulator, monkeypatch):
    use_target(monkeypatch, target)
    inputs = inputs_of(tokens, offset)
    wanted = by_model(inputs, SHAPE, terms)
    out = fused_output_of(inputs, name, terms, target=target)
    assert calc_diff(out, wanted) < TOLERANCE[terms] if offset == 4 else not out.any()
    assert out.isfinite().all()
    # Routing, permute where rows are not gathered, two GEMMs and the combine.
    routing, permute = (1 if tokens <= 32 else 2), 0 if "swapped" in name else 1
    assert [report.hazards for report in emulator.reports] == [[]] * (routing + permute + 3)
    assert (wanted.abs().sum(dim=1) > 0).all() or offset == 100


@in_the_emulator
@pytest.mark.all
@pytest.mark.parametrize(("name", "bad"), [("8 swapped", torch.nan), ("128", torch.inf)])
def test_values_that_are_not_finite_spread_as_in_the_model(name, bad, emulator):
    """The model's outputs are finite where the reference's are: test_misuse.py."""
    inputs = inputs_of(9, 4)
    clean = fused_output_of(inputs, name)
    for field in ("hidden_states_scale", "gemm1_weights_scale", "gemm2_weights_scale"):
        x = getattr(inputs, field).clone()
        x[(1, 2) if x.dim() == 2 else (2, 0, 0)] = bad
        changed = inputs._replace(**{field: x})
        wanted, got = by_model(changed, SHAPE), fused_output_of(changed, name)
        assert torch.equal(got.isfinite(), wanted.isfinite()) and not wanted.isfinite().all()
        other = wanted.isfinite().all(dim=1)
        assert other.any() and torch.equal(got[other], clean[other]), "no other token has it"


@in_the_emulator
@pytest.mark.parametrize(
    "names", [["8 swapped, early", "192 on demand"], *more(list(HOPPER))], ids=len
)
def test_all_configs_give_the_same_bits(names, emulator):
    inputs = inputs_of(41, 4)
    wanted = fused_output_of(inputs, names[0])
    for name in names[1:]:
        assert torch.equal(fused_output_of(inputs, name), wanted), name


OPTIONS: dict[str, tuple[str, dict, dict]] = {
    "evict_first": ("8 swapped, early", {"evict_first": True}, {"evict_first": True}),
    "slices": ("192 on demand", {"slices": True}, {"slices": True}),
    "gathers": ("192 on demand", {"gathers": True}, {}),
    "gathers, overlapped": ("64 overlapped", {"gathers": True}, {}),
    "slices of 128": ("128", *2 * ({"slices": True, "schedule": Schedule.DYNAMIC},)),
}
"""Options that change no order of sums: a config's name, and the changes of GEMM1 and GEMM2."""


@in_the_emulator
@pytest.mark.parametrize("option", OPTIONS)
def test_options_keep_the_bits(option, mode, emulator, monkeypatch):
    name, *changes = OPTIONS[option]
    inputs = inputs_of(41, 4)
    wanted = fused_output_of(inputs, name)
    both = zip(HOPPER[name], changes, strict=True)
    changed = tuple(dataclasses.replace(config, **by) for config, by in both)
    monkeypatch.setitem(HOPPER, option, changed)
    emulator.reports.clear()
    assert torch.equal(fused_output_of(inputs, option), wanted)
    assert not any(report.hazards for report in emulator.reports)


@in_the_emulator
@pytest.mark.all
@pytest.mark.parametrize("multiprocessors", [14, 18, 20])
def test_clusters_left_out(multiprocessors, emulator, monkeypatch):
    """Clusters of GEMM1 are left out so that all others have equally many tiles."""
    monkeypatch.setattr(architectures, "num_sms", lambda device: multiprocessors)
    inputs, clusters = inputs_of(41, 4), multiprocessors // 2
    rows = route(inputs, SHAPE).m_indptr.diff()
    tiles = int((-(-rows // 8)).sum()) * SHAPE.intermediate_size // 128
    waves = -(-tiles // clusters)
    assert -(-tiles // waves) < clusters
    out = fused_output_of(inputs, "8 swapped, early")
    assert not any(report.hazards for report in emulator.reports)
    monkeypatch.setattr(architectures, "num_sms", lambda device: 4)
    assert torch.equal(out, fused_output_of(inputs, "8 swapped"))


REFUSED = "dtype", "last", "first", "rank+1", "rank-1", "strides", "address", "nothing", "number"


@in_the_emulator
def test_the_compiled_function_refuses(emulator):
    """`FusedLayer` leaves these checks to the compiled function. A refused call launches nothing,
    and the next call is right."""
    inputs = inputs_of(9, 4)
    arguments = {**inputs._asdict(), "output": fused_output_of(inputs, "8 swapped")}
    wanted = arguments["output"].clone()
    call = make_call(9, wanted.device, SHAPE, 1, HOPPER["8 swapped"])
    emulator.reports.clear()
    ranges, accepted = set(emulator.host.ranges), []
    for fault, name in product((*REFUSED, "strides of 0"), [*MoeInputs._fields[:8], "output"]):
        if fault == "address" and name.endswith("scale"):
            continue  # not asked of them
        faulty = arguments | {name: FAULTS[fault][0](arguments[name])}
        output = faulty.pop("output")
        try:
            call(MoeInputs(**faulty), output)
            accepted.append((fault, name))
        except (TypeError, ValueError, AttributeError, IndexError, RuntimeError):
            continue
    assert accepted == [] and not emulator.reports
    assert torch.equal(fused_output_of(inputs, "8 swapped"), wanted)
    assert set(emulator.host.ranges) == ranges  # every workspace was given back


@in_the_emulator
def test_a_launch_that_fails_leaves_no_workspace(emulator):
    inputs = inputs_of(9, 4)
    wanted = fused_output_of(inputs, "8 swapped")
    ranges = set(emulator.host.ranges)

    def fail(ptx: str) -> str:
        raise emulator.EmulationError("no such kernel")

    emulator.host.ptx_transform = fail
    with pytest.raises(emulator.EmulationError, match="no such kernel"):
        fused_output_of(inputs, "8 swapped")
    assert set(emulator.host.ranges) == ranges
    emulator.host.ptx_transform = None
    assert torch.equal(fused_output_of(inputs, "8 swapped"), wanted)


@in_the_emulator
@pytest.mark.all
@pytest.mark.parametrize(
    ("name", "local"),
    [("8 swapped", 1), ("8 swapped", 2), ("192 on demand", 1), ("192 on demand", 2)],
)
def test_fewer_experts_here_than_a_token_has(name, local, emulator):
    """Every token has all of them: the workspace is full to its last row."""
    shape = dataclasses.replace(SHAPE, num_local_experts=local)
    inputs = inputs_of(40, 4)
    inputs = inputs._replace(
        **{field: getattr(inputs, field)[:local].contiguous() for field in MoeInputs._fields[4:8]}
    )
    inputs.routing_logits[:, 4 : 4 + local] += 20.0
    assert int(route(inputs, shape).m_indptr[-1]) == 40 * local
    out = fused_output(inputs, shape, HOPPER[name])
    assert not any(report.hazards for report in emulator.reports)
    assert calc_diff(out, by_model(inputs, shape)) < TOLERANCE[1]


@in_the_emulator
@pytest.mark.all
def test_a_workspace_beyond_what_32_bits_address(emulator):
    """4.6 GB, of which a few rows are touched, where they should be: mapped memory is zero."""
    shape = MoeShape(num_experts=64, num_local_experts=32, hidden_size=8192, intermediate_size=128,
                     n_group=1, topk_group=1, top_k=31)  # fmt: skip
    tokens, first, second = 4500, *HOPPER["128"]
    size = workspace_bytes(shape, 2, tokens)
    assert size > 2**32
    workspace = torch.empty(size, dtype=torch.uint8)
    h, i = shape.hidden_size, shape.intermediate_size
    logits = torch.full((tokens, shape.num_experts), -1.0)
    logits[:, :32] = 1.0
    logits[[3, -1], 40] = 2.0
    inputs = layer_inputs(shape, tokens, torch.zeros(shape.num_experts).bfloat16(), 32, 2.5)
    inputs = inputs._replace(routing_logits=logits)
    wanted = by_model(inputs, shape, terms=2)
    out = torch.full_like(wanted, torch.nan)
    function = compile_fused(
        shape, first.with_swiglu(2), dataclasses.replace(second, terms=2), 4, "sm_90a"
    )
    key = emulator.register_tensor(workspace)
    logits, bias, *tensors = inputs[:8]
    function(logits, bias, 32, 2.5, *tensors, out, workspace.data_ptr())
    del emulator.host.ranges[key]
    assert not any(report.hazards for report in emulator.reports)
    assert (wanted != 0).any(dim=1).nonzero().flatten().tolist() == [3, tokens - 1]
    assert calc_diff(out, wanted) < TOLERANCE[2]
    rows = max_rows(shape, tokens)
    starts, _ = offsets(workspace_parts(shape, 2, tokens, rows))
    assert workspace[starts.q : starts.q + 4 * i].count_nonzero() > 2 * i
    begin = starts.o + rows * (4 * h - h - h // 128 * 4)
    a = workspace[begin : begin + 2 * h].view(2, h)
    assert torch.equal(a, inputs.hidden_states[[3, -1]].view(torch.uint8))


@in_the_emulator
@pytest.mark.parametrize("terms", [1, *more(2)])
def test_rows_handed_over_after_a_permute(terms, mode, emulator):
    inputs = few_local_rows()
    out = fused_output_of(inputs, "192 on demand", terms)
    assert not any(report.hazards for report in emulator.reports)
    assert torch.equal(out, fused_output_of(inputs, "128", terms))


@in_the_emulator
@pytest.mark.all
@pytest.mark.parametrize("rows", [123, 60, 61, 63])
def test_rows_that_reach_what_the_first_gemm_reads(rows, emulator, monkeypatch):
    """The 124 rows of 41 tokens have room for 60 before the permuted ones, which begin within the
    61st. Where the second GEMM has more, it waits for all of the first one, which orders even what
    its boxes have of others."""
    monkeypatch.setattr(architectures, "num_sms", lambda device: 20)
    inputs = with_local_rows(41, rows)
    seen = messages(inputs, emulator)
    assert not any(re.search(OVERWRITTEN, message) for message in seen)
    assert bool(seen) == (rows == 60)
    out = fused_output_of(inputs, "192 on demand")
    monkeypatch.setattr(architectures, "num_sms", lambda device: 4)
    assert torch.equal(out, fused_output_of(inputs, "8 swapped"))


@in_the_emulator
@pytest.mark.all
@pytest.mark.parametrize("target", ["sm_100a"])
def test_whole_waves_and_rows_handed_over(target, mode, emulator, monkeypatch):
    """The schedules of `choose_layer` with few rows: GEMM1 in whole waves, GEMM2 on demand."""
    use_target(monkeypatch, target)
    inputs, config = inputs_of(41, 4), BLACKWELL["16 swapped"]
    first = dataclasses.replace(config, schedule=Schedule.WHOLE_WAVES).with_swiglu(1)
    second = dataclasses.replace(config, schedule=Schedule.DYNAMIC)
    out = fused_output(inputs, SHAPE, (first, second))
    assert not any(report.hazards for report in emulator.reports)
    assert torch.equal(out, fused_output_of(inputs, "16 swapped", target=target))


@in_the_emulator
@pytest.mark.all
def test_rows_in_both_ctas(emulator, monkeypatch):
    """One expert has all tokens: the second CTA of a pair has 12 of its 140 rows."""
    use_target(monkeypatch, "sm_100a")
    inputs = inputs_of(140, 4)
    out = fused_output_of(inputs, "256 by two CTAs", 2, target="sm_100a")
    assert torch.equal(out, fused_output_of(inputs, "128", 2, target="sm_100a"))
    assert all(report.hazards == [] for report in emulator.reports)


@in_the_emulator
@pytest.mark.all
@pytest.mark.parametrize("terms", [1, 2])
def test_every_bit_as_on_hopper(terms, emulator, monkeypatch):
    inputs = inputs_of(41, 4)
    wanted = fused_output_of(inputs, "64 overlapped", terms)
    use_target(monkeypatch, "sm_100a")
    for name in BLACKWELL:
        assert torch.equal(fused_output_of(inputs, name, terms, target="sm_100a"), wanted), name


# --- on a GPU -------------------------------------------------------------------------------------

SOAK = int(os.environ.get("MOE_FP8_SOAK", "500"))
"""Calls of `test_random_calls`; 10000 before a release."""
CALLS_OF_POOL = 100
"""Calls that draw from the same tokens."""


@pytest.fixture(params=[v5, v6], ids=["fused", "hifi"])
def module(request):
    return request.param


def check(module, inputs: MoeInputs) -> torch.Tensor:
    """The output, if it is near the model's."""
    output = output_of(module, inputs)
    wanted = by_model(inputs, DEEPSEEK, module.layer_at(DEEPSEEK).terms)
    assert output.isfinite().all()
    if bool((wanted != 0).any()):
        assert calc_diff(output, wanted) < LAYER_DIFF
    else:
        assert not bool((output != 0).any())
    return output


@on_a_gpu
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_a_gpu_computes_as_the_model(module, tokens, routing, make_inputs):
    inputs = make_inputs(tokens, routing)
    output = check(module, inputs)
    assert torch.equal(output, output_of(module, inputs)), "from run to run"


@on_a_gpu
@pytest.mark.parametrize("offset", [0, 224, 250, -5, 256, -32, 100000, -(2**31)])
def test_offsets(module, offset, make_inputs):
    output = check(module, make_inputs(61, offset=offset, seed=3))
    assert bool((output != 0).any()) == (-32 < offset < 256)


@on_a_gpu
@pytest.mark.parametrize("tokens", [4096, 14107])
def test_many_tokens(module, tokens, make_inputs):
    """Other configs than at 901 tokens; the same bits, and near the unfused layer."""
    inputs = make_inputs(tokens)
    whole = output_of(module, inputs)
    assert torch.equal(output_of(module, part_of(inputs, slice(100, 1001))), whole[100:1001])
    unfused = output_of(v4, inputs)
    assert calc_diff(whole, unfused) < 2e-3 and whole.isfinite().all()


@on_a_gpu
@pytest.mark.parametrize("routing", ["random", "all_local", "none_local"])
@pytest.mark.parametrize(
    ("tokens", "of_first", "of_second"),
    [
        (1, {"evict_first": False}, {"evict_first": False}),
        (7, {"evict_first": True}, {"evict_first": True}),
        (901, {"gathers": True}, {}),
        (2048, {"slices": False}, {"slices": False}),
        (2048, {"slices": False, "gathers": True}, {}),
        (4096, {"slices": True}, {"slices": True}),
    ],
    ids=str,
)
def test_options_keep_the_bits_of_other_configs(
    module, tokens, of_first, of_second, routing, make_inputs
):
    """Options that only the configs for so many tokens have, or that only they lack."""
    inputs = make_inputs(tokens, routing)
    output = new_output(inputs)
    terms = module.layer_at(DEEPSEEK).terms
    architecture = architectures.of_device(output.device)
    first, second = architecture.choose_layer(tokens, DEEPSEEK, terms)
    names = {field.name for field in dataclasses.fields(first)}
    if not names.issuperset(of_first):
        pytest.skip(f"{architecture.gpus}: no {', '.join(of_first)}")
    configs = dataclasses.replace(first, **of_first), dataclasses.replace(second, **of_second)
    layer.make_call(tokens, output.device, DEEPSEEK, terms, configs)(inputs, output)
    assert torch.equal(output, output_of(module, inputs))


@on_a_gpu
def test_in_a_graph_after_other_calls_and_on_another_stream(module, make_inputs):
    cases = [make_inputs(80, routing, seed=seed) for seed, routing in enumerate(ROUTINGS)]
    wanted = [output_of(module, inputs) for inputs in cases]
    static = cases[0]._replace(
        **{name: getattr(cases[0], name).clone() for name in MoeInputs._fields[:4]}
    )
    output = new_output(static)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        module.run(*static, output)
    output_of(module, make_inputs(1009))  # a larger workspace than the captured one
    for inputs, expected in zip(cases, wanted, strict=True):
        for name in MoeInputs._fields[:4]:
            getattr(static, name).copy_(getattr(inputs, name))
        output.fill_(torch.nan)
        graph.replay()
        assert torch.equal(output, expected)
        with torch.cuda.stream(stream):
            stream.wait_stream(torch.cuda.default_stream())
            again = output_of(module, inputs)
        torch.cuda.default_stream().wait_stream(stream)
        assert torch.equal(again, expected)


@on_a_gpu
def test_the_workspace_is_given_back(module, make_inputs):
    inputs = make_inputs(901)
    output = new_output(inputs)
    module.run(*inputs, output)
    allocated = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    module.run(*inputs, output)
    assert torch.cuda.memory_allocated() == allocated < torch.cuda.max_memory_allocated()
    with pytest.raises(ValueError, match="hidden_states"):
        module.run(*inputs._replace(hidden_states=inputs.hidden_states[:, :-128]), output)
    assert torch.cuda.memory_allocated() == allocated


@on_a_gpu
@pytest.mark.parametrize("tokens", [7, 80, 901, 4096])
def test_outputs_do_not_depend_on_a_stale_workspace(module, tokens, make_inputs, monkeypatch):
    """Rows of no pair are loaded, too: whatever they hold, no result shows it."""
    inputs = make_inputs(tokens)
    wanted, filled, allocate = output_of(module, inputs), [], layer.allocate
    for byte in (0xFF, 0x00, 0x7F):

        def poisoned(size: int, gpu: int, byte: int = byte) -> int:
            address = allocate(size, gpu)
            filled.append(cuda.cuMemsetD8Async(address, byte, size, 0))
            return address

        output = new_output(inputs)
        with monkeypatch.context() as patch:
            patch.setattr(layer, "allocate", poisoned)
            module.run(*inputs, output)
        assert torch.equal(output, wanted), hex(byte)
    assert filled == 3 * [(cuda.CUresult.CUDA_SUCCESS,)]


@on_a_gpu
def test_random_calls(module, make_inputs):
    """The soak: calls of any number of a pool's tokens, in any order, each as often as it comes.

    A pool has its own routing, offset and values. All of its tokens together are near the model;
    alone or in any company they have the same bits.
    """
    generator = torch.Generator().manual_seed(SOAK)

    def draw(most: int) -> int:
        return int(torch.randint(most, (1,), generator=generator))

    routings = list(ROUTINGS)
    for first in range(0, SOAK, CALLS_OF_POOL):
        routing, offset = routings[draw(len(routings))], draw(300) - 40
        pool = make_inputs(300 + draw(1200), routing, offset, seed=first)
        whole = check(module, pool)
        for call in range(first, min(first + CALLS_OF_POOL, SOAK)):
            tokens = [1 + draw(8), 1 + draw(130), 1 + draw(1500)][draw(3)]
            which = torch.randint(len(whole), (tokens,), generator=generator).cuda()
            output = output_of(module, part_of(pool, which))
            assert torch.equal(output, whole[which]), f"call {call}: {tokens} tokens"
