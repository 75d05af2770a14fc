"""A package with folders as one folder: the modules renamed, their relative imports with them.

`layer/fused.py` becomes `layer_fused.py`. Only two kinds of expression change, so that all else
stays as it was written: relative imports, and `Path(__file__).resolve().parents[N]` where it means
the package's own folder. What cannot be told to mean the same in one folder is refused. That every
import names a module of the package was found when the solution was packed.
"""

import ast
import re
from collections.abc import Iterator, Mapping

INIT = "__init__"
Parts = tuple[str, ...]
"""A module below the package: ("layer", "fused"); () is the package itself."""
PLACE = re.compile(r"Path\(__file__\)\.resolve\(\)\.parents\[(\d+)\](?!\.| */)")
OWN_FILE = re.compile(r"Path\(__file__\)(?=[,)])")


class FlattenError(ValueError):
    """A package that would not mean the same in one folder, with the file and the reason."""


def flatten(sources: Mapping[str, str], reserved: str) -> dict[str, str]:
    """The package of these sources (by path below its folder) in one folder.

    `reserved` is a file name that none may get. The package's own `__init__.py` keeps its name;
    those of inner folders must hold a docstring alone, and are left out.

    Raises:
        FlattenError: two files would get one name, an inner `__init__.py` has code, a package is
            imported as a module, or code depends on where its file lies.
    """
    modules = {_parts(path) for path in sources}
    packages = {_parts(path) for path in sources if path.endswith(f"{INIT}.py")}
    flat: dict[str, str] = {}
    for path, source in sources.items():
        parts, tree = _parts(path), ast.parse(source, filename=path)
        if path.endswith(f"/{INIT}.py"):
            if len(tree.body) != 1 or ast.get_docstring(tree) is None:
                raise FlattenError(f"{path}: has code, which no file of a single folder would run")
            continue
        name = f"{flat_name(parts) or INIT}.py"
        if name in flat or name == reserved:
            raise FlattenError(f"{path}: another file is called {name}, too")
        _check_places(path, parts, source, tree)
        around = parts[:-1]  # the folder's package, of which `__init__.py` is a part
        lines = [line.encode() for line in source.splitlines(keepends=True)]
        imports = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.level]
        # From the end, so that what is before stays where it is. Offsets are in bytes.
        for node in sorted(imports, key=lambda n: (n.lineno, n.col_offset))[::-1]:
            assert node.end_lineno is not None and node.end_col_offset is not None
            base = around[: len(around) - (node.level - 1)]
            target = (*base, *(node.module.split(".") if node.module else ()))
            try:
                made = [ast.unparse(n) for n in _flat_imports(node, target, modules, packages)]
            except FlattenError as error:
                raise FlattenError(f"{path}:{node.lineno}: {error}") from None
            first, last = node.lineno - 1, node.end_lineno - 1
            before, after = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
            lines[first : last + 1] = [before + "; ".join(made).encode() + after]
        flat[name] = PLACE.sub("Path(__file__).resolve().parents[0]", b"".join(lines).decode())
    return flat


def flat_name(parts: Parts) -> str:
    """The module's name in the one folder."""
    return "_".join(parts)


def _parts(path: str) -> Parts:
    parts = tuple(path.removesuffix(".py").split("/"))
    return parts[:-1] if parts[-1] == INIT else parts


def _flat_imports(
    node: ast.ImportFrom, target: Parts, modules: set[Parts], packages: set[Parts]
) -> Iterator[ast.ImportFrom]:
    """The statements that import from `target` the same in one folder."""
    if target not in packages:
        yield ast.ImportFrom(flat_name(target), node.names, 1)
        return
    inner, own = [], []
    for alias in node.names:
        module = (*target, alias.name)
        if module in packages:
            raise FlattenError(f"{'.'.join(module)} is a package, which one folder has not")
        if module in modules:
            inner.append(ast.alias(flat_name(module), alias.asname or alias.name))
        else:
            own.append(alias)
    yield from (ast.ImportFrom(None, names, 1) for names in (own, inner) if names)


def _check_places(path: str, parts: Parts, source: str, tree: ast.Module) -> None:
    """Refuse what depends on where the file lies, but the package's folder and the file itself."""
    names = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
    for name in ("__path__", "__package__", "__spec__"):
        if name in names:
            raise FlattenError(f"{path}: {name} is another in one folder")
    places = PLACE.findall(source)
    if any(int(level) != len(parts) - 1 for level in places):
        raise FlattenError(f"{path}: parents[{places[0]}] is not the package's folder")
    if names.count("__file__") != len(places) + len(OWN_FILE.findall(source)):
        raise FlattenError(f"{path}: __file__ may mean another place in one folder")
