"""What the command-line programs share: options, errors and exit statuses.

Imports nothing but the standard library, so that `--help` answers at once.
"""

import argparse
import math
import sys
from collections.abc import Callable

from scripts.common.text import printable

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_CODES = (
    "exit status: 0 everything selected passed, 1 something failed, "
    "2 usage or environment, 130 interrupted"
)


class UsageError(Exception):
    """Something the user can put right: reported as one line, exit status 2."""


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
