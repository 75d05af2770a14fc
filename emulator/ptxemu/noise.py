"""What memory holds before anything is written to it: random bytes.

A constant may pass for what a kernel ought to have written: 0xFF, as integers -1, reads as "none".
The bytes follow from a seed, a number of the process's own unless `PTXEMU_FILL` gives it.
"""

import ctypes
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
_block: ctypes.Array | None = None


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


def fill(address: int, size: int) -> None:
    """Fill bytes of memory; without torch's operations, which a tracer would see."""
    global _block
    if _block is None:
        _block = ctypes.create_string_buffer(_random.randbytes(2 * BLOCK), 2 * BLOCK)
    for start in range(0, size, BLOCK):
        place = ctypes.addressof(_block) + _random.randrange(BLOCK)
        ctypes.memmove(address + start, place, min(BLOCK, size - start))


def has_memory(tensor: torch.Tensor) -> bool:
    """True unless it is sparse, a tracer's, or of another device."""
    return tensor.device.type == "cpu" and not torch._C._dispatch_isTensorSubclassLike(tensor)


def fill_storage(tensor: torch.Tensor) -> None:
    """Fill what a tensor that was just made lies in."""
    with torch._C.DisableTorchFunction():
        if has_memory(tensor):
            storage = tensor.untyped_storage()
            if storage.nbytes() <= MOST:
                fill(storage.data_ptr(), storage.nbytes())
