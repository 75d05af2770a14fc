"""The fused layer's compiled kernels against its reference model; all configs give one result."""

import dataclasses
import re
from itertools import product

import pytest
import torch
from markers import more
from moe_fp8 import reference
from moe_fp8.call import MoeInputs, MoeShape
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
from moe_fp8.reference import route
from mutants import PARITY, WAIT, all_of
from mutants import noticed as noticed_in
from problems import HOPPER as CONFIGS
from problems import SHAPE, TOLERANCE, fused_output, inputs_of, layer_inputs
from ptxemu import MODES
from ptxemu.testing import Edit, replace

from scripts.common.metrics import calc_diff

MOST = [("8 swapped, early", 1), ("64 overlapped", 2), ("192 on demand", 1)]
"""Name and terms of what is tested by default: compiling takes longer than running."""


def output_of(inputs: MoeInputs, name: str, terms: int = 1, poison: bool = True) -> torch.Tensor:
    first, second = CONFIGS[name]
    configs = first.with_swiglu(terms), dataclasses.replace(second, terms=terms)
    return fused_output(inputs, SHAPE, configs, poison=poison)


@pytest.mark.parametrize(("tokens", "offset"), [(41, 4), *more((1, 4), (9, 100))])
@pytest.mark.parametrize(
    ("name", "terms"),
    [*MOST, *more(*(pair for pair in product(CONFIGS, (1, 2)) if pair not in MOST))],
)
def test_as_the_model(name, tokens, offset, terms, mode, emulator):
    inputs = inputs_of(tokens, offset)
    wanted = torch.full(inputs.hidden_states.shape, torch.nan, dtype=torch.bfloat16)
    reference.fused(inputs, wanted, SHAPE, terms=terms)
    out = output_of(inputs, name, terms)
    assert calc_diff(out, wanted) < TOLERANCE[terms]
    assert out.isfinite().all()
    routing, permute = (1 if tokens <= 32 else 2), 0 if "swapped" in name else 1
    assert [report.hazards for report in emulator.reports] == [[]] * (routing + permute + 3)
    assert (wanted.abs().sum(dim=1) > 0).all() or offset == 100


@pytest.mark.all
@pytest.mark.parametrize(("name", "bad"), [("8 swapped", torch.nan), ("128", torch.inf)])
def test_what_is_not_finite_spreads_as_in_the_model(name, bad, emulator):
    """The model's outputs are finite where the reference's are: tests/cpu/test_misuse.py."""
    inputs = inputs_of(9, 4)
    clean = output_of(inputs, name)
    for field in ("hidden_states_scale", "gemm1_weights_scale", "gemm2_weights_scale"):
        x = getattr(inputs, field).clone()
        x[(1, 2) if x.dim() == 2 else (2, 0, 0)] = bad
        changed = inputs._replace(**{field: x})
        wanted = torch.full_like(clean, torch.nan)
        reference.fused(changed, wanted, SHAPE)
        got = output_of(changed, name)
        assert torch.equal(got.isfinite(), wanted.isfinite()) and not wanted.isfinite().all()
        other = wanted.isfinite().all(dim=1)
        assert other.any() and torch.equal(got[other], clean[other]), "no other token has it"


@pytest.mark.parametrize(
    "names", [["8 swapped, early", "192 on demand"], *more(list(CONFIGS))], ids=len
)
def test_a_token_s_bits_depend_on_nothing_else(names, emulator):
    inputs = inputs_of(41, 4)
    whole = {name: output_of(inputs, name) for name in names}
    for name, out in whole.items():
        assert torch.equal(out, whole[names[0]]), name
    for first in range(0, 41, 9):
        part = slice(first, first + 9)
        alone = inputs._replace(
            routing_logits=inputs.routing_logits[part],
            hidden_states=inputs.hidden_states[part],
            hidden_states_scale=inputs.hidden_states_scale[:, part].contiguous(),
        )
        assert torch.equal(output_of(alone, names[0]), whole[names[0]][part])


OPTIONS: dict[str, tuple[str, dict, dict]] = {
    "evict_first": ("8 swapped, early", {"evict_first": True}, {"evict_first": True}),
    "slices": ("192 on demand", {"slices": True}, {"slices": True}),
    "gathers": ("192 on demand", {"gathers": True}, {}),
    "gathers, overlapped": ("64 overlapped", {"gathers": True}, {}),
    "slices of 128": ("128", *2 * ({"slices": True, "schedule": Schedule.DYNAMIC},)),
}
"""Options that change no order of sums: a config's name, and the changes of GEMM1 and GEMM2."""


