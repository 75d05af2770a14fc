"""The layer's grouped GEMM alone, as solutions of its own definitions: one file per row layout."""
