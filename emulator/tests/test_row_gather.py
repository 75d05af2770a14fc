"""TMA that gathers and scatters four rows an instruction (sm_100)."""

import pytest
import row_gather
import torch
from ptx import MAP_ADDRESS, WAIT, address, kernel, run, tensor_map, zeros
from ptxemu import EmulationError

TOP = ".shared .align 8 .b8 bar[8]; .shared .align 1024 .b8 tile[1024];"
LOAD = (
    "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes "
    "[%r21], [%rd1, {{{column}, {rows}}}], [%r20];"
)
STORE = (
    "cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group "
    "[%rd3, {{{column}, {rows}}}], [%r21]; cp.async.bulk.commit_group; "
    "cp.async.bulk.wait_group.read 0;"
)


@pytest.fixture(scope="module")
def kernel_of_the_dsl():
    return row_gather.compiled()


def test_rows_through_a_swizzled_tile(kernel_of_the_dsl, mode, emulator):
    torch.manual_seed(0)
    x, out, expected = torch.randn(40, 128).half(), *torch.zeros(2, 40, 128).half()
    source, target = torch.randint(0, 40, (32,)).int(), torch.randperm(40)[:32].int()
    kernel_of_the_dsl(x, out, source, target)
    expected[target.long()] = x[source.long()]
    assert torch.equal(out, expected)
    assert emulator.reports[-1].hazards == []


def copy(rows: str, to: str, column: int = 8, target: str = "sm_100a", box=(1, 16), load=LOAD):
    """Copy four rows of x, from a column on, to four rows of out."""
    x, out = torch.arange(12 * 32).int().view(12, 32), zeros(12, 32)
    body = MAP_ADDRESS.format("%rd1", "m") + MAP_ADDRESS.format("%rd3", "n") + f"""
    mov.u32 %r20, bar; mov.u32 %r21, tile; mbarrier.init.shared.b64 [%r20], 1;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r20], 256;
    {load.format(column=column, rows=rows)}
    {WAIT.format(label="W", barrier="%r20", parity="0")}
    {STORE.format(column=0, rows=to)}
    """  # fmt: skip
    text = kernel("map m, map n", body, TOP, target)
    report = run(text, tensor_map(x, box), tensor_map(out, (1, 16)), threads=1, also=(x, out))
    return x, out, report


def test_any_rows_in_any_order(mode):
    x, out, report = copy("7, 0, 7, 11", "3, 1, 0, 10")
    expected = torch.zeros_like(out)
    expected[[3, 1, 0, 10], :16] = x[[7, 0, 7, 11], 8:24]
    assert torch.equal(out, expected) and report.hazards == []


def test_rows_that_are_not_there():
    """Rows outside the tensor are read as zeros, and not written."""
    x, out, _ = copy("-1, 2, 12, 100000", "5, 6, 7, 8")
    assert not out[[5, 7, 8]].any() and torch.equal(out[6, :16], x[2, 8:24])
    x, out, _ = copy("1, 2, 3, 4", "-1, 12, 0, -100000")
    assert torch.equal(out[0, :16], x[3, 8:24]) and not out[1:].any()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"column": 2}, "not a multiple of 16 bytes"),
        ({"target": "sm_90a"}, "need sm_100"),
        ({"box": (4, 16)}, "boxes of 4 rows: not modelled"),
        ({"load": LOAD.replace("{rows}", "1, 2")}, "tensor map with 5 coordinates"),
        ({"load": LOAD.replace("gather4", "gather8")}, "not modelled"),
    ],
)
def test_refused(more, message):
    with pytest.raises(EmulationError, match=message):
        copy("0, 1, 2, 3", "0, 1, 2, 3", **more)


def test_rows_that_nothing_orders():
    """A scatter is a bulk store: a second one to the same rows must wait for the first."""
    again = STORE.format(column=0, rows="5, 6, 7, 8")
    body = MAP_ADDRESS.format("%rd3", "n") + f"""
    mov.u32 %r21, tile; shl.b32 %r3, %r0, 3; add.s32 %r3, %r21, %r3;
    st.shared.v2.u32 [%r3], {{%r0, %r0}}; fence.proxy.async.shared::cta; bar.warp.sync -1;
    setp.ne.u32 %p0, %r0, 0; @%p0 bra END; {again} cp.async.bulk.wait_group 0; {again}
    {address("%rd4", "unused", "%r0", 4)}
END:
    """  # fmt: skip
    out = zeros(12, 32)
    for text, expected in (
        (body, set()),
        (body.replace("wait_group 0", "wait_group.read 0"), None),
    ):
        module = kernel("map n, u64 unused", text, TOP, "sm_100a")
        report = run(module, tensor_map(out, (1, 16)), zeros(1), also=(out,))
        assert report.hazard_kinds() == ({"global-race"} if expected is None else expected)
