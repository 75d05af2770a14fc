"""The cases that are measured: a data set, its workloads, the plan of a measurement, and inputs.

Only the files of one definition are parsed. So a file of another definition that this version of
flashinfer-bench cannot parse does no harm, and a large data set opens at once.
"""

import math
import tempfile
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from flashinfer_bench.bench.utils import load_safetensors
from flashinfer_bench.data import (
    Definition,
    RandomInput,
    ScalarInput,
    Solution,
    Trace,
    TraceSet,
    Workload,
    load_json_file,
    load_jsonl_file,
)
from flashinfer_bench.utils import dtype_str_to_torch_dtype, hardware_from_device
from moe_fp8.call import MoeInputs
from moe_fp8.reference import choose_experts
from moe_fp8.shape import MoeShape
from safetensors import SafetensorError

from scripts.common import packer, program
from scripts.common.definitions import (
    DEFAULT,
    DEFINITIONS,
    DSV3_TP8,
    GIVEN,
    SHARED,
    MoeDefinition,
    build_definition,
    select,
    size_of,
)
from scripts.common.foreign import FOREIGN, foreign_code, is_peer, own_hashes
from scripts.common.machine import other_versions, this_machine, why_not
from scripts.common.options import select_names
from scripts.common.program import ROOT, UsageError, os_error, say, skipped_text
from scripts.data import WorkloadSpec, load_specs, make_workloads
from scripts.publishing.rows import read_results, why_not_same

CPU_MAX_TOKENS = 16
"""Tokens of the largest workload that runs on the CPU by default."""


# --- the data set -------------------------------------------------------------------------------


def is_this_data_set(root: Path) -> bool:
    """True if the data set is this repository."""
    return root.resolve() == ROOT


def load(root: Path, definition: MoeDefinition = DEFAULT) -> tuple[TraceSet, list[str]]:
    """Return the data set at `root` with one definition, and remarks on files passed over."""
    if not root.is_dir():
        raise UsageError(f"{root} is not a directory")
    name = definition.name
    path = next(iter(sorted((root / "definitions").rglob(f"{name}.json"))), None)
    if path is None:
        raise UsageError(f"{root} is no data set with the definition {name}")
    trace_set = TraceSet(root=root)
    try:
        trace_set.definitions[name] = load_json_file(Definition, path)
        trace_set.workloads[name] = []
        for path in sorted((root / "workloads").rglob(f"{name}.jsonl")):
            trace_set.workloads[name] += load_jsonl_file(Trace, path)
    except ValueError as error:
        raise UsageError(f"{path} cannot be read: {_first_line(error)}") from None
    remarks: list[str] = []
    solutions: dict[str, Solution] = {}
    for path in sorted((root / "solutions").rglob("*.json")):
        try:
            if name in path.read_text(encoding="utf-8", errors="replace"):
                solution = load_json_file(Solution, path)
                if solution.definition == name:
                    solutions[solution.name] = solution
        except OSError as error:
            remarks.append(f"passed over: {os_error(error)}")
        except ValueError as error:
            text = "not a solution of this flashinfer-bench version"
            remarks.append(f"{path}: {text}: {_first_line(error)}")
    trace_set.solutions[name] = list(solutions.values())
    return trace_set, remarks


def _first_line(error: Exception) -> str:
    return ", ".join(str(error).splitlines()[:2])


def definition_of(trace_set: TraceSet) -> Definition:
    """Return the one definition of a data set from `load`."""
    (definition,) = trace_set.definitions.values()
    return definition


def select_solutions(solutions: Sequence[Solution], patterns: Sequence[str]) -> list[Solution]:
    """Return the solutions that the patterns name, or all without patterns. Raises UsageError."""
    chosen = select_names((solution.name for solution in solutions), patterns)
    return [solution for solution in solutions if solution.name in chosen]


def tokens(workload: Workload) -> int:
    """Return the tokens of a workload."""
    return size_of(workload.axes)


def named(workload: Workload) -> str:
    """Return the name of a workload in lines of progress."""
    return f"T={tokens(workload)} ({workload.uuid[:8]})"


def select_workloads(
    workloads: Sequence[Trace], selectors: Sequence[str], max_tokens: int | None = None
) -> list[Trace]:
    """Return the workloads that `select` chooses. Raises UsageError."""
    sizes = {t.workload.uuid: tokens(t.workload) for t in workloads}
    chosen = set(select(sizes, selectors, max_tokens))
    return [t for t in workloads if t.workload.uuid in chosen]


