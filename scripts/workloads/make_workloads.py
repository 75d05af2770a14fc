"""Make the routing blobs of the workloads from the committed spec, or compare with the capture.

    python3 run.py make_workloads                    make all blobs under the repository root
    python3 run.py make_workloads --definition kimi_k2   those of another definition
    python3 run.py make_workloads --max-tokens 100   only those of small workloads
    python3 run.py make_workloads --table            captured against synthesised, made afresh

A blob that already has the content of the spec is left alone, and so is one that this program did
not write (the captured tensors of the official data set, for instance).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scripts.common import files
from scripts.common.command_line import UsageError
from scripts.common.definitions import DEFAULT, DEFINITIONS, RENORMALIZE, MoeDefinition, find
from scripts.common.project import OP_TYPE, ROOT
from scripts.common.text import markdown_table, text_table
from scripts.workloads.routing_numpy import RoutingCounts, count_local
from scripts.workloads.synthetic_logits import Draw, LogitModel, draw_logits, routing_bias

BLOBS = Path("blob") / "workloads" / OP_TYPE

# Marks a blob as ours, so that captured tensors in its place are never overwritten. The spec holds
# hashes of these bytes: the generator's name stays what it was when they were made.
BLOB_METADATA = {"origin": "synthetic", "generator": "scripts/make_workloads.py"}


@dataclass(frozen=True)
class WorkloadSpec:
    """One workload: what is known of the captured one, and the draw that stands in for it."""

    uuid: str
    seq_len: int
    local_expert_offset: int
    blob: str  # the part of the blob's file name after the definition's
    captured: dict[str, int | None]  # pairs, hit, active, max (None: not known, or not captured)
    model: LogitModel
    counts: RoutingCounts
    redrawn: int
    sha256: str  # of the blob
    definition: MoeDefinition = DEFAULT  # named once in the spec file, not here

    @property
    def blob_path(self) -> Path:
        """Relative to the data set's root."""
        name = self.definition.name
        return BLOBS / name / f"{name}_{self.blob}.safetensors"

    @classmethod
    def from_json(cls, entry: dict[str, Any], definition: MoeDefinition) -> WorkloadSpec:
        return cls(
            **{
                **entry,
                "model": LogitModel(**entry["model"]),
                "counts": RoutingCounts(**entry["counts"]),
                "definition": definition,
            }
        )

    def to_json(self) -> dict[str, Any]:
        entry = asdict(self)
        del entry["definition"]
        return entry

    def draw(self) -> Draw:
        return draw_logits(self.model, self.seq_len, self.local_expert_offset, self.definition)


def workloads_path(definition: MoeDefinition) -> Path:
    """Of the definition's workloads, below a data set's root."""
    return Path("workloads") / OP_TYPE / f"{definition.name}.jsonl"


def spec_path(definition: MoeDefinition) -> Path:
    """Of what its workloads' tensors are made of."""
    return Path("workloads") / OP_TYPE / f"{definition.name}.spec.json"


WORKLOADS, SPEC = workloads_path(DEFAULT), spec_path(DEFAULT)


def load_specs(path: Path = ROOT / SPEC) -> list[WorkloadSpec]:
    """In the order of the data set."""
    document = json.loads(path.read_text(encoding="utf-8"))
    definition = DEFINITIONS[document["definition"]]
    return [WorkloadSpec.from_json(entry, definition) for entry in document["workloads"]]


def blob_bytes(logits: np.ndarray, definition: MoeDefinition = DEFAULT) -> bytes:
    """The safetensors file of one workload.

    Written by hand: its bytes are part of the spec, so they must not follow the version of a
    library. Format: length of the header (8 bytes, little endian), header (JSON), data.
    """
    if definition.routing == RENORMALIZE:
        data = {"routing_logits": ("BF16", logits.shape, _bfloat16(logits))}
    else:
        bias = routing_bias(definition)
        data = {
            "routing_logits": ("F32", logits.shape, logits.astype("<f4").tobytes()),
            "routing_bias": ("BF16", bias.shape, _bfloat16(bias)),
        }
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


def _bfloat16(values: np.ndarray) -> bytes:
    """Of float32 values that bfloat16 holds exactly."""
    return (values.view(np.uint32) >> 16).astype("<u2").tobytes()


