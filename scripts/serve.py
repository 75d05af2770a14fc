"""Serve a model in vLLM or SGLang on the fused layer and on the engine's own: check, time, compare.

    run.py serve --model qwen3-30b-a3b --random-weights
    run.py serve --model /path/to/a/model --compare engine,ours,accurate
    run.py serve --model deepseek-v3 --random-weights --layers 4 --compare engine,tuned,ours
    run.py serve --model DIR --text FILE --bf16 DIR2 --compare bf16,engine,ours,accurate

Each backend is the engine's offline API in a process of its own: `engine` (as it comes), `tuned`
(vLLM's Triton kernel with the files that vLLM has for an H200), `ours`, `accurate`, `both` (ours,
with FP8 copies of experts in MXFP4), or a kernel by the engine's own name (`deep_gemm`, `humming`,
`marlin`, ...).

First every served layer's output on real activations is compared with float32 arithmetic on its
dequantised weights (calc_diff). Then, after a warm-up, a decode step, a prefill and a mixed load
are timed: 128 requests of 512 + 64 tokens, or as many as the largest batch has. The CUDA graph of a
decode step is timed, too ("graph"): the GPU's part of the step, which does not change with the
host. The GPU memory of the model's tensors is shown, the most while it is loaded, and after that.
What is compiled after the start is counted.
With trained weights tokens and log-probabilities are compared with those of the first backend; of
random ones they say nothing. `--text` adds the loss of a text, with its standard error over windows
of 1024 tokens, its difference from the first backend's on the same windows, and how often both have
the same likeliest token. The backend `bf16` serves the BF16 weights that the model was made from.
Backends take turns within a group of `--together N`, which share the GPU. The default is one after
the other.
`--http N` times the HTTP server of each backend, with N clients that send a request of the mixed
load each, at once.
"""

import argparse
import contextlib
import http.client
import importlib.metadata
import importlib.util
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from scripts.common.program import (
    EXIT_OK,
    ROOT,
    Failure,
    UsageError,
    error_line,
    input_path,
    note,
    output_file,
    parser,
    run_main,
    say,
    steps,
    whole,
)
from scripts.serving import clients
from scripts.serving.engines import (
    CHECK_TOKENS,
    DIRECTORY,
    ENGINES,
    GROUPS,
    LAYERS,
    MIXED_PROMPT,
    MIXED_REQUESTS,
    MIXED_TOKENS,
    OWN,
    RANDOM,
    Generated,
    Model,
    Read,
    Setup,
    find_model,
    reported,
)

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PROMPTS = (512, 1024, 2048, 4096, 8192, 16384)
MOST_STARTS = 3
COMPILED = "Cache the graph of compile range"
"""vLLM's message about a graph that it did not find on disk."""
COMPILED_LATE = "compilation during inference"
"""The message of vLLM's monitor about a kernel that a request had to wait for."""
WINDOW, MOST_WINDOWS = 1024, 256
"""Tokens of a text that are read at once, without those before them, and the most such windows."""
PROCESS = "from scripts.serving.worker import main; main()"
HTTP = {"http first": "ms", "http token": "ms a token", "http": "tokens/s"}
"""The units of the figures of an HTTP server's clients, in the order of `clients.Load`."""
SERVER_SECONDS = 900
LAST_LINES = 15
"""Lines of a log that are shown if an engine fails."""


# --- a backend ------------------------------------------------------------------------------------


def publish(directory: Path, engine: str) -> None:
    """Make the worker a plugin of the engine for processes with the directory on their path."""
    package = directory / "moe_fp8_serve-0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: moe-fp8-serve\nVersion: 0\n")
    entry = f"moe_fp8_serve = scripts.serving.worker:register_{engine}"
    (package / "entry_points.txt").write_text(f"[{GROUPS[engine]}]\n{entry}\n")


def is_installed(engine: str) -> bool:
    """True if the engine finds the package's own plugin."""
    plugins = importlib.metadata.entry_points(group=GROUPS[engine])
    return any(entry.value.startswith("moe_fp8.") for entry in plugins)


