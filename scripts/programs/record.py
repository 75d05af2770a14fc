"""A whole record of this GPU in one command: checks, tests, benchmark, GEMM, profile, one archive.

    python3 run.py record

For any GPU that there are kernels for, above all one that nobody has measured here yet. Runs the
project's own programs one after the other: every config against the model, the GPU tests, probes;
if one of these fails, nothing is timed (--keep-going). Then tune, the ranking, stages, the GEMM
alone, a profile, sweeps over the number of tokens and over other models' layers, the page; a step
that fails or takes too long is noted, and the next one begins. Everything goes into one directory,
laid out as those in results/, and into an archive beside it: that file is all there is to send
back. It holds the GPU's and the packages' versions and the steps' output, no variables of the
environment.

Takes more than an hour. Ctrl-C, or SIGTERM at a job's limit, ends the step under way and packs what
there is.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from scripts.common import environment, files, schemas
from scripts.common.command_line import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    UsageError,
    duration,
    parser,
    positive,
    run_main,
    say,
)
from scripts.common.definitions import MODELS
from scripts.common.project import ROOT, TRACES_DIR
from scripts.common.text import slug
from scripts.pack.availability import say_skipped

TOKENS = ("1", "80", "901", "14107")
"""Of the workloads whose stages and kernels are recorded: few pairs, many experts, both, most."""
GATES = ("configs", "tests", "probes")
"""Steps without which the others would time what is wrong."""
EMULATED = ("configs", "probes")
"""Of them those that the emulator can stand in for a GPU in."""
RUN = "bench"
"""Folder that `bench` makes its run's directory in; its files move up beside the others."""
PATIENCE_S = 20.0
"""How long a step that is to end may take for it: from SIGTERM to SIGKILL Slurm gives a job 30 s,
in which the archive must be packed, too."""


def commands(directory: Path) -> dict[str, list[str]]:
    """The command of every step, by name, in order."""
    d = directory
    tests = ("tests/gpu", "-ra", "--tb=short", f"--junitxml={d / 'tests.xml'}")
    workloads, sweep = [f"T={t}" for t in TOKENS], ("profile", "--sweep")
    models = [layer.short for layer in MODELS]
    arguments: dict[str, Sequence[object]] = {
        "configs": ("check", "--only", "configs", "--json", d / "configs.json"),
        "tests": ("test", *tests),
        "probes": ("check", "--only", "probes", "--json", d / "probes.json"),
        "tune": ("tune", "--what", "gemm", "--json", d / "tune.json"),
        "bench": ("bench", "--no-report", "--traces", d / RUN),
        "stages": ("profile", "--stages", "--tokens", *TOKENS, "--json", d / "stages.json"),
        "gemm_layers": ("gemm_bench", "--layers", "--json", d / "gemm_layers.json"),
        "profile": ("profile", "--workloads", *workloads, "--json", d / "profile.json"),
        "sweep": (*sweep, "--json", d / "sweep.json"),
        "sweep_engines": (*sweep, "--as", "engines", "--json", d / "sweep_engines.json"),
        "models": (*sweep, "--definition", *models, "--json", d / "models.json"),
        "gemm_study": ("gemm_bench", "--grid", "study", "--json", d / "gemm_study.json"),
        "report": ("report", d),
    }
    start = [sys.executable, str(ROOT / "run.py")]  # in the environment that it needs
    return {name: [*start, *map(str, of)] for name, of in arguments.items()}


STEPS = tuple(commands(Path()))


def run_step(command: Sequence[str], log: Path, limit_s: float) -> int | str:
    """The exit status of a step, or what ended it; what it prints goes to the terminal and the log.
    Raises KeyboardInterrupt: after the step was ended."""
    log.write_text(f"$ {' '.join(command)}\n")
    # Both in sessions of their own. Ctrl-C is for this program: it ends the step with all that the
    # step started, and the last lines must still be written. SIGTERM may reach every process.
    options: dict[str, Any] = dict(cwd=ROOT, start_new_session=True)
    keep = ["sh", "-c", 'trap "" TERM; exec tee -a "$0"', str(log)]
    with subprocess.Popen(keep, stdin=subprocess.PIPE, **options) as tee:
        process = subprocess.Popen(command, stdout=tee.stdin, stderr=subprocess.STDOUT, **options)
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"ended after {duration(limit_s)}"
        finally:
            end(process)


