"""Programmatic dependent launch: overlapping kernels, their waits, their hazards."""

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cuda.bindings import driver as cuda
from cutlass import Int32
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from mutate import drop
from ptx import WAIT, address, kernel, run, zeros
from ptxemu import in_flight
from ptxemu.engine import DEPENDENTS

CTAS, THREADS = 3, 64
WORDS = CTAS * THREADS
TRIGGER, WAITS = "griddepcontrol.launch_dependents;", "griddepcontrol.wait;"
NEIGHBOUR = f"add.s32 %r2, %r1, {THREADS}; rem.u32 %r2, %r2, {WORDS};"
"""%r2: this thread's place in the next CTA's part."""


@pytest.fixture(params=DEPENDENTS)
def dependents(request, emulator) -> str:
    """The start of dependent kernels."""
    emulator.options.dependents = request.param
    return request.param


def step(before: str = "", between: str = "", after: str = "") -> str:
    """Return a kernel `out[i] = x[neighbour of i] + 1`.

    `before` comes before the load, `between` before the store, `after` at the end.
    """
    return kernel(
        "u64 x, u64 out",
        f"""
        {before} {NEIGHBOUR} {address("%rd1", "x", "%r2", 4)} ld.global.u32 %r3, [%rd1];
        {between} add.s32 %r3, %r3, 1;
        {address("%rd2", "out", "%r1", 4)} st.global.u32 [%rd2], %r3; {after}
        """,
    )


def chain(*kernels: str, buffers: list[torch.Tensor], programmatic: bool = True) -> list[set[str]]:
    """Run kernel i on the buffers i and i + 1, in one stream; return the kinds of hazards of
    each."""
    import ptxemu

    ptxemu.reports.clear()
    with in_flight():
        for i, text in enumerate(kernels):
            more = {"ctas": CTAS, "threads": THREADS, "programmatic": programmatic and i > 0}
            assert run(text, *buffers[i : i + 2], **more) is None
    return [report.hazard_kinds() for report in ptxemu.reports]


def fresh(n: int) -> list[torch.Tensor]:
    return [torch.arange(WORDS).int(), *(torch.full((WORDS,), -1).int() for _ in range(n))]


def expected(steps: int) -> torch.Tensor:
    return torch.arange(WORDS).roll(-THREADS * steps).int() + steps


WELL_BEHAVED = {
    "trigger first": step(before=TRIGGER + WAITS),
    "wait first": step(before=WAITS + TRIGGER),
    "trigger before the store": step(before=WAITS, between=TRIGGER),
    "trigger at the end": step(before=WAITS, after=TRIGGER),
    "no trigger": step(before=WAITS),
}


@pytest.mark.parametrize("name", WELL_BEHAVED)
def test_a_chain(name, mode, dependents):
    buffers = fresh(4)
    assert chain(*[WELL_BEHAVED[name]] * 4, buffers=buffers) == [set()] * 4
    for i, buffer in enumerate(buffers):
        assert torch.equal(buffer, expected(i))


@pytest.mark.parametrize(
    ("scheduling", "early"), [("eager", False), ("lazy", True), ("early_loads", True)]
)
def test_when_a_dependent_starts_in_a_mode(scheduling, early, emulator):
    """The second kernel does not wait: if it starts early, it reads stale data."""
    emulator.options.mode = scheduling
    buffers = fresh(2)
    chain(WELL_BEHAVED["trigger first"], step(), buffers=buffers)
    assert torch.equal(buffers[2], expected(2)) != early


@pytest.mark.parametrize("seed", range(5))
def test_a_chain_in_random_order(seed, emulator):
    emulator.options.mode, emulator.options.seed = "random", seed
    buffers = fresh(4)
    assert chain(*[WELL_BEHAVED["trigger first"]] * 4, buffers=buffers) == [set()] * 4
    assert torch.equal(buffers[4], expected(4))


