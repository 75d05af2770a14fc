"""What ptxas made of the grouped GEMM for Blackwell, read from its machine code.

Needs nvdisasm, on the path or in triton's package. Without a GPU this is what can be said of the
code that a GPU would run: how the MMA follow each other, what the loops keep in local memory, how
many registers each role takes.
"""

import importlib.util
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

MMA, COMMIT, TMEM_LOAD, ADD = "UTCQMMA", "UTCBAR", "LDTM", "FFMA2"
LOCAL = ("LDL", "STL")
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*);")
LABEL = re.compile(r"^(\.L_x_\d+):")


@dataclass(frozen=True)
class Line:
    """An instruction: its name with modifiers, and the rest of its text."""

    name: str
    rest: str

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
            [program, "-c", file.name], check=True, capture_output=True, text=True
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
            lines.append(Line(instruction[1], instruction[2]))
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
