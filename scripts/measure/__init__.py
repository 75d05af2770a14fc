"""Measuring on a GPU: layers, the grouped GEMM alone, floors, profiles; and what others need."""
