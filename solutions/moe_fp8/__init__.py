"""FP8 block-scaled mixture-of-experts layer of one expert-parallel rank, in CuTe DSL.

    from moe_fp8 import batched_experts, experts, fused_moe

`kernels/fused.py` lists the launches of a call. `ladder/README.md` shows the steps that led there,
and the project's README has the order to read in.
"""

import importlib
import importlib.metadata
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import batched_experts, experts, fused_moe
    from .mxfp4 import from_mxfp4, pack_mxfp4
    from .reference import quantise_blocks, quantise_channels, quantise_rows
    from .serving.expert_parallel import deep_ep_buffer, expert_parallel_moe
    from .serving.prepare import prepare
    from .serving.shards import pad_shard
    from .training import differentiable_experts

    __version__: str

__all__ = [
    "batched_experts",
    "deep_ep_buffer",
    "differentiable_experts",
    "expert_parallel_moe",
    "experts",
    "from_mxfp4",
    "fused_moe",
    "pack_mxfp4",
    "pad_shard",
    "prepare",
    "quantise_blocks",
    "quantise_channels",
    "quantise_rows",
]
PUBLIC = {
    "batched_experts": "api",
    "deep_ep_buffer": "serving.expert_parallel",
    "differentiable_experts": "training",
    "expert_parallel_moe": "serving.expert_parallel",
    "experts": "api",
    "from_mxfp4": "mxfp4",
    "fused_moe": "api",
    "pack_mxfp4": "mxfp4",
    "pad_shard": "serving.shards",
    "prepare": "serving.prepare",
    "quantise_blocks": "reference",
    "quantise_channels": "reference",
    "quantise_rows": "reference",
}
"""The module of each public name. The first use of a name imports its module: a packed solution has
only some of these modules."""


def _version() -> str:
    try:
        return importlib.metadata.version("moe-fp8-cutedsl")
    except importlib.metadata.PackageNotFoundError:  # a clone on sys.path
        text = (Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8")
        (version,) = re.findall(r'^version = "(.+)"$', text, re.MULTILINE)
        return version


if not TYPE_CHECKING:  # type checkers would accept every name

    def __getattr__(name: str) -> Any:
        if name == "__version__" and __name__ == "moe_fp8":  # a renamed copy has no version
            return _version()
        if name in PUBLIC:
            return getattr(importlib.import_module(f"{__name__}.{PUBLIC[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__", *(name for name in globals() if name.startswith("__"))]
