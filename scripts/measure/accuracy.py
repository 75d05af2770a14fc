"""Accuracy of solutions against the reference: cosine, calc_diff and matched ratios, no timing.

A light pass of its own beside flashinfer-bench's check, which records only the matched ratio at the
one tolerance it decides by: each solution runs once a workload, on copies of inputs drawn from a
named seed. With --run, the solutions and workloads of that run are taken, as far as their sources
and the hardware are the same as then, and the figures are added to its traces
(correctness.extra). A solution that changes its inputs is reported, and fails in the ranking.
"""

import argparse
import json
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.common import files
from scripts.common.command_line import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_USAGE,
    UsageError,
    os_error,
    parser,
    run_main,
    say,
    whole,
)
from scripts.common.definitions import DEFAULT, find
from scripts.common.progress import Progress
from scripts.common.project import ACCURACY_TOLERANCES, ROOT
from scripts.common.text import text_table
from scripts.data.dataset import Inputs, definition_of, tokens
from scripts.data.records import INPUTS_CHANGED
from scripts.data.traces import finite
from scripts.measure.cpu_bench import max_size
from scripts.measure.evaluate import (
    FAILURES,
    changed,
    fresh,
    metrics,
    run_reference,
    run_solution,
    tolerance_name,
)
from scripts.measure.second_pass import Pass, choose
from scripts.pack.pack import PackError

if TYPE_CHECKING:
    import torch


def measure(
    what: Pass, device: str, seed: int, report: Callable[[str, str, dict[str, Any]], None]
) -> None:
    """Report the metrics, or the error, of each (uuid, solution) as it is known."""
    from flashinfer_bench.compile import BuilderRegistry

    registry = BuilderRegistry.get_instance()
    definition = definition_of(what.trace_set)
    inputs_of = Inputs(what.trace_set, device, seed)
    total = sum(_weight(tokens(t.workload)) for t in what.workloads)
    progress = Progress(len(what.workloads), total)
    for trace in what.workloads:
        workload = trace.workload
        progress.step(f"accuracy of T={tokens(workload)} ({workload.uuid[:8]})")
        failed: Exception | None = None
        try:
            inputs = inputs_of.of(workload)
            expected, _ = run_reference(definition, inputs)
        except (UsageError, RuntimeError) as error:  # of this workload: the others go on
            failed = error
        for solution in what.solutions:
            if (workload.uuid, solution.name) not in what.pairs:
                continue
            try:
                if failed:
                    raise failed
                result = _figures(registry.build(definition, solution), inputs, expected, device)
                result["seed"] = seed
            except FAILURES as error:
                result = {"error": f"{type(error).__name__}: {error}"}
                traceback.print_exc()
            report(workload.uuid, solution.name, result)
        progress.finish(_weight(tokens(workload)))


def _weight(length: int) -> float:
    return 20 + length


def _figures(
    runnable: Any, inputs: list[Any], expected: "torch.Tensor", device: str
) -> dict[str, Any]:
    mine = fresh(inputs)
    output = run_solution(runnable, mine, device)
    result = metrics(output, expected)
    if names := changed(runnable.metadata.definition, mine, inputs):
        result[INPUTS_CHANGED] = names
    return result


def row(result: dict[str, Any]) -> list[str]:
    """The cells of a solution on a workload."""
    if "error" in result:
        return [result["error"][:60], "", *[""] * len(ACCURACY_TOLERANCES), ""]
    cells = [f"{result['cosine']:.6f}", f"{result['calc_diff']:.2e}"]
    cells += [f"{v:.4f}" for v in result["matched_ratios"].values()]
    return [*cells, ", ".join(result.get(INPUTS_CHANGED, []))]


def table(results: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """A line for each pair of workload and solution."""
    named = [f"matched {tolerance_name(*t)}" for t in ACCURACY_TOLERANCES]
    header = ["T", "uuid", "solution", "cosine", "calc_diff", *named, "changes its inputs"]
    return header, [[str(r["tokens"]), r["uuid"][:8], r["solution"], *row(r)] for r in results]


def parse_arguments() -> argparse.Namespace:
    arguments = parser(__doc__)
    arguments.add_argument("--local", type=Path, default=ROOT, help="data set; this repository")
    arguments.add_argument("--definition", type=find, default=DEFAULT, metavar="NAME")
    arguments.add_argument("--solutions", nargs="+", default=[], metavar="NAME")
    arguments.add_argument("--run-foreign", action="store_true", help="run the data set's own, too")
    arguments.add_argument("--workloads", nargs="+", default=[], metavar="T|UUID")
    arguments.add_argument("--max-tokens", type=whole(1), metavar="T")
    arguments.add_argument("--run", type=Path, metavar="DIR", help="a run of bench")
    arguments.add_argument("--seed", type=whole(0), default=2026)
    arguments.add_argument(
        "--device", choices=("cuda", "cpu"), help="cuda where there is a GPU, else cpu"
    )
    arguments.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    return arguments.parse_args()


def main() -> int:
    args = parse_arguments()

    import torch

    on_gpu = torch.cuda.is_available()
    if args.device == "cuda" and not on_gpu:
        raise UsageError("--device cuda: no GPU is visible")
    device = "cuda:0" if on_gpu and args.device != "cpu" else "cpu"
    if device == "cpu" and args.max_tokens is None and not args.workloads and not args.run:
        args.max_tokens = max_size(args.definition)
    try:
        what = choose(
            args.local,
            device,
            args.run,
            args.solutions,
            args.workloads,
            args.max_tokens,
            args.run_foreign,
            args.definition,
        )
    except PackError as error:
        say(f"error: {error}")
        return EXIT_FAILED
    if not what.pairs:
        say("no trace of this run has an output to compare")
        return EXIT_OK

    results: dict[tuple[str, str], dict[str, Any]] = {}

    def report(uuid: str, name: str, result: dict[str, Any]) -> None:
        results[uuid, name] = result

    status = EXIT_OK
    try:
        measure(what, device, args.seed, report)
    except KeyboardInterrupt:
        status = EXIT_INTERRUPTED
        say("interrupted; the figures so far are kept")
    shown = args.run is None
    try:
        merged = what.merge({pair: r for pair, r in results.items() if "error" not in r})
    except OSError as error:
        status, shown = EXIT_USAGE, True
        say(f"error: {os_error(error)}; the traces are as they were, the figures are only here:")
    lengths = {t.workload.uuid: tokens(t.workload) for t in what.workloads}
    flat = [{"uuid": u, "solution": n, "tokens": lengths[u], **r} for (u, n), r in results.items()]
    flat.sort(key=lambda r: (r["tokens"], r["uuid"], r["solution"]))
    if shown:
        print(text_table(*table(flat), left=3))
    else:
        print(f"accuracy of {merged} results added to {args.run / 'traces.jsonl'}")
    if args.json:
        files.write(args.json, json.dumps(finite(flat), indent=1) + "\n")
    bad = [r for r in flat if "error" in r or INPUTS_CHANGED in r]
    for r in bad:
        why = r.get("error") or f"changes its inputs: {', '.join(r[INPUTS_CHANGED])}"
        say(f"error: {r['solution']} at T={r['tokens']} ({r['uuid'][:8]}): {why}")
    return status or (EXIT_FAILED if bad else EXIT_OK)


if __name__ == "__main__":
    run_main(main)
