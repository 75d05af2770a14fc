"""The GPU that is measured: that there is one, and what kernels are compiled for it."""

from typing import Any

from scripts.common.command_line import UsageError


def require_gpu() -> str:
    """The GPU's name, or a usage error."""
    import torch

    if not torch.cuda.is_available():
        raise UsageError("no GPU is visible")
    return torch.cuda.get_device_name(0)


def architecture() -> Any:
    """What the package knows of this GPU: its `Architecture`; without a GPU, Hopper's."""
    import torch
    from moe_fp8.kernels.architectures import of_device

    return of_device(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def gpu_arch() -> str:
    """The compilation target of this GPU."""
    import torch
    from moe_fp8.kernels.architectures import ARCHITECTURES

    capability = torch.cuda.get_device_capability()
    if capability not in ARCHITECTURES:
        names = ", ".join(architecture.target for architecture in ARCHITECTURES.values())
        raise UsageError(f"compute capability {capability}: the kernels are for {names}")
    return ARCHITECTURES[capability].target
