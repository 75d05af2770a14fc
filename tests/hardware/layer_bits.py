"""Compare the fused layer's bits on a Hopper GPU with those of the emulator.

    python tests/hardware/layer_bits.py emulate DIRECTORY    # without a GPU: what one should give
    python tests/hardware/layer_bits.py compare DIRECTORY    # on a GPU: the share of equal values

The emulator computes the sums of WGMMA, and ex2.approx and rcp.approx of the routing and of SwiGLU,
as Hopper does (docs/notes/gemm_sm90.md). moe_fp8 must be installed, and to emulate ptxemu:
`run.py setup`. Each number of tokens runs in its own process.
"""

import argparse
import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import torch

TOKENS = (80, 16, 7, 1)


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
    ptxemu.options.hopper_arithmetic = True
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


# --- the program ----------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=["emulate", "compare"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    arguments = parser.parse_args()
    what, directory, tokens = arguments.what, arguments.directory, arguments.tokens
    directory.mkdir(parents=True, exist_ok=True)
    if len(tokens) > 1:
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
