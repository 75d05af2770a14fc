"""The requirement and the device check of every call of DeepGEMM.

DeepGEMM serves one GPU a process, because it caches kernel handles of the first GPU.
"""

import torch

from ..shape import BLOCK

REQUIREMENT = "sgl-deep-gemm>=0.1.5"
RECIPE = (1, BLOCK, BLOCK)
"""Rows of `a` per scale, then rows and columns of `b` per scale."""

_first: list[torch.device] = []


def require_first_device(device: torch.device) -> None:
    """Refuse every GPU but the first one. The library would fail with an invalid handle.

    Raises:
        RuntimeError: the library was used on another GPU before.
    """
    if not _first:
        _first.append(device)
    if device != _first[0]:
        raise RuntimeError(
            f"DeepGEMM serves one GPU a process: it was first used on {_first[0]}, not on {device}"
        )
