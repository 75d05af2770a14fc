"""Atomic writes of files: a full disk or a crash leaves the previous file."""

import contextlib
import json
import os
import re
import uuid
from pathlib import Path
from typing import Any

STREAM = re.compile(r"/dev/(?:fd/)?(stdout|stderr|\d+)")
"""Paths of streams that are already open."""
OPEN = {"stdout": 1, "stderr": 2}
LFS_POINTER = b"version https://git-lfs"
"""The first bytes of the pointer that git-lfs leaves in place of a file that was not fetched."""


def write(path: Path, content: str | bytes) -> None:
    """Write a temporary file next to the path, then rename it. Directories are made. A path that is
    no regular file, such as /dev/stdout, is written to directly. Raises OSError, with nothing left
    behind."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    if (number := STREAM.fullmatch(str(path))) is not None:  # append to the open pipe or file
        descriptor = OPEN.get(number[1]) or int(number[1])
        with os.fdopen(os.dup(descriptor), "wb") as stream:
            stream.write(data)
        return
    target = path.resolve()  # a link stays a link
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(data)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError):
            error.filename = str(path)
        raise


def write_json(path: Path, content: Any) -> None:
    write(path, json.dumps(content, indent=1) + "\n")
