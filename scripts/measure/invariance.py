"""Whether a solution's bits repeat, and whether a token's bits are its own; no timing.

Every solution computes one workload, the whole, and then the same tokens again in other ways. The
outputs are compared bit by bit:

  run to run   the same call again; on another stream; after calls of other sizes; replayed from a
               CUDA graph after such calls (not where the host waits for the GPU).
  batch        the tokens in reverse order; each token twice, so that there are twice as many; and
               tokens in small batches: alone, 7 and 80 at a time. Batches in which no token has an
               output other than zero say nothing and are left out.

A solution that passes all of them gives a token the same bits whatever else is in the batch, and
however large it is: it is batch invariant, as far as these calls show. What differs is counted:
tokens of those compared, and the largest relative difference of a token (Euclidean norms).

With --run the solutions are those of that run whose sources are the same as then; invariance.json
goes into its directory, where `rank`, `report` and `readme_tables` find it. On the CPU it is the
torch model that is looked at.
"""

import argparse
import json
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.common import environment, files
from scripts.common.command_line import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    UsageError,
    parser,
    run_main,
    say,
    whole,
)
from scripts.common.definitions import DEFAULT, MoeDefinition, find
from scripts.common.progress import Progress
from scripts.common.project import ROOT
from scripts.data.dataset import Inputs, definition_of, tokens
from scripts.data.records import INVARIANCE
from scripts.data.traces import finite
from scripts.measure.cpu_bench import CPU_MAX_TOKENS
from scripts.measure.device_time import capture, waits
from scripts.measure.evaluate import FAILURES, fresh, refuse_changed, run_solution
from scripts.measure.second_pass import choose
from scripts.pack.pack import PackError
from scripts.table.tables import bits_table

if TYPE_CHECKING:
    import torch
    from flashinfer_bench.data import Definition, Trace

MAX_TOKENS = 1024
"""Of the whole on a GPU: many more take longer and show nothing else."""
WIDTHS = (1, 7, 80)
"""Tokens of the small batches."""
CALLS, CPU_CALLS = 128, 4
"""Batches of a width: at most so many, evenly spread over the whole."""
TOKEN_AXIS = "seq_len"

Figures = dict[str, Any]
"""Of one check: `compared` and `differ` (tokens) and `largest`; or why it was `not_tried`."""


def part(definition: "Definition", inputs: Sequence[Any], index: "torch.Tensor") -> list[Any]:
    """The inputs of these tokens, in this order; what has no tokens is shared."""
    import torch

    def take(x: Any, shape: Sequence[str] | None) -> Any:
        if not isinstance(x, torch.Tensor) or TOKEN_AXIS not in (shape or ()):
            return x
        dim = list(shape or ()).index(TOKEN_AXIS)
        if x.element_size() > 1:
            return x.index_select(dim, index)
        return x.view(torch.uint8).index_select(dim, index).view(x.dtype)  # float8 has no index

    specs = definition.inputs.values()
    return [take(x, spec.shape) for x, spec in zip(inputs, specs, strict=True)]


def compare(got: "torch.Tensor", wanted: "torch.Tensor") -> Figures:
    """Figures of two outputs, token by token."""
    import torch

    def bits(x: torch.Tensor) -> torch.Tensor:  # NaN equals itself, and 0 does not equal -0
        return x.contiguous().view(torch.uint8).flatten(1)

    same = bits(got).eq(bits(wanted)).all(dim=1)
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

    def __call__(self, index: "torch.Tensor | None" = None) -> "torch.Tensor":
        """The output of these tokens, or of all."""
        definition, mine = self.runnable.metadata.definition, self.inputs
        mine = mine if index is None else part(definition, mine, index)
        return run_solution(self.runnable, mine, self.device)


def on_another_stream(solution: Solution) -> "torch.Tensor":
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        output = solution()
    torch.cuda.current_stream().wait_stream(stream)
    return output


def replayed(solution: Solution, between: Callable[[], object]) -> "torch.Tensor | str":
    """The output of a replay of the captured call, after other calls; or why it is not captured."""
    import torch
    from flashinfer_bench.bench.evaluators.utils import allocate_outputs

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


