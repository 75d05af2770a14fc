"""The compiled kernels that are kept on disk: list them, or clear them.

    python3 run.py cache             # what is kept, the last used first
    python3 run.py cache --clear     # remove all of it

They lie in $MOE_FP8_CACHE_DIR, else under the user's cache directory, and serve every solution of
this project. What was used longest ago goes by itself beyond 256 MiB.
"""

import time

from scripts.common.command_line import EXIT_OK, UsageError, parser, run_main
from scripts.common.progress import duration
from scripts.common.text import text_table


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--clear", action="store_true", help="remove all of them")
    args = arguments.parse_args()

    # Not at the top: `--help` needs none of the package.
    from moe_fp8.kernels.cache import CACHE_VARIABLE, LIMIT_BYTES, KernelCache, cache_dir

    directory = cache_dir()
    if directory is None:
        raise UsageError(f"{CACHE_VARIABLE} is empty, or there is no home: no kernel is kept")

    def unused(*_: object) -> None:
        raise AssertionError("neither loads nor builds")

    cache = KernelCache(directory, unused, unused)
    if args.clear:
        if directory.is_dir() and (why := cache.claim()):
            raise UsageError(f"{why}: nothing is removed")
        removed = cache.trim(0)
        print(f"{directory}: removed {len(removed)} kernels, {mebibytes(removed)}")
        return EXIT_OK
    entries = cache.entries()
    rows = [
        [
            entry.made_of.get("kernel", entry.path.name),
            entry.made_of.get("parameters", "?"),
            f"{entry.size / 1024:.0f}",
            duration(max(0.0, time.time() - entry.used)),
        ]
        for entry in entries
    ]
    if rows:
        print(text_table(["kernel", "parameters", "KiB", "last used, ago"], rows, left=2))
    limit = f"{LIMIT_BYTES / 2**20:.0f} MiB at most"
    print(f"{directory}: {len(entries)} kernels, {mebibytes(entries)} ({limit})")
    return EXIT_OK


def mebibytes(entries: list) -> str:
    return f"{sum(entry.size for entry in entries) / 2**20:.1f} MiB"


if __name__ == "__main__":
    run_main(main)
