"""Parses the PTX text of a module into flat programs with numbered registers.

A program is what the core reads: one record per instruction, its operands as tokens (`R3` a
register, `N3` a negated predicate, `A3:16` an address, `V4` a vector of the next four operands,
`L7` the instruction to jump to, `S` the sink `_`). Constants, special registers, parameters and
symbols get registers of their own, which the core fills once when a warp starts.
"""

import bisect
import re
from dataclasses import dataclass, field

# The order is the one of the enum in core/scheduler.h.
SPECIALS = (
    "tid.x tid.y tid.z ntid.x ntid.y ntid.z ctaid.x ctaid.y ctaid.z nctaid.x nctaid.y nctaid.z "
    "laneid warpid nwarpid smid nsmid cluster_ctaid.x cluster_ctaid.y cluster_ctaid.z "
    "cluster_nctaid.x cluster_nctaid.y cluster_nctaid.z cluster_ctarank cluster_nctarank "
    "clusterid.x clusterid.y clusterid.z nclusterid.x nclusterid.y nclusterid.z lanemask_eq "
    "lanemask_le lanemask_lt lanemask_ge lanemask_gt clock clock64 globaltimer globaltimer_lo "
    "clock_hi is_explicit_cluster dynamic_smem_size total_smem_size gridid"
).split()
SPECIAL_INDEX = {name: i for i, name in enumerate(SPECIALS)}
WIDTH = {"pred": 1, "f16": 16, "f32": 32, "f64": 64, "f16x2": 32, "b128": 128} | {
    f"{kind}{bits}": bits for kind in "bus" for bits in (8, 16, 32, 64)
}
SMEM_BASE = 1024
"""Bytes of shared memory that the system keeps for itself at its start, from sm_90 on."""
LINKAGE = r"(?:\.(?:visible|extern|weak)\s+)*"
TYPE = r"\.(b8|b16|b32|b64|b128|u8|u16|u32|u64|s8|s16|s32|s64|f16|f16x2|f32|f64|pred)"
ALIGN = r"(?:\.align\s+(\d+)\s+)?"
VARIABLE = TYPE + r"\s+([\w$]+)(?:\[(\d+)\])?"
DIRECTIVE = re.compile(r"\.(version|target|address_size|file|section)\b[^\n]*")
ENTRY = re.compile(LINKAGE + r"\.entry\s+([\w$]+)\s*\((.*?)\)([^{;]*)\{", re.S)
FUNCTION = re.compile(LINKAGE + r"\.func\b")
DECLARATION = re.compile(
    LINKAGE + r"\.(shared|global|const|local)\s*(?:\.attribute\([^)]*\)\s*)?"
    r"(?:\.align\s+(\d+)\s*)?" + TYPE + r"\s+([\w$%]+)\s*(\[\s*(\d*)\s*\])?\s*(?:=\s*(.*))?$",
    re.S,
)
PARAMETER = re.compile(r"\.param\s+" + ALIGN + VARIABLE + "$")
POINTER_PARAMETER = re.compile(
    r"\.param\s+" + TYPE + r"\s+\.ptr\s+(?:\.\w+\s+)?" + ALIGN + r"([\w$]+)$"
)
SHARED_VARIABLE = re.compile(r"\.shared\s+" + ALIGN + VARIABLE + r"\s*;")
LOCAL_VARIABLE = re.compile(r"\.local\s+" + ALIGN + VARIABLE + "$")
CALL_PARAMETER = re.compile(r"\.param\s+" + ALIGN + VARIABLE + "$")
REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.*)$", re.S)
REGISTER_RANGE = re.compile(r"(.+)<(\d+)>$")
LABEL = re.compile(r"([A-Za-z_$%][\w$]*)\s*:(?!:)")
BRANCH_TARGETS = re.compile(r"\s*\.branchtargets\s+(.*?);", re.S)
GUARD = re.compile(r"@(!?)([\w$%]+)\s+")
INSTRUCTION = re.compile(r"([\w.:]+)\s*(.*)$", re.S)
CALL = re.compile(r"(?:\((.*?)\)\s*,\s*)?([\w$]+)\s*,\s*\((.*?)\)$", re.S)
ADDRESS = re.compile(r"([\w$%.]+)\s*(?:([+-])\s*(-?\w+))?$")
SPACE = re.compile(r"\s*")
BRACKET = re.compile(r"[\[\](){}]")


