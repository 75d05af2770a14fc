"""The compiled kernels that are cached on disk: list them, or clear them.

    python -m moe_fp8.cache             # the cached kernels, the last used first
    python -m moe_fp8.cache --clear     # remove all of them

They lie in $MOE_FP8_CACHE_DIR, else under the user's cache directory, and serve every solution of
this project. What was used longest ago is removed by itself beyond 256 MiB.
"""

import argparse
import sys
import time
from collections.abc import Sequence

from .kernels.cache import CACHE_VARIABLE, LIMIT_BYTES, CachedKernel, KernelCache, cache_dir


def mebibytes(entries: Sequence[CachedKernel]) -> str:
    return f"{sum(entry.size for entry in entries) / 2**20:.1f} MiB"


def line(entry: CachedKernel) -> str:
    # The file may hold any JSON.
    made_of = entry.made_of if isinstance(entry.made_of, dict) else {}
    kernel = made_of.get("kernel", entry.path.name)
    made = made_of.get("parameters", "?")
    hours = max(0.0, time.time() - entry.used) / 3600
    return f"{entry.size / 1024:6.0f} KiB  used {hours:7.1f} h ago  {kernel} {made}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m moe_fp8.cache",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--clear", action="store_true", help="remove all of them")
    args = parser.parse_args(argv)
    directory = cache_dir()
    if directory is None:
        parser.error(f"{CACHE_VARIABLE} is empty, or there is no home: no kernel is cached")

    cache = KernelCache(directory)
    try:
        entries = cache.entries()
    except OSError as error:  # another user's
        parser.error(str(error))
    if args.clear:
        removed = cache.trim(0)
        said = f"removed {len(removed)} of {len(entries)} kernels, {mebibytes(removed)}"
    else:
        for entry in entries:
            print(line(entry))
        limit = f"{LIMIT_BYTES / 2**20:.0f} MiB at most"
        said = f"{len(entries)} kernels, {mebibytes(entries)} ({limit})"
    print(f"{directory}: {said}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
