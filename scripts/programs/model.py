"""The grouped GEMM on paper: what limits it on which GPU, and how long it then takes.

    python3 run.py model

From public figures of the GPUs and the kernels' configs: clocks of every resource for a K block of
a tile, accumulators that keep the tensor cores busy, and predicted times of the 81 configurations
of the study and of the layer's two GEMMs on the 19 workloads. For Hopper the same arithmetic is
checked against recorded times, and its error printed. Needs no GPU. What the figures mean and what
they do not tell: docs/gemm-model.md.
"""

from scripts.common.command_line import EXIT_OK, parser, run_main
from scripts.measure.gemm_problems import histograms, layer_problems
from scripts.programs.options import add_options


def main() -> int:
    arguments = parser(__doc__)
    add_options(arguments, "local")
    args = arguments.parse_args()

    from scripts.measure import model

    found = histograms(args.local)
    rows_of = {h.tokens: h.rows for h in found}
    for table in model.tables(rows_of, layer_problems(found)):
        print(model.to_text(*table) + "\n")
    return EXIT_OK


if __name__ == "__main__":
    run_main(main)
