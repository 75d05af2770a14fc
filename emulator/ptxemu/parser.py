"""Parses the PTX text of a module into flat programs with numbered registers.

The core reads a program: one record per instruction, with its operands as tokens (`R3` a register,
`N3` a negated predicate, `A3:16` an address, `V4` a vector of the next four operands, `L7` the
target of a branch, `S` the sink `_`). Constants, special registers, parameters and symbols get
registers of their own. The core fills them when a warp starts.
"""

import bisect
import re
import struct
from dataclasses import dataclass, field

from . import instructions
from .operands import Operand, width

# In the order of the enum in core/scheduler.h.
SPECIALS = (
    "tid.x tid.y tid.z ntid.x ntid.y ntid.z ctaid.x ctaid.y ctaid.z nctaid.x nctaid.y nctaid.z "
    "laneid warpid nwarpid smid nsmid cluster_ctaid.x cluster_ctaid.y cluster_ctaid.z "
    "cluster_nctaid.x cluster_nctaid.y cluster_nctaid.z cluster_ctarank cluster_nctarank "
    "clusterid.x clusterid.y clusterid.z nclusterid.x nclusterid.y nclusterid.z lanemask_eq "
    "lanemask_le lanemask_lt lanemask_ge lanemask_gt clock clock64 globaltimer globaltimer_lo "
    "clock_hi is_explicit_cluster dynamic_smem_size total_smem_size gridid"
).split()
SPECIAL_INDEX = {name: i for i, name in enumerate(SPECIALS)}
TYPE_OF_SPECIAL = {"clock64": "u64", "globaltimer": "u64", "is_explicit_cluster": "pred",
                   "gridid": "u64"}  # fmt: skip
"""Types of the special registers that are not u32."""
SMEM_BASE = 1024
"""Bytes at the start of shared memory that the system reserves, from sm_90 on."""
MAX_BYTES = {"shared": 233472, "local": 512 << 10, "param": 32764, "global": 1 << 32}
"""The most bytes of one variable, by state space; for param: of all parameters."""
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
REGISTERS = re.compile(r"\.reg\s+" + TYPE + r"\s+(.*)$", re.S)
NAME = r"[A-Za-z_$%][\w$]*"
REGISTER = re.compile(rf"({NAME})(?:<(\d+)>)?$")
LABEL = re.compile(rf"({NAME})\s*:(?!:)")
BRANCH_TARGETS = re.compile(r"\s*\.branchtargets\s+(.*?);", re.S)
GUARD = re.compile(r"@(!?)([\w$%]+)\s+")
INSTRUCTION = re.compile(r"([\w.:]+)\s*(.*)$", re.S)
CALL = re.compile(r"(?:\((.*?)\)\s*,\s*)?([\w$]+)\s*,\s*\((.*?)\)$", re.S)
ADDRESS = re.compile(r"([\w$%.]+)\s*(?:([+-])\s*(-?\w+))?$")
NUMBER = re.compile(r"0|[1-9]\d{0,18}")
SPACE = re.compile(r"\s*")
BRACKET = re.compile(r"[\[\](){}]")


class PtxError(Exception):
    """The text is not PTX that this parser knows. The message is one line, with the PTX line."""


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
    """A program: its instructions, and the registers ("slots") with initial contents."""

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
    """PTX without comments; line numbers are those of the original."""

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
        line = min(self.line_of(position), len(self.lines))
        text = self.lines[line - 1].strip()[:200]
        return PtxError(f"PTX line {line}: {' '.join(message.split())}: {text}")

    def end_of_statement(self, position: int, end: int) -> int:
        semicolon = self.text.find(";", position, end)
        if semicolon < 0:
            raise self.error(position, "a semicolon is missing")
        return semicolon


@dataclass
class SharedVariable:
    size: int
    align: int
    dynamic: bool


