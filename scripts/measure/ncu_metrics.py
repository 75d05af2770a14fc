"""What Nsight Compute counts in each kernel of a call: its command line, and its CSV read.

The clocks are left as they are; each kernel runs alone and several times over, with cold caches, so
that times are not taken from it. Lines of `--csv --page raw`: names of the columns, their units, a
line for each kernel.
"""

import csv
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.common.command_line import UsageError

READ, WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
L2 = "lts__throughput.avg.pct_of_peak_sustained_elapsed"
TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"
REGISTERS = "launch__registers_per_thread"
LOCAL = (
    "l1tex__t_sectors_pipe_lsu_mem_local_op_ld.sum",
    "l1tex__t_sectors_pipe_lsu_mem_local_op_st.sum",
)
"""Sectors of local memory, loaded and stored: spilled registers."""
METRICS = (READ, WRITTEN, L2, TENSOR, REGISTERS, *LOCAL)
STALL_SECTION = "WarpStateStats"
"""Whichever reasons this version of ncu knows for the GPU: Hopper has one (gmma) of its own."""
STALL = re.compile(r"^smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio$")
NOT_STALLED = "selected"
STALLS_KEPT = 2

PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def command(report: Path, program: Sequence[str]) -> list[str]:
    """ncu on a program that marks what is to be profiled by cudaProfilerStart and Stop."""
    return [
        *("ncu", "--profile-from-start", "off", "--target-processes", "all"),
        *("--clock-control", "none", "--csv", "--page", "raw", "--log-file", str(report)),
        *("--section", STALL_SECTION, "--metrics", ",".join(METRICS)),
        *program,
    ]


def number(text: str, unit: str) -> float | None:
    """A cell as a number, bytes as bytes; None where there is none (`n/a`)."""
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    scaled = re.fullmatch(r"([KMGT]?)bytes?", unit)
    return value * PREFIXES[scaled[1]] if scaled else value


def parse(text: str) -> list[dict[str, Any]]:
    """What was counted in each kernel, in the order of launch; None where ncu has no figure.

    Raises:
        ValueError: this is no table of ncu.
    """
    lines = [line for line in text.splitlines() if line.startswith('"')]  # others: `==PROF== ...`
    rows = list(csv.reader(lines))
    if len(rows) < 3 or "Kernel Name" not in rows[0]:
        raise ValueError("no kernel in what ncu wrote")
    header, units = rows[0], rows[1]
    found = []
    for row in rows[2:]:
        cells = {
            name: number(value, unit)
            for name, unit, value in zip(header, units, row, strict=True)
            if "__" in name
        }
        stalls = {m[1]: v for name, v in cells.items() if v and (m := STALL.match(name))}
        stalls.pop(NOT_STALLED, None)
        spilled = [cells.get(name) for name in LOCAL]
        found.append(
            {
                "name": row[header.index("Kernel Name")],
                "read_bytes": cells.get(READ),
                "written_bytes": cells.get(WRITTEN),
                "l2_percent": cells.get(L2),
                "tensor_percent": cells.get(TENSOR),
                "registers": cells.get(REGISTERS),
                "spill_sectors": None if None in spilled else sum(s for s in spilled if s),
                "stalls": sorted(stalls.items(), key=lambda s: -s[1])[:STALLS_KEPT],
            }
        )
    return found


def measure(program: Sequence[str]) -> list[dict[str, Any]]:
    """What ncu counts in the kernels that the program marks.

    Raises:
        UsageError: there is no ncu.
        RuntimeError: it failed; the message is what it said last.
    """
    if shutil.which("ncu") is None:
        raise UsageError("--ncu: Nsight Compute's ncu is not on the PATH")
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "ncu.csv"
        result = subprocess.run(command(report, program), capture_output=True, text=True)
        written = report.read_text(encoding="utf-8") if report.is_file() else ""
    try:
        return parse(written)
    except ValueError as error:
        said = f"{written}\n{result.stdout}\n{result.stderr}".strip().splitlines()[-8:]
        raise RuntimeError(f"ncu: {error}: " + "\n".join(said)) from None
