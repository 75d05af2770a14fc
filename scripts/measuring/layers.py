"""Measurements of a whole layer: accuracy and times of calls, bits that repeat, and the roofline.

A solution gets its own tokens; the weights are shared. `times` compares all inputs with the
originals and restores them. `bits` copies and compares them. A sweep does neither.
"""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from flashinfer_bench.bench.evaluators.utils import allocate_outputs, normalize_result
from flashinfer_bench.compile import BuilderRegistry
from flashinfer_bench.data import Definition, Solution
from moe_fp8.reference import calc_diff

from scripts.common.definitions import GROUP, MoeDefinition, roofline_ms
from scripts.common.program import ACCURACY_TOLERANCES, error_line, steps
from scripts.measuring.accuracy import cosine, matched_ratio
from scripts.measuring.cases import Histogram, Inputs, Plan, definition_of, named, tokens
from scripts.measuring.clock import (
    FAILURES,
    Rates,
    Timed,
    attempt,
    both_times,
    capture,
    device_times,
    figures,
    on_own_stream,
    one_after_another,
    timed,
    waits,
)
from scripts.publishing.rows import Writer

BITS_MAX_TOKENS = 1024
"""Tokens of the workload whose bits are compared, on a GPU: more take longer and show nothing."""
WIDTHS = (1, 7, 80)
"""Tokens of the small batches."""
BATCHES, CPU_BATCHES = 128, 4
"""The most batches of one width, spread evenly over the whole workload."""
TOKEN_AXIS = "seq_len"


# --- accuracy and times ---------------------------------------------------------------------------


def metrics(output: torch.Tensor, reference: torch.Tensor) -> dict[str, Any]:
    """Return the figures that go into a trace's correctness.extra."""
    return {
        "cosine": float(cosine(output, reference)),
        "calc_diff": float(calc_diff(output, reference)),
        "matched_ratios": {
            f"{rtol:g}/{atol:g}": float(matched_ratio(output, reference, rtol, atol))
            for rtol, atol in ACCURACY_TOLERANCES
        },
    }


def fresh(inputs: Sequence[Any]) -> list[Any]:
    """Return the inputs with their tensors copied."""
    return [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]


def bits(x: torch.Tensor) -> torch.Tensor:
    """Return the elements as bytes: NaN equals itself, and 0 does not equal -0."""
    return x.contiguous().view(-1).view(torch.uint8)


def changed(definition: Definition, inputs: Sequence[Any], originals: Sequence[Any]) -> list[str]:
    """Return the names of the inputs whose bytes differ from the originals'."""
    return [
        name
        for name, x, original in zip(definition.inputs, inputs, originals, strict=True)
        if isinstance(original, torch.Tensor) and not torch.equal(bits(x), bits(original))
    ]


def refuse_changed(definition: Definition, inputs: Sequence[Any], originals: Sequence[Any]) -> None:
    """Raise RuntimeError if the inputs differ from the originals."""
    if names := changed(definition, inputs, originals):
        raise RuntimeError(f"the solution changes its inputs: {', '.join(names)}")


def run_solution(runnable: Any, inputs: Sequence[Any], device: str) -> torch.Tensor:
    """Return the output of a built solution. Its memory is filled with NaN before, so that an
    element that is not written shows."""
    definition = runnable.metadata.definition
    with torch.no_grad():
        if runnable.metadata.destination_passing_style:
            outputs = allocate_outputs(definition, list(inputs), device)
            for output in outputs:
                output.fill_(float("nan"))
            runnable(*inputs, *outputs)
        else:
            outputs = normalize_result(definition, runnable(*inputs), device)
    return outputs[0]


def run_reference(definition: Definition, inputs: Sequence[Any]) -> tuple[torch.Tensor, float]:
    """Return the output of the definition's reference, and its seconds. Raises RuntimeError, with
    one line: the reference fails or calls sys.exit."""
    try:
        reference = BuilderRegistry.get_instance().build_reference(definition)
        start = time.perf_counter()
        return reference(*inputs), time.perf_counter() - start
    except FAILURES as error:
        text = f"the reference of {definition.name} fails: {error_line(error)}"
        raise RuntimeError(text) from error


Subjects = dict[str, tuple[Callable[[], Timed], Mapping[str, Any]]]
"""By name: a function that prepares the call, and fields of its rows."""


