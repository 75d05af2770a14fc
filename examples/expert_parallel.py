"""The experts of a layer on several GPUs, one process per GPU, called as by an engine.

    python3 examples/expert_parallel.py --check         # as many ranks as there are GPUs
    python3 examples/expert_parallel.py --check --cpu   # gloo, the reference model, reduced
    torchrun --nproc-per-node 8 examples/expert_parallel.py --check     # torchrun's ranks

Every rank calls `expert_parallel_moe` with its own tokens. The program prints the time of a call
(CUDA events, the median of 30 on the slowest rank) and the time of the layer alone for the tokens
of all ranks: the difference is the exchange. An eager call's time has the host's part: the ranks
compare their arguments, and the host launches kernels one by one. "in a graph" is the time of the
same in a CUDA graph, where the host does neither: the GPUs' part. Then the program prints the time
of two calls on two streams, as in an engine that overlaps two batches.

--check compares the outputs of all ranks with those of one rank with all experts, and the outputs
of a graph and of two streams with those of a call; the exit status is 1 if they differ. --deep-ep
exchanges tokens by DeepEP, whose calls no graph can capture: the host waits for a number of tokens.
"""

import argparse
import os
import statistics
import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from moe_fp8 import deep_ep_buffer, expert_parallel_moe, fused_moe
from moe_fp8.reference import calc_diff

DEEPSEEK_V3, REDUCED = (256, 7168, 2048), (16, 256, 128)
"""Experts, hidden size, intermediate size."""
ROUTING: dict[str, Any] = {"n_group": 8, "topk_group": 4, "top_k": 8, "routed_scaling_factor": 2.5}
MOST_DIFFERENT = 1e-5
"""The bound of calc_diff: every rank rounds its part of a token to bfloat16 before the sum."""


