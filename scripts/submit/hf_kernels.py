"""A package for Hugging Face's `kernels`: the source of a kernel without compiled parts.

The layout is kernel-builder's: build.toml (edition 5, `torch-noarch`), flake.nix, a card, and the
Python package in torch-ext/<name>/. It exports `run`; its imports are relative, as kernels wants,
so that several versions can be loaded in one process.
"""

import ast
import json
import re

from moe_fp8.closure import PACKAGE

from scripts.pack.availability import capability_of
from scripts.pack.pack import PackError
from scripts.submit.export import Export
from scripts.submit.packages import translated

NAME = re.compile(r"[a-z][-a-z0-9]*[a-z0-9]")
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
    if not NAME.fullmatch(name):
        raise PackError(f"{export.name}: kernels allows small letters, digits and dashes only")
    return name


def build_toml(export: Export) -> str:
    """Raises PackError for a dependency that kernels does not allow."""
    depends = [d for d in translated(export, DEPENDENCIES, "the list of kernels") if all(d)]
    general, cuda = ([name for where, name in depends if where == t] for t in (GENERAL, CUDA))
    capabilities = [capability_of(name) for name in export.content["spec"]["target_hardware"]]
    archs = sorted({f"{c[0]}.{c[1]}" for c in capabilities if c is not None})
    # Strings and lists of strings are the same in JSON and in TOML.
    lines = [
        f"[{GENERAL}]",
        f"name = {json.dumps(kernel_name(export))}",
        "version = 1",
        "edition = 5",
        f"license = {json.dumps(LICENSE)}",
        'backends = ["cuda"]',
    ]
    if general:
        lines.append(f"python-depends = {json.dumps(general)}")
    if cuda:
        lines += ["", f"[{CUDA}]", f"python-depends = {json.dumps(cuda)}"]
    lines += ["", "[torch-noarch]"]
    if archs and None not in capabilities:
        # With an underscore: kernels 0.17.2 refuses the dash that its page of build.toml shows.
        lines.append(f"cuda_capabilities = {json.dumps(archs)}")
    return "\n".join(lines) + "\n"


def init(export: Export) -> str:
    """The `__init__.py` of the package: the solution's description, and its `run`."""
    body: list[ast.stmt] = [
        ast.Expr(ast.Constant(export.content["description"])),
        ast.ImportFrom(f"{PACKAGE}.{export.module}", [ast.alias("run")], 1),
        ast.Assign([ast.Name("__all__")], ast.List([ast.Constant("run")])),
    ]
    return ast.unparse(ast.fix_missing_locations(ast.Module(body, []))) + "\n"


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


def files(export: Export) -> dict[str, str]:
    """The repository. Raises PackError."""
    below = f"torch-ext/{kernel_name(export).replace('-', '_')}"
    return {
        "build.toml": build_toml(export),
        "flake.nix": FLAKE,
        "CARD.md": card(export),
        f"{below}/__init__.py": init(export),
        **{f"{below}/{PACKAGE}/{path}": text for path, text in export.package.items()},
    }