def measure_calls(
    writer: Writer,
    case: Mapping[str, Any],
    definition: Definition,
    inputs: list[Any],
    subjects: Subjects,
    repeats: int,
    roofline: float | None = None,
    limit: float | None = None,
) -> None:
    """Run each call once and compare its output. Then time those that ran, with `limit` only the
    correct ones; device times are taken in turns. Write a row for the accuracy of each call and for
    its time by each clock, or for its error.

    Args:
        inputs: of the definition, in its order.
        repeats: timed calls; 0 if nothing is timed.
        roofline: ms; None if not known.
        limit: largest accepted calc_diff to the reference; None accepts every output.
    """

    def add(subject: str, **fields: Any) -> None:
        writer.add(case, subject, **subjects[subject][1], **fields)

    def check(subject: str, expected: torch.Tensor, originals: list[Any] | None) -> dict[str, Any]:
        """Run the call once and return its accuracy. Raises RuntimeError: a wrong output."""
        call = subjects[subject][0]()
        call.poison()
        call()
        accuracy = metrics(call.output, expected)
        if limit is not None and not accuracy["calc_diff"] <= limit:  # also true for NaN
            raise RuntimeError(f"calc_diff {accuracy['calc_diff']:.1e} to the reference")
        if originals and call.as_defined:
            mine = call.arguments[: len(originals)]
            if names := changed(definition, mine, originals):
                accuracy["inputs_changed"] = names
                for x, original in zip(mine, originals, strict=True):
                    if isinstance(original, torch.Tensor):
                        x.copy_(original)  # all calls share the weights
        ready[subject] = call
        return accuracy

    expected = attempt(run_reference, definition, inputs)
    if isinstance(expected, dict):  # the reference failed, for all calls
        for subject in subjects:
            add(subject, roofline=roofline, **expected)
        return
    # With a limit no copies are made: the output tells enough, and a copy of the weights can fill
    # half of a GPU.
    originals = None if limit else fresh(inputs)
    ready: dict[str, Timed] = {}
    with torch.no_grad(), on_own_stream() if repeats else contextlib.nullcontext():
        for subject in subjects:
            accuracy = attempt(check, subject, expected[0], originals)
            add(subject, **({"roofline": roofline} if "error" in accuracy else {}), **accuracy)
        del expected, originals
        for subject, times in (both_times(ready, repeats) if repeats else {}).items():
            if "error" in times:
                add(subject, roofline=roofline, **times)
                continue
            for clock, summary in times.items():
                add(subject, clock=clock, roofline=roofline, **figures(summary))


def measure_plan(plan: Plan, writer: Writer, device: str, seed: int, repeats: int) -> None:
    """Measure, on every workload, the solutions that are planned for it. A failure costs no other
    solution and no other workload its figures."""
    definition, inputs_of = definition_of(plan.trace_set), Inputs(plan.trace_set, device, seed)
    for workload in steps([t.workload for t in plan.workloads], named, lambda w: 2000 + tokens(w)):
        labels = {"definition": definition.name, "uuid": workload.uuid, "tokens": tokens(workload)}
        inputs = attempt(inputs_of.of, workload)
        subjects: Subjects = {
            s.name: (partial(timed, definition, s, inputs, device), {"hash": s.hash()})
            for s in plan.solutions
            if (workload.uuid, s.name) in plan.pairs
        }
        if isinstance(inputs, dict):
            for name, (_, source) in subjects.items():
                writer.add(labels, name, **source, **inputs)
            continue
        measure_calls(writer, labels, definition, inputs, subjects, repeats)


# --- bits ---------------------------------------------------------------------------------------


def part(definition: Definition, inputs: Sequence[Any], index: torch.Tensor) -> list[Any]:
    """Return the inputs of these tokens, in this order. Inputs without a token axis are shared."""
    selected = list(inputs)
    for i, spec in enumerate(definition.inputs.values()):
        if TOKEN_AXIS in (spec.shape or ()):
            x, dim = inputs[i], list(spec.shape).index(TOKEN_AXIS)
            same_size = torch.uint8 if x.element_size() == 1 else x.dtype  # float8 has no index
            selected[i] = x.view(same_size).index_select(dim, index).view(x.dtype)
    return selected


def compare(got: torch.Tensor, wanted: torch.Tensor) -> dict[str, Any]:
    """Return the tokens `compared`, those that `differ`, and the `largest` relative difference of a
    token (Euclidean norms)."""
    same = bits(got).eq(bits(wanted)).view(len(got), -1).all(dim=1)
    a, b = (x[~same].float().flatten(1) for x in (got, wanted))
    errors = (a - b).norm(dim=1) / b.norm(dim=1)
    largest = float(errors.nan_to_num(nan=float("inf")).max()) if len(errors) else 0.0
    return {"compared": len(same), "differ": int((~same).sum()), "largest": largest}


def replayed(
    runnable: Any, inputs: list[Any], device: str, between: Callable[[], object]
) -> torch.Tensor | str:
    """Return the output of a replay of the captured call, after the calls of `between`; or the
    reason why it is not captured."""
    if not runnable.metadata.destination_passing_style:
        return "returns its output"
    (output,) = allocate_outputs(runnable.metadata.definition, inputs, device)
    call = partial(runnable, *inputs, output)
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


