"""What a CTA can have, the same on Hopper and on Blackwell, and what the grouped GEMM takes."""

WARPGROUP = 128
"""Threads of a warpgroup."""
WARPS = 4
"""Warps of a warpgroup."""
SMEM_BYTES = 227 * 1024
"""Shared memory that one CTA can have."""
REGISTERS = 64 * 1024 // WARPGROUP
"""Registers that a thread of every warpgroup of a CTA has together."""
PRODUCER_REGISTERS = 24
"""All that the producer needs, and the least that setmaxnreg takes."""
MAX_REGISTERS = 240
"""Of a consumer thread: 232, the usual choice, made 128x192 tiles 2 % slower on an H200."""
MAX_CONSUMER_WARPGROUPS = 3
"""Of a CTA."""
EPILOGUE_COLUMNS = 64
"""Output columns of one TMA store: one 128-byte swizzle row of bfloat16."""
B_SCALES = 128
"""B scales of a tile that a warp has room for: one a K block, or with up and gate two."""
