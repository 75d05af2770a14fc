"""Accuracy of solutions against the reference: cosine, calc_diff and matched ratios, no timing.

A light pass of its own beside flashinfer-bench's check, which records only the matched ratio at the
one tolerance it decides by: each solution runs once a workload, on inputs drawn from a named seed.
With --run, the solutions and workloads of that run are taken and the figures are added to its
traces (correctness.extra).
"""

import json
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import (
    ACCURACY_TOLERANCES,
    DEFINITION,
    EXIT_FAILED,
    EXIT_OK,
    ROOT,
    Progress,
    UsageError,
    parser,
    run_main,
    text_table,
)
from dataset import (
    Inputs,
    add_solutions,
    load,
    make_missing_workloads,
    packed_solutions,
    select_solutions,
    select_workloads,
    tokens,
)

if TYPE_CHECKING:
    import torch
    from flashinfer_bench.data import Solution, Trace, TraceSet


def tolerance_name(rtol: float, atol: float) -> str:
    return f"{rtol:g}/{atol:g}"


def metrics(output: "torch.Tensor", reference: "torch.Tensor") -> dict[str, Any]:
    """The figures that go into a trace's correctness.extra."""
    from moe_fp8.core.metrics import calc_diff, cosine, matched_ratio

    return {
        "cosine": float(cosine(output, reference)),
        "calc_diff": float(calc_diff(output, reference)),
        "matched_ratios": {
            tolerance_name(rtol, atol): float(matched_ratio(output, reference, rtol, atol))
            for rtol, atol in ACCURACY_TOLERANCES
        },
    }


def run_solution(runnable: Any, inputs: list[Any], device: str) -> "torch.Tensor":
    """The output of a built solution, whose memory is filled with NaN before: an element that is
    not written shows."""
    import torch
    from flashinfer_bench.bench.evaluators.utils import allocate_outputs, normalize_result

    definition = runnable.metadata.definition
    with torch.no_grad():
        if runnable.metadata.destination_passing_style:
            outputs = allocate_outputs(definition, inputs, device)
            for output in outputs:
                output.fill_(float("nan"))
            runnable(*inputs, *outputs)
        else:
            outputs = normalize_result(definition, runnable(*inputs), device)
    return outputs[0]


def measure(
    trace_set: "TraceSet",
    solutions: "Sequence[Solution]",
    workloads: "Sequence[Trace]",
    device: str,
    seed: int,
    report: Callable[[str, str, dict[str, Any]], None],
    wanted: set[tuple[str, str]] | None = None,
) -> None:
    """Report the metrics, or the error, of each (uuid, solution) as it is known."""
    from flashinfer_bench.compile import BuilderRegistry

    registry = BuilderRegistry.get_instance()
    definition = trace_set.definitions[DEFINITION]
    reference = registry.build_reference(definition)
    inputs_of = Inputs(trace_set, device, seed)
    progress = Progress(len(workloads), sum(20 + tokens(t.workload) for t in workloads))
    for trace in workloads:
        workload = trace.workload
        progress.step(f"accuracy of T={tokens(workload)} ({workload.uuid[:8]})")
        inputs = inputs_of.of(workload)
        expected = reference(*inputs)
        for solution in solutions:
            if wanted is not None and (workload.uuid, solution.name) not in wanted:
                continue
            try:
                output = run_solution(registry.build(definition, solution), inputs, device)
                result = {**metrics(output, expected), "seed": seed}
            except Exception as error:
                result = {"error": f"{type(error).__name__}: {error}"}
                traceback.print_exc()
            report(workload.uuid, solution.name, result)
        progress.finish(20 + tokens(workload))


