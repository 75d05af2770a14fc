"""Misuse and load on a GPU: wrong arguments, values that are not finite, memory that runs out or
belongs to others, any number of tokens, random problems, and several processes at once."""

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import deepseek
import numpy as np
import pytest
import torch
from deepseek import (
    MODULES,
    SHAPE,
    every_module,
    new_output,
    output_of,
    part_of,
    random_fp8,
)
from moe_fp8 import reference
from moe_fp8.api import fused_moe
from moe_fp8.call import MoeInputs, MoeShape
from moe_fp8.ladder import v4_flat as v4
from moe_fp8.ladder import v5_fused as v5
from moe_fp8.ladder import v6_fused_hifi as v6

from scripts.common.metrics import calc_diff, cosine

weights, make_inputs = deepseek.weights, deepseek.make_inputs

FIRST = int(os.environ.get("MOE_FP8_FUZZ_SEED", "0"))
COUNT = int(os.environ.get("MOE_FP8_FUZZ", "2"))
"""Random problems: seeds FIRST, FIRST + 1, ..., each the name of its test; each compiles anew."""
PROCESSES = 8
TENSORS = MoeInputs._fields[:8]
NAN = 0x7F
"""The NaN of float8_e4m3fn, which has no infinity."""
DIFFERENT = {"flat": v4, "fused": v5, "hifi": v6}
"""v1 to v3 are bitwise equal to flat."""


# --- wrong arguments ------------------------------------------------------------------------------


def misaligned(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.numel() + 1)[1:].view(x.shape)


FAULTS = {
    "dtype": lambda x: x.new_empty(x.shape, dtype=torch.float16),
    "shape": lambda x: x.new_empty((*x.shape[:-1], x.shape[-1] + 16)),
    "rank": lambda x: x.unsqueeze(0),
    "stride": lambda x: x.new_empty((*x.shape, 2))[..., 0],
    "stride of 0": lambda x: x.as_strided(x.shape, x.dim() * (0,)),
    "device": lambda x: torch.empty_like(x, device="cpu"),
    "address": misaligned,
    "no tensor": lambda x: None,
}


@every_module
def test_every_wrong_tensor_is_named_and_harms_nothing(module, make_inputs):
    inputs = make_inputs(61)
    wanted, output = output_of(module, inputs), new_output(inputs)
    good = inputs._asdict() | {"output": output}
    for name in (*TENSORS, "output"):
        for fault, make in FAULTS.items():
            if fault == "address" and name.endswith("scale"):
                continue  # legal
            with pytest.raises(ValueError) as error:
                module.run(**good | {name: make(good[name])})
            of_logits = (name, fault) == ("routing_logits", "device")  # where all others are not
            named = "routing_bias" if of_logits else name
            assert str(error.value).startswith(f"{named}: expected "), (name, fault)
    torch.cuda.synchronize()
    assert output.isnan().all()
    assert torch.equal(output_of(module, inputs), wanted)


@every_module
def test_scalars_of_any_value(module, make_inputs):
    inputs = make_inputs(61, "all_to_one")
    wanted = output_of(module, inputs)
    assert wanted.ne(0).any(dim=1).all()

    def with_factor(factor) -> torch.Tensor:
        return output_of(module, inputs._replace(routed_scaling_factor=factor))

    assert not with_factor(0.0).any()
    assert torch.equal(with_factor(-2.5), -wanted)
    assert not with_factor(torch.nan).isfinite().any()
    for factor in (torch.inf, 1e300):
        assert not with_factor(factor).isfinite().any()
    for factor in (10**400, "2.5", None):
        with pytest.raises(ValueError, match="^routed_scaling_factor: expected a real number"):
            with_factor(factor)
    for offset in (10**30, -(10**30)):
        assert not output_of(module, inputs._replace(local_expert_offset=offset)).any()
    assert torch.equal(output_of(module, inputs), wanted)


# --- values that are not finite -------------------------------------------------------------------

