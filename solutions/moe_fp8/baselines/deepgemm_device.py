"""What every call of DeepGEMM needs.

It serves one GPU a process: it keeps the handles of its kernels, which are that GPU's.
"""

import torch

from ..call import BLOCK

REQUIREMENT = "sgl-deep-gemm>=0.1.5"
RECIPE = (1, BLOCK, BLOCK)
"""Rows of `a` that share a scale, then rows and columns of `b` that do."""

_first: list[torch.device] = []


def require_first_device(device: torch.device) -> None:
    """Refuse another GPU than the first one, before the library fails with an invalid handle.

    Raises:
        RuntimeError: the library was used on another GPU before.
    """
    if not _first:
        _first.append(device)
    if device != _first[0]:
        raise RuntimeError(
            f"DeepGEMM serves one GPU a process: it was first used on {_first[0]}, not on {device}"
        )