def parse(ptx: str) -> Module:
    """Return all kernels of a module.

    Raises:
        PtxError: the module is not PTX, or not modelled.
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
            if name in module.kernels:
                raise source.error(match.start(1), f"a second kernel {name}")
            end = _matching_brace(source, match.end() - 1)
            kernel = _kernel(source, match)
            _BodyParser(kernel, source, match.end(), end, shared, module.globals).run()
            module.kernels[name] = kernel
            position = end + 1
        elif FUNCTION.match(text, position):
            semicolon, brace = text.find(";", position), text.find("{", position)
            if semicolon < 0 or 0 <= brace < semicolon:
                raise source.error(position, "device functions (.func) are not modelled")
            position = semicolon + 1
        else:
            semicolon = source.end_of_statement(position, len(text))
            statement = text[position:semicolon].strip()
            declaration = DECLARATION.match(statement)
            if not declaration:
                raise source.error(position, f"cannot parse {statement[:80]!r}")
            space, align, kind, name, array, count, first = declaration.groups()
            if space == "shared":
                size = _bytes(source, position, space, kind, count or (0 if array else 1))
                dynamic = array is not None and not count
                alignment = _alignment(source, position, align, kind)
                shared[name] = SharedVariable(size, alignment, dynamic)
            elif space in ("global", "const"):
                size = _bytes(source, position, "global", kind, count or (0 if array else 1))
                module.globals[name] = _contents(source, position, first, kind, size)
            position = semicolon + 1


def _skip(pattern: re.Pattern[str], text: str, position: int) -> int:
    match = pattern.match(text, position)
    return match.end() if match else position


def _bytes(source: Source, position: int, space: str, kind: str, count: str | int | None) -> int:
    """Return the size of a variable of `count` elements; None counts as one."""
    size = -(-width(kind) // 8) * (1 if count is None else int(count))
    if size > MAX_BYTES[space]:
        most = f"expected at most {MAX_BYTES[space]} bytes in .{space}"
        raise source.error(position, f"{most}, found {size}")
    return size


def _alignment(source: Source, position: int, align: str | None, kind: str) -> int:
    alignment = int(align or width(kind) // 8)
    if alignment < 1 or alignment & (alignment - 1):
        raise source.error(position, f"expected a power of two after .align, found {alignment}")
    return alignment


def _contents(source: Source, position: int, text: str | None, kind: str, size: int) -> bytes:
    """Return the bytes of a global variable's initialiser."""
    bytes_each = width(kind) // 8
    data = b""
    for value in text.strip().strip("{}").split(",") if text else []:
        literal = _literal(value.strip())
        if literal is None:
            raise source.error(position, f"initialiser not modelled: {value.strip()[:80]!r}")
        data += (literal.bits & ((1 << 8 * bytes_each) - 1)).to_bytes(bytes_each, "little")
    if len(data) > size > 0:
        raise source.error(position, f"expected at most {size} bytes to begin with")
    return data.ljust(size, b"\0")


def _matching_brace(source: Source, position: int) -> int:
    depth = 0
    for match in re.compile("[{}]").finditer(source.text, position):
        depth += 1 if match.group() == "{" else -1
        if depth == 0:
            return match.start()
    raise source.error(position, "a brace has no end")


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _split_top(text: str) -> list[str]:
    """Split text at the commas outside brackets. An empty text has no parts."""
    if not text.strip():
        return []
    if not BRACKET.search(text):
        return [part.strip() for part in text.split(",")]
    parts, depth, current = [], 0, ""
    for c in text:
        depth += (c in "[{(") - (c in "]})")
        if c == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += c
    return [part.strip() for part in [*parts, current]]