def layers_of(directory: Path) -> list[list[float]]:
    """Return the calc_diff of every layer that was checked, a list a process."""
    return [list(map(float, lines)) for lines in reported(directory, "layers")]


def compilations(directory: Path) -> int:
    """Return the number of our kernels that all processes of an engine have compiled."""
    return sum(int(compiled) for lines in reported(directory, "kernels") for compiled in lines)


class Started:
    """An engine that is starting. Its output goes to a log."""

    def __init__(
        self,
        setup: Setup,
        logs: Path,
        name: str,
        command: list[str],
        pass_fds: Sequence[int] = (),
        **variables: str,
    ):
        self.setup = setup
        self.log = logs / f"{setup.model.name}-{setup.backend}{name}.log"
        self.directory = Path(tempfile.mkdtemp(prefix=f"{setup.backend}-", dir=logs))
        publish(self.directory, setup.engine)
        environment = os.environ | setup.variables | variables
        environment[DIRECTORY] = str(self.directory)
        if setup.random_weights:
            environment[RANDOM] = "1"
        paths = (str(self.directory), str(ROOT), os.environ.get("PYTHONPATH", ""))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        self.started = time.monotonic()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, pass_fds=pass_fds, env=environment, stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self.version = ""
        self.start_seconds = 0.0

    def failure(self, error: str) -> Failure:
        end = "\n".join(self.text().splitlines()[-LAST_LINES:])
        return Failure(f"{self.setup.backend}: {error}; the end of {self.log}:\n{end}")

    def close(self) -> None:
        """End the engine with all its processes."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()

    def log_lines(self, text: str) -> list[str]:
        """Return the lines of the log with a text."""
        return [line for line in self.text().splitlines() if text in line]

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")


class Backend(Started):
    """An offline engine; `ready` waits for it."""

    def __init__(self, setup: Setup, logs: Path, name: str = ""):
        mine, its = Pipe()
        command = [sys.executable, "-c", PROCESS, str(its.fileno())]
        super().__init__(setup, logs, name, command, [its.fileno()])
        its.close()
        self.connection: Connection = mine
        self.connection.send(setup)

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
        super().close()
        self.connection.close()

    def _answer(self) -> Any:
        try:
            error, answer = self.connection.recv()
        except (EOFError, ConnectionResetError):
            error, answer = "the process ended", None
        if error:
            raise self.failure(error)
        return answer


class Server(Started):
    """An engine's HTTP server; `ready` waits for it."""

    def __init__(self, setup: Setup, logs: Path, version: str):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.loads: dict[tuple[int, int], clients.Load] = {}
        command = clients.command(setup, self.port)
        # The server and the engine are two processes, as users have them.
        super().__init__(setup, logs, "-http", command, VLLM_ENABLE_V1_MULTIPROCESSING="1")
        self.version = version

    def ready(self) -> None:
        """Wait until the server takes requests. Raises Failure."""
        while not clients.is_up(self.port):
            if self.process.poll() is not None:
                raise self.failure("the server ended")
            if time.monotonic() - self.started > SERVER_SECONDS:
                raise self.failure(f"the server was not up after {SERVER_SECONDS} s")
            time.sleep(0.5)
        self.start_seconds = time.monotonic() - self.started

    def ask(self, what: str, number: int, repeat: int) -> float:
        """Return a figure, one of `HTTP`, of so many clients. Raises Failure."""
        if (number, repeat) not in self.loads:
            try:
                self.loads[number, repeat] = clients.load(
                    self.setup, self.port, number, MIXED_PROMPT, MIXED_TOKENS, repeat
                )
            except (OSError, http.client.HTTPException, RuntimeError) as error:
                raise self.failure(error_line(error)) from None
        return self.loads[number, repeat][[*HTTP].index(what)]


# --- measurements ---------------------------------------------------------------------------------


Figure = tuple[str, int, str]
"""The name of a quantity, its size and its unit."""


