"""Definitions and solutions for FlashInfer's Trace Apply: definitions as FlashInfer's traces have
them, and a solution of ours with another entry.

FlashInfer recognises a call by its routing and its shapes. The call passes keywords, without inputs
that are None, has more inputs than our definitions, and needs the output returned.
"""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from scripts.common.definitions import RENORMALIZE, Entry, MoeDefinition
from scripts.pack.pack import ENTRY_FILE, PackError

if TYPE_CHECKING:
    from flashinfer_bench.data import Definition

ABSENT = {"shape": ["num_local_experts"], "optional": True, "description": "Must be None."}
FACTORS = dict.fromkeys(
    ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit"), {**ABSENT, "dtype": "float32"}
)
GIVEN = {"shape": None, "description": "Must be that of the definition."}
SIZES = dict.fromkeys(("top_k", "n_group", "topk_group"), {**GIVEN, "dtype": "int32"})
ALL_LOCAL = {
    "routing_bias": {**ABSENT, "dtype": "bfloat16"},
    "local_expert_offset": SIZES["top_k"],
    "routed_scaling_factor": {**GIVEN, "dtype": "float32"},
}
"""Further inputs of calls whose routing renormalises."""
INPUTS = (
    *("routing_logits", "routing_bias", "hidden_states", "hidden_states_scale"),
    *("gemm1_weights", "gemm1_weights_scale", *FACTORS, "gemm2_weights", "gemm2_weights_scale"),
    *(*SIZES, "local_expert_offset", "routed_scaling_factor"),
)
METHODS = ("renormalize", "renormalize_naive")
"""Names of `routing_method_type` 1 and 4: one function, but for roundings."""

LIMIT = '''

import torch
from torch.utils.weak import WeakTensorKeyDictionary

compared = WeakTensorKeyDictionary()


def check_limit(given):
    """A tensor is compared once, and again where it was written since: that waits for the GPU."""
    if given is not None:
        version = 0 if given.is_inference() else given._version
        if compared.get(given) == version:
            return
        expected = torch.full(({experts},), {limit}, device=given.device)
        if given.dtype == expected.dtype and torch.equal(given, expected):
            compared[given] = version
            return
    raise TypeError("gemm1_clamp_limit: {experts} float32 values of {limit} are expected")
'''
RUN = '''

layer = run


def run(
    {parameters},
):
    """As FlashInfer calls it: what is no input of the layer must be as the layer has it."""
    for name, (given, expected) in {{
        {fixed},
    }}.items():
        if given is not None and (expected is None or given != expected):
            raise TypeError(f"{{name}}: {{expected}} is expected")
    {call}
'''
WRITING = """\
import torch

    output = torch.empty_like(hidden_states, dtype=torch.bfloat16)
    layer({inputs}, output)
    return output"""


def files(
    solution: Mapping[str, Any], target: Entry, definition: "Definition"
) -> dict[str, dict[str, Any]]:
    """Return, by path, the JSON of a definition and of a solution for every name that FlashInfer
    asks for. Raises PackError: FlashInfer has no such definition."""
    if not isinstance(target, MoeDefinition):
        raise PackError(f"FlashInfer's Trace Apply has no {target.name}")
    ours = definition.model_dump(mode="json")
    # FlashInfer's names have no limit.
    names, specs = {"": re.sub(r"_limit\d+$", "", target.name)}, {**FACTORS, **SIZES}
    fixed = {**dict.fromkeys(FACTORS), **{name: getattr(target, name) for name in SIZES}}
    if target.routing == RENORMALIZE:
        names = {f"_{m}": target.name.replace("_renorm_", f"_{m}_routing_") for m in METHODS}
        specs = {**FACTORS, **ALL_LOCAL, "top_k": SIZES["top_k"]}
        fixed = {**dict.fromkeys(FACTORS), "routing_bias": None, "top_k": target.top_k}
        fixed |= {"local_expert_offset": 0, "routed_scaling_factor": 1.0}
    checks, checked = "", ""
    if (limit := target.swiglu_limit) is not None:
        del fixed["gemm1_clamp_limit"]
        description = f"Must be {limit} for every expert."
        specs["gemm1_clamp_limit"] = {**FACTORS["gemm1_clamp_limit"], "description": description}
        checks = LIMIT.format(experts=target.num_local_experts, limit=limit)
        checked = "check_limit(gemm1_clamp_limit)\n    "
    specs |= ours["inputs"]
    inputs = {name: specs[name] for name in INPUTS if name in specs}

    def entry(call: str) -> str:
        return checks + RUN.format(
            parameters=",\n    ".join(f"{name}=None" for name in inputs),
            fixed=",\n        ".join(f'"{n}": ({n}, {only!r})' for n, only in fixed.items()),
            call=checked + call.format(inputs=", ".join(ours["inputs"])),
        )

    sources = [
        {**s, "content": s["content"] + entry(WRITING)} if s["path"] == ENTRY_FILE else s
        for s in solution["sources"]
    ]
    spec = {**solution["spec"], "destination_passing_style": False}
    changed = {"inputs": inputs, "reference": ours["reference"] + entry("return layer({inputs})")}
    texts: dict[str, dict[str, Any]] = {}
    for end, theirs in names.items():
        name, below = solution["name"] + end, f"{solution['author']}/{target.op_type}/{theirs}"
        texts[f"definitions/{target.op_type}/{theirs}.json"] = {**ours, "name": theirs, **changed}
        own = {"name": name, "definition": theirs, "spec": spec, "sources": sources}
        texts[f"solutions/{below}/{name}.json"] = {**solution, **own}
    return texts
