"""NVIDIA's SOL-ExecBench: its Solution JSON, after docs/solution.md of its repository.

It differs from flashinfer-bench's in `spec`: a list of languages, hardware that is B200 or LOCAL
(the machine's own GPU), and a short list of libraries. The evaluator writes the sources as files
and imports the entry file as a top-level module, which the packed entry file allows for.
"""

from typing import Any

from scripts.pack.availability import capability_of
from scripts.submit.export import Export, to_json
from scripts.submit.packages import translated

FILE = "solution.json"
B200, LOCAL = "B200", "LOCAL"

# By what is installed: (language, dependency). SOL-ExecBench depends on apache-tvm-ffi itself, and
# torch on filelock: they are there and have no names among its libraries.
LIBRARIES: dict[str, tuple[str, str]] = {
    "torch": ("pytorch", "torch"),
    "nvidia-cutlass-dsl": ("cute_dsl", "cutlass"),
    "triton": ("triton", "triton"),
    "apache-tvm-ffi": ("", ""),
    "filelock": ("", ""),
}


def solution(export: Export) -> dict[str, Any]:
    """The Solution as SOL-ExecBench has it. Raises PackError for libraries that it has not."""
    libraries = translated(export, LIBRARIES, "SOL-ExecBench")
    languages = [language for language, _ in libraries if language not in ("", "pytorch")]
    spec = export.content["spec"]
    on_b200 = capability_of(B200) in [capability_of(name) for name in spec["target_hardware"]]
    return {
        **{key: export.content[key] for key in ("name", "definition", "author", "description")},
        "spec": {
            "languages": languages or ["pytorch"],
            "target_hardware": [B200, LOCAL] if on_b200 else [LOCAL],
            "entry_point": spec["entry_point"],
            "dependencies": [name for _, name in libraries if name],
            "destination_passing_style": spec["destination_passing_style"],
        },
        "sources": export.content["sources"],
    }


def files(export: Export) -> dict[str, str]:
    return {FILE: to_json(solution(export))}