@dataclass(frozen=True)
class Plan:
    """The quantities to measure, and the number of repeats."""

    batches: tuple[int, ...]
    prompts: tuple[int, ...]
    repeats: int
    compare_tokens: bool = False  # for trained weights
    windows: tuple[list[int], ...] = ()  # of a text, whose loss is computed
    clients: int = 0  # of an HTTP server

    @property
    def figures(self) -> list[Figure]:
        """The quantities of an offline engine, each named as the method of `Measuring`."""
        return [
            *(("decode", batch, "ms a step") for batch in self.batches),
            *(("graph", batch, "ms a step") for batch in self.batches),
            *(("prefill", tokens, "ms") for tokens in self.prompts),
            ("mixed", min(MIXED_REQUESTS, max(self.batches)), "tokens/s"),
        ]


Row = dict[str, Any]


class Answer(NamedTuple):
    generated: list[Generated]  # for the compared prompts
    read: list[Read]  # of a text's windows


Answers = dict[str, Answer]
"""Each backend's answer, in the order in which the backends ran."""


def started(
    setups: Sequence[Setup], logs: Path, stack: contextlib.ExitStack
) -> Generator[Row, None, list[Backend]]:
    """Start backends at once, anew as long as one of them compiles its model, and return them: an
    engine that has compiled has a slower host for as long as it runs (DeepSeek-V3's sizes in vLLM
    0.33, batch 1: 2.64 ms a step, later 1.89). vLLM's second start looks for the first one's graphs
    under another name, and compiles once more. Yield a row of each start that compiled. Raises
    Failure."""
    for number in range(MOST_STARTS):
        with contextlib.ExitStack() as these:
            backends = []
            for setup in setups:
                note(f"starts {setup.backend}")
                backends.append(Backend(setup, logs, f"-{number}"))
                these.callback(backends[-1].close)
            for backend in backends:
                backend.ready()
                note(f"{backend.setup.backend} is up after {backend.start_seconds:.0f} s")
            compiled = [backend for backend in backends if backend.log_lines(COMPILED)]
            if not compiled or number == MOST_STARTS - 1:
                stack.push(these.pop_all())
                break
            for backend in compiled:
                yield row_of(backend, "first start", None, round(backend.start_seconds, 1), "s")
    for backend in compiled:
        note(f"{backend.setup.backend} compiled in each of {MOST_STARTS} starts: slower host")
    return backends


def measure(setups: Sequence[Setup], plan: Plan, logs: Path, answers: Answers) -> Iterator[Row]:
    """Yield the rows of backends that share the GPU, as they come. Earlier backends have left their
    `answers`. Raises Failure."""
    with contextlib.ExitStack() as stack:
        backends = yield from started(setups, logs, stack)
        at_start = [compilations(backend.directory) for backend in backends]
        for backend in backends:
            yield from check(backend)
        yield from timed(backends, plan.figures, plan.repeats)
        for backend in backends if plan.compare_tokens else ():
            windows = [*plan.windows]
            generated = backend.ask("compared", windows)
            read = backend.ask("read", windows) if windows else []
            answers[backend.setup.backend] = Answer(generated, read)
            yield from losses(backend, answers)
            yield from compared(backend, answers)
        for backend, compiled in zip(backends, at_start, strict=True):
            yield from counted(backend, compiled)


def row_of(backend: Started, what: str, size: Any, value: Any, unit: str, **more: Any) -> Row:
    setup = backend.setup
    return {
        "engine": setup.engine, "engine_version": backend.version, "model": setup.model.name,
        "layers": setup.model.layers, "gpus": setup.tensor_parallel,
        "parallel": "expert" if setup.expert_parallel else "tensor", "subject": setup.backend,
        "batch_invariant": setup.batch_invariant or None, "dense": setup.dense,
        "part": what, "size": size, "value": value, "unit": unit, **more,
    }  # fmt: skip


