"""Pack each generation into one self-contained flashinfer-bench Solution JSON.

A generation is a file of solutions/moe_fp8 with a literal SOLUTION at its top level. Its packed
form is solutions/<author>/<op_type>/<definition>/<name>.json: the closure of its relative imports
and an entry file that loads them, the same bytes on every machine. A SOLUTION with "routings" or
"rows" is packed for further definitions, too: docs/adding-a-solution.md.
"""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

from scripts.common import sources
from scripts.common.definitions import DEFAULT, Entry, find
from scripts.common.program import (
    EXIT_OK,
    PACKAGE_DIR,
    PACKED_DIR,
    ROOT,
    UsageError,
    parser,
    run_main,
    write_file,
)

__path__ = [str(Path(__file__).with_suffix(""))]  # of the moved modules, until the merge


def validate(packed: bytes, definition: Path = ROOT / DEFAULT.path) -> None:
    """Load the JSON as flashinfer-bench does and build it for the definition in that file, which
    imports its entry point. It is built in a directory of its own: cleaning up the shared one could
    remove the sources of a benchmark that runs at the same time."""
    from flashinfer_bench.compile import BuilderRegistry
    from flashinfer_bench.compile.builder import BuildError
    from flashinfer_bench.compile.builders import PythonBuilder, TritonBuilder
    from flashinfer_bench.data import Definition, Solution, load_json_file

    solution = Solution.model_validate_json(packed)
    registry = BuilderRegistry([b() for b in (TritonBuilder, PythonBuilder) if b.is_available()])
    with (
        tempfile.TemporaryDirectory(prefix="pack-") as directory,
        mock.patch.dict(os.environ, FIB_CACHE_PATH=directory),
    ):
        try:
            registry.build(load_json_file(Definition, definition), solution)
        except BuildError as error:
            raise sources.PackError(f"{solution.name}: {error}") from error
        finally:
            registry.cleanup()


def is_ours(path: Path) -> bool:
    """True if the file is a solution that was packed under its name."""
    return f"The solution {path.stem}: `run` of ".encode() in path.read_bytes()


def write_packed(
    names: Sequence[str] = (),
    output: Path | None = None,
    root: Path = PACKAGE_DIR,
    build: bool = True,
    definition: Entry = DEFAULT,
) -> list[Path]:
    """Pack the named generations (all by default) into `output`. Return the paths of their JSON
    files.

    The default output is where flashinfer-bench looks for them. Packing all removes packed files of
    generations that no longer exist, which flashinfer-bench would otherwise still run. Up-to-date
    files are left alone. Files that were not packed are kept, except empty ones, which a crash
    leaves.

    Raises:
        PackError: a generation cannot be packed.
        UsageError: no generation has a name, or another file has a solution's path.
        OSError: the output cannot be written.
    """
    every = sources.every_generation(root)
    packed: dict[Path, bytes] = {}
    for g in sources.select([g for g in every if g.definition == definition], names):
        below = PACKED_DIR / g.metadata["author"] / definition.op_type / definition.name
        path = (output or below) / f"{g.name}.json"
        if path.is_file() and path.stat().st_size and not is_ours(path):
            other = ", or name another --output" if output else ""
            raise UsageError(f"{path} is no solution of ours: move it{other}")
        packed[path] = sources.pack(g)
    for path, content in packed.items():
        if not path.is_file() or path.read_bytes() != content:
            if build:
                validate(content, ROOT / definition.path)
            write_file(path, content)
    known = {g.name for g in every}
    for folder in {path.parent for path in packed} if not names else ():
        for path in folder.glob("*.json"):
            if path.stem not in known and is_ours(path):
                path.unlink()
    return list(packed)


def main(argv: list[str] | None = None) -> int:
    arguments = parser(__doc__)
    add = arguments.add_argument
    add("names", nargs="*", help="solutions (or their files) to pack; all")
    add("--definition", type=find, default=DEFAULT, metavar="NAME", help="another definition")
    add("--output", type=Path, metavar="DIR", help="directory of the JSON files")
    add("--list", action="store_true", help="only list the generations")
    args = arguments.parse_args(argv)
    if args.list:
        for generation in sources.generations(definition=args.definition):
            print(f"{generation.name}  {generation.path.name}")
    else:
        for path in write_packed(args.names, args.output, definition=args.definition):
            print(f"{path}  {path.stat().st_size / 1024:.0f} KiB")
    return EXIT_OK


if __name__ == "__main__":
    run_main(main)
