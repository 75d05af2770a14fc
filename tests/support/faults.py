"""Faults of a tensor argument: each has a name, a change, and what the message says of it."""

from collections.abc import Callable

import numpy as np
import torch


def misaligned(x: torch.Tensor) -> torch.Tensor:
    """The same values, contiguous, one element past an aligned address."""
    out = x.new_empty(x.numel() + 1)[1:].view(x.shape)
    out.view(torch.uint8).copy_(x.view(torch.uint8))
    return out


def freed(x: torch.Tensor) -> torch.Tensor:
    """A tensor whose memory was given back, as FSDP does between steps."""
    out = x.clone()
    out.untyped_storage().resize_(0)
    return out


def of_shape(change: Callable[[list[int]], list[int]]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x.new_zeros(change(list(x.shape)))


STRIDES = r"got strides \[.*\.contiguous\(\)"
FAULTS: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "nothing": (lambda x: None, "expected a torch.* got NoneType$"),
    "number": (lambda x: 3.0, "expected a torch.* got float$"),
    "list": (lambda x: [[1.0]], "expected a torch.* got list$"),
    "array": (lambda x: np.zeros((5, 16), np.float32), "expected a torch.* got ndarray$"),
    "dtype": (lambda x: x.to(torch.float16), r"expected dtype torch\.\w+, got torch.float16"),
    "strides": (lambda x: x.new_zeros([*x.shape, 2])[..., 0], STRIDES),
    "strides of 0": (lambda x: x.as_strided(x.shape, x.dim() * (0,)), STRIDES),
    "address": (misaligned, "a multiple of 16, got 0x"),
    "device": (lambda x: x.to("meta"), "expected device cpu, got meta"),
    "sparse": (lambda x: x.float().to_sparse(), "dense .* got layout"),
    "nested": (lambda x: torch.nested.nested_tensor(2 * [x.float()]), ""),
    "freed": (freed, "expected memory .* got Tensor at address 0"),
    "negated": (torch._neg_view, "got a negated view"),
    "last": (of_shape(lambda dims: [*dims[:-1], dims[-1] + 16]), "expected shape"),
    "first": (of_shape(lambda dims: [dims[0] + 1, *dims[1:]]), "expected shape"),
    "rank+1": (of_shape(lambda dims: [*dims, 1]), "expected shape"),
    "rank-1": (of_shape(lambda dims: dims[1:]), "expected shape"),
    "scalar": (of_shape(lambda dims: []), "expected shape"),
}