FP8 = ("hidden_states", "gemm1_weights", "gemm2_weights")
WHERE = [
    (name, bad)
    for name in TENSORS
    for bad in (torch.nan, torch.inf)
    if bad != bad or name not in FP8
]


@pytest.mark.parametrize(("name", "bad"), WHERE)
def test_not_finite_as_in_the_model(name, bad, make_inputs):
    """The model's outputs are finite where the reference's are: tests/cpu/test_misuse.py."""
    inputs = make_inputs(9, "all_to_one")
    original = getattr(inputs, name)
    x = original.clone()
    if name in FP8:
        x.view(torch.uint8)[(6, 3, 5) if x.dim() == 3 else (4, 5)] = NAN
    else:
        place = {"routing_logits": (4, 70), "routing_bias": (70,), "hidden_states_scale": (1, 4)}
        x[place.get(name, (6, 0, 0))] = bad
    changed = inputs._replace(**{name: x})
    wanted = new_output(inputs)
    reference.fused(changed, wanted, SHAPE)
    spreads = not name.startswith("routing") or (name == "routing_logits" and bad != bad)
    assert bool(wanted.isfinite().all()) != spreads
    for of, module in DIFFERENT.items():
        got, clean = output_of(module, changed), output_of(module, inputs)
        assert torch.equal(got.isfinite(), wanted.isfinite()), of
        if name in ("hidden_states", "hidden_states_scale"):
            others = torch.arange(9, device="cuda") != 4
            assert torch.equal(got[others], clean[others]), f"{of}: other tokens have it"
        assert torch.equal(output_of(module, inputs), clean), f"{of}: it stays"


# --- memory ---------------------------------------------------------------------------------------

PAD = 4096
"""Bytes before and behind a guarded tensor: all ones, which are NaN in every type."""


def guarded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(the memory with its pads, the same values in it)."""
    memory = torch.full((x.nbytes + 2 * PAD,), 0xFF, dtype=torch.uint8, device=x.device)
    inner = memory[PAD:-PAD]
    inner.copy_(x.view(-1).view(torch.uint8))
    return memory, inner.view(x.dtype).view(x.shape)


@pytest.mark.parametrize("tokens", [1, 7, 61, 901])
def test_memory_around_the_arguments_is_neither_read_nor_written(tokens, make_inputs):
    inputs = make_inputs(tokens)
    pairs = {name: guarded(getattr(inputs, name)) for name in TENSORS}
    padded = inputs._replace(**{name: tensor for name, (_, tensor) in pairs.items()})
    for of, module in MODULES.items():
        wanted = output_of(module, inputs)
        around, output = guarded(new_output(inputs))
        module.run(*padded, output)
        assert torch.equal(output, wanted), f"{of} reads what is around its arguments"
        pads = {"output": around} | {name: memory for name, (memory, _) in pairs.items()}
        for name, memory in pads.items():
            whole = bool((memory[:PAD] == 0xFF).all()) and bool((memory[-PAD:] == 0xFF).all())
            assert whole, f"{of} writes around {name}"
    for name, (memory, _) in pairs.items():
        original = getattr(inputs, name).view(-1).view(torch.uint8)
        assert torch.equal(memory[PAD:-PAD], original), f"{name} was written"


@pytest.mark.parametrize("byte", [0xFF, 0x7F, 0x00])
@pytest.mark.parametrize("tokens", [7, 901])
def test_what_others_left_in_memory(tokens, byte, make_inputs):
    """The allocator hands out used memory, small pieces and large ones."""
    inputs = make_inputs(tokens)
    wanted = {of: output_of(module, inputs) for of, module in MODULES.items()}
    for of, module in MODULES.items():
        output = new_output(inputs)
        torch.cuda.empty_cache()
        left = [torch.full((2**n,), byte, dtype=torch.uint8, device="cuda") for n in (18, 32)]
        left += [torch.full_like(left[0], byte) for _ in range(64)]
        del left
        module.run(*inputs, output)
        assert torch.equal(output, wanted[of]), of


@pytest.fixture
def full() -> Iterator[list[torch.Tensor]]:
    """Take all of this process's GPU memory; to clear the list releases it."""
    blocks: list[torch.Tensor] = []
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    try:
        for size in (2**exponent for exponent in range(34, 19, -1)):
            while True:  # what is free within the memory that torch has
                try:
                    blocks.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
                except torch.OutOfMemoryError:
                    break
        yield blocks
    finally:
        blocks.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


