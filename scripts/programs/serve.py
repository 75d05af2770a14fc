#!/usr/bin/env python3
"""Serve a model in vLLM or SGLang on the fused layer and on the engine's own: check, time, compare.

    run.py serve --model qwen3-30b-a3b --random-weights
    run.py serve --model /path/to/a/model --compare engine,ours,accurate
    run.py serve --model deepseek-v3 --random-weights --layers 4 --compare engine,tuned,ours

Each backend is the engine's offline API in a process of its own: `engine` (as it comes), `tuned`
(vLLM's Triton kernel with the files that vLLM has for an H200), `ours`, `accurate`, or a kernel by
the engine's own name (`deep_gemm`, `flashinfer_cutlass`, ...).

First every served layer's output on real activations is compared with float32 arithmetic on its
dequantised weights (calc_diff). Then, after a warm-up, a decode step, a prefill and a mixed load
are timed, of backends that run together in turns: 128 requests of 512 + 64 tokens, or as many as
the largest batch has. Of vLLM the CUDA graph of a decode step is timed, too ("graph"): the GPU's
part of the step, which does not change with the host. What is compiled after the start is counted.
With trained weights tokens and log-probabilities are compared with those of the first backend; of
random ones they say nothing.
"""

import importlib.util
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from scripts.common.command_line import (
    EXIT_OK,
    UsageError,
    parser,
    run_main,
    say,
    steps,
    whole,
)
from scripts.serve import inside, models
from scripts.serve.engines import ENGINES, OWN, Setup

METHOD = "offline API, medians after a warm-up, backends that run together in turns"
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PROMPTS = (512, 1024, 2048, 4096, 8192, 16384)


def numbers(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(map(whole(1), text.split(","))))


def arguments(argv: Sequence[str] | None = None):
    options = parser(__doc__)
    add = options.add_argument
    add("--engine", choices=ENGINES, default="vllm")
    add(
        "--model",
        required=True,
        metavar="NAME_OR_DIR",
        help=f"a directory of weights, or, for random ones, {', '.join(models.LAYERS)}",
    )
    add("--random-weights", action="store_true", help="by the parameters' names, of a sane spread")
    add("--layers", type=whole(1), metavar="N", help="of random weights (default: as many as fit)")
    add("--compare", default="engine,ours", metavar="BACKENDS", help="(default: engine,ours)")
    add(
        "--batches",
        type=numbers,
        default=BATCHES,
        metavar="N,...",
        help="requests of a decode step",
    )
    add("--prompts", type=numbers, default=PROMPTS, metavar="N,...", help="tokens of a prefill")
    add("--repeats", type=whole(1), default=5, metavar="N", help="of each figure (default: 5)")
    add("--together", type=whole(1), default=1, metavar="N",
        help="backends that share the GPU, so that they can take turns (default: 1)")  # fmt: skip
    add("--tensor-parallel", type=whole(1), default=1, metavar="N", help="GPUs")
    add("--expert-parallel", action="store_true", help="experts whole, spread over these GPUs")
    add("--batch-invariant", action="store_true", help="VLLM_BATCH_INVARIANT=1 for all backends")
    add("--logs", type=Path, metavar="DIR", help="where the engines' logs go")
    add("--out", type=Path, metavar="FILE", help="append all figures there, as they come")
    return options.parse_args(argv)


def setups(args) -> list[Setup]:
    """Return the settings of each backend. Raises UsageError."""
    if importlib.util.find_spec(args.engine) is None:
        raise UsageError(
            f"{args.engine} is not installed for {sys.executable}: in the environment that has it "
            "run pip install -e '.[serve]', then run.py with its python"
        )
    if args.batch_invariant and args.engine != "vllm":
        raise UsageError("--batch-invariant: with --engine vllm only")
    backends = list(dict.fromkeys(name.strip() for name in args.compare.split(",")))
    if "" in backends:
        raise UsageError(f"--compare {args.compare}: a name between commas is empty")
    if set(OWN) & set(backends) and not inside.is_installed(args.engine):
        raise UsageError(f"{args.engine} does not find the plugin: pip install -e . in this folder")
    model = models.find(args.model, args.layers, args.random_weights)
    return [
        Setup(
            engine=args.engine,
            backend=backend,
            model=model,
            random_weights=args.random_weights,
            most_tokens=max(*args.prompts, inside.CHECK_TOKENS),
            batches=args.batches,
            tensor_parallel=args.tensor_parallel,
            expert_parallel=args.expert_parallel,
            share=0.9 / min(args.together, len(backends)),
            batch_invariant=args.batch_invariant,
        )
        for backend in backends
    ]


def main() -> int:
    args = arguments()
    wanted = setups(args)
    from scripts.common import environment
    from scripts.data.rows import Writer
    from scripts.serve.run import Answers, Plan, first_starts, measure
    from scripts.table.served import SERVED, checks_table, timed_tables

    plan = Plan(args.batches, args.prompts, args.repeats, not args.random_weights)
    logs = args.logs or Path(tempfile.mkdtemp(prefix="moe_fp8_serve-"))
    logs.mkdir(parents=True, exist_ok=True)
    say(f"logs of the engines: {logs}")
    groups = [wanted[n : n + args.together] for n in range(0, len(wanted), args.together)]
    hardware = next((gpu["name"] for gpu in environment.gpus()), "no GPU")
    into = Writer(SERVED, hardware, METHOD, args.out)
    say(f"        starts {wanted[0].backend} for what the engine compiles and keeps on disk")
    answers: Answers = {}
    try:
        for row in first_starts(wanted[0], logs):
            into.add(row, row["subject"])
        for group in steps(groups, lambda group: ", ".join(setup.backend for setup in group)):
            for row in measure(group, plan, logs, answers):
                into.add(row, row["subject"])
    finally:  # also if a backend fails or Ctrl-C ends the program
        if rows := into.rows:
            for table in (*timed_tables(rows), checks_table(rows)):
                print(f"\n{table.title}\n\n{table.text()}")
    return EXIT_OK


if __name__ == "__main__":
    run_main(main)