def experts_of(first: int, count: int, h: int, i: int, device: torch.device) -> list[torch.Tensor]:
    """Return FP8 weights and scales of some experts. Each expert has its own seed."""
    parts: list[list[torch.Tensor]] = [[], [], [], []]
    for expert in range(first, first + count):
        torch.manual_seed(expert)
        w13, w2 = torch.randn(2 * i, h, device=device), torch.randn(h, i, device=device)
        scale13 = torch.rand(2 * i // 128, h // 128, device=device) / h**0.5
        scale2 = torch.rand(h // 128, i // 128, device=device) / i**0.5
        fp8 = torch.float8_e4m3fn
        for part, x in zip(parts, (w13.to(fp8), scale13, w2.to(fp8), scale2), strict=True):
            part.append(x)
    return [torch.stack(part) for part in parts]


def tokens_of(rank: int, tokens: int, experts: int, h: int, device: Any) -> list[torch.Tensor]:
    """Return logits, values and scales of a rank's tokens."""
    torch.manual_seed(10_000 + rank)
    x = torch.randn(tokens, h, device=device).to(torch.float8_e4m3fn)
    logits = torch.randn(tokens, experts, device=device)
    return [logits, x, torch.rand(h // 128, tokens, device=device)]


def slowest_ms(call: Any, device: torch.device) -> float:
    """Return the median ms of a call on the slowest rank."""
    samples = []
    for i in range(35):
        dist.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        if i >= 5:
            samples.append(start.elapsed_time(end))
    longest = torch.tensor(statistics.median(samples), device=device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return float(longest)


def captured(call: Any) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Return a CUDA graph of a call that has run before, and its output."""
    graph = torch.cuda.CUDAGraph()
    # Other threads, such as NCCL's watchdog, may go on.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        output = call()
    return graph, output


def on_streams(calls: list[Any], streams: list[Any]) -> list[torch.Tensor]:
    """Run each call on its own stream; return the outputs."""
    outputs, now = [], torch.cuda.current_stream()
    for call, stream in zip(calls, streams, strict=True):
        stream.wait_stream(now)
        with torch.cuda.stream(stream):
            outputs.append(call())
    for stream in streams:
        now.wait_stream(stream)
    return outputs


def work(rank: int, ranks: int, port: int, args: argparse.Namespace) -> None:
    """Do the work of one rank. Rank 0 prints. A rank exits with 1 if an output is wrong.

    Args:
        port: that of the store where the ranks meet, or 0: torchrun's environment says where.
    """
    group: dict[str, Any] = {}
    if port:
        store = dist.TCPStore("127.0.0.1", port)
        group = {"rank": rank, "world_size": ranks, "store": store}
    experts, h, i = REDUCED if args.cpu else DEEPSEEK_V3
    if rank == 0:
        where = (
            "CPU, reference model, gloo" if args.cpu else f"{torch.cuda.get_device_name()}, NCCL"
        )
        print(f"{ranks} ranks ({where}{', DeepEP' * args.deep_ep}), {experts} experts", flush=True)
    if args.cpu:
        device = torch.device("cpu")
        torch.set_num_threads(1)
        dist.init_process_group("gloo", **group)
    else:
        device = torch.device("cuda", rank if port else int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        backends = "cpu:gloo,cuda:nccl"  # gloo: ranks compare arguments without a GPU sync
        dist.init_process_group(backends, **group, device_id=device)
    local = experts // ranks
    mine = experts_of(rank * local, local, h, i, device)
    bias = torch.zeros(experts, dtype=torch.bfloat16, device=device)
    buffer = deep_ep_buffer(experts, h) if args.deep_ep else None
    options = {**ROUTING, "accurate": args.accurate}
    streams = [] if args.cpu else [torch.cuda.Stream() for _ in range(2)]
    wrong = False
    for tokens in args.tokens:
        logits, x, scale = tokens_of(rank, tokens, experts, h, device)

        def call(batch: Any = (logits, bias, x, scale)) -> torch.Tensor:
            return expert_parallel_moe(*batch, *mine, **options, buffer=buffer)

        output = call()
        line = f"{tokens} tokens a rank"
        if args.check:
            gathered = [torch.empty_like(output) for _ in range(ranks)]
            dist.all_gather(gathered, output)
            if rank == 0:
                batches = (tokens_of(r, tokens, experts, h, device) for r in range(ranks))
                all_logits, xs, scales = zip(*batches, strict=True)
                whole = torch.cat([x.view(torch.uint8) for x in xs]).view(x.dtype)
                inputs = torch.cat(all_logits), bias, whole, torch.cat(scales, dim=1)
                wanted = fused_moe(*inputs, *experts_of(0, experts, h, i, device), **options)
                diff = calc_diff(torch.cat(gathered), wanted)
                wrong |= not diff < MOST_DIFFERENT  # also true for NaN
                line += f", calc_diff to one rank {diff:.1e}"
        if not args.cpu:
            all_tokens = tokens_of(rank, ranks * tokens, experts, h, device)
            all_tokens.insert(1, bias)

            def layer(batch: Any = all_tokens) -> torch.Tensor:
                return fused_moe(*batch, *mine, local_expert_offset=rank * local, **options)

            ms, layer_ms = slowest_ms(call, device), slowest_ms(layer, device)
            line += f", call {ms:.3f} ms, layer {layer_ms:.3f} ms, exchange {ms - layer_ms:.3f} ms"
            if buffer is None:
                graphs = [captured(call), captured(layer)]
                ms, layer_ms = (slowest_ms(graph.replay, device) for graph, _ in graphs)
                line += f" (in a graph {ms:.3f}, {layer_ms:.3f}, {ms - layer_ms:.3f} ms)"
                wrong |= args.check and not torch.equal(graphs[0][1], output)
                for graph, _ in graphs:
                    graph.reset()  # before the communicator that it holds
                del graphs
            logits, x, scale = tokens_of(ranks + rank, tokens, experts, h, device)
            second = partial(call, (logits, bias, x, scale))
            alone = [output, second()]
            both = partial(on_streams, [call, second], streams)
            wrong |= args.check and not all(map(torch.equal, both(), alone))
            line += f", two on two streams {slowest_ms(both, device):.3f} ms"
        if rank == 0:
            print(line, flush=True)
    if buffer is not None:
        buffer.destroy()
    dist.destroy_process_group()
    if wrong:
        sys.exit("not the outputs of one rank with all experts, of a graph, or of one stream")


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--check", action="store_true", help="compare with all on one rank")
    text = "(default: torchrun's, else as many as there are GPUs, on the CPU 2)"
    arguments.add_argument("--ranks", type=int, metavar="N", help=text)
    sizes, text = [16, 128, 1024], "tokens of a rank (default: 16 128 1024)"
    arguments.add_argument("--tokens", type=int, nargs="+", default=sizes, metavar="T", help=text)
    arguments.add_argument("--accurate", action="store_true", help="two FP8 terms between GEMMs")
    arguments.add_argument("--deep-ep", action="store_true", help="exchange tokens by DeepEP")
    arguments.add_argument("--cpu", action="store_true", help="gloo, the reference model, reduced")
    args = arguments.parse_args()
    gpus = torch.cuda.device_count()
    args.cpu = args.cpu or gpus == 0
    ranks = here = args.ranks or (2 if args.cpu else gpus)
    by_torchrun = "RANK" in os.environ  # it has started this process as one of the ranks
    if by_torchrun:
        ranks, here = (int(os.environ[name]) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        if args.ranks not in (None, ranks):
            arguments.error(f"--ranks {args.ranks}: torchrun has started {ranks}")
    experts = (REDUCED if args.cpu else DEEPSEEK_V3)[0]
    if not args.cpu and here > gpus:
        arguments.error(f"{here} ranks: there are {gpus} GPUs")
    if ranks < 1 or experts % ranks:
        arguments.error(f"{ranks} ranks: expected a divisor of {experts} experts")
    if by_torchrun:
        return work(int(os.environ["RANK"]), ranks, 0, args)
    # The ranks meet at this store. It keeps its free port, so no other process can take the port.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.multiprocessing.start_processes(
        work, (ranks, store.port, args), ranks, start_method="spawn"
    )


if __name__ == "__main__":
    main()
