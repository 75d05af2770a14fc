"""What the JSON of a run must look like to be read: traces, run.json, stages.json, gemm*.json, ...

Anyone may have written them, or a disk may have filled while they were: what does not fit is
refused in one line that names the file and the place in it. What a file holds beyond these fields
stays as it is.
"""

import functools
import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError
from typing_extensions import NotRequired, TypedDict

from scripts.common.command_line import UsageError

STAGES = ("routing", "gemm1", "swiglu_quant", "gemm2", "combine")
TOTAL = "end to end"
"""Of a call, as stages.json names them."""
Positive = Annotated[FiniteFloat, Field(gt=0)]


class Captured(TypedDict, total=False):
    """What is read of environment.capture()."""

    time: str
    gpus: list[dict[str, str | None]]
    cuda: str | None
    versions: dict[str, str]
    source: dict[str, str | bool | None]


class RunInfo(TypedDict, total=False):
    """run.json: nothing is needed, but what is there has its type."""

    definition: str
    command: list[str]
    environment: Captured
    timing: str
    solutions: dict[str, str]
    peers: dict[str, bool]
    skipped: dict[str, str]
    earlier: list[dict[str, Any]]


class Launch(TypedDict):
    """What the emulator counts in a launch, and the least that its work needs where that is
    known."""

    kernel: str
    warps: Positive
    instructions: FiniteFloat
    tma_loaded: FiniteFloat
    tma_stored: FiniteFloat
    loaded: FiniteFloat
    stored: FiniteFloat
    shared: FiniteFloat
    mma_flops: FiniteFloat
    hazards: FiniteFloat
    least_bytes: NotRequired[FiniteFloat]
    least_flops: NotRequired[FiniteFloat]


class StagesOf(TypedDict):
    median_ms: dict[str, FiniteFloat]


class StagesResult(TypedDict):
    tokens: int
    routing: str
    solutions: dict[str, StagesOf]


class Stages(TypedDict):
    """stages.json."""

    hardware: str
    timing: str
    iterations: int
    results: list[StagesResult]
    environment: NotRequired[Captured]
    solutions: NotRequired[dict[str, str]]


class GemmRow(TypedDict):
    """A problem and, where a variant ran, its figures."""

    variant: str
    peer: bool
    n: int
    k: int
    experts: int
    active: int
    pairs: int
    rows: FiniteFloat
    tokens: int | None
    us: NotRequired[Positive]
    tflops: NotRequired[FiniteFloat]
    gbytes: NotRequired[FiniteFloat]
    floor_us: NotRequired[Positive]
    percent_of_floor: NotRequired[FiniteFloat]
    read_us: NotRequired[Positive]
    vs_best_peer: NotRequired[Positive]


class Check(TypedDict, total=False):
    """Tokens that were compared and that differ, or why the check was not tried."""

    compared: Annotated[int, Field(ge=0)]
    differ: Annotated[int, Field(ge=0)]
    largest: FiniteFloat | str
    not_tried: str


class InvarianceOf(TypedDict, total=False):
    checks: dict[str, Check]
    error: str


class Invariance(TypedDict):
    """invariance.json."""

    hardware: str
    tokens: int
    solutions: dict[str, str]
    results: dict[str, InvarianceOf]


class Rates(TypedDict):
    copy_bytes_per_s: Positive
    read_bytes_per_s: Positive
    fp8_flops_per_s: Positive


class FloorWorkload(TypedDict):
    """What the least time of a workload follows from."""

    uuid: str
    tokens: int
    hit: int
    active: int
    pairs: int
    read_ms: NotRequired[FiniteFloat]


class Floors(TypedDict):
    """floors.json."""

    hardware: NotRequired[str]
    floors: Rates
    workloads: list[FloorWorkload]


class Gemm(TypedDict):
    """gemm*.json."""

    hardware: str
    method: str
    floors: Rates
    environment: Captured
    results: list[GemmRow]
    solutions: NotRequired[dict[str, str]]


class SweepTimes(TypedDict):
    ms: Positive
    p10: NotRequired[Positive]
    p90: NotRequired[Positive]
    calls: NotRequired[int]
    method: NotRequired[str]


class SweepOf(TypedDict, total=False):
    """Of a call on a number of tokens: times by both clocks, or why there are none."""

    calc_diff: FiniteFloat
    device: SweepTimes
    harness: SweepTimes
    error: str


class SweepResult(TypedDict):
    definition: NotRequired[str]
    tokens: int
    hit: int
    active: int
    pairs: int
    routing: str
    floor_ms: Annotated[FiniteFloat, Field(ge=0)]
    solutions: dict[str, SweepOf]


class Sweep(TypedDict):
    """sweep*.json."""

    hardware: str
    form: str
    method: str
    repeats: int
    seed: int
    environment: Captured
    floors: Rates
    solutions: dict[str, str]
    peers: dict[str, bool]
    skipped: dict[str, str]
    results: list[SweepResult]


class ServedRow(TypedDict):
    """A figure of a backend; `size` and `value` are what the kind of figure has."""

    engine: str
    engine_version: str
    model: str
    layers: int
    gpus: int
    parallel: str
    backend: str
    what: str
    size: int | None
    value: bool | FiniteFloat
    unit: str
    spread: NotRequired[FiniteFloat]
    repeats: NotRequired[int]


class Served(TypedDict):
    """served.json."""

    hardware: str
    method: str
    environment: Captured
    rows: list[ServedRow]


_adapter = functools.cache(TypeAdapter)


def checked(content: Any, shape: Any) -> Any:
    """What pydantic makes of the content; ValueError with the first place where it has not this
    shape, and why, in one line."""
    try:
        return _adapter(shape).validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise ValueError(f"{where}: {first['msg']}") from None


def read(path: Path, shape: Any) -> Any:
    """The file's JSON, of the given shape; UsageError otherwise."""
    try:
        content = json.loads(path.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no JSON: {error}") from None
    try:
        checked(content, shape)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None
    return content
