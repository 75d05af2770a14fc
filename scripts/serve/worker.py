"""One backend: an engine in a process of its own, which does what it is told."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from scripts.common.command_line import Failure
from scripts.common.project import ROOT
from scripts.serve import inside
from scripts.serve.engines import Setup, start
from scripts.serve.measure import Measuring

PROCESS = f"from {__name__} import main; main()"
LAST_LINES = 15
"""Of a log, that are shown where an engine fails."""


class Backend:
    """An engine that is starting; `ready` waits for it. What it prints goes to a log."""

    def __init__(self, setup: Setup, logs: Path):
        self.setup = setup
        self.log = logs / f"{setup.model.name}-{setup.backend}.log"
        self.directory = Path(tempfile.mkdtemp(prefix=f"{setup.backend}-", dir=logs))
        inside.publish(self.directory, setup.engine)
        mine, its = Pipe()
        environment = os.environ | setup.variables | {inside.DIRECTORY: str(self.directory)}
        if setup.random_weights:
            environment[inside.RANDOM] = "1"
        paths = (str(self.directory), str(ROOT), os.environ.get("PYTHONPATH", ""))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        self.started = time.monotonic()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROCESS, str(its.fileno())],
                pass_fds=[its.fileno()], env=environment, stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        its.close()
        self.connection: Connection = mine
        self.connection.send(setup)
        self.version = ""
        self.start_seconds = 0.0

    def ready(self) -> None:
        """Wait until the engine is up. Raises Failure."""
        self.version, at = self._answer()
        self.start_seconds = at - self.started

    def ask(self, what: str, *arguments: Any) -> Any:
        """What a method of `Measuring` returns. Raises Failure."""
        self.connection.send((what, *arguments))
        return self._answer()

    def close(self) -> None:
        """End it with all its processes."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        self.connection.close()

    def said(self, text: str) -> list[str]:
        """Lines of the log with a text."""
        return [line for line in self.text().splitlines() if text in line]

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def _answer(self) -> Any:
        try:
            error, answer = self.connection.recv()
        except (EOFError, ConnectionResetError):
            error, answer = "the process ended", None
        if error:
            end = "\n".join(self.text().splitlines()[-LAST_LINES:])
            raise Failure(f"{self.setup.backend}: {error}; the end of {self.log}:\n{end}")
        return answer


def main() -> None:
    """The process."""
    connection = Connection(int(sys.argv[1]))
    setup: Setup = connection.recv()
    try:
        engine = start(setup)
        connection.send(("", (engine.version, time.monotonic())))
        measuring = Measuring(engine, setup.model.vocabulary)
        while True:
            what, *arguments = connection.recv()
            connection.send(("", getattr(measuring, what)(*arguments)))
    except EOFError:
        pass
    except BaseException as error:
        connection.send((f"{type(error).__name__}: {error}".splitlines()[0], None))
        raise