def _kernel(source: Source, entry: re.Match[str]) -> Kernel:
    """Return a kernel with the offsets of its parameters, still without a body."""
    name, parameters, directives = entry.groups()
    position = entry.start(2)
    kernel = Kernel(name)
    offset = 0
    for parameter in _split_top(parameters):
        if match := PARAMETER.match(parameter):
            align, kind, symbol, count = match.groups()
        elif match := POINTER_PARAMETER.match(parameter):
            (kind, align, symbol), count = match.groups(), None
        else:
            raise source.error(position, f"cannot parse parameter {parameter!r}")
        size = _bytes(source, position, "param", kind, count)
        alignment = _alignment(source, position, align, kind)
        # The alignment after .ptr belongs to the memory behind the pointer.
        offset = _align(offset, width(kind) // 8 if ".ptr" in parameter else alignment)
        kernel.params.append((symbol, offset, size))
        offset += size
    if offset > MAX_BYTES["param"]:
        most = f"expected at most {MAX_BYTES['param']} bytes of parameters"
        raise source.error(position, f"{most}, found {offset}")
    kernel.param_bytes = offset
    if match := re.search(r"\.reqntid\s+([\d,\s]+)", directives):
        sizes = [int(n) for n in match.group(1).split(",") if n.strip()]
        kernel.block = tuple((sizes + [1, 1])[:3])
    return kernel


class _Scope:
    """The registers declared between two braces. A register gets its slot at its first use."""

    def __init__(self) -> None:
        self.types: dict[str, str] = {}
        self.ranges: dict[str, tuple[int, str]] = {}  # %r of %r<count>
        self.used: dict[str, tuple[int, str]] = {}  # name -> (slot, type)

    def declare(self, name: str, count: str | None, kind: str) -> bool:
        """Declare a register or a range. Return False if the name is in use."""
        table = self.types if count is None else self.ranges
        if name in table:
            return False
        if count is None:
            self.types[name] = kind
        else:
            self.ranges[name] = int(count), kind
        return True

    def type_of(self, name: str) -> str | None:
        if name in self.types:
            return self.types[name]
        for prefix, (count, kind) in self.ranges.items():
            number = name[len(prefix) :]
            if name.startswith(prefix) and NUMBER.fullmatch(number) and int(number) < count:
                return kind
        return None


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
        # Each pair of braces is a scope of registers and labels.
        self.registers = [_Scope()]
        self.scopes = [0]
        self.known_operands: dict[str, tuple[list[str], Operand]] = {}
        self.parent: dict[int, int | None] = {0: None}
        self.labels: dict[tuple[int, str], int] = {}  # (scope, name) -> instruction
        self.branch_tables: dict[str, list[str]] = {}

    def _place_shared(self, variables: dict[str, SharedVariable]) -> dict[str, int]:
        """Return the offsets of the shared variables; variables of dynamic size come last."""
        offset = SMEM_BASE
        placed = {}
        own = {}
        text = self.source.text
        for match in SHARED_VARIABLE.finditer(text, self.position, self.end):
            align, kind, name, count = match.groups()
            size = _bytes(self.source, match.start(), "shared", kind, count)
            alignment = _alignment(self.source, match.start(), align, kind)
            own[name] = SharedVariable(size, alignment, False)
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
                self.registers.append(_Scope())
                self.position += 1
            elif c == "}":
                if len(self.scopes) == 1:
                    raise self._error("a brace has no beginning")
                self.scopes.pop()
                self.registers.pop()
                self.position += 1
            elif c == ";":
                self.position += 1
            elif match := LABEL.match(text, self.position):
                name = match.group(1)
                if (self.scopes[-1], name) in self.labels:
                    raise self._error(f"a second label {name}")
                self.labels[self.scopes[-1], name] = len(self.k.instrs)
                self.position = match.end()
                if targets := BRANCH_TARGETS.match(text, self.position):
                    self.branch_tables[name] = _split_top(targets.group(1))
                    self.position = targets.end()
            else:
                semicolon = self.source.end_of_statement(self.position, self.end)
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
            for text in _split_top(match.group(2)):
                register = REGISTER.match(text)
                if not register:
                    raise self._error(f"expected the name of a register, found {text[:80]!r}")
                name, count = register.groups()
                if not self.registers[-1].declare(name, count, match.group(1)):
                    raise self._error(f"a second register {name}")
        elif match := LOCAL_VARIABLE.match(statement):
            align, kind, name, count = match.groups()
            self._local(name, kind, count, _alignment(self.source, self.position, align, kind))
        elif match := PARAMETER.match(statement):
            # Arguments and results of calls lie in local memory.
            _, kind, name, count = match.groups()
            self._local(name, kind, count, 16)
        elif not re.match(r"\.(pragma|shared)\b", statement):
            raise self._error(f"directive not modelled: {statement[:60]!r}")

    def _local(self, name: str, kind: str, count: str | None, align: int) -> None:
        size = _bytes(self.source, self.position, "local", kind, count)
        self.local_symbols[name] = _align(self.k.local_bytes, align)
        self.k.local_bytes = self.local_symbols[name] + size
        if self.k.local_bytes > MAX_BYTES["local"]:
            raise self._error(f"expected at most {MAX_BYTES['local']} bytes of local memory")

    # --- instructions

    def _instruction(self, statement: str) -> None:
        predicate, negated = -1, False
        if match := GUARD.match(statement):
            negated = bool(match.group(1))
            predicate, kind = self._register(match.group(2)) or (-1, "")
            if kind != "pred":
                raise self._error(f"{match.group(2)} is not a predicate")
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
        operands = _split_top(rest)
        if op.startswith("call"):
            call = CALL.match(rest)
            if not call or call.group(2) != "vprintf":
                raise self._error("calls are not modelled, except vprintf")
            instruction.op = "call.vprintf"
            operands = [f"[{operand}]" for operand in _split_top(call.group(3))]
        jumps = operands and op.split(".")[0] in ("bra", "brx")
        if jumps:
            instruction.target = (self.scopes[-1], operands.pop())
        instruction.operands, kinds = self._parts(operands)
        if jumps:
            kinds += (Operand("label"),)
        if fault := instructions.fault(instruction.op, kinds):
            raise self._error(fault)
        self.k.instrs.append(instruction)

    def _resolve_target(self, instruction: Instr) -> None:
        if instruction.target is None:
            return
        scope, name = instruction.target
        if instruction.op.startswith("brx"):
            if name not in self.branch_tables:
                raise self._error_at(instruction, f"unknown branch targets {name}")
            table = self.branch_tables[name]
            instruction.operands.append(f"V{len(table)}")
            instruction.operands += [f"L{self._label(scope, t, instruction)}" for t in table]
        else:
            instruction.operands.append(f"L{self._label(scope, name, instruction)}")

    def _error_at(self, instruction: Instr, message: str) -> PtxError:
        return self.source.error(self.source.starts[instruction.line - 1], message)

    def _label(self, scope: int | None, name: str, instruction: Instr) -> int:
        while scope is not None:
            if (scope, name) in self.labels:
                return self.labels[scope, name]
            scope = self.parent[scope]
        raise self._error_at(instruction, f"unknown label {name}")

    # --- operands

    def _register(self, name: str) -> tuple[int, str] | None:
        """Return the slot and the type of a register, or None if no register has the name."""
        for scope in reversed(self.registers):
            if name in scope.used:
                return scope.used[name]
            if kind := scope.type_of(name):
                scope.used[name] = self._slot(width(kind)), kind
                return scope.used[name]
        return None

    def _operand(self, text: str) -> tuple[list[str], Operand]:
        """Return the tokens of an operand, and the operand."""
        # Most operands occur again. In an inner scope the same text may mean another register.
        known = self.known_operands if len(self.scopes) == 1 else {}
        if text not in known:
            known[text] = self._parsed_operand(text)
        return known[text]

    def _parts(self, texts: list[str]) -> tuple[list[str], tuple[Operand, ...]]:
        both = [self._operand(text) for text in texts]
        return [token for tokens, _ in both for token in tokens], tuple(kind for _, kind in both)

    def _parsed_operand(self, text: str) -> tuple[list[str], Operand]:
        if not text:
            raise self._error("an operand is empty")
        if text == "_":
            return ["S"], Operand("sink")
        if text[0] == "{" and text[-1] == "}":
            items = _split_top(text[1:-1])
            tokens, parts = self._parts(items)
            return [f"V{len(items)}", *tokens], Operand("vector", "", parts)
        if text[0] == "[" and text[-1] == "]" and len(text) > 2:
            first, *more = _split_top(text[1:-1])
            token, kind = self._address(first)
            tokens, parts = self._parts(more)
            return [token, *tokens], Operand("address", kind, parts)
        if "|" in text:
            tokens, parts = self._parts([part.strip() for part in text.split("|")])
            return tokens, Operand("pair", "", parts)
        if text[0] == "!":
            slot, kind = self._register(text[1:].strip()) or (-1, "")
            if kind != "pred":
                raise self._error(f"{text[1:]} is not a predicate")
            return [f"N{slot}"], Operand("negated")
        if register := self._register(text):
            return [f"R{register[0]}"], Operand("register", register[1])
        if text[0] == "%":
            name = text[1:]
            if name not in SPECIAL_INDEX:
                raise self._error(f"{text} is no register that is declared or modelled")
            slot = self._constant(self.k.specials, SPECIAL_INDEX[name])
            return [f"R{slot}"], Operand("special", TYPE_OF_SPECIAL.get(name, "u32"))
        if literal := _literal(text):
            self._check_range(literal, text)
            return [f"R{self._value(literal.bits)}"], Operand("literal", literal.kind)
        return [f"R{self._symbol(text, 0)}"], Operand("variable")

    def _check_range(self, literal: "_Literal", text: str) -> None:
        if not -(1 << 63) <= literal.bits < 1 << 64:
            raise self._error(f"literal {text[:40]} has more than 64 bits")

    def _address(self, text: str) -> tuple[str, str]:
        """Return the token of an address, and the type of its register."""
        match = ADDRESS.match(text)
        if not match:
            raise self._error(f"cannot parse address {text!r}")
        base, sign, distance = match.groups()
        literal = _literal(distance) if distance else _Literal(0, "int")
        if literal is None or literal.kind != "int":
            raise self._error(f"cannot parse address {text!r}")
        self._check_range(literal, text)
        offset = -literal.bits if sign == "-" else literal.bits
        if register := self._register(base):
            return f"A{register[0]}:{offset}", register[1]
        if (value := _literal(base)) and value.kind == "int":
            self._check_range(value, base)
            return f"A{self._value(value.bits + offset)}:0", ""
        return f"A{self._symbol(base, offset)}:0", ""

    def _constant(self, table: dict, key) -> int:
        """Return the register of a constant; the first use allocates it."""
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
        raise self._error(f"unknown symbol {name[:80]}")


@dataclass(frozen=True)
class _Literal:
    """The bits of a literal; its kind is int, f32 or f64."""

    bits: int
    kind: str


def _literal(text: str) -> _Literal | None:
    """Parse a literal. Return None if the text is a name."""
    if text == "WARP_SZ":
        return _Literal(32, "int")
    if match := re.match(r"0([fF])([0-9a-fA-F]{8})$|0([dD])([0-9a-fA-F]{16})$", text):
        return _Literal(int(text[2:], 16), "f32" if match.group(1) else "f64")
    if re.match(r"-?(\d+\.\d*|\d*\.\d+)([eE][+-]?\d+)?$", text):
        return _Literal(int.from_bytes(struct.pack("<d", float(text)), "little"), "f64")
    match = re.match(r"(-?)(0[xX][0-9a-fA-F]+|0[bB][01]+|0[0-7]*|[1-9]\d*)U?$", text)
    if not match:
        return None
    sign, digits = match.groups()
    octal = len(digits) > 1 and digits[0] == "0" and digits[1].isdigit()
    value = int(digits, 8 if octal else 0) if len(digits) < 99 else 1 << 64  # too many anyhow
    return _Literal(-value if sign else value, "int")
