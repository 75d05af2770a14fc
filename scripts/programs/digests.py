"""Compile every kernel that ships and compare its machine code with the stored digests.

    python3 run.py digests                  the main definition's kernels at its workloads
    python3 run.py digests --all            every definition, number of tokens and form
    python3 run.py digests --write DIR      store the digests of every kernel in a record

`results/kernels.json` has the digests of the present sources. A record has those of the measured
sources. If both are equal, pages do not say that sources have changed, so files may move. After a
change of machine code store both anew, the record's from the commit that was measured. Needs no
GPU. `--all` takes an hour on two cores.
"""

import os
from pathlib import Path

from scripts.common.command_line import EXIT_FAILED, EXIT_OK, UsageError, parser, run_main


def main(argv: list[str] | None = None) -> int:
    arguments = parser(__doc__)
    add = arguments.add_argument
    add("--all", action="store_true", help="every definition, number of tokens and form")
    add("--write", type=Path, metavar="DIR", help="store every digest in a record's directory")
    args = arguments.parse_args(argv)

    from scripts.common.project import RESULTS_DIR
    from scripts.measure import shipped
    from scripts.pack import machine_code as code

    units = shipped.units(args.all or args.write is not None)
    stored = {} if args.write else code.read(RESULTS_DIR / code.FILE)
    if stored and stored["versions"] != code.versions():
        raise UsageError(f"stored with {stored['versions']}, here is {code.versions()}")
    digests = shipped.digests(units, os.cpu_count() or 1)
    if args.write:
        code.write(args.write / code.FILE, shipped.describe(units, digests))
        return EXIT_OK
    changed = [name for name, now in digests.items() if stored["digests"].get(name) != now]
    for name in changed:
        print(f"{name}: {digests[name]}, stored: {stored['digests'].get(name, 'none')}")
    print(f"{len(digests)} kernels, {len(changed)} with other machine code than stored")
    return EXIT_FAILED if changed else EXIT_OK


if __name__ == "__main__":
    run_main(main)
