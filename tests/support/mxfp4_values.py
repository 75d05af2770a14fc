"""Weights in MXFP4 at random, and what they mean, by a table."""

import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def drawn(
    *shape: int, lowest: int = 110, span: int = 14, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw packed values and e8m0 scales of `[..., N, K]` weights whose exponents span `span`."""
    generator = torch.Generator().manual_seed(seed)
    *rest, k = shape
    packed = torch.randint(256, (*rest, k // 2), generator=generator, dtype=torch.uint8)
    exponents = torch.randint(lowest, lowest + span + 1, (*rest, k // 32), generator=generator)
    return packed, exponents.to(torch.uint8).view(torch.float8_e8m0fnu)


def decoded(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the values of MXFP4 in float64, by a table."""
    table = torch.tensor(E2M1, dtype=torch.float64, device=packed.device)
    values = torch.stack((table[(packed % 16).long()], table[(packed // 16).long()]), -1).flatten(
        -2
    )
    power = 2.0 ** (scales.view(torch.uint8).double() - 127)
    return values * power.repeat_interleave(32, -1)
