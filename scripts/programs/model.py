"""The grouped GEMM on paper: what limits it on which GPU, and how long it then takes.

    python3 run.py model

From public figures of the GPUs and the kernels' configs: clocks of every resource for a K block of
a tile, accumulators that keep the tensor cores busy, and predicted times of the 81 configurations
of the study and of the layer's two GEMMs on the 19 workloads. For Hopper the same arithmetic is
checked against recorded times, and its error printed. Needs no GPU. With --probes, what was
measured on such a GPU takes the place of what is assumed of it. What the figures mean and what they
do not tell: docs/gemm-model.md.
"""

from pathlib import Path

from scripts.common import schemas
from scripts.common.command_line import EXIT_OK, UsageError, parser, run_main
from scripts.measure.gemm_problems import histograms, layer_problems
from scripts.programs.options import add_options


def main() -> int:
    arguments = parser(__doc__)
    add_options(arguments, "local")
    said = "probes.json of a record (check --only probes)"
    arguments.add_argument("--probes", type=Path, metavar="JSON", help=said)
    args = arguments.parse_args()

    from scripts.measure import model

    found = histograms(args.local)
    rows_of = {h.tokens: h.rows for h in found}
    gpus = model.GPUS
    if args.probes:
        probes = schemas.read(args.probes, schemas.Probes)["probes"]
        if probes["emulated"]:
            raise UsageError(f"--probes {args.probes}: from the emulator, whose clock is no time")
        gpus = model.with_probes(probes)
    for table in model.tables(rows_of, layer_problems(found), gpus):
        print(model.to_text(*table) + "\n")
    return EXIT_OK


if __name__ == "__main__":
    run_main(main)
