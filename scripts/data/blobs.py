"""The safetensors files of workloads: where they lie, and their bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.common.definitions import Entry

# Marks a blob as ours, so that captured tensors in its place are never overwritten. The specs hold
# hashes of these bytes: the generator's name stays what it was when they were made.
BLOB_METADATA = {"origin": "synthetic", "generator": "scripts/make_workloads.py"}

Content = tuple[str, tuple[int, ...], bytes]
"""Of a tensor: safetensors' name of its type, shape, little-endian data."""


def blob_path(definition: Entry, blob: str) -> Path:
    """Below a data set's root; `blob` is the part of the file's name after the definition's."""
    name = definition.name
    folder = Path("blob") / "workloads" / definition.op_type / name
    return folder / f"{name}_{blob}.safetensors"


def safetensors_bytes(data: Mapping[str, Content]) -> bytes:
    """The file that holds these tensors, in this order.

    Written by hand: its bytes are part of the spec, so they must not follow the version of a
    library. Format: length of the header (8 bytes, little endian), header (JSON), data.
    """
    header: dict[str, Any] = {"__metadata__": BLOB_METADATA}
    end = 0
    for key, (dtype, shape, raw) in data.items():
        header[key] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [end, end + len(raw)],
        }
        end += len(raw)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # keeps the data aligned
    return len(text).to_bytes(8, "little") + text + b"".join(raw for _, _, raw in data.values())


def is_foreign(path: Path) -> bool:
    """Whether path is a well-formed safetensors file that this project did not write, or what
    git-lfs leaves in the place of one."""
    with path.open("rb") as file:
        start = file.read(8)
        if start == b"version ":
            return True
        length = int.from_bytes(start, "little")
        if not 2 <= length <= 1 << 20:
            return False
        try:
            header = json.loads(file.read(length))
            size = max(entry["data_offsets"][1] for key, entry in header.items() if key[0] != "_")
        except (ValueError, TypeError, KeyError, AttributeError):
            return False
    complete = path.stat().st_size == 8 + length + size
    return complete and header.get("__metadata__") != BLOB_METADATA
