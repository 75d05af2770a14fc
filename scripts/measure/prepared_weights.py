"""hpc-ops' own call of the whole layer, on weights prepared beforehand: beside the ranking only.

`fuse_moe_blockwise` wants the gate rows of the first projection before the up rows. A solution is
given the definition's order anew in every call, so that this call cannot be one. Here the weights
are swapped once, as who serves a model would do it, and what is timed is the rest: routing (the
Triton kernel of the baselines), the scales of the tokens transposed, the library's call. Solutions
of the ranking are timed in turns with it, on the same inputs, by both clocks of `device_time`. An
output that differs from that of the first solution is an error, not a time.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.common import environment, files
from scripts.common.command_line import (
    EXIT_FAILED,
    EXIT_OK,
    UsageError,
    parser,
    run_main,
    say,
    whole,
)
from scripts.common.progress import Progress
from scripts.common.project import DEFINITION, ROOT
from scripts.common.text import text_table
from scripts.data.dataset import Inputs, tokens
from scripts.measure.device_time import Timed, both_times, table, timed
from scripts.measure.gpu import require_gpu
from scripts.measure.second_pass import Pass, choose
from scripts.measure.timing import MAX_CALC_DIFF
from scripts.pack.pack import PackError

if TYPE_CHECKING:
    import torch
    from moe_fp8.layer.problem import MoeInputs, MoeShape

NAME = "hpc-ops, prepared weights"
BESIDE = ("cutedsl_moe_fp8_fused", "hpc_ops_moe")


def gate_before_up(inputs: "MoeInputs") -> "MoeInputs":
    """The inputs with the halves of the first projection, and of its scales, swapped."""
    import torch

    def swapped(x: "torch.Tensor") -> "torch.Tensor":
        up, gate = x.view(torch.uint8).chunk(2, dim=1)
        return torch.cat([gate, up], dim=1).view(x.dtype)

    return inputs._replace(
        gemm1_weights=swapped(inputs.gemm1_weights),
        gemm1_weights_scale=swapped(inputs.gemm1_weights_scale),
    )


class HpcOps:
    """The library's layer behind our routing. Of the prepared inputs, and the output to write."""

    def __init__(self, shape: "MoeShape"):
        from moe_fp8.baselines.held import HeldPerStream
        from moe_fp8.baselines.hpc_ops_moe import REQUIREMENT
        from moe_fp8.baselines.requirement import require
        from moe_fp8.baselines.triton_stages import new_routed

        self.shape = shape
        self.library = require("hpc", REQUIREMENT)
        self.routed = HeldPerStream(new_routed)

    def __call__(self, *arguments: Any) -> None:
        from moe_fp8.baselines.flashinfer_cutlass_moe import local_ids
        from moe_fp8.baselines.triton_stages import route
        from moe_fp8.layer.problem import MoeInputs

        inputs, output = MoeInputs(*arguments[:-1]), arguments[-1]
        offset = int(inputs.local_expert_offset)
        scaling = float(inputs.routed_scaling_factor)
        routed = self.routed(len(output), self.shape, output.device)
        route(inputs.routing_logits, inputs.routing_bias, scaling, offset, self.shape, routed)
        ids, rank = local_ids(routed.ids, offset, self.shape)
        self.library.fuse_moe_blockwise(
            inputs.hidden_states,
            inputs.hidden_states_scale.t().contiguous(),
            inputs.gemm1_weights,
            inputs.gemm1_weights_scale,
            inputs.gemm2_weights,
            inputs.gemm2_weights_scale,
            ids,
            routed.weights,
            rank,
            self.shape.num_experts,
            output=output,
        )


def refuse_wrong(call: Timed, right: Timed) -> None:
    """Raise RuntimeError where two calls write different outputs."""
    from moe_fp8.layer.metrics import calc_diff

    for each in (right, call):
        each.output.fill_(float("nan"))
        each()
    found = float(calc_diff(call.output, right.output))
    if not found < MAX_CALC_DIFF:  # NaN is wrong, too
        raise RuntimeError(f"{NAME}: calc_diff {found:.1e} to the first solution")


def measure(
    what: Pass, layer: HpcOps, seed: int, repeats: int
) -> dict[tuple[str, str], dict[str, Any]]:
    """Times, or the error, by (uuid, name)."""
    import torch
    from moe_fp8.layer.problem import MoeInputs

    inputs_of = Inputs(what.trace_set, "cuda", seed)
    progress = Progress(len(what.workloads), sum(2000 + tokens(t.workload) for t in what.workloads))
    results: dict[tuple[str, str], dict[str, Any]] = {}
    for trace in what.workloads:
        uuid, length = trace.workload.uuid, tokens(trace.workload)
        progress.step(f"T={length} ({uuid[:8]})")
        inputs = inputs_of.of(trace.workload)
        calls = {
            s.name: call
            for s in what.solutions
            if (call := timed(what.trace_set.definitions[DEFINITION], s, inputs))
        }
        first = next(iter(calls.values()))
        prepared = gate_before_up(MoeInputs(*inputs))
        calls[NAME] = Timed(layer, [*prepared, torch.empty_like(first.output)])
        try:
            with torch.no_grad():
                refuse_wrong(calls[NAME], first)
        except RuntimeError as error:
            del calls[NAME]
            results[uuid, NAME] = {"error": str(error)}
        results |= {(uuid, name): found for name, found in both_times(calls, repeats).items()}
        progress.finish(2000 + length)
    return results


def record(what: Pass, results: dict[tuple[str, str], dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """The results as rows of a file."""
    lengths = {t.workload.uuid: tokens(t.workload) for t in what.workloads}
    return [{"uuid": u, "tokens": lengths[u], "name": n, **r} for (u, n), r in results.items()]


def main() -> int:
    arguments = parser(__doc__)
    add = arguments.add_argument
    add("--local", type=Path, default=ROOT, help="data set; this repository")
    add("--solutions", nargs="+", default=list(BESIDE), metavar="NAME", help=", ".join(BESIDE))
    add("--workloads", nargs="+", default=[], metavar="T|UUID")
    add("--max-tokens", type=whole(1), metavar="T")
    add("--repeats", type=whole(1), default=20, help="timed calls of each kind (20)")
    add("--seed", type=whole(0), default=2026)
    add("--json", type=Path, metavar="FILE", help="write the figures there")
    args = arguments.parse_args()
    hardware = require_gpu()

    from moe_fp8.layer.problem import DEEPSEEK_V3

    try:
        layer = HpcOps(DEEPSEEK_V3)
    except RuntimeError as error:
        raise UsageError(str(error)) from None
    try:
        what = choose(args.local, "cuda:0", None, args.solutions, args.workloads, args.max_tokens)
    except PackError as error:
        say(f"error: {error}")
        return EXIT_FAILED
    results = measure(what, layer, args.seed, args.repeats)
    rows = record(what, results)
    print(text_table(*table(results, {r["uuid"]: r["tokens"] for r in rows}), left=3))
    if args.json:
        content = {
            "hardware": hardware,
            "seed": args.seed,
            "environment": environment.capture(),
            "solutions": {s.name: s.hash() for s in what.solutions},
            "results": rows,
        }
        files.write(args.json, json.dumps(content, indent=1) + "\n")
    return EXIT_FAILED if any("error" in r for r in rows) else EXIT_OK


if __name__ == "__main__":
    run_main(main)