def make_missing_workloads(root: Path, traces: Sequence[Trace]) -> None:
    """Generate the missing tensors of these workloads, if they are ours."""

    def lacks(spec: Any) -> bool:
        return spec.type == "safetensors" and not (root / spec.path).is_file()

    every = [trace.workload for trace in traces]
    missing = [w.uuid for w in every if any(map(lacks, w.inputs.values()))]
    if not missing:
        return
    if not is_this_data_set(root):
        raise UsageError(
            f"{root} lacks the tensors of {len(missing)} workloads, for example {missing[0]}: "
            "is its blob/ directory there (git lfs pull)?"
        )
    make_workloads(root, missing, definition=DEFINITIONS[traces[0].definition])


def load_tensors(
    trace_set: TraceSet, workload: Workload
) -> tuple[dict[str, torch.Tensor], list[tuple[int, ...] | None]]:
    """Return the tensors that a workload loads from files, by name, and the shapes of all inputs,
    in their order.

    Raises:
        UsageError: an axis has no value, or a file does not fit the definition. Its one line says
            what to do.
    """
    definition, root, named = definition_of(trace_set), trace_set.root, f"workload {workload.uuid}"
    try:
        shapes = definition.get_input_shapes(workload.axes)
    except ValueError as error:
        raise UsageError(f"{named}: {error}; correct its line below workloads/") from None
    try:
        return load_safetensors(definition, workload, root), shapes
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        specs = workload.inputs.values()
        paths = {root / spec.path for spec in specs if spec.type == "safetensors"}
        text, remedy = _first_line(error), "get it anew (git lfs pull)"
        if any(p.is_file() and p.read_bytes().startswith(program.LFS_POINTER) for p in paths):
            text = "a pointer of git-lfs in the place of the tensors"
        if is_this_data_set(root):
            remedy = "remove it, then run.py data makes it anew"
        raise UsageError(f"{named}: {', '.join(map(str, paths))}: {text}; {remedy}") from None


def draw(
    definition: Definition, name: str, shape: Sequence[int], device: torch.device, seed: int
) -> torch.Tensor:
    """Draw a random input as flashinfer-bench does (standard normal; FP8 values clamped to +-2;
    any bytes), but from a seed, and in slices: the float32 draws of a whole weight take 3.8 GB."""
    dtype = dtype_str_to_torch_dtype(definition.inputs[name].dtype)
    generator = torch.Generator(device=device)
    generator.manual_seed(seed ^ zlib.crc32(name.encode()))
    if dtype == torch.int8:
        options: dict[str, Any] = dict(dtype=dtype, device=device, generator=generator)
        return torch.randint(-128, 128, tuple(shape), **options)
    if dtype != torch.float8_e4m3fn:
        return torch.randn(tuple(shape), generator=generator, device=device).to(dtype)
    out = torch.empty(tuple(shape), dtype=dtype, device=device)
    parts = [out] if len(shape) < 3 else out
    drawn = torch.empty(parts[0].shape, device=device)  # once: new memory takes as long as a draw
    for part in parts:
        part.copy_(drawn.normal_(generator=generator).clamp_(-2.0, 2.0))
    return out


class Inputs:
    """Inputs of one workload after another. All share the weights, which are drawn once.

    flashinfer-bench draws everything anew for each workload and trial. Here the weights, 1.4 GB
    whose draws take most of the time on a CPU, depend on the seed alone. The tokens' values depend
    on the seed and the workload.
    """

    def __init__(self, trace_set: TraceSet, device: str, seed: int):
        self.trace_set = trace_set
        self.definition = definition_of(trace_set)
        self.device = device
        self.seed = seed
        self._fixed: dict[str, torch.Tensor] = {}

    def of(self, workload: Workload) -> list[Any]:
        loaded, shapes = load_tensors(self.trace_set, workload)
        device = torch.device(self.device)
        values: list[Any] = []
        for (name, tensor), shape in zip(self.definition.inputs.items(), shapes, strict=True):
            spec = workload.inputs.get(name)
            constant = set(tensor.shape or ()) <= self.definition.const_axes.keys()
            if name in loaded:
                key = f"{spec.path} {spec.tensor_key}"
                value = self._fixed[key] if key in self._fixed else loaded[name].to(device)
                values.append(value)
                if constant:  # prepared weights stay so for all workloads with these scales
                    self._fixed[key] = value
            elif spec is not None and spec.type == "scalar":
                values.append(spec.value)
            elif shape is None:
                raise UsageError(f"workload {workload.uuid} leaves the scalar {name} open")
            elif constant:
                if name not in self._fixed:
                    self._fixed[name] = draw(self.definition, name, shape, device, self.seed)
                values.append(self._fixed[name])
            else:
                seed = self.seed ^ zlib.crc32(workload.uuid.encode())
                values.append(draw(self.definition, name, shape, device, seed))
        return values


