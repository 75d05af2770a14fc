"""Blackwell (compute capability 10.0, 10.3): the grouped GEMM by TMA, tcgen05 and tensor memory."""
