"""Two calls back to back, of every layer. The second call begins while the first one ends, and a
caching allocator gives it the same workspace."""

import copy
from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import pytest
import torch
from markers import backends, more
from moe_fp8 import reference
from moe_fp8.call import BatchedInputs
from moe_fp8.kernels.fused import workspace_bytes
from moe_fp8.layer import make_call
from moe_fp8.reference import calc_diff
from moe_fp8.shape import Form, MoeShape
from problems import FP8, GATHERED, SHAPE, TOLERANCE, fp8, fused_output, inputs_of
from problems import HOPPER as CONFIGS
from ptxemu.engine import DEPENDENTS
from ptxemu.testing import replace
from test_experts import KINDS, calls

pytestmark = backends("emulator")


class Call(NamedTuple):
    inputs: tuple
    shape: MoeShape
    form: Form


BY_EXPERT = MoeShape(5, 5, 384, 256, 1, 1, 1, "given")


def call_by_expert(rows: int, tokens: torch.dtype) -> Call:
    """Return a call with NaN in the places beyond the counts."""
    torch.manual_seed(rows)
    e, h, i = BY_EXPERT.num_local_experts, BY_EXPERT.hidden_size, BY_EXPERT.intermediate_size
    counts = torch.tensor([3, 0, rows, 1, 8], dtype=torch.int32)
    beyond = torch.arange(rows) >= counts.unsqueeze(1)
    x, x_scale = torch.randn(e, rows, h).bfloat16(), None
    if tokens is FP8:
        x, x_scale = fp8(e, rows, h), torch.randn(e, rows, h // 128)
        x.view(torch.uint8)[beyond], x_scale[beyond] = 0x7F, torch.nan
    else:
        x[beyond] = torch.nan
    inputs = BatchedInputs(
        counts, rows, x, x_scale,
        fp8(e, 2 * i, h), torch.randn(e, 2 * i // 128, h // 128),
        fp8(e, h, i), torch.randn(e, h // 128, i // 128),
    )  # fmt: skip
    return Call(inputs, BY_EXPERT, Form(torch.int32, None, tokens, batched=True))


LAYERS: dict[str, Callable[[int], Call]] = {
    "routed": lambda tokens: Call(inputs_of(tokens, 4), SHAPE, Form()),
    "given": lambda tokens: Call(*calls(tokens)[KINDS[0]]),
    "by expert": lambda rows: call_by_expert(rows, FP8),
    "by expert, bf16": lambda rows: call_by_expert(rows, torch.bfloat16),
}
"""Each layer's call of a number of tokens, or of rows of each expert."""
FIRST = 41
NAME = "8 swapped, early"


@pytest.fixture
def one_workspace(monkeypatch) -> None:
    memory = torch.zeros(workspace_bytes(SHAPE, 1, 20 * FIRST), dtype=torch.uint8, device="cuda")

    def allocate(size: int, gpu: int) -> int:
        assert size <= len(memory)
        return memory.data_ptr()

    monkeypatch.setattr("moe_fp8.layer.allocate", allocate)
    monkeypatch.setattr("moe_fp8.layer.free", lambda address: None)


def two_calls(
    layer: str, second: int, emulator, name: str = NAME
) -> tuple[list[torch.Tensor], set[str]]:
    """Outputs of two calls, of 41 tokens and of `second`, and the hazards seen."""
    emulator.options.poison_races = CONFIGS[name][1].dynamic
    outputs, launches = [], []
    for call in map(LAYERS[layer], (FIRST, second)):
        out = torch.full(call.inputs[2].shape, 7.0, dtype=torch.bfloat16)
        of_geometry = call.shape, 1, CONFIGS[name], call.form
        launch = make_call(out.shape[-2], out.device, *of_geometry)
        outputs.append(out)
        launches.append((launch, call.inputs, out))
    del emulator.reports[:]
    with emulator.in_flight():
        for launch, inputs, out in launches:
            launch(inputs, out)
    return outputs, set().union(*(report.hazard_kinds() for report in emulator.reports))


def alone(layer: str, tokens: int) -> torch.Tensor:
    inputs, shape, form = LAYERS[layer](tokens)
    return fused_output(inputs, shape, CONFIGS[NAME], form, fill=7.0)


USUAL = [(layer, NAME, "early", 9) for layer in LAYERS]
OTHERS = [
    *product(["routed"], ["8 swapped", NAME, "192 on demand"], DEPENDENTS, [9, 40]),
    *product([*LAYERS][1:], [NAME, "192 on demand"], ["early", "random"], [40]),
]


@pytest.mark.parametrize(
    ("layer", "name", "dependents", "second"),
    [*USUAL, *more(*(case for case in OTHERS if case not in USUAL))],
)
def test_a_call_may_begin_while_the_one_before_ends(
    layer, name, dependents, second, one_workspace, emulator
):
    emulator.options.dependents = dependents
    outputs, hazards = two_calls(layer, second, emulator, name)
    assert hazards == set()
    for tokens, output in zip((FIRST, second), outputs, strict=True):
        assert torch.equal(output, alone(layer, tokens))


@pytest.mark.parametrize("layer", ["given", "by expert", *more("routed", "by expert, bf16")])
def test_a_call_reads_inputs_that_changed_since_the_last(layer, emulator):
    """Weights that were written over in place, and a map in another's place: of an engine that
    sleeps or learns, and of one whose experts move."""
    inputs, shape, form = copy.deepcopy(LAYERS[layer](9))  # other tests have the same weights
    out = torch.full(inputs[2].shape, 7.0, dtype=torch.bfloat16)
    call = make_call(9, out.device, shape, 1, CONFIGS[NAME], form)
    call(inputs, out)
    before = out.clone()
    for weights in inputs[4:8]:
        weights.view(torch.uint8).copy_(weights.flip(0).view(torch.uint8))
    if form.has_map:
        inputs = inputs._replace(expert_map=inputs.expert_map.roll(1))
    call(inputs, out.fill_(7.0))
    wanted = torch.full_like(out, 7.0)
    (reference.batched if form.batched else reference.fused)(
        inputs, wanted, shape, 1, form.gate_first
    )
    assert calc_diff(out, wanted) < TOLERANCE[1] and calc_diff(before, wanted) > 0.1


@pytest.mark.all
@pytest.mark.parametrize(
    ("layer", "kernel", "second"),
    [
        *(("routed", GATHERED.index("word"), 9), ("routed", GATHERED.index("choose"), 40)),
        *((layer, 0, second) for layer in ("by expert", "by expert, bf16") for second in (9, 40)),
    ],
)
def test_without_the_first_kernel_s_wait_calls_collide(
    layer, kernel, second, one_workspace, emulator
):
    """The first call goes by the rows of the second."""
    emulator.options.dependents = "early"
    emulator.host.ptx_transform = replace(r"griddepcontrol\.wait;", "", kernel)
    try:
        outputs, hazards = two_calls(layer, second, emulator)
    except emulator.EmulationError as error:
        assert "outside every registered tensor" in str(error)
        return
    emulator.host.ptx_transform = None
    assert hazards or not torch.equal(outputs[0], alone(layer, FIRST))
