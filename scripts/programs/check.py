"""Accuracy, device time, repeated bits and floors: what the benchmark's own clock does not tell.

    python3 run.py check --solutions 'cutedsl_*' --workloads 80     figures of these
    python3 run.py check --run DIR                                  of a run, added to it

accuracy: cosine, calc_diff and matched ratios at three tolerances against the reference; each
solution runs once a workload, and fails in the ranking if it changes its inputs. device: what a
call takes on the GPU alone, and by the harness's loop, median and spread. bits: whether outputs
repeat, and whether a token's are its own whatever else is in the batch; of one workload, the
largest of up to 1024 tokens unless --workloads names one. floors: the least time of every workload,
from the weights that must be read and the FLOPs, at rates that are measured here.

With --run, the solutions and workloads of that run are taken, as far as their sources and the
hardware are the same as then; figures go into its traces, bits into its invariance.json, floors
into its floors.json. `bench` does so after every run on a GPU. On the CPU it is the torch model
that is looked at.
"""

import argparse
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
from scripts.common.definitions import MoeDefinition
from scripts.common.text import text_table
from scripts.data.dataset import Inputs, definition_of, tokens
from scripts.data.records import INPUTS_CHANGED, INVARIANCE
from scripts.programs.options import add_options

if TYPE_CHECKING:
    from scripts.measure.plan import Plan

MEASURES = ("accuracy", "device", "bits", "floors")


def parse_arguments() -> argparse.Namespace:
    """The options, `only` with its default filled in, and `device` as torch calls it."""
    arguments = parser(__doc__)
    add = arguments.add_argument
    add_options(arguments, "local", "solutions", "definition", "run-foreign", "workloads")
    add_options(arguments, "max-tokens", "seed", "rates", "cpu", "json")
    add("--run", type=Path, metavar="DIR", help="add to this run of bench")
    add("--only", nargs="+", choices=MEASURES, help="accuracy, bits and, on a GPU, device")
    add("--repeats", type=whole(1), default=20, help="timed calls of each kind (20)")
    args = arguments.parse_args()

    import torch

    from scripts.measure.gpu import require_gpu

    on_gpu = torch.cuda.is_available() and not args.cpu
    args.device = "cuda:0" if on_gpu else "cpu"
    layer = isinstance(args.definition, MoeDefinition)
    if args.only is None:
        args.only = ["accuracy", *["device"] * on_gpu, *["bits"] * layer]
    if "bits" in args.only and not layer:
        raise UsageError(f"{args.definition.name}: only a layer has tokens to put into batches")
    if "device" in args.only:
        require_gpu()
    return args


def figures_of(args: argparse.Namespace, chosen: "Plan") -> tuple[int, list[dict[str, Any]]]:
    """Exit status, and accuracy and device times of every pair, kept as they are known."""
    from scripts.measure import check

    sources = {
        "accuracy": lambda: check.accuracy(chosen, args.device, args.seed),
        "device": lambda: check.device(chosen, args.seed, args.repeats),
    }
    found: check.Figures = {}
    status, merged = EXIT_OK, 0
    try:
        for name in (name for name in sources if name in args.only):
            for new in sources[name]():
                for pair, figures in new.items():
                    found[pair] = {**found.get(pair, {}), **figures}
                merged += chosen.merge({p: f for p, f in new.items() if "error" not in f})
    except KeyboardInterrupt:
        status = EXIT_INTERRUPTED
        say("interrupted; the figures of the workloads so far are kept")
    lengths = {t.workload.uuid: tokens(t.workload) for t in chosen.workloads}
    entries = [
        {"uuid": uuid, "solution": name, "tokens": lengths[uuid], **figures}
        for (uuid, name), figures in sorted(found.items(), key=lambda i: (lengths[i[0][0]], i[0]))
    ]
    table = check.table(entries)
    print(text_table(list(table), table.values.tolist(), left=3))
    if merged:
        say(f"{merged} figures added to {chosen.traces}")
    for entry in entries:
        changed = ", ".join(entry.get(INPUTS_CHANGED, ()))
        if why := entry.get("error") or (changed and f"changes its inputs: {changed}"):
            say(f"error: {entry['solution']} at T={entry['tokens']} ({entry['uuid'][:8]}): {why}")
            status = status or EXIT_FAILED
    return status, entries


def bits_of(args: argparse.Namespace, chosen: "Plan") -> tuple[int, dict[str, Any]]:
    """Exit status, and the content of invariance.json."""
    from scripts.data.traces import finite
    from scripts.measure import bits
    from scripts.measure.plan import CPU_MAX_TOKENS
    from scripts.table.tables import bits_table

    on_gpu = args.device != "cpu"
    most = bits.MAX_TOKENS if on_gpu else CPU_MAX_TOKENS
    fitting = [t for t in chosen.workloads if args.workloads or tokens(t.workload) <= most]
    if not fitting:
        raise UsageError(f"bits: no workload of at most {most} tokens; --workloads names one")
    workload = max((t.workload for t in fitting), key=tokens)
    solutions = [s for s in chosen.solutions if (workload.uuid, s.name) in chosen.pairs]
    say(f"T={tokens(workload)} ({workload.uuid[:8]}): {', '.join(s.name for s in solutions)}")
    inputs = Inputs(chosen.trace_set, args.device, args.seed).of(workload)
    definition = definition_of(chosen.trace_set)
    results = bits.measure(definition, solutions, inputs, args.device)
    print(bits_table({name: r.get("checks", {}) for name, r in results.items()}).text())
    errors = {name: result["error"] for name, result in results.items() if "error" in result}
    for name, error in errors.items():
        say(f"error: {name}: {error}")
    return EXIT_FAILED if errors else EXIT_OK, {
        "hardware": chosen.hardware,
        "device": args.device.split(":")[0],
        "workload": workload.uuid,
        "tokens": tokens(workload),
        "seed": args.seed,
        "environment": environment.capture(),
        "solutions": {s.name: s.hash() for s in solutions},
        "results": finite(results),
    }


def main() -> int:
    args = parse_arguments()

    from scripts.data.traces import finite
    from scripts.measure import plan

    content: dict[str, Any] = {}
    status = EXIT_OK
    if "floors" in args.only:
        from scripts.measure import floors  # which imports the DSL

        content["floors"] = floors.measure(args.local, args.rates, args.repeats)
        print(floors.describe(content["floors"]))
        if args.run:
            files.write_json(args.run / "floors.json", content["floors"])
    if {"accuracy", "device", "bits"} & set(args.only):
        chosen = plan.choose(
            args.local, args.device != "cpu", args.run, args.solutions, args.workloads,
            args.max_tokens, args.run_foreign, args.definition,
        )  # fmt: skip
        if not chosen.pairs:
            say("no trace of this run has an output to compare")
            return EXIT_OK
        if {"accuracy", "device"} & set(args.only):
            status, content["figures"] = figures_of(args, chosen)
        if "bits" in args.only and status != EXIT_INTERRUPTED:
            of_bits, content["bits"] = bits_of(args, chosen)
            status = max(status, of_bits)
            if args.run:
                files.write_json(args.run / INVARIANCE, content["bits"])
    if args.json:
        files.write_json(args.json, finite(content))
    return status


if __name__ == "__main__":
    run_main(main)
