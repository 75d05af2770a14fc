"""The steps from one plain config of the grouped GEMM on Hopper to those that ship.

A step adds one field, or one idea, to an earlier step. solutions/moe_fp8/ladder/gemm.md says which
line of the kernel the field decides, and why that helps.
"""

from dataclasses import replace
from typing import Any, NamedTuple

from moe_fp8.kernels.configs import GemmConfigSm90, Schedule

TARGET = "sm_90a"
EXPERTS = 8
MANY, SOME, FEW = ROWS = 2048, 512, 8
"""Rows of each expert, in the three problems on which every step is timed."""


class Step(NamedTuple):
    name: str
    after: str  # the step whose config it changes
    rows: int  # where it should help: rows of each expert
    fields: dict[str, Any]


LADDER = (
    Step("four stages", "", MANY, {"stages": 4}),
    Step("all of shared memory", "four stages", MANY, {"stages": 0}),
    Step("shared tokens", "all of shared memory", MANY, {"cluster_n": 2}),
    Step("three warpgroups", "shared tokens", MANY, {"tile_m": 192, "stages": 4}),
    Step("tiles on demand", "three warpgroups", MANY, {"schedule": Schedule.DYNAMIC}),
    Step("unrolled", "tiles on demand", MANY, {"unroll": True}),
    Step("overlap", "all of shared memory", SOME, {"overlap": True}),
    Step("shared weights", "overlap", SOME, {"cluster_m": 2}),
    Step("swapped", "all of shared memory", FEW, {"swap_ab": True, "tile_m": 16, "stages": 6}),
)


def configs() -> dict[str, GemmConfigSm90]:
    """Return the config of each step by its name."""
    made = {"": GemmConfigSm90()}
    for step in LADDER:
        made[step.name] = replace(made[step.after], **step.fields)
    del made[""]
    return made
