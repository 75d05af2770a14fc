"""The GPU that is measured: that there is one, and what kernels are compiled for it."""

from scripts.common.command_line import UsageError


def require_gpu() -> str:
    """The GPU's name, or a usage error."""
    import torch

    if not torch.cuda.is_available():
        raise UsageError("no GPU is visible")
    return torch.cuda.get_device_name(0)


def gpu_arch() -> str:
    """The compilation target of this GPU."""
    import torch
    from moe_fp8.kernels.architectures import ARCHITECTURES

    capability = torch.cuda.get_device_capability()
    if capability not in ARCHITECTURES:
        names = ", ".join(architecture.target for architecture in ARCHITECTURES.values())
        raise UsageError(f"compute capability {capability}: the kernels are for {names}")
    return ARCHITECTURES[capability].target
