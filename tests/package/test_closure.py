"""The import closure: complete, minimal, and loud about what a bundle could not resolve."""

from pathlib import Path

import pytest
from moe_fp8.closure import ClosureError, import_closure


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package with a chain of imports and a module that nothing imports."""
    root = tmp_path / "pkg"
    for name, text in {
        "__init__.py": '"""Root."""',
        "core/__init__.py": '"""Core."""\nNAME = 1\n',
        "core/a.py": "from . import b\n",
        "core/b.py": "def f():\n    from ..parts.late import g\n    return g\n",
        "core/unused.py": "",
        "parts/__init__.py": '"""Parts."""',
        "parts/late.py": "import os\nimport torch.nn\n",
        "entry.py": "from .core import NAME\nfrom .core.a import b\n",
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def names(root: Path, entry: str = "entry.py") -> list[str]:
    return [p.relative_to(root).as_posix() for p in import_closure(root, root / entry)]


CORE = ["__init__.py", "core/__init__.py"]
LATE = ["parts/__init__.py", "parts/late.py"]


def test_follows_every_relative_import_and_nothing_else(package: Path) -> None:
    assert names(package) == [*CORE, "core/a.py", "core/b.py", "entry.py", *LATE]
    assert names(package, "core/unused.py") == [*CORE, "core/unused.py"]


def test_imports_for_type_checkers_are_left_out(package: Path) -> None:
    guarded = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .core import unused\n"
    (package / "entry.py").write_text(guarded + "from .parts import late\n")
    assert names(package) == ["__init__.py", "entry.py", *LATE]
    (package / "entry.py").write_text(guarded + "else:\n    from .parts import late\n")
    assert "parts/late.py" in names(package)


def test_cycles_end(package: Path) -> None:
    (package / "core" / "b.py").write_text("from . import a\n")
    assert names(package, "core/b.py") == [*CORE, "core/a.py", "core/b.py"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import moe_fp8.core\n", "absolute"),
        ("from moe_fp8.core import x\n", "absolute"),
        ("def f():\n    import moe_fp8\n", r"entry\.py:2.*absolute"),
        ("from .. import x\n", "leaves the package"),
        ("from .absent import x\n", "no module"),
        ("import importlib\nimportlib.import_module('.core', __package__)\n", "import statement"),
    ],
)
def test_refuses_what_a_bundle_cannot_resolve(package: Path, source: str, message: str) -> None:
    (package / "entry.py").write_text(source)
    with pytest.raises(ClosureError, match=message):
        import_closure(package, package / "entry.py")


def test_a_directory_without_init_is_refused(package: Path) -> None:
    (package / "core" / "__init__.py").unlink()
    with pytest.raises(ClosureError, match="__init__"):
        import_closure(package, package / "core" / "a.py")