class PtxError(Exception):
    """The text is not PTX that this parser knows; the message names the line."""


@dataclass
class Instr:
    """One instruction; `operands` are the tokens that core/decoder.h reads."""

    op: str
    line: int
    text: str
    pred: int = -1
    neg: bool = False
    operands: list[str] = field(default_factory=list)
    target: tuple[int, str] | None = None


@dataclass
class Kernel:
    """A program: its instructions and which registers ("slots") hold what from the start."""

    name: str
    params: list[tuple[str, int, int]] = field(default_factory=list)  # name, offset, bytes
    param_bytes: int = 0
    instrs: list[Instr] = field(default_factory=list)
    nslots: int = 0
    consts: dict[int, int] = field(default_factory=dict)  # value -> slot
    specials: dict[int, int] = field(default_factory=dict)  # index in SPECIALS -> slot
    param_consts: dict[int, int] = field(default_factory=dict)  # parameter offset -> slot
    smem_consts: dict[int, int] = field(default_factory=dict)  # shared memory offset -> slot
    global_consts: dict[tuple[str, int], int] = field(
        default_factory=dict
    )  # symbol, offset -> slot
    static_smem: int = 0
    local_bytes: int = 0
    block: tuple[int, ...] | None = None


@dataclass
class Module:
    """The kernels of a PTX text, and the first contents of its global variables."""

    kernels: dict[str, Kernel]
    globals: dict[str, bytes]


@dataclass
class Source:
    """PTX without comments, line for line as it was."""

    text: str
    lines: list[str]
    starts: list[int]

    @staticmethod
    def of(ptx: str) -> "Source":
        def blank(match: re.Match[str]) -> str:
            return "\n" * match.group().count("\n")

        text = re.sub(r"//[^\n]*", "", ptx)
        # Line information has no semicolon.
        text = re.sub(r"^[ \t]*\.(loc|file)\b[^\n]*", "", text, flags=re.M)
        text = re.sub(r"^[ \t]*\.section\b[^{]*\{[^}]*\}", blank, text, flags=re.M)
        text = re.sub(r"/\*.*?\*/", blank, text, flags=re.S)
        return Source(text, ptx.split("\n"), [0] + [m.end() for m in re.finditer("\n", text)])

    def line_of(self, position: int) -> int:
        return bisect.bisect_right(self.starts, position)

    def error(self, position: int, message: str) -> PtxError:
        line = self.line_of(position)
        return PtxError(f"PTX line {line}: {message}\n    {self.lines[line - 1].strip()}")


@dataclass
class SharedVariable:
    size: int
    align: int
    dynamic: bool


