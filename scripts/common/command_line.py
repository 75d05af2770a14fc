"""Options, errors, exit statuses and progress of the command-line programs.

Imports nothing but the standard library, so that `--help` answers at once.
"""

import argparse
import contextlib
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from scripts.common.project import ROOT
from scripts.common.text import printable

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
    print("\n".join(map(printable, text.split("\n"))), file=sys.stderr, flush=True)


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
    if os.name == "posix":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # run.py blocks it


def os_error(error: OSError) -> str:
    """Return the system's message and the name of its file."""
    if error.filename is None or error.strerror is None:
        return str(error)
    return f"{error.filename}: {error.strerror}"


def parser(doc: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        description=doc, epilog=EXIT_CODES, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def number(
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
    return number(int, f"whole number of at least {least}", lambda n: least <= n < 2**63)


positive = number(float, "finite number above 0", lambda x: 0 < x < math.inf)
share = number(float, "number above 0 and at most 1", lambda x: 0 < x <= 1)


# --- progress -----------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """`4.2 s`, `1 min 05 s` or `2 h 03 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


T = TypeVar("T")


def steps(
    items: Sequence[T],
    text: Callable[[T], str] = str,
    weight: Callable[[T], float] = lambda item: 1.0,
) -> Iterator[T]:
    """Yield the items, each announced by a line on stderr, which reads well in a terminal and in a
    log. The remaining time is extrapolated by weight: 14107 tokens take far longer than 7."""
    whole, done, start = sum(map(weight, items)), 0.0, time.monotonic()
    for number, item in enumerate(items, 1):
        elapsed = time.monotonic() - start
        line = f"[{number:>{len(str(len(items)))}}/{len(items)}] {text(item)}"
        line += f"   elapsed {duration(elapsed)}"
        if done:
            line += f", remaining about {duration(elapsed * (whole - done) / done)}"
        say(line)
        yield item
        done += weight(item)
