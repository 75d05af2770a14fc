"""The schema of run.json.

Anyone may have written the file, or a disk may have filled meanwhile. A file that does not fit is
refused in one line with its name and the place in it. Further fields of a file are left as they
are.
"""

import functools
import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from scripts.common.command_line import UsageError


class Captured(TypedDict, total=False):
    """The fields of environment.capture() that are read."""

    time: str
    gpus: list[dict[str, str | None]]
    cuda: str | None
    versions: dict[str, str]
    source: dict[str, str | bool | None]


class RunInfo(TypedDict, total=False):
    """run.json: no field is required, but each has its type."""

    definition: str
    command: list[str]
    environment: Captured
    timing: str
    solutions: dict[str, str]
    peers: dict[str, bool]
    skipped: dict[str, str]
    earlier: list[dict[str, Any]]


_adapter = functools.cache(TypeAdapter)


def checked(content: Any, shape: Any) -> Any:
    """Return the content as pydantic converts it. Raises ValueError, in one line, with the first
    place that does not fit `shape`, and the reason."""
    try:
        return _adapter(shape).validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise ValueError(f"{where}: {first['msg']}") from None


def read(path: Path, shape: Any) -> Any:
    """Return the file's JSON, checked against `shape`. Raises UsageError."""
    try:
        content = json.loads(path.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no JSON: {error}") from None
    try:
        checked(content, shape)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None
    return content
