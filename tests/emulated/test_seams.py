"""What a second epilogue and a second architecture need: a class each, and one entry in a table."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32
from markers import more
from moe_fp8.kernels import architectures
from moe_fp8.kernels import operations as kernels
from moe_fp8.kernels.a_load import ContiguousRows
from moe_fp8.kernels.compile import Extent, Scalar, Tensor, compiled
from moe_fp8.kernels.sm90.config import WARPGROUP, GemmConfig
from moe_fp8.kernels.sm90.gemm import GroupedGemmSm90
from moe_fp8.numerics import BLOCK
from problems import LAYOUTS, UNTOUCHED, gemm

ROWS = (3, 130, 0, 66)
N, K = 256, 384


class StoreFloat32:
    """An epilogue that stores the sums as they are: value by value, without staging."""

    n_halves, staging_type = 1, BFloat16

    def __init__(self, config, operands, n: int):
        self.config, self.operands, self.n = config, operands, n

    def weights(self, b: cute.Tensor) -> cute.Tensor:
        return cute.make_tensor(b.iterator, cute.select(b.layout, mode=[1, 2, 0]))

    def scale_block(self, n_tile: Int32, half: int, warpgroup: Int32) -> Int32:
        return n_tile * self.config.tile_n // BLOCK

    def staging_elements(self) -> int:
        return 8  # a member of the kernel's shared memory cannot be empty

    def staging(self, buffer):
        return buffer.get_tensor(cute.make_layout(8))

    def output(self, out: cute.Tensor) -> cute.Tensor:
        return out

    def prefetch(self, output) -> None:
        pass

    @cute.jit
    def store(self, output, staging, tiled_mma, acc, share):
        tile, _, thread, _ = share
        shape = self.operands.accumulator_shape()
        where = tiled_mma.get_slice(thread).partition_C(cute.make_identity_tensor(shape))
        for i in cutlass.range_constexpr(cute.size(acc)):
            token, column = where[i]
            if cutlass.const_expr(self.config.swap_ab):
                token, column = column, token
            if token < tile.rows:
                output[tile.row + token, tile.n_tile * self.config.tile_n + column] = acc[i]

    def finish(self) -> None:
        pass


@pytest.mark.parametrize(
    "config",
    [
        GemmConfig(tile_m=64, cluster_n=2, overlap=True),
        *more(GemmConfig(stages=3), GemmConfig(tile_m=16, swap_ab=True)),
    ],
    ids=str,
)
def test_a_second_epilogue(config, emulator):
    problem = gemm(ROWS, N, K, 256, exact=True, layout="flat")
    rows, experts, blocks = Extent("rows", 4), len(ROWS), K // BLOCK
    arguments = (
        Tensor(Float8E4M3FN, (rows, K)),
        Tensor(Float32, (blocks, rows)),
        Tensor(Float8E4M3FN, (experts, N, K)),
        Tensor(Float32, (experts, N // BLOCK, blocks), align=4),
        Tensor(Float32, (rows, N)),
        Tensor(Int32, (2, experts), align=4, strides=(Extent("apart"), 1)),
        Tensor(Int32, (Extent("counters"),), align=4),
        Scalar(Int32),
    )
    parameters = (config, N, K, experts, ContiguousRows, StoreFloat32)
    function = compiled(GroupedGemmSm90, parameters, arguments, "sm_90a")
    out = torch.full(problem.expected.shape, UNTOUCHED)
    tensors = (problem.a, problem.a_scale, problem.b, problem.b_scale, out, problem.expert_rows)
    function(*tensors, torch.zeros(1, dtype=torch.int32), 2 * config.cluster_size)
    assert torch.equal(out.bfloat16(), problem.expected)
    assert emulator.reports[-1].hazards == []


@dataclass(frozen=True)
class SimtConfig:
    """What the layer and the launch ask of a config."""

    tile_m: int = 8
    tile_n: int = WARPGROUP
    cluster_m: int = 1
    cluster_n: int = 1
    dynamic: bool = False

    @property
    def cluster_size(self) -> int:
        return self.cluster_m * self.cluster_n


class GroupedGemmSimt:
    """The grouped GEMM without tensor cores and without shared memory: a thread a column.

    The CTAs walk over the experts, and over their rows and columns in tiles.
    """

    def __init__(self, config: SimtConfig, n: int, k: int, experts: int):
        self.config, self.n, self.k, self.experts = config, n, k, experts

    @cute.jit
    def __call__(self, a, a_scale, b, b_scale, out, expert_rows, counter, num_ctas, stream):
        self.kernel(a, a_scale, b, b_scale, out, expert_rows).launch(
            grid=[num_ctas, 1, 1], block=[WARPGROUP, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, a, a_scale, b, b_scale, out, expert_rows):
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        for expert in range(self.experts):
            for row in range(expert_rows[0, expert] + cta, expert_rows[1, expert], ctas):
                for n_tile in range(self.n // WARPGROUP):
                    column = n_tile * WARPGROUP + thread
                    total = Float32(0.0)
                    for kb in range(self.k // BLOCK):
                        acc = Float32(0.0)
                        for i in range(BLOCK):
                            of_a = a[row, kb * BLOCK + i].to(Float32)
                            acc += of_a * b[expert, column, kb * BLOCK + i].to(Float32)
                        total += acc * (a_scale[kb, row] * b_scale[expert, n_tile, kb])
                    out[row, column] = BFloat16(total)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_second_architecture(layout, emulator, monkeypatch):
    """With an entry in the table, the operation that the layers call runs its kernel."""
    simt = architectures.Architecture(
        gpus="a GPU of the past",
        target="sm_90a",  # which the emulator runs
        config=SimtConfig(),
        choose=lambda rows, n, k, **known: SimtConfig(),
        layer=None,
        gemm=lambda: GroupedGemmSimt,
        swiglu=lambda config: object,
    )
    monkeypatch.setattr(architectures, "ARCHITECTURES", {(1, 0): simt})
    monkeypatch.setattr(kernels, "target_of", lambda device: simt.target)
    monkeypatch.setattr(kernels, "multiprocessors_of", lambda device: 3)
    problem = gemm((3, 0, 9), 256, 256, 128, exact=True, layout=layout)
    out = problem.output()
    kernels.grouped_gemm(*problem[:4], out, problem.expert_rows, simt.choose(4, 256, 256))
    assert torch.equal(out, problem.expected)
    assert emulator.reports[-1].hazards == []


def test_a_target_without_kernels_is_named():
    with pytest.raises(ValueError, match="no kernels for 'sm_80': expected one of sm_90a"):
        kernels.compile_grouped_gemm(GemmConfig(), 128, 128, 1, "sm_80")
