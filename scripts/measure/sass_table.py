"""A table of what ptxas made of the grouped GEMM for Blackwell; needs no GPU.

    python3 run.py sass_table [--target sm_103a]

For every config that the heuristic picks, on both GEMMs of the layer: the MMA of a K block and what
stands between them, accesses to local memory within the two main loops and outside of them,
registers a thread of each role uses, shared memory and columns of tensor memory.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

from scripts.common.command_line import UsageError, parser, run_main
from scripts.measure.problems import LAYER_SHAPES
from scripts.measure.sass import Facts, disassemble, facts, nvdisasm

EXPERTS = 32
TARGETS = ("sm_100a", "sm_103a")
HEADERS = (
    "config", "GEMM", "MMA", "between", "commits", "LDTM", "FFMA2", "local in loops", "elsewhere",
    "registers", "of", "shared KiB", "tensor memory columns",
)  # fmt: skip


def row(config: Any, gemm: str, found: Facts) -> tuple:
    """A line of the table."""
    f = found
    used = f"{f.producer} / {f.consumer}"
    given = f"{config.producer_registers} / {config.consumer_registers}"
    return (
        config, gemm, f.mma, f.between, f.commits, f.tmem_loads, f.adds, f.local, f.local_elsewhere,
        used, given, f"{config.smem_bytes / 1024:.0f}", config.tmem_columns,
    )  # fmt: skip


def compiled(config: Any, n: int, k: int, target: str) -> bytes:
    """The object of a grouped GEMM, compiled anew."""
    from moe_fp8.kernels import compile as compiling
    from moe_fp8.kernels.operations import compile_grouped_gemm

    options = compiling.OPTIONS
    compiling.OPTIONS = f"{options} --keep-cubin"
    try:
        made = compile_grouped_gemm.make(config, n, k, EXPERTS, target).__cubin__
    finally:
        compiling.OPTIONS = options
    return Path(made).read_bytes() if isinstance(made, str) else made


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--target", choices=TARGETS, default=TARGETS[0])
    args = arguments.parse_args()
    if nvdisasm() is None:
        raise UsageError("nvdisasm is neither on the path nor in triton's package")
    rows = []
    with tempfile.TemporaryDirectory(prefix="moe_fp8_sass_") as directory:
        # Before the DSL is imported, which writes what it keeps under the kernel's name.
        os.environ["CUTE_DSL_DUMP_DIR"] = directory
        os.environ["MOE_FP8_CACHE_DIR"] = ""

        from moe_fp8.kernels.sm100.heuristic import PICKED
        from tabulate import tabulate

        for config in PICKED:
            for gemm, (n, k) in LAYER_SHAPES.items():
                (text,) = disassemble(compiled(config, n, k, args.target)).values()
                rows.append(row(config, gemm, facts(text)))
    print(tabulate(rows, headers=HEADERS, tablefmt="github"))
    return 0


if __name__ == "__main__":
    run_main(main)