@pytest.mark.parametrize("option", OPTIONS)
def test_options_keep_the_bits(option, mode, emulator, monkeypatch):
    name, *changes = OPTIONS[option]
    inputs = inputs_of(41, 4)
    wanted = output_of(inputs, name)
    both = zip(CONFIGS[name], changes, strict=True)
    changed = tuple(dataclasses.replace(config, **by) for config, by in both)
    monkeypatch.setitem(CONFIGS, option, changed)
    emulator.reports.clear()
    assert torch.equal(output_of(inputs, option), wanted)
    assert not any(report.hazards for report in emulator.reports)


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
    out = output_of(inputs, "8 swapped, early")
    assert not any(report.hazards for report in emulator.reports)
    monkeypatch.setattr(architectures, "num_sms", lambda device: 4)
    assert torch.equal(out, output_of(inputs, "8 swapped"))


def noticed(name: str, edit: Edit, emulator, inputs: MoeInputs | None = None) -> bool:
    """Return True if a mutant of the layer's kernels is noticed."""
    inputs = inputs or inputs_of(41, 4)
    wanted = output_of(inputs, name)
    return noticed_in(lambda: output_of(inputs, name), wanted, edit, emulator)


@pytest.mark.all
@pytest.mark.parametrize("name", ["8 swapped", "64 overlapped", "128"])
@pytest.mark.parametrize("factor", ["0f00000000", "0f3F000000"], ids=["none", "half"])
def test_a_wrong_second_term(factor, name, emulator):
    """The second term is small: half of it must not pass for rounding."""
    inputs = inputs_of(41, 4)
    wanted = torch.empty(inputs.hidden_states.shape, dtype=torch.bfloat16)
    reference.fused(inputs, wanted, SHAPE, terms=2)
    # Only the rest after the first term is a difference of two float32.
    left = replace(r"sub\.f32\s+(%r\d+), [^;]*;", rf"\g<0>\nmul.f32 \1, \1, {factor};")
    emulator.host.ptx_transform = all_of(left)
    assert calc_diff(output_of(inputs, name, 2), wanted) > 100 * TOLERANCE[2]


