"""Runs a CuTe DSL script on the emulator: python -m ptxemu [options] script.py [arguments].

Exit status: 0 if kernels ran without a hazard, 3 if there are hazards, 1 if no kernel ran or the
emulator reports an error; else the script's.
"""

import argparse
import runpy
import sys
from pathlib import Path

import torch

import ptxemu
from ptxemu import noise

FAILED, HAZARDS = 1, 3


def report_differences() -> None:
    """Print the largest difference of each comparison of tensors by the script."""
    check = torch.testing.assert_close

    def patched(actual, expected, **kwargs):
        both = isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor)
        if both and actual.shape == expected.shape and actual.numel():
            largest = expected.double().abs().max().item()
            difference = (actual.double() - expected.double()).abs().max().item()
            print(
                f"ptxemu: compared {tuple(actual.shape)}, largest difference {difference:.3g}, "
                f"largest value {largest:.3g}"
            )
        check(actual, expected, **kwargs)

    torch.testing.assert_close = patched


def run(script: str) -> int:
    """Run a script as the main program. Return its exit status."""
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
            return FAILED
        return end.code or 0
    return 0


def report() -> int:
    """Print the launches and their hazards. Return the exit status that they call for."""
    hazards = [report for report in ptxemu.reports if report.hazards]
    count = sum(len(report.hazards) for report in hazards)
    print(f"ptxemu: {len(ptxemu.reports)} launches, {count} hazards", file=sys.stderr)
    print("ptxemu:", noise.how_to_repeat(), file=sys.stderr)
    for each in hazards:
        print("ptxemu:", each, file=sys.stderr)
    if not ptxemu.reports:
        print("ptxemu: error: the script launched no kernel", file=sys.stderr)
        return FAILED
    return HAZARDS if hazards else 0


def main() -> int:
    summary, _, statuses = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m ptxemu", description=summary, epilog=statuses.strip()
    )
    arch = "architecture to compile for if the script names none (sm_90a)"
    parser.add_argument("--arch", default="sm_90a", help=arch)
    parser.add_argument("--mode", default="eager", choices=ptxemu.MODES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--strict", action="store_true", help="an access outside the tensors is an error"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="print one line a launch")
    parser.add_argument("script")
    parser.add_argument("args", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    for name in ("mode", "seed", "strict", "verbose"):
        setattr(ptxemu.options, name, getattr(arguments, name))
    try:
        ptxemu.install(arguments.arch)
    except (ptxemu.NoCompiler, ptxemu.BuildError) as error:
        parser.exit(FAILED, f"error: {error}\n")
    if arguments.verbose:
        report_differences()
    sys.argv = [arguments.script, *arguments.args]
    sys.path.insert(0, str(Path(arguments.script).resolve().parent))
    status = verdict = FAILED
    try:
        status = run(arguments.script)
    finally:
        verdict = report()
    return status or verdict


if __name__ == "__main__":
    sys.exit(main())
