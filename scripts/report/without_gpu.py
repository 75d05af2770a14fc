"""What bench prints on a machine without a GPU.

Which solutions are right, by what ran here, and how fast they are, by what is recorded of real
GPUs. The times of the torch model on a CPU say nothing about either.
"""

from collections.abc import Sequence

from scripts.common.text import printable, text_table
from scripts.report import run_data
from scripts.report.run_data import Recorded
from scripts.table.rank_tables import correctness_table, short_table
from scripts.table.rank_text import ACCURACY_NOTES, failures_lines
from scripts.table.ranking import Ranking


def to_text(ranked: Sequence[Ranking], records: Sequence[Recorded]) -> str:
    return "\n\n".join([*map(checked, ranked), *map(recorded_ranking, records)])


def checked(ranking: Ranking) -> str:
    """The outputs of the run on the CPU against the reference."""
    tokens = ", ".join(str(length) for length, _ in ranking.workloads)
    said = f"CPU ({ranking.hardware}), workloads of T={tokens}: outputs of the torch model."
    tolerance = f"Tolerance: {ranking.tolerance}. {ACCURACY_NOTES}"
    parts = [f"{printable(said)}\n{printable(tolerance)}"]
    parts.append(text_table(*correctness_table(ranking)))
    if failures := failures_lines(ranking):
        parts.append(failures)
    return "\n\n".join(parts)


def recorded_ranking(recorded: Recorded) -> str:
    """The ranking of a recorded run, and whether it is of the present sources."""
    main = recorded.main
    lines = [
        f"Recorded on {main.hardware}, {recorded.day}, {len(main.workloads)} workloads; not "
        "measured on this machine.",
        run_data.changed_sources(main) or "The sources have not changed since.",
        run_data.say_clocks(main),
    ]
    return "\n".join(map(printable, lines)) + "\n\n" + text_table(*short_table(main), left=3)
