"""The grouped GEMMs of others as variants to time: DeepGEMM, sgl_kernel, and triton_moe's."""

import functools
import itertools
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from scripts.measure.operands import Operands, Placed
from scripts.measure.problems import BLOCK, LAYER_SHAPES, Problem, padded
from scripts.measure.variants import Call, Variant

if TYPE_CHECKING:
    from moe_fp8.baselines.triton_gemm import Tile
    from moe_fp8.baselines.triton_stages import Rows


def deepgemm_variants(compiled_dims: str | None = None) -> list[Variant]:
    """DeepGEMM's two grouped layouts. On Hopper it takes float32 scales; those of the activations
    run along the rows, which the block-major ones already do."""
    import deep_gemm
    import torch

    options: dict[str, Any] = {"recipe": (1, BLOCK, BLOCK)}
    if compiled_dims is not None:
        options["compiled_dims"] = compiled_dims

    def contiguous(x: Operands) -> Call:
        rows = x.aligned
        expert = torch.arange(x.problem.experts, dtype=torch.int32, device=x.a.device)
        groups = torch.full((len(rows.a),), -1, dtype=torch.int32, device=x.a.device)  # padding
        groups[rows.index] = expert.repeat_interleave(x.rows_per_expert.long())
        a, b = (rows.a, rows.a_scale.t()), (x.b, x.b_scale)

        def launch() -> None:
            deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous(a, b, rows.out, groups, **options)

        return Call(launch, rows.out, rows.index)

    def masked(x: Operands) -> Call:
        p, rows = x.problem, x.batched
        batched = rows.a.view(p.experts, p.max_rows, p.k)
        # [E, rows, K/128] with the rows contiguous, one matrix an expert.
        scale = rows.a_scale.view(-1, p.experts, p.max_rows).transpose(0, 1).contiguous()
        a, b = (batched, scale.transpose(1, 2)), (x.b, x.b_scale)
        out = rows.out.view(p.experts, p.max_rows, p.n)
        expected = max(1, round(p.mean_rows))

        def launch() -> None:
            deep_gemm.m_grouped_fp8_fp4_gemm_nt_masked(
                a, b, out, x.rows_per_expert, expected, **options
            )

        return Call(launch, rows.out, rows.index)

    return [
        Variant("deepgemm contiguous", contiguous, peer=True),
        Variant("deepgemm masked", masked, peer=True),
    ]


def sgl_variants(compiled_dims: str | None = None) -> list[Variant]:
    """sgl_kernel's CUTLASS grouped GEMM on flat rows, scales of A row by row, called as the
    baselines on it do."""
    import torch
    from moe_fp8.baselines.requirement import require
    from moe_fp8.baselines.sgl_grouped_gemm import REQUIREMENT, grouped_gemm, scratch

    require("sgl_kernel", REQUIREMENT)

    def flat(x: Operands) -> Call:
        p, device = x.problem, x.a.device
        a, out = x.a[: p.pairs], x.out[: p.pairs]
        a_scale = x.a_scale[:, : p.pairs].t().contiguous()
        held = scratch(device, p.experts, (p.k, p.n))
        sizes = torch.tensor([[m, p.n, p.k] for m in p.rows], dtype=torch.int32, device=device)
        offsets = x.m_indptr[:-1].contiguous()

        def launch() -> None:
            grouped_gemm(held, a, a_scale, x.b, x.b_scale, out, sizes, offsets)

        return Call(launch, x.out, x.index)

    return [Variant("sgl_kernel", flat, peer=True)]


def triton_variants(compiled_dims: str | None = None) -> list[Variant]:
    """triton_moe's grouped GEMM with the tiles that it ships for as many tokens."""
    from moe_fp8.baselines.requirement import require

    require("triton", "triton")

    def prepare(x: Operands) -> Call:
        return triton_call(x, shipped_tile(x.problem))

    return [Variant("triton_moe", prepare, peer=True)]


def shipped_tile(problem: Problem) -> "Tile":
    """What triton_moe takes for the workload; for even rows, for the tokens that would give every
    expert so many. Its first tile is for the GEMM that is deeper than wide."""
    from moe_fp8.baselines.triton_moe import tiles
    from moe_fp8.layer.problem import DEEPSEEK_V3

    each = problem.mean_rows * DEEPSEEK_V3.num_experts / DEEPSEEK_V3.top_k
    return tiles(problem.tokens or round(each))[problem.n > problem.k]


@functools.lru_cache(maxsize=32)
def triton_rows(x: Operands, block_m: int) -> "tuple[Placed, Rows]":
    """The operands with every expert padded to blocks, and the tables that say so.

    The tables are as long as for any routing of the problem's tokens: what a grid is made for.
    """
    import torch
    from moe_fp8.baselines.triton_stages import Rows, row_bound
    from moe_fp8.layer.problem import DEEPSEEK_V3

    problem = x.problem
    ends = list(itertools.accumulate(padded(rows, block_m) for rows in problem.rows))
    placed = x.placed([0, *ends[:-1]], ends[-1])
    tokens = problem.tokens or problem.pairs
    bound = max(row_bound(tokens, DEEPSEEK_V3, block_m), ends[-1])
    device, i32 = x.a.device, torch.int32
    token, expert = (torch.full((bound,), -1, dtype=i32, device=device) for _ in range(2))
    token[placed.index] = x.index.int()
    numbers = torch.arange(problem.experts, dtype=i32, device=device)
    expert[placed.index] = numbers.repeat_interleave(x.rows_per_expert.long())
    m_indptr = torch.tensor([0, *ends], dtype=i32, device=device)
    pair_row = placed.index.int().unsqueeze(1)
    return placed, Rows(pair_row, token, expert, m_indptr, x.rows_per_expert.unsqueeze(0))


def triton_call(x: Operands, tile: "Tile") -> Call:
    """GEMM1 gathers its rows from the flat ones; where others than the layer's are multiplied, and
    in GEMM2, they are in place."""
    from moe_fp8.baselines.triton_gemm import grouped_gemm

    placed, rows = triton_rows(x, tile.block_m)
    gather = (x.problem.n, x.problem.k) == LAYER_SHAPES["gemm1"]
    a, a_scale = (x.a, x.a_scale) if gather else (placed.a, placed.a_scale)

    def launch() -> None:
        grouped_gemm(a, a_scale.t(), x.b, x.b_scale, placed.out, rows, tile, gather)

    return Call(launch, placed.out, placed.index)


PEERS = {"deepgemm": deepgemm_variants, "sgl": sgl_variants, "triton": triton_variants}


def peer_variants(
    names: Sequence[str], compiled_dims: str | None = None, quiet: bool = False
) -> list[Variant]:
    """The variants of these peers; one that is not there is said, and left out."""
    variants = []
    for name in names:
        try:
            variants += PEERS[name](compiled_dims)
        except Exception as error:  # a peer's import compiles and loads its own libraries
            if not quiet:
                print(f"{name}: not measured, {type(error).__name__}: {error}", file=sys.stderr)
    return variants
