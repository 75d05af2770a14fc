"""What the layer serves of what engines run, and whether it is asked for."""

import os

import torch

from ..kernels.architectures import ARCHITECTURES, HOPPER
from ..problem import MoeShape

BLOCK_SHAPE = [128, 128]
"""Of the weights' scales."""


def asked_for(variable: str) -> bool:
    """Whether an environment variable that switches a plugin on is set.

    Raises:
        ValueError: it is neither `1`, nor `0` or empty.
    """
    value = os.environ.get(variable, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{variable}={value!r}: expected 1, to switch the layer on, or 0")
    return value == "1"


def on_hopper() -> bool:
    """Whether the current GPU is one that the kernels were measured on."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return False
    return ARCHITECTURES.get(torch.cuda.get_device_capability()) is HOPPER


def why_no_geometry(experts: int, local: int, hidden: int, intermediate: int, top_k: int) -> str:
    """What of the sizes the kernels do not take, empty if they take all of them."""
    try:
        MoeShape(experts, local, hidden, intermediate, 1, 1, top_k, "given")
    except ValueError as error:
        return str(error)
    return ""
