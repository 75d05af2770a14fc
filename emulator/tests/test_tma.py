"""Bulk copies and tensor copies: boxes, swizzles, bounds, multicast, reductions, refusals."""

import pytest
import torch
from ptx import MAP_ADDRESS, WAIT, address, kernel, run, tensor_map, zeros
from ptxemu import EmulationError

TOP = ".shared .align 8 .b8 bar[8]; .shared .align 1024 .b8 tile[16384];"
INIT = """
    setp.eq.u32 %p0, %r0, 0; mov.u32 %r20, bar; mov.u32 %r21, tile;
    @%p0 mbarrier.init.shared.b64 [%r20], 1; bar.sync 0;
"""
LOAD = """
    ld.param.u32 %r2, [x0]; ld.param.u32 %r3, [x1];
    @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r20], {size};
    @%p0 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes
        [%r21], [%rd1, {{%r2, %r3}}], [%r20];
"""
COPY_OUT = """
    mov.u32 %r4, %r0;
COPY:
    shl.b32 %r5, %r4, 2; add.s32 %r6, %r21, %r5; ld.shared.u32 %r7, [%r6];
    {address} st.global.u32 [%rd2], %r7;
    add.s32 %r4, %r4, 32; setp.lt.u32 %p1, %r4, {words}; @%p1 bra COPY;
"""


def load_kernel(words: int) -> str:
    """Return a kernel that loads one box to shared memory and copies its bytes to `out`."""
    copy = COPY_OUT.format(address=address("%rd2", "out", "%r4", 4), words=words)
    body = MAP_ADDRESS.format("%rd1", "m") + INIT + LOAD.format(size=4 * words)
    body += WAIT.format(label="W", barrier="%r20", parity="0") + copy
    return kernel("map m, u32 x0, u32 x1, u64 out", body, TOP)


def load(x: torch.Tensor, box: tuple[int, int], column: int, row: int, swizzle: str = "none"):
    """Return (the box as laid out in shared memory, the report)."""
    out = torch.zeros(box, dtype=x.dtype)
    words = out.numel() * out.element_size() // 4
    report = run_with(x, load_kernel(words), tensor_map(x, box, swizzle), column, row, out)
    return out, report


def shifted(text: str, distance: int) -> str:
    """Return the kernel with its tile moved by a number of bytes."""
    return text.replace(
        "mov.u32 %r21, tile;", f"mov.u32 %r21, tile; add.u32 %r21, %r21, {distance};"
    )


def run_with(x: torch.Tensor, text: str, *arguments, **more):
    """Run a kernel that reaches `x` only through a tensor map."""
    return run(text, *arguments, also=(x,), **more)