def merge_into_traces(path: Path, results: dict[tuple[str, str], dict[str, Any]]) -> int:
    """Add the figures to the correctness of a run's traces; the number of traces they went to."""
    lines, merged = [], 0
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        result = results.get((record["workload"]["uuid"], record["solution"]))
        correctness = (record.get("evaluation") or {}).get("correctness")
        if result is not None and correctness is not None and "error" not in result:
            correctness["extra"] = {**(correctness.get("extra") or {}), **result}
            merged += 1
        lines.append(json.dumps(record))
    partial = path.with_suffix(".tmp")
    partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
    partial.replace(path)
    return merged


def passed_pairs(path: Path) -> set[tuple[str, str]]:
    """(uuid, solution) of the traces that have a correctness record."""
    pairs = set()
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if (record.get("evaluation") or {}).get("correctness") is not None:
            pairs.add((record["workload"]["uuid"], record["solution"]))
    return pairs


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--local", type=Path, default=ROOT, help="data set; this repository")
    arguments.add_argument("--solutions", nargs="+", default=[], metavar="NAME")
    arguments.add_argument("--workloads", nargs="+", default=[], metavar="T|UUID")
    arguments.add_argument("--max-tokens", type=int, metavar="T")
    arguments.add_argument("--run", type=Path, metavar="DIR", help="a run of benchmark.py")
    arguments.add_argument("--seed", type=int, default=2026)
    arguments.add_argument("--device", default=None, help="cuda where there is a GPU, else cpu")
    arguments.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    args = arguments.parse_args()

    import torch
    from pack import PackError, write_packed

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cpu" and args.max_tokens is None and not args.workloads and not args.run:
        args.max_tokens = 16
    try:
        mine = packed_solutions(write_packed())
    except PackError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    trace_set, remarks = load(args.local)
    remarks += add_solutions(trace_set, mine)
    for remark in remarks:
        print(remark, file=sys.stderr)
    wanted = None
    if args.run:
        traces = args.run / "traces.jsonl"
        if not traces.is_file():
            raise UsageError(f"{args.run} has no traces.jsonl")
        wanted = passed_pairs(traces)
        args.workloads = sorted({uuid for uuid, _ in wanted})
        args.solutions = sorted({name for _, name in wanted})
        if not wanted:
            print("no trace of this run has an output to compare", file=sys.stderr)
            return EXIT_OK
    solutions = select_solutions(trace_set.solutions[DEFINITION], args.solutions)
    workloads = select_workloads(trace_set.workloads[DEFINITION], args.workloads, args.max_tokens)
    make_missing_workloads(args.local, workloads)

    results: dict[tuple[str, str], dict[str, Any]] = {}

    def report(uuid: str, name: str, result: dict[str, Any]) -> None:
        results[uuid, name] = result

    measure(trace_set, solutions, workloads, device, args.seed, report, wanted)
    if args.run:
        merged = merge_into_traces(args.run / "traces.jsonl", results)
        print(f"accuracy of {merged} results added to {args.run / 'traces.jsonl'}")
    lengths = {t.workload.uuid: tokens(t.workload) for t in workloads}
    rows = [
        [
            str(lengths[uuid]),
            uuid[:8],
            name,
            f"{r['cosine']:.6f}",
            f"{r['calc_diff']:.2e}",
            *(f"{v:.4f}" for v in r["matched_ratios"].values()),
        ]
        if "error" not in r
        else [str(lengths[uuid]), uuid[:8], name, r["error"][:60], "", "", "", ""]
        for (uuid, name), r in sorted(results.items(), key=lambda i: (lengths[i[0][0]], i[0]))
    ]
    names = [f"matched {tolerance_name(*t)}" for t in ACCURACY_TOLERANCES]
    if not args.run:
        print(text_table(["T", "uuid", "solution", "cosine", "calc_diff", *names], rows, left=3))
    if args.json:
        flat = [
            {"uuid": u, "solution": n, "tokens": lengths[u], **r} for (u, n), r in results.items()
        ]
        args.json.write_text(json.dumps(flat, indent=1) + "\n", encoding="utf-8")
    return EXIT_FAILED if any("error" in r for r in results.values()) else EXIT_OK


if __name__ == "__main__":
    run_main(main)
