"""What the command-line programs share: paths, names, exit codes, errors, options, text and tables.

Imports nothing but the standard library at the top, so that `--help` answers at once.
"""

import argparse
import math
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEFINITION = "moe_fp8_block_scale_ds_routing_topk8_ng8_kg4_e32_h7168_i2048"
OP_TYPE = "moe"
BASELINES = "baselines"
"""The directory of our solutions on others' kernels: they are peers of the others."""
PACKAGE_DIR = ROOT / "solutions" / "moe_fp8"
PACKED_DIR = ROOT / "solutions" / "packed"
TRACES_DIR = ROOT / "traces"
DEFINITION_FILE = ROOT / "definitions" / OP_TYPE / f"{DEFINITION}.json"

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_CODES = (
    "exit status: 0 everything selected passed, 1 something failed, "
    "2 usage or environment, 130 interrupted"
)

# (rtol, atol) at which matched ratios are reported beside the tolerance that decides.
ACCURACY_TOLERANCES = ((0.2, 0.1), (0.3, 1.0), (0.01, 0.01))


class UsageError(Exception):
    """Something the user can put right: reported as one line, exit status 2."""


def printable(text: str) -> str:
    """The text with what a terminal would act on or not show (ESC, newlines, marks of direction) as
    visible escapes. Logs and names come from files that anyone may have written."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def markdown(text: str) -> str:
    """The text for a line of Markdown: printable, without columns, HTML, links or formulas."""
    return re.sub(r"([\\|<`\[$])", r"\\\1", printable(text))


def say(text: str) -> None:
    """Lines for the user beside the results: on stderr, printable."""
    print("\n".join(map(printable, text.split("\n"))), file=sys.stderr, flush=True)


def run_main(main: Callable[[], int]) -> None:
    """Call `main` and exit with its status; a UsageError, or a file or directory that cannot be
    read or written, becomes one line and status 2."""
    try:
        status = main()
    except UsageError as error:
        say(f"error: {error}")
        status = EXIT_USAGE
    except KeyboardInterrupt:
        say("interrupted")
        status = EXIT_INTERRUPTED
    except BrokenPipeError:  # `... | head`
        sys.stderr.close()
        status = EXIT_OK
    except OSError as error:
        say(f"error: {os_error(error)}")
        status = EXIT_USAGE
    sys.exit(status)


def os_error(error: OSError) -> str:
    """What the system said, and of which file."""
    if error.filename is None or error.strerror is None:
        return str(error)
    return f"{error.filename}: {error.strerror}"


def parser(doc: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        description=doc,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def whole(least: int) -> Callable[[str], int]:
    """The type of an option: a whole number of at least `least`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value < 2**63:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {least}")
        return value

    return parse


def positive(text: str) -> float:
    """The type of an option: a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no finite number above 0")
    return value


def share(text: str) -> float:
    """The type of an option: a number above 0 and at most 1."""
    if (value := positive(text)) > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share: at most 1")
    return value


def names(text: str) -> list[str]:
    """The type of an option: names with commas between them. Several words would take the paths
    that follow for names."""
    return [name for name in text.split(",") if name]


def duration(seconds: float) -> str:
    """`4.2 s`, `1 min 05 s` or `2 h 03 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


class Progress:
    """Progress of long work as lines on stderr, which a terminal and a log both show well.

    The remaining time is extrapolated by weight of the steps, not by their number: a workload of
    14107 tokens takes far longer than one of 7.
    """

    def __init__(self, total: int, weight: float = 0.0, quiet: bool = False):
        self.total = total
        self.weight = weight or float(total)
        self.quiet = quiet
        self.done = 0
        self.done_weight = 0.0
        self.start = time.monotonic()

    def elapsed(self) -> float:
        return time.monotonic() - self.start

    def step(self, text: str) -> None:
        """Announce the step that begins now."""
        if self.quiet:
            return
        elapsed = self.elapsed()
        line = f"[{self.done + 1:>{len(str(self.total))}}/{self.total}] {text}"
        line += f"   elapsed {duration(elapsed)}"
        if self.done_weight > 0:
            remaining = elapsed * (self.weight - self.done_weight) / self.done_weight
            line += f", remaining about {duration(remaining)}"
        say(line)

    def note(self, text: str) -> None:
        """A line about the step under way."""
        if not self.quiet:
            say(" " * (2 * len(str(self.total)) + 4) + text)

    def finish(self, weight: float = 1.0) -> None:
        """The step announced last is over."""
        self.done += 1
        self.done_weight += weight


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
