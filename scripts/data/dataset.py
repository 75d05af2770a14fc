"""A flashinfer-trace data set (ours or another), its workloads and their inputs.

Only the files of one definition are read. So a file of another definition that this version of
flashinfer-bench cannot parse does no harm, and a large data set opens at once.
"""

import fnmatch
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.common import files
from scripts.common.command_line import UsageError, os_error, say
from scripts.common.definitions import DEFAULT, DEFINITIONS, Entry, size_of
from scripts.common.project import ROOT

if TYPE_CHECKING:
    import torch
    from flashinfer_bench.data import Definition, Solution, Trace, TraceSet, Workload


def load(root: Path, definition: Entry = DEFAULT) -> "tuple[TraceSet, list[str]]":
    """Return the data set at `root` with one definition, and remarks on files passed over."""
    from flashinfer_bench import data

    if not root.is_dir():
        raise UsageError(f"{root} is not a directory")
    name = definition.name
    path = next(iter(sorted((root / "definitions").rglob(f"{name}.json"))), None)
    if path is None:
        raise UsageError(f"{root} is no data set with the definition {name}")
    trace_set = data.TraceSet(root=root)
    try:
        trace_set.definitions[name] = data.load_json_file(data.Definition, path)
        trace_set.workloads[name] = []
        for path in sorted((root / "workloads").rglob(f"{name}.jsonl")):
            trace_set.workloads[name] += data.load_jsonl_file(data.Trace, path)
    except ValueError as error:
        raise UsageError(f"{path} cannot be read: {_first_line(error)}") from None
    remarks: list[str] = []
    solutions: dict[str, Solution] = {}
    for path in sorted((root / "solutions").rglob("*.json")):
        try:
            if name in path.read_text(encoding="utf-8", errors="replace"):
                solution = data.load_json_file(data.Solution, path)
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


def definition_of(trace_set: "TraceSet") -> "Definition":
    """Return the one definition of a data set from `load`."""
    (definition,) = trace_set.definitions.values()
    return definition


def say_whose_reference(root: Path) -> None:
    """Say that the reference about to run is not ours, if it is not."""
    if not ours(root):
        say(f"{root}: the reference of its definition is run, which is code of that data set")


def matches(name: str, patterns: Sequence[str]) -> bool:
    """True if a name matches one of the shell-style patterns, or if there are none."""
    return not patterns or any(fnmatch.fnmatch(name, p) for p in patterns)


def select_solutions(solutions: "Sequence[Solution]", patterns: Sequence[str]) -> "list[Solution]":
    """Return the solutions whose names match one of the patterns, or all without patterns."""
    unknown = [p for p in patterns if not any(matches(s.name, [p]) for s in solutions)]
    if unknown or not solutions:
        names = ", ".join(s.name for s in solutions) or "none"
        raise UsageError(f"no solution matches {', '.join(unknown) or 'this'}; there are: {names}")
    return [s for s in solutions if matches(s.name, patterns)]


def tokens(workload: "Workload") -> int:
    """Return the tokens of a workload, or the rows of a grouped GEMM; see `size_of`."""
    return size_of(workload.axes)


def named(workload: "Workload") -> str:
    """Return the name of a workload in lines of progress."""
    return f"T={tokens(workload)} ({workload.uuid[:8]})"


def select_workloads(
    workloads: "Sequence[Trace]", selectors: Sequence[str], max_tokens: int | None = None
) -> "list[Trace]":
    """Return the workloads that a selector names by T (`901` or `T=901`) or by the beginning of the
    uuid, in the data set's order, or all without selectors. `max_tokens` is a further limit."""
    lengths = {tokens(t.workload) for t in workloads}

    def chooses(selector: str, workload: "Workload") -> bool:
        number = selector[2:] if selector.upper().startswith("T=") else selector
        if number.isdigit() and (number != selector or int(number) in lengths):
            return int(number) == tokens(workload)
        return workload.uuid.startswith(selector.lower())

    chosen = {s: {t.workload.uuid for t in workloads if chooses(s, t.workload)} for s in selectors}
    if unused := [selector for selector, uuids in chosen.items() if not uuids]:
        raise UsageError(
            f"no workload matches {', '.join(unused)} (a token count or the beginning of a uuid)"
        )
    selected = [
        t
        for t in workloads
        if (not selectors or any(t.workload.uuid in uuids for uuids in chosen.values()))
        and (max_tokens is None or tokens(t.workload) <= max_tokens)
    ]
    if not selected:
        raise UsageError("no workload is left by this selection")
    return selected


