"""The reader of machine code, on a few instructions each."""

from ptxemu.sass import NO_SCOREBOARD, early_arrivals, local_in_loops, round_trips, serialised_mma

ARRIVE = "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R1+URZ], RZ"
FIRST, NEXT, LAST = (
    f"QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR8], {rest}"
    for rest in ("RZ, !UPT", "R24", "R24, gsb0")
)


def listing(*lines: str | tuple) -> str:
    """Write instructions like nvdisasm. A line is an instruction alone, or with the scoreboard that
    it signals (or None) and those that it waits for, or a label, which ends with a colon."""
    text, address = [], 0
    for line in lines:
        instruction, signals, *waits = line if isinstance(line, tuple) else (line, None)
        if instruction.endswith(":"):
            text.append(instruction)
            continue
        control = (NO_SCOREBOARD if signals is None else signals) << 5
        control |= sum(1 << scoreboard for scoreboard in waits) << 11
        text.append(f"        /*{address:04x}*/  {instruction} ;  /* 0x{0:016x} */")
        text.append(f"        /* 0x{control << 41:016x} */")
        address += 16
    return "\n".join(text)


def early(*lines: str | tuple) -> list[tuple[int, list[int]]]:
    """Return each early arrival and its loads, as numbers of instructions."""
    arrivals = early_arrivals(listing(*lines))
    return [(e.arrival.address // 16, [x.address // 16 for x in e.loads]) for e in arrivals]


def test_a_load_is_under_way_until_its_scoreboard_was_waited_for() -> None:
    load, use = ("LDS R2, [R3]", 1), "FMUL R4, R2, R2"
    assert early(load, ARRIVE, (use, None, 1)) == [(1, [0])]
    assert early(load, (use, None, 1), ARRIVE) == []
    assert early(load, (use, None, 2), ARRIVE) == [(2, [0])]
    assert early(load, "MEMBAR.ALL.CTA", ARRIVE) == []
    assert early("LDS RZ, [RZ]", ARRIVE) == []
    assert early(load, "SYNCS.ARRIVE.TRANS64.RED RZ, [R1+URZ], R4") == []


def test_a_load_without_a_scoreboard_returns_before_the_next_one() -> None:
    loads = "LDS R2, [R3]", ("LDS R4, [R3+0x4]", 1)
    assert early(*loads, ARRIVE) == [(2, [0, 1])]
    assert early(*loads, ("FMUL R4, R2, R4", None, 1), ARRIVE) == []
    assert (
        early("LDS R2, [R3]", ("SHFL.IDX PT, R5, R6, R7, 0x1f", 2), ("NOP", None, 2), ARRIVE) == []
    )


def test_a_load_is_under_way_on_any_path() -> None:
    """Waited for on one of two, and around a loop."""
    branch = ("LDS R2, [R3]", 1), "@P0 BRA `(.L_x_1)", ("NOP", None, 1), ".L_x_1:", ARRIVE
    assert early(*branch) == [(3, [0])]
    assert early(".L_x_1:", ARRIVE, ("LDS R2, [R3]", 1), "@P0 BRA `(.L_x_1)") == [(0, [1])]
    among_operands = "BRA UP0, `(.L_x_1)"
    assert early(("LDS R2, [R3]", 1), among_operands, ARRIVE, ".L_x_1:", "NOP") == [(2, [0])]


def test_lanes_meet_where_the_last_branch_of_their_barrier_says() -> None:
    """Two branches with one barrier: no path leads from the first one past the second one."""

    def branch(inside: str, after: str) -> tuple:
        skip = f"@P0 BRA `(.L_x_{inside})", "NOP", f".L_x_{inside}:"
        return f"BSSY B0, `(.L_x_{after})", *skip, "BSYNC B0", f".L_x_{after}:"

    load, use = ("LDS R2, [R3]", 1), ("FMUL R4, R2, R2", None, 1)
    assert early(load, *branch("1", "2"), use, *branch("3", "4"), ARRIVE) == []
    assert early(load, *branch("1", "2"), *branch("3", "4"), ARRIVE) == [(9, [0])]
    restored = "BMOV.32.CLEAR R9, B0", load, *branch("1", "2"), use, *branch("3", "4"), ARRIVE
    assert early(*restored) == [(11, [1])]


def test_scales_of_a_group_of_wgmma_that_still_runs() -> None:
    """Loads of the running group's stage may be under way while an earlier stage is released. After
    a wait for all groups no load may be, nor one that was issued since."""
    block = ("LDS R2, [R3]", 1), FIRST, LAST
    one_runs, none_runs = (f"WARPGROUP.DEPBAR.LE gsb0, 0x{n}" for n in (1, 0))
    assert early(*block, one_runs, ARRIVE) == []
    assert early(*block, none_runs, ARRIVE) == [(4, [0])]
    assert early(*block, FIRST, LAST, one_runs, ARRIVE) == [(6, [0])], "its own stage"
    assert early(*block, one_runs, ("LDS R4, [R3]", 2), ARRIVE) == [(5, [4])]
    assert early(*block, one_runs, FIRST, LAST, ARRIVE) == [(6, [0])]


def test_round_trips_to_tensor_memory() -> None:
    def trips(*lines: str | tuple) -> list[int]:
        loop = ".L_x_1:", *lines, "@P0 BRA `(.L_x_1)"
        return [line.address // 16 for line in round_trips(listing(*loop))]

    load, wait = ("LDTM.x16 R4, tmem[UR5]", 1), ("NOP", None, 1)
    other, for_other = ("LDTM.x16 R20, tmem[UR5+0x10]", 2), ("NOP", None, 2)
    assert trips(load, load, load, wait) == [0]
    assert trips(load, other, wait, for_other) == [0]
    assert trips(load, wait, load, wait) == [0, 2]
    assert trips(load, ("LDTM.x16 R20, tmem[UR5+0x10]", 1, 1), wait) == [0, 1]
    assert trips(load, other, wait, load, wait, for_other) == [0, 3], "the next one while one runs"
    assert round_trips(listing("NOP")) == []


def test_mma_that_wait_within_a_k_block() -> None:
    def serial(*lines: str | tuple) -> list[int]:
        return [line.address // 16 for line in serialised_mma(listing(*lines))]

    wait, arrive = "WARPGROUP.DEPBAR.LE gsb0, 0x0", "WARPGROUP.ARRIVE"
    assert serial(arrive, FIRST, NEXT, LAST, wait, arrive, FIRST, LAST, wait) == []
    assert serial(arrive, FIRST, wait, arrive, NEXT, wait, arrive, LAST) == [4, 7]
    assert serial(FIRST, ("FMUL R2, R2, R2", None, 1), LAST) == [], "a load that returns meanwhile"
    new, more = (f"UTCQMMA gdesc[UR8], gdesc[UR6], tmem[UR4], {p}UPT" for p in ("!", ""))
    assert serial(("NOP", None, 1), new, new, more, more, ("NOP", None, 1), new, new) == []
    assert serial(new, ("NOP", None, 1), new, (more, None, 2), "SYNCS.PHASECHK P0", more) == [
        2,
        3,
        5,
    ]


def test_local_memory_in_the_loops_over_k_blocks() -> None:
    tile, inner = "@P0 BRA `(.L_x_1)", "@P1 BRA `(.L_x_2)"
    for of_a_block in ("UTMALDG.2D [UR8], [UR4]", FIRST, "LDTM.x16 R4, tmem[UR5]"):
        loop = ".L_x_2:", ("LDL R9, [R1]", 1), of_a_block, inner
        accesses = local_in_loops(
            listing(".L_x_1:", ("LDL R8, [R1]", 1), *loop, "STL [R1], R9", tile)
        )
        assert [line.address // 16 for line in accesses] == [1]
