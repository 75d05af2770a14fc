"""The libraries' functions that the baselines call, in torch on the CPU, with the checks that the
real ones make or should make. What a real function leaves unset is garbage here."""

from types import ModuleType

import bruteforce
import torch
from moe_fp8 import reference
from moe_fp8.call import MoeInputs, MoeShape
from moe_fp8.reference import choose_experts

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
FP8_MAX = 448.0


def one_expert(a, a_scale, b, b_scale, out) -> None:
    """`out = a @ b.T` with block scales, for the rows of one expert; scales `[rows, K/128]`."""
    alone = torch.tensor([[0], [len(a)]])
    reference.grouped_gemm(a, a_scale.t(), b.unsqueeze(0), b_scale.unsqueeze(0), out, alone)


def both_projections(x, x_scale, w13, w13_scale, w2, w2_scale) -> torch.Tensor:
    """Compute an expert's rows, gate first, with a quantised SwiGLU as in our kernels."""
    g = torch.empty(len(x), len(w13), dtype=BF16)
    one_expert(x, x_scale, w13, w13_scale, g)
    gate, up = g.chunk(2, dim=1)
    q = torch.empty(len(x), w2.shape[1], dtype=FP8)
    q_scale = torch.empty(w2.shape[1] // 128, len(x))
    reference.swiglu_quant(torch.cat([up, gate], 1), q, q_scale, torch.tensor([len(x)]))
    o = torch.empty(len(x), len(w2), dtype=BF16)
    one_expert(q, q_scale.t(), w2, w2_scale, o)
    return o.float()


def sgl_kernel(shape: MoeShape, newest: bool = False) -> ModuleType:
    """sglang-kernel 0.4.3, or 0.4.10."""

    def moe_fused_gate(logits, bias, groups, topk_groups, top_k, shared, scaling, scale_weights):
        assert logits.dtype == bias.dtype == torch.float32
        assert (groups, topk_groups, top_k) == (shape.n_group, shape.topk_group, shape.top_k)
        assert shared == 0 and scale_weights is True
        ids, weights = choose_experts(logits, bias, scaling, shape)
        ids = ids.int()
        order = torch.randperm(top_k)  # the best first: any order must do
        return weights[:, order].contiguous(), ids[:, order].contiguous()

    def prepare_moe_input(
        ids, offsets, sizes1, sizes2, token_of_row, row_of_pair, experts, n, k, blockscales=None
    ):
        assert ids.dtype == token_of_row.dtype == row_of_pair.dtype == torch.int32
        row, flat = 0, ids.flatten().tolist()
        for expert in range(experts):
            pairs = [p for p, chosen in enumerate(flat) if chosen == expert]
            offsets[expert] = row
            sizes1[expert] = torch.tensor([len(pairs), 2 * n, k])
            sizes2[expert] = torch.tensor([len(pairs), k, n])
            for pair in reversed(pairs):  # the order within an expert is that of atomic additions
                token_of_row[row], row_of_pair[pair] = pair // ids.shape[1], row
                row += 1
        offsets[experts] = row

    def shuffle_rows(x, source, dims):
        assert x.is_contiguous() and 0 <= int(source.min()) and int(source.max()) < len(x)
        assert len(source) == dims[0]
        return x.view(torch.uint8)[source.long()].view(x.dtype).view(dims)

    def fp8_blockwise_scaled_grouped_mm(out, *rest):
        a, b, a_scale, b_scale, stride_a, stride_b, stride_out = rest[5:12]
        sizes, offsets = rest[14], rest[15]
        assert a.is_contiguous() and a_scale.is_contiguous() and b.stride(1) == 1
        for e, ((m, n, k), begin) in enumerate(zip(sizes.tolist(), offsets.tolist(), strict=True)):
            assert (k, n) == tuple(b[e].shape) and int(stride_out[e]) == n
            assert int(stride_a[e]) == int(stride_b[e]) == k
            rows = slice(begin, begin + m)
            one_expert(a[rows], a_scale[rows], b[e].t(), b_scale[e].t(), out[rows])

    def silu_and_mul(x, out):
        gate, up = x.chunk(2, dim=1)
        out.copy_(torch.nn.functional.silu(gate.float()) * up.float())

    def sgl_per_token_group_quant_8bit(x, q, scale, group, eps, least, largest):
        assert (group, eps, least, largest) == (128, 1e-10, -FP8_MAX, FP8_MAX)
        assert scale.is_contiguous()  # a scale along the rows would have another kernel
        blocks = x.float().unflatten(1, (-1, group))
        amax = blocks.abs().amax(-1).clamp_min(eps)
        scale.copy_(amax / largest)
        scaled = (blocks * (largest / amax).unsqueeze(-1)).clamp(least, largest)
        q.copy_(scaled.flatten(1).to(FP8))

    def apply_shuffle_mul_sum(x, out, row_of_pair, factors):
        assert factors.dtype == out.dtype == BF16 and 0 <= int(row_of_pair.min())
        rows = x[row_of_pair.long()].float().unflatten(0, (len(out), -1))
        out.copy_((rows * factors.float().unsqueeze(-1)).sum(1))

    if newest:
        del moe_fused_gate
    return module("sgl_kernel", locals())


def deep_gemm(shape: MoeShape, newest: bool = False) -> ModuleType:
    """sgl-deep-gemm 0.1.5, or 0.2.5."""

    def check_scale(scale) -> None:
        assert scale.dtype == torch.float32 and scale.stride(-2) == 1
        assert scale.stride(-1) % 4 == 0  # TMA

    def m_grouped_fp8_fp4_gemm_nt_masked(a, b, d, masked_m, expected_m, recipe):
        (a, a_scale), (b, b_scale) = a, b
        check_scale(a_scale)
        assert recipe == (1, 128, 128) and expected_m >= 1 and a.shape[1] % 128 == 0
        assert masked_m.is_contiguous() and masked_m.dtype == torch.int32
        for e, rows in enumerate(masked_m.tolist()):
            one_expert(a[e, :rows], a_scale[e, :rows], b[e], b_scale[e], d[e, :rows])

    def m_grouped_fp8_fp4_gemm_nt_contiguous(a, b, d, grouped_layout, recipe):
        (a, a_scale), (b, b_scale) = a, b
        check_scale(a_scale)
        assert recipe == (1, 128, 128) and len(a) % 128 == 0
        for begin in range(0, len(a), 128):
            tile = slice(begin, begin + 128)
            experts = set(grouped_layout[tile].tolist())
            expert = int(grouped_layout[begin])
            assert experts <= {expert, -1}
            if expert >= 0:
                one_expert(a[tile], a_scale[tile], b[expert], b_scale[expert], d[tile])

    def alignment():
        return 48

    def buffer_size(ranks, experts, room, top_k, h, i, fp8, activation):
        assert (ranks, experts, top_k, fp8, activation) == (
            1, shape.num_local_experts, shape.top_k, True, "swiglu",
        )  # fmt: skip
        assert (h, i) == (shape.hidden_size, shape.intermediate_size) and room % 48 == 0
        sizes = (room * h, 4 * room * (h // 128), 8 * room * top_k, 4 * room * top_k)

        def parts(buffer):
            x, scale, ids, weights = buffer.split(sizes)
            return (
                x.view(room, h),
                scale.view(torch.float32).view(room, h // 128),
                ids.view(torch.int64).view(room, top_k),
                weights.view(torch.float32).view(room, top_k),
                *[None] * 4,
            )

        return sum(sizes), parts

    def mega_moe(y, l1_weights, l2_weights, sym_buffer):
        """The first projection's rows are in the package's own order."""
        (w13, w13_scale), (w2, w2_scale) = l1_weights, l2_weights
        assert sym_buffer.group.rank() == 0
        assert sym_buffer.handle.buffer_ptrs == [sym_buffer.buffer.data_ptr()]
        room, top_k = sym_buffer.num_max_tokens_per_rank, sym_buffer.num_topk
        _, parts = buffer_size(
            1, sym_buffer.num_experts, room, top_k, *shape_of(w2), True, "swiglu"
        )
        x, scale, ids, weights = (part[: len(y)] for part in parts(sym_buffer.buffer)[:4])
        assert all((s != 0).all() for s in (scale, w13_scale, w2_scale)), "it divides by them"
        x, total = x.view(FP8), torch.zeros(y.shape)
        for expert, rows in enumerate(w13.unflatten(1, (-1, 2, 8)).transpose(1, 2).flatten(1, 3)):
            token, slot = (ids == expert).nonzero(as_tuple=True)
            second = w2[expert], w2_scale[expert]
            o = both_projections(x[token], scale[token], rows, w13_scale[expert], *second)
            total[token] += weights[token, slot].unsqueeze(1) * o
        assert ((ids >= -1) & (ids < len(w13))).all()
        y.copy_(total)

    def shape_of(w2) -> tuple[int, int]:
        return w2.shape[1], w2.shape[2]

    def bounded_mega_moe(*args, num_tokens_bound=None):
        assert num_tokens_bound == len(args[0]), "else the schedule is that of a full buffer"
        mega_moe(*args)

    of_version = {
        "get_token_alignment_for_mega_moe": alignment,
        "get_symm_buffer_size_for_sm90_mega_moe": buffer_size,
        "fp8_mega_moe": mega_moe,
    }
    if newest:
        of_version = {
            "get_token_alignment_for_mega_moe": None,  # of Blackwell's kernel alone
            "get_token_alignment_for_sm90_mega_moe": alignment,
            "get_symm_buffer_size_for_sm90_mega_moe": lambda *layout: buffer_size(*layout)[0],
            "slice_symm_buffer_for_sm90_mega_moe": lambda buffer, *layout: list(
                buffer_size(*layout)[1](buffer)
            ),
            "fp8_mega_moe": bounded_mega_moe,
        }
    found = module("deep_gemm", locals() | of_version)
    found._C = found
    return found


def hpc(shape: MoeShape) -> ModuleType:
    def tile_of(mean: int) -> int:
        if mean > 64:
            return 48 if mean <= 96 else 32 if mean <= 128 else 48 if mean <= 144 else 64
        return next(tile for tile in (8, 16, 32, 48, 64) if mean <= tile)

    def group_gemm_blockwise_fp8(
        x, weight, seqlens, cu_seqlens, x_scale, w_scale, num_seq_per_group_avg=32, output=None,
        tma_desc=None, task_map_workspace=None,
    ):  # fmt: skip
        groups, n, k = weight.shape
        assert x.dtype == weight.dtype == FP8 and output.dtype == BF16
        assert seqlens.dtype == cu_seqlens.dtype == torch.int32
        assert x.is_contiguous() and weight.is_contiguous() and output.is_contiguous()
        assert seqlens.is_contiguous() and len(seqlens) == groups == len(cu_seqlens) - 1
        assert w_scale.is_contiguous() and w_scale.shape == (groups, n // 128, k // 128)
        assert x_scale.is_contiguous() and x_scale.shape == (k // 128, len(x))
        assert len(x) % 4 == 0 and output.shape == (len(x), n) and tma_desc is None  # TMA
        tile = tile_of(num_seq_per_group_avg)
        tiles = [-(-m // tile) for m in seqlens.tolist()]
        if tile == 8:
            assert task_map_workspace.dtype == torch.int32 and task_map_workspace.is_contiguous()
            waves, processors, task = task_map_workspace.shape
            assert processors == triton_stages_processors() and task == 4
            assert waves * processors >= sum(tiles) * (n // 128) + processors
            task_map_workspace.fill_(-7)
        else:
            assert sum(tiles) > 0, "the kernel divides by it"
        for e, (begin, m) in enumerate(zip(cu_seqlens.tolist(), seqlens.tolist(), strict=False)):
            rows = slice(begin, begin + m)
            first = sum(tiles[:e]) * tile
            scale = x_scale[:, first : first + m].t()
            one_expert(x[rows], scale, weight[e], w_scale[e], output[rows])
        return output

    def triton_stages_processors() -> int:
        from moe_fp8.baselines.triton_stages import processors

        return processors(torch.device("cpu"))

    return module("hpc", locals())


def fused_moe(shape: MoeShape) -> ModuleType:
    """`flashinfer.fused_moe` as far as its CUTLASS and its CuTe DSL function go."""

    def cutlass_fused_moe_workspace_size(
        max_num_tokens, hidden_size, intermediate_size, num_experts_total, top_k, *, x_dtype,
        weight_dtype, output_dtype, ep_size, use_deepseek_fp8_block_scale, device,
    ):  # fmt: skip
        return max_num_tokens

    def cutlass_fused_moe(
        input, token_selected_experts, token_final_scales, fc1_expert_weights, fc2_expert_weights,
        output_dtype, quant_scales, *, ep_size, ep_rank, output, use_deepseek_fp8_block_scale,
        workspace_buffer,
    ):  # fmt: skip
        assert input.dtype == output_dtype == output.dtype == BF16
        assert token_selected_experts.dtype == torch.int32
        assert use_deepseek_fp8_block_scale and len(workspace_buffer) >= len(input)
        experts = len(fc2_expert_weights)
        assert 0 <= ep_rank < ep_size == shape.num_experts // experts
        assert 0 <= int(token_selected_experts.min())
        assert int(token_selected_experts.max()) < ep_size * experts
        total = torch.zeros(output.shape)
        for e in range(experts):
            token, slot = (token_selected_experts == ep_rank * experts + e).nonzero(as_tuple=True)
            values = input[token]
            for weights, scales in zip(
                (fc1_expert_weights, fc2_expert_weights), quant_scales, strict=True
            ):
                blocks = values.float().unflatten(1, (-1, 128))
                scale = blocks.abs().amax(-1).clamp_min(1e-10) / FP8_MAX
                q = (blocks / scale.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX).flatten(1).to(FP8)
                out = torch.empty(len(token), weights.shape[1], dtype=BF16)
                one_expert(q, scale, weights[e], scales[e], out)
                linear, gate = out.float().chunk(2, dim=1)
                values = (torch.nn.functional.silu(gate) * linear).to(BF16)
            total[token] += token_final_scales[token, slot].unsqueeze(1) * out.float()
        output.copy_(total)

    def prims_ts_fp8_block_scale_moe(
        routing_logits, routing_bias, hidden_states, hidden_states_scale, gemm1_weights,
        gemm1_weights_scale, gemm2_weights, gemm2_weights_scale, num_experts, top_k, n_group,
        topk_group, intermediate_size, local_expert_offset, local_num_experts,
        routed_scaling_factor, *, routing_method_type, use_shuffled_weight, output,
    ):  # fmt: skip
        assert use_shuffled_weight and routing_method_type == 2
        assert (n_group, topk_group, top_k) == (shape.n_group, shape.topk_group, shape.top_k)
        assert num_experts == shape.num_experts and local_num_experts == len(gemm1_weights)
        assert hidden_states_scale.is_contiguous() and hidden_states_scale.dtype == torch.float32
        assert 2 * intermediate_size == gemm1_weights.shape[1]

        def in_order(weights):
            # FlashInfer's shuffled_matrix_row_index, of blocks of 16 rows: where row r lies.
            rows = torch.arange(weights.shape[1])
            place = rows // 16 * 16 + rows % 16 % 2 * 8 + rows % 16 // 2
            return weights.view(torch.uint8)[:, place].view(FP8)

        inputs = MoeInputs(
            routing_logits, routing_bias, hidden_states, hidden_states_scale,
            in_order(gemm1_weights), gemm1_weights_scale, in_order(gemm2_weights),
            gemm2_weights_scale, local_expert_offset, routed_scaling_factor,
        )  # fmt: skip
        return output.copy_(torch.from_numpy(bruteforce.layer(inputs, shape)))

    return module("flashinfer.fused_moe", locals())


def module(name: str, content: dict) -> ModuleType:
    made = ModuleType(name)
    for key, value in content.items():
        if callable(value):
            setattr(made, key, value)
    return made