def make_missing_workloads(root: Path, traces: "Sequence[Trace]") -> None:
    """Generate the missing tensors of these workloads, if they are ours."""
    missing = [
        trace.workload.uuid
        for trace in traces
        if any(
            spec.type == "safetensors" and not (root / spec.path).is_file()
            for spec in trace.workload.inputs.values()
        )
    ]
    if not missing:
        return
    if root.resolve() != ROOT:
        raise UsageError(
            f"{root} lacks the tensors of {len(missing)} workloads, for example {missing[0]}: "
            "is its blob/ directory there (git lfs pull)?"
        )
    from scripts.data.workload_specs import make_workloads

    make_workloads(root, missing, definition=DEFINITIONS[traces[0].definition])


def load_tensors(
    trace_set: "TraceSet", workload: "Workload"
) -> "tuple[dict[str, torch.Tensor], list[tuple[int, ...] | None]]":
    """Return the tensors that a workload loads from files, by name, and the shapes of all inputs,
    in their order.

    Raises:
        UsageError: an axis has no value, or a file does not fit the definition. Its one line says
            what to do.
    """
    from flashinfer_bench.bench.utils import load_safetensors
    from safetensors import SafetensorError

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
        if any(p.is_file() and p.read_bytes().startswith(files.LFS_POINTER) for p in paths):
            text = "a pointer of git-lfs in the place of the tensors"
        if ours(root):
            remedy = "remove it, then run.py data makes it anew"
        raise UsageError(f"{named}: {', '.join(map(str, paths))}: {text}; {remedy}") from None


def draw(
    definition: "Definition",
    name: str,
    shape: Sequence[int],
    device: "torch.device",
    seed: int,
) -> "torch.Tensor":
    """Draw a random input as flashinfer-bench does (standard normal; FP8 values clamped to +-2),
    but from a seed, and in slices: the float32 draws of a whole weight take 3.8 GB."""
    import torch
    from flashinfer_bench.utils import dtype_str_to_torch_dtype

    dtype = dtype_str_to_torch_dtype(definition.inputs[name].dtype)
    generator = torch.Generator(device=device)
    generator.manual_seed(seed ^ zlib.crc32(name.encode()))
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

    def __init__(self, trace_set: "TraceSet", device: str, seed: int):
        self.trace_set = trace_set
        self.definition = definition_of(trace_set)
        self.device = device
        self.seed = seed
        self._fixed: dict[str, torch.Tensor] = {}

    def of(self, workload: "Workload") -> list[Any]:
        import torch

        loaded, shapes = load_tensors(self.trace_set, workload)
        device = torch.device(self.device)
        values: list[Any] = []
        for (name, tensor), shape in zip(self.definition.inputs.items(), shapes, strict=True):
            spec = workload.inputs.get(name)
            if name in loaded:
                values.append(loaded[name].to(device))
            elif spec is not None and spec.type == "scalar":
                values.append(spec.value)
            elif shape is None:
                raise UsageError(f"workload {workload.uuid} leaves the scalar {name} open")
            elif all(self.definition.axes[axis].type == "const" for axis in tensor.shape or []):
                if name not in self._fixed:
                    self._fixed[name] = draw(self.definition, name, shape, device, self.seed)
                values.append(self._fixed[name])
            else:
                seed = self.seed ^ zlib.crc32(workload.uuid.encode())
                values.append(draw(self.definition, name, shape, device, seed))
        return values


def ours(root: Path) -> bool:
    """True if the data set is this repository."""
    return root.resolve() == ROOT
