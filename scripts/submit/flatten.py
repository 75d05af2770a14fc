"""A package with folders as one folder: the modules renamed, their relative imports with them.

`layer/fused.py` becomes `layer_fused.py`. Only two kinds of expression change, so that all else
stays as it was written: relative imports, and `Path(__file__).resolve().parents[N]`, which means
the package's own folder. The tests look for what would mean something else in one folder.
"""

import ast
import re
from collections.abc import Collection, Mapping

INIT = "__init__"
Parts = tuple[str, ...]
"""A module below the package: ("layer", "fused"); () is the package itself."""
PLACE = re.compile(r"(Path\(__file__\)\.resolve\(\)\.parents)\[\d+\]")


def flatten(sources: Mapping[str, str]) -> dict[str, str]:
    """The package of these sources (by path below its folder) in one folder. The package's own
    `__init__.py` keeps its name; those of inner folders hold a docstring alone, and are left out.
    """
    modules = {_parts(path) for path in sources}
    packages = {_parts(path) for path in sources if path.endswith(f"{INIT}.py")}
    flat: dict[str, str] = {}
    for path, source in sources.items():
        if path.endswith(f"/{INIT}.py"):
            continue
        parts = _parts(path)
        lines = [line.encode() for line in source.splitlines(keepends=True)]
        imports = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ImportFrom)]
        # From the end, so that what is before stays where it is. Offsets are in bytes.
        for node in sorted(imports, key=lambda n: (n.lineno, n.col_offset))[::-1]:
            if not node.level:
                continue
            assert node.end_lineno is not None and node.end_col_offset is not None
            base = parts[: len(parts) - node.level]  # the first level is the module's own folder
            target = (*base, *(node.module.split(".") if node.module else ()))
            made = "; ".join(map(ast.unparse, _flat_imports(node.names, target, modules, packages)))
            first, last = node.lineno - 1, node.end_lineno - 1
            before, after = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
            lines[first : last + 1] = [before + made.encode() + after]
        flat[f"{flat_name(parts) or INIT}.py"] = PLACE.sub(r"\1[0]", b"".join(lines).decode())
    return flat


def flat_name(parts: Parts) -> str:
    """The module's name in the one folder."""
    return "_".join(parts)


def _parts(path: str) -> Parts:
    parts = tuple(path.removesuffix(".py").split("/"))
    return parts[:-1] if parts[-1] == INIT else parts


def _flat_imports(
    names: list[ast.alias], target: Parts, modules: Collection[Parts], packages: Collection[Parts]
) -> list[ast.ImportFrom]:
    """The statements that import these names of `target` in one folder."""
    if target not in packages:
        return [ast.ImportFrom(flat_name(target), names, 1)]
    own = [alias for alias in names if (*target, alias.name) not in modules]
    inner = [
        ast.alias(flat_name((*target, alias.name)), alias.asname or alias.name)
        for alias in names
        if alias not in own
    ]
    return [ast.ImportFrom(None, found, 1) for found in (own, inner) if found]