def swizzled(box: torch.Tensor, span: int) -> torch.Tensor:
    """Return the box with the 16-byte chunks of each row exchanged as by hardware.

    For rows of 128 bytes, chunk c of row r moves to c ^ (r mod 8); narrower spans have fewer
    chunks.
    """
    flat = box.contiguous().view(torch.uint8).flatten()
    chunks = flat.view(-1, 16)
    line = torch.arange(len(chunks)) // 8  # lines of 128 bytes
    source = torch.arange(len(chunks)) ^ line % (span // 16)
    return chunks[source].flatten().view(box.dtype).view(box.shape)


@pytest.mark.parametrize("swizzle", ["none", "32", "64", "128"])
def test_swizzles(swizzle, mode):
    torch.manual_seed(0)
    x = torch.randint(0, 256, (64, 256), dtype=torch.uint8)
    columns = int(swizzle) if swizzle != "none" else 128
    out, report = load(x, (32, columns), 64, 8, swizzle)
    assert not report.hazards
    box = x[8:40, 64 : 64 + columns]
    assert torch.equal(out, box if swizzle == "none" else swizzled(box, columns))
    size = box.numel()  # copied from shared memory to `out` by 4-byte words
    assert report.counts == {
        "tma_loaded": size, "tma_stored": 0, "loaded": 0, "stored": size, "shared": size,
        "mma_flops": 0,
    }  # fmt: skip


def test_a_box_over_its_mbarrier():
    x, out = torch.arange(256).int().view(8, 32), zeros(8, 32)
    inside = "mov.u32 %r20, tile; add.u32 %r20, %r20, 64;"
    text = load_kernel(256).replace("mov.u32 %r20, bar;", inside)
    report = run_with(x, text, tensor_map(x, (8, 32)), 0, 0, out)
    assert report.hazard_kinds() == {"mbarrier-overwritten"}


@pytest.mark.parametrize(("column", "row"), [(-4, -2), (28, 12), (0, 100), (4, 0)])
def test_outside_the_tensor_are_zeros(column, row):
    x = torch.arange(1, 513).float().view(16, 32)
    out, report = load(x, (8, 16), column, row)
    padded = torch.nn.functional.pad(x, (16, 32, 16, 120))
    assert torch.equal(out, padded[row + 16 : row + 24, column + 16 : column + 32])
    assert not report.hazards


def test_five_dimensions():
    x = torch.arange(2 * 3 * 4 * 5 * 8).int().view(2, 3, 4, 5, 8)
    body = MAP_ADDRESS.format("%rd1", "m") + INIT + """
    @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r20], 512;
    @%p0 cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes
        [%r21], [%rd1, {4, 2, 1, 1, 0}], [%r20];
    """ + WAIT.format(label="W", barrier="%r20", parity="0")  # fmt: skip
    body += COPY_OUT.format(address=address("%rd2", "out", "%r4", 4), words=128)
    out = zeros(2, 2, 2, 4, 4)
    run_with(x, kernel("map m, u64 out", body, TOP), tensor_map(x, out.shape), out)
    expected = torch.nn.functional.pad(x[0:2, 1:3, 1:3, 2:5, 4:8], (0, 0, 0, 1))
    assert torch.equal(out, expected)


STORE = MAP_ADDRESS.format("%rd1", "m") + """
    mov.u32 %r21, tile; setp.eq.u32 %p0, %r0, 0; shl.b32 %r2, %r0, 4; add.s32 %r3, %r21, %r2;
    add.s32 %r4, %r0, 100; st.shared.v4.u32 [%r3], {%r4, %r4, %r4, %r4};
    fence.proxy.async.shared::cta; bar.warp.sync -1;
"""  # fmt: skip
FINISH = "@%p0 cp.async.bulk.commit_group; @%p0 cp.async.bulk.wait_group.read 0;"


@pytest.mark.parametrize("op", ["st", "add", "max"])
def test_store_and_reduce(op, mode):
    """Store 32 rows of 4 words at (4, 8); rows and columns outside the tensor are not written."""
    x = torch.full((24, 8), 107).int()
    whole = x.clone()
    copy = "cp.async.bulk" if op == "st" else "cp.reduce.async.bulk"
    reduction = "" if op == "st" else f".{op}"
    body = STORE + (
        f"@%p0 {copy}.tensor.2d.global.shared::cta{reduction}.bulk_group [%rd1, {{4, 8}}], [%r21];"
    )
    report = run_with(x, kernel("map m", body + FINISH, TOP), tensor_map(x, (32, 4)))
    assert not report.hazards
    rows = torch.arange(100, 116).int()[:, None].expand(16, 4)
    before = whole[8:, 4:]
    whole[8:, 4:] = {"st": rows, "add": before + rows, "max": torch.maximum(before, rows)}[op]
    assert torch.equal(x, whole)
    assert report.counts["tma_stored"] == 16 * 4 * 4


def test_linear_copies(mode):
    """Copy from global to shared memory and back, and between the CTAs of a cluster."""
    body = (
        INIT
        + f"""
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    mov.u32 %r2, %cluster_ctarank; xor.b32 %r3, %r2, 1;
    {address("%rd1", "x", "%r2", 256)}
    @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r20], 512;
    @%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
        [%r21], [%rd1], 256, [%r20];
    mapa.shared::cluster.u32 %r4, %r21, %r3; mapa.shared::cluster.u32 %r5, %r20, %r3;
    add.s32 %r4, %r4, 256; add.s32 %r6, %r21, 512;
    shl.b32 %r7, %r0, 3; add.s32 %r8, %r6, %r7; st.shared.v2.u32 [%r8], {{%r2, %r0}};
    fence.proxy.async; bar.sync 0;
    @%p0 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes
        [%r4], [%r6], 256, [%r5];
    {WAIT.format(label="W", barrier="%r20", parity="0")}
    {address("%rd2", "out", "%r2", 512)}
    @%p0 cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r21], 512;
    """
        + FINISH
        + "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
    )
    x, out = torch.arange(128).int().view(2, 64), zeros(2, 128)
    report = run(kernel("u64 x, u64 out", body, TOP), x, out, ctas=2, cluster=(2, 1, 1))
    assert not report.hazards
    assert torch.equal(out[:, :64], x)
    lanes = torch.arange(32).int()
    other = torch.stack([torch.stack([torch.full_like(lanes, r), lanes], 1) for r in (1, 0)])
    assert torch.equal(out[:, 64:], other.view(2, 64))
    assert (report.counts["tma_loaded"], report.counts["tma_stored"]) == (2 * 256, 2 * 512)


def test_a_map_behind_a_smaller_parameter():
    """Parameters are aligned, a tensor map to 64 bytes."""
    x, out = torch.arange(128).int().view(32, 4), zeros(32, 4)
    text = load_kernel(128).replace("entry k(", "entry k(.param .u32 first, ")
    report = run_with(x, text, 7, tensor_map(x, (32, 4)), 0, 0, out)
    assert torch.equal(out, x) and not report.hazards


def test_multicast(mode):
    """CTA 0 loads for both; each CTA waits for its own mbarrier."""
    load = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
    body = MAP_ADDRESS.format("%rd1", "m") + INIT + f"""
    @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r20], 512;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    mov.u32 %r2, %cluster_ctarank; setp.eq.and.u32 %p1, %r2, 0, %p0; mov.b16 %h1, 3;
    @%p1 {load}.multicast::cluster [%r21], [%rd1, {{0, 0}}], [%r20], %h1;
    {WAIT.format(label="W", barrier="%r20", parity="0")}
    shl.b32 %r5, %r0, 4; add.s32 %r6, %r21, %r5; ld.shared.v4.u32 {{%r7, %r8, %r9, %r10}}, [%r6];
    {address("%rd2", "out", "%r1", 16)} st.global.v4.u32 [%rd2], {{%r7, %r8, %r9, %r10}};
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    """  # fmt: skip
    x, out = torch.arange(128).int().view(32, 4), zeros(2, 32, 4)
    text = kernel("map m, u64 out", body, TOP)
    report = run_with(x, text, tensor_map(x, (32, 4)), out, ctas=2, cluster=(2, 1, 1))
    assert not report.hazards
    assert torch.equal(out, torch.stack([x, x]))
    assert report.counts["tma_loaded"] == 512  # once for both


def test_multicast_to_a_cta_that_does_not_wait():
    """The CTA may exit before the copy has come, even if it does not in this schedule."""
    load = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
    body = MAP_ADDRESS.format("%rd1", "m") + INIT + f"""
    @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r20], 512;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    mov.u32 %r2, %cluster_ctarank; setp.eq.and.u32 %p1, %r2, 0, %p0; mov.b16 %h1, 3;
    @%p1 {load}.multicast::cluster [%r21], [%rd1, {{0, 0}}], [%r20], %h1;
    setp.ne.u32 %p2, %r2, 0; @%p2 bra END; // not for the copy
    {WAIT.format(label="W", barrier="%r20", parity="0")}
END:
    """  # fmt: skip
    x = zeros(32, 4)

    def hazards(body: str) -> set[str]:
        text, cluster = kernel("map m", body, TOP), {"ctas": 2, "cluster": (2, 1, 1)}
        return run_with(x, text, tensor_map(x, (32, 4)), **cluster).hazard_kinds()

    assert hazards(body) == {"exited-cta"}
    assert hazards(body.replace("@%p2 bra END; // not for the copy", "")) == set()


def test_a_cta_of_a_cluster_that_does_not_wait_for_its_own_copy():
    load = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
    wait = WAIT.format(label="W", barrier="%r20", parity="0")
    body = MAP_ADDRESS.format("%rd1", "m") + INIT + f"""
    @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r20], 512;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    @%p0 {load} [%r21], [%rd1, {{0, 0}}], [%r20];
    {wait}
    """  # fmt: skip
    x = zeros(32, 4)

    def hazards(body: str) -> set[str]:
        text, cluster = kernel("map m", body, TOP), {"ctas": 2, "cluster": (2, 1, 1)}
        return run_with(x, text, tensor_map(x, (32, 4)), **cluster).hazard_kinds()

    assert hazards(body) == set()
    assert "exited-cta" in hazards(body.replace(wait, ""))


@pytest.mark.parametrize(
    ("change", "hazard"),
    [
        (("fence.proxy.async.shared::cta;", ""), "missing-proxy-fence"),
        (("@%p0 cp.async.bulk.wait_group.read 0;", ""), "exit-before-bulk-read"),
        (("@%p0 cp.async.bulk.commit_group;", ""), "bulk-not-committed"),
    ],
)
def test_stores_that_are_not_waited_for(change, hazard, emulator):
    emulator.options.mode = "lazy"
    body = (
        STORE + "@%p0 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {0, 0}], [%r21];"
    )
    body += FINISH
    x = zeros(32, 4)
    assert change[0] in body
    broken = kernel("map m", body.replace(*change), TOP)
    assert hazard in run_with(x, broken, tensor_map(x, (32, 4))).hazard_kinds()


def test_expecting_too_few_bytes():
    x, out = zeros(32, 4), zeros(32, 4)
    text = load_kernel(128).replace("[%r20], 512;", "[%r20], 496;")
    with pytest.raises(EmulationError) as error:
        run_with(x, text, tensor_map(x, (32, 4)), 0, 0, out)
    assert "tx-count -16" in str(error.value)


def test_rank_of_the_instruction():
    x, out = zeros(32, 4), zeros(32, 4)
    text = load_kernel(128).replace("tensor.2d", "tensor.1d").replace("{%r2, %r3}", "{%r2}")
    with pytest.raises(EmulationError, match="rank 2, instruction has 1"):
        run_with(x, text, tensor_map(x, (32, 4)), 0, 0, out)


def test_a_swizzle_goes_by_address_bits():
    """A box that begins three lines after the pattern has the pattern from its fourth line on."""
    torch.manual_seed(0)
    x = torch.randint(0, 256, (16, 128), dtype=torch.uint8)
    text = shifted(load_kernel(16 * 32), 384)
    out = torch.zeros_like(x)
    run_with(x, text, tensor_map(x, (16, 128), "128"), 0, 0, out)
    lines = torch.cat([torch.zeros(3, 128, dtype=torch.uint8), x])
    assert torch.equal(out, swizzled(lines, 128)[3:])


FLOATS, BYTES = torch.zeros(64, 64), torch.zeros(64, 64, dtype=torch.uint8)
UNALIGNED_START = "not a multiple of 16 bytes, an illegal instruction"


@pytest.mark.parametrize(
    ("x", "box", "column"),
    [(FLOATS, (8, 4), 2), (FLOATS, (4, 8), 1), (FLOATS.half(), (8, 8), 4), (BYTES, (8, 16), 8),
     (FLOATS, (8, 4), -2)],
)  # fmt: skip
def test_load_from_an_unaligned_column(x, box, column):
    with pytest.raises(EmulationError, match=UNALIGNED_START):
        load(x, box, column, 0)
    aligned = 16 // x.element_size()
    for legal in (aligned, -aligned, 0, 7 * aligned):
        load(x, box, legal, 3)


@pytest.mark.parametrize("copy", ["cp.async.bulk", "cp.reduce.async.bulk"])
def test_store_to_an_unaligned_column(copy):
    op = ".add" if "reduce" in copy else ""
    body = (
        STORE + f"@%p0 {copy}.tensor.2d.global.shared::cta{op}.bulk_group [%rd1, {{2, 0}}], [%r21];"
    )
    x = zeros(32, 8)
    with pytest.raises(EmulationError, match=UNALIGNED_START):
        run_with(x, kernel("map m", body + FINISH, TOP), tensor_map(x, (32, 4)))


def test_boxes_in_shared_memory_are_aligned():
    x, out = zeros(32, 4), zeros(32, 4)
    box = tensor_map(x, (32, 4))
    run_with(x, shifted(load_kernel(128), 128), box, 0, 0, out)
    with pytest.raises(EmulationError, match="TMA load to .* not 128-byte aligned"):
        run_with(x, shifted(load_kernel(128), 64), box, 0, 0, out)
    store = (
        STORE + "@%p0 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {0, 0}], [%r21];"
    )
    with pytest.raises(EmulationError, match="TMA store from .* not 128-byte aligned"):
        run_with(x, shifted(kernel("map m", store + FINISH, TOP), 16), box)


def test_maps_are_aligned():
    """The check covers the map and the memory that it describes."""
    x, out = zeros(32, 8), zeros(32, 4)
    good = tensor_map(x, (32, 4))
    moved = (x.data_ptr() + 8).to_bytes(8, "little") + good[8:]
    with pytest.raises(EmulationError, match="of memory at .* not 16-byte aligned"):
        run_with(x, load_kernel(128), moved, 0, 0, out)
    memory = torch.zeros(256, dtype=torch.uint8)
    place = (32 - memory.data_ptr()) % 64
    memory[place : place + 128] = torch.frombuffer(bytearray(good), dtype=torch.uint8)
    text = load_kernel(128).replace(".param .align 64 .b8 m[128]", ".param .u64 m")
    text = text.replace(MAP_ADDRESS.format("%rd1", "m"), "ld.param.u64 %rd1, [m];")
    with pytest.raises(EmulationError, match="tensor map at .* not 64-byte aligned"):
        run(text, memory.data_ptr() + place, 0, 0, out, also=(x, memory))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("size", "bulk copy of 24 bytes"),
        ("destination", "bulk copy address is not 16-byte aligned"),
        ("source", "bulk copy address is not 16-byte aligned"),
    ],
)
@pytest.mark.parametrize("kind", ["load", "store", "cluster"])
def test_linear_copies_are_aligned(what, kind, message):
    size = 24 if what == "size" else 32
    shared = ["[%r21]", "[%r21+128]"]
    ends = {"load": [shared[0], "[%rd1]"], "store": ["[%rd1]", shared[0]], "cluster": shared}[kind]
    if what != "size":
        at = 0 if what == "destination" else 1
        ends[at] = ends[at].replace("]", "+8]").replace("128+8", "136")
    op = {
        "load": "shared::cluster.global.mbarrier::complete_tx::bytes",
        "store": "global.shared::cta.bulk_group",
        "cluster": "shared::cluster.shared::cta.mbarrier::complete_tx::bytes",
    }[kind]
    barrier = "" if kind == "store" else ", [%r20]"
    body = (
        INIT
        + f"ld.param.u64 %rd1, [x]; @%p0 cp.async.bulk.{op} {ends[0]}, {ends[1]}, {size}{barrier};"
    )
    with pytest.raises(EmulationError, match=message):
        run(kernel("u64 x", body, TOP), zeros(64))


@pytest.mark.parametrize(
    ("x", "box", "swizzle"),
    [
        (torch.zeros(8, 8).as_strided((8, 4), (5, 1)), (8, 4), "none"),  # strides of 20 bytes
        (torch.zeros(64)[1:33].view(8, 4), (8, 4), "none"),  # an address that is not aligned
        (FLOATS, (8, 2), "none"),  # rows of 8 bytes
        (FLOATS, (8, 16), "32"),  # rows wider than the swizzle
        (FLOATS, (8, 64), "128"),
        (BYTES.expand(64, 64), (257, 16), "none"),
        (BYTES, (8, 0), "none"),
    ],
)
def test_maps_that_the_driver_refuses(x, box, swizzle):
    with pytest.raises(ValueError, match="refused"):
        tensor_map(x, box, swizzle)