# --- the plan ------------------------------------------------------------------------------------


def packed_solutions(packed: Sequence[Path]) -> list[Solution]:
    return [load_json_file(Solution, path) for path in packed]


def load_with_ours(
    root: Path, definition: MoeDefinition = DEFAULT
) -> tuple[TraceSet, list[Solution]]:
    """Return the data set with our solutions added in memory, and ours, packed anew. A clone that
    is read-only gets no files. Remarks go to stderr. Raises PackError."""
    try:
        packed = packed_solutions(packer.write_packed(definition=definition))
    except OSError as error:
        say(f"{os_error(error)}: our solutions are not kept there")
        with tempfile.TemporaryDirectory(prefix="packed-") as directory:
            paths = packer.write_packed(output=Path(directory), build=False, definition=definition)
            packed = packed_solutions(paths)
    trace_set, remarks = load(root, definition)
    ours = {solution.name: solution for solution in packed}
    theirs = {solution.name: solution for solution in trace_set.solutions[definition.name]}
    for name, solution in ours.items():
        if name in theirs and theirs[name].hash() != solution.hash():
            remarks.append(f"{name}: the data set's copy differs; the current one is used")
    for remark in remarks:
        say(remark)
    # A new object: TraceSet also indexes its solutions by name when it is made.
    return replace(trace_set, solutions={definition.name: list((theirs | ours).values())}), packed


@dataclass(frozen=True)
class Plan:
    """The solutions, workloads and pairs to measure."""

    trace_set: TraceSet
    solutions: list[Solution]
    workloads: list[Trace]
    pairs: set[tuple[str, str]]  # (workload's uuid, solution)
    hardware: str
    skipped: dict[str, str]  # why a solution is left out, by its name
    packed: list[Solution]  # this checkout's own

    @property
    def peers(self) -> dict[str, bool]:
        """True for each peer among the data set's solutions, by name."""
        own = own_hashes(self.packed)
        (every,) = self.trace_set.solutions.values()
        return {s.name: is_peer(s, own) for s in every}

    @property
    def foreign(self) -> bool:
        """True if code of the data set's own solutions is run."""
        return not {s.hash() for s in self.solutions} <= {s.hash() for s in self.packed}


def choose(
    local: Path,
    use_gpu: bool,
    run: Path | None = None,
    solutions: Sequence[str] = (),
    workloads: Sequence[str] = (),
    max_tokens: int | None = None,
    run_foreign: bool = False,
    definition: MoeDefinition = DEFAULT,
) -> Plan:
    """Plan the pairs of a run's directory that have an output, or, without a run, all pairs of the
    chosen solutions and workloads. On the CPU the default is the small workloads. Raises PackError:
    our solutions cannot be packed; UsageError: nothing is left, or the machine lacks what is asked
    for."""
    if not (use_gpu or run or workloads or max_tokens):
        max_tokens = CPU_MAX_TOKENS
    hardware = hardware_from_device("cuda:0" if use_gpu else "cpu")
    trace_set, packed = load_with_ours(local, definition)
    every = trace_set.solutions[definition.name]
    picked = trace_set.workloads[definition.name]
    traces = run / "traces.jsonl" if run else None
    if traces:
        wanted = _of_run(traces, definition, every, hardware)
        if not wanted:
            return Plan(trace_set, [], [], set(), hardware, {}, packed)
        every = [s for s in every if any(s.name == name for _, name in wanted)]
        if not workloads:
            picked = [t for t in picked if any(t.workload.uuid == uuid for uuid, _ in wanted)]
    machine, own = this_machine(use_gpu), own_hashes(packed)
    chosen = select_solutions(every, solutions)
    foreign = foreign_code(chosen, packed, solutions, run_foreign)
    skipped = {s.name: FOREIGN for s in foreign}
    for s in chosen:
        if s.name not in skipped and (why := why_not(s, machine, own)):
            skipped[s.name] = why
    available = [s for s in chosen if s.name not in skipped]
    for remark in other_versions(available, machine):
        say(remark)
    if not available:
        raise UsageError("no solution can run here:\n  " + skipped_text(skipped, "\n  "))
    if skipped:
        say(f"left out: {skipped_text(skipped)}")
    if not is_this_data_set(local):
        say(f"{local}: the reference of its definition is run, which is code of that data set")
    picked = select_workloads(picked, workloads, max_tokens)
    make_missing_workloads(local, picked)
    pairs = {(t.workload.uuid, s.name) for t in picked for s in available}
    pairs = pairs & wanted if traces else pairs
    return Plan(trace_set, available, picked, pairs, hardware, skipped, packed)