def check(backend: Backend) -> Iterator[Row]:
    """Yield rows of the start and of the layers' checks. Raises Failure: the layer is not served
    where it should be, or computes wrong values."""
    from scripts.measuring.accuracy import LARGEST_DIFF

    if backend.setup.backend in OWN and not backend.log_lines("moe_fp8 serves"):
        why = backend.log_lines("moe_fp8") or ["the log does not name moe_fp8"]
        raise Failure(f"{backend.setup.backend}: nothing is served: {why[-1]}")
    yield row_of(backend, "start", None, round(backend.start_seconds, 1), "s")
    for what, name in (("loading", "memory while loading"), ("loaded", "memory after loading")):
        if of_ranks := [float(gib) for lines in reported(backend.directory, what) for gib in lines]:
            yield row_of(backend, name, None, round(max(of_ranks), 2), "GiB")
    tokens = CHECK_TOKENS[backend.setup.engine]
    backend.ask("check", tokens)
    layers = layers_of(backend.directory)
    if backend.setup.backend in OWN and not any(layers):
        raise Failure(f"{backend.setup.backend}: no call of {tokens} tokens was seen")
    for differences in layers:
        for layer, calc_diff in enumerate(differences):
            if math.isfinite(calc_diff):
                yield row_of(backend, "calc_diff of a layer", layer, calc_diff, "")
    wrong = [
        diff for differences in layers for diff in differences if not diff <= LARGEST_DIFF
    ]  # also true for NaN
    if wrong:
        raise Failure(f"{backend.setup.backend}: a layer's calc_diff is {wrong[0]:.2e}")
    if max(backend.setup.batches) > 1:  # else a batch has one request
        yield row_of(backend, "same tokens alone and among others", None, backend.ask("alone"), "")


def served(setup: Setup, plan: Plan, logs: Path, version: str) -> Iterator[Row]:
    """Yield the figures of the clients of an HTTP server, of the engine's `version`. Raises
    Failure."""
    note(f"starts the HTTP server of {setup.backend}")
    server = Server(setup, logs, version)
    try:
        server.ready()
        note(f"{setup.backend} is up after {server.start_seconds:.0f} s")
        figures = [(what, plan.clients, unit) for what, unit in HTTP.items()]
        yield from timed([server], figures, plan.repeats)
    finally:
        server.close()


def timed(
    backends: Sequence[Backend | Server], figures: Sequence[Figure], repeats: int
) -> Iterator[Row]:
    """Yield medians over the repeats of all backends in turn. The first repeat is a warm-up. A
    quantity that is NaN in any repeat of a backend has no row."""
    for what, size, unit in figures:
        values: dict[str, list[float]] = {backend.setup.backend: [] for backend in backends}
        for repeat in range(repeats + 1):
            for backend in backends:
                values[backend.setup.backend].append(backend.ask(what, size, repeat))
        for backend in backends:
            samples = sorted(values[backend.setup.backend][1:])
            if any(map(math.isnan, samples)):
                continue
            median = statistics.median(samples)
            spread = round((samples[-1] - samples[0]) / abs(median), 4)
            say(f"        {what} {size}: {backend.setup.backend} {median:.4g} {unit}")
            yield row_of(backend, what, size, median, unit, spread=spread, least=samples[0],
                         most=samples[-1], calls=len(samples))  # fmt: skip


def counted(backend: Backend, at_start: int) -> Iterator[Row]:
    """Yield the numbers of kernels that were compiled, at start and later."""
    if backend.setup.backend in OWN:
        late = compilations(backend.directory) - at_start
        yield row_of(backend, "our kernels compiled at start", None, at_start, "")
        yield row_of(backend, "our kernels compiled later", None, late, "")
    late_lines = [line for line in backend.log_lines(COMPILED_LATE) if "FusedMoe" in line]
    yield row_of(backend, "of ours, by the engine's monitor", None, len(late_lines), "")


