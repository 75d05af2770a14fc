"""The HTTP server of vLLM or SGLang with the options of the offline engine, and clients of it.

The server gets token ids and streams token ids: it needs no tokenizer.
"""

import contextlib
import http.client
import json
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from scripts.serving.engines import Setup, engine_options, prompts

PATH = {"vllm": "/inference/v1/generate", "sglang": "/generate"}
SECONDS = 600
"""A client waits at most so long for a line of its answer."""


class Load(NamedTuple):
    """The figures of clients that send a request each, at once."""

    first_ms: float  # to the first token, median of the clients
    token_ms: float  # from the first token to the last, a token, median of the clients
    tokens_per_s: float  # read and written, of all clients


def command(setup: Setup, port: int) -> list[str]:
    """Return the command that starts the server."""
    model, options = str(setup.model.directory), {"port": port, **engine_options(setup)}
    if setup.engine == "vllm":  # as the command `vllm serve`
        start = ["vllm.entrypoints.cli.main", "serve", model, "--tokens-only"]
    else:
        start = ["sglang.launch_server", "--model-path", model]
    return [sys.executable, "-m", *start, *flags(options, negated=setup.engine == "vllm")]


def flags(options: dict[str, Any], negated: bool) -> list[str]:
    """Return an engine's keyword arguments as options of its server.

    Args:
        negated: False is `--no-NAME`, otherwise it is left out.
    """
    words = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if value is False:
            words += [f"--no-{flag}"] * negated
            continue
        words.append(f"--{flag}")
        if isinstance(value, list):
            words += map(str, value)
        elif value is not True:
            words.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return words


def is_up(port: int) -> bool:
    """True if the server answers that it can take requests."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    return False


def load(setup: Setup, port: int, clients: int, reads: int, writes: int, seed: int) -> Load:
    """Let clients that begin together send a prompt of `reads` random tokens each and take `writes`
    tokens. Raises RuntimeError: a request failed."""
    vocabulary = setup.model.vocabulary
    drawn = prompts(vocabulary, clients * (reads,), seed)
    bodies = [json.dumps(request(setup.engine, prompt, writes)).encode() for prompt in drawn]
    together = threading.Barrier(clients)

    def client(body: bytes) -> tuple[float, float, float]:
        together.wait()
        return answered(PATH[setup.engine], port, body)

    with ThreadPoolExecutor(clients) as pool:
        times = list(pool.map(client, bodies))
    seconds = max(last for _, _, last in times) - min(begin for begin, _, _ in times)
    return Load(
        1e3 * statistics.median(first - begin for begin, first, _ in times),
        1e3 * statistics.median((last - first) / (writes - 1) for _, first, last in times),
        clients * (reads + writes) / seconds,
    )


def request(engine: str, prompt: list[int], tokens: int) -> dict[str, Any]:
    sampling = {"temperature": 0.0, "ignore_eos": True}
    if engine == "vllm":
        sampling["max_tokens"] = tokens
        return {"token_ids": prompt, "sampling_params": sampling, "stream": True}
    sampling["max_new_tokens"] = tokens
    return {"input_ids": prompt, "sampling_params": sampling, "stream": True}


def answered(path: str, port: int, body: bytes) -> tuple[float, float, float]:
    """Send a request. Return when it was sent, and when its first and its last event came."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    begin = time.perf_counter()
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"{path}: status {response.status}: {response.read(300)!r}")
    events = []
    for line in response:
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            if b'"error"' in line:
                raise RuntimeError(f"{path}: {line[:300]!r}")
            events.append(time.perf_counter())
    if len(events) < 2:
        raise RuntimeError(f"{path}: {len(events)} events")
    return begin, events[0], events[-1]
