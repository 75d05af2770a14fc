"""Triton kernels run on the GPU, else in Triton's interpreter, whose rounding is mended here."""

import numpy as np
import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def rounded(source: np.ndarray, given, wanted, mode) -> np.ndarray:
    """Convert the bits of one float type to another, rounding to nearest even."""
    types_ = {
        "fp8e4nv": torch.float8_e4m3fn,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp32": torch.float32,
    }
    bits = np.ascontiguousarray(source).view(f"int{given.primitive_bitwidth}")
    values = torch.from_numpy(bits).view(types_[given.name]).to(types_[wanted.name])
    width = wanted.primitive_bitwidth
    return values.view(getattr(torch, f"int{width}")).numpy().view(f"uint{width}")


@pytest.fixture(autouse=True)
def interpreter_that_rounds(monkeypatch) -> None:
    """Triton's interpreter drops the carry where rounding fills a mantissa: 15.9 becomes 8."""
    if DEVICE.type == "cpu":
        from triton.runtime import interpreter

        monkeypatch.setattr(interpreter, "_convert_float", rounded)
