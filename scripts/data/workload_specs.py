"""The workloads: their specs, the tensors that are drawn from the specs, and the files.

A spec file (workloads/<op type>/<definition>.spec.json) has for each workload the parameters of its
routing, and the SHA-256 of its file of tensors (the blob). flashinfer-bench reads the workload file
beside it. A workload pins the routing tensors. All other inputs are random.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from scripts.common import files
from scripts.common.command_line import Failure, say
from scripts.common.definitions import (
    DEFAULT,
    RENORMALIZE,
    MoeDefinition,
    read,
)
from scripts.common.project import ROOT
from scripts.data.synthetic_logits import (
    MOMENTS,
    Draw,
    LogitModel,
    count_local,
    draw_logits,
    routing_bias,
)

# Marks a blob as ours, so that captured tensors in its place are never overwritten. The specs have
# hashes of these bytes, so the generator's name must stay the one that made them.
BLOB_METADATA = {"origin": "synthetic", "generator": "scripts/make_workloads.py"}
TYPES = {"<f4": "F32", "<u2": "BF16"}
"""safetensors' names, by the types of the arrays; bfloat16 is stored as its bits."""


# --- files of tensors -----------------------------------------------------------------------------


def safetensors_bytes(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Return the file with these tensors, in this order.

    Written by hand: its bytes are part of the spec, so they must not follow the version of a
    library. Format: length of the header (8 bytes, little endian), header (JSON), data.
    """
    header: dict[str, Any] = {"__metadata__": BLOB_METADATA}
    end = 0
    for name, array in arrays.items():
        offsets = [end, end := end + array.nbytes]
        shape = list(array.shape)
        header[name] = {"dtype": TYPES[array.dtype.str], "shape": shape, "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # keeps the data aligned
    data = b"".join(array.tobytes() for array in arrays.values())
    return len(text).to_bytes(8, "little") + text + data


def is_foreign(path: Path) -> bool:
    """True if the path is a well-formed safetensors file that this project did not write, or the
    pointer that git-lfs leaves in its place."""
    from safetensors import SafetensorError, safe_open

    with path.open("rb") as file:
        if file.read(8) == files.LFS_POINTER[:8]:
            return True
    try:
        with safe_open(path, "numpy") as file:
            return file.metadata() != BLOB_METADATA
    except SafetensorError:
        return False


# --- specs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkloadSpec:
    """One workload of a layer: the known facts of the captured one, and the draw in its place."""

    uuid: str
    seq_len: int
    local_expert_offset: int
    blob: str  # the part of the blob's file name after the definition's
    captured: dict[str, int | None]  # as counts (None: not known, or not captured)
    model: LogitModel
    counts: dict[str, int]  # see `count_local`
    redrawn: int
    sha256: str  # of the blob
    definition: MoeDefinition = DEFAULT  # named once in the spec file, not here

    @property
    def axes(self) -> dict[str, int]:
        """The value of the definition's variable axis in flashinfer-bench's workload."""
        return {"seq_len": self.seq_len}

    @property
    def pinned(self) -> dict[str, float | None]:
        """The inputs that are not random: None for the tensors in the blob, values of scalars."""
        if self.definition.routing == RENORMALIZE:
            return {"routing_logits": None}
        return {
            "routing_logits": None,
            "routing_bias": None,
            "local_expert_offset": self.local_expert_offset,
            "routed_scaling_factor": self.definition.routed_scaling_factor,
        }

    def draw(self) -> Draw:
        return draw_logits(self.model, self.seq_len, self.local_expert_offset, self.definition)

    def content(self, draw: Draw | None = None) -> bytes:
        """Return the blob, from `draw` if it is passed."""
        logits = (draw or self.draw()).logits
        if "routing_bias" not in self.pinned:
            return safetensors_bytes({"routing_logits": _bfloat16(logits)})
        bias = _bfloat16(routing_bias(self.definition))
        return safetensors_bytes({"routing_logits": logits.astype("<f4"), "routing_bias": bias})


def _bfloat16(values: np.ndarray) -> np.ndarray:
    """Return the bits of float32 values that bfloat16 represents exactly."""
    return (values.view(np.uint32) >> 16).astype("<u2")


def blob_path(spec: WorkloadSpec) -> Path:
    """Return the path of the workload's tensors in a data set, as in the official one."""
    name = spec.definition.name
    folder = Path("blob") / "workloads" / spec.definition.op_type / name
    return folder / f"{name}_{spec.blob}.safetensors"


def workloads_path(definition: MoeDefinition) -> Path:
    """Return the path of the definition's workloads below a data set's root."""
    return Path("workloads") / definition.op_type / f"{definition.name}.jsonl"


def spec_path(definition: MoeDefinition) -> Path:
    """Return the path of the specs of the definition's workloads."""
    return workloads_path(definition).with_suffix(".spec.json")


def load_specs(definition: MoeDefinition = DEFAULT) -> list[WorkloadSpec]:
    """Return the committed specs of a definition in the order of the data set."""
    entries = json.loads((ROOT / spec_path(definition)).read_text(encoding="utf-8"))["workloads"]
    return [
        WorkloadSpec(**e | {"model": LogitModel(**e["model"])}, definition=definition)
        for e in entries
    ]


# --- making the tensors of specs ------------------------------------------------------------------


def make_workloads(
    root: Path, uuids: Collection[str], definition: MoeDefinition = DEFAULT
) -> list[Path]:
    """Make the tensors of these workloads below root if needed. Return the paths of all their
    files. Raises Failure: the content differs from the spec's."""
    selected = [spec for spec in load_specs(definition) if spec.uuid in uuids]
    paths = [root / blob_path(spec) for spec in selected]
    for number, (spec, path) in enumerate(zip(selected, paths, strict=True), 1):
        done = _make_blob(spec, path)
        say(f"[{number:2}/{len(selected)}] {spec.uuid[:8]}  {spec.seq_len:6} tokens  {done}")
    return paths


def _make_blob(spec: WorkloadSpec, path: Path) -> str:
    """Make one blob if needed. Return what was done."""
    if path.is_file():
        if hashlib.sha256(path.read_bytes()).hexdigest() == spec.sha256:
            return "up to date"
        if is_foreign(path):
            return "kept: not written by this program"
    content = spec.content()
    if (got := hashlib.sha256(content).hexdigest()) != spec.sha256:
        raise Failure(
            f"workload {spec.uuid}: the blob made here has SHA-256 {got}, the spec says "
            f"{spec.sha256}; the generator and the spec are out of step"
        )
    files.write(path, content)
    return "made"


# --- making specs ---------------------------------------------------------------------------------

MOMENT_TOLERANCE = 2e-3
MIN_MARGIN_GAP = 1e-12  # float64 scores near 10 are rounded by 2e-15

# For workloads that stand for no captured ones: experts differ in popularity, and the tokens of a
# request are alike, about as much as a search found for the captured ones.
OWN_STRENGTHS = {"expert": 200, "request": 500, "token": 100}
TOKENS_OF_A_REQUEST = 64


def is_usable(draw: Draw, definition: MoeDefinition) -> bool:
    """True if the moments are the definition's, and no margin is near the threshold."""
    logits, (mean, std) = draw.logits.astype(np.float64), MOMENTS[definition.routing]
    return (
        abs(float(logits.mean()) - mean) < MOMENT_TOLERANCE
        and abs(float(logits.std()) - std) < MOMENT_TOLERANCE
        and draw.margin_gap > MIN_MARGIN_GAP
    )


def own_spec(definition: MoeDefinition, number: int, tokens: int) -> WorkloadSpec:
    """Return a workload that stands for no captured one, with the draw of the first usable seed.
    The workloads go round the ranks."""
    ranks = definition.num_experts // definition.num_local_experts
    name = uuid.uuid5(uuid.NAMESPACE_URL, f"{definition.name}/{tokens}")
    requests = 1 + tokens // TOKENS_OF_A_REQUEST
    offset = number % ranks * definition.num_local_experts
    for seed in itertools.count(1 + number, 1000):
        model = LogitModel(seed=seed, requests=requests, **OWN_STRENGTHS)
        draw = draw_logits(model, tokens, offset, definition)
        if is_usable(draw, definition):
            break
    spec = WorkloadSpec(
        uuid=str(name),
        seq_len=tokens,
        local_expert_offset=offset,
        blob=name.hex,
        captured=dict.fromkeys(("pairs", "hit", "active", "max")),
        model=model,
        counts=count_local(draw.ids, offset, definition),
        redrawn=draw.redrawn,
        sha256="",
        definition=definition,
    )
    return replace(spec, sha256=hashlib.sha256(spec.content(draw)).hexdigest())


def own_specs(definition: MoeDefinition) -> list[WorkloadSpec]:
    """Return the workloads of a definition that stand for no captured ones, fewest tokens first."""
    return [own_spec(definition, *numbered) for numbered in enumerate(definition.tokens)]


def workload_line(spec: WorkloadSpec) -> str:
    """Return the workload's line in flashinfer-bench's format."""
    path = f"./{blob_path(spec).as_posix()}"
    pinned = {
        name: {"type": "safetensors", "path": path, "tensor_key": name}
        if value is None
        else {"type": "scalar", "value": value}
        for name, value in spec.pinned.items()
    }
    names = read(spec.definition.path)["inputs"]
    inputs = {name: pinned.get(name, {"type": "random"}) for name in names}
    record = {
        "definition": spec.definition.name,
        "workload": {"axes": spec.axes, "inputs": inputs, "uuid": spec.uuid},
        "solution": None,
        "evaluation": None,
    }
    return json.dumps(record)


def write_specs(specs: Sequence[WorkloadSpec], root: Path) -> list[Path]:
    """Write the spec file and the workload file of one definition's workloads."""
    definition = specs[0].definition
    entries = [{k: v for k, v in asdict(s).items() if k != "definition"} for s in specs]
    document = {"definition": definition.name, "workloads": entries}
    files.write_json(root / spec_path(definition), document)
    lines = "".join(workload_line(s) + "\n" for s in specs)
    files.write(root / workloads_path(definition), lines)
    return [root / spec_path(definition), root / workloads_path(definition)]
