"""The grouped GEMM of each architecture, and alone, without the rest of the layer."""

from typing import Any

from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Uint8

from ..shape import BLOCK, PACKED_BYTES, TMA_ROWS
from .compile import CompiledOnce, Extent, Scalar, Tensor, compiled
from .configs import GemmConfigSm90, GemmConfigSm100
from .gemm_sm90 import GemmSm90
from .gemm_sm100 import GemmSm100

GEMM_CLASSES: dict[type, Any] = {GemmConfigSm90: GemmSm90, GemmConfigSm100: GemmSm100}
"""The GEMM by the type of its config: the architecture."""


@CompiledOnce
def compile_grouped_gemm(config: Any, n: int, k: int, experts: int, target: str) -> Any:
    """Compile the GEMM alone, with an output in bfloat16. Raises ValueError: n, k or experts is not
    supported."""
    rows, blocks = Extent("rows"), k // BLOCK
    scales = (n, 1) if config.per_channel else (n // BLOCK, blocks)
    scale_stride = Extent("scale stride", TMA_ROWS)  # TMA: strides of 16 bytes
    weights = Tensor(Float8E4M3FN, (experts, n, k))
    if config.packed:
        weights = Tensor(Uint8, (experts, n // BLOCK, blocks, PACKED_BYTES))
    arguments = (  # in the order of `GemmSm90.__call__`
        Tensor(Float8E4M3FN, (rows, config.terms * k)),
        Tensor(Float32, (blocks, rows), strides=(scale_stride, 1)),
        weights,
        Tensor(Float32, (experts, *scales), align=16 if config.per_channel else 4),
        Tensor(BFloat16, (rows, n)),
        Tensor(Int32, (2, experts), align=4, strides=(Extent("expert_rows stride"), 1)),
        Tensor(Int32, (Extent("counters"),), align=4),
        Scalar(Int32),
    )
    return compiled(GEMM_CLASSES[type(config)], (config, n, k, experts), arguments, target)
