"""Runs NVIDIA's CuTe DSL examples on the emulator and prints a table of the results.

    python validate.py EXAMPLES [--only REGEX]

EXAMPLES is examples/python/CuTeDSL of a checkout of NVIDIA/cutlass. Each example runs unmodified,
in a process of its own in every scheduling mode, and compares its result with its own reference.
`validate_cases.txt` has a case a line: architecture, script, arguments.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCHEDULES = [("eager", 0), ("lazy", 0), ("early_loads", 0), ("random", 1), ("random", 2)]
COLUMNS = ("example", "arguments", "arch", "passed", "largest difference (of largest value)",
           "emulation s", "process s", "hazards")  # fmt: skip
TIMEOUT = 600
HAZARDS = 3
"""The exit status of a script whose kernels ran with hazards."""


@dataclass
class Run:
    """One process and its output."""

    passed: bool
    process_seconds: float
    output: str

    @property
    def emulation_seconds(self) -> float:
        return sum(map(float, re.findall(r"\d+ warp-instructions ([\d.]+)s", self.output)))

    @property
    def differences(self) -> list[tuple[float, float]]:
        pairs = re.findall(r"largest difference (\S+), largest value (\S+)", self.output)
        return [(float(difference), float(value)) for difference, value in pairs]

    @property
    def hazards(self) -> set[str]:
        return set(re.findall(r"hazard ([\w-]+)", self.output))

    @property
    def complaint(self) -> str:
        pattern = re.compile(r"ptxemu: [a-zA-Z]|Error|ismatch")
        lines = [line[:160] for line in self.output.splitlines() if pattern.search(line)]
        return " / ".join(lines[:4])


def run(script: Path, arguments: list[str], arch: str, mode: str, seed: int) -> Run:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CUTE_DSL_")}
    command = [sys.executable, "-W", "ignore", "-m", "ptxemu", "-v", "--arch", arch]
    command += ["--mode", mode, "--seed", str(seed), str(script), *arguments]
    start = time.monotonic()
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired:
        return Run(False, TIMEOUT, f"Error: not done after {TIMEOUT} s")
    output = process.stdout + process.stderr
    return Run(process.returncode in (0, HAZARDS), time.monotonic() - start, output)


def row(script: str, arguments: str, arch: str, runs: list[Run]) -> str:
    worst = max((d for r in runs for d in r.differences), default=None)
    cells = (
        Path(script).name,
        f"`{arguments}`",
        arch,
        f"{sum(r.passed for r in runs)} of {len(runs)}",
        f"{worst[0]:.3g} ({worst[1]:.3g})" if worst else "checked by the example",
        f"{max(r.emulation_seconds for r in runs):.2f}",
        f"{max(r.process_seconds for r in runs):.1f}",
        ", ".join(sorted(set().union(*(r.hazards for r in runs)))) or "-",
    )
    return "| " + " | ".join(cells) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("examples", type=Path)
    parser.add_argument("--only", default=".", help="scripts whose path matches this")
    arguments = parser.parse_args()
    print("| " + " | ".join(COLUMNS) + " |\n" + "| --- " * len(COLUMNS) + "|", flush=True)
    failed = 0
    for line in (HERE / "validate_cases.txt").read_text().splitlines():
        arch, script, *rest = line.split(maxsplit=2)
        if not re.search(arguments.only, script):
            continue
        more = rest[0] if rest else ""

        def one(schedule, path=arguments.examples / script, more=more, arch=arch) -> Run:
            return run(path, more.split(), arch, *schedule)

        with ThreadPoolExecutor(2) as pool:
            runs = list(pool.map(one, SCHEDULES))
        print(row(script, more, arch, runs), flush=True)
        for schedule, result in zip(SCHEDULES, runs, strict=True):
            if not result.passed:
                failed += 1
                print(f"<!-- {schedule}: {result.complaint} -->", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
