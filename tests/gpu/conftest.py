"""Every test here needs a GPU that the kernels support, and is skipped with the reason without."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def _why_not() -> str | None:
    """Why the GPU tests cannot run on this machine; None if they can."""
    import torch

    if not torch.cuda.is_available():
        return "needs a CUDA GPU"
    from moe_fp8.kernels.architectures import has_kernels

    try:
        has_kernels(torch.device("cuda"))
    except ValueError as error:
        return str(error)
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if HERE in item.path.parents]
    reason = _why_not() if here else None
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
