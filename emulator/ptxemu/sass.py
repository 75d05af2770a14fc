"""Reads a kernel's machine code, as ptxas made it, for tests.

Needs nvdisasm, on the path or in triton's package, and no GPU. `counts` reads from any kernel what
PTX does not show: shared memory that is released while it is read, MMA and loads that wait for each
other, local memory in the main loops. `facts` reads the main loops of a warp-specialised GEMM for
Blackwell and the registers of each role.

An instruction of sm_90 and sm_100 has 128 bits. Those from bit 105 on are its control word: clocks
to stall, the scoreboard that a load releases when its registers are written, and the scoreboards
that the instruction waits for before it issues. Source: Jia et al., "Dissecting the NVIDIA Volta
GPU Architecture via Microbenchmarking" (arXiv:1804.06826), section 2.1; the layout still holds.
"""

import functools
import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

MMA, COMMIT, TMEM_LOAD, ADD = "UTCQMMA", "UTCBAR", "LDTM", "FFMA2"
WGMMA, OF_WGMMA = "QGMMA", "WARPGROUP"
LOCAL = ("LDL", "STL")
COPIES = ("UTMALDG", "UBLKCP", "LDGSTS")
"""Instructions that copy operands to shared memory."""
INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]+)\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)(.*);")
SECOND_HALF = re.compile(r"^\s+/\* 0x([0-9a-f]{16}) \*/")
LABEL = re.compile(r"^(\.L_x_\d+|\$[\w$.]+):")
TARGET = re.compile(r"`\(([^)]+)\)")
ALL_OF = re.compile(r"SB(\d), 0x0\b")
RUNNING = re.compile(r"gsb0, 0x(\d+)")
"""Groups of WGMMA that a wait leaves running."""
NO_SCOREBOARD = 7


@dataclass(frozen=True)
class Line:
    """An instruction.

    Attributes:
        guarded: whether a predicate decides that it runs.
        name: with modifiers; `rest` is what follows in its text.
        signals: the scoreboard that is released when its registers are written.
        waits: bit i: it waits for scoreboard i.
    """

    address: int
    guarded: bool
    name: str
    rest: str
    signals: int = NO_SCOREBOARD
    waits: int = 0

    def is_one_of(self, *names: str) -> bool:
        return self.name.split(".")[0] in names


@dataclass(frozen=True)
class Facts:
    """Counts of one GEMM kernel.

    Attributes:
        mma: tcgen05.mma in an iteration of the MMA's loop.
        between: other instructions between the first and the last of these MMA.
        commits: commits after these MMA.
        tmem_loads, adds: in an iteration of the consumers' loop; an add is of two values.
        producer, consumer: registers of a thread, by the highest number in the role's code.
    """

    mma: int
    between: int
    commits: int
    tmem_loads: int
    adds: int
    producer: int
    consumer: int


def nvdisasm() -> str | None:
    """Return the path of nvdisasm, or None if it is not installed."""
    path = shutil.which("nvdisasm")
    spec = importlib.util.find_spec("triton")
    if path is None and spec is not None and spec.origin is not None:
        own = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
        path = str(own) if own.is_file() else None
    return path


