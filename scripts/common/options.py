"""Options that several programs share, each added to a parser by a function; solutions by name."""

import argparse
import fnmatch
from collections.abc import Iterable, Sequence
from typing import Any

from scripts.common.definitions import DEFAULT, find
from scripts.common.program import ROOT, UsageError, input_path, short_name, whole

Parser = argparse.ArgumentParser


def local(to: Parser) -> None:
    text = (
        "another data set: its workloads, with our solutions; the reference of its definition is "
        "run; nothing is written to it"
    )
    to.add_argument("--local", type=input_path, default=ROOT, metavar="PATH", help=text)


def definition(to: Parser, otherwise: str = DEFAULT.name, **changed: Any) -> None:
    text = "another definition, by its name or the one in its solutions' names: docs/dataset.md "
    text += f"(default: {otherwise})"
    kind: dict[str, Any] = {"type": find, "default": DEFAULT, "metavar": "NAME", "help": text}
    to.add_argument("--definition", **(kind | changed))


def solutions(to: Parser, default: str = "all of ours") -> None:
    text = "also short (fused), * allowed; the data set's own: by the whole name "
    text += f"(default: {default})"
    to.add_argument("--solutions", nargs="+", default=[], metavar="NAME", help=text)
    to.add_argument(
        "--run-foreign", action="store_true", help="run all solutions of the data set, too"
    )


def workloads(to: Parser, default: str = "all, on the CPU the small ones") -> None:
    text = f"token counts or beginnings of uuids (default: {default})"
    to.add_argument("--workloads", nargs="+", default=[], metavar="T|UUID", help=text)


def max_tokens(to: Parser) -> None:
    to.add_argument(
        "--max-tokens", type=whole(1), metavar="T", help="only workloads up to T tokens"
    )


def seed(to: Parser) -> None:
    to.add_argument("--seed", type=whole(0), default=2026, help="of all random numbers")


def cpu(to: Parser) -> None:
    text = "run without the GPU that is there"
    to.add_argument("--cpu", action="store_true", help=text)


def matches(name: str, patterns: Sequence[str]) -> bool:
    """True if a solution's name, whole or as tables print it, matches one of the shell-style
    patterns, or if there are none."""
    names = (name, short_name(name))
    return not patterns or any(fnmatch.fnmatch(n, p) for n in names for p in patterns)


def select_names(names: Iterable[str], patterns: Sequence[str], option: str = "") -> list[str]:
    """Return the solutions among `names` that the patterns name, in the order of `names`; all
    without patterns. Raises UsageError, with the list: a pattern names none."""
    names = list(names)
    if unknown := [p for p in patterns if not any(matches(name, [p]) for name in names)]:
        there = ", ".join(map(short_name, names)) or "none"
        raise UsageError(f"{option}no solution {', '.join(unknown)}; there are: {there}")
    return [name for name in names if matches(name, patterns)]


def one_name(names: Iterable[str], pattern: str, option: str) -> str:
    """Return the one solution that a pattern names. Raises UsageError."""
    first, *others = select_names(names, [pattern], f"{option} {pattern}: ")
    if others:
        raise UsageError(f"{option} {pattern}: names {', '.join([first, *others])}; name one")
    return first
