"""The project's names and paths."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEFINITION = "moe_fp8_block_scale_ds_routing_topk8_ng8_kg4_e32_h7168_i2048"
OP_TYPE = "moe"
OURS = "cutedsl_"
"""The prefix of our solutions' names, which no other solution has."""
PREFIX = f"{OURS}moe_fp8_"
"""The prefix of our layers' names; left out in narrow columns."""
FUSED = f"{PREFIX}fused"
BASELINES = "baselines"
"""The directory of our solutions on others' kernels, which count as peers."""
PACKAGE_DIR = ROOT / "solutions" / "moe_fp8"
PACKED_DIR = ROOT / "solutions"
"""The packed solutions, at the paths of the public data set."""
TRACES_DIR = ROOT / "traces"
RESULTS_DIR = ROOT / "results"
"""Recorded runs: <GPU>/<day>/."""

# (rtol, atol) at which matched ratios are reported in addition to the tolerance that decides.
ACCURACY_TOLERANCES = ((0.2, 0.1), (0.3, 1.0), (0.01, 0.01))


def short_name(solution: str) -> str:
    return solution.removeprefix(PREFIX)
