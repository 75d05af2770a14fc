"""Break a compiled kernel in one place, and see whether that is noticed."""

from collections.abc import Callable

import torch
from ptxemu import MODES, parser
from ptxemu.testing import Edit

WAIT = r"mbarrier\.try_wait\.parity\.shared\.b64 P1, \[(%r\d+)\], (%r\d+), \d+;"
PARITY = r"(mbarrier\.try_wait\.parity\S* [P%]\w+, \[%r\d+\]), %r\d+"


def all_of(*edits: Edit) -> Edit:
    """Make the edits one after the other; it is an error if one of them changes nothing."""

    def edited(ptx: str) -> str:
        for edit in edits:
            was, ptx = ptx, edit(ptx)
            assert ptx != was, "the edit changed nothing"
        parser.parse(ptx)  # a text that is no PTX would pass for a fault that is noticed
        return ptx

    return edited


def noticed(
    run: Callable[[], torch.Tensor], wanted: torch.Tensor, edit: Edit, emulator, seeds: int = 1
) -> bool:
    """Return True if an edit of the kernels that `run` launches is noticed in some schedule.

    It is noticed by an error, a hazard or another result than `wanted`. The mode random runs with
    several seeds.
    """
    emulator.host.ptx_transform = all_of(edit)
    for mode, seed in [*((mode, 0) for mode in MODES), *(("random", s) for s in range(1, seeds))]:
        emulator.options.mode, emulator.options.seed = mode, seed
        emulator.reports.clear()
        try:
            same = torch.equal(run(), wanted)
        except emulator.EmulationError:
            return True
        if not same or any(report.hazards for report in emulator.reports):
            return True
    return False
