"""Whether other configs of the fused layer's two GEMMs would be faster than those that it ships.

For each number of tokens the layer is called with its own pair of configs and with the pairs beside
it: a step up or down the heuristic's ladder, from few rows to many, for either GEMM or both. What
the layer itself adds to a config (stages, tiles on demand, the pair of CTAs that makes a scale) it
adds to these. `autotune` does the same for a GEMM alone, whose best config need not be the layer's:
the second GEMM begins while the first one ends.

Device time as `device_time` has it: replays of a CUDA graph, pairs in turns, the L2 cache
overwritten before each. A pair whose output is not that of the shipped one, to the bit, is an
error. Exit status 1 says so, or that some pair is faster by more than 2 %.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.common import environment, files
from scripts.common.command_line import EXIT_FAILED, EXIT_OK, parser, run_main, say, whole
from scripts.common.progress import Progress
from scripts.common.project import ROOT
from scripts.common.text import markdown_table, text_table
from scripts.measure import gpu
from scripts.measure.device_time import Timed, device_times
from scripts.measure.shipped_configs import ladder
from scripts.measure.stages import Problems

if TYPE_CHECKING:
    from moe_fp8.layer.problem import Configs, MoeShape

Pair = tuple[Any, Any]
"""What the heuristic picks for the first and the second GEMM."""

MAX_LOSS = 2.0
"""Percent."""


def picked(tokens: int, shape: "MoeShape", terms: int) -> Pair:
    """The heuristic's configs that the layer starts from."""
    from moe_fp8.layer.fused import fused_configs

    choose, made = gpu.architecture().choose, []

    def noting(*arguments: Any, **known: Any) -> Any:
        made.append(choose(*arguments, **known))
        return made[-1]

    fused_configs(tokens, shape, noting, terms)
    first, second = made
    return first, second


def pairs(shipped: Pair, ladders: Sequence[Sequence[Any]], reach: int) -> list[Pair]:
    """The shipped one first, then all within so many steps of it on the two GEMMs' ladders."""

    def beside(config: Any, rungs: Sequence[Any]) -> Sequence[Any]:
        at = rungs.index(config)
        return rungs[max(at - reach, 0) : at + reach + 1]

    firsts, seconds = (beside(*of) for of in zip(shipped, ladders, strict=True))
    return list(dict.fromkeys([shipped, *((a, b) for a in firsts for b in seconds)]))


def with_pair(pair: Pair) -> "Configs":
    """The layer's configs where the heuristic would have picked these."""
    from moe_fp8.layer.fused import fused_configs

    def configs(tokens: int, shape: "MoeShape", choose: Any, terms: int = 1) -> Pair:
        def chosen(rows: float, n: int, k: int, **known: Any) -> Any:
            return (
                pair[0] if (n, k) == (2 * shape.intermediate_size, shape.hidden_size) else pair[1]
            )

        return fused_configs(tokens, shape, chosen, terms)

    return configs


def measure(
    problems: Problems, tokens: int, terms: int, reach: int, repeats: int
) -> dict[str, Any]:
    """The times of all pairs at one number of tokens, the shipped one's first."""
    import torch
    from moe_fp8.layer.fused import FusedLayer
    from moe_fp8.layer.problem import DEEPSEEK_V3

    inputs, routing = problems.of(tokens)
    ladders = ladder("gemm1"), ladder("gemm2", terms=terms)
    found = pairs(picked(tokens, DEEPSEEK_V3, terms), ladders, reach)
    calls = {}
    for pair in found:
        output = torch.empty_like(inputs.hidden_states, dtype=torch.bfloat16)
        layer = FusedLayer(with_pair(pair), DEEPSEEK_V3, terms)
        calls[" + ".join(map(str, pair))] = Timed(layer, [inputs, output])
    with torch.no_grad():
        times = device_times(calls, repeats)
    results = []
    wanted = next(iter(calls.values())).output
    for pair, (name, call) in zip(found, calls.items(), strict=True):
        result = {"first": str(pair[0]), "second": str(pair[1]), **times[name]}
        if "error" not in result and not torch.equal(call.output, wanted):
            result = {**result, "error": "not the output of the shipped pair"}
        results.append(result)
    return {"tokens": tokens, "routing": routing, "pairs": results}


def loss(measured: dict[str, Any]) -> float | None:
    """Percent that the fastest pair would gain; None where the shipped one was not timed."""
    shipped, *others = measured["pairs"]
    if "error" in shipped:
        return None
    best = min(pair["ms"] for pair in [shipped, *others] if "error" not in pair)
    return 100 * (shipped["ms"] / best - 1)


def table(measured: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Header and rows, a pair each; of a number of tokens the fastest first, * the shipped one."""
    rows = []
    for one in measured:
        shipped = one["pairs"][0]
        for pair in sorted(one["pairs"], key=lambda p: p.get("ms", float("inf"))):
            row = [str(one["tokens"]), pair["first"], pair["second"]]
            row[0] += " *" if pair is shipped else ""
            if "error" in pair:
                rows.append([*row, pair["error"][:60], "", ""])
                continue
            spread = f"{1e3 * pair['p10']:.1f}-{1e3 * pair['p90']:.1f}"
            over = f"{pair['ms'] / shipped['ms']:.3f}" if "ms" in shipped else ""
            rows.append([*row, f"{1e3 * pair['ms']:.1f}", spread, over])
    return ["T", "first GEMM", "second GEMM", "us", "p10-p90", "over shipped"], rows


def main() -> int:
    arguments = parser(__doc__)
    add = arguments.add_argument
    add("--tokens", nargs="+", type=whole(1), default=[80, 320, 901, 2048], metavar="T")
    add("--accurate", action="store_true", help="two FP8 terms, as in hifi")
    add("--reach", type=whole(1), default=1, help="steps of the ladder to either side (1)")
    add("--repeats", type=whole(1), default=30, help="timed replays of each pair (30)")
    add("--seed", type=whole(0), default=2026)
    add("--offset", type=int, default=0, help="first local expert where routing is drawn (0)")
    add("--local", type=Path, default=ROOT, help="data set of the workloads")
    add("--markdown", action="store_true", help="print Markdown")
    add("--json", type=Path, metavar="FILE", help="write all figures there")
    args = arguments.parse_args()
    hardware = gpu.require_gpu()
    problems = Problems(args.local, "cuda:0", args.seed, args.offset)
    progress = Progress(len(args.tokens), sum(4000 + t for t in args.tokens))
    measured = []
    for tokens in args.tokens:
        progress.step(f"T={tokens}")
        terms = 2 if args.accurate else 1
        measured.append(measure(problems, tokens, terms, args.reach, args.repeats))
        progress.finish(4000 + tokens)
    print(f"{hardware}: the fused layer by the configs of its GEMMs, * as it ships\n")
    print((markdown_table if args.markdown else text_table)(*table(measured)))
    if args.json:
        record = {"hardware": hardware, "environment": environment.capture(), "results": measured}
        files.write(args.json, json.dumps(record, indent=1) + "\n")
    wrong = [p for one in measured for p in one["pairs"] if "error" in p]
    slow = {one["tokens"]: found for one in measured if (found := loss(one) or 0.0) > MAX_LOSS}
    for tokens, percent in slow.items():
        say(f"T={tokens}: another pair is {percent:.1f} % faster")
    return EXIT_FAILED if wrong or slow else EXIT_OK


if __name__ == "__main__":
    run_main(main)