@pytest.mark.parametrize(
    "second",
    [step(before=TRIGGER), step(before=TRIGGER, between=WAITS), step(before=TRIGGER, after=WAITS)],
    ids=["no wait", "waits after the load", "waits after the store"],
)
@pytest.mark.parametrize("first", WELL_BEHAVED)
def test_a_wait_that_is_missing_or_too_late(first, second, dependents):
    """A missing wait is reported even if the kernels run one after the other."""
    buffers = fresh(2)
    hazards = chain(WELL_BEHAVED[first], second, buffers=buffers)
    assert set().union(*hazards) == {"global-race"}
    right = torch.equal(buffers[2], expected(2))
    if dependents == "late":
        assert right
    if dependents == "early" and first == "trigger first":
        assert not right  # stale data
        assert torch.equal(buffers[1], expected(1))


def test_one_wait_of_several():
    """If only threads that need no data wait, the other threads may be too early. After a barrier,
    one thread's wait counts for all threads."""
    lone = "setp.eq.u32 %p1, %r0, 0; @%p1 griddepcontrol.wait;"
    text = step(before=TRIGGER + "setp.lt.u32 %p1, %r0, 32; @%p1 griddepcontrol.wait;")
    assert {"global-race"} in chain(WELL_BEHAVED["trigger first"], text, buffers=fresh(2))
    text = step(before=TRIGGER + lone + "bar.sync 0;")
    assert chain(WELL_BEHAVED["trigger first"], text, buffers=fresh(2)) == [set(), set()]


def test_without_the_attribute_kernels_are_serialised(mode, dependents):
    careless = step(before=TRIGGER)
    buffers = fresh(3)
    assert chain(*[careless] * 3, buffers=buffers, programmatic=False) == [set()] * 3
    assert torch.equal(buffers[3], expected(3))


def overwrite(before: str) -> str:
    """Return a kernel `out[i] = 7`, which reads nothing."""
    store = address("%rd2", "out", "%r1", 4) + "mov.u32 %r3, 7; st.global.u32 [%rd2], %r3;"
    return kernel("u64 unused, u64 out", before + store)


def test_a_buffer_overwritten_while_the_kernel_before_reads_it(dependents):
    buffers = fresh(1)
    chained = [*buffers, buffers[0]]
    late_reader = step(before=TRIGGER)
    assert chain(late_reader, overwrite(WAITS), buffers=list(chained)) == [set(), set()]
    assert torch.equal(buffers[1], expected(1)) and (buffers[0] == 7).all()
    buffers = fresh(1)
    hazards = chain(late_reader, overwrite(""), buffers=[*buffers, buffers[0]])
    assert set().union(*hazards) == {"global-race"}
    if dependents == "early":
        assert (buffers[1] == 8).all()


def read_both(before: str) -> str:
    return kernel(
        "u64 x, u64 out, u64 older",
        f"""
        {before} {address("%rd1", "x", "%r1", 4)} ld.global.u32 %r3, [%rd1];
        {address("%rd4", "older", "%r1", 4)} ld.global.u32 %r4, [%rd4]; add.s32 %r3, %r3, %r4;
        {address("%rd2", "out", "%r1", 4)} st.global.u32 [%rd2], %r3;
        """,
    )


def three(middle: str, last: str, emulator) -> list[set[str]]:
    """Run three kernels: A writes b; `middle` reads its own input and writes c; `last` reads b and
    c."""
    a, b, c, d, own = *fresh(3), torch.arange(WORDS).int()
    emulator.reports.clear()
    more = {"ctas": CTAS, "threads": THREADS}
    with in_flight():
        run(step(before=TRIGGER), a, b, **more)
        run(middle, own, c, programmatic=True, **more)
        run(last, c, d, b, programmatic=True, **more)
    return [report.hazard_kinds() for report in emulator.reports]


def test_a_wait_reaches_as_far_as_the_kernel_before_has_waited(dependents, emulator):
    """C waits for B. This implies that A has completed only if B waited for A."""
    last = read_both(TRIGGER + WAITS)
    assert three(step(before=TRIGGER + WAITS), last, emulator) == [set()] * 3
    assert three(step(before=TRIGGER, after=WAITS), last, emulator) == [set()] * 3
    hazards = three(step(before=TRIGGER), last, emulator)
    assert set().union(*hazards) == {"global-race"}
    if dependents == "early":
        assert hazards[2] == {"global-race"} or hazards[0] == {"global-race"}


