"""What the command-line programs share: paths, names, exit codes, errors and progress lines.

Imports nothing but the standard library at the top, so that `--help` answers at once.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEFINITION = "moe_fp8_block_scale_ds_routing_topk8_ng8_kg4_e32_h7168_i2048"
OP_TYPE = "moe"
AUTHOR = "moe-fp8-cutedsl"
BASELINES = "baselines"
"""Our solutions are those by this author but for the ones in this directory, which are peers."""
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


def run_main(main: Callable[[], int]) -> None:
    """Call `main` and exit with its status; a UsageError becomes one line and status 2."""
    try:
        status = main()
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        status = EXIT_USAGE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = EXIT_INTERRUPTED
    except BrokenPipeError:  # `... | head`
        sys.stderr.close()
        status = EXIT_OK
    sys.exit(status)


def parser(doc: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        description=doc,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


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
        print(line, file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """A line about the step under way."""
        if not self.quiet:
            print(" " * (2 * len(str(self.total)) + 4) + text, file=sys.stderr, flush=True)

    def finish(self, weight: float = 1.0) -> None:
        """The step announced last is over."""
        self.done += 1
        self.done_weight += weight


def markdown_table(header: list[str], rows: list[list[str]], left: int = 1) -> str:
    """A Markdown table; the first `left` columns are left-aligned, the others right-aligned."""
    widths = [max(len(str(r[i])) for r in [header, *rows]) for i in range(len(header))]
    widths = [max(w, 3) for w in widths]

    def line(cells: list[str]) -> str:
        padded = (
            str(c).ljust(w) if i < left else str(c).rjust(w)
            for i, (c, w) in enumerate(zip(cells, widths, strict=True))
        )
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * w if i < left else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join([line(header), "| " + " | ".join(rule) + " |", *map(line, rows)])


def text_table(header: list[str], rows: list[list[str]], left: int = 1) -> str:
    """The same table for a terminal: two blanks between the columns, no frame."""
    widths = [max(len(str(r[i])) for r in [header, *rows]) for i in range(len(header))]

    def line(cells: list[str]) -> str:
        padded = (
            str(c).ljust(w) if i < left else str(c).rjust(w)
            for i, (c, w) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(padded).rstrip()

    return "\n".join([line(header), "  ".join("-" * w for w in widths), *map(line, rows)])
