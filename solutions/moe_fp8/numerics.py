"""Numbers of the definition that the reference model, the layer and every kernel share."""

from typing import Any

BLOCK = 128
"""Width of a scale block: rows have a scale per 128 columns, weights one per 128x128 block."""
FP8_MAX = 448.0
"""Largest finite float8_e4m3fn value."""
MANTISSA = 0x7FFFFF
"""Bits of a float32 below its exponent."""
EPSILON = 1e-20
"""Added to the sum of a token's scores, which keeps its weights finite where the sigmoid of every
chosen logit underflows to zero."""
TMA_ROWS = 4
"""float32 scales of 16 bytes: TMA reads a row of scales from multiples of that only."""


def round_up(value: Any, multiple: int) -> Any:
    """The least multiple that is not below `value`, an `int` or an integer of a kernel."""
    return (value + (multiple - 1)) // multiple * multiple