@pytest.fixture
def prepared(make_inputs) -> dict[str, tuple[MoeInputs, torch.Tensor, torch.Tensor]]:
    """Inputs, an output, and what it must be; made before the memory is taken."""
    inputs = make_inputs(4096)
    return {
        name: (inputs, new_output(inputs), output_of(module, inputs))
        for name, module in MODULES.items()
    }


def test_a_call_without_memory_fails_and_the_next_one_is_right(prepared, full):
    for name, (inputs, output, _) in prepared.items():
        with pytest.raises(torch.OutOfMemoryError):
            MODULES[name].run(*inputs, output)
    full.clear()
    torch.cuda.set_per_process_memory_fraction(1.0)
    for name, (inputs, output, wanted) in prepared.items():
        output.fill_(torch.nan)
        MODULES[name].run(*inputs, output)
        assert torch.equal(output, wanted), name


@pytest.mark.parametrize("module", [v5, v6], ids=["fused", "hifi"])
def test_any_number_of_tokens(module, make_inputs):
    """Numbers of tokens within one chunk, just past it, and of eight chunks. The first tokens, the
    last and those around a chunk's border have the bits of a call alone."""
    pool = make_inputs(131072)
    for tokens in (0, 1, 2, 16383, 16384, 16385, 32769, 131072):
        inputs = part_of(pool, slice(0, tokens))
        whole = output_of(module, inputs)
        assert whole.shape == (tokens, SHAPE.hidden_size) and whole.isfinite().all()
        for first in {0, max(0, min(16300, tokens - 128)), max(0, tokens - 128)}:
            part = slice(first, min(first + 128, tokens))
            if part.stop > part.start:
                assert torch.equal(output_of(module, part_of(inputs, part)), whole[part]), tokens


# --- random problems ------------------------------------------------------------------------------


