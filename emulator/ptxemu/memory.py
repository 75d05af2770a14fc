"""Declares the host memory that kernels may access."""

from typing import Any, NamedTuple

import torch


class Range(NamedTuple):
    """Declared memory; `keep` is an object that must live as long."""

    first: int
    end: int
    label: str
    keep: Any


ranges: dict[Any, Range] = {}
"""All declared memory. To withdraw a range, delete its key."""


def register_tensor(tensor: torch.Tensor, keep: bool = True) -> object:
    """Declare the memory that a CPU tensor spans as legal for kernels; return its key in `ranges`.

    Args:
        keep: keep the tensor alive as long as the range.
    """
    span = 0
    if tensor.numel():
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        span = (last + 1) * tensor.element_size()
    label = f"tensor {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    first, token = tensor.data_ptr(), object()
    ranges[token] = Range(first, first + span, label, tensor if keep else None)
    return token