def misaligned(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape and strides, one element past an aligned address."""
    return x.new_empty(x.numel() + 16)[1:].as_strided(x.shape, x.stride())


FAULTS = {
    "another type": lambda x: x.new_empty(x.shape, dtype=torch.float16),
    "wider": lambda x: x.new_empty((*x.shape[:-1], x.shape[-1] + 16)),
    "longer": lambda x: x.new_empty((x.shape[0] + 1, *x.shape[1:])),
    "a dimension more": lambda x: x.new_empty((*x.shape, 1)),
    "a dimension less": lambda x: x[0],
    "every other element": lambda x: x.new_empty((*x.shape, 2))[..., 0],
    "one element": lambda x: x.as_strided(x.shape, x.dim() * (0,)),
    "misaligned": misaligned,
    "none": lambda x: None,
    "a number": lambda x: 1.0,
}


def test_the_compiled_function_refuses(emulator):
    """`FusedLayer` leaves these checks to it. Nothing is launched, and the next call is right."""
    inputs = inputs_of(9, 4)
    arguments = {**inputs._asdict(), "output": output_of(inputs, "8 swapped")}
    wanted = arguments["output"].clone()
    call = make_call(9, wanted.device, SHAPE, 1, CONFIGS["8 swapped"])
    emulator.reports.clear()
    ranges, accepted = set(emulator.host.ranges), []
    for fault, name in product(FAULTS, [*MoeInputs._fields[:8], "output"]):
        if fault == "misaligned" and name.endswith("scale"):
            continue  # not asked of them
        given = arguments | {name: FAULTS[fault](arguments[name])}
        output = given.pop("output")
        try:
            call(MoeInputs(**given), output)
            accepted.append((fault, name))
        except (TypeError, ValueError, AttributeError, IndexError, RuntimeError):
            continue
    assert accepted == [] and not emulator.reports
    assert torch.equal(output_of(inputs, "8 swapped"), wanted)
    assert set(emulator.host.ranges) == ranges  # every workspace was given back


def test_a_launch_that_fails_leaves_no_workspace(emulator):
    inputs = inputs_of(9, 4)
    wanted = output_of(inputs, "8 swapped")
    ranges = set(emulator.host.ranges)

    def fail(ptx: str) -> str:
        raise emulator.EmulationError("no such kernel")

    emulator.host.ptx_transform = fail
    with pytest.raises(emulator.EmulationError, match="no such kernel"):
        output_of(inputs, "8 swapped")
    assert set(emulator.host.ranges) == ranges
    emulator.host.ptx_transform = None
    assert torch.equal(output_of(inputs, "8 swapped"), wanted)


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
    wanted = torch.full((40, 384), torch.nan, dtype=torch.bfloat16)
    reference.fused(inputs, wanted, shape)
    out = fused_output(inputs, shape, CONFIGS[name])
    assert not any(report.hazards for report in emulator.reports)
    assert calc_diff(out, wanted) < TOLERANCE[1]


@pytest.mark.all
def test_a_workspace_beyond_what_32_bits_address(emulator):
    """4.6 GB, of which a few rows are touched, where they should be: mapped memory is zero."""
    shape = MoeShape(num_experts=64, num_local_experts=32, hidden_size=8192, intermediate_size=128,
                     n_group=1, topk_group=1, top_k=31)  # fmt: skip
    tokens, first, second = 4500, *CONFIGS["128"]
    size = workspace_bytes(shape, 2, tokens)
    assert size > 2**32
    workspace = torch.empty(size, dtype=torch.uint8)
    h, i = shape.hidden_size, shape.intermediate_size
    logits = torch.full((tokens, shape.num_experts), -1.0)
    logits[:, :32] = 1.0
    logits[[3, -1], 40] = 2.0
    inputs = layer_inputs(shape, tokens, torch.zeros(shape.num_experts).bfloat16(), 32, 2.5)
    inputs = inputs._replace(routing_logits=logits)
    wanted, out = (torch.full((tokens, h), torch.nan, dtype=torch.bfloat16) for _ in range(2))
    reference.fused(inputs, wanted, shape, terms=2)
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


GATHERED = ("word", "choose", "number", "gemm1", "gemm2", "combine")
PERMUTED = (*GATHERED[:3], "permute", *GATHERED[3:])
NOT_NEEDED_WITHIN_A_CALL = {"word", "choose"}
"""The first kernel waits for the call before: test_back_to_back."""


@pytest.mark.all
@pytest.mark.parametrize(
    ("name", "kernels", "which"),
    [("8 swapped", GATHERED, which) for which in GATHERED]
    + [("128", PERMUTED, which) for which in ("permute", "gemm1")],
)
def test_without_a_wait_for_the_kernel_before(name, kernels, which, emulator):
    edit = replace(r"griddepcontrol\.wait;", "", kernels.index(which))
    assert noticed(name, edit, emulator) == (which not in NOT_NEEDED_WITHIN_A_CALL)


@pytest.mark.all
def test_without_the_fence_between_the_gather_and_the_mma(emulator):
    edit = replace(r"fence\.proxy\.async\S*;", "", 0)
    assert noticed("8 swapped", edit, emulator)


HANDED_OVER = {
    "the rows are told before all threads have stored them": replace(
        r"bar\.sync[^;]*;((?:(?!bar\.sync)[\s\S])*?atom\.global\.release)", r"\1", 0
    ),
    "and without a release": replace(r"atom\.global\.release", "atom.global.relaxed", 0),
    "the poll has no acquire": replace(r"ld\.acquire\.gpu", "ld.relaxed.gpu"),
    "nobody polls": replace(
        r"ld\.acquire\.gpu\.global\.b32 (%r\d+), \[%rd\d+\]", r"mov.u32 \1, 99999"
    ),
    "TMA may overtake the poll": replace(r"fence\.proxy\.async;", ""),
    "the last kernel does not wait for it": replace(
        r"griddepcontrol\.wait;", "", GATHERED.index("combine")
    ),
}


@pytest.mark.all
@pytest.mark.parametrize("edit", HANDED_OVER.values(), ids=HANDED_OVER)
def test_without_a_part_of_the_handing_over(edit, emulator):
    assert noticed("8 swapped, early", edit, emulator)


AFTER_A_PERMUTE = {
    "a warp tells of its rows before all lanes have stored them": replace(
        r"bar\.warp\.sync[^;]*;((?:(?!bar\.warp\.sync)[\s\S])*?atom\.global\.release)", r"\1", 0
    ),
    "and without a release": HANDED_OVER["and without a release"],
    "nobody polls": HANDED_OVER["nobody polls"],
}


@pytest.mark.all
@pytest.mark.parametrize("edit", AFTER_A_PERMUTE.values(), ids=AFTER_A_PERMUTE)
def test_without_a_part_of_the_handing_over_after_a_permute(edit, emulator):
    assert noticed("192 on demand", edit, emulator, few_local_rows())


def few_local_rows() -> MoeInputs:
    """Return inputs with so few rows that GEMM2 writes none that GEMM1 reads."""
    inputs = inputs_of(41, 9)
    assert 0 < int(route(inputs, SHAPE).m_indptr[-1]) < 41 * SHAPE.top_k // 3
    return inputs


@pytest.mark.parametrize("terms", [1, *more(2)])
def test_rows_handed_over_after_a_permute(terms, mode, emulator):
    inputs = few_local_rows()
    out = output_of(inputs, "192 on demand", terms)
    assert not any(report.hazards for report in emulator.reports)
    assert torch.equal(out, output_of(inputs, "128", terms))


def with_local_rows(tokens: int, rows: int) -> MoeInputs:
    """The first tokens choose experts of this rank alone, one what is left of the rows, the others
    none."""
    inputs = inputs_of(tokens, 4)
    logits = inputs.routing_logits.clone()
    local, left = divmod(rows, SHAPE.top_k)
    logits[:local, 4:7] += 20.0
    logits[local:, 4:9] -= 20.0
    if left:
        logits[local, 9 - left : 12 - left] = 20.0  # of experts 4 to 8, and of the same groups
    inputs = inputs._replace(routing_logits=logits, routing_bias=torch.zeros_like(inputs[1]))
    assert int(route(inputs, SHAPE).m_indptr[-1]) == rows
    return inputs


OVERWRITTEN = r"launch 4, .* writes .* launch 3, .* asynchronous copy read"
"""A hazard: GEMM2 writes rows that GEMM1 reads."""


def messages(inputs: MoeInputs, emulator) -> set[str]:
    """Return the messages of all hazards in all modes, those of other experts' rows included."""
    seen = set()
    for emulator.options.mode in MODES:
        del emulator.reports[:]
        output_of(inputs, "192 on demand", poison=False)
        seen |= {hazard["message"] for report in emulator.reports for hazard in report.hazards}
    return seen


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
    out = output_of(inputs, "192 on demand")
    monkeypatch.setattr(architectures, "num_sms", lambda device: 4)
    assert torch.equal(out, output_of(inputs, "8 swapped"))


@pytest.mark.all
def test_without_the_wait_for_the_rows_it_would_overwrite(emulator, monkeypatch):
    monkeypatch.setattr(architectures, "num_sms", lambda device: 20)
    edit = replace(r"griddepcontrol\.wait;", "", PERMUTED.index("gemm2"))
    emulator.host.ptx_transform = edit
    seen = messages(with_local_rows(41, 123), emulator)
    assert any(re.search(OVERWRITTEN, message) for message in seen)


def without_the_other_s_maxima(ptx: str) -> str:
    """Go on without waiting for what the other CTA of the cluster sends."""
    start = ptx.rindex("st.async")
    return ptx[:start] + replace(WAIT, "setp.eq.u32 P1, 0, 0;", 0)(ptx[start:])


def one_place_for_maxima(ptx: str) -> str:
    """The barrier's phases do not change with the tiles."""
    start = ptx.rindex("st.async")
    return ptx[:start] + replace(PARITY, r"\1, 0", 0)(ptx[start:])


@pytest.mark.all
@pytest.mark.parametrize("name", ["8 swapped", "128"])
@pytest.mark.parametrize("edit", [without_the_other_s_maxima, one_place_for_maxima])
def test_without_the_exchange_of_maxima(name, edit, emulator):
    assert noticed(name, edit, emulator)
