"""What operands an instruction has, and whether those that it is given are such.

`instructions.py` describes the operands of an instruction by words, one each:

    u32 b64 pred ..  read: a register that holds this type, or a literal; a predicate may be negated
    =u32             written: a register; =u32_ may be the sink `_`, too
    ~u32 =~u32       the register may be wider, as ld, st and cvt allow
    &u32             read: also the address of a variable, or a special register
    # #f             an integer literal, a floating one
    label            where to jump
    [g] [s] [t]      an address: with a register of 64 bits, of 32 or 64, of 32 (tensor memory)
    [map3]           a tensor map's address with three coordinates
    {4*b32}          a vector of so many; ={4*b32} written
    =u32|=pred       two results; =u32|?=pred one or two
    b64/[t]          either

`||` stands between descriptions of which one must be met.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple


class Operand(NamedTuple):
    """An operand as it is written.

    Attributes:
        kind: register, negated, literal, variable, special, address, vector, pair, sink, label.
        type: that a register is declared with, or a special register has; of a literal int, f32 or
            f64; of an address that of its register, "" without one.
        parts: of a vector or a pair; of an address what follows the first comma.
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
"""Bits of the types whose name does not end with them."""
ADDRESSES = {"g": (64,), "s": (32, 64), "t": (32,)}


def width(kind: str) -> int:
    return WIDTHS.get(kind) or int(re.sub(r"\D", "", kind))


def twice(kind: str) -> str:
    """An integer type twice as wide."""
    return f"{kind[0]}{2 * width(kind)}"


def _holds(declared: str, wanted: str, wider: bool) -> bool:
    """Whether a register of one type may stand where another is wanted: PTX ISA, operand types."""
    if "pred" in (declared, wanted):
        return declared == wanted
    more = width(declared) - width(wanted)
    if more < 0 or (more > 0 and not (wider and (declared in BITS or wanted in INTEGERS | BITS))):
        return False
    alike = declared == wanted or {declared, wanted} <= INTEGERS
    return alike or declared in BITS or wanted in BITS


def _literal_fits(literal: str, wanted: str) -> bool:
    if literal == "int":
        return wanted in INTEGERS | BITS | {"pred"}
    return wanted in (literal, "b" + literal[1:])


def _is_address(given: Operand, wanted: str) -> bool:
    if given.kind != "address":
        return False
    coordinates = int(wanted[3:]) if wanted.startswith("map") else 0
    widths = ADDRESSES["g" if coordinates else wanted]
    if given.type and (given.type not in INTEGERS | BITS or width(given.type) not in widths):
        return False
    rest = [f"{{{coordinates}*b32}}"] if coordinates else []
    return len(rest) == len(given.parts) and all(map(_is, given.parts, rest))


def _is_pair(given: Operand, first: str, second: str) -> bool:
    if given.kind == "pair" and len(given.parts) == 2:
        return _is(given.parts[0], first) and _is(given.parts[1], second.lstrip("?"))
    return second.startswith("?") and _is(given, first)


def _is_vector(given: Operand, wanted: str) -> bool:
    count, each = wanted.strip("={}").split("*")
    each = "=" + each if wanted[0] == "=" else each
    right = given.kind == "vector" and len(given.parts) == int(count)
    return right and all(_is(part, each) for part in given.parts)


def _is_value(given: Operand, wanted: str) -> bool:
    kind, addressable = wanted.strip("=~&_"), wanted[0] == "&"
    if given.kind == "sink":
        return wanted[-1] == "_"
    if given.kind == "register":
        return _holds(given.type, kind, wider="~" in wanted)
    if wanted[0] == "=":
        return False
    if given.kind == "literal":
        return kind != "label" and _literal_fits(given.type, kind)
    if given.kind == "special":  # 16 bits of one with 32, too
        narrow = given.type == "u32" and kind == "u16"
        return addressable and (narrow or _holds(given.type, kind, wider=False))
    if given.kind == "variable":
        return addressable and width(kind) in (32, 64)
    return (given.kind, kind) in (("negated", "pred"), ("label", "label"))


def _is(given: Operand, wanted: str) -> bool:
    """Whether an operand is what a word says."""
    if "/" in wanted:
        return any(_is(given, one) for one in wanted.split("/"))
    if "|" in wanted:
        return _is_pair(given, *wanted.split("|"))
    if wanted[0] == "[":
        return _is_address(given, wanted[1:-1])
    if wanted[0] == "#":
        return given.kind == "literal" and (given.type == "int") == (wanted == "#")
    return _is_vector(given, wanted) if "{" in wanted else _is_value(given, wanted)


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


def _said(word: str) -> str:
    """A word for who reads an error."""
    for symbol, meaning in MEANINGS:
        word = re.sub(symbol, meaning, word)
    return word


def problem(given: Sequence[Operand], description: str) -> str:
    """What is wrong with an instruction's operands; "" if nothing is."""
    wanted = [one.split() for one in description.split("||")]
    fitting = [words for words in wanted if len(words) == len(given)]
    if not fitting:
        counts = " or ".join(dict.fromkeys(str(len(words)) for words in wanted))
        return f"expected {counts} operands, found {len(given)}"
    problems = []
    for words in fitting:
        wrong = (i for i in range(len(given)) if not _is(given[i], words[i]))
        if (i := next(wrong, None)) is None:
            return ""
        problems.append(f"operand {i + 1}: expected {_said(words[i])}, found {given[i]}")
    return problems[0]