def losses(backend: Backend, answers: Answers) -> Iterator[Row]:
    """Yield the loss of a text; of a later backend also how it differs from the first one's."""
    windows = answers[backend.setup.backend].read
    if not windows:
        return
    first, *_ = answers

    def row(what: str, values: list[float]) -> Row:
        error = statistics.stdev(values) / math.sqrt(len(values))
        unit = "nats a token"
        return row_of(backend, what, None, statistics.fmean(values), unit, standard_error=error)

    loss = [-statistics.fmean(window.logprobs) for window in windows]
    yield row("loss", loss)
    if first == backend.setup.backend:
        return
    first_loss = [-statistics.fmean(window.logprobs) for window in answers[first].read]
    yield row(f"loss less {first}'s", [a - b for a, b in zip(loss, first_loss, strict=True)])
    same = [
        a == b
        for window, first_window in zip(windows, answers[first].read, strict=True)
        for a, b in zip(window.likeliest, first_window.likeliest, strict=True)
    ]
    yield row_of(backend, f"likeliest token is {first}'s", None, statistics.fmean(same), "")


def compared(backend: Backend, answers: Answers) -> Iterator[Row]:
    """Yield the agreement of tokens and log-probabilities with those of the first backend."""
    first, *_ = answers
    if first == backend.setup.backend:
        return
    same, differences = 0, [0.0]
    generated = answers[backend.setup.backend].generated
    pairs = list(zip(generated, answers[first].generated, strict=True))
    for (tokens, logprobs), (of_tokens, of_logprobs) in pairs:
        pairs_of = zip(tokens, of_tokens, strict=True)
        until = next((n for n, (a, b) in enumerate(pairs_of) if a != b), len(tokens))
        same += until
        equal = zip(logprobs[:until], of_logprobs, strict=False)
        differences += [abs(a - b) for a, b in equal]
    share = same / sum(len(tokens) for (tokens, _), _ in pairs)
    yield row_of(backend, f"tokens before the first other than {first}'s", None, share, "")
    yield row_of(backend, "largest difference of a log-probability there", None,
                 max(differences), "")  # fmt: skip


# --- program --------------------------------------------------------------------------------------


def numbers(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(map(whole(1), text.split(","))))


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    options = parser(__doc__)
    add = options.add_argument
    add("--engine", choices=ENGINES, default="vllm", help="its environment is the one that runs")
    add(
        "--model",
        required=True,
        metavar="NAME_OR_DIR",
        help=f"a directory of weights, or, for random ones, {', '.join(LAYERS)}",
    )
    add(
        "--random-weights",
        action="store_true",
        help="draw the weights; the spread depends on a parameter's name",
    )
    add("--layers", type=whole(1), metavar="N", help="of random weights (default: as many as fit)")
    add("--compare", default="engine,ours", metavar="BACKENDS", help="backends, as above")
    add(
        "--batches",
        type=numbers,
        default=BATCHES,
        metavar="N,...",
        help="requests of a decode step",
    )
    add("--prompts", type=numbers, default=PROMPTS, metavar="N,...", help="tokens of a prefill")
    add("--repeats", type=whole(1), default=5, metavar="N", help="of each figure")
    add("--together", type=whole(1), default=1, metavar="N",
        help="backends that share the GPU, so that they can take turns")  # fmt: skip
    add("--tensor-parallel", type=whole(1), default=1, metavar="N", help="GPUs of each backend")
    add("--expert-parallel", action="store_true", help="experts whole, spread over these GPUs")
    add("--batch-invariant", action="store_true", help="VLLM_BATCH_INVARIANT=1 for all backends")
    add("--http", type=whole(1), default=0, metavar="N",
        help="also start each backend's HTTP server, and time N clients at once")  # fmt: skip
    add(
        "--text",
        type=input_path,
        metavar="FILE",
        help="of trained weights: compute the loss of a text",
    )
    add("--bf16", type=input_path, metavar="DIR", help="the model in BF16, for the backend bf16")
    add("--out", type=output_file, metavar="FILE", help="append all figures there, as they come")
    return options.parse_args(argv)


def method(together: int) -> str:
    """Return how the figures are measured, in words."""
    how = f"up to {together} backends in turns" if together > 1 else "one backend after the other"
    return f"offline API, medians after a warm-up, {how}"


