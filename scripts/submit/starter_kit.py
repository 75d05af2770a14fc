"""The layout of the flashinfer-bench starter kit: config.toml and one folder of sources.

The kit's scripts/pack_solution.py reads config.toml, takes the source files of the one folder that
belongs to the language (not of folders below it), and makes a Solution of them through
flashinfer-bench's pack_solution_from_files. It knows the languages triton and cuda, and
flashinfer-bench builds triton as it builds python.
"""

import json
from pathlib import Path

from scripts.pack.pack import PackError, entry_file, validate
from scripts.submit.export import Export
from scripts.submit.flatten import FlattenError, flat_name, flatten

LANGUAGE = "triton"
ENTRY_FILE = "kernel.py"
ENTRY_POINT = f"{ENTRY_FILE}::run"
FOLDER = f"solution/{LANGUAGE}"


def files(export: Export) -> dict[str, str]:
    """The files to put into a copy of the kit. Raises PackError."""
    try:
        flat = flatten(export.package, reserved=ENTRY_FILE)
    except FlattenError as error:
        raise PackError(f"{export.name}: {error}") from None
    module = flat_name(tuple(export.module.split(".")))
    flat[ENTRY_FILE] = entry_file(export.name, where=f"{module}.py", module=module)
    # A basic string of TOML is one of JSON.
    text = {key: json.dumps(export.content[key]) for key in ("name", "definition", "author")}
    config = (
        "[solution]\n"
        + "".join(f"{key} = {value}\n" for key, value in text.items())
        + f'\n[build]\nlanguage = "{LANGUAGE}"\nentry_point = "{ENTRY_POINT}"\n'
        + "destination_passing_style = true\n"
    )
    return {"config.toml": config, **{f"{FOLDER}/{n}": flat[n] for n in sorted(flat)}}


def check(root: Path, export: Export) -> None:
    """Pack the folder as the kit does and build what comes of it. Raises PackError."""
    from flashinfer_bench.agents import pack_solution_from_files
    from flashinfer_bench.data import BuildSpec

    made = {Path(name).name for name in files(export) if name.startswith(FOLDER)}
    solution = pack_solution_from_files(
        path=str(root / FOLDER),
        spec=BuildSpec(
            language="python",  # type: ignore[arg-type] # the same builder, without Triton
            target_hardware=["cuda"],
            entry_point=ENTRY_POINT,
        ),
        name=export.name,
        definition=export.content["definition"],
        author=export.content["author"],
    )
    if {source.path for source in solution.sources} != made:
        raise PackError(f"{export.name}: the kit's packer would not take all files")
    validate(solution.model_dump_json().encode())
