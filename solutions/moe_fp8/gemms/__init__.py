"""The layer's grouped GEMM alone, as solutions of definitions of its own: one file a row layout."""
