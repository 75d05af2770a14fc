"""Fills new memory with random bytes.

A constant could look like a kernel's result: as integers, 0xFF is -1, which may mean "none". The
bytes depend on a seed: `PTXEMU_FILL`, or else a random number of the process.
"""

import ctypes
import os
import random

import torch

VARIABLE = "PTXEMU_FILL"
BLOCK = 1 << 20
"""Bytes of a copy. Random bytes are drawn once; each copy begins at a random place of them."""
MOST = 256 << 20
"""The most bytes of a tensor to fill: untouched parts of larger tensors take no memory."""
EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
"""torch's functions that return uninitialised memory."""

seed = int(os.environ.get(VARIABLE) or random.SystemRandom().randrange(1 << 32))
_random = random.Random(seed)
_block: ctypes.Array | None = None


def begin(test: str) -> None:
    """Restart the random bytes: they then depend on `seed` and on the name of a test alone."""
    global _block
    _random.seed(f"{seed} {test}")
    _block = None


def how_to_repeat() -> str:
    return f"memory began with random bytes, {VARIABLE}={seed}"


def next_seed() -> int:
    """Return the seed of the random bytes in the core, for one run."""
    return _random.getrandbits(64)


def fill(address: int, size: int) -> None:
    """Fill bytes of memory, without torch's operations: a tracer would see them."""
    global _block
    if _block is None:
        _block = ctypes.create_string_buffer(_random.randbytes(2 * BLOCK), 2 * BLOCK)
    for start in range(0, size, BLOCK):
        place = ctypes.addressof(_block) + _random.randrange(BLOCK)
        ctypes.memmove(address + start, place, min(BLOCK, size - start))


def has_memory(tensor: torch.Tensor) -> bool:
    """Return False for a sparse tensor, a tracer's, and one on another device."""
    return tensor.device.type == "cpu" and not torch._C._dispatch_isTensorSubclassLike(tensor)


def fill_storage(tensor: torch.Tensor) -> None:
    """Fill the storage of a new tensor."""
    with torch._C.DisableTorchFunction():
        if has_memory(tensor):
            storage = tensor.untyped_storage()
            if storage.nbytes() <= MOST:
                fill(storage.data_ptr(), storage.nbytes())
