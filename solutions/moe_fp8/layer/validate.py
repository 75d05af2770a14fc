"""The arguments of the layer: what is expected of each."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch

from ..arguments import Signature, Spec, check_integer, check_real
from ..numerics import BLOCK
from ..problem import BatchedInputs, Form, Inputs, MoeInputs, MoeShape, RoutedInputs

MOST_ROWS = 2**24
"""Of all experts together, where the rows lie by expert."""
MOST_ROWS_OF_ONE = 2**22
"""Of an expert: `ExpertTiles` multiplies two numbers of them, counted in steps and in tiles."""


def validate(
    inputs: Inputs,
    output: torch.Tensor,
    shape: MoeShape,
    form: Form | None = None,
    out_name: str = "output",
) -> int:
    """Check every argument and return the number of tokens T, or of rows R of each expert. Launches
    and reads nothing on a GPU.

    Without a form the definition's types and layouts are expected. A message calls the output
    `out_name`.

    Raises:
        ValueError: names the argument, what was expected and given, and why.
    """
    form = form or Form.usual(shape)
    counted, dim, place = (inputs[2], 3, 1) if form.batched else (inputs[0], 2, 0)
    known = isinstance(counted, torch.Tensor) and counted.dim() == dim
    tokens = counted.shape[place] if known else -1
    tensors = (*tensors_of(form)(inputs), output)
    signature(shape, tokens, form, out_name).check(tensors)
    names = inputs._fields
    if form.bias is None and not form.batched and inputs[1] is not None:
        given = type(inputs[1]).__name__
        raise ValueError(f"{names[1]}: expected None with {shape.routing}, got {given}")
    if not form.has_scales and inputs[3] is not None:
        given = type(inputs[3]).__name__
        raise ValueError(f"{names[3]}: expected None with {names[2]} of {form.x}, got {given}")
    if isinstance(inputs, BatchedInputs):
        _check_rows(tokens, shape)
        return tokens
    check_integer("local_expert_offset", inputs.local_expert_offset)
    if isinstance(inputs, MoeInputs):
        check_real("routed_scaling_factor", inputs.routed_scaling_factor)
    elif form.has_map and int(inputs.local_expert_offset):
        raise ValueError(
            f"local_expert_offset: expected 0 with an expert_map, which has the ids of the first "
            f"local experts, too, got {int(inputs.local_expert_offset)}"
        )
    return tokens


def _check_rows(rows: int, shape: MoeShape) -> None:
    """Raise a ValueError where a kernel's integers of 32 bits would not hold what it counts."""
    together = MOST_ROWS // shape.num_local_experts
    most = min(MOST_ROWS_OF_ONE, together, (2**31 - 1) // shape.intermediate_size)
    if rows > most:
        raise ValueError(f"x: expected at most {most} rows of an expert, got {rows}")


def tensors_of(form: Form) -> Callable[[Inputs], tuple[Any, ...]]:
    """Return a function that takes the tensors out of the inputs, in order."""
    bias, scale = (1,) * (form.bias is not None), (3,) * form.has_scales
    places = 0, *bias, 2, *scale, 4, 5, 6, 7, *((9,) * form.has_map)
    return operator.itemgetter(*places)


@functools.lru_cache(maxsize=64)
def signature(shape: MoeShape, tokens: int, form: Form, out_name: str = "output") -> Signature:
    """Return what is expected of `tensors_of` and of the output."""
    given = shape.routing == "given"
    kind = BatchedInputs if form.batched else RoutedInputs if given else MoeInputs
    names = kind._fields
    e, h, i = shape.num_local_experts, shape.hidden_size, shape.intermediate_size
    f32, scale, size = torch.float32, form.weight_scale, form.weight_scale.itemsize
    order = "gate rows, then up rows" if form.gate_first else "up rows, then gate rows"
    block = f"one scale per {BLOCK}x{BLOCK} block"
    weights = (
        Spec(names[4], (e, 2 * i, h), torch.float8_e4m3fn, f"{order}, of each expert"),
        Spec(names[5], (e, 2 * i // BLOCK, h // BLOCK), scale, block, size),
        Spec(names[6], (e, h, i), torch.float8_e4m3fn, "one down projection per local expert"),
        Spec(names[7], (e, h // BLOCK, i // BLOCK), scale, block, size),
    )
    if form.batched:
        return _batched_signature(shape, tokens, form, weights, out_name)
    specs = []
    if given:
        slots, each = (tokens, shape.top_k), f"one for each of the {shape.top_k} experts of a token"
        size = form.choice.itemsize
        specs.append(Spec(names[0], slots, form.choice, each, size))
        specs.append(Spec(names[1], slots, f32, each, 4))
    else:
        logits = (tokens, shape.num_experts), form.choice, "one logit per token and expert"
        specs.append(Spec(names[0], *logits))
        if form.bias is not None:
            specs.append(Spec(names[1], (shape.num_experts,), form.bias, "one value per expert"))
    specs.append(Spec(names[2], (tokens, h), form.x, f"one row per token of {names[0]}"))
    if form.has_scales:
        block_major = f"block-major: one row per {BLOCK} hidden columns, one column per token"
        shaped = (h // BLOCK, tokens), f32, block_major, 4
        specs.append(Spec(names[3], *shaped, strided=form.strided_scales))
    specs.extend(weights)
    if form.has_map:
        experts = (shape.num_experts,)
        specs.append(Spec("expert_map", experts, torch.int32, "an id's local expert, or -1", 4))
    written = "one row per token, written in place"
    return Signature(*specs, Spec(out_name, (tokens, h), torch.bfloat16, written))


def _batched_signature(
    shape: MoeShape, rows: int, form: Form, weights: tuple[Spec, ...], out_name: str
) -> Signature:
    experts, h = shape.num_local_experts, shape.hidden_size
    scales: tuple[Spec, ...] = ()
    if form.has_scales:
        of_blocks = (experts, rows, h // BLOCK), torch.float32, f"one for {BLOCK} hidden columns", 4
        scales = (Spec("x_scale", *of_blocks, strided=True),)
    return Signature(
        Spec("num_tokens", (experts,), torch.int32, "how many of its rows an expert has", 4),
        Spec("x", (experts, rows, h), form.x, "as many rows of each expert"),
        *scales,
        *weights,
        Spec(out_name, (experts, rows, h), torch.bfloat16, "one row per row of x"),
    )
