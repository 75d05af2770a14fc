"""Text that is safe to print, in a terminal or in Markdown."""

import re
from collections.abc import Mapping


def printable(text: str) -> str:
    """Escape characters that a terminal would act on or not show (ESC, newlines, marks of
    direction). Logs and names come from files that anyone may have written."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def markdown(text: str) -> str:
    """Return text for a line of Markdown: printable, without columns, HTML, links or formulas."""
    return re.sub(r"([\\|<`\[$])", r"\\\1", printable(text))


def slug(name: str) -> str:
    """Return the name as a part of a path: small letters and digits, with dashes between."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def error_line(error: BaseException) -> str:
    """Return the exception's type and the first line of its message."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def say_skipped(skipped: Mapping[str, str], separator: str = "; ") -> str:
    """Return the reasons, each with its solutions."""
    return separator.join(
        f"{', '.join(n for n, w in skipped.items() if w == why)}: {why}"
        for why in dict.fromkeys(skipped.values())
    )


def number(value: float | None, form: str = ".2f", unit: str = "") -> str:
    """Return a table's cell: the value with its unit, or a dash for None or NaN."""
    return "-" if value is None or value != value else f"{value:{form}}{unit}"


def percent(share: float | None) -> str:
    return number(None if share is None else 100 * share, ".0f", " %")
