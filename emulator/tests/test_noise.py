"""Unwritten memory holds random bytes, the same bytes for the same seed."""

import os
import subprocess
import sys

import pytest
import torch
from ptx import address, kernel, run, zeros
from ptxemu import EmulationError, fakecuda, noise
from ptxemu.memory import ranges
from torch.fx.experimental.proxy_tensor import make_fx

LOOK = f"""
    .local .align 8 .b8 stack[256]; .reg .pred %never; .reg .b32 %nothing;
    mov.u64 %rd1, stack; ld.local.u32 %r2, [%rd1+64]; shl.b32 %r3, %r0, 2; mov.u32 %r4, own;
    add.u32 %r4, %r4, %r3; ld.shared.u32 %r5, [%r4]; selp.b32 %r6, 1, 0, %never;
    {address("%rd2", "out", "%r1", 16)} st.global.v4.u32 [%rd2], {{%nothing, %r2, %r5, %r6}};
"""
"""Reads an uninitialised register, local memory, shared memory and a predicate."""


def observed() -> torch.Tensor:
    """Return the contents in two CTAs of a warp each: (threads, kinds)."""
    out = zeros(64, 4)
    run(kernel("u64 out", LOOK, ".shared .align 8 .b8 own[128];"), out, ctas=2)
    return out


def uninitialised() -> list[torch.Tensor]:
    """Return uninitialised host memory of each kind."""
    memory = [
        torch.empty(1000, dtype=torch.uint8),
        torch.empty(250, device="cuda").view(torch.uint8),
        torch.zeros(3, 100).new_empty(1000, dtype=torch.uint8),
        torch.empty_like(torch.zeros(1000, dtype=torch.uint8)),
    ]
    place = fakecuda._allocate(1000, 0)
    memory.append(ranges.pop(place).keep.clone())
    return memory


def test_every_kind_of_memory():
    out = observed()
    for kind in out[:, :3].T:
        assert len(set(kind.tolist())) > 60
    assert 10 < out[:, 3].sum() < 54, "predicates are as often true as false"
    for bytes_in in uninitialised():
        assert len(set(bytes_in.tolist())) > 200


def test_repeated_by_the_seed(monkeypatch):
    def all_of(seed: int, test: str) -> list[torch.Tensor]:
        monkeypatch.setattr(noise, "seed", seed)
        noise.begin(test)
        return [*uninitialised(), observed()]

    monkeypatch.setattr(noise, "_block", None)  # as in a new process
    first = all_of(1, "a")
    assert all(map(torch.equal, first, all_of(1, "a")))
    for other in (all_of(2, "a"), all_of(1, "b")):
        assert not any(map(torch.equal, first, other))


def test_more_than_the_bytes_that_are_made():
    large = torch.empty(2 * noise.BLOCK + 5, dtype=torch.uint8)
    assert len(set(large[-5:].tolist())) > 1
    assert not torch.equal(large[: noise.BLOCK], large[noise.BLOCK : 2 * noise.BLOCK])


def test_what_is_large_takes_no_memory_until_it_is_touched():
    assert not torch.empty(noise.MOST + 4096, dtype=torch.uint8)[-4096:].any()


@pytest.mark.parametrize("options", [{}, {"tracing_mode": "fake"}, {"tracing_mode": "symbolic"},
                                     {"pre_dispatch": True}], ids=str)  # fmt: skip
def test_a_tracer_sees_what_was_called(options):
    """A tracer's tensors have no memory, and it does not record that they are filled."""

    def allocate(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x) + x.new_empty(3)

    traced = make_fx(allocate, **options)(torch.zeros(3))
    called = [str(node.target) for node in traced.graph.nodes if node.op == "call_function"]
    assert called == ["aten.empty_like.default", "aten.new_empty.default", "aten.add.Tensor"]
    before = set(ranges)
    make_fx(lambda x: x.cuda() + torch.empty(3, device="cuda"), **options)(torch.zeros(3))
    assert set(ranges) == before, "none at address 0"


def test_a_transform_s_tensors_have_no_memory():
    assert torch.func.vmap(lambda x: torch.empty_like(x) * 0 + x)(torch.ones(2, 3)).shape == (2, 3)


def test_an_error_says_how_to_repeat_it():
    with pytest.raises(EmulationError, match=f"\n.*{noise.VARIABLE}={noise.seed}$"):
        run(kernel("u64 x", "trap;"), zeros(1))


@pytest.mark.parametrize("value", ["7", None])
def test_the_variable(value):
    """Without it each process has a seed of its own."""
    environment = {k: v for k, v in os.environ.items() if k != noise.VARIABLE}
    environment |= {noise.VARIABLE: value} if value else {}
    command = [sys.executable, "-c", "from ptxemu import noise; print(noise.seed)"]
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    seeds = {subprocess.check_output(command, env=environment, text=True) for _ in range(2)}
    assert seeds == {"7\n"} if value else len(seeds) == 2
