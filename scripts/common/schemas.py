"""What run.json must look like to be read.

Anyone may have written it, or a disk may have filled while it was: what does not fit is refused in
one line that names the file and the place in it. What a file holds beyond these fields stays as it
is.
"""

import functools
import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from scripts.common.command_line import UsageError

TOTAL = "end to end"
"""The part of a call that is the whole of it, as rows name it."""


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
