"""Checks the operands of an instruction against a description.

`instructions.py` describes each operand of an instruction by a word:

    u32 b64 pred ..  read: a register that holds this type, or a literal; a predicate may be negated
    =u32             written: a register; =u32_ may be the sink `_`, too
    ~u32 =~u32       the register may be wider, as ld, st and cvt allow
    &u32             read: also the address of a variable, or a special register
    # #f             an integer literal, a floating literal
    label            the target of a branch
    [g] [s] [t]      an address: with a register of 64 bits, of 32 or 64, of 32 (tensor memory)
    [map3]           a tensor map's address with three coordinates
    {4*b32}          a vector of four; ={4*b32} written
    =u32|=pred       two results; =u32|?=pred one or two
    b64/[t]          either

`||` separates alternative descriptions.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple


class Operand(NamedTuple):
    """An operand in the text of an instruction.

    Attributes:
        kind: register, negated, literal, variable, special, address, vector, pair, sink, label.
        type: the declared type of a register; the type of a special register; int, f32 or f64 for
            a literal; for an address the type of its register, or "".
        parts: the elements of a vector or a pair; for an address the operands after its first
            comma.
    """

    kind: str
    type: str = ""
    parts: tuple = ()

    def __str__(self) -> str:
        if self.kind in ("vector", "pair"):
            return f"{self.kind} of {len(self.parts)}"
        if self.kind == "address":
            return f"address ({self.type})" if self.type else "address"
        names = {"special": "special register", "negated": "negated predicate", "sink": "_"}
        return f"{self.type} {names.get(self.kind, self.kind)}".strip()


INTEGERS = frozenset(f"{sign}{bits}" for sign in "us" for bits in (8, 16, 32, 64))
BITS = frozenset(f"b{bits}" for bits in (8, 16, 32, 64, 128))
WIDTHS = {"pred": 1, "f16x2": 32, "bf16x2": 32, "f32x2": 64, "e4m3x2": 16, "e5m2x2": 16,
          "e2m1x2": 8, "ue8m0x2": 16, "tf32": 32}  # fmt: skip
"""Bits of the types whose name does not end with the number of bits."""
ADDRESSES = {"g": (64,), "s": (32, 64), "t": (32,)}


def width(kind: str) -> int:
    return WIDTHS.get(kind) or int(re.sub(r"\D", "", kind))


def twice(kind: str) -> str:
    """Return the integer type of twice the width."""
    return f"{kind[0]}{2 * width(kind)}"


def _register_fits(declared: str, wanted: str, wider: bool) -> bool:
    """True if a register of type `declared` may be an operand of type `wanted` (PTX ISA)."""
    if "pred" in (declared, wanted):
        return declared == wanted
    more = width(declared) - width(wanted)
    if more < 0 or (more > 0 and not (wider and (declared in BITS or wanted in INTEGERS | BITS))):
        return False
    alike = declared == wanted or {declared, wanted} <= INTEGERS
    return alike or declared in BITS or wanted in BITS


def _is_address(operand: Operand, wanted: str) -> bool:
    if operand.kind != "address":
        return False
    coordinates = int(wanted[3:]) if wanted.startswith("map") else 0
    widths = ADDRESSES["g" if coordinates else wanted]
    if operand.type and (operand.type not in INTEGERS | BITS or width(operand.type) not in widths):
        return False
    rest = [f"{{{coordinates}*b32}}"] if coordinates else []
    return len(rest) == len(operand.parts) and all(map(_is, operand.parts, rest))


def _is_pair(operand: Operand, first: str, second: str) -> bool:
    if operand.kind == "pair" and len(operand.parts) == 2:
        return _is(operand.parts[0], first) and _is(operand.parts[1], second.lstrip("?"))
    return second.startswith("?") and _is(operand, first)


def _is_vector(operand: Operand, wanted: str) -> bool:
    count, each = wanted.strip("={}").split("*")
    each = "=" + each if wanted[0] == "=" else each
    right = operand.kind == "vector" and len(operand.parts) == int(count)
    return right and all(_is(part, each) for part in operand.parts)


def _is_value(operand: Operand, wanted: str) -> bool:
    kind, addressable = wanted.strip("=~&_"), wanted[0] == "&"
    if operand.kind == "sink":
        return wanted[-1] == "_"
    if operand.kind == "register":
        return _register_fits(operand.type, kind, wider="~" in wanted)
    if wanted[0] == "=":
        return False
    if operand.kind == "literal":
        if operand.type == "int":
            return kind in INTEGERS | BITS | {"pred"}
        return kind in (operand.type, "b" + operand.type[1:])
    if operand.kind == "special":  # 16 bits of a register with 32 are allowed
        narrow = operand.type == "u32" and kind == "u16"
        return addressable and (narrow or _register_fits(operand.type, kind, wider=False))
    if operand.kind == "variable":
        return addressable and width(kind) in (32, 64)
    return (operand.kind, kind) in (("negated", "pred"), ("label", "label"))


def _is(operand: Operand, wanted: str) -> bool:
    """True if an operand matches a word."""
    if "/" in wanted:
        return any(_is(operand, one) for one in wanted.split("/"))
    if "|" in wanted:
        return _is_pair(operand, *wanted.split("|"))
    if wanted[0] == "[":
        return _is_address(operand, wanted[1:-1])
    if wanted[0] == "#":
        return operand.kind == "literal" and (operand.type == "int") == (wanted == "#")
    return _is_vector(operand, wanted) if "{" in wanted else _is_value(operand, wanted)


MEANINGS = (
    (r"[=~&_?]", ""),
    (r"\[g\]", "address of 64 bits"),
    (r"\[s\]", "address of 32 or 64 bits"),
    (r"\[t\]", "address of 32 bits"),
    (r"\[map(\d)\]", r"address of a tensor map with \1 coordinates"),
    (r"\{(\d+)\*(\w+)\}", r"vector of \1 \2"),
    (r"#f", "floating literal"),
    (r"#", "integer literal"),
    (r"/", " or "),
)


def _explain(word: str) -> str:
    """Return a word's meaning, for an error."""
    for symbol, meaning in MEANINGS:
        word = re.sub(symbol, meaning, word)
    return word


def problem(operands: Sequence[Operand], description: str) -> str:
    """Return the fault of an instruction's operands, or ""."""
    wanted = [one.split() for one in description.split("||")]
    fitting = [words for words in wanted if len(words) == len(operands)]
    if not fitting:
        counts = " or ".join(dict.fromkeys(str(len(words)) for words in wanted))
        return f"expected {counts} operands, found {len(operands)}"
    problems = []
    for words in fitting:
        wrong = (i for i in range(len(operands)) if not _is(operands[i], words[i]))
        if (i := next(wrong, None)) is None:
            return ""
        problems.append(f"operand {i + 1}: expected {_explain(words[i])}, found {operands[i]}")
    return problems[0]
