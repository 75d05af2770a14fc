"""ptxemu: runs the PTX of CuTe DSL kernels on the CPU. See README.md."""

from .build import BuildError, NoCompiler
from .engine import MODES, Options, Report, in_flight, options, run_ptx
from .host import EmulationError, install, register_tensor, reports

__all__ = [
    "MODES",
    "BuildError",
    "EmulationError",
    "NoCompiler",
    "Options",
    "Report",
    "in_flight",
    "install",
    "options",
    "register_tensor",
    "reports",
    "run_ptx",
]
