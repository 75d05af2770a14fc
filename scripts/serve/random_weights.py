"""Random weights of a realistic spread; the engines' own have equal FP8 values, and scales of one.

Every parameter follows from its name and shape alone, so all backends serve the same model.
"""

import zlib
from collections.abc import Iterable

import torch

FP8_SPREAD = 96.0
"""Standard deviation of FP8 values, whose largest is 448. The block scales undo it."""
DOWN = 3.0
"""Factor of the experts' down projection, so that their output is a large part of a layer's."""
CHUNK = 2**27
"""Values that are drawn at once."""


@torch.no_grad()
def fill(parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write the parameters of a model, by name."""
    for name, parameter in parameters:
        fill_one(name, parameter.data)


def fill_one(name: str, p: torch.Tensor) -> None:
    """Write one parameter. Unit spread of a projection's outputs: standard deviation 1 /
    sqrt(K)."""
    generator = torch.Generator(p.device).manual_seed(zlib.crc32(name.encode()))
    leaf = name.rpartition(".")[2]
    if p.numel() == 1 or not p.is_floating_point():
        return  # leave scales of attention's FP8, and parameters other than weights, to the engine
    if p.dtype == torch.float8_e4m3fn:
        for part in p.view(-1).split(CHUNK):
            values = torch.randn(len(part), generator=generator, device=p.device)
            part.copy_((values * FP8_SPREAD).clamp_(-448, 448))
    elif "scale" in leaf:
        output_factor = DOWN if leaf.startswith("w2_") else 1.0
        spread = (128 * p.shape[-1]) ** -0.5 / FP8_SPREAD * output_factor
        p.uniform_(0.5 * spread, 1.5 * spread, generator=generator)
    elif leaf == "e_score_correction_bias":
        p.uniform_(0, 0.1, generator=generator)
    elif p.dim() == 1:
        p.fill_(1.0 if "norm" in name else 0.0)
    else:
        # Spread the logits, so that rounding does not decide the best token.
        spread = 0.5 if "embed_tokens" in name else p.shape[-1] ** -0.5
        spread *= 3 if "lm_head" in name else 1
        p.copy_(torch.randn(p.shape, generator=generator, device=p.device) * spread)
