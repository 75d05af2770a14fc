"""What ptxas made of a kernel, read from its machine code.

Needs nvdisasm, on the path or in triton's package. Without a GPU this is what can be said of the
code that a GPU would run: of the grouped GEMM for Blackwell how the MMA follow each other, what the
loops keep in local memory and how many registers each role takes; of any kernel whether it gives
shared memory back that it still reads.

An instruction of sm_90 and sm_100 has 128 bits. Those from bit 105 on are its control word: clocks
to stall, the scoreboard that a load releases when its registers are written, and the scoreboards
that the instruction waits for before it issues. Source: Jia et al., "Dissecting the NVIDIA Volta
GPU Architecture via Microbenchmarking" (arXiv:1804.06826), section 2.1; the layout still holds.
"""

import importlib.util
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

MMA, COMMIT, TMEM_LOAD, ADD = "UTCQMMA", "UTCBAR", "LDTM", "FFMA2"
LOCAL = ("LDL", "STL")
INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]+)\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)(.*);")
SECOND_HALF = re.compile(r"^\s+/\* 0x([0-9a-f]{16}) \*/")
LABEL = re.compile(r"^(\.L_x_\d+|\$[\w$.]+):")
TARGET = re.compile(r"`\(([^)]+)\)")
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
    """Of one kernel.

    Attributes:
        mma: tcgen05.mma of a turn of the MMA's loop.
        between: instructions that stand between the first and the last of them.
        commits: that follow them.
        tmem_loads, adds: of a turn of the consumers' loop; an add is of two values.
        local: accesses to local memory in these two loops.
        local_elsewhere: and outside of them.
        producer, consumer: registers of a thread, by the highest number in the role's code.
    """

    mma: int
    between: int
    commits: int
    tmem_loads: int
    adds: int
    local: int
    local_elsewhere: int
    producer: int
    consumer: int


def nvdisasm() -> str | None:
    """The disassembler, None where there is none."""
    found = shutil.which("nvdisasm")
    spec = importlib.util.find_spec("triton")
    if found is None and spec is not None and spec.origin is not None:
        own = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
        found = str(own) if own.is_file() else None
    return found


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
    """Of the machine code of a grouped GEMM.

    Raises:
        ValueError: it has no loop of the MMA or of the consumers.
    """
    lines, labels = _parse(text)
    mma_loop = _loop_of(lines, labels, MMA)
    add_loop = _loop_of(lines, labels, TMEM_LOAD)
    at = [i for i in mma_loop if lines[i].is_one_of(MMA)]
    local = [i for i, line in enumerate(lines) if line.is_one_of(*LOCAL)]
    in_loops = [i for i in local if i in mma_loop or i in add_loop]
    producer, consumer = _roles(lines)
    return Facts(
        mma=len(at),
        between=at[-1] - at[0] + 1 - len(at),
        commits=sum(lines[i].is_one_of(COMMIT) for i in mma_loop),
        tmem_loads=sum(lines[i].is_one_of(TMEM_LOAD) for i in add_loop),
        adds=sum(lines[i].is_one_of(ADD) for i in add_loop),
        local=len(in_loops),
        local_elsewhere=len(local) - len(in_loops),
        producer=_registers(producer),
        consumer=_registers(consumer),
    )


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
            lines[-1] = replace(lines[-1], signals=word >> 5 & 7, waits=word >> 11 & 63)
    return lines, labels


def _loop_of(lines: list[Line], labels: dict[str, int], name: str) -> range:
    """The smallest loop that has all instructions `name` between its first and its last."""
    inside = [i for i, line in enumerate(lines) if line.is_one_of(name)]
    loops = []
    for end, line in enumerate(lines):
        target = re.search(r"\(?(\.L_x_\d+)\)?", line.rest) if line.is_one_of("BRA") else None
        start = labels.get(target[1], end + 1) if target else end + 1
        if inside and start <= inside[0] and inside[-1] <= end:
            loops.append(range(start, end + 1))
    if not loops:
        raise ValueError(f"no loop around {name}")
    return min(loops, key=len)


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
    """An arrival at an mbarrier, and the loads from shared memory that may still be under way: a
    thread that waits for the arrival may overwrite what they read."""

    arrival: Line
    loads: tuple[Line, ...]


def early_arrivals(text: str) -> list[Early]:
    """Of the machine code of a kernel, on any path through it.

    A load is under way until its scoreboard has been waited for, or a MEMBAR, which a proxy fence
    begins with, has ordered it before what follows. One without a scoreboard returns before the
    next load, which has one.
    """
    lines, labels = _parse(text)
    under_way = _loads_under_way(lines, _successors(lines, labels))
    return [
        Early(line, tuple(lines[i] for i in sorted(loads)))
        for line, loads in zip(lines, under_way, strict=True)
        if line.name.startswith("SYNCS.ARRIVE") and loads
    ]


def _loads_under_way(lines: list[Line], successors: list[set[int]]) -> list[frozenset[int]]:
    """By instruction: the loads from shared memory that may be under way when it issues."""

    def waited(i: int, loads: frozenset[int]) -> frozenset[int]:
        mask = lines[i].waits
        all_of = (
            re.search(r"SB(\d), 0x0\b", lines[i].rest) if lines[i].is_one_of("DEPBAR") else None
        )
        if all_of:
            mask |= 1 << int(all_of[1])
        return frozenset(load for load in loads if not mask >> lines[load].signals & 1)

    before: dict[int, frozenset[int]] = {0: frozenset()}
    todo = [0]
    while todo:
        i = todo.pop()
        loads = waited(i, before[i])
        if lines[i].is_one_of("MEMBAR"):
            loads = frozenset()
        if lines[i].is_one_of("LDS", "LDSM") and lines[i].signals != NO_SCOREBOARD:
            loads |= {i}
        for following in successors[i]:
            known = before.get(following)
            if known is None or not loads <= known:
                before[following] = loads | (known or frozenset())
                todo.append(following)
    return [waited(i, before.get(i, frozenset())) for i in range(len(lines))]


def _successors(lines: list[Line], labels: dict[str, int]) -> list[set[int]]:
    """By instruction, those that may be next; too many rather than too few."""
    meeting: dict[str, set[int]] = {}  # by BSSY's barrier: where BSYNC goes on
    for line in lines:
        if line.is_one_of("BSSY") and (found := re.search(r"(B\d+), `\(([^)]+)\)", line.rest)):
            meeting.setdefault(found[1], set()).add(labels[found[2]])
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
    return successors