def random_problem(seed: int) -> tuple[MoeShape, MoeInputs]:
    """A geometry that fits a warp's routing, a routing and values, reproducible from the seed."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator("cuda").manual_seed(seed)

    def draw(least: int, most: int) -> int:
        return int(rng.integers(least, most + 1))

    def normal(*dims: int) -> torch.Tensor:
        return torch.randn(dims, generator=generator, device="cuda")

    experts, n_group = 2 ** draw(5, 8), 2 ** draw(0, 3)
    topk_group = draw(1, n_group)
    shape = MoeShape(
        num_experts=experts,
        num_local_experts=draw(1, 32),
        hidden_size=128 * draw(1, 16),
        intermediate_size=128 * draw(1, 8),
        n_group=n_group,
        topk_group=topk_group,
        top_k=draw(1, min(8, topk_group * experts // n_group)),
    )
    e, h, i = shape.num_local_experts, shape.hidden_size, shape.intermediate_size
    tokens, offset = draw(1, 700), draw(-e, experts)
    bias = normal(experts) * draw(0, 2)
    if draw(0, 1):  # every token chooses one expert, which is local unless the offset is at an end
        bias[min(max(offset + draw(0, e - 1), 0), experts - 1)] = 8.0
    scales = [
        normal(*dims) * 10.0 ** rng.uniform(-3, 3)
        for dims in ((h // 128, tokens), (e, 2 * i // 128, h // 128), (e, h // 128, i // 128))
    ]
    for scale in scales:
        scale.view(-1)[:: draw(2, 99)] = 0.0
    return shape, MoeInputs(
        normal(tokens, experts),
        bias.bfloat16(),
        random_fp8(generator, tokens, h),
        scales[0],
        random_fp8(generator, e, 2 * i, h),
        scales[1],
        random_fp8(generator, e, h, i),
        scales[2],
        offset,
        float(rng.normal()),
    )


@pytest.mark.parametrize("seed", range(FIRST, FIRST + COUNT))
def test_random_problem(seed):
    shape, inputs = random_problem(seed)
    for accurate in (False, True):
        wanted = new_output(inputs)
        reference.fused(inputs, wanted, shape, terms=2 if accurate else 1)
        got = fused_moe(
            *inputs[:8],
            local_expert_offset=inputs.local_expert_offset,
            routed_scaling_factor=inputs.routed_scaling_factor,
            n_group=shape.n_group,
            topk_group=shape.topk_group,
            top_k=shape.top_k,
            accurate=accurate,
        )
        assert got.isfinite().all()
        if bool((wanted != 0).any()):
            # Over few elements one FP8 value that is another there weighs more than in a layer.
            assert cosine(got, wanted) > 0.999 and calc_diff(got, wanted) < 1e-3, shape
        else:
            assert not got.any(), shape


# --- several processes ----------------------------------------------------------------------------


def digest(calls: int = 20) -> str:
    """Return a digest of the outputs of flat and fused at two sizes, after `calls` repeats."""
    generator = torch.Generator("cuda").manual_seed(0)
    e, h, i = SHAPE.num_local_experts, SHAPE.hidden_size, SHAPE.intermediate_size

    def normal(*dims: int) -> torch.Tensor:
        return torch.randn(dims, generator=generator, device="cuda")

    weights = (
        random_fp8(generator, e, 2 * i, h), normal(e, 2 * i // 128, h // 128),
        random_fp8(generator, e, h, i), normal(e, h // 128, i // 128),
    )  # fmt: skip
    outputs = hashlib.sha256()
    for tokens in (7, 80):
        inputs = MoeInputs(
            normal(tokens, 256), normal(256).bfloat16(),
            random_fp8(generator, tokens, h), normal(h // 128, tokens), *weights, 64, 2.5,
        )  # fmt: skip
        for module in (v4, v5):
            first = output_of(module, inputs)
            for _ in range(calls):
                assert torch.equal(output_of(module, inputs), first)
            outputs.update(first.view(torch.uint8).cpu().numpy().tobytes())
    return outputs.hexdigest()


def start(code: str, log: Path) -> subprocess.Popen:
    paths = [str(Path(__file__).parent), *sys.path]
    with log.open("w") as errors:
        return subprocess.Popen(
            [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}\n{code}"],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )


ENDLESS = "import test_misuse\nwhile True: print(test_misuse.digest(1), flush=True)"
TWICE = "import test_misuse\nfor n in (1, 20): print(test_misuse.digest(n), flush=True)"
PATIENCE_S = 300.0


def test_eight_processes_at_once_and_one_that_is_killed(tmp_path):
    wanted = digest(1)
    logs = [tmp_path / str(i) for i in range(PROCESSES + 1)]
    processes = [start(ENDLESS if log is logs[0] else TWICE, log) for log in logs]
    victim, *others = processes
    # Whoever hangs gives no further line, so that the test fails and does not wait for ever.
    timer = threading.Timer(PATIENCE_S, lambda: [process.kill() for process in processes])
    timer.start()
    try:
        for process, log in zip(processes, logs, strict=True):
            assert process.stdout.readline().strip() == wanted, log.read_text()[-2000:]
        victim.kill()  # in the midst of a call, while the others are in theirs
        for process, log in zip(others, logs[1:], strict=True):
            assert process.stdout.readline().strip() == wanted, log.read_text()[-2000:]
            assert process.wait() == 0, log.read_text()[-2000:]
    finally:
        timer.cancel()
        for process in processes:
            process.kill()
            process.wait()
    assert digest(1) == wanted