def _of_run(
    traces: Path, definition: MoeDefinition, solutions: Sequence[Solution], hardware: str
) -> set[tuple[str, str]]:
    """Return the pairs of a run that have an output and are of these sources and this hardware. Say
    once for each solution what is left out."""
    if not traces.is_file():
        raise UsageError(f"{traces.parent} has no traces.jsonl")
    hashes = {s.name: s.hash() for s in solutions}
    results = read_results([traces], definition.name).itertuples()
    with_output = [result for result in results if result.has_output]
    reasons = [why_not_same(result, hashes, hardware) for result in with_output]
    for why, count in Counter(filter(None, reasons)).items():
        say(f"left out: {why} ({count} results)")
    return {(r.uuid, r.solution) for r, why in zip(with_output, reasons, strict=True) if not why}


# --- rows of the experts ------------------------------------------------------------------------


@dataclass(frozen=True)
class Histogram:
    """Rows of every local expert in one workload."""

    uuid: str
    tokens: int
    rows: tuple[int, ...]
    hit: int = 0
    """Tokens that have a local expert; 0 where rows were drawn without tokens."""

    def counts(self) -> dict[str, int]:
        """The fields of rows that describe a case."""
        return {
            "tokens": self.tokens,
            "hit": self.hit,
            "active": sum(r > 0 for r in self.rows),
            "pairs": sum(self.rows),
            "max": max(self.rows),
        }


def histograms(
    root: Path, tokens: Sequence[int] | None = None, layer: MoeDefinition = DEFAULT
) -> list[Histogram]:
    """Count the rows in the data set's workloads, or in those with these token counts."""
    trace_set, _ = load(root, layer)
    selectors = [f"T={t}" for t in tokens or ()]
    traces = select_workloads(trace_set.workloads[layer.name], selectors)
    make_missing_workloads(root, traces)
    return [histogram(trace_set, trace.workload, layer) for trace in traces]


def histogram(trace_set: TraceSet, workload: Workload, layer: MoeDefinition = DEFAULT) -> Histogram:
    """Count the rows in one workload of the layer, whose tensors exist."""
    definition = definition_of(trace_set)
    loaded = load_safetensors(definition, workload, trace_set.root)
    scalars = {n: s.value for n, s in workload.inputs.items() if s.type == "scalar"}
    factor = scalars.get("routed_scaling_factor", 1.0)
    offset = scalars.get("local_expert_offset", 0)
    if layer.routing == GIVEN:
        return of_ids(workload.uuid, loaded["topk_ids"], offset, layer)
    logits, bias = loaded["routing_logits"], loaded.get("routing_bias")
    return counted(workload.uuid, logits, bias, offset, factor, layer)


def counted(
    uuid: str, logits: Any, bias: Any, offset: int, factor: float, layer: MoeDefinition
) -> Histogram:
    """Count the rows that the layer's routing of these logits gives."""
    bias = None if bias is None else bias.cpu()
    ids, _ = choose_experts(logits.cpu(), bias, factor, MoeShape(**layer.shape))
    return of_ids(uuid, ids, offset, layer)


def of_ids(uuid: str, ids: torch.Tensor, offset: int, layer: MoeDefinition) -> Histogram:
    """Count the rows of chosen experts `[T, top_k]`."""
    local = ids.cpu().long() - offset
    experts = layer.num_local_experts
    here = (local >= 0) & (local < experts)
    counts = local[here].bincount(minlength=experts).tolist()
    hit = int(here.any(dim=1).sum())
    return Histogram(uuid, len(ids), tuple(counts), hit)


# --- inputs for any number of tokens ------------------------------------------------------------