def is_foreign(path: Path) -> bool:
    """Whether path is a well-formed safetensors file that this program did not write."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= 1 << 20:
            return False
        try:
            header = json.loads(file.read(length))
            size = max(entry["data_offsets"][1] for key, entry in header.items() if key[0] != "_")
        except (ValueError, TypeError, KeyError, AttributeError):
            return False
    complete = path.stat().st_size == 8 + length + size
    return complete and header.get("__metadata__") != BLOB_METADATA


def _make_blob(spec: WorkloadSpec, path: Path) -> str:
    """Make one blob where it is needed; returns what was done."""
    if path.is_file():
        if hashlib.sha256(path.read_bytes()).hexdigest() == spec.sha256:
            return "up to date"
        if is_foreign(path):
            return "kept: not written by this program"
    content = blob_bytes(spec.draw().logits, spec.definition)
    if (got := hashlib.sha256(content).hexdigest()) != spec.sha256:
        raise RuntimeError(
            f"workload {spec.uuid}: the blob made here has SHA-256 {got}, the spec says "
            f"{spec.sha256}; the generator and the spec are out of step"
        )
    files.write(path, content)
    return "made"


def select(
    specs: Sequence[WorkloadSpec], uuids: Sequence[str] | None, max_tokens: int | None
) -> list[WorkloadSpec]:
    """Those whose uuid starts with one of uuids and that have at most max_tokens tokens."""
    for prefix in uuids or ():
        if not any(spec.uuid.startswith(prefix) for spec in specs):
            raise ValueError(f"workload {prefix!r}: no uuid of the spec starts with it")
    return [
        spec
        for spec in specs
        if (uuids is None or spec.uuid.startswith(tuple(uuids)))
        and (max_tokens is None or spec.seq_len <= max_tokens)
    ]


def make_workloads(
    root: Path,
    uuids: Sequence[str] | None = None,
    max_tokens: int | None = None,
    progress: bool = True,
    definition: MoeDefinition = DEFAULT,
) -> list[Path]:
    """Make the blobs of the selected workloads under root; returns their paths, made or kept.

    uuids may be abbreviated. Raises ValueError on an unknown one and RuntimeError where the
    content differs from the spec's.
    """
    selected = select(load_specs(ROOT / spec_path(definition)), uuids, max_tokens)
    paths = []
    for number, spec in enumerate(selected, 1):
        path = Path(root) / spec.blob_path
        start = time.perf_counter()
        done = _make_blob(spec, path)
        if progress:
            print(
                f"[{number:2}/{len(selected)}] {spec.uuid[:8]}  {spec.seq_len:6} tokens  {done}"
                f"  ({time.perf_counter() - start:.1f} s)",
                file=sys.stderr,
                flush=True,
            )
        paths.append(path)
    return paths


TABLE_COLUMNS = ("pairs", "hit", "active", "max")


def table_rows(specs: Sequence[WorkloadSpec]) -> Iterator[list[str]]:
    """Captured / ours for every workload, ours counted in logits made afresh."""
    yield [
        *("uuid", "T", "offset"),
        *(f"{column} captured / ours" for column in TABLE_COLUMNS),
        *("mean", "std", "smallest margin", "rows redrawn"),
    ]
    for spec in specs:
        draw = spec.draw()
        counts = asdict(count_local(draw.ids, spec.local_expert_offset, spec.definition))
        logits = draw.logits.astype(np.float64)
        yield [
            *(spec.uuid[:8], str(spec.seq_len), str(spec.local_expert_offset)),
            *(
                f"{'?' if spec.captured[c] is None else spec.captured[c]} / {counts[c]}"
                for c in TABLE_COLUMNS
            ),
            *(f"{logits.mean():.4f}", f"{logits.std():.4f}", f"{draw.margin:.2e}"),
            str(draw.redrawn),
        ]


def print_table(specs: Sequence[WorkloadSpec], markdown: bool) -> None:
    header, *rows = table_rows(specs)
    print((markdown_table if markdown else text_table)(header, rows, left=0))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="data set root")
    parser.add_argument("--definition", default=DEFAULT.name, metavar="NAME", help="of which")
    parser.add_argument("--workload", nargs="+", metavar="UUID", help="only these (or prefixes)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="only up to N tokens")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    parser.add_argument("--table", action="store_true", help="compare instead of making files")
    parser.add_argument("--markdown", action="store_true", help="the table in Markdown")
    args = parser.parse_args(argv)

    try:
        definition = find(args.definition)
        if args.table or args.markdown:
            specs = load_specs(ROOT / spec_path(definition))
            print_table(select(specs, args.workload, args.max_tokens), args.markdown)
        else:
            make_workloads(args.root, args.workload, args.max_tokens, not args.quiet, definition)
    except (UsageError, ValueError, RuntimeError, OSError) as error:
        print(f"make_workloads: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