def disassemble(cubin: bytes) -> dict[str, str]:
    """The text of every kernel of an object, by name.

    Raises:
        FileNotFoundError: there is no nvdisasm.
    """
    program = nvdisasm()
    if program is None:
        raise FileNotFoundError("nvdisasm: neither on the path nor in triton's package")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [program, "-hex", "-c", file.name], check=True, capture_output=True, text=True
        ).stdout
    parts = re.split(r"^\.text\.(\S+):$", text, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def facts(text: str) -> Facts:
    """Count in the machine code of a grouped GEMM.

    Raises:
        ValueError: it has no loop of the MMA or of the consumers.
    """
    lines, labels = _parse(text)
    mma_loop = _loop_of(lines, labels, MMA)
    add_loop = _loop_of(lines, labels, TMEM_LOAD)
    at = [i for i in mma_loop if lines[i].is_one_of(MMA)]
    producer, consumer = _roles(lines)
    return Facts(
        mma=len(at),
        between=at[-1] - at[0] + 1 - len(at),
        commits=sum(lines[i].is_one_of(COMMIT) for i in mma_loop),
        tmem_loads=sum(lines[i].is_one_of(TMEM_LOAD) for i in add_loop),
        adds=sum(lines[i].is_one_of(ADD) for i in add_loop),
        producer=_registers(producer),
        consumer=_registers(consumer),
    )


@functools.lru_cache(maxsize=2)
def _parse(text: str) -> tuple[list[Line], dict[str, int]]:
    """(instructions, the one that follows each label)."""
    lines: list[Line] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        label, instruction = LABEL.match(line), INSTRUCTION.match(line)
        if label:
            labels[label[1]] = len(lines)
        elif instruction:
            address, guard, name, rest = instruction.groups()
            lines.append(Line(int(address, 16), guard is not None, name, rest))
        elif control := SECOND_HALF.match(line):
            word = int(control[1], 16) >> 41
            waits = word >> 11 & 63
            if lines[-1].is_one_of("DEPBAR") and (all_of := ALL_OF.search(lines[-1].rest)):
                waits |= 1 << int(all_of[1])
            lines[-1] = replace(lines[-1], signals=word >> 5 & 7, waits=waits)
    return lines, labels


def _loop_of(lines: list[Line], labels: dict[str, int], name: str) -> range:
    """The smallest loop that has all instructions `name` between its first and its last."""
    inside = [i for i, line in enumerate(lines) if line.is_one_of(name)]
    around = (loop for loop in _loops(lines, labels) if inside and inside[0] in loop)
    loops = [loop for loop in around if inside[-1] in loop]
    if not loops:
        raise ValueError(f"no loop around {name}")
    return min(loops, key=len)


def _loops(lines: list[Line], labels: dict[str, int]) -> Iterator[range]:
    """Yield the loops: from the target of a backward branch to the branch."""
    for end, line in enumerate(lines):
        target = re.search(r"\(?(\.L_x_\d+)\)?", line.rest) if line.is_one_of("BRA") else None
        if target and labels.get(target[1], end + 1) <= end:
            yield range(labels[target[1]], end + 1)


def _roles(lines: list[Line]) -> tuple[list[Line], list[Line]]:
    """(code of the producers, of the consumers), each from where it changes its registers on."""
    gives = next(i for i, x in enumerate(lines) if x.name.startswith("USETMAXREG.DEALLOC"))
    takes = next(i for i, x in enumerate(lines) if x.name.startswith("USETMAXREG.TRY_ALLOC"))
    if gives < takes:
        return lines[gives:takes], lines[takes:]
    return lines[gives:], lines[takes:gives]


def _registers(lines: list[Line]) -> int:
    numbers = (int(n) for line in lines for n in re.findall(r"\bR(\d+)\b", line.rest))
    return max(numbers, default=-1) + 1


# --- shared memory that is given back -------------------------------------------------------------


@dataclass(frozen=True)
class Early:
    """An arrival at an mbarrier that may overtake loads from shared memory. The thread that waits
    for the arrival may then overwrite bytes before these loads read them."""

    arrival: Line
    loads: tuple[Line, ...]


def early_arrivals(text: str) -> list[Early]:
    """Return the arrivals that may overtake a load from shared memory, on any path.

    An arrival gives a stage back to the producer. It counts here if it announces no bytes (A1T0):
    an arrival with bytes says that a stage is being filled.

    A load is in flight from its issue until the kernel waits for its scoreboard, or until a MEMBAR
    (a proxy fence begins with one). Loads and shuffles return in order. So ptxas may give a load no
    scoreboard: then the next load's or shuffle's scoreboard stands for both. A load to RZ reads
    nothing and never counts.

    A wait for WGMMA ends no load. It does not wait for a load's scoreboard, and a stage's scales
    may be used long after its WGMMA.

    Loads for a later stage are left out. After a wait that leaves N groups of WGMMA running
    (WARPGROUP.DEPBAR.LE gsb0, N), a kernel gives back the stage of the group before these N. A load
    that was issued after that group, and before the last of the N, belongs to one of the N stages.
    If it is still in flight when its own stage is given back, it counts there. With N = 0 and
    without WGMMA every load counts.
    """
    lines, labels = _parse(text)
    in_flight = _loads_in_flight(lines, _successors(lines, labels))
    return [
        Early(line, tuple(lines[i] for i in sorted(loads)))
        for line, state in zip(lines, in_flight, strict=True)
        if re.match(r"SYNCS\.ARRIVE.*\.A1T0", line.name)
        and (loads := {load.at for load in state if not load.for_later_stage})
    ]


class Load(NamedTuple):
    """A load from shared memory that may be in flight.

    Attributes:
        at: the index of the instruction.
        scoreboard: is released when the load has returned; `NO_SCOREBOARD` until a later load or
            shuffle has one.
        groups: number of WGMMA groups issued since, at most `MOST_GROUPS`.
        for_later_stage: True if the last wait for WGMMA left the group of the load's stage running.
    """

    at: int
    scoreboard: int
    groups: int = 0
    for_later_stage: bool = False


MOST_GROUPS = 8
"""The most WGMMA groups that are counted: more than any kernel keeps running."""


def _loads_in_flight(lines: list[Line], successors: list[set[int]]) -> list[frozenset[Load]]:
    """Return for each instruction the loads from shared memory that may be in flight when it
    issues."""

    def waited(i: int, loads: frozenset[Load]) -> frozenset[Load]:
        return frozenset(load for load in loads if not lines[i].waits >> load.scoreboard & 1)

    def after(i: int, loads: frozenset[Load]) -> frozenset[Load]:
        line = lines[i]
        if line.is_one_of("MEMBAR"):
            return frozenset()
        if line.is_one_of("LDS", "LDSM", "SHFL"):
            reads = not line.is_one_of("SHFL") and not line.rest.lstrip().startswith("RZ,")
            signals = line.signals
            loads = frozenset(
                x._replace(scoreboard=signals) if x.scoreboard == NO_SCOREBOARD else x
                for x in loads
            )
            return loads | {Load(i, signals)} if reads else loads
        if line.is_one_of(WGMMA) and "gsb0" in line.rest:
            return frozenset(
                x._replace(groups=min(x.groups + 1, MOST_GROUPS), for_later_stage=False)
                for x in loads
            )
        if line.is_one_of(OF_WGMMA) and (running := RUNNING.search(line.rest)):
            most = min(int(running[1], 16), MOST_GROUPS - 1)
            return frozenset(x._replace(for_later_stage=1 <= x.groups <= most) for x in loads)
        return loads

    before: dict[int, frozenset[Load]] = {0: frozenset()}
    todo = [0]
    while todo:
        i = todo.pop()
        loads = after(i, waited(i, before[i]))
        for following in successors[i]:
            known = before.get(following)
            if known is None or not loads <= known:
                before[following] = loads | (known or frozenset())
                todo.append(following)
    return [waited(i, before.get(i, frozenset())) for i in range(len(lines))]


def _successors(lines: list[Line], labels: dict[str, int]) -> list[set[int]]:
    """Return the possible successors of every instruction: too many rather than too few."""
    meeting: dict[str, set[int]] = {}  # by BSSY's barrier: where BSYNC goes on
    for line in lines:
        if line.is_one_of("BSSY") and (match := re.search(r"(B\d+), `\(([^)]+)\)", line.rest)):
            meeting.setdefault(match[1], set()).add(labels[match[2]])
    after_calls = {i + 1 for i, line in enumerate(lines) if line.is_one_of("CALL")}
    successors: list[set[int]] = []
    for i, line in enumerate(lines):
        named = TARGET.search(line.rest)
        to = {labels[named[1]]} if named and named[1] in labels else set()
        following, goes_on = set(), {i + 1}
        if line.is_one_of("EXIT"):
            following = goes_on if line.guarded else set()
        elif line.is_one_of("BRA"):
            # Unconditional without a predicate, neither before it nor among its operands.
            alone = not line.guarded and re.match(r"(\.U)?\s*`", line.name[3:] + line.rest)
            following = to if alone else to | goes_on
        elif line.is_one_of("BRX", "BRXU"):
            following = set(labels.values())
        elif line.is_one_of("BSYNC"):
            following = goes_on | meeting.get(re.findall(r"B\d+", line.rest)[0], set())
        elif line.is_one_of("RET"):
            following = after_calls | (goes_on if line.guarded else set())
        elif line.is_one_of("CALL"):
            following = to or goes_on
        elif line.is_one_of("WARPSYNC"):
            following = to | goes_on
        else:
            following = goes_on
        successors.append({j for j in following if j < len(lines)})
    if not any(line.is_one_of("BMOV") for line in lines):  # which would restore a barrier
        for i, to in _meetings(lines, labels, successors).items():
            successors[i] = {i + 1, *to}
    return successors


def _meetings(
    lines: list[Line], labels: dict[str, int], successors: list[set[int]]
) -> dict[int, set[int]]:
    """Return, by BSYNC, where it goes on: at the labels of the BSSY of its barrier that may have
    been the last one."""
    opened: dict[int, frozenset[tuple[str, int]]] = {0: frozenset()}  # barrier and label
    todo = [0]
    while todo:
        i = todo.pop()
        here = opened[i]
        if lines[i].is_one_of("BSSY"):
            barrier, label = re.findall(r"(B\d+), `\(([^)]+)\)", lines[i].rest)[0]
            others = (one for one in here if one[0] != barrier)
            here = frozenset({*others, (barrier, labels[label])})
        for j in successors[i]:
            known = opened.get(j)
            if known is None or not here <= known:
                opened[j] = here | (known or frozenset())
                todo.append(j)
    return {
        i: {to for barrier, to in here if barrier in lines[i].rest}
        for i, here in opened.items()
        if lines[i].is_one_of("BSYNC")
    }


# --- what waits, and what spills ------------------------------------------------------------------


def round_trips(text: str) -> list[Line]:
    """The loads from tensor memory that begin a round trip, of a turn of the loop around them,
    which is a K block.

    A load that is issued after a wait for another one takes that one's latency and its own; loads
    that are all issued before the first wait take it once. So these are as many as latencies that a
    K block takes: one is what cannot be avoided.
    """
    lines, labels = _parse(text)
    trips: list[Line] = []
    done = 0  # trips that were waited for
    loading: dict[int, int] = {}  # by scoreboard, with those of what is under way
    loop = _loop_of(lines, labels, TMEM_LOAD) if TMEM_LOAD in text else range(0)
    for line in (lines[i] for i in loop):
        for scoreboard in [s for s in loading if line.waits >> s & 1]:
            done = max(done, loading.pop(scoreboard))
        if line.is_one_of(TMEM_LOAD):
            loading[line.signals] = done + 1
            trips += [line] * (done == len(trips))
    return trips


def serialised_mma(text: str) -> list[Line]:
    """Return the MMAs that wait for something other than operands. A K block waits for its operands
    before its first MMA, which overwrites the accumulator.

    The tensor cores are idle from an MMA's end until the next one begins. On Hopper ptxas waits for
    every single WGMMA (WARPGROUP.DEPBAR, and WARPGROUP.ARRIVE before the next one) where it cannot
    keep their registers apart, and only warns (C7510 to C7514). The MMA of Blackwell are issued by
    one thread, and nothing that takes an unknown time may stand between them.
    """
    lines, _ = _parse(text)
    on_hopper = any(line.is_one_of(WGMMA) for line in lines)
    serialised = []
    overwrote = waits = False  # the MMA before; what stands between it and this one
    for line in lines:
        if line.is_one_of(WGMMA, MMA):
            waits |= not on_hopper and line.waits != 0
            overwrites = "!UPT" in line.rest
            if waits and (overwrote or not overwrites):
                serialised.append(line)
            overwrote, waits = overwrites, False
        elif on_hopper:
            waits |= line.is_one_of(OF_WGMMA)
        else:
            waits |= line.waits != 0 or line.is_one_of("SYNCS", "BAR", "BRA")
    return serialised


def local_in_loops(text: str) -> list[Line]:
    """Accesses to local memory in the loops over K blocks: around every MMA, load from tensor
    memory or copy to shared memory, the smallest loop.

    What does not fit in registers there is written and read in every K block. What a tile needs
    once, outside of them, is not counted.
    """
    lines, labels = _parse(text)
    loops = list(_loops(lines, labels))
    inside: set[int] = set()
    for i, line in enumerate(lines):
        around = [loop for loop in loops if i in loop]
        if around and line.is_one_of(MMA, WGMMA, TMEM_LOAD, *COPIES):
            inside |= {*min(around, key=len)}
    return [lines[i] for i in sorted(inside) if lines[i].is_one_of(*LOCAL)]


def counts(text: str) -> dict[str, list[Line]]:
    """Return the instructions of any kernel that it should not have, by fault."""
    return {
        "arrivals with loads under way": [early.arrival for early in early_arrivals(text)],
        "round trips to tensor memory": round_trips(text),
        "serialised MMA": serialised_mma(text),
        "local memory in loops": local_in_loops(text),
    }
