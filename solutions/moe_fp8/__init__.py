"""FP8 block-scaled mixture-of-experts layer of one expert-parallel rank, in CuTe DSL.

    from moe_fp8 import batched_experts, experts, fused_moe

One file a generation of the optimisation (`v1_loop_padding`, `v2_vectorised`, ...), all of them on
the shared kernels in `kernels`, called by the layers in `layer`.
"""

import importlib
from typing import Any

PUBLIC = {
    "batched_experts": "functional",
    "experts": "functional",
    "fused_moe": "functional",
    "expert_parallel_moe": "expert_parallel",
    "deep_ep_buffer": "expert_parallel",
    "pad_shard": "shards",
    "prepare": "compile_ahead",
    "quantise_blocks": "quantise",
    "quantise_rows": "quantise",
    "__version__": "version",
}
"""Imported when they are asked for: a packed solution has few of these modules."""


def __getattr__(name: str) -> Any:
    if name in PUBLIC:
        return getattr(importlib.import_module(f"{__name__}.{PUBLIC[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *PUBLIC])
