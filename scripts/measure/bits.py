"""Checks that a solution's bits repeat, and that a token's bits do not depend on other tokens.

Every solution computes one workload as a whole, and then the same tokens again in other ways. The
outputs are compared bit by bit:

    run to run   the same call again; on another stream; after calls of other sizes; replayed from a
                 CUDA graph after such calls (not if the host waits for the GPU).
    batch        the tokens in reverse order; each token twice; and tokens in small batches: alone,
                 7 and 80 at a time. Batches whose tokens all have an output of zero say nothing
                 and are left out.

A solution that passes all checks is batch invariant, as far as these calls show. A check counts the
tokens that differ of those compared, and has the largest relative difference of a token (Euclidean
norms).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from flashinfer_bench.bench.evaluators.utils import allocate_outputs
from flashinfer_bench.compile import BuilderRegistry
from flashinfer_bench.data import Definition

from scripts.common.command_line import steps
from scripts.data.rows import Writer
from scripts.measure.times import bits, fresh, refuse_changed, run_solution
from scripts.measure.timing import attempt, capture, waits

MAX_TOKENS = 1024
"""Tokens of the whole workload on a GPU: many more take longer and show nothing else."""
WIDTHS = (1, 7, 80)
"""Tokens of the small batches."""
CALLS, CPU_CALLS = 128, 4
"""The most batches of one width, spread evenly over the whole workload."""
TOKEN_AXIS = "seq_len"

Figures = dict[str, Any]
"""The figures of one check: `compared` and `differ` in tokens, and the `largest` relative
difference; or the reason why it was `not_tried`."""


def part(definition: Definition, inputs: Sequence[Any], index: torch.Tensor) -> list[Any]:
    """Return the inputs of these tokens, in this order. Inputs without a token axis are shared."""
    selected = list(inputs)
    for i, spec in enumerate(definition.inputs.values()):
        if TOKEN_AXIS in (spec.shape or ()):
            x, dim = inputs[i], list(spec.shape).index(TOKEN_AXIS)
            same_size = torch.uint8 if x.element_size() == 1 else x.dtype  # float8 has no index
            selected[i] = x.view(same_size).index_select(dim, index).view(x.dtype)
    return selected


def compare(got: torch.Tensor, wanted: torch.Tensor) -> Figures:
    same = bits(got).eq(bits(wanted)).view(len(got), -1).all(dim=1)
    a, b = (x[~same].float().flatten(1) for x in (got, wanted))
    errors = (a - b).norm(dim=1) / b.norm(dim=1)
    largest = float(errors.nan_to_num(nan=float("inf")).max()) if len(errors) else 0.0
    return {"compared": len(same), "differ": int((~same).sum()), "largest": largest}


@dataclass
class Solution:
    """A built solution on one device, with inputs of its own."""

    runnable: Any
    inputs: list[Any]
    device: str

    def __call__(self, index: torch.Tensor | None = None) -> torch.Tensor:
        """Return the output of the tokens in `index`, or of all."""
        definition, mine = self.runnable.metadata.definition, self.inputs
        mine = mine if index is None else part(definition, mine, index)
        return run_solution(self.runnable, mine, self.device)


def on_another_stream(solution: Solution) -> torch.Tensor:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        output = solution()
    torch.cuda.current_stream().wait_stream(stream)
    return output


def replayed(solution: Solution, between: Callable[[], object]) -> torch.Tensor | str:
    """The output of a replay of the captured call, after other calls; or why it is not captured."""
    metadata = solution.runnable.metadata
    if not metadata.destination_passing_style:
        return "returns its output"
    (output,) = allocate_outputs(metadata.definition, solution.inputs, solution.device)
    call = lambda: solution.runnable(*solution.inputs, output)  # noqa: E731
    with torch.no_grad():
        call()
        if waits(call):
            return "its host waits for the GPU"
        graph = capture(call)
        between()
        output.fill_(float("nan"))
        graph.replay()
    torch.cuda.synchronize()
    return output


def batches(output: torch.Tensor, width: int, calls: int) -> list[torch.Tensor]:
    """Return up to `calls` batches of `width` neighbouring tokens that have an output other than
    0."""
    alive = output.ne(0).flatten(1).any(dim=1)
    every = torch.arange(len(output), device=output.device).split(width)
    useful = [index for index in every if bool(alive[index].any())]
    if len(useful) <= calls:
        return useful
    # The first and the last, which may be smaller, are always among them.
    return [useful[(len(useful) - 1) * i // (calls - 1)] for i in range(calls)]


def checks(solution: Solution) -> dict[str, Figures]:
    first = solution()
    count = len(first)
    all_tokens = torch.arange(count, device=first.device)
    twice, reverse = all_tokens.repeat(2), all_tokens.flip(0)

    def other_sizes() -> torch.Tensor:
        doubled = solution(twice)
        solution(all_tokens[: WIDTHS[1]])
        return doubled

    results = {"again": compare(solution(), first)}
    if first.is_cuda:
        results["stream"] = compare(on_another_stream(solution), first)
    doubled = other_sizes()
    results["after others"] = compare(solution(), first)
    if first.is_cuda:
        output = replayed(solution, other_sizes)
        results["graph"] = (
            {"not_tried": output} if isinstance(output, str) else compare(output, first)
        )
    results["reversed"] = compare(solution(reverse), first[reverse])
    results["doubled"] = compare(doubled, first[twice])
    for width in WIDTHS:
        chosen = batches(first, width, CALLS if first.is_cuda else CPU_CALLS)
        if width < count and chosen:
            outputs = torch.cat([solution(index) for index in chosen])
            name = "alone" if width == 1 else f"{width} at a time"
            results[name] = compare(outputs, first[torch.cat(chosen)])
    return results


def measure(
    writer: Writer,
    case: Mapping[str, Any],
    definition: Definition,
    solutions: Sequence[Any],
    inputs: list[Any],
    device: str,
) -> None:
    """Write a row for each check of each solution, or for its error."""

    def bits_of(solution: Any) -> dict[str, Any]:
        built = BuilderRegistry.get_instance().build(definition, solution)
        mine = Solution(built, fresh(inputs), device)
        results = checks(mine)
        refuse_changed(definition, mine.inputs, inputs)
        return results

    for solution in steps(solutions, lambda s: f"bits of {s.name}"):
        results, source = attempt(bits_of, solution), {"hash": solution.hash()}
        if "error" in results:
            writer.add(case, solution.name, **source, **results)
            continue
        for part, figures in results.items():
            writer.add(case, solution.name, **source, part=part, **figures)
