"""Runs a CuTe DSL script on the emulator: python -m ptxemu [options] script.py [arguments]."""

import argparse
import runpy
import sys
from pathlib import Path

import torch

import ptxemu
from ptxemu import noise


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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m ptxemu", description=__doc__)
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
        parser.exit(1, f"error: {error}\n")
    if arguments.verbose:
        report_differences()
    sys.argv = [arguments.script, *arguments.args]
    sys.path.insert(0, str(Path(arguments.script).resolve().parent))
    try:
        runpy.run_path(arguments.script, run_name="__main__")
    finally:
        hazards = [report for report in ptxemu.reports if report.hazards]
        count = sum(len(report.hazards) for report in hazards)
        print(f"ptxemu: {len(ptxemu.reports)} launches, {count} hazards", file=sys.stderr)
        print("ptxemu:", noise.how_to_repeat(), file=sys.stderr)
        for report in hazards:
            print("ptxemu:", report, file=sys.stderr)


if __name__ == "__main__":
    main()
