"""Exports with a layout of their own, as docs/submit.md describes them.

kit: config.toml and one folder of sources for a copy of the flashinfer-bench starter kit, which
packs the files of the one folder that belongs to the language, none below it.
sol: the Solution JSON of NVIDIA's SOL-ExecBench, whose `spec` differs from flashinfer-bench's.
kernels: the source of a kernel without compiled parts for Hugging Face's kernels.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from moe_fp8.closure import PACKAGE
from packaging.utils import canonicalize_name

from scripts.pack.availability import capability_of, requirements
from scripts.pack.pack import PackError, entry_file, validate
from scripts.submit.export import Export, to_json
from scripts.submit.flatten import FlattenError, flat_name, flatten

Known = TypeVar("Known")


def translated(export: Export, known: Mapping[str, Known], where: str) -> list[Known]:
    """What `known` has for each of the solution's requirements, by their canonical names.

    Raises:
        PackError: one of them is not known there.
    """
    names = [canonicalize_name(r.name) for r in requirements(export.solution)]
    if absent := [name for name in names if name not in known]:
        raise PackError(f"{export.name} needs {', '.join(absent)}, which {where} does not have")
    return [known[name] for name in names]


# --- the starter kit ------------------------------------------------------------------------------

LANGUAGE = "triton"
KIT_ENTRY_FILE = "kernel.py"
KIT_ENTRY_POINT = f"{KIT_ENTRY_FILE}::run"
KIT_FOLDER = f"solution/{LANGUAGE}"


def kit_files(export: Export) -> dict[str, str]:
    """The files to put into a copy of the kit. Raises PackError."""
    try:
        flat = flatten(export.package, reserved=KIT_ENTRY_FILE)
    except FlattenError as error:
        raise PackError(f"{export.name}: {error}") from None
    module = flat_name(tuple(export.module.split(".")))
    flat[KIT_ENTRY_FILE] = entry_file(export.name, where=f"{module}.py", module=module)
    # A basic string of TOML is one of JSON.
    text = {key: json.dumps(export.content[key]) for key in ("name", "definition", "author")}
    config = (
        "[solution]\n"
        + "".join(f"{key} = {value}\n" for key, value in text.items())
        + f'\n[build]\nlanguage = "{LANGUAGE}"\nentry_point = "{KIT_ENTRY_POINT}"\n'
        + "destination_passing_style = true\n"
    )
    return {"config.toml": config, **{f"{KIT_FOLDER}/{n}": flat[n] for n in sorted(flat)}}


def check_kit(root: Path, export: Export) -> None:
    """Pack the folder as the kit does and build what comes of it. Raises PackError."""
    from flashinfer_bench.agents import pack_solution_from_files
    from flashinfer_bench.data import BuildSpec

    made = {Path(name).name for name in kit_files(export) if name.startswith(KIT_FOLDER)}
    solution = pack_solution_from_files(
        path=str(root / KIT_FOLDER),
        spec=BuildSpec(
            language="python",  # type: ignore[arg-type] # the same builder, without Triton
            target_hardware=["cuda"],
            entry_point=KIT_ENTRY_POINT,
        ),
        name=export.name,
        definition=export.content["definition"],
        author=export.content["author"],
    )
    if {source.path for source in solution.sources} != made:
        raise PackError(f"{export.name}: the kit's packer would not take all files")
    validate(solution.model_dump_json().encode())


# --- SOL-ExecBench --------------------------------------------------------------------------------

SOL_FILE = "solution.json"
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


def sol_solution(export: Export) -> dict[str, Any]:
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


def sol_files(export: Export) -> dict[str, str]:
    return {SOL_FILE: to_json(sol_solution(export))}


# --- Hugging Face's kernels -----------------------------------------------------------------------

KERNEL_NAME = re.compile(r"[a-z][-a-z0-9]*[a-z0-9]")
LICENSE = "Apache-2.0"

# By what is installed: (table of build.toml, name there), of the dependencies that kernels allows.
# torch is always there, with filelock and, for CUDA, triton.
GENERAL, CUDA = "general", "general.cuda"
DEPENDENCIES: dict[str, tuple[str, str]] = {
    "torch": ("", ""),
    "filelock": ("", ""),
    "triton": ("", ""),
    "apache-tvm-ffi": (GENERAL, "tvm-ffi"),
    "nvidia-cutlass-dsl": (CUDA, "nvidia-cutlass-dsl"),
}

FLAKE = """\
{
  inputs.kernel-builder.url = "github:huggingface/kernels";

  outputs =
    { self, kernel-builder, ... }:
    kernel-builder.lib.genKernelFlakeOutputs {
      path = ./.;
      inherit self;
    };
}
"""


def kernel_name(export: Export) -> str:
    """The name in build.toml; the module's has underscores for its dashes. Raises PackError."""
    name = export.name.lower().replace("_", "-")
    if not KERNEL_NAME.fullmatch(name):
        raise PackError(f"{export.name}: kernels allows small letters, digits and dashes only")
    return name


def build_toml(export: Export) -> str:
    """Raises PackError for a dependency that kernels does not allow."""
    depends = [d for d in translated(export, DEPENDENCIES, "the list of kernels") if all(d)]
    general, cuda = ([name for where, name in depends if where == t] for t in (GENERAL, CUDA))
    capabilities = [capability_of(name) for name in export.content["spec"]["target_hardware"]]
    archs = sorted({f"{c[0]}.{c[1]}" for c in capabilities if c is not None})
    lines = [
        f"[{GENERAL}]",
        f"name = {json.dumps(kernel_name(export))}",
        "version = 1",
        "edition = 5",
        f"license = {json.dumps(LICENSE)}",
        'backends = ["cuda"]',
        *([f"python-depends = {json.dumps(general)}"] if general else []),
        *(["", f"[{CUDA}]", f"python-depends = {json.dumps(cuda)}"] if cuda else []),
        "",
        "[torch-noarch]",
    ]  # strings and lists of strings are the same in JSON and in TOML
    if archs and None not in capabilities:
        # With an underscore: kernels 0.17.2 refuses the dash that its page of build.toml shows.
        lines.append(f"cuda_capabilities = {json.dumps(archs)}")
    return "\n".join(lines) + "\n"


def init(export: Export) -> str:
    """The `__init__.py` of the package: the solution's description, and its `run`."""
    module = f".{PACKAGE}.{export.module}"
    return f'{export.content["description"]!r}\n\nfrom {module} import run\n\n__all__ = ["run"]\n'


def card(export: Export) -> str:
    needs = " ".join(f"'{name}'" for name in export.content["spec"]["dependencies"])
    return f"""\
---
library_name: kernels
license: {LICENSE.lower()}
---

# {kernel_name(export)}

{export.content["description"]}

`run(...)` takes the inputs of flashinfer-bench's definition `{export.content["definition"]}` in its
order, then the output to write. It was measured with, and needs: `pip install {needs}`.

```python
from kernels import get_kernel

run = get_kernel("ORG/{kernel_name(export)}", version=1, trust_remote_code=True).run
```
"""


def kernels_files(export: Export) -> dict[str, str]:
    """The repository. Raises PackError."""
    below = f"torch-ext/{kernel_name(export).replace('-', '_')}"
    return {
        "build.toml": build_toml(export),
        "flake.nix": FLAKE,
        "CARD.md": card(export),
        f"{below}/__init__.py": init(export),
        **{f"{below}/{PACKAGE}/{path}": text for path, text in export.package.items()},
    }