def test_a_trigger_after_the_own_wait_vouches_for_what_came_before(dependents, emulator):
    """B triggers after its wait for A: C may read A's results before its own wait, but not B's."""
    early = read_both("")
    a_only = early.replace(address("%rd1", "x", "%r1", 4), "mov.u32 %r3, 0;").replace(
        "ld.global.u32 %r3, [%rd1];", ""
    )
    assert three(step(before=WAITS + TRIGGER), a_only, emulator) == [set()] * 3
    assert set().union(*three(step(before=WAITS + TRIGGER), early, emulator)) == {"global-race"}
    assert set().union(*three(step(before=TRIGGER + WAITS), a_only, emulator)) == {"global-race"}


def test_a_prefetch_by_tma_before_the_wait(dependents):
    """Weights may be loaded before the wait, results of the preceding kernel may not."""
    body = f"""
    setp.eq.u32 %p0, %r0, 0; mov.u32 %r20, bar; mov.u32 %r21, tile; ld.param.u64 %rd1, [x];
    @%p0 mbarrier.init.shared.b64 [%r20], 1; bar.sync 0;
    @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r20], 256;
    FIRST
    @%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
        [%r21], [%rd1], 256, [%r20];
    {WAIT.format(label="W", barrier="%r20", parity="0")}
    griddepcontrol.wait; shl.b32 %r3, %r0, 2; add.s32 %r3, %r21, %r3; ld.shared.u32 %r4, [%r3];
    {address("%rd2", "out", "%r0", 4)} setp.eq.u32 %p2, %r100, 0; @%p2 st.global.u32 [%rd2], %r4;
    """
    top = ".shared .align 8 .b8 bar[8]; .shared .align 128 .b8 tile[256];"

    def load(first: str, x: torch.Tensor) -> tuple[list[set[str]], torch.Tensor]:
        text = kernel("u64 x, u64 out", body.replace("FIRST", first), top)
        a, b, c = fresh(2)
        import ptxemu

        ptxemu.reports.clear()
        with in_flight():
            run(step(before=TRIGGER), a, b, ctas=CTAS, threads=THREADS)
            source = b if x is None else x
            run(text, source, c, ctas=CTAS, threads=THREADS, programmatic=True)
        return [report.hazard_kinds() for report in ptxemu.reports], c[:THREADS]

    weights = torch.arange(1000, 1000 + WORDS).int()
    hazards, loaded = load("", weights)
    assert hazards == [set(), set()] and torch.equal(loaded, weights[:THREADS])
    hazards, loaded = load(WAITS, None)
    assert hazards == [set(), set()] and torch.equal(loaded, expected(1)[:THREADS])
    hazards, _ = load("", None)
    assert set().union(*hazards) == {"global-race"}


def test_how_far_a_dependent_comes_before_the_kernel_before_has_ended(dependents):
    """The dependent marks a word before its wait. The preceding kernel reads the word at its
    end."""
    spin = "mov.u32 %r9, 0; SPIN: add.s32 %r9, %r9, 1; setp.lt.u32 %p9, %r9, 3000; @%p9 bra SPIN;"
    seen = "ld.relaxed.gpu.global.u32 %r4, [%rd1]; st.global.u32 [%rd1+4], %r4;"
    first = kernel("u64 x", TRIGGER + spin * 1 + "ld.param.u64 %rd1, [x];" + seen)
    second = kernel("u64 x", "ld.param.u64 %rd1, [x]; st.relaxed.gpu.global.u32 [%rd1], 1;" + WAITS)
    x = zeros(2)
    with in_flight():
        run(first, x, threads=1)
        run(second, x, threads=1, programmatic=True)
    if dependents != "random":
        assert x.tolist() == ([1, 1] if dependents == "early" else [1, 0])


