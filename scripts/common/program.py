"""The parts that all command-line programs share: the project's names and paths, options, errors,
exit statuses, progress, text that is safe to print, and atomic writes of files.

Imports nothing but the standard library, so that `--help` answers at once.
"""

import argparse
import contextlib
import io
import json
import math
import os
import re
import signal
import sys
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

if TYPE_CHECKING:
    from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
DEFINITION = "moe_fp8_block_scale_ds_routing_topk8_ng8_kg4_e32_h7168_i2048"
OP_TYPE = "moe"
OURS = "cutedsl_"
"""The prefix of solutions on our own kernels. Our baselines lack it."""
PREFIX = f"{OURS}moe_fp8_"
"""The prefix of our layers' names; left out in narrow columns."""
FUSED = f"{PREFIX}fused"
BASELINES = "baselines"
"""The directory of our solutions on others' kernels, which count as peers."""
PACKAGE_DIR = ROOT / "solutions" / "moe_fp8"
PACKED_DIR = ROOT / "solutions"
"""The packed solutions, at the paths of the public data set."""
RUNS_DIR = ROOT / "runs"
"""Runs of bench: not in traces/, of which flashinfer-bench takes every line for a trace."""
RESULTS_DIR = ROOT / "results"
"""Recorded runs: <GPU>/<day>/."""

# (rtol, atol) at which matched ratios are reported in addition to the tolerance that decides.
ACCURACY_TOLERANCES = ((0.2, 0.1), (0.3, 1.0), (0.01, 0.01))


def short_name(solution: str) -> str:
    return solution.removeprefix(PREFIX)


# --- exit statuses, errors, signals ---------------------------------------------------------------

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_CODES = (
    "exit status: 0 everything selected passed, 1 something failed, "
    "2 usage or environment, 130 interrupted, 143 the same by SIGTERM"
)
ENDING = (signal.SIGINT, signal.SIGTERM)
"""Signals that end a program: Ctrl-C, and the one that a job gets at its limit."""


class UsageError(Exception):
    """An error that the user can correct: reported as one line, exit status 2."""


class Failure(Exception):
    """A failure that no other options would avoid: reported as one line, exit status 1."""


def say(text: str) -> None:
    """Print lines other than results to stderr, with unprintable characters escaped."""
    show("\n".join(map(printable, text.split("\n"))), sys.stderr)


def show(text: str, file: TextIO) -> None:
    """Print text beside a progress bar, if there is one."""
    if "tqdm" in sys.modules:
        sys.modules["tqdm"].tqdm.write(text, file)
        file.flush()
    else:
        print(text, file=file, flush=True)


def note(text: str) -> None:
    """Say a line about the current step."""
    say(f"        {text}")


def run_main(main: Callable[[], int]) -> None:
    """Call `main` and exit with its status. A Failure becomes one line and status 1, a UsageError
    or a file that cannot be read or written one line and status 2. If `main` reports an
    interruption, the status is that of the signal."""
    try:
        status = main()
        sys.stdout.flush()  # here, where a closed pipe is no error
    except (Failure, UsageError) as error:
        say(f"error: {error}")
        status = EXIT_FAILED if isinstance(error, Failure) else EXIT_USAGE
    except KeyboardInterrupt:
        say("interrupted")
        status = EXIT_INTERRUPTED
    except BrokenPipeError:  # `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        status = EXIT_OK
    except OSError as error:
        say(f"error: {os_error(error)}")
        status = EXIT_USAGE
    sys.exit(exit_status(interrupted_by) if status == EXIT_INTERRUPTED else status)


interrupted_by: int = signal.SIGINT


def exit_status(signal_number: int) -> int:
    """Return the exit status that a shell reports for a program that a signal ended."""
    return 128 + signal_number


def interrupt(number: int, frame: FrameType | None) -> None:
    """Handle a signal of ENDING: raise KeyboardInterrupt in `main`, but exit at once before `main`
    has begun and during an import. An exception raised inside an import can be replaced or
    swallowed, or end the process inside C++ code."""
    global interrupted_by
    interrupted_by = number
    stack = [frame.f_code for frame, _ in traceback.walk_stack(frame)]
    imports = any(code.co_filename.startswith("<frozen importlib") for code in stack)
    if run_main.__code__ in stack and not imports:
        raise KeyboardInterrupt
    os.write(2, b"interrupted\n")
    os._exit(exit_status(number))


def leave_ending_to_parent() -> None:
    """Ignore ENDING in a child process, which this program ends by SIGKILL. The signals may reach
    all processes, and a child's reaction would be taken for its result."""
    for each in ENDING:
        signal.signal(each, signal.SIG_IGN)


started = getattr(sys.modules["__main__"], "__file__", None)
# Only in our programs. A signal that was ignored at start stays ignored.
if started and ROOT / "scripts" in Path(started).resolve().parents:
    for each in ENDING:
        if signal.getsignal(each) != signal.SIG_IGN:
            signal.signal(each, interrupt)


def os_error(error: OSError) -> str:
    """Return the system's message and the name of its file."""
    if error.filename is None or error.strerror is None:
        return str(error)
    return f"{error.filename}: {error.strerror}"


