"""docs/models.md: the layers that it names are taken as it says."""

import re

import pytest
from moe_fp8.kernels.architectures import HOPPER
from moe_fp8.kernels.route import ChooseExperts
from moe_fp8.shape import MoeShape

from scripts.common.definitions import find_layer
from scripts.common.program import ROOT

TEXT = (ROOT / "docs" / "models.md").read_text("utf-8")
ROUTED = {  # experts, here, hidden, intermediate size: groups, groups kept, experts of a token
    "256/32/7168/2048": (8, 4, 8),  # DeepSeek-V3
    "256/16/7168/2048": (8, 4, 8),
    "256/8/7168/2048": (8, 4, 8),
    "256/256/7168/256": (8, 4, 8),
    "256/256/7168/128": (8, 4, 8),
    "384/48/7168/2048": (1, 1, 8),  # Kimi-K2
    "384/96/7168/2048": (1, 1, 8),
    "384/384/7168/256": (1, 1, 8),
    "256/256/3072/1536": (1, 1, 8),  # MiniMax-M2
    "256/32/3072/1536": (1, 1, 8),
    "256/32/6144/2048": (1, 1, 8),  # GLM-5, GLM-4.5
    "160/20/5120/1536": (1, 1, 8),
    "128/128/4096/1408": (1, 1, 8),
    "256/32/8192/2048": (8, 4, 8),  # Ling-1T
}
GIVEN = {  # experts of a token
    "257/257/7168/256": 9,
    "256/36/7168/2048": 8,
    "128/128/2048/768": 8,  # Qwen3
    "128/128/4096/1536": 8,
    "128/16/4096/1536": 8,
    "160/20/6144/2560": 8,
    "512/512/2048/512": 10,
    "512/64/4096/1024": 10,
    "256/32/4096/2048": 6,  # DeepSeek-V4-Flash
}
SHAPES = {
    **{dims: MoeShape(*map(int, dims.split("/")), *routing) for dims, routing in ROUTED.items()},
    **{dims: MoeShape(*map(int, dims.split("/")), 1, 1, k, "given") for dims, k in GIVEN.items()},
}
SIZES = r"\d+/\d+/\d+/\d+"


@pytest.mark.parametrize(("entry", "known"), [("fused_moe", ROUTED), ("experts", GIVEN)])
def test_the_page_names_them_all(entry, known) -> None:
    (row,) = (line for line in TEXT.splitlines() if line.startswith(f"| `{entry}` |"))
    assert sorted(re.findall(SIZES, row)) == sorted(known)


@pytest.mark.parametrize("sizes", SHAPES)
def test_the_kernels_take_them_with_the_configs_that_it_says(sizes) -> None:
    shape = SHAPES[sizes]
    if shape.routing != "given":
        ChooseExperts(shape)
    bounds = re.findall(r"(\d+)\s+(?:rows\s+)?at\s+T=(\d+)", TEXT)
    assert len(bounds) == 2
    for rows, tokens in bounds:
        configs = HOPPER.choose_layer(int(tokens), shape)
        assert [config.tile_m for config in configs] == [int(rows)] * 2


def test_the_definitions_have_the_sizes_that_stand_before_them() -> None:
    named = re.findall(rf"({SIZES}) \(`(\w+)`", TEXT)
    assert len(named) == 9
    for sizes, name in named:
        d = find_layer(name)
        shape = d.num_experts, d.num_local_experts, d.hidden_size, d.intermediate_size
        assert "/".join(map(str, shape)) == sizes