def end(process: subprocess.Popen) -> None:
    """End a process and all that it started; the GPU's memory must be free for the next step."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)  # programs keep what they have measured
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def collect(directory: Path) -> None:
    """Move the files of the run that `bench` made up into the record."""
    for path in sorted((directory / RUN).glob("*/[!.]*")):
        if path.is_file() and not (directory / path.name).exists():
            path.rename(directory / path.name)


def not_run(directory: Path) -> str:
    """The solutions that `bench` had to leave out and why, in one line: peers above all."""
    with contextlib.suppress(OSError, UsageError):  # it was not made, or is what is left of one
        run = schemas.read(directory / "run.json", schemas.RunInfo)
        return say_skipped(run.get("skipped", {}))
    return ""


def record(
    steps: Mapping[str, Sequence[str]],
    directory: Path,
    limit_s: float,
    gates: Sequence[str] = GATES,
    **header: Any,
) -> int:
    """Run the commands, each for at most `limit_s` seconds, until one of `gates` fails, and pack
    the directory; the exit status.

    steps.json says of every step its command, status and seconds, and is written after each, with
    `header`.
    """
    (directory / "logs").mkdir(exist_ok=True)
    done: list[dict[str, Any]] = []
    interrupted = False
    for number, (name, command) in enumerate(steps.items(), 1):
        say(f"=== {number}/{len(steps)} {name}")
        start = time.monotonic()
        status: int | str = "interrupted"
        try:
            status = run_step(command, directory / "logs" / f"{name}.log", limit_s)
        except KeyboardInterrupt:
            interrupted = True
        collect(directory)
        seconds = round(time.monotonic() - start, 1)
        done.append({"name": name, "command": list(command), "status": status, "seconds": seconds})
        say(f"=== {name}: {duration(seconds)}, status {status}")
        content = {**header, "interrupted": interrupted, "steps": done}
        files.write_json(directory / "steps.json", content)
        if interrupted:
            break
        if status != 0 and name in gates and (left := list(steps)[number:]):
            say(f"{name} has not passed: nothing else is run ({', '.join(left)}; --keep-going)")
            break
    archive = shutil.make_archive(str(directory), "gztar", directory.parent, directory.name)
    failed = [f"{s['name']} ({s['status']})" for s in done if s["status"] != 0]
    if failed:
        say(f"not passed: {', '.join(failed)}; their output is in the archive")
    if left_out := not_run(directory):
        say(f"not in the ranking: {left_out}")
    say(f"record: {directory}\nto send back: {archive}, nothing else")
    return EXIT_INTERRUPTED if interrupted else EXIT_FAILED if failed else EXIT_OK


def main() -> int:
    arguments = parser(__doc__)
    add = arguments.add_argument
    add("--only", nargs="+", choices=STEPS, help="these steps (all)")
    said = f"run the other steps although {', '.join(GATES[:-1])} or {GATES[-1]} failed"
    add("--keep-going", action="store_true", help=said)
    add("--limit", type=positive, default=120, metavar="MINUTES", help="of a step (120)")
    # Not among the runs: the latest of those is what `report` and `bench --resume` take.
    place = TRACES_DIR / "records"
    add("--out", type=Path, default=place, metavar="DIR", help="where it is made (traces/records)")
    said = f"without a GPU, {' and '.join(EMULATED)} alone: a rehearsal"
    add("--emulate", choices=("sm_90a", "sm_100a"), help=said)
    args = arguments.parse_args()
    if args.emulate and not set(args.only or ()) <= set(EMULATED):
        raise UsageError(f"--emulate: only with {' and '.join(EMULATED)}")

    from scripts.measure.gpu import gpu_arch, require_gpu

    hardware = f"emulated {args.emulate}" if args.emulate else require_gpu()
    target = args.emulate or gpu_arch()
    chosen = args.only or (EMULATED if args.emulate else STEPS)
    now = datetime.now(timezone.utc)
    directory = args.out.resolve() / f"record-{slug(hardware)}-{now:%Y-%m-%d-%H%M%S}"
    directory.mkdir(parents=True)
    more = ["--emulate", target] if args.emulate else []
    steps = {name: [*c, *more] for name, c in commands(directory).items() if name in chosen}
    say(f"{hardware}, {target}: {', '.join(steps)}")
    files.write_json(directory / "environment.json", environment.capture())
    header = {"hardware": hardware, "target": target, "time": now.isoformat(timespec="seconds")}
    gates = () if args.keep_going else GATES
    return record(steps, directory, 60 * args.limit, gates, **header)


if __name__ == "__main__":
    run_main(main)
