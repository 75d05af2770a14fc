"""Text that is safe to print, in a terminal or in Markdown, and tables of it."""

import re


def printable(text: str) -> str:
    """The text with what a terminal would act on or not show (ESC, newlines, marks of direction) as
    visible escapes. Logs and names come from files that anyone may have written."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def markdown(text: str) -> str:
    """The text for a line of Markdown: printable, without columns, HTML, links or formulas."""
    return re.sub(r"([\\|<`\[$])", r"\\\1", printable(text))


def _lines(header: list[str], rows: list[list[str]], left: int, least: int) -> list[list[str]]:
    """The cells of all lines, header first, padded to their columns' widths."""
    lines = [header, *rows]
    widths = [max(least, *(len(line[i]) for line in lines)) for i in range(len(header))]
    return [
        [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        for line in lines
    ]


def markdown_table(header: list[str], rows: list[list[str]], left: int = 1) -> str:
    """A Markdown table; the first `left` columns are left-aligned, the others right-aligned."""
    escaped = [[markdown(str(cell)) for cell in row] for row in [header, *rows]]
    head, *body = _lines(escaped[0], escaped[1:], left, least=3)
    rule = ["-" * len(c) if i < left else "-" * (len(c) - 1) + ":" for i, c in enumerate(head)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, rule, *body])


def text_table(header: list[str], rows: list[list[str]], left: int = 1) -> str:
    """The same table for a terminal: two blanks between the columns, no frame."""
    escaped = [[printable(str(cell)) for cell in row] for row in [header, *rows]]
    head, *body = _lines(escaped[0], escaped[1:], left, least=0)
    rule = ["-" * len(cell) for cell in head]
    return "\n".join("  ".join(cells).rstrip() for cells in [head, rule, *body])