def batches(output: "torch.Tensor", width: int, calls: int) -> "list[torch.Tensor]":
    """Indices of neighbouring tokens, `width` at a time, as far as one of them has an output."""
    import torch

    alive = output.ne(0).flatten(1).any(dim=1)
    every = torch.arange(len(output), device=output.device).split(width)
    useful = [index for index in every if bool(alive[index].any())]
    if len(useful) <= calls:
        return useful
    # The first and the last, which may be smaller, are always among them.
    return [useful[(len(useful) - 1) * i // max(calls - 1, 1)] for i in range(calls)]


def checks(solution: Solution, calls: int) -> dict[str, Figures]:
    """All that is looked at, by the check's name."""
    import torch

    first = solution()
    count = len(first)
    all_tokens = torch.arange(count, device=first.device)
    twice = all_tokens.repeat(2)

    def other_sizes() -> "torch.Tensor":
        doubled = solution(twice)
        solution(all_tokens[: WIDTHS[1]])
        return doubled

    found = {"again": compare(solution(), first)}
    if first.is_cuda:
        found["stream"] = compare(on_another_stream(solution), first)
    doubled = other_sizes()
    found["after others"] = compare(solution(), first)
    if first.is_cuda:
        output = replayed(solution, other_sizes)
        found["graph"] = (
            {"not_tried": output} if isinstance(output, str) else compare(output, first)
        )
    reverse = all_tokens.flip(0)
    found["reversed"] = compare(solution(reverse), first[reverse])
    found["doubled"] = compare(doubled, first[twice])
    for width in WIDTHS:
        if width < count:
            chosen = batches(first, width, calls)
            outputs = [solution(index) for index in chosen]
            name = "alone" if width == 1 else f"{width} at a time"
            if outputs:
                found[name] = compare(torch.cat(outputs), first[torch.cat(chosen)])
    return found


def look_at(runnable: Any, inputs: Sequence[Any], device: str, calls: int) -> dict[str, Figures]:
    """The checks of a built solution, on copies of the inputs. Raises ChangedInputs."""
    mine = Solution(runnable, fresh(inputs), device)
    found = checks(mine, calls)
    refuse_changed(runnable.metadata.definition, mine.inputs, inputs)
    return found


def measure(
    definition: "Definition", solutions: Sequence[Any], inputs: list[Any], device: str, calls: int
) -> "dict[str, dict[str, Any]]":
    """Of each solution the `checks`, or an `error`. What is known is kept where Ctrl-C comes."""
    from flashinfer_bench.compile import BuilderRegistry

    registry = BuilderRegistry.get_instance()
    results: dict[str, dict[str, Any]] = {}
    progress = Progress(len(solutions), len(solutions))
    for solution in solutions:
        progress.step(solution.name)
        try:
            found = look_at(registry.build(definition, solution), inputs, device, calls)
            results[solution.name] = {"checks": found}
        except KeyboardInterrupt:
            say("interrupted; what is known is kept")
            results[solution.name] = {"error": "interrupted"}
            break
        except FAILURES as error:
            traceback.print_exc()
            results[solution.name] = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        progress.finish(1)
    return results


def parse_arguments() -> argparse.Namespace:
    arguments = parser(__doc__)
    add = arguments.add_argument
    add("--local", type=Path, default=ROOT, help="data set; this repository")
    add("--definition", type=find, default=DEFAULT, metavar="NAME")
    add("--solutions", nargs="+", default=[], metavar="NAME")
    add("--run-foreign", action="store_true", help="run the data set's own, too")
    add("--workload", metavar="T|UUID", help=f"the whole; the largest of up to {MAX_TOKENS} tokens")
    add("--run", type=Path, metavar="DIR", help="a run of bench")
    add("--seed", type=whole(0), default=2026)
    add("--calls", type=whole(1), metavar="N", help=f"batches of a width, at most ({CALLS})")
    add("--device", choices=("cuda", "cpu"), help="cuda where there is a GPU, else cpu")
    add("--json", type=Path, metavar="FILE", help="write the figures there, too")
    return arguments.parse_args()


def main() -> int:
    args = parse_arguments()
    if not isinstance(args.definition, MoeDefinition):
        raise UsageError(f"{args.definition.name}: only a layer has tokens to put into batches")

    import torch

    on_gpu = torch.cuda.is_available() and args.device != "cpu"
    if args.device == "cuda" and not on_gpu:
        raise UsageError("--device cuda: no GPU is visible")
    device = "cuda:0" if on_gpu else "cpu"
    most = None if args.workload else MAX_TOKENS if on_gpu else CPU_MAX_TOKENS
    asked = [args.workload] if args.workload else []
    try:
        what = choose(
            args.local, device, args.run, args.solutions, asked, most, args.run_foreign,
            args.definition,
        )  # fmt: skip
    except PackError as error:
        say(f"error: {error}")
        return EXIT_FAILED

    def length(trace: "Trace") -> int:
        return tokens(trace.workload)

    if not what.pairs:
        say("no trace of this run has an output to look at")
        return EXIT_OK
    trace = max(what.workloads, key=length)
    workload = trace.workload
    solutions = [s for s in what.solutions if (workload.uuid, s.name) in what.pairs]
    definition = definition_of(what.trace_set)
    inputs = Inputs(what.trace_set, device, args.seed).of(workload)
    say(f"T={length(trace)} ({workload.uuid[:8]}): {', '.join(s.name for s in solutions)}")
    calls = args.calls or (CALLS if on_gpu else CPU_CALLS)
    results = measure(definition, solutions, inputs, device, calls)
    record: dict[str, Any] = {
        "hardware": what.hardware,
        "device": "cuda" if on_gpu else "cpu",
        "workload": workload.uuid,
        "tokens": length(trace),
        "seed": args.seed,
        "environment": environment.capture(),
        "solutions": {s.name: s.hash() for s in solutions},
        "results": finite(results),
    }
    print(bits_table({name: r.get("checks", {}) for name, r in results.items()}).text())
    for path in (args.run / INVARIANCE if args.run else None, args.json):
        if path is not None:
            files.write(path, json.dumps(record, indent=1) + "\n")
    errors = {name: r["error"] for name, r in results.items() if "error" in r}
    for name, why in errors.items():
        say(f"error: {name}: {why}")
    if "interrupted" in errors.values():
        return EXIT_INTERRUPTED
    return EXIT_FAILED if errors else EXIT_OK


if __name__ == "__main__":
    run_main(main)
