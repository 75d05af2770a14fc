"""The part of `serve` that runs in an engine's processes: requests of the parent, a plugin that
checks and counts, times of CUDA graphs, and random weights.

The parent asks a `Measuring` for one repeat at a time, so that backends can take turns. The plugin
is loaded by every process of the engine.
"""

import contextlib
import functools
import math
import os
import statistics
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from scripts.serving.engines import (
    CHECK_TOKENS,
    DIRECTORY,
    MIXED_PROMPT,
    MIXED_TOKENS,
    RANDOM,
    Engine,
    Generated,
    Read,
    Setup,
    prompts,
    start,
)

DECODE_PROMPT = 96
MOST_STEPS, LEAST_STEPS, STEPS_OF_ALL = 128, 32, 4096
"""Decode steps: as many as make STEPS_OF_ALL tokens of all requests together, within bounds. The
times of two prefills differ by more than the time of a short step. Many steps divide that error."""
GRAPH_STEPS = 32
"""Decode steps whose CUDA graph is timed."""
COMPARED_PROMPTS, COMPARED_TOKENS = (5, 64, 333, 1500), 32
OTHERS = 64
"""Requests in whose batch one request must get the tokens that it gets alone."""


# --- requests -------------------------------------------------------------------------------------


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

    def check(self, tokens: int) -> None:
        """Run the prompt of so many tokens, whose calls the plugin compares."""
        self.engine.generate(prompts(self.vocabulary, (tokens,), 2), 1)

    def compared(self, windows: list[list[int]]) -> list[Generated]:
        """Return tokens and their log-probabilities, to compare with another backend's: after the
        first half of each window of a text, or after random tokens."""
        halves = [window[: len(window) // 2] for window in windows]
        drawn = halves or prompts(self.vocabulary, COMPARED_PROMPTS, 1)
        return self.engine.generate(drawn, COMPARED_TOKENS, logprobs=True)

    def read(self, windows: list[list[int]]) -> list[Read]:
        return self.engine.read(windows)

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


# --- plugin ---------------------------------------------------------------------------------------

CALLERS = ("api", "serving.sglang", "serving.vllm_experts")
"""Modules of `moe_fp8` that import `experts`."""


def report(what: str, line: float) -> None:
    """Write a line for `serve` to a file of the calling process: the ranks of several GPUs can be
    forks of the process that called `watch`."""
    with (Path(os.environ[DIRECTORY]) / f"{what}-{os.getpid()}.txt").open("a") as lines:
        lines.write(f"{line}\n")


def register_vllm() -> None:
    watch("vllm")
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    BaseModelLoader.load_model = weighing(BaseModelLoader.load_model)
    if os.environ.get(RANDOM):
        from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

        DummyModelLoader.load_weights = lambda self, model, config: fill_model(model)


def register_sglang() -> None:
    watch("sglang")
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.model_runner import ModelRunner

    ModelRunner.load_model = weighing(ModelRunner.load_model)
    # Methods for `Engine.collective_rpc`, which returns nothing.
    Scheduler.time_graphs = TimesGraphs.time_graphs
    Scheduler.report_graph_times = report_graph_times
    if os.environ.get(RANDOM):
        from sglang.srt.model_loader import loader

        loader.initialize_dummy_weights = fill_model


def report_graph_times(scheduler: Any) -> None:
    """Report the times of the replays of a scheduler of SGLang, and end the timing."""
    for milliseconds in TimesGraphs.graph_times(scheduler):
        report("graphs", milliseconds)


def weighing(load: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of an engine that loads a model, and reports the GiB of tensors on the GPU:
    the most while it ran, and those that it left. An engine may register a plugin several times."""
    if hasattr(load, "__wrapped__"):
        return load

    @functools.wraps(load)
    def weighed(*arguments: Any, **named: Any) -> Any:
        if not torch.cuda.is_available():
            return load(*arguments, **named)
        torch.cuda.reset_peak_memory_stats()
        result = load(*arguments, **named)
        report("loading", torch.cuda.max_memory_allocated() / 2**30)
        report("loaded", torch.cuda.memory_allocated() / 2**30)
        return result

    return weighed


def fill_model(model: Any) -> None:
    fill(model.named_parameters())


@functools.cache  # an engine may register a plugin several times
def watch(engine: str) -> None:
    """Compare the layers' calls of all callers with the reference, and count our compilations."""
    from moe_fp8 import api

    checked = checking(api.experts, CHECK_TOKENS[engine], functools.partial(report, "layers"))
    for name in CALLERS:
        if module := sys.modules.get(f"moe_fp8.{name}"):
            vars(module)["experts"] = checked
    count()


def count() -> None:
    """Report every compilation, by this process and by those that `prepare` starts. The cache on
    disk tells less: it may be off, and other programs add and remove kernels."""
    from moe_fp8.serving import prepare

    compile_all, in_processes = prepare.compile_all, prepare.in_processes

    @functools.cache
    def count_here() -> None:
        from moe_fp8.kernels import compile as compiling

        fakes = compiling.fakes

        def counting_fakes(arguments: Any) -> Any:  # called once by every compilation
            report("kernels", 1)
            return fakes(arguments)

        compiling.fakes = counting_fakes

    def counting_compile_all(geometries: Any) -> int:
        count_here()  # not before: the compiler may initialise CUDA, and engines fork
        return compile_all(geometries)

    def counting_in_processes(geometries: Any) -> None:
        in_processes(geometries)
        report("kernels", len(geometries) - len(prepare.missing(geometries)))

    prepare.compile_all = counting_compile_all
    prepare.in_processes = counting_in_processes


Experts = Callable[..., torch.Tensor]


def checking(experts: Experts, tokens: int, report: Callable[[float], None]) -> Experts:
    """Return `experts` that compares each layer's first call of so many tokens, on the engine's
    activations, with float32 arithmetic, and reports the calc_diff."""
    # Not before the engine has begun: these import the package.
    from moe_fp8.mxfp4 import PackedWeights, unpack
    from moe_fp8.reference import calc_diff

    from scripts.measuring.accuracy import in_float32

    def in_fp8(weights: Any, scale: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Unpack the experts one by one: the intermediate values take 20 times the bytes."""
        if not isinstance(weights, PackedWeights):
            return weights, scale
        blocks, scale, gated = weights
        one_by_one = zip(blocks.split(1), scale.split(1), strict=True)
        return torch.cat([unpack(PackedWeights(*one, gated)) for one in one_by_one]), scale

    seen = set()

    @functools.wraps(experts)
    def checked(
        ids: Any, weights: Any, x: Any, w13: Any, w13_scale: Any, w2: Any, w2_scale: Any,
        **options: Any,
    ) -> Any:  # fmt: skip
        out = experts(ids, weights, x, w13, w13_scale, w2, w2_scale, **options)
        address = getattr(w13, "blocks", w13).data_ptr()
        if len(x) == tokens and address not in seen:
            seen.add(address)
            fp8 = *in_fp8(w13, w13_scale), *in_fp8(w2, w2_scale)
            report(calc_diff(out, in_float32(ids, weights, x, *fp8, **options)))
        return out

    return checked


# --- times of CUDA graphs -------------------------------------------------------------------------

CYCLES_AHEAD = 2_000_000
"""The GPU waits about 1 ms before a graph, so that the host has launched it completely."""


@contextlib.contextmanager
def timed(steps: int) -> Iterator[Callable[[], list[float]]]:
    """Yield a function that returns the ms of each replay of the one CUDA graph that this process
    replayed at least `steps` times within the context; empty if there is none or several: then a
    step is more than one graph."""
    replay = torch.cuda.CUDAGraph.replay
    events: dict[torch.cuda.CUDAGraph, list[tuple[torch.cuda.Event, torch.cuda.Event]]]
    events = defaultdict(list)

    def timed_replay(graph: torch.cuda.CUDAGraph) -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(CYCLES_AHEAD)
        start.record()
        replay(graph)
        end.record()
        events[graph].append((start, end))

    def milliseconds() -> list[float]:
        often = [replays for replays in events.values() if len(replays) >= steps]
        if len(often) != 1:
            return []
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in often[0]]

    with mock.patch.object(torch.cuda.CUDAGraph, "replay", timed_replay):
        yield milliseconds


class TimesGraphs:
    """Methods that the processes of an engine, one a GPU, get in addition."""

    def time_graphs(self, steps: int) -> None:
        """Begin to time replays."""
        self.graphs_are_timed = contextlib.ExitStack()
        self.graph_milliseconds = self.graphs_are_timed.enter_context(timed(steps))

    def graph_times(self) -> list[float]:
        """Return the times, and end the timing."""
        with self.graphs_are_timed:
            return self.graph_milliseconds()


# --- random weights -------------------------------------------------------------------------------

FP8_SPREAD = 96.0
"""Standard deviation of FP8 values, whose largest is 448. The block scales undo it."""
DOWN = 3.0
"""Factor of the experts' down projection, so that their output is a large part of a layer's."""
CHUNK = 2**27
"""Values that are drawn at once."""


MXFP4_SPREAD, EXPONENTS = 10.2, 3
"""Standard deviation of MXFP4 values with random codes, each code as often, and exponents of -3 to
3, each as often."""


@torch.no_grad()
def fill(parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write the parameters of a model, by name."""
    rest = {name: parameter.data for name, parameter in parameters}
    for name in [*rest]:
        base = name.removesuffix("_packed")
        scale = next((s for s in (f"{base}_scale", f"{base}_scale_inv") if s in rest), "")
        if scale and rest[name].dtype in (torch.uint8, torch.int8):
            fill_mxfp4(name, rest.pop(name), rest.pop(scale))
    for name, p in rest.items():
        fill_one(name, p)


def generator_of(name: str, p: torch.Tensor) -> torch.Generator:
    return torch.Generator(p.device).manual_seed(zlib.crc32(name.encode()))


def fill_mxfp4(name: str, values: torch.Tensor, scale: torch.Tensor) -> None:
    """Write MXFP4 weights with the spread of others: bytes of two values, and a power of two for 32
    of them, as exponents or, in SGLang, as numbers."""
    generator = generator_of(name, values)
    values.view(torch.uint8).random_(0, 256, generator=generator)
    spread = (DOWN if ".w2_" in name else 1.0) * (2 * values.shape[-1]) ** -0.5
    middle = round(math.log2(spread / MXFP4_SPREAD))
    exponents = torch.randint(
        middle - EXPONENTS, middle + EXPONENTS + 1, scale.shape, generator=generator,
        device=scale.device,
    )  # fmt: skip
    if scale.dtype is torch.float32:
        scale.copy_(torch.ldexp(torch.ones_like(scale), exponents))
    else:
        scale.view(torch.uint8).copy_(exponents + 127)


def fill_one(name: str, p: torch.Tensor) -> None:
    """Write one parameter. Unit spread of a projection's outputs: standard deviation 1 /
    sqrt(K)."""
    generator = generator_of(name, p)
    leaf = name.rpartition(".")[2]
    if p.numel() == 1 or not p.is_floating_point():
        return  # leave scales of attention's FP8, and parameters other than weights, to the engine
    if p.dtype == torch.float8_e4m3fn:
        for part in p.view(-1).split(CHUNK):
            values = torch.randn(len(part), generator=generator, device=p.device)
            part.copy_((values * FP8_SPREAD).clamp_(-448, 448))
    elif "scale" in leaf:
        output_factor = DOWN if leaf.startswith("w2_") else 1.0
        spread = (128 * p.shape[-1]) ** -0.5 / FP8_SPREAD * output_factor
        p.uniform_(0.5 * spread, 1.5 * spread, generator=generator)
    elif leaf == "e_score_correction_bias":
        p.uniform_(0, 0.1, generator=generator)
    elif p.dim() == 1:
        p.fill_(1.0 if "norm" in name else 0.0)
    else:
        # Spread the logits, so that rounding does not decide the best token.
        spread = 0.5 if "embed_tokens" in name else p.shape[-1] ** -0.5
        spread *= 3 if "lm_head" in name else 1
        p.copy_(torch.randn(p.shape, generator=generator, device=p.device) * spread)
