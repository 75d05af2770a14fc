"""The part of `serve` that runs inside an engine's processes, which load it as a plugin."""

import functools
import importlib.metadata
import os
import sys
from pathlib import Path
from typing import Any

DIRECTORY = "MOE_FP8_SERVE_DIRECTORY"
"""The variable with the directory of the processes' reports, set by `serve` only."""
RANDOM = "MOE_FP8_SERVE_RANDOM"
CHECK_TOKENS = 2999
"""Tokens of the prompt whose calls are checked, in one step: more than a CUDA graph has."""
GROUPS = {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}
CALLERS = ("api", "serving.sglang", "serving.vllm_experts")
"""Modules of `moe_fp8` that import `experts`."""


def publish(directory: Path, engine: str) -> None:
    """Make this module a plugin of the engine for processes with the directory on their path."""
    package = directory / "moe_fp8_serve-0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: moe-fp8-serve\nVersion: 0\n")
    entry = f"moe_fp8_serve = {__name__}:register_{engine}"
    (package / "entry_points.txt").write_text(f"[{GROUPS[engine]}]\n{entry}\n")


def is_installed(engine: str) -> bool:
    """True if the engine finds the package's own plugin."""
    plugins = importlib.metadata.entry_points(group=GROUPS[engine])
    return any(entry.value.startswith("moe_fp8.") for entry in plugins)


def layers_of(directory: Path) -> list[list[float]]:
    """Return the calc_diff of every layer that was checked, a list a process."""
    return [list(map(float, lines)) for lines in reported(directory, "layers")]


def compilations(directory: Path) -> int:
    """Return the number of our kernels that all processes of an engine have compiled."""
    return sum(int(compiled) for lines in reported(directory, "kernels") for compiled in lines)


def reported(directory: Path, what: str) -> list[list[str]]:
    """Return the lines of `report`, a list a process."""
    return [file.read_text().split() for file in sorted(directory.glob(f"{what}-*.txt"))]


def report(what: str, line: float) -> None:
    """Write a line for `serve` to a file of the calling process: the ranks of several GPUs can be
    forks of the process that called `watch`."""
    with (Path(os.environ[DIRECTORY]) / f"{what}-{os.getpid()}.txt").open("a") as lines:
        lines.write(f"{line}\n")


def register_vllm() -> None:
    watch()
    if os.environ.get(RANDOM):
        from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

        DummyModelLoader.load_weights = lambda self, model, config: fill(model)


def register_sglang() -> None:
    watch()
    if os.environ.get(RANDOM):
        from sglang.srt.model_loader import loader

        loader.initialize_dummy_weights = fill


def fill(model: Any) -> None:
    from scripts.serve import random_weights

    random_weights.fill(model.named_parameters())


@functools.cache  # an engine may register a plugin several times
def watch() -> None:
    """Compare the layers' calls of all callers with the reference, and count our compilations."""
    from moe_fp8 import api

    from scripts.serve.layer_check import checking

    checked = checking(api.experts, CHECK_TOKENS, functools.partial(report, "layers"))
    for name in CALLERS:
        if module := sys.modules.get(f"moe_fp8.{name}"):
            vars(module)["experts"] = checked
    count()


def count() -> None:
    """Report every compilation, by this process and by those that `prepare` starts. The cache on
    disk tells less: it may be off, and other programs add and remove kernels."""
    from moe_fp8.serving import prepare

    compile_all, in_processes = prepare.compile_all, prepare.in_processes

    @functools.cache
    def count_here() -> None:
        from moe_fp8.kernels import compile as compiling

        fakes = compiling.fakes

        def counting_fakes(arguments: Any) -> Any:  # called once by every compilation
            report("kernels", 1)
            return fakes(arguments)

        compiling.fakes = counting_fakes

    def counting_compile_all(geometries: Any) -> int:
        count_here()  # not before: the compiler may initialise CUDA, and engines fork
        return compile_all(geometries)

    def counting_in_processes(geometries: Any) -> None:
        in_processes(geometries)
        report("kernels", len(geometries) - len(prepare.missing(geometries)))

    prepare.compile_all = counting_compile_all
    prepare.in_processes = counting_in_processes
