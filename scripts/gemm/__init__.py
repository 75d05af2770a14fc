"""Measuring the grouped GEMM alone."""
