"""A whole record of this GPU in one command: tests, benchmark, GEMM, profile, one archive.

    python3 run.py record

For any GPU that has kernels here, above all one that nobody has measured yet. Runs the project's
own programs one after the other. The GPU tests come first, which run every config against the
model. If they fail, nothing is timed. A later step that fails or takes too long is noted, and the
next one begins. Everything goes into one directory, laid out like those in results/, and into an
archive beside it. Only the archive has to be sent back. It has the GPU's and the packages' versions
and the steps' output, which is in logs/ while they run, and no variables of the environment.

Takes more than an hour. Ctrl-C, or SIGTERM at a job's limit, ends the current step and packs the
results so far.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from scripts.common import environment, files
from scripts.common.command_line import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    duration,
    parser,
    positive,
    run_main,
    say,
)
from scripts.common.definitions import MODELS
from scripts.common.project import ROOT, TRACES_DIR
from scripts.common.text import slug

MODEL_NAMES = " ".join(layer.short for layer in MODELS)
STEPS = (
    ("tests", "test tests/gpu -ra --tb=short --junitxml=DIR/tests.xml", True),
    ("bench", "bench --no-report --traces DIR/bench", False),
    ("sweep", "measure sweep --out DIR/rows.jsonl", False),
    ("sweep_engines", "measure sweep --as engines --out DIR/rows.jsonl", False),
    ("models", f"measure sweep --definition {MODEL_NAMES} --out DIR/rows.jsonl", False),
    ("kernels", "measure kernels --workloads T=1 T=80 T=901 T=14107 --out DIR/rows.jsonl", False),
    ("gemm_layers", "measure gemm --layers --out DIR/rows.jsonl", False),
    ("gemm_study", "measure gemm --grid study --out DIR/rows.jsonl", False),
    ("tune_layer", "measure tune_layer --out DIR/rows.jsonl", False),
    ("report", "report DIR", False),
)
"""Name, arguments of run.py, and true if the step is a gate. DIR is the record's directory."""
PATIENCE_S = 20.0
"""Seconds that a step may take to end. Slurm gives a job 30 s from SIGTERM to SIGKILL, in which the
archive must be packed, too."""


class Step(NamedTuple):
    """A program of the record. If a `gate` fails, the next steps would time a wrong result."""

    name: str
    command: list[str]
    gate: bool = False


def steps(directory: Path) -> list[Step]:
    """Return the steps as commands."""
    start = [sys.executable, str(ROOT / "run.py")]
    return [
        Step(name, [*start, *(w.replace("DIR", str(directory)) for w in text.split())], gate)
        for name, text, gate in STEPS
    ]


def run_step(command: Sequence[str], log: Path, limit_s: float) -> int | str:
    """Run a step, with its output in the log. Return its exit status, or the reason of its end.
    Raises KeyboardInterrupt: after the step was ended."""
    with log.open("w") as out:
        print("$", *command, file=out, flush=True)
        # In a session of its own: Ctrl-C must reach only this program, which ends the step.
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"ended after {duration(limit_s)}"
        finally:
            end(process)


def end(process: subprocess.Popen) -> None:
    """End a process and all its children. The GPU's memory must be free for the next step."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)  # programs store their results
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def collect(directory: Path) -> None:
    """Move the files of `bench`'s run up into the record."""
    for path in sorted((directory / "bench").glob("*/[!.]*")):
        if path.is_file() and not (directory / path.name).exists():
            path.rename(directory / path.name)


def record(chosen: Sequence[Step], directory: Path, limit_s: float, **header: Any) -> int:
    """Run the steps, each for at most `limit_s` seconds, until a gate fails, and pack the
    directory. Return the exit status.

    steps.json has every step's command, status and seconds, and `header`. It is written after each
    step.
    """
    (directory / "logs").mkdir(exist_ok=True)
    done: list[dict[str, Any]] = []
    interrupted = False
    for number, step in enumerate(chosen, 1):
        log = directory / "logs" / f"{step.name}.log"
        say(f"=== {number}/{len(chosen)} {step.name}, output in {log}")
        start = time.monotonic()
        status: int | str = "interrupted"
        try:
            status = run_step(step.command, log, limit_s)
        except KeyboardInterrupt:
            interrupted = True
        collect(directory)
        seconds = round(time.monotonic() - start, 1)
        done.append({**step._asdict(), "status": status, "seconds": seconds})
        say(f"=== {step.name}: {duration(seconds)}, status {status}")
        content = {**header, "interrupted": interrupted, "steps": done}
        files.write_json(directory / "steps.json", content)
        if interrupted:
            break
        if status != 0 and step.gate and (left := [s.name for s in chosen[number:]]):
            text = f"nothing else is run; to time all the same: --only {' '.join(left)}"
            say(f"{step.name} has not passed: {text}")
            break
    archive = shutil.make_archive(str(directory), "gztar", directory.parent, directory.name)
    failed = [f"{s['name']} ({s['status']})" for s in done if s["status"] != 0]
    if failed:
        say(f"not passed: {', '.join(failed)}; their output is in the archive")
    say(f"record: {directory}\nto send back: {archive}, nothing else")
    return EXIT_INTERRUPTED if interrupted else EXIT_FAILED if failed else EXIT_OK


def main() -> int:
    arguments = parser(__doc__)
    add = arguments.add_argument
    add("--only", nargs="+", choices=[name for name, *_ in STEPS], help="these steps (all)")
    add("--limit", type=positive, default=120, metavar="MINUTES", help="of a step (120)")
    # Not among the runs: `report` and `bench --resume` take the latest of those.
    place = TRACES_DIR / "records"
    add("--out", type=Path, default=place, metavar="DIR", help="where it is made (traces/records)")
    args = arguments.parse_args()

    from scripts.measure.gpu import gpu_arch, require_gpu

    hardware, target = require_gpu(), gpu_arch()
    now = datetime.now(timezone.utc)
    directory = args.out.resolve() / f"record-{slug(hardware)}-{now:%Y-%m-%d-%H%M%S}"
    directory.mkdir(parents=True)
    chosen = [step for step in steps(directory) if not args.only or step.name in args.only]
    say(f"{hardware}, {target}: {', '.join(step.name for step in chosen)}")
    files.write_json(directory / "environment.json", environment.capture())
    header = {"hardware": hardware, "target": target, "time": now.isoformat(timespec="seconds")}
    return record(chosen, directory, 60 * args.limit, **header)


if __name__ == "__main__":
    run_main(main)