def checks(runnable: Any, inputs: list[Any], device: str) -> dict[str, dict[str, Any]]:
    """Return the figures of every check of a built solution, or the reason why it was
    `not_tried`."""
    definition = runnable.metadata.definition

    def outputs_of(index: torch.Tensor | None = None) -> torch.Tensor:
        mine = inputs if index is None else part(definition, inputs, index)
        return run_solution(runnable, mine, device)

    def other_sizes() -> torch.Tensor:
        doubled = outputs_of(twice)
        outputs_of(all_tokens[: WIDTHS[1]])
        return doubled

    first = outputs_of()
    all_tokens = torch.arange(len(first), device=first.device)
    twice, reverse = all_tokens.repeat(2), all_tokens.flip(0)
    results = {"again": compare(outputs_of(), first)}
    if first.is_cuda:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            output = outputs_of()
        torch.cuda.current_stream().wait_stream(stream)
        results["stream"] = compare(output, first)
    doubled = other_sizes()
    results["after others"] = compare(outputs_of(), first)
    if first.is_cuda:
        replay = replayed(runnable, inputs, device, other_sizes)
        results["graph"] = (
            {"not_tried": replay} if isinstance(replay, str) else compare(replay, first)
        )
    results["reversed"] = compare(outputs_of(reverse), first[reverse])
    results["doubled"] = compare(doubled, first[twice])
    for width in WIDTHS:
        chosen = batches(first, width, BATCHES if first.is_cuda else CPU_BATCHES)
        if width < len(first) and chosen:
            outputs = torch.cat([outputs_of(index) for index in chosen])
            name = "alone" if width == 1 else f"{width} at a time"
            results[name] = compare(outputs, first[torch.cat(chosen)])
    return results


def measure_bits(
    writer: Writer,
    case: Mapping[str, Any],
    definition: Definition,
    solutions: Sequence[Solution],
    inputs: list[Any],
    device: str,
) -> None:
    """Compare the outputs of every solution bit by bit: one workload as a whole, then the same
    tokens again in other ways. Write a row for each check, or for a solution's error.

    - Run to run: the same call again; on another stream; after calls of other sizes; replayed from
      a CUDA graph after such calls (not if the host waits for the GPU).
    - Batch: the tokens in reverse order; each token twice; and tokens in small batches: alone, 7
      and 80 at a time. Batches whose tokens all have an output of zero are left out.

    A solution that passes all checks is batch invariant, as far as these calls show.
    """

    def checked(solution: Solution) -> dict[str, Any]:
        runnable = BuilderRegistry.get_instance().build(definition, solution)
        mine = fresh(inputs)
        results = checks(runnable, mine, device)
        refuse_changed(definition, mine, inputs)
        return results

    for solution in steps(solutions, lambda s: f"bits of {s.name}"):
        results, source = attempt(checked, solution), {"hash": solution.hash()}
        if "error" in results:
            writer.add(case, solution.name, **source, **results)
            continue
        for part, counts in results.items():
            writer.add(case, solution.name, **source, part=part, **counts)


# --- the roofline -------------------------------------------------------------------------------


def measure_reading(
    cases: Sequence[Histogram], repeats: int, layer: MoeDefinition
) -> dict[str, float]:
    """Time reading both GEMMs' weights of each case's active experts once, in ms by uuid.

    A CUDA graph of one reading of each tensor is replayed after the L2 cache was overwritten. The
    result is the median of the replays, for the faster of the orders in which a tensor can be read.
    """
    from scripts.measuring.gemm import readings  # imports the DSL; the emulator must come before

    experts = len(cases[0].rows)
    tensors = [
        torch.randint(0, 255, (experts, n, row), dtype=torch.uint8, device="cuda").view(
            torch.float8_e4m3fn
        )
        for n, k in layer.gemms
        for row in [k // 2 + k // GROUP if layer.mxfp4 else k]  # bytes
    ]
    calls: dict[str, Timed] = {}
    for h in cases:
        if any(h.rows):
            orders = zip(*(readings(tensor, h.rows) for tensor in tensors), strict=True)
            calls |= {f"{h.uuid} {order}": one_after_another(c) for order, c in enumerate(orders)}
    best = {h.uuid: 0.0 for h in cases}
    for name, times in device_times(calls, repeats).items():
        if "error" in times:
            raise RuntimeError(f"{name}: {times['error']}")
        uuid, _, order = name.partition(" ")
        best[uuid] = times["ms"] if order == "0" else min(best[uuid], times["ms"])
    return best


def least_ms(h: Histogram, rates: Rates, repeats: int, layer: MoeDefinition) -> float:
    """Return the least time that a call of the whole layer can take on this GPU.

    It is the larger of two times: that of a kernel that only reads the weights of the experts that
    have rows, and FLOPs over the FP8 rate. The reading is measured for every case, with a cold L2
    cache (weight_stream), the rate by a dense FP8 matrix product. Tokens, logits and output are
    left out. Where reading decides, they are under 2 % of the bytes up to T=1024, and up to 10 % at
    T=8192: there the bound is as much too low.
    """
    read_ms = measure_reading([h], repeats, layer)[h.uuid]
    return max(roofline_ms(h.counts(), rates, read_ms, layer))


def measure_rooflines(
    writer: Writer, cases: Sequence[Histogram], repeats: int, layer: MoeDefinition
) -> None:
    """Write a row for each workload. `value` is the time of the reading."""
    read_ms = measure_reading(cases, repeats, layer)
    for h in sorted(cases, key=lambda h: (h.tokens, h.uuid)):
        case: dict[str, Any] = {"definition": layer.name, "uuid": h.uuid, **h.counts()}
        writer.add(case, "reading", clock="device", value=read_ms[h.uuid], unit="ms")