def setups(args: argparse.Namespace) -> list[Setup]:
    """Return the settings of each backend. Raises UsageError."""
    if importlib.util.find_spec(args.engine) is None:
        raise UsageError(
            f"{args.engine} is not installed for {sys.executable}: in the environment that has it "
            "run pip install -e '.[serve]', then run.py with its python"
        )
    if args.batch_invariant and args.engine != "vllm":
        raise UsageError("--batch-invariant: with --engine vllm only")
    backends = list(dict.fromkeys(name.strip() for name in args.compare.split(",")))
    if "" in backends:
        raise UsageError(f"--compare {args.compare}: a name between commas is empty")
    if set(OWN) & set(backends) and not is_installed(args.engine):
        raise UsageError(f"{args.engine} does not find the plugin: pip install -e . in this folder")
    model = find_model(args.model, args.layers, args.random_weights)
    if args.http and "tuned" in backends:
        raise UsageError("--http: the backend tuned has no server")
    if ("bf16" in backends) != (args.bf16 is not None):
        raise UsageError("--bf16 DIR and the backend bf16 need each other")
    if args.random_weights and (args.text or args.bf16):
        raise UsageError("--text, --bf16: random weights say nothing; give a directory of weights")
    bf16 = args.bf16 and replace(find_model(str(args.bf16), None, False), name=model.name)
    return [
        Setup(
            engine=args.engine,
            backend=backend,
            model=bf16 if backend == "bf16" else model,
            random_weights=args.random_weights,
            most_tokens=max(*args.prompts, CHECK_TOKENS[args.engine]),
            batches=args.batches,
            tensor_parallel=args.tensor_parallel,
            expert_parallel=args.expert_parallel,
            share=0.9 / min(args.together, len(backends)),
            batch_invariant=args.batch_invariant,
        )
        for backend in backends
    ]


def windows_of(text: Path, model: Model) -> tuple[list[int], ...]:
    """Return the tokens of a text by the model's tokenizer, in windows; the end that fills none is
    left out. Raises UsageError."""
    try:
        content = text.read_text(encoding="utf-8")
        from transformers import AutoTokenizer  # takes 10 s

        tokenizer = AutoTokenizer.from_pretrained(model.directory)
    except (OSError, ValueError) as error:
        raise UsageError(f"--text {text}: {error_line(error)}") from None
    tokens = tokenizer(content, add_special_tokens=False)["input_ids"]
    windows = [tokens[n : n + WINDOW] for n in range(0, len(tokens) - WINDOW + 1, WINDOW)]
    if len(windows) < 2:
        raise UsageError(f"--text {text}: {len(tokens)} tokens; two windows need {2 * WINDOW}")
    return tuple(windows[:MOST_WINDOWS])


def main() -> int:
    args = arguments()
    wanted = setups(args)
    from scripts.common import environment
    from scripts.publishing.rows import Writer
    from scripts.publishing.tables import SERVED, TRAINED, served_checks, timed_tables

    windows = windows_of(args.text, wanted[0].model) if args.text else ()
    trained = not args.random_weights
    plan = Plan(args.batches, args.prompts, args.repeats, trained, windows, args.http)
    logs = Path(tempfile.mkdtemp(prefix="moe_fp8_serve-"))
    say(f"logs of the engines: {logs}")
    groups = [wanted[n : n + args.together] for n in range(0, len(wanted), args.together)]
    hardware = next((gpu["name"] for gpu in environment.gpus()), "no GPU")
    name = SERVED[args.engine] + TRAINED * trained
    into = Writer(name, hardware, method(args.together), args.out)
    answers: Answers = {}
    try:
        for group in steps(groups, lambda group: ", ".join(setup.backend for setup in group)):
            for row in measure(group, plan, logs, answers):
                into.add(row, row["subject"])
            for setup in group if plan.clients else ():
                for row in served(setup, plan, logs, into.rows[-1]["engine_version"]):
                    into.add(row, row["subject"])
    finally:  # also if a backend fails or Ctrl-C ends the program
        if rows := into.rows:
            for table in (*timed_tables(rows), served_checks(rows)):
                print(f"\n{table.title}\n\n{table.text()}")
    return EXIT_OK


if __name__ == "__main__":
    run_main(main)
