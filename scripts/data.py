"""Make the tensors of the workloads from the committed specs.

    python3 run.py data                                 all workloads of the default definition
    python3 run.py data --definition NAME --specs       write spec and workload file of a definition

A file of tensors that already has the content of the spec is left alone, and so is one that this
program did not write (for instance a captured tensor of the official data set). --specs is for
definitions whose workloads stand for no captured ones.

A spec file (workloads/<op type>/<definition>.spec.json) has for each workload the parameters of its
routing, and the SHA-256 of its tensors. flashinfer-bench reads the workload file beside it. A
workload pins the routing tensors and the scalars. All other inputs are random. The scales of MXFP4
weights are pinned, too, in one file for all workloads of a definition: flashinfer-bench would draw
bytes of any value, among them NaN.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.common import options
from scripts.common.definitions import (
    DEEPSEEK_V3,
    DEFAULT,
    GIVEN,
    GROUP,
    RENORMALIZE,
    MoeDefinition,
    read,
    select,
)
from scripts.common.program import (
    EXIT_OK,
    LFS_POINTER,
    ROOT,
    Failure,
    UsageError,
    output_path,
    parser,
    run_main,
    say,
    write_file,
    write_json,
)

if TYPE_CHECKING:
    import torch
try:
    import numpy as np
except ModuleNotFoundError:  # before the set-up: options are listed
    pass


# --- logits, drawn from a small model -------------------------------------------------------------


# The same bits on every machine. The only source of randomness is the raw output of Philox4x64-10
# under a key given directly: no seeding and no distribution of NumPy's. All up to the last affine
# map is integer arithmetic. The map and the rounding use only +, *, / and sqrt, which IEEE 754
# rounds exactly. One transcendental function remains, the exp behind the routing margin. Logits lie
# on a coarse grid, so margins take separate values, and a draw with a margin close to the threshold
# is not used (see `margin_gap`).

MOMENTS = {DEEPSEEK_V3: (-1.6706, 0.6560), RENORMALIZE: (0.0, 1.0), GIVEN: (-1.6706, 0.6560)}
"""Mean and standard deviation of the logits, by routing: those of the captured ones. For
renormalised routing none are known. Given experts are chosen as DeepSeek-V3 chooses them."""
LOW_BIAS, HIGH_BIAS = 4.9375, 4.96875  # the two values of the captured bias

# Experts whose captured bias is the high one.
HIGH_BIAS_EXPERTS = (
    *(3, 6, 7, 9, 10, 11, 16, 17, 18, 23, 30, 31, 36, 37, 41, 42, 43, 44, 46, 47, 48, 49, 54, 55),
    *(56, 58, 61, 62, 63, 66, 67, 68, 69, 72, 74, 75, 79, 80, 81, 82, 83, 84, 87, 90, 92, 96, 100),
    *(101, 102, 104, 105, 108, 109, 110, 112, 114, 119, 120, 123, 125, 126, 127, 131, 136, 147),
    *(151, 152, 153, 154, 157, 159, 167, 170, 171, 174, 183, 185, 195, 196, 197, 200, 203, 214),
    *(216, 217, 219, 222, 223, 226, 230, 231, 234, 235, 236, 237, 238, 240, 241, 242, 243, 253),
)

# A choice must have at least this margin. The excess over 1e-4 covers the rounding of a kernel
# that evaluates sigmoid + bias and the sum of two of them in float32 (ulp of 10: 9.5e-7).
MIN_MARGIN = 1.05e-4

# Standard deviation of `_normals`: twice a sum of 8 uniforms on 0..65535.
_UNIT = 2.0 * math.sqrt(8 * (65536**2 - 1) / 12)
_NOISE_STRENGTH = 1024  # every other strength is relative to this

# Streams of one seed. Stream _NOISE + n is the n-th draw of the noise, n > 0 for redrawn rows.
_EXPERT, _GROUP, _TOKEN, _REQUEST, _MEMBER, _REQUEST_GROUP, _NOISE = 0, 1, 2, 3, 4, 5, 16
_BIAS, _EXPONENTS = 6, 7  # of the seed 0, which no workload has


@dataclass(frozen=True)
class LogitModel:
    """Parameters of one workload's logits. Strengths are standard deviations in 1/1024 of the noise
    that is drawn for every (token, expert). `local` is a shift in the same unit."""

    seed: int
    expert: int = 0  # popularity of experts, the same for all tokens
    group: int = 0  # popularity of groups
    local: int = 0  # shift of the experts of this rank
    token: int = 0  # level of a token, the same for all experts
    request: int = 0  # pattern over experts shared by the tokens of a request
    request_group: int = 0  # pattern over groups shared by the tokens of a request
    requests: int = 1  # number of requests in the batch


def routing_bias(definition: MoeDefinition = DEFAULT) -> np.ndarray:
    """Return the bias [num_experts], float32 values that bfloat16 represents exactly.

    It is the captured one. Where none is known, each expert has one of its two values by chance.
    """
    if definition is DEFAULT:
        high = np.isin(np.arange(definition.num_experts), HIGH_BIAS_EXPERTS)
    else:
        high = _raw(0, _BIAS, definition.num_experts) % np.uint64(2) == 1
    return np.where(high, np.float32(HIGH_BIAS), np.float32(LOW_BIAS))


def round_to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Round to the nearest bfloat16 value, ties to even, as float32. x: finite float32."""
    bits = x.view(np.uint32)
    bits = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(
        0xFFFF0000
    )
    return bits.view(np.float32)


