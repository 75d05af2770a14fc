"""Accuracy metrics: how far an output is from a reference."""

import torch


def calc_diff(x: torch.Tensor, ref: torch.Tensor) -> float:
    """Return `1 - 2<x,ref> / (<x,x> + <ref,ref>)`: 0 for equal tensors, NaN if one is not
    finite."""
    x64, y64 = x.double().flatten(), ref.double().flatten()
    norm = float(x64.dot(x64) + y64.dot(y64))
    return 1.0 - 2.0 * float(x64.dot(y64)) / norm if norm else 0.0


def cosine(x: torch.Tensor, ref: torch.Tensor) -> float:
    """Return the cosine of the angle, which sees no wrong scale: 1 if both are zero, NaN where one
    is not finite."""
    x64, y64 = x.double().flatten(), ref.double().flatten()
    norm = float(x64.norm() * y64.norm())
    return float(x64.dot(y64)) / norm if norm else float(torch.equal(x64, y64))


def matched_ratio(x: torch.Tensor, ref: torch.Tensor, rtol: float, atol: float) -> float:
    """Return the share of elements inside a tolerance, as flashinfer-bench counts it.

    An element misses when its absolute error exceeds `atol` and its relative error `rtol`. One
    that is not finite misses, unless the reference has the same infinity there.
    """
    x32, y32 = x.float(), ref.float()
    if not x32.numel():
        return 1.0
    error = (x32 - y32).abs()
    inside = (error <= atol) | (error / (y32.abs() + 1e-8) <= rtol) | (x32 == y32)
    return float(inside.float().mean(dtype=torch.float64))
