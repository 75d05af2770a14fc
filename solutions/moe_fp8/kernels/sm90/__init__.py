"""Hopper (compute capability 9.0): the grouped GEMM by TMA, mbarriers and WGMMA."""
