"""What the project is called and where its things lie."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEFINITION = "moe_fp8_block_scale_ds_routing_topk8_ng8_kg4_e32_h7168_i2048"
OP_TYPE = "moe"
OURS = "cutedsl_"
"""What the names of our solutions begin with, and of nobody else's."""
PREFIX = f"{OURS}moe_fp8_"
"""Of a layer's; left out where a column is narrow."""
FUSED = f"{PREFIX}fused"
BASELINES = "baselines"
"""The directory of our solutions on others' kernels: they are peers of the others."""
PACKAGE_DIR = ROOT / "solutions" / "moe_fp8"
PACKED_DIR = ROOT / "solutions"
"""With the packed solutions, each where the public data set has it."""
TRACES_DIR = ROOT / "traces"
RESULTS_DIR = ROOT / "results"
"""Recorded runs: <GPU>/<day>/."""

# (rtol, atol) at which matched ratios are reported in addition to the tolerance that decides.
ACCURACY_TOLERANCES = ((0.2, 0.1), (0.3, 1.0), (0.01, 0.01))


def short_name(solution: str) -> str:
    return solution.removeprefix(PREFIX)
