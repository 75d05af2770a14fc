"""Memory for the kernels of one call, by address: a tensor costs the host several times as much."""

import torch


def allocate(size: int, gpu: int) -> int:
    """The address of uninitialised bytes of torch's caching allocator, a multiple of 512.

    They belong to the current stream as a tensor's would, in a stream capture to the graph, and may
    be freed as soon as the last kernel that uses them is launched. `caching_allocator_alloc` does
    the same, but looks at what it is given and sets the device first: twice the time.

    Args:
        size: bytes, at least one.
        gpu: index of the current device.

    Raises:
        torch.OutOfMemoryError: there are not as many.
    """
    stream = torch._C._cuda_getCurrentRawStream(gpu)
    return torch._C._cuda_cudaCachingAllocator_raw_alloc(size, stream)


free = torch.cuda.caching_allocator_delete
"""Give the bytes at an address of `allocate` back."""
