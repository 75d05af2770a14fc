"""Measurements of several backends: started together if memory allows, and timed in turns."""

import contextlib
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.common.command_line import Failure, note, say
from scripts.common.float32_experts import LARGEST_DIFF
from scripts.serve import inside
from scripts.serve.engines import OWN, Generated, Setup
from scripts.serve.worker import MIXED_REQUESTS, Backend

MOST_FIRST_STARTS = 3
COMPILED = "Cache the graph of compile range"
"""vLLM's message about a graph that it did not find on disk."""
COMPILED_LATE = "compilation during inference"
"""The message of vLLM's monitor about a kernel that a request had to wait for."""


@dataclass(frozen=True)
class Plan:
    """The quantities to measure, and the number of repeats."""

    batches: tuple[int, ...]
    prompts: tuple[int, ...]
    repeats: int
    compare_tokens: bool = False  # for trained weights

    @property
    def figures(self) -> list[tuple[str, int, str]]:
        """(method of `Measuring`, size, unit) of each quantity."""
        return [
            *(("decode", batch, "ms a step") for batch in self.batches),
            *(("graph", batch, "ms a step") for batch in self.batches),
            *(("prefill", tokens, "ms") for tokens in self.prompts),
            ("mixed", min(MIXED_REQUESTS, max(self.batches)), "tokens/s"),
        ]


Row = dict[str, Any]
Answers = dict[str, list[Generated]]
"""Each backend's tokens for the compared prompts, in the order in which the backends ran."""


def first_starts(setup: Setup, logs: Path) -> Iterator[Row]:
    """Start a backend and end it, until it finds all its compiled graphs on disk: an engine that
    compiles its model has a slower host for as long as it runs (DeepSeek-V3's sizes in vLLM 0.33,
    batch 1: 2.64 ms a step, later 1.89). vLLM's second start looks for the first one's graphs under
    another name, and compiles once more. Raises Failure."""
    for number in range(MOST_FIRST_STARTS):
        backend = Backend(setup, logs, f"-first-{number}")
        try:
            backend.ready()
            yield row_of(backend, "first start", None, round(backend.start_seconds, 1), "s")
        finally:
            backend.close()
        if not backend.log_lines(COMPILED):
            return


def measure(setups: Sequence[Setup], plan: Plan, logs: Path, answers: Answers) -> Iterator[Row]:
    """Yield the rows of backends that share the GPU, as they come. Earlier backends have left their
    `answers`. Raises Failure."""
    with contextlib.ExitStack() as stack:
        backends = []
        for setup in setups:
            note(f"starts {setup.backend}")
            backends.append(Backend(setup, logs))
            stack.callback(backends[-1].close)
        for backend in backends:
            backend.ready()
            slower = ", compiled: its host is slower" if backend.log_lines(COMPILED) else ""
            note(f"{backend.setup.backend} is up after {backend.start_seconds:.0f} s{slower}")
        at_start = [inside.compilations(backend.directory) for backend in backends]
        for backend in backends:
            yield from check(backend)
        yield from timed(backends, plan)
        for backend in backends if plan.compare_tokens else ():
            answers[backend.setup.backend] = backend.ask("compared")
            yield from compared(backend, answers)
        for backend, compiled in zip(backends, at_start, strict=True):
            yield from counted(backend, compiled)


def row_of(backend: Backend, what: str, size: Any, value: Any, unit: str, **more: Any) -> Row:
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
    if backend.setup.backend in OWN and not backend.log_lines("moe_fp8 serves"):
        why = backend.log_lines("moe_fp8") or ["the log does not name moe_fp8"]
        raise Failure(f"{backend.setup.backend}: nothing is served: {why[-1]}")
    yield row_of(backend, "start", None, round(backend.start_seconds, 1), "s")
    backend.ask("check")
    layers = inside.layers_of(backend.directory)
    if backend.setup.backend in OWN and not any(layers):
        raise Failure(f"{backend.setup.backend}: no call of {inside.CHECK_TOKENS} tokens was seen")
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


def timed(backends: Sequence[Backend], plan: Plan) -> Iterator[Row]:
    """Yield medians over the repeats of all backends in turn. The first repeat is a warm-up. A
    quantity that is NaN in any repeat of a backend has no row."""
    for what, size, unit in plan.figures:
        values: dict[str, list[float]] = {backend.setup.backend: [] for backend in backends}
        for repeat in range(plan.repeats + 1):
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
        late = inside.compilations(backend.directory) - at_start
        yield row_of(backend, "our kernels compiled at start", None, at_start, "")
        yield row_of(backend, "our kernels compiled later", None, late, "")
    late_lines = [line for line in backend.log_lines(COMPILED_LATE) if "FusedMoe" in line]
    yield row_of(backend, "of ours, by the engine's monitor", None, len(late_lines), "")


def compared(backend: Backend, answers: Answers) -> Iterator[Row]:
    """Yield the agreement of tokens and log-probabilities with those of the first backend."""
    first, *_ = answers
    if first == backend.setup.backend:
        return
    same, differences = 0, [0.0]
    pairs = list(zip(answers[backend.setup.backend], answers[first], strict=True))
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
