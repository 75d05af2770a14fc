"""What memory holds before anything is written to it: random bytes.

A constant may pass for what a kernel ought to have written: 0xFF, as integers -1, reads as "none".
The bytes follow from a seed, a number of the process's own unless `PTXEMU_FILL` gives it.
"""

import os
import random

import torch

VARIABLE = "PTXEMU_FILL"
BLOCK = 1 << 20
"""Random bytes are made once; memory gets them from a random place on."""
MOST = 256 << 20
"""Larger tensors are left as they are: what nobody touches of them takes no memory."""
EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
"""torch's functions that hand out memory as it is."""

seed = int(os.environ.get(VARIABLE) or random.SystemRandom().randrange(1 << 32))
_random = random.Random(seed)
_block: torch.Tensor | None = None


def begin(of: str) -> None:
    """Begin anew: what `of`, a test, finds in memory does not depend on what ran before it."""
    global _block
    _random.seed(f"{seed} {of}")
    _block = None


def how_to_repeat() -> str:
    return f"memory began with random bytes, {VARIABLE}={seed}"


def next_seed() -> int:
    """Of the memory of a run's CTAs."""
    return _random.getrandbits(64)


def fill(memory: torch.Tensor) -> None:
    """Fill a tensor of bytes."""
    global _block
    with torch._C.DisableTorchFunction():
        if _block is None:
            _block = torch.frombuffer(bytearray(_random.randbytes(2 * BLOCK)), dtype=torch.uint8)
        for start in range(0, memory.numel(), BLOCK):
            part = memory[start : start + BLOCK]
            place = _random.randrange(BLOCK)
            part.copy_(_block[place : place + part.numel()])


def fill_storage(tensor: torch.Tensor) -> None:
    """Fill what a tensor that was just made lies in."""
    with torch._C.DisableTorchFunction():
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        if storage.nbytes() <= MOST:
            fill(torch.empty(0, dtype=torch.uint8).set_(storage))
