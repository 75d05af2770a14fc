"""What the JSON files of a run must look like to be read: run.json, stages.json, gemm*.json, ...

Anyone may have written them, or a disk may have filled while they were: what does not fit is
refused in one line that names the file and the place in it.
"""

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    ConfigDict,
    Discriminator,
    Field,
    FiniteFloat,
    Tag,
    TypeAdapter,
    ValidationError,
)
from typing_extensions import NotRequired, TypedDict

from scripts.common.command_line import UsageError

OPEN = ConfigDict(extra="allow")
Positive = Annotated[FiniteFloat, Field(gt=0)]


class Source(TypedDict, total=False):
    __pydantic_config__ = OPEN  # type: ignore[misc]
    commit: str
    modified: bool | None
    hash: str


class Captured(TypedDict, total=False):
    """environment.capture()."""

    __pydantic_config__ = OPEN  # type: ignore[misc]
    time: str
    platform: str
    gpus: list[dict[str, str | None]]
    cuda: str | None
    versions: dict[str, str]
    source: Source


class RunInfo(TypedDict, total=False):
    """run.json: nothing is needed, but what is there has its type."""

    __pydantic_config__ = OPEN  # type: ignore[misc]
    definition: str
    command: list[str]
    hardware: str
    environment: Captured
    configuration: dict[str, Any]
    timing: str
    dataset: str
    seed: int
    solutions: dict[str, str]
    peers: dict[str, bool]
    skipped: dict[str, str]
    finished: bool
    errors: list[str]
    seconds: float
    ended: str
    gpus_after: list[dict[str, str | None]]
    earlier: list[dict[str, Any]]


class StagesOf(TypedDict):
    __pydantic_config__ = OPEN  # type: ignore[misc]
    median_ms: dict[str, FiniteFloat]


class StagesResult(TypedDict):
    __pydantic_config__ = OPEN  # type: ignore[misc]
    tokens: int
    routing: str
    solutions: dict[str, StagesOf]


class Stages(TypedDict):
    """stages.json."""

    __pydantic_config__ = OPEN  # type: ignore[misc]
    hardware: str
    timing: str
    iterations: int
    results: list[StagesResult]
    environment: NotRequired[Captured]
    solutions: NotRequired[dict[str, str]]


class GemmProblem(TypedDict):
    """What every row of a gemm*.json says of its problem."""

    __pydantic_config__ = OPEN  # type: ignore[misc]
    variant: str
    peer: bool
    n: int
    k: int
    experts: int
    active: int
    pairs: int
    rows: FiniteFloat
    tokens: int | None


class TimedRow(GemmProblem):
    us: Positive
    tflops: FiniteFloat
    gbytes: FiniteFloat
    floor_us: Positive
    percent_of_floor: FiniteFloat
    read_us: NotRequired[Positive]
    vs_best_peer: NotRequired[Positive]
    vs_base: NotRequired[Positive]


class Check(TypedDict, total=False):
    """Tokens that were compared and that differ, or why the check was not tried."""

    __pydantic_config__ = OPEN  # type: ignore[misc]
    compared: Annotated[int, Field(ge=0)]
    differ: Annotated[int, Field(ge=0)]
    largest: FiniteFloat | str
    not_tried: str


class InvarianceOf(TypedDict, total=False):
    __pydantic_config__ = OPEN  # type: ignore[misc]
    checks: dict[str, Check]
    error: str


class Invariance(TypedDict):
    """invariance.json."""

    __pydantic_config__ = OPEN  # type: ignore[misc]
    hardware: str
    tokens: int
    solutions: dict[str, str]
    results: dict[str, InvarianceOf]


def _kind(row: Any) -> str:
    return "timed" if isinstance(row, dict) and "us" in row else "failed"


GemmRow = Annotated[
    Annotated[TimedRow, Tag("timed")] | Annotated[GemmProblem, Tag("failed")],
    Discriminator(_kind),
]


class Rates(TypedDict):
    __pydantic_config__ = OPEN  # type: ignore[misc]
    copy_bytes_per_s: Positive
    read_bytes_per_s: Positive
    fp8_flops_per_s: Positive


class Gemm(TypedDict):
    """gemm*.json."""

    __pydantic_config__ = OPEN  # type: ignore[misc]
    hardware: str
    method: str
    floors: Rates
    environment: Captured
    results: list[GemmRow]
    solutions: NotRequired[dict[str, str]]


def read(path: Path, shape: Any) -> Any:
    """The file's JSON, of the given shape; UsageError otherwise."""
    try:
        content = json.loads(path.read_bytes().decode("utf-8"))
        TypeAdapter(shape).validate_python(content)
        return content
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the whole"
        raise UsageError(f"{path}: {place}: {first['msg']}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no JSON: {error}") from None