class Help(argparse.RawDescriptionHelpFormatter):
    """A help that ends each option's text with its default. Texts have those that are no value."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        if default in (None, False, [], argparse.SUPPRESS) or "(default" in text:
            return text
        if isinstance(default, Path) and default.is_relative_to(ROOT):
            default = f"{default.relative_to(ROOT)}/" if default != ROOT else "this repository"
        elif isinstance(default, tuple):
            default = ",".join(map(str, default))
        return f"{text} (default: {default})".strip()


def parser(doc: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"run.py {Path(sys.argv[0]).stem}",
        description=doc,
        epilog=EXIT_CODES,
        formatter_class=Help,
    )


def option_type(
    kind: Callable[[str], Any], what: str, fits: Callable[[Any], bool]
) -> Callable[[str], Any]:
    """Return the type of an option: converts its text by `kind`, and checks that it `fits`."""

    def parse(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if fits(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is no {what}")

    return parse


def whole(least: int) -> Callable[[str], int]:
    return option_type(int, f"whole number of at least {least}", lambda n: least <= n < 2**63)


positive = option_type(float, "finite number above 0", lambda x: 0 < x < math.inf)
share = option_type(float, "number above 0 and at most 1", lambda x: 0 < x <= 1)
input_path = option_type(lambda text: Path(text) if text else None, "path", bool)


def output_path(text: str) -> Path:
    """Return the path of a file or directory to write. Refuse one that cannot be written before
    anything is measured."""
    wanted = input_path(text)
    there = next(p for p in (wanted, *wanted.absolute().parents) if p.exists())
    if there != wanted and not there.is_dir():
        raise argparse.ArgumentTypeError(f"{there} is no directory")
    if not os.access(there, os.W_OK):
        raise argparse.ArgumentTypeError(f"{there} cannot be written")
    return wanted


def output_file(text: str) -> Path:
    """Return the path of a file to write, like `output_path`."""
    if (wanted := output_path(text)).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a directory")
    return wanted


# --- progress -------------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """`4.2 s`, `1 min 05 s` or `2 h 03 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


TICK_SECONDS = 1.0
LOG_SECONDS = 20.0
"""The least time between two lines of a progress bar in a log, but for lines that it must have."""


class Log(io.StringIO):
    """A file that says what tqdm writes, each state of a bar as a line."""

    def write(self, text: str) -> int:
        if line := text.strip():
            say(line)
        return len(text)


def progress(total: float) -> "tqdm":
    """Return a progress bar: on a terminal tqdm's own, elsewhere lines. A description that is set
    shows at once, `update(0)` shows it at intervals."""
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # no thread: programs fork
    form = "{desc}   elapsed {elapsed}, remaining {remaining}{postfix}"
    place: dict[str, Any] = {"file": Log(), "mininterval": LOG_SECONDS, "position": 0}
    if sys.stderr.isatty():
        form += " {bar}"
        place = {"file": sys.stderr, "dynamic_ncols": True}
    # All from the first step, not only recent ones: steps differ. Nothing before the first text.
    return tqdm(total=total, bar_format=form, smoothing=0, delay=1e-9, miniters=0, leave=False,
                **place)  # fmt: skip


@contextlib.contextmanager
def ticking(shown: "tqdm") -> Iterator[None]:
    """Show the elapsed time of a progress bar every second, in a log every `LOG_SECONDS`, also
    while this process computes. It runs a thread: not beside a measurement of time."""
    ended = threading.Event()

    def tick() -> None:
        while not ended.wait(TICK_SECONDS):
            shown.update(0)

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


T = TypeVar("T")


def steps(
    items: Sequence[T],
    text: Callable[[T], str] = str,
    weight: Callable[[T], float] = lambda item: 1.0,
) -> Iterator[T]:
    """Yield the items behind a progress bar that names each. The remaining time is extrapolated by
    weight: 14107 tokens take far longer than 7."""
    with progress(sum(map(weight, items))) as shown:
        for number, item in enumerate(items, 1):
            place = f"[{number:>{len(str(len(items)))}}/{len(items)}]"
            shown.set_description_str(f"{place} {printable(text(item))}")
            yield item
            shown.n += weight(item)


# --- text -----------------------------------------------------------------------------------------


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


def skipped_text(skipped: Mapping[str, str], separator: str = "; ") -> str:
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


# --- files ----------------------------------------------------------------------------------------

STREAM = re.compile(r"/dev/(?:fd/)?(stdout|stderr|\d+)")
"""Paths of streams that are already open."""
OPEN = {"stdout": 1, "stderr": 2}
LFS_POINTER = b"version https://git-lfs"
"""The first bytes of the pointer that git-lfs leaves in place of a file that was not fetched."""


def write_file(path: Path, content: str | bytes) -> None:
    """Write a temporary file next to the path, then rename it. Directories are made. A path that is
    no regular file, such as /dev/stdout, is written to directly. Raises OSError, with nothing left
    behind."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    if (number := STREAM.fullmatch(str(path))) is not None:  # append to the open pipe or file
        descriptor = OPEN.get(number[1]) or int(number[1])
        with os.fdopen(os.dup(descriptor), "wb") as stream:
            stream.write(data)
        return
    target = path.resolve()  # a link stays a link
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(data)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError):
            error.filename = str(path)
        raise


def write_json(path: Path, content: Any) -> None:
    write_file(path, json.dumps(content, indent=1) + "\n")
