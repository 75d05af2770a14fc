"""One backend: an engine in a process of its own, which runs requests of its parent. A call
measures one repeat, so that backends can take turns."""

import contextlib
import math
import os
import random
import signal
import statistics
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
from scripts.serve.engines import Engine, Generated, Setup, start
from scripts.serve.inside import CHECK_TOKENS

DECODE_PROMPT = 96
MOST_STEPS, LEAST_STEPS, STEPS_OF_ALL = 128, 32, 4096
"""Decode steps: as many as make STEPS_OF_ALL tokens of all requests together, within bounds. The
times of two prefills differ by more than the time of a short step. Many steps divide that error."""
GRAPH_STEPS = 32
"""Decode steps whose CUDA graph is timed."""
MIXED_REQUESTS, MIXED_PROMPT, MIXED_TOKENS = 128, 512, 64
"""The mixed load: requests, limited by the largest batch, and the tokens that a request reads and
writes."""
COMPARED_PROMPTS, COMPARED_TOKENS = (5, 64, 333, 1500), 32
OTHERS = 64
"""Requests in whose batch one request must get the tokens that it gets alone."""

PROCESS = f"from {__name__} import main; main()"
LAST_LINES = 15
"""Lines of a log that are shown if an engine fails."""


class Backend:
    """An engine that is starting; `ready` waits for it. Its output goes to a log."""

    def __init__(self, setup: Setup, logs: Path, start: str = ""):
        self.setup = setup
        self.log = logs / f"{setup.model.name}-{setup.backend}{start}.log"
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
        """Return the result of a method of `Measuring`. Raises Failure."""
        with contextlib.suppress(OSError):  # the process has ended: `_answer` reports it
            self.connection.send((what, *arguments))
        return self._answer()

    def close(self) -> None:
        """End the engine with all its processes."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        self.connection.close()

    def log_lines(self, text: str) -> list[str]:
        """Return the lines of the log with a text."""
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


# --- in the process -------------------------------------------------------------------------------


def prompts(vocabulary: int, lengths: tuple[int, ...], seed: int) -> list[list[int]]:
    """Draw random tokens, without the first and last few of a vocabulary, which are special."""
    draw = random.Random(seed)
    return [[draw.randrange(10, vocabulary - 10) for _ in range(n)] for n in lengths]


class Measuring:
    """The measurements of one engine; `vocabulary` is the size of its model's."""

    def __init__(self, engine: Engine, vocabulary: int):
        self.engine, self.vocabulary = engine, vocabulary

    def seconds(self, lengths: tuple[int, ...], tokens: int, seed: int) -> float:
        """Time a call. The engine's offline call returns when the last token is on the host."""
        drawn = prompts(self.vocabulary, lengths, seed)
        start = time.perf_counter()
        self.engine.generate(drawn, tokens)
        return time.perf_counter() - start

    def decode(self, batch: int, repeat: int) -> float:
        """Return the ms of a step: the time of more tokens less that of the first one."""
        lengths, seed = batch * (DECODE_PROMPT,), 1000 * batch + repeat
        steps = min(max(STEPS_OF_ALL // batch, LEAST_STEPS), MOST_STEPS)
        first = self.seconds(lengths, 1, seed)
        return 1e3 * (self.seconds(lengths, 1 + steps, seed) - first) / steps

    def graph(self, batch: int, repeat: int) -> float:
        """Return the ms of a step's CUDA graph on the GPU; NaN if a step is not one graph."""
        drawn = prompts(self.vocabulary, batch * (DECODE_PROMPT,), 1000 * batch + repeat)
        steps = self.engine.graph_times(drawn, 1 + GRAPH_STEPS)
        return statistics.median(steps) if steps else math.nan

    def prefill(self, tokens: int, repeat: int) -> float:
        """Return the ms of one prompt."""
        return 1e3 * self.seconds((tokens,), 1, 1000 * tokens + repeat)

    def mixed(self, requests: int, repeat: int) -> float:
        """Return the tokens, read and written, in a second, of requests that come at once."""
        lengths = requests * (MIXED_PROMPT,)
        seconds = self.seconds(lengths, MIXED_TOKENS, repeat)
        return requests * (MIXED_PROMPT + MIXED_TOKENS) / seconds

    def check(self) -> None:
        """Run the prompt whose calls `inside` compares."""
        self.engine.generate(prompts(self.vocabulary, (CHECK_TOKENS,), 2), 1)

    def compared(self) -> list[Generated]:
        """Return tokens and their log-probabilities, to compare with another backend's."""
        drawn = prompts(self.vocabulary, COMPARED_PROMPTS, 1)
        return self.engine.generate(drawn, COMPARED_TOKENS, logprobs=True)

    def alone(self) -> bool:
        """True if a request gets the same tokens alone and in a batch."""
        first, *others = prompts(self.vocabulary, (200, *range(1, OTHERS + 1)), 3)
        (single,) = self.engine.generate([first], COMPARED_TOKENS)
        return self.engine.generate([first, *others], COMPARED_TOKENS)[0].tokens == single.tokens


def main() -> None:
    """Run the process of a backend."""
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
