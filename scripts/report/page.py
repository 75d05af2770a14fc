"""The parts that a report's page is made of, as its template takes them."""

from dataclasses import dataclass, field
from typing import Any

BAD_CELLS = {"unsupported", "not installed", "not run", "failed"}


@dataclass(frozen=True)
class Table:
    """A table of the page; the first `left` columns and those of `wrap` are left-aligned, `name`
    is the column with the solutions' names."""

    header: list[str]
    rows: list[list[str]]
    left: int = 1
    name: int = 0
    wrap: tuple[int, ...] = ()
    ours: frozenset[str] = frozenset()
    bad: frozenset[str] = frozenset(BAD_CELLS)


@dataclass(frozen=True)
class Plot:
    svg: Any
    caption: str


@dataclass(frozen=True)
class Part:
    title: str = ""
    text: tuple[str, ...] = ()
    plot: Plot | None = None
    table: Table | None = None
    folded: str = ""
    """The line that unfolds the table, for one that is long."""


@dataclass(frozen=True)
class Section:
    id: str
    title: str
    text: list[str] = field(default_factory=list)
    cards: list[tuple[str, str]] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)


def svg_plot(figure: Any, name: str, caption: str) -> Plot:
    """The figure inline; Markup, because it is our own and must not be escaped."""
    from markupsafe import Markup

    from scripts.report.plots import inline_svg

    return Plot(Markup(inline_svg(figure, name, caption)), caption)
