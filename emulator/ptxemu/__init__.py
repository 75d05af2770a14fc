"""ptxemu: runs the PTX of CuTe DSL kernels on the CPU. See README.md."""

from .build import BuildError, NoCompiler
from .engine import MODES, EmulationError, Options, Report, in_flight, options, reports, run_ptx
from .host import install, is_installed
from .memory import register_tensor

__all__ = [
    "MODES",
    "BuildError",
    "EmulationError",
    "NoCompiler",
    "Options",
    "Report",
    "in_flight",
    "install",
    "is_installed",
    "options",
    "register_tensor",
    "reports",
    "run_ptx",
]
