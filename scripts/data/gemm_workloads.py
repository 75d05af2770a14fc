"""The workloads of the grouped GEMMs: an expert's rows are those that it has in a layer's workload.

A workload pins what says where the rows lie, and nothing else: activations, weights and scales are
random.
"""

from __future__ import annotations

import hashlib
import itertools
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scripts.common.definitions import DEFAULT, MASKED, GemmDefinition
from scripts.data.blobs import Content, blob_path, safetensors_bytes

if TYPE_CHECKING:
    from scripts.data.make_workloads import WorkloadSpec

TILE_ROWS = 128
"""What `max_rows` is a multiple of."""


@dataclass(frozen=True)
class GemmSpec:
    """One workload: how many rows every expert has, and whose rows these are."""

    uuid: str
    layer: str
    """uuid of the layer's workload"""
    seq_len: int
    """its tokens"""
    rows: tuple[int, ...]
    """of every expert"""
    blob: str
    """the part of the blob's file name after the definition's"""
    sha256: str
    """of the blob"""
    definition: GemmDefinition
    """named once in the spec file, not in the entry"""

    @property
    def axes(self) -> dict[str, int]:
        """What flashinfer-bench's workload says of the definition's variable axis."""
        if self.definition.rows == MASKED:
            return {"max_rows": -(-max(self.rows) // TILE_ROWS) * TILE_ROWS}
        return {"total_rows": sum(self.rows)}

    @property
    def blob_path(self) -> Path:
        """Relative to the data set's root."""
        return blob_path(self.definition, self.blob)

    @classmethod
    def from_json(cls, entry: dict[str, Any], definition: GemmDefinition) -> GemmSpec:
        return cls(**{**entry, "rows": tuple(entry["rows"]), "definition": definition})

    def to_json(self) -> dict[str, Any]:
        entry = asdict(self)
        del entry["definition"]
        return entry

    def tensors(self) -> list[str]:
        """The names of those in the blob."""
        return ["masked_m" if self.definition.rows == MASKED else "m_indptr"]

    def scalars(self) -> dict[str, int]:
        """Those that the workload pins. Of the rows the host knows what even routing would give."""
        if self.definition.rows != MASKED:
            return {}
        return {"expected_m": -(-self.seq_len * DEFAULT.top_k // DEFAULT.num_experts)}

    def content(self) -> bytes:
        """The blob."""
        (name,) = self.tensors()
        values: Sequence[int] = self.rows
        if self.definition.rows != MASKED:
            values = list(itertools.accumulate(self.rows, initial=0))
        tensor: Content = ("I32", (len(values),), np.array(values, dtype="<i4").tobytes())
        return safetensors_bytes({name: tensor})


def own_specs(definition: GemmDefinition, layers: Sequence[WorkloadSpec]) -> list[GemmSpec]:
    """Of the layer's workloads with the definition's token counts, fewest tokens first."""
    chosen = [spec for spec in layers if spec.seq_len in definition.tokens]
    return [spec_of(definition, layer) for layer in sorted(chosen, key=lambda s: s.seq_len)]


def spec_of(definition: GemmDefinition, layer: WorkloadSpec) -> GemmSpec:
    """Draws the layer's routing and counts the rows of every expert held by its rank."""
    local = layer.draw().ids - layer.local_expert_offset
    here = local[(local >= 0) & (local < definition.experts)]
    rows = np.bincount(here, minlength=definition.experts).tolist()
    name = uuid.uuid5(uuid.NAMESPACE_URL, f"{definition.name}/{layer.uuid}")
    spec = GemmSpec(str(name), layer.uuid, layer.seq_len, tuple(rows), name.hex, "", definition)
    return replace(spec, sha256=hashlib.sha256(spec.content()).hexdigest())
