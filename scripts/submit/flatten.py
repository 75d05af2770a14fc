"""A package with folders as one folder: the modules renamed, their relative imports with them.

`layer/fused.py` becomes `layer_fused.py`. Only two kinds of expression change, found in the syntax
tree and replaced in the text, so that all else stays as it was written: relative imports, and
`Path(__file__).resolve().parents[N]` where it means the package's own folder. What cannot be told
to mean the same in one folder is refused.
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

INIT = "__init__"
FILES = ("Path(__file__)", "Path(__file__).resolve()")
PARENTS = f"{FILES[1]}.parents"
Parts = tuple[str, ...]
"""A module below the package: ("layer", "fused"); () is the package itself."""


class FlattenError(ValueError):
    """A package that would not mean the same in one folder, with the file and the reason."""


def flatten(sources: Mapping[str, str], reserved: str) -> dict[str, str]:
    """The package of these sources (by path below its folder) in one folder.

    `reserved` is a file name that none may get. The package's own `__init__.py` keeps its name;
    those of inner folders must hold a docstring alone, and are left out.

    Raises:
        FlattenError: two files would get one name, an inner `__init__.py` has code, an import names
            no module or a package, or code depends on where its file lies.
    """
    modules = {_parts(path): path for path in sources}
    flat: dict[str, str] = {}
    for parts, path in modules.items():
        tree = ast.parse(sources[path], filename=path)
        if path.endswith(f"/{INIT}.py"):
            if len(tree.body) != 1 or ast.get_docstring(tree) is None:
                raise FlattenError(f"{path}: has code, which no file of a single folder would run")
            continue
        name = f"{flat_name(parts) or INIT}.py"
        if name in flat or name == reserved:
            raise FlattenError(f"{path}: another file is called {name}, too")
        flat[name] = _Module(path, parts, modules, sources[path], tree).rewritten()
    return flat


def flat_name(parts: Parts) -> str:
    """The module's name in the one folder."""
    return "_".join(parts)


def _parts(path: str) -> Parts:
    parts = tuple(path.removesuffix(".py").split("/"))
    return parts[:-1] if parts[-1] == INIT else parts


Node = ast.ImportFrom | ast.Constant


@dataclass(frozen=True)
class _Module:
    path: str
    parts: Parts
    modules: Mapping[Parts, str]
    """All modules of the package, with their paths."""
    source: str
    tree: ast.Module

    def fail(self, node: ast.expr | ast.stmt, why: str) -> FlattenError:
        return FlattenError(f"{self.path}:{node.lineno}: {why}")

    def rewritten(self) -> str:
        lines = [line.encode() for line in self.source.splitlines(keepends=True)]
        changes = [*self._imports(), *self._places()]
        # From the end, so that what is before stays where it is. Offsets are in bytes.
        for node, text in sorted(changes, key=lambda c: (c[0].lineno, c[0].col_offset))[::-1]:
            assert node.end_lineno is not None and node.end_col_offset is not None
            first, last = node.lineno - 1, node.end_lineno - 1
            before, after = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
            lines[first : last + 1] = [before + text.encode() + after]
        return b"".join(lines).decode()

    def _imports(self) -> Iterator[tuple[Node, str]]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and node.level:
                statements = self._flat_imports(node)
                yield node, "; ".join(ast.unparse(statement) for statement in statements)

    def _flat_imports(self, node: ast.ImportFrom) -> list[ast.ImportFrom]:
        """The statements that import the same in one folder."""
        around = self.parts if self._is_package(self.parts) else self.parts[:-1]
        if node.level - 1 > len(around):
            raise self.fail(node, "the import leaves the package")
        base = around[: len(around) - (node.level - 1)]
        target = (*base, *(node.module.split(".") if node.module else ()))
        if target not in self.modules:
            raise self.fail(node, f"{'.'.join(target)} is no module of the package")
        if not self._is_package(target):
            return [ast.ImportFrom(flat_name(target), node.names, 1)]
        inner, own = [], []
        for alias in node.names:
            module = (*target, alias.name)
            if module not in self.modules:
                own.append(alias)
            elif self._is_package(module):
                raise self.fail(node, f"{'.'.join(module)} is a package, which one folder has not")
            else:
                inner.append(ast.alias(flat_name(module), alias.asname or alias.name))
        if own and target:
            raise self.fail(node, f"{own[0].name} is no module of {'.'.join(target)}")
        return [ast.ImportFrom(None, names, 1) for names in (own, inner) if names]

    def _is_package(self, parts: Parts) -> bool:
        return parts in self.modules and self.modules[parts].endswith(f"{INIT}.py")

    def _places(self) -> Iterator[tuple[Node, str]]:
        """Uses of `__file__`: the file itself stays one; its package's folder is the one folder."""
        known = set[ast.AST]()
        for outer in ast.walk(self.tree):
            for node in ast.iter_child_nodes(outer):
                handed_on = isinstance(outer, ast.Call) and node in outer.args
                if handed_on and ast.unparse(node) in FILES:
                    known.update(ast.walk(node))
                if (
                    isinstance(node, ast.Subscript)
                    and isinstance(node.slice, ast.Constant)
                    and ast.unparse(node.value) == PARENTS
                    and not isinstance(outer, ast.Attribute | ast.BinOp)
                ):
                    if node.slice.value != len(self.parts) - 1:
                        place = f"parents[{node.slice.value!r}]"
                        raise self.fail(node, f"{place} is not the package's folder")
                    known.update(ast.walk(node))
                    yield node.slice, "0"
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Name) and node not in known:
                if node.id in ("__path__", "__package__", "__spec__"):
                    raise self.fail(node, f"{node.id} is another in one folder")
                if node.id == "__file__":
                    raise self.fail(node, "__file__ may mean another place in one folder")
