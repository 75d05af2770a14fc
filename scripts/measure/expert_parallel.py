"""The whole layer over several GPUs: checked against one that has all experts, then timed.

A process for each rank, NCCL between GPUs. Tokens are each rank's own; the check compares the
outputs of all ranks with `fused_moe` of all tokens over all experts, on rank 0. Times are medians
over the calls of CUDA events on each rank, the longest rank's: all of a call, and of it the layer
itself, what is left being the exchange of tokens and outputs and the wait for the slowest rank.
With --deep-ep DeepEP exchanges them. The layer is timed with all tokens of all ranks either way.
Without a GPU, or with --cpu, the same check on the torch model and gloo at a reduced size.
"""

import argparse
import importlib.util
import json
import os
import socket
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.common import files
from scripts.common.command_line import EXIT_FAILED, EXIT_OK, UsageError, parser, run_main, say
from scripts.common.environment import capture
from scripts.common.text import text_table

if TYPE_CHECKING:
    import torch

DEEPSEEK_V3 = {"experts": 256, "hidden": 7168, "intermediate": 2048}
REDUCED = {"experts": 16, "hidden": 256, "intermediate": 128}
ROUTING: dict[str, Any] = {"n_group": 8, "topk_group": 4, "top_k": 8, "routed_scaling_factor": 2.5}
MOST_DIFFERENT = 1e-5
"""calc_diff: every rank's part of a token is rounded to bfloat16 before they are added."""
WARMUP, CALLS = 5, 30