def parse(ptx: str) -> Module:
    """All kernels of a module.

    Raises:
        PtxError: something in it is not modelled or not PTX.
    """
    source = Source.of(ptx)
    text = source.text
    module = Module({}, {})
    shared: dict[str, SharedVariable] = {}
    position = 0
    while True:
        position = _skip(SPACE, text, position)
        if position >= len(text):
            return module
        if match := DIRECTIVE.match(text, position):
            position = match.end()
        elif match := ENTRY.match(text, position):
            name, parameters, directives = match.groups()
            end = _matching_brace(text, match.end() - 1)
            kernel = _kernel(name, parameters, directives)
            _BodyParser(kernel, source, match.end(), end, shared, module.globals).run()
            module.kernels[name] = kernel
            position = end + 1
        elif FUNCTION.match(text, position):
            semicolon, brace = text.find(";", position), text.find("{", position)
            if not (brace < 0 or 0 <= semicolon < brace):
                raise source.error(position, "device functions (.func) are not modelled")
            position = semicolon + 1
        else:
            semicolon = text.find(";", position)
            statement = text[position:semicolon].strip()
            declaration = DECLARATION.match(statement)
            if not declaration:
                raise source.error(position, f"cannot parse {statement[:80]!r}")
            space, align, kind, name, array, count, first = declaration.groups()
            size = WIDTH[kind] // 8 * (int(count) if count else 0 if array else 1)
            if space == "shared":
                dynamic = array is not None and not count
                shared[name] = SharedVariable(size, int(align or WIDTH[kind] // 8), dynamic)
            elif space in ("global", "const"):
                module.globals[name] = _contents(first, kind, size)
            position = semicolon + 1


def _skip(pattern: re.Pattern[str], text: str, position: int) -> int:
    match = pattern.match(text, position)
    return match.end() if match else position


def _contents(text: str | None, kind: str, size: int) -> bytes:
    """The bytes of a global variable's initialiser."""
    width = WIDTH[kind] // 8
    values = text.strip().strip("{}").split(",") if text else []
    data = b"".join(
        (int(v.strip(), 0) & ((1 << 8 * width) - 1)).to_bytes(width, "little") for v in values
    )
    return data.ljust(size, b"\0")


def _matching_brace(text: str, position: int) -> int:
    depth = 0
    for match in re.compile("[{}]").finditer(text, position):
        depth += 1 if match.group() == "{" else -1
        if depth == 0:
            return match.start()
    raise PtxError("unbalanced braces")


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _split_top(text: str) -> list[str]:
    """Split at the commas that are in no bracket."""
    if not BRACKET.search(text):
        parts = text.split(",")
        return [part.strip() for part in (parts if parts[-1].strip() else parts[:-1])]
    parts, depth, current = [], 0, ""
    for c in text:
        depth += (c in "[{(") - (c in "]})")
        if c == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += c
    if current.strip():
        parts.append(current)
    return [part.strip() for part in parts]


def _kernel(name: str, parameters: str, directives: str) -> Kernel:
    """A kernel with its parameters placed, still without a body."""
    kernel = Kernel(name)
    offset = 0
    for parameter in filter(None, _split_top(parameters)):
        if match := PARAMETER.match(parameter):
            align, kind, symbol, count = match.groups()
        elif match := POINTER_PARAMETER.match(parameter):
            (kind, align, symbol), count = match.groups(), None
        else:
            raise PtxError(f"cannot parse parameter {parameter!r}")
        size = WIDTH[kind] // 8 * int(count or 1)
        # The alignment after .ptr is that of what the pointer points to.
        pointer = ".ptr" in parameter
        offset = _align(offset, WIDTH[kind] // 8 if pointer else int(align or WIDTH[kind] // 8))
        kernel.params.append((symbol, offset, size))
        offset += size
    kernel.param_bytes = offset
    if match := re.search(r"\.reqntid\s+([\d,\s]+)", directives):
        kernel.block = tuple(int(n) for n in match.group(1).split(","))
    return kernel


class _BodyParser:
    """Fills a kernel's instructions from the text between its braces."""

    def __init__(
        self,
        kernel: Kernel,
        source: Source,
        start: int,
        end: int,
        shared: dict[str, SharedVariable],
        global_variables: dict[str, bytes],
    ):
        self.k, self.source, self.position, self.end = kernel, source, start, end
        self.globals = global_variables
        self.parameters = {name: offset for name, offset, _ in kernel.params}
        self.local_symbols: dict[str, int] = {}
        self.smem_symbols = self._place_shared(shared)
        # One scope a brace: registers, and the labels that can be seen from it.
        self.registers: list[dict[str, tuple[int, int]]] = [{}]  # name -> (slot, bits)
        self.scopes = [0]
        self.known_operands: dict[str, list[str]] = {}
        self.parent: dict[int, int | None] = {0: None}
        self.labels: dict[tuple[int, str], int] = {}  # (scope, name) -> instruction
        self.branch_tables: dict[str, list[str]] = {}

    def _place_shared(self, variables: dict[str, SharedVariable]) -> dict[str, int]:
        """Offsets of the shared variables; those of dynamic size come after all others."""
        offset = SMEM_BASE
        placed = {}
        own = {}
        text = self.source.text
        for match in SHARED_VARIABLE.finditer(text, self.position, self.end):
            align, kind, name, count = match.groups()
            width = WIDTH[kind] // 8
            own[name] = SharedVariable(width * int(count or 1), int(align or width), False)
        for name, variable in {**variables, **own}.items():
            if not variable.dynamic:
                placed[name] = _align(offset, variable.align)
                offset = placed[name] + variable.size
        self.k.static_smem = offset
        for name, variable in variables.items():
            if variable.dynamic:
                placed[name] = _align(offset, max(variable.align, 16))
                self.k.static_smem = max(self.k.static_smem, placed[name])
        return placed

    def run(self) -> None:
        text = self.source.text
        while True:
            self.position = _skip(SPACE, text, self.position)
            if self.position >= self.end:
                break
            c = text[self.position]
            if c == "{":
                scope = len(self.parent)
                self.parent[scope] = self.scopes[-1]
                self.scopes.append(scope)
                self.registers.append({})
                self.position += 1
            elif c == "}":
                self.scopes.pop()
                self.registers.pop()
                self.position += 1
            elif c == ";":
                self.position += 1
            elif match := LABEL.match(text, self.position):
                self.position = match.end()
                if targets := BRANCH_TARGETS.match(text, self.position):
                    self.branch_tables[match.group(1)] = _split_top(targets.group(1))
                    self.position = targets.end()
                else:
                    self.labels[self.scopes[-1], match.group(1)] = len(self.k.instrs)
            else:
                semicolon = text.find(";", self.position)
                self._statement(text[self.position : semicolon].strip())
                self.position = semicolon + 1
        end_line = self.source.line_of(self.end - 1)
        self.k.instrs.append(Instr("ret", end_line, "ret (end of kernel)"))
        for instruction in self.k.instrs:
            self._resolve_target(instruction)

    def _error(self, message: str) -> PtxError:
        return self.source.error(self.position, message)

    # --- declarations

    def _slot(self, bits: int) -> int:
        slot = self.k.nslots
        self.k.nslots += 2 if bits == 128 else 1
        return slot

    def _statement(self, statement: str) -> None:
        if not statement.startswith("."):
            self._instruction(statement)
        elif match := REGISTERS.match(statement):
            bits = WIDTH[match.group(1)]
            for name in _split_top(match.group(2)):
                many = REGISTER_RANGE.match(name)
                names = (
                    [f"{many.group(1)}{i}" for i in range(int(many.group(2)))] if many else [name]
                )
                self.registers[-1].update((n, (self._slot(bits), bits)) for n in names)
        elif match := LOCAL_VARIABLE.match(statement):
            align, kind, name, count = match.groups()
            self._local(name, kind, count, int(align or WIDTH[kind] // 8))
        elif match := CALL_PARAMETER.match(statement):
            # An argument or result of a call is kept in local memory.
            _, kind, name, count = match.groups()
            self._local(name, kind, count, 16)
        elif not re.match(r"\.(pragma|shared)\b", statement):
            raise self._error(f"directive not modelled: {statement[:60]!r}")

    def _local(self, name: str, kind: str, count: str | None, align: int) -> None:
        self.local_symbols[name] = _align(self.k.local_bytes, align)
        self.k.local_bytes = self.local_symbols[name] + WIDTH[kind] // 8 * int(count or 1)

    # --- instructions

    def _instruction(self, statement: str) -> None:
        predicate, negated = -1, False
        if match := GUARD.match(statement):
            negated = bool(match.group(1))
            predicate = self._register(match.group(2))
            statement = statement[match.end() :]
        match = INSTRUCTION.match(statement)
        if not match:
            raise self._error(f"cannot parse {statement[:80]!r}")
        op, rest = match.group(1), match.group(2).strip()
        if ".param" in op:
            in_brackets = re.search(r"\[\s*([\w$]+)", rest)
            if in_brackets and in_brackets.group(1) in self.local_symbols:
                op = op.replace(".param", ".local")
        line = self.source.line_of(self.position)
        text = self.source.lines[line - 1].strip()
        instruction = Instr(op, line, text, predicate, negated)
        if op in ("bra", "bra.uni"):
            instruction.target = (self.scopes[-1], rest)
        elif op.startswith("brx.idx"):
            index, table = _split_top(rest)
            instruction.operands += self._operand(index)
            instruction.target = (self.scopes[-1], table)
        elif op.startswith("call"):
            call = CALL.match(rest)
            if not call or call.group(2) != "vprintf":
                raise self._error("calls are not modelled, except vprintf")
            instruction.op = "call.vprintf"
            for operand in _split_top(call.group(3)):
                instruction.operands += self._address(operand)
        else:
            for operand in _split_top(rest):
                instruction.operands += self._operand(operand)
        self.k.instrs.append(instruction)

    def _resolve_target(self, instruction: Instr) -> None:
        if instruction.target is None:
            return
        scope, name = instruction.target
        if instruction.op.startswith("brx"):
            table = self.branch_tables[name]
            instruction.operands.append(f"V{len(table)}")
            instruction.operands += [f"L{self._label(scope, t, instruction)}" for t in table]
        else:
            instruction.operands.append(f"L{self._label(scope, name, instruction)}")

    def _label(self, scope: int | None, name: str, instruction: Instr) -> int:
        while scope is not None:
            if (scope, name) in self.labels:
                return self.labels[scope, name]
            scope = self.parent[scope]
        raise PtxError(f"PTX line {instruction.line}: unknown label {name}")

    # --- operands

    def _register(self, name: str) -> int:
        for scope in reversed(self.registers):
            if name in scope:
                return scope[name][0]
        raise self._error(f"unknown register {name}")

    def _is_register(self, name: str) -> bool:
        return any(name in scope for scope in self.registers)

    def _operand(self, text: str) -> list[str]:
        """What stands for an operand in `Instr.operands`."""
        # Most are used again; those within a scope of its own may be others there.
        known = self.known_operands if len(self.scopes) == 1 else {}
        if text not in known:
            known[text] = self._parsed_operand(text)
        return known[text]

    def _parsed_operand(self, text: str) -> list[str]:
        if text == "_":
            return ["S"]
        if text[0] == "{":
            items = _split_top(text[1:-1])
            return [f"V{len(items)}", *(token for i in items for token in self._operand(i))]
        if text[0] == "[":
            first, *more = _split_top(text[1:-1])
            return self._address(first) + [token for i in more for token in self._operand(i)]
        if "|" in text:
            return [token for part in text.split("|") for token in self._operand(part.strip())]
        if text[0] == "!":
            return [f"N{self._register(text[1:].strip())}"]
        if self._is_register(text):
            return [f"R{self._register(text)}"]
        if text[0] == "%":
            if text[1:] not in SPECIAL_INDEX:
                raise self._error(f"special register {text} is not modelled")
            return [f"R{self._constant(self.k.specials, SPECIAL_INDEX[text[1:]])}"]
        value = _literal(text)
        if value is not None:
            return [f"R{self._value(value)}"]
        return [f"R{self._symbol(text, 0)}"]

    def _address(self, text: str) -> list[str]:
        match = ADDRESS.match(text)
        if not match:
            raise self._error(f"cannot parse address {text!r}")
        base, sign, distance = match.groups()
        offset = _literal(distance) if distance else 0
        if offset is None:
            raise self._error(f"cannot parse address {text!r}")
        if sign == "-":
            offset = -offset
        if self._is_register(base):
            return [f"A{self._register(base)}:{offset}"]
        value = _literal(base)
        slot = self._symbol(base, offset) if value is None else self._value(value + offset)
        return [f"A{slot}:0"]

    def _constant(self, table: dict, key) -> int:
        """The register that holds a constant; the first use makes one."""
        if key not in table:
            table[key] = self._slot(64)
        return table[key]

    def _value(self, value: int) -> int:
        return self._constant(self.k.consts, value & ((1 << 64) - 1))

    def _symbol(self, name: str, offset: int) -> int:
        if name in self.parameters:
            return self._constant(self.k.param_consts, self.parameters[name] + offset)
        if name in self.smem_symbols:
            return self._constant(self.k.smem_consts, self.smem_symbols[name] + offset)
        if name in self.local_symbols:
            return self._value(self.local_symbols[name] + offset)
        if name in self.globals:
            return self._constant(self.k.global_consts, (name, offset))
        raise self._error(f"unknown symbol {name}")


def _literal(text: str) -> int | None:
    """The bits of a literal, or None where the text is a name."""
    if text == "WARP_SZ":
        return 32
    if re.match(r"0[fF][0-9a-fA-F]{8}$", text) or re.match(r"0[dD][0-9a-fA-F]{16}$", text):
        return int(text[2:], 16)
    match = re.match(r"(-?)(0[xX][0-9a-fA-F]+|\d+)U?$", text)
    if not match:
        return None
    sign, digits = match.groups()
    octal = len(digits) > 1 and digits[0] == "0" and digits[1] not in "xX"
    value = int(digits, 8 if octal else 0)
    return -value if sign else value
