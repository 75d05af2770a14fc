"""The files that a file of the package may import: a kernel's sources, and those of a packed
solution.

The digest of a compiled kernel covers this closure, and a packed solution contains it. So an edit
changes exactly the kernels and the solutions that import the file.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "moe_fp8"


class ClosureError(ValueError):
    """An import that would fail in a self-contained bundle of the sources."""


def import_closure(root: Path, *entries: Path) -> list[Path]:
    """Return all files under `root` that importing the entries may import, sorted by path.

    Parses the files and imports nothing. Imports inside functions count, and so do the
    `__init__.py` files of the packages. Imports of other packages are skipped, and those below `if
    TYPE_CHECKING`. `root` is the directory of the top-level package, whatever its import name.

    Raises:
        ClosureError: an import leaves `root`, names no file there, or reaches the package by its
            absolute name (a bundle has another name); or a directory has no `__init__.py`.
    """
    root = root.resolve()
    pending = [entry.resolve() for entry in entries]
    closure: set[Path] = set()
    while pending:
        path = pending.pop()
        if path in closure:
            continue
        if not path.is_relative_to(root):
            raise ClosureError(f"{path} is not under {root}")
        closure.add(path)
        pending.extend(_package_inits(path, root))
        nodes: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"), filename=str(path))]
        for node in nodes:
            if not _is_for_type_checkers(node):
                pending.extend(_imported_files(node, path, root))
                nodes.extend(ast.iter_child_nodes(node))
    return sorted(closure, key=lambda path: path.relative_to(root).as_posix())


def _is_for_type_checkers(node: ast.AST) -> bool:
    """Return True for `if TYPE_CHECKING:` without an else."""
    name = node.test if isinstance(node, ast.If) and not node.orelse else None
    return isinstance(name, ast.Name) and name.id == "TYPE_CHECKING"


def _package_inits(path: Path, root: Path) -> Iterator[Path]:
    """Yield the `__init__.py` of each package around `path`, up to and including `root`."""
    directory = path.parent
    while directory.is_relative_to(root):
        init = directory / "__init__.py"
        if not init.is_file():
            raise ClosureError(f"{directory} has no __init__.py, which {path.name} needs")
        yield init
        directory = directory.parent


def _imported_files(node: ast.AST, path: Path, root: Path) -> Iterator[Path]:
    """Yield the files that a statement of the file `path` imports from `root`. Raises ClosureError
    also for a call that imports from this package by name."""

    def error(why: str) -> ClosureError:
        where = f"{path.relative_to(root).as_posix()}:{getattr(node, 'lineno', 0)}"
        return ClosureError(f"{where}: {why}")

    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.split(".")[0] == PACKAGE:
                raise error(f"'import {alias.name}' is absolute; use a relative import")
    elif isinstance(node, ast.ImportFrom) and node.level == 0:
        if (node.module or "").split(".")[0] == PACKAGE:
            raise error(f"'from {node.module} import ...' is absolute; use a relative import")
    elif isinstance(node, ast.ImportFrom):
        base = path.parent
        for _ in range(node.level - 1):
            base = base.parent
        if not base.is_relative_to(root):
            raise error(f"relative import of level {node.level} leaves the package")
        target = base.joinpath(*(node.module or "").split(".")) if node.module else base
        source = _module_file(target)
        if source is None:
            raise error(f"'{'.' * node.level}{node.module or ''}' is no module of the package")
        yield source
        if source.name == "__init__.py":
            # A name without a file is defined in the `__init__.py`.
            yield from filter(None, (_module_file(target / alias.name) for alias in node.names))
    elif isinstance(node, ast.Call):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        called = node.func.id if isinstance(node.func, ast.Name) else called
        if called in ("import_module", "__import__") and node.args:
            name = node.args[0]
            text = name.value if isinstance(name, ast.Constant) else None
            if isinstance(text, str) and (text.startswith(".") or text.split(".")[0] == PACKAGE):
                raise error(f"{called}({text!r}) cannot be followed; use an import statement")


def _module_file(target: Path) -> Path | None:
    """Return the file of a module, given its path without suffix."""
    for candidate in (target / "__init__.py", target.with_name(target.name + ".py")):
        if candidate.is_file():
            return candidate
    return None
