"""The directory of one run of the benchmark: traces.jsonl, written as results come, and run.json.

Every trace is stamped with what it is of: timing, tolerance, settings, the run, and the hash of the
solution's source. Only that decides whether a resumed run still has to measure a pair; run.json
names the sources of what has been measured, none that is only going to be.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from flashinfer_bench.data import Trace

from scripts.common import environment, files, schemas
from scripts.common.command_line import UsageError
from scripts.common.project import DEFINITION
from scripts.data import records, traces


class Run:
    """One run, alone in its directory until it is left as a context."""

    def __init__(self, directory: Path, info: schemas.RunInfo | None = None):
        """`info` is the run.json of a run that is to be resumed."""
        self.directory = directory
        self.traces = directory / "traces.jsonl"
        self.info: dict[str, Any] = dict(info or {})
        self.libs: dict[str, str] = {}
        self.hashes: dict[str, str] = {}
        self._lock = FileLock(directory / ".run.lock")
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise UsageError(f"{directory}: another program is measuring for this run") from None

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def save_info(self, **fields: Any) -> None:
        self.info.update(fields)
        files.write_json(self.directory / "run.json", self.info)

    def check_same(self, **now: Any) -> None:
        """Raise UsageError where the run is of another machine, other packages or other settings:
        its results would stand beside new ones as if they were comparable."""
        then = self.info
        changed = environment.differences(then.get("environment", {}), now.pop("environment"))
        changed += [
            f"{key} {then.get(key)!r} then, {value!r} now"
            for key, value in now.items()
            if then.get(key) != value
        ]
        if changed:
            raise UsageError(
                f"{self.directory} cannot be resumed, start a new run:\n  " + "\n  ".join(changed)
            )

    def begin(self, hashes: Mapping[str, str], libs: Mapping[str, str], settings: str) -> None:
        """What the traces to come are of: the solutions' hashes, the software with timing and
        tolerance, and the hash of all settings."""
        part = len(self.info.get("earlier", [])) + 1
        self.hashes = dict(hashes)
        self.libs = {
            **libs,
            records.SETTINGS: settings,
            records.RUN: f"{self.directory.name}, part {part}",
        }

    def results(self) -> list[records.Record]:
        if not self.traces.is_file():
            return []
        return traces.read_records([self.traces], self.info.get("definition", DEFINITION))

    def done(self) -> set[tuple[str, str]]:
        """(uuid, solution) of the results that are of the present sources and settings."""
        return {
            (r.uuid, r.solution)
            for r in self.results()
            if r.status != records.INVALID
            and r.hash == self.hashes.get(r.solution)
            and r.settings == self.libs[records.SETTINGS]
        }

    def _stamped(self, trace: Trace) -> Trace:
        """The trace with what it is of. flashinfer-bench's objects may share their parts, so none
        is changed."""
        evaluation = trace.evaluation
        assert trace.solution is not None and evaluation is not None
        stamp = {**self.libs, records.HASH: self.hashes[trace.solution]}
        libs = {**evaluation.environment.libs, **stamp}
        environment = evaluation.environment.model_copy(update={"libs": libs})
        stamped = evaluation.model_copy(update={"environment": environment})
        return trace.model_copy(update={"evaluation": stamped})

    def store(self, results: Sequence[Trace]) -> list[Trace]:
        """Keep results of a workload, and return them stamped. Raises OSError, with the results
        before them kept."""
        stamped = [self._stamped(t) for t in results]
        traces.append(self.traces, stamped)
        measured = {t.solution: self.hashes[str(t.solution)] for t in stamped}
        self.save_info(solutions={**self.info.get("solutions", {}), **measured})
        return stamped


def settings_hash(settings: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def new_run(parent: Path, hardware: str) -> Run:
    """A run in a directory that no other run has, whoever starts one at the same time."""
    slug = re.sub(r"[^a-z0-9]+", "-", hardware.lower()).strip("-")[:40]
    name = f"{datetime.now():%Y%m%d-%H%M%S}-{slug}"
    parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        directory = parent / (name if number == 1 else f"{name}-{number}")
        try:
            directory.mkdir()
            return Run(directory)
        except FileExistsError:
            number += 1


def find_run(parent: Path, wanted: Path | None) -> Run:
    """The run to go on with: the named directory, or the latest."""
    candidates = [wanted] if wanted else sorted(p.parent for p in parent.glob("*/run.json"))
    if not candidates or not (candidates[-1] / "run.json").is_file():
        raise UsageError(f"no run to resume in {wanted or parent}")
    return Run(candidates[-1], schemas.read(candidates[-1] / "run.json", schemas.RunInfo))