def weights_of(
    first: int, count: int, size: dict[str, int], device: "torch.device"
) -> tuple["torch.Tensor", ...]:
    """FP8 weights and scales of some experts, each from a seed of its own."""
    import torch

    h, i = size["hidden"], size["intermediate"]
    parts: list[list[torch.Tensor]] = [[], [], [], []]
    for expert in range(first, first + count):
        generator = torch.Generator(device).manual_seed(expert)

        def random(*dims: int, generator: torch.Generator = generator) -> torch.Tensor:
            return torch.randn(*dims, device=device, generator=generator)

        w13, w2 = random(2 * i, h), random(h, i)
        parts[0].append(w13.to(torch.float8_e4m3fn))
        parts[1].append(random(2 * i // 128, h // 128).abs_() / h**0.5)
        parts[2].append(w2.to(torch.float8_e4m3fn))
        parts[3].append(random(h // 128, i // 128).abs_() / i**0.5)
    return tuple(torch.stack(part) for part in parts)


def tokens_of(
    rank: int, tokens: int, size: dict[str, int], device: "torch.device"
) -> tuple["torch.Tensor", ...]:
    """Logits, bias, values and scales of a rank's tokens; the bias is the same everywhere."""
    import torch

    generator = torch.Generator(device).manual_seed(10_000 + rank)
    experts, h = size["experts"], size["hidden"]

    def random(*dims: int) -> torch.Tensor:
        return torch.randn(*dims, device=device, generator=generator)

    bias = torch.zeros(experts, dtype=torch.bfloat16, device=device)
    x = random(tokens, h).to(torch.float8_e4m3fn)
    return random(tokens, experts), bias, x, random(h // 128, tokens).abs_()


def work(rank: int, ranks: int, port: int, args: argparse.Namespace, results: Any) -> None:
    """All of one rank: puts (tokens, calc_diff, ms of a call, ms of the layer) on a queue."""
    import torch
    import torch.distributed as dist
    from moe_fp8.expert_parallel import deep_ep_buffer, expert_parallel_moe
    from moe_fp8.functional import fused_moe
    from moe_fp8.layer.metrics import calc_diff

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    device = torch.device("cpu") if args.cpu else torch.device("cuda", rank)
    size = REDUCED if args.cpu else DEEPSEEK_V3
    if args.cpu:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", rank=rank, world_size=ranks)
    else:
        torch.cuda.set_device(device)
        backends = "cpu:gloo,cuda:nccl"  # on the CPU the ranks agree without a wait for the GPU
        dist.init_process_group(backends, rank=rank, world_size=ranks, device_id=device)
    local = size["experts"] // ranks
    mine = weights_of(rank * local, local, size, device)
    everywhere = weights_of(0, size["experts"], size, device) if rank == 0 else None
    buffer = deep_ep_buffer(size["experts"], size["hidden"]) if args.deep_ep else None
    for tokens in args.tokens:
        inputs = tokens_of(rank, tokens, size, device)

        def call(inputs: Any = inputs) -> torch.Tensor:
            return expert_parallel_moe(
                *inputs, *mine, **ROUTING, accurate=args.accurate, buffer=buffer
            )

        output = call()
        gathered = [torch.empty_like(output) for _ in range(ranks)]
        dist.all_gather(gathered, output)
        diff = None
        if everywhere is not None:
            logits, _, x, scale = zip(
                *(tokens_of(r, tokens, size, device) for r in range(ranks)), strict=True
            )
            together = (
                torch.cat(logits),
                inputs[1],
                torch.cat([part.view(torch.uint8) for part in x]).view(torch.float8_e4m3fn),
                torch.cat(scale, dim=1),
            )
            wanted = fused_moe(*together, *everywhere, **ROUTING, accurate=args.accurate)
            diff = float(calc_diff(torch.cat(gathered), wanted))
        times = None
        if not args.cpu:
            alone = tokens_of(rank, ranks * tokens, size, device)

            def layer(alone: Any = alone) -> torch.Tensor:
                offset = rank * local
                return fused_moe(
                    *alone, *mine, local_expert_offset=offset, **ROUTING, accurate=args.accurate
                )

            times = [_longest(f, device) for f in (call, layer)]
        if rank == 0:
            results.put((tokens, diff, times))
    if buffer is not None:
        buffer.destroy()
    dist.destroy_process_group()


def _longest(call: Any, device: "torch.device") -> float:
    """Median ms of a call, of the rank that takes longest."""
    import torch
    import torch.distributed as dist

    samples = []
    for i in range(WARMUP + CALLS):
        dist.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        if i >= WARMUP:
            samples.append(start.elapsed_time(end))
    longest = torch.tensor(statistics.median(samples), device=device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return float(longest)


def parse_arguments() -> argparse.Namespace:
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, metavar="N", help="as many as there are GPUs; 2")
    arguments.add_argument("--tokens", type=int, nargs="+", default=[16, 128, 1024], metavar="T")
    arguments.add_argument("--accurate", action="store_true", help="two FP8 terms, as in hifi")
    arguments.add_argument("--deep-ep", action="store_true", help="exchange tokens by DeepEP")
    arguments.add_argument("--cpu", action="store_true", help="gloo and the torch model, reduced")
    arguments.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    return arguments.parse_args()


def main() -> int:
    args = parse_arguments()

    if args.deep_ep and importlib.util.find_spec("deep_ep") is None:
        raise UsageError("--deep-ep: not installed, see docs/calling.md")

    import torch
    import torch.multiprocessing as multiprocessing

    gpus = torch.cuda.device_count()
    args.cpu = args.cpu or gpus == 0
    ranks = args.ranks or (2 if args.cpu else gpus)
    size = REDUCED if args.cpu else DEEPSEEK_V3
    if not args.cpu and ranks > gpus:
        raise UsageError(f"--ranks {ranks}: there are {gpus} GPUs")
    if ranks < 1 or size["experts"] % ranks:
        raise UsageError(f"--ranks {ranks}: expected a divisor of {size['experts']} experts")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")  # imports torch once, without CUDA
    context.set_forkserver_preload(["torch"])
    results = context.SimpleQueue()
    given = ranks, port, args, results
    multiprocessing.start_processes(work, given, ranks, start_method="forkserver")
    found = [results.get() for _ in args.tokens]
    where = "CPU, torch model, gloo" if args.cpu else f"{torch.cuda.get_device_name()}, NCCL"
    where += ", DeepEP" if args.deep_ep else ""
    of = f"{size['experts']} experts, hidden {size['hidden']}, intermediate {size['intermediate']}"
    print(f"{ranks} ranks ({where}), {of}\n")
    rows = [
        [str(tokens), f"{diff:.1e}", *(f"{ms:.3f}" for ms in times or ()),
         *([f"{times[0] - times[1]:.3f}"] if times else [])]
        for tokens, diff, times in found
    ]  # fmt: skip
    timed = [] if args.cpu else ["call ms", "layer ms", "exchange ms"]
    print(text_table(["tokens a rank", "calc_diff to one rank", *timed], rows, left=0))
    if args.json:
        lines = [dict(zip(("tokens", "calc_diff", "ms"), one, strict=True)) for one in found]
        record = {"environment": capture(), "ranks": ranks, "size": size, "results": lines}
        files.write(args.json, json.dumps(record, indent=1) + "\n")
    wrong = [tokens for tokens, diff, _ in found if not diff < MOST_DIFFERENT]
    for tokens in wrong:
        say(f"error: {tokens} tokens a rank: not the output of one rank with all experts")
    return EXIT_FAILED if wrong else EXIT_OK


if __name__ == "__main__":
    run_main(main)
