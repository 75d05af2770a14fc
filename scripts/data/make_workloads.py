"""Make the tensors of the workloads from the committed spec, or compare with the capture.

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
from typing import Any, TypeVar

from scripts.common.command_line import EXIT_FAILED, EXIT_OK, EXIT_USAGE, UsageError, run_main

# isort: split
# After what makes Ctrl-C end quietly while it is imported.
import numpy as np

from scripts.common import files
from scripts.common.definitions import (
    DEFAULT,
    DEFINITIONS,
    RENORMALIZE,
    Entry,
    GemmDefinition,
    MoeDefinition,
    find,
)
from scripts.common.project import ROOT
from scripts.common.text import markdown_table, text_table
from scripts.data.blobs import blob_path, is_foreign, safetensors_bytes
from scripts.data.gemm_workloads import GemmSpec
from scripts.data.routing_numpy import RoutingCounts, count_local
from scripts.data.synthetic_logits import Draw, LogitModel, draw_logits, routing_bias


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
    def axes(self) -> dict[str, int]:
        """What flashinfer-bench's workload says of the definition's variable axis."""
        return {"seq_len": self.seq_len}

    @property
    def blob_path(self) -> Path:
        """Relative to the data set's root."""
        return blob_path(self.definition, self.blob)

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

    def tensors(self) -> list[str]:
        """The names of those in the blob."""
        with_bias = self.definition.routing != RENORMALIZE
        return ["routing_logits", "routing_bias"] if with_bias else ["routing_logits"]

    def scalars(self) -> dict[str, float]:
        """Those that the workload pins."""
        if self.definition.routing == RENORMALIZE:
            return {}
        return {
            "local_expert_offset": self.local_expert_offset,
            "routed_scaling_factor": self.definition.routed_scaling_factor,
        }

    def content(self) -> bytes:
        """The blob, drawn afresh."""
        return blob_bytes(self.draw().logits, self.definition)


Spec = WorkloadSpec | GemmSpec
AnySpec = TypeVar("AnySpec", bound=Spec)


def workloads_path(definition: Entry) -> Path:
    """Of the definition's workloads, below a data set's root."""
    return Path("workloads") / definition.op_type / f"{definition.name}.jsonl"


def spec_path(definition: Entry) -> Path:
    """Of what its workloads' tensors are made of."""
    return Path("workloads") / definition.op_type / f"{definition.name}.spec.json"


WORKLOADS, SPEC = workloads_path(DEFAULT), spec_path(DEFAULT)


def load_specs(path: Path = ROOT / SPEC) -> list[WorkloadSpec]:
    """Of a layer, in the order of the data set."""
    found = load_any_specs(path)
    assert all(isinstance(spec, WorkloadSpec) for spec in found)
    return found  # type: ignore[return-value]


def load_any_specs(path: Path) -> Sequence[Spec]:
    """In the order of the data set."""
    document = json.loads(path.read_text(encoding="utf-8"))
    definition, entries = DEFINITIONS[document["definition"]], document["workloads"]
    if isinstance(definition, GemmDefinition):
        return [GemmSpec.from_json(entry, definition) for entry in entries]
    return [WorkloadSpec.from_json(entry, definition) for entry in entries]


def blob_bytes(logits: np.ndarray, definition: MoeDefinition = DEFAULT) -> bytes:
    """The safetensors file of a layer's workload."""
    if definition.routing == RENORMALIZE:
        return safetensors_bytes({"routing_logits": ("BF16", logits.shape, _bfloat16(logits))})
    bias = routing_bias(definition)
    return safetensors_bytes(
        {
            "routing_logits": ("F32", logits.shape, logits.astype("<f4").tobytes()),
            "routing_bias": ("BF16", bias.shape, _bfloat16(bias)),
        }
    )


def _bfloat16(values: np.ndarray) -> bytes:
    """Of float32 values that bfloat16 holds exactly."""
    return (values.view(np.uint32) >> 16).astype("<u2").tobytes()


def _make_blob(spec: Spec, path: Path) -> str:
    """Make one blob where it is needed; returns what was done."""
    if path.is_file():
        if hashlib.sha256(path.read_bytes()).hexdigest() == spec.sha256:
            return "up to date"
        if is_foreign(path):
            return "kept: not written by this program"
    content = spec.content()
    if (got := hashlib.sha256(content).hexdigest()) != spec.sha256:
        raise RuntimeError(
            f"workload {spec.uuid}: the blob made here has SHA-256 {got}, the spec says "
            f"{spec.sha256}; the generator and the spec are out of step"
        )
    files.write(path, content)
    return "made"


def select(
    specs: Sequence[AnySpec], uuids: Sequence[str] | None, max_tokens: int | None
) -> list[AnySpec]:
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
    definition: Entry = DEFAULT,
) -> list[Path]:
    """Make the blobs of the selected workloads under root; returns their paths, made or kept.

    uuids may be abbreviated. Raises ValueError on an unknown one and RuntimeError where the
    content differs from the spec's.
    """
    selected = select(load_any_specs(ROOT / spec_path(definition)), uuids, max_tokens)
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
            if not isinstance(definition, MoeDefinition):
                raise UsageError("--table: only a layer's workloads are drawn")
            specs = load_specs(ROOT / spec_path(definition))
            print_table(select(specs, args.workload, args.max_tokens), args.markdown)
        else:
            make_workloads(args.root, args.workload, args.max_tokens, not args.quiet, definition)
    except (UsageError, ValueError, RuntimeError, OSError) as error:
        print(f"make_workloads: {error}", file=sys.stderr)
        return EXIT_FAILED if isinstance(error, RuntimeError) else EXIT_USAGE
    return EXIT_OK


if __name__ == "__main__":
    run_main(main)