class Problems:
    """Inputs for any number of tokens: those of a workload, or with routing drawn like the nearest
    workload's: the same popular experts and groups, as many requests, the same rank."""

    def __init__(self, root: Path, device: str, seed: int, layer: MoeDefinition = DEFAULT):
        self.root, self.layer = root, layer
        trace_set, _ = load(root, layer)
        self.workloads = {tokens(t.workload): t for t in trace_set.workloads[layer.name]}
        self.inputs = Inputs(trace_set, device, seed)

    def by_name(self, values: Sequence[Any]) -> MoeInputs:
        """Return the definition's inputs by name, with neutral values for inputs that it lacks."""
        values_of: dict[str, Any] = {"routing_bias": None, "local_expert_offset": 0}
        values_of["routed_scaling_factor"] = 1.0
        values_of |= zip(self.inputs.definition.inputs, values, strict=True)
        return MoeInputs(**values_of)

    def of(self, length: int) -> tuple[MoeInputs, str]:
        """Return the inputs, and text that names the source of their routing."""
        trace = self.workloads.get(length)
        template = trace or next(iter(self.workloads.values()))
        make_missing_workloads(self.root, [template])
        workload = template.workload
        if trace is not None:
            return self.by_name(self.inputs.of(workload)), f"workload {workload.uuid[:8]}"
        spec = nearest_spec(self.layer, length)
        drawn: dict[str, Any] = {"routing_logits": RandomInput()}
        if "local_expert_offset" in workload.inputs:
            drawn["local_expert_offset"] = ScalarInput(value=spec.local_expert_offset)
        changed = {"axes": {"seq_len": length}, "inputs": {**workload.inputs, **drawn}}
        inputs = self.by_name(self.inputs.of(workload.model_copy(update=changed)))
        logits = torch.from_numpy(replace(spec, seq_len=length).draw().logits)
        logits = logits.to(self.inputs.device, MoeShape(**self.layer.shape).logits_dtype)
        like = f"drawn as workload {spec.uuid[:8]} is (T={spec.seq_len})"
        return inputs._replace(routing_logits=logits), like

    def histogram(self, inputs: MoeInputs) -> Histogram:
        """Count the rows of every local expert."""
        offset, factor = int(inputs.local_expert_offset), float(inputs.routed_scaling_factor)
        logits, bias = inputs.routing_logits, inputs.routing_bias
        return counted(f"T={len(logits)}", logits, bias, offset, factor, self.layer)


def nearest_spec(layer: MoeDefinition, length: int) -> WorkloadSpec:
    """Return the layer's workload with the nearest number of tokens."""
    return min(load_specs(layer), key=lambda spec: abs(math.log(spec.seq_len / length)))


class SharedProblems(Problems):
    """Inputs of `definitions.SHARED` for any number of tokens: the routed experts of DeepSeek-V3
    TP8's workloads, and the shared expert. The logits' sigmoids have the ratio of the weights."""

    def __init__(self, root: Path, device: str, seed: int):
        self.root, self.layer = root, SHARED
        definition = Definition(**build_definition(SHARED))
        trace_set = TraceSet(root=root, definitions={definition.name: definition})
        self.inputs = Inputs(trace_set, device, seed)

    def of(self, length: int) -> tuple[MoeInputs, str]:
        spec = nearest_spec(DSV3_TP8, length)
        factor = SHARED.routed_scaling_factor
        scalars = {"local_expert_offset": 0, "routed_scaling_factor": factor}
        drawn: dict[str, Any] = {name: RandomInput() for name in self.inputs.definition.inputs}
        drawn |= {name: ScalarInput(value=value) for name, value in scalars.items()}
        workload = Workload(axes={"seq_len": length}, inputs=drawn, uuid=f"T={length}")
        inputs = self.by_name(self.inputs.of(workload))
        draw = replace(spec, seq_len=length).draw()
        ids, scores = torch.from_numpy(draw.ids), torch.from_numpy(draw.logits).double().sigmoid()
        chosen = scores.gather(1, ids)
        shares = (factor - 1) / factor * chosen / chosen.sum(1, keepdim=True)
        logits = torch.full((length, SHARED.num_experts), -30.0, dtype=torch.float64)
        logits.scatter_(1, ids, shares.logit())
        logits[:, -1] = torch.tensor(1 / factor).logit()
        none = torch.zeros(SHARED.num_experts, dtype=torch.bfloat16, device=self.inputs.device)
        changed = inputs._replace(
            routing_logits=logits.float().to(self.inputs.device), routing_bias=none
        )
        return changed, f"drawn as workload {spec.uuid[:8]} is (T={spec.seq_len}), and the shared"


def problems_of(layer: MoeDefinition, root: Path, device: str, seed: int) -> Problems:
    shared = layer is SHARED
    return SharedProblems(root, device, seed) if shared else Problems(root, device, seed, layer)
