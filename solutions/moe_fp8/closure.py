"""The source files that a module of this package needs: the closure of its relative imports.

The files are parsed, nothing is imported. What packs a solution and what keys the kernel cache both
ask here, so that editing a part changes exactly the solutions that import it.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "moe_fp8"


class ClosureError(ValueError):
    """An import that a self-contained bundle of the sources could not resolve."""


def import_closure(entry: Path, root: Path) -> list[Path]:
    """All files under `root` that importing `entry` may import, sorted by path relative to `root`.

    Imports inside functions count, and so do the `__init__.py` files on the way. `root` is the
    directory of the top-level package, under whatever name it is imported.

    Raises:
        ClosureError: for an import that leaves `root`, names no file there, or reaches the package
            by its absolute name (a bundle is imported under another one).
    """
    root = root.resolve()
    pending = [entry.resolve()]
    closure: set[Path] = set()
    while pending:
        path = pending.pop()
        if path in closure:
            continue
        if not path.is_relative_to(root):
            raise ClosureError(f"{path} is not under {root}")
        closure.add(path)
        pending.extend(_package_inits(path, root))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
            pending.extend(_imported_files(node, path, root))
    return sorted(closure, key=lambda path: path.relative_to(root).as_posix())


def _package_inits(path: Path, root: Path) -> Iterator[Path]:
    """The `__init__.py` of each package around `path`, up to and including `root`."""
    directory = path.parent
    while directory.is_relative_to(root):
        init = directory / "__init__.py"
        if not init.is_file():
            raise ClosureError(f"{directory} has no __init__.py, which {path.name} needs")
        yield init
        directory = directory.parent


def _imported_files(node: ast.AST, path: Path, root: Path) -> Iterator[Path]:
    """The files that the statement or call `node` of the file `path` imports from `root`."""

    def fail(why: str) -> ClosureError:
        where = f"{path.relative_to(root).as_posix()}:{getattr(node, 'lineno', 0)}"
        return ClosureError(f"{where}: {why}")

    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.split(".")[0] == PACKAGE:
                raise fail(f"'import {alias.name}' is absolute; use a relative import")
    elif isinstance(node, ast.ImportFrom) and node.level == 0:
        if (node.module or "").split(".")[0] == PACKAGE:
            raise fail(f"'from {node.module} import ...' is absolute; use a relative import")
    elif isinstance(node, ast.ImportFrom):
        base = path.parent
        for _ in range(node.level - 1):
            base = base.parent
        if not base.is_relative_to(root):
            raise fail(f"relative import of level {node.level} leaves the package")
        target = base.joinpath(*(node.module or "").split(".")) if node.module else base
        source = _module_file(target)
        if source is None:
            raise fail(f"'{'.' * node.level}{node.module or ''}' is no module of the package")
        yield source
        if source.name == "__init__.py":
            # What is no module is a name of the package itself.
            yield from filter(None, (_module_file(target / alias.name) for alias in node.names))
    elif isinstance(node, ast.Call):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        called = node.func.id if isinstance(node.func, ast.Name) else called
        if called in ("import_module", "__import__") and node.args:
            name = node.args[0]
            text = name.value if isinstance(name, ast.Constant) else None
            if isinstance(text, str) and (text.startswith(".") or text.split(".")[0] == PACKAGE):
                raise fail(f"{called}({text!r}) cannot be followed; use an import statement")


def _module_file(target: Path) -> Path | None:
    """The file behind the dotted name whose path without suffix is `target`."""
    for candidate in (target / "__init__.py", target.with_name(target.name + ".py")):
        if candidate.is_file():
            return candidate
    return None
