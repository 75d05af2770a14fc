"""Compare the fused layer's bits on a Hopper GPU with those of the emulator.

    python tests/hardware/layer_bits.py emulate DIRECTORY    # without a GPU: what one should give
    python tests/hardware/layer_bits.py compare DIRECTORY    # on a GPU: the share of equal values
    python tests/hardware/layer_bits.py tables DIRECTORY     # on a GPU: ex2.approx and rcp.approx

The emulator adds FP8 products as Hopper's WGMMA does (docs/notes/gemm_sm90.md), so GEMMs have the
bits of a GPU. It computes ex2.approx and rcp.approx of SwiGLU exactly. moe_fp8 must be
installed, and to emulate ptxemu: `run.py setup`. Each number of tokens runs in its own process.
"""

import argparse
import gzip
import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch

TOKENS = (80, 16, 7, 1)
MANTISSAS = 1 << 23


# --- the layer ------------------------------------------------------------------------------------


def layer_inputs(tokens: int, device: str) -> tuple[Any, str]:
    """Return the inputs, whose bits depend on `tokens` alone, and their digest."""
    from moe_fp8.call import MoeInputs
    from moe_fp8.shape import DEEPSEEK_V3

    shape, rng = DEEPSEEK_V3, numpy.random.default_rng(tokens)
    normal = torch.special.ndtri((torch.arange(256, dtype=torch.float64) + 0.5) / 256)
    values = normal.float().to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    digest = hashlib.sha256()

    def keep(array, dtype: torch.dtype) -> torch.Tensor:
        digest.update(array.reshape(-1)[:: max(1, array.size // 2**20)].tobytes())
        return torch.from_numpy(array).view(dtype).to(device)

    def fp8(*size: int) -> torch.Tensor:
        drawn = rng.integers(0, 256, size, dtype=numpy.uint8)
        return keep(numpy.take(values, drawn, out=drawn, mode="clip"), torch.float8_e4m3fn)

    def scales(*size: int) -> torch.Tensor:
        return keep(rng.random(size, dtype=numpy.float32) / 4 + 1 / 16, torch.float32)

    local, h, i = shape.num_local_experts, shape.hidden_size, shape.intermediate_size
    logits = rng.random((tokens, shape.num_experts), dtype=numpy.float32) * 4 - 2
    logits[:, :local] += 1  # more of this rank's experts
    inputs = MoeInputs(
        keep(logits, torch.float32), torch.zeros(shape.num_experts, device=device).bfloat16(),
        fp8(tokens, h), scales(h // 128, tokens),
        fp8(local, 2 * i, h), scales(local, 2 * i // 128, h // 128),
        fp8(local, h, i), scales(local, h // 128, i // 128), 0, 2.5,
    )  # fmt: skip
    return inputs, digest.hexdigest()


def layer_bits(tokens: int, device: str) -> dict[str, Any]:
    """Return what a call of the fused layer writes: the experts' weights, the quantised output of
    GEMM1 for the rows in use, its scales, and the layer's output."""
    from moe_fp8 import layer
    from moe_fp8.kernels.fused import max_rows, offsets, workspace_parts
    from moe_fp8.shape import DEEPSEEK_V3

    inputs, digest = layer_inputs(tokens, device)
    taken: list[torch.Tensor] = []

    def allocate(size: int, gpu: int) -> int:
        taken.append(torch.zeros(size, dtype=torch.uint8, device=device))
        return taken[-1].data_ptr()

    layer.allocate, layer.free = allocate, lambda address: None
    out = torch.zeros(tokens, DEEPSEEK_V3.hidden_size, dtype=torch.bfloat16, device=device)
    layer.make_call(tokens, out.device, DEEPSEEK_V3)(inputs, out)
    rows = max_rows(DEEPSEEK_V3, tokens)
    parts = workspace_parts(DEEPSEEK_V3, 1, tokens, rows)
    starts, _ = offsets(parts)

    def part(name: str, dtype: torch.dtype) -> torch.Tensor:
        start, (_, extents) = getattr(starts, name), getattr(parts, name)
        size = int(numpy.prod(extents)) * dtype.itemsize
        return taken[0][start : start + size].view(dtype).view(extents).cpu()

    used = int(part("m_indptr", torch.int32)[-1])
    return {
        "inputs": digest,
        "weights": part("weights", torch.float32).clone(),
        "q": part("q", torch.uint8)[:used].clone(),
        "q_scale": part("q_scale", torch.float32)[:, :used].clone(),
        "out": out.cpu(),
    }


def emulate(tokens: int) -> dict[str, Any]:
    import ptxemu

    ptxemu.install("sm_90a", 132)
    ptxemu.options.hopper_sums = True
    ptxemu.options.check_races = False
    return layer_bits(tokens, "cpu")


def compare(tokens: int, expected: dict[str, Any]) -> str:
    got = layer_bits(tokens, "cuda")
    if got["inputs"] != expected["inputs"]:
        return f"T={tokens}: the inputs differ"
    text = f"T={tokens}: {len(got['q'])} rows; equal"
    for name in ("weights", "q", "q_scale", "out"):
        bits = {4: torch.int32, 2: torch.int16, 1: torch.uint8}[got[name].element_size()]
        same = got[name].view(bits) == expected[name].view(bits)
        text += f" {name} {100 * same.float().mean():.4f} % (all but {int((~same).sum())});"
    largest = expected["out"].float().abs().max()
    difference = (got["out"].float() - expected["out"].float()).abs().max()
    return f"{text} largest difference of out {difference:.3g} of {largest:.3g}"


# --- ex2.approx and rcp.approx --------------------------------------------------------------------


def approximations() -> Callable[..., None]:
    """Return a compiled function: it writes ex2.approx and rcp.approx of float32 numbers."""
    import cutlass.cute as cute
    from cutlass import Float32
    from cutlass.cute.runtime import make_fake_stream
    from moe_fp8.kernels.compile import COMPILE_OPTIONS, Extent, Tensor, fakes

    class Approximations:
        @cute.jit
        def __call__(self, x: cute.Tensor, ex2: cute.Tensor, rcp: cute.Tensor, stream):
            blocks = cute.ceil_div(cute.size(x), 128)
            self.kernel(x, ex2, rcp).launch(grid=(blocks, 1, 1), block=(128, 1, 1), stream=stream)

        @cute.kernel
        def kernel(self, x: cute.Tensor, ex2: cute.Tensor, rcp: cute.Tensor):
            thread, _, _ = cute.arch.thread_idx()
            block, _, _ = cute.arch.block_idx()
            i = block * 128 + thread
            if i < cute.size(x):
                ex2[i] = cute.math.exp2(x[i], fastmath=True)  # type: ignore[attr-defined]
                rcp[i] = cute.arch.rcp_approx(x[i])

    vector = Tensor(Float32, (Extent("numbers"),), align=4)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    options = COMPILE_OPTIONS.format(arch="sm_90a")
    return cute.compile(Approximations(), *fakes((vector,) * 3), stream, options=options)


def tables(directory: Path, device: str, count: int = MANTISSAS) -> None:
    """Write, for all float32 mantissas, the difference of the two functions from the correctly
    rounded value, in units of the last place; print how far these tables tell other arguments."""
    function = approximations()

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ex2, rcp = torch.empty_like(x), torch.empty_like(x)
        function(x, ex2, rcp)
        return ex2.view(torch.int32), rcp.view(torch.int32)

    def with_exponent(exponent: int, sign: int = 0) -> torch.Tensor:
        bits = torch.arange(count, dtype=torch.int32, device=device) + (127 + exponent << 23)
        return (bits | (-(2**31) if sign else 0)).view(torch.float32)

    def write(name: str, difference: torch.Tensor) -> None:
        print(f"{name}: {int(difference.min())} to {int(difference.max())} units,"
              f" {100 * (difference == 0).float().mean():.2f} % correctly rounded")  # fmt: skip
        path = directory / f"{name}.int8.gz"
        path.write_bytes(gzip.compress(difference.to(torch.int8).cpu().numpy().tobytes(), 6))

    one = with_exponent(0)
    ex2, rcp = both(one)
    write("rcp", rcp - (1 / one.double()).float().view(torch.int32))
    write("ex2", ex2 - torch.exp2(one.double()).float().view(torch.int32))
    for exponent, sign in [(-120, 0), (-3, 1), (1, 0), (1, 1), (20, 0), (120, 1)]:
        other = both(with_exponent(exponent, sign))[1]
        expected = rcp - (exponent << 23) | (-(2**31) if sign else 0)
        print(f"rcp, exponent {exponent}, sign {sign}: {int((other != expected).sum())} of {count}"
              " are not the table's")  # fmt: skip
    # 2**x = 2**floor(x) * 2**fraction: the fraction in units of 2**-23 or finer.
    for exponent in (*range(-16, 0), 1, 3, 6):
        for sign in (0, 1):
            x = with_exponent(exponent, sign)
            got, told = both(x)[0], []
            for name, rounded in (
                ("floor", torch.floor),
                ("nearest", torch.round),
                ("towards zero", torch.trunc),
            ):
                units = rounded(x.double() * MANTISSAS).long()
                whole, fraction = units >> 23, (units & MANTISSAS - 1).clamp(max=count - 1)
                expected = ex2[fraction] + (whole - 1 << 23)
                told.append(f"{name} {100 * (expected == got).float().mean():.2f} %")
            exact = torch.exp2(x.double()).float().view(torch.int32)
            if exponent == -1:
                write(f"ex2_half_sign_{sign}", got - exact)
            told.append(f"correctly rounded {100 * (got == exact).float().mean():.2f} %")
            print(f"ex2, exponent {exponent}, sign {sign}, by the table: {', '.join(told)}")


# --- the program ----------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=["emulate", "compare", "tables"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    arguments = parser.parse_args()
    what, directory, tokens = arguments.what, arguments.directory, arguments.tokens
    directory.mkdir(parents=True, exist_ok=True)
    if what == "tables":
        tables(directory, "cuda")
    elif len(tokens) > 1:
        command = [sys.executable, __file__, what, str(directory), "--tokens"]
        if what == "emulate":  # one after the other: each has 1.4 GB of weights twice
            return max(abs(subprocess.run([*command, str(t)]).returncode) for t in tokens)
        running = [subprocess.Popen([*command, str(t)]) for t in tokens]
        return max(abs(process.wait()) for process in running)
    else:
        path = directory / f"T{tokens[0]}.pt"
        if what == "emulate":
            torch.save(emulate(tokens[0]), path)
        else:
            print(compare(tokens[0], torch.load(path)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