def test_a_dependent_starts_when_every_cta_has_triggered(emulator):
    """CTA 1 triggers only after CTA 0 has stored: the dependent never comes before this store."""
    emulator.options.dependents = "early"
    first = kernel(
        "u64 x",
        f"""
        ld.param.u64 %rd1, [x]; setp.eq.u32 %p1, %r100, 0; @!%p1 bra SPIN;
        {TRIGGER} st.relaxed.gpu.global.u32 [%rd1], 5; bra END;
        SPIN: ld.relaxed.gpu.global.u32 %r4, [%rd1]; setp.eq.u32 %p2, %r4, 0; @%p2 bra SPIN;
        END:
        """,
    )
    second = kernel(
        "u64 x",
        "ld.param.u64 %rd1, [x]; ld.relaxed.gpu.global.u32 %r4, [%rd1];"
        "st.global.u32 [%rd1+4], %r4;" + WAITS,
    )
    x = zeros(2)
    with in_flight():
        run(first, x, threads=1, ctas=2)
        run(second, x, threads=1, programmatic=True)
    assert x.tolist() == [5, 5]


def test_a_deadlock_names_the_launch(emulator):
    """A kernel polls a word that only its dependent writes, after the dependent's wait."""
    emulator.options.dependents, emulator.options.max_instructions = "early", 10**6
    first = kernel(
        "u64 x",
        TRIGGER + "ld.param.u64 %rd1, [x]; SPIN: ld.relaxed.gpu.global.u32 %r4, [%rd1];"
        "setp.eq.u32 %p2, %r4, 0; @%p2 bra SPIN;",
    )
    second = kernel("u64 x", WAITS + "ld.param.u64 %rd1, [x]; st.global.u32 [%rd1], 1;")
    with pytest.raises(emulator.EmulationError, match="griddepcontrol.wait: launch 0"), in_flight():
        run(first, zeros(2), threads=1)
        run(second, zeros(2), threads=1, programmatic=True)


# --- as the DSL launches it ---------------------------------------------------------------------


class Chain:
    """`data[i + 1] = data[i] of the neighbouring CTA + 1`, four kernels in one host call."""

    @cute.jit
    def __call__(self, data: cute.Tensor, stream: cuda.CUstream):
        for step in cutlass.range_constexpr(4):
            self.kernel(data, step).launch(
                grid=[CTAS, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=step > 0
            )

    @cute.kernel
    def kernel(self, data: cute.Tensor, step: cutlass.Constexpr):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        data[step + 1, block, thread] = data[step, (block + 1) % CTAS, thread] + 1


@pytest.fixture(scope="module", params=["sm_90a", "sm_100a"])
def compiled_chain(request):
    data = make_fake_compact_tensor(Int32, (5, CTAS, THREADS), stride_order=(2, 1, 0))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"--enable-tvm-ffi --gpu-arch={request.param}"
    return cute.compile(Chain(), data, stream, options=options)


def test_launches_of_the_dsl(compiled_chain, mode, dependents, emulator):
    data = zeros(5, CTAS, THREADS)
    data[0] = 7
    compiled_chain(data)
    assert (data[4] == 11).all()
    assert [report.hazards for report in emulator.reports] == [[]] * 4


@pytest.mark.parametrize("in_which", range(4))
def test_launches_of_the_dsl_without_a_wait(compiled_chain, in_which, dependents, emulator):
    """The first kernel needs no wait; every other kernel does."""
    count = iter(range(4))

    def transform(ptx: str) -> str:
        return drop(r"griddepcontrol\.wait")(ptx) if next(count) == in_which else ptx

    emulator.host.ptx_transform = transform
    compiled_chain(zeros(5, CTAS, THREADS))
    hazards = set().union(*(report.hazard_kinds() for report in emulator.reports))
    assert hazards == ({"global-race"} if in_which else set())


def test_calls_that_overlap(compiled_chain, dependents, emulator):
    """Without a synchronisation between two calls, the second call's first kernel waits for the
    first call: it was launched without the attribute."""
    data = zeros(5, CTAS, THREADS)
    with in_flight():
        compiled_chain(data)
        compiled_chain(data)
        assert len(emulator.reports) == 4
    assert len(emulator.reports) == 8
    assert all(report.hazards == [] for report in emulator.reports)