def _raw(seed: int, stream: int, count: int) -> np.ndarray:
    key = np.array([seed, stream], dtype=np.uint64)
    return np.random.Philox(key=key).random_raw(count)


def _normals(seed: int, stream: int, *shape: int) -> np.ndarray:
    """Draw integers of mean 0 and standard deviation _UNIT, near normal (excess kurtosis -0.15)."""
    words = _raw(seed, stream, 2 * math.prod(shape))
    total = np.zeros(words.size, dtype=np.int64)
    for shift in (0, 16, 32, 48):
        total += ((words >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.int64)
    return (2 * (total[0::2] + total[1::2]) - 8 * 65535).reshape(shape)


def _systematic_part(
    model: LogitModel, tokens: int, local_expert_offset: int, definition: MoeDefinition
) -> np.ndarray:
    """Return everything but the noise, int64 [T, num_experts] in units of _UNIT / 1024."""
    experts, group_count = definition.num_experts, definition.n_group
    per_expert = model.expert * _normals(model.seed, _EXPERT, experts)
    per_group = model.group * _normals(model.seed, _GROUP, group_count)
    per_expert += np.repeat(per_group, experts // group_count)
    first = max(local_expert_offset, 0)
    last = max(local_expert_offset + definition.num_local_experts, 0)
    per_expert[first:last] += model.local * round(_UNIT)
    part = np.broadcast_to(per_expert, (tokens, experts)).copy()
    if model.token:
        part += model.token * _normals(model.seed, _TOKEN, tokens)[:, None]
    if model.request or model.request_group:
        pattern = model.request * _normals(model.seed, _REQUEST, model.requests, experts)
        groups = _normals(model.seed, _REQUEST_GROUP, model.requests, group_count)
        pattern += np.repeat(model.request_group * groups, experts // group_count, axis=1)
        member = _raw(model.seed, _MEMBER, tokens) % np.uint64(model.requests)
        part += pattern[member.astype(np.int64)]
    return part


def _to_moments(z: np.ndarray, std: float) -> tuple[float, float]:
    """Return the offset and factor that bring z, int64, to mean 0 and a standard deviation."""
    total = sum(int(row) for row in z.sum(axis=1))
    # Shifted so that a row's sum of squares stays below 2**63.
    shift = max(0, int(np.abs(z).max()).bit_length() - 27)
    coarse = z >> shift
    first = sum(int(row) for row in coarse.sum(axis=1))
    second = sum(int(row) for row in (coarse * coarse).sum(axis=1))
    variance = Fraction(second, z.size) - Fraction(first, z.size) ** 2
    factor = std / (math.sqrt(float(variance)) * (1 << shift))
    return float(Fraction(total, z.size)), factor


LEAST_EXPONENT = 117
"""The least scale of MXFP4 weights, 2^-10, as e8m0. With up to four more binades the outputs have a
standard deviation near 1, so that bench's absolute tolerance of 0.1 is a tenth of it."""


def weight_scales(definition: MoeDefinition) -> dict[str, torch.Tensor]:
    """Return the scales of MXFP4 weights, the bits of e8m0: five exponents, the middle one six
    times as often as the outer ones."""
    import torch

    experts, stream = definition.num_local_experts, itertools.count(_EXPONENTS)
    scales = {}
    for name, (n, k) in zip(("gemm1", "gemm2"), definition.gemms, strict=True):
        shape = experts, n, k // GROUP
        drawn = _raw(0, next(stream), math.prod(shape) // 8).astype("<u8").view(np.uint8)
        ones = sum(drawn >> np.uint8(bit) & np.uint8(1) for bit in range(4))
        exponents = (ones + np.uint8(LEAST_EXPONENT)).astype(np.int8).reshape(shape)
        scales[f"{name}_weights_scale"] = torch.from_numpy(exponents)
    return scales


@dataclass(frozen=True)
class Draw:
    logits: np.ndarray  # float32 [T, num_experts], exact in bfloat16
    ids: np.ndarray  # [T, top_k] chosen experts, ascending
    redrawn: int  # rows drawn again, counted once per draw
    margin_gap: float  # distance from the threshold to the nearest margin, also of redrawn rows


def draw_logits(
    model: LogitModel, tokens: int, local_expert_offset: int, definition: MoeDefinition = DEFAULT
) -> Draw:
    experts = definition.num_experts
    mean, std = MOMENTS[definition.routing]
    bias = None if definition.routing == RENORMALIZE else routing_bias(definition)
    part = _systematic_part(model, tokens, local_expert_offset, definition)

    def finish(rows: np.ndarray, noise: np.ndarray) -> np.ndarray:
        z = (part[rows] + _NOISE_STRENGTH * noise).astype(np.float64)
        z -= offset
        z *= factor
        z += mean
        return round_to_bfloat16(z.astype(np.float32))

    # The map to the moments is that of the first draw. If it followed the redrawn rows, every
    # redraw would move all other rows.
    noise = _normals(model.seed, _NOISE, tokens, experts)
    offset, factor = _to_moments(part + _NOISE_STRENGTH * noise, std)
    rows = np.arange(tokens)
    logits = finish(rows, noise)
    ids, margin = route(logits, bias, definition)
    gap = float(np.abs(margin - MIN_MARGIN).min())
    redrawn = 0
    for attempt in range(1, 1000):
        rows = np.flatnonzero(margin < MIN_MARGIN)
        if rows.size == 0:
            break
        redrawn += rows.size
        logits[rows] = finish(rows, _normals(model.seed, _NOISE + attempt, rows.size, experts))
        ids[rows], margin[rows] = route(logits[rows], bias, definition)
        gap = min(gap, float(np.abs(margin[rows] - MIN_MARGIN).min()))
    else:
        raise RuntimeError(f"no draw of {model} leaves every token a margin of {MIN_MARGIN}")
    return Draw(logits, ids, redrawn, gap)


# --- the routing of logits ------------------------------------------------------------------------
# In NumPy and float64: the margin of a choice must not depend on the kernel that computes it.


def route(
    logits: np.ndarray, bias: np.ndarray | None, definition: MoeDefinition = DEFAULT
) -> tuple[np.ndarray, np.ndarray]:
    """Return the chosen experts [T, top_k], ascending, and the margin [T] of each token's choice.

    The margin is the smaller of two distances: from the last selected group to the first dropped
    one (sums of two scores), and from the last selected expert to the first dropped one. Without a
    bias the scores are the logits themselves.
    """
    groups, topk_group, top_k = definition.n_group, definition.topk_group, definition.top_k
    score = logits.astype(np.float64)
    if bias is not None:
        score = 1.0 / (1.0 + np.exp(-score)) + bias.astype(np.float64)
    margin = np.full(len(score), np.inf)
    if topk_group < groups:
        grouped = score.reshape(len(score), groups, -1)
        group_score = np.sort(grouped, axis=-1)[..., -2:].sum(axis=-1)
        ranked = np.sort(group_score, axis=-1)
        last_selected = ranked[:, -topk_group]
        margin = last_selected - ranked[:, -topk_group - 1]
        dropped = group_score < last_selected[:, None]
        score = np.where(dropped[..., None], -np.inf, grouped).reshape(score.shape)
    order = np.argsort(score, axis=-1)
    ranked = np.take_along_axis(score, order, axis=-1)
    return (
        np.sort(order[:, -top_k:], axis=-1),
        np.minimum(margin, ranked[:, -top_k] - ranked[:, -top_k - 1]),
    )


def chosen_weights(draw: Draw, routed_scaling_factor: float) -> np.ndarray:
    """Return the weights [T, top_k] of the chosen experts as DeepSeek-V3 makes them, rounded to
    bfloat16 so that no rounding of exp shows in them. float32."""
    logits = np.take_along_axis(draw.logits, draw.ids, axis=1).astype(np.float64)
    scores = 1.0 / (1.0 + np.exp(-logits))
    weights = scores / scores.sum(axis=1, keepdims=True) * routed_scaling_factor
    return round_to_bfloat16(weights.astype(np.float32))


def count_local(
    ids: np.ndarray, local_expert_offset: int, definition: MoeDefinition = DEFAULT
) -> dict[str, int]:
    """Count what one rank has of a routing: (token, local expert) pairs, tokens with a local
    expert, local experts with a token, and the rows of the fullest expert."""
    local = ids - local_expert_offset
    here = (local >= 0) & (local < definition.num_local_experts)
    rows = np.bincount(local[here], minlength=definition.num_local_experts)
    counts = {
        "pairs": rows.sum(), "hit": here.any(axis=1).sum(), "active": (rows > 0).sum(),
        "max": rows.max(),
    }  # fmt: skip
    return {name: int(count) for name, count in counts.items()}


# --- files of tensors -----------------------------------------------------------------------------


BLOB_METADATA = {"origin": "synthetic", "generator": "scripts/make_workloads.py"}
"""Marks a file of tensors as ours, so that captured tensors in its place are never overwritten. The
path is of an earlier version: written files have it."""


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 of the tensors, with their names, types and shapes."""
    import torch

    sha = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sha.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        sha.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def read_blob(path: Path) -> tuple[str, bool]:
    """Return the digest of a file's tensors, and True if this project did not write the file. A
    damaged file has no digest, and neither has the pointer that git-lfs leaves in its place."""
    from safetensors import SafetensorError, safe_open

    with path.open("rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            return "", True
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            return digest(tensors), file.metadata() != BLOB_METADATA
    except SafetensorError:
        return "", False


# --- specs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkloadSpec:
    """One workload of a layer: the known facts of the captured one, and the draw in its place."""

    uuid: str
    seq_len: int
    local_expert_offset: int
    blob: str  # the part of the tensors' file name after the definition's
    captured: dict[str, int | None]  # as counts (None: not known, or not captured)
    model: LogitModel
    counts: dict[str, int]  # see `count_local`
    redrawn: int
    sha256: str  # see `digest`
    definition: MoeDefinition = DEFAULT  # named once in the spec file, not here

    @property
    def axes(self) -> dict[str, int]:
        """The value of the definition's variable axis in flashinfer-bench's workload."""
        return {"seq_len": self.seq_len}

    @property
    def pinned(self) -> dict[str, float | None]:
        """The inputs that are not random: None for tensors, values of scalars."""
        if self.definition.routing == RENORMALIZE:
            return {"routing_logits": None}
        if self.definition.routing == GIVEN:
            return {
                "topk_ids": None,
                "topk_weights": None,
                "local_expert_offset": self.local_expert_offset,
            }
        return {
            "routing_logits": None,
            "routing_bias": None,
            "local_expert_offset": self.local_expert_offset,
            "routed_scaling_factor": self.definition.routed_scaling_factor,
        }

    def draw(self) -> Draw:
        return draw_logits(self.model, self.seq_len, self.local_expert_offset, self.definition)

    def tensors(self, draw: Draw | None = None) -> dict[str, torch.Tensor]:
        """Return the pinned tensors, from `draw` if it is passed."""
        import torch

        drawn = draw or self.draw()
        if self.definition.routing == GIVEN:
            weights = chosen_weights(drawn, self.definition.routed_scaling_factor)
            ids = torch.from_numpy(drawn.ids.astype(np.int32))
            return {"topk_ids": ids, "topk_weights": torch.from_numpy(weights)}
        logits = torch.from_numpy(drawn.logits)
        if "routing_bias" not in self.pinned:
            return {"routing_logits": logits.bfloat16()}
        bias = torch.from_numpy(routing_bias(self.definition))
        return {"routing_logits": logits, "routing_bias": bias.bfloat16()}


def blob_path(spec: WorkloadSpec) -> Path:
    """Return the path of the workload's tensors in a data set, as in the official one."""
    return blobs(spec.definition, spec.blob)


def scales_path(definition: MoeDefinition) -> Path:
    """Return the path of MXFP4 weights' scales, which all workloads of a definition share."""
    return blobs(definition, "scales")


def blobs(definition: MoeDefinition, part: str) -> Path:
    name = definition.name
    folder = Path("blob") / "workloads" / definition.op_type / name
    return folder / f"{name}_{part}.safetensors"


def workloads_path(definition: MoeDefinition) -> Path:
    """Return the path of the definition's workloads below a data set's root."""
    return Path("workloads") / definition.op_type / f"{definition.name}.jsonl"


def spec_path(definition: MoeDefinition) -> Path:
    """Return the path of the specs of the definition's workloads."""
    return workloads_path(definition).with_suffix(".spec.json")


def load_specs(definition: MoeDefinition = DEFAULT) -> list[WorkloadSpec]:
    """Return the committed specs of a definition in the order of the data set."""
    return [
        WorkloadSpec(**e | {"model": LogitModel(**e["model"])}, definition=definition)
        for e in read(spec_path(definition))["workloads"]
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
        done = _make_blob(path, f"workload {spec.uuid}", spec.sha256, spec.tensors)
        say(f"[{number:2}/{len(selected)}] {spec.uuid[:8]}  {spec.seq_len:6} tokens  {done}")
    if definition.mxfp4:
        paths.append(root / scales_path(definition))
        sha256 = read(spec_path(definition))["scales_sha256"]
        make = functools.partial(weight_scales, definition)
        say(f"scales of the weights  {_make_blob(paths[-1], 'the scales', sha256, make)}")
    return paths


def _make_blob(
    path: Path, name: str, sha256: str, make: Callable[[], dict[str, torch.Tensor]]
) -> str:
    """Make one file of tensors if needed. Return what was done."""
    from safetensors.torch import save

    if path.is_file():
        old_digest, foreign = read_blob(path)
        if old_digest == sha256:
            return "up to date"
        if foreign:
            return "kept: not written by this program"
    tensors = make()
    if (got := digest(tensors)) != sha256:
        raise Failure(
            f"{name}: the tensors made here have SHA-256 {got}, the spec says {sha256}; the "
            "generator and the spec are out of step"
        )
    write_file(path, save(tensors, BLOB_METADATA))
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
    return replace(spec, sha256=digest(spec.tensors(draw)))


def own_specs(definition: MoeDefinition) -> list[WorkloadSpec]:
    """Return the workloads of a definition that stand for no captured ones, fewest tokens first."""
    return [own_spec(definition, *numbered) for numbered in enumerate(definition.tokens)]


def workload_line(spec: WorkloadSpec) -> str:
    """Return the workload's line in flashinfer-bench's format."""

    def tensor(path: Path, name: str) -> dict[str, Any]:
        return {"type": "safetensors", "path": f"./{path.as_posix()}", "tensor_key": name}

    pinned = {
        name: tensor(blob_path(spec), name) if value is None else {"type": "scalar", "value": value}
        for name, value in spec.pinned.items()
    }
    names = read(spec.definition.path)["inputs"]
    if spec.definition.mxfp4:
        scales = (name for name in names if name.endswith("_weights_scale"))
        pinned |= {name: tensor(scales_path(spec.definition), name) for name in scales}
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
    document: dict[str, Any] = {"definition": definition.name, "workloads": entries}
    if definition.mxfp4:
        document["scales_sha256"] = digest(weight_scales(definition))
    write_json(root / spec_path(definition), document)
    lines = "".join(workload_line(s) + "\n" for s in specs)
    write_file(root / workloads_path(definition), lines)
    return [root / spec_path(definition), root / workloads_path(definition)]


# --- program --------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser(__doc__)
    add = arguments.add_argument
    options.definition(arguments)
    options.workloads(arguments, "all")
    options.max_tokens(arguments)
    add("--root", type=output_path, default=ROOT, metavar="DIR", help="where they are written")
    add("--specs", action="store_true", help="write the spec and the workload file anew")
    args = arguments.parse_args(argv)
    definition = args.definition
    if args.specs:
        if args.workloads or args.max_tokens:
            raise UsageError("--specs: of all workloads; leave --workloads and --max-tokens out")
        if not definition.tokens:
            raise UsageError(f"--specs: {definition.name} has captured workloads")
        print(*write_specs(own_specs(definition), args.root), sep="\n")
    else:
        sizes = {spec.uuid: spec.seq_len for spec in load_specs(definition)}
        make_workloads(args.root, select(sizes, args.workloads, args.max_tokens), definition)
    return EXIT_OK


if __name__ == "__main__":
    run_main(main)
