"""A flashinfer-trace data set (ours or another), its workloads and their inputs.

Only what concerns one definition is read, so that a file of another definition that this
version of flashinfer-bench cannot parse does not matter, and a large data set opens at once.
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
    """The data set at `root` with one definition alone, and remarks on files passed over."""
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
            said = "not a solution of this flashinfer-bench version"
            remarks.append(f"{path}: {said}: {_first_line(error)}")
    trace_set.solutions[name] = list(solutions.values())
    return trace_set, remarks


def _first_line(error: Exception) -> str:
    return ", ".join(str(error).splitlines()[:2])


def definition_of(trace_set: "TraceSet") -> "Definition":
    """The one definition of what `load` gave."""
    (definition,) = trace_set.definitions.values()
    return definition


def say_whose_reference(root: Path) -> None:
    """A line where the reference that is going to run is not ours."""
    if not ours(root):
        say(f"{root}: the reference of its definition is run, which is code of that data set")


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name is one of those that the shell-style patterns choose; all are without any."""
    return not patterns or any(fnmatch.fnmatch(name, p) for p in patterns)


def select_solutions(solutions: "Sequence[Solution]", patterns: Sequence[str]) -> "list[Solution]":
    """The solutions whose names match one of the patterns; all without patterns."""
    unknown = [p for p in patterns if not any(matches(s.name, [p]) for s in solutions)]
    if unknown or not solutions:
        names = ", ".join(s.name for s in solutions) or "none"
        raise UsageError(f"no solution matches {', '.join(unknown) or 'this'}; there are: {names}")
    return [s for s in solutions if matches(s.name, patterns)]


def tokens(workload: "Workload") -> int:
    """Of a grouped GEMM its rows; see `size_of`."""
    return size_of(workload.axes)


def named(workload: "Workload") -> str:
    """As lines of progress name it."""
    return f"T={tokens(workload)} ({workload.uuid[:8]})"


def select_workloads(
    workloads: "Sequence[Trace]", selectors: Sequence[str], max_tokens: int | None = None
) -> "list[Trace]":
    """The workloads chosen by T (`901` or `T=901`) or by the beginning of their uuid, in the data
    set's order; all of them without selectors. `max_tokens` limits what is left further."""
    lengths = {tokens(t.workload) for t in workloads}

    def chooses(selector: str, workload: "Workload") -> bool:
        number = selector[2:] if selector.upper().startswith("T=") else selector
        if number.isdigit() and (number != selector or int(number) in lengths):
            return int(number) == tokens(workload)
        return workload.uuid.startswith(selector.lower())

    chosen = {s: {t.workload.uuid for t in workloads if chooses(s, t.workload)} for s in selectors}
    if unused := [selector for selector, found in chosen.items() if not found]:
        raise UsageError(
            f"no workload matches {', '.join(unused)} (a token count or the beginning of a uuid)"
        )
    left = [
        t
        for t in workloads
        if (not selectors or any(t.workload.uuid in found for found in chosen.values()))
        and (max_tokens is None or tokens(t.workload) <= max_tokens)
    ]
    if not left:
        raise UsageError("no workload is left by this selection")
    return left


def make_missing_workloads(root: Path, traces: "Sequence[Trace]") -> None:
    """Generate the tensors that these workloads load and that are not there; ours only."""
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
    """What a workload loads from files, by name, and the shapes of all inputs, in their order.

    Raises:
        UsageError: an axis has no value, or a file is not what the definition says; in one line,
            with what to do.
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
        said, remedy = _first_line(error), "get it anew (git lfs pull)"
        if any(p.is_file() and p.read_bytes().startswith(files.LFS_POINTER) for p in paths):
            said = "a pointer of git-lfs in the place of the tensors"
        if ours(root):
            remedy = "remove it, then run.py data makes it anew"
        raise UsageError(f"{named}: {', '.join(map(str, paths))}: {said}; {remedy}") from None


def draw(
    definition: "Definition",
    name: str,
    shape: Sequence[int],
    device: "torch.device",
    seed: int,
) -> "torch.Tensor":
    """A random input as flashinfer-bench draws it (standard normal; FP8 values clamped to +-2),
    but from a seed, and in slices: the float32 draws of a whole weight take 3.8 GB."""
    import torch
    from flashinfer_bench.utils import dtype_str_to_torch_dtype

    dtype = dtype_str_to_torch_dtype(definition.inputs[name].dtype)
    generator = torch.Generator(device=device)
    generator.manual_seed(seed ^ zlib.crc32(name.encode()))
    if dtype != torch.float8_e4m3fn:
        return torch.randn(tuple(shape), generator=generator, device=device).to(dtype)
    out = torch.empty(tuple(shape), dtype=dtype, device=device)
    for part in [out] if len(shape) < 3 else out:
        drawn = torch.randn(part.shape, generator=generator, device=device)
        part.copy_(drawn.clamp_(-2.0, 2.0))
    return out


class Inputs:
    """Inputs of one workload after another, the weights drawn once and shared by all of them.

    flashinfer-bench draws everything anew for each workload and trial. Here the weights, 1.4 GB
    whose draws take most of the time on a CPU, depend on the seed alone; the tokens' values depend
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
    """Whether the data set is this repository."""
    return root.resolve() == ROOT
