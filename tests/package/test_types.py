"""The types that a user's type checker sees."""

import os
import re
import subprocess
import sys
from pathlib import Path

import moe_fp8
import pytest

from scripts.common.program import ROOT

RIGHT = """
import moe_fp8
import torch
from moe_fp8 import experts, quantise_blocks


def layer(
    ids: torch.Tensor, weights: torch.Tensor, x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    return experts(ids, weights, x, *quantise_blocks(w13), *quantise_blocks(w2), accurate=True)


version: str = moe_fp8.__version__
"""
WRONG = {
    "moe_fp8.expert": 'Module has no attribute "expert"',
    "from moe_fp8 import Path": 'Module "moe_fp8" does not explicitly export attribute "Path"',
    "moe_fp8.prepare(experts, token=8).bit_length(1)": 'Too many arguments for "bit_length"',
    "experts(accurate=1.5)": 'Argument "accurate" to "experts" has incompatible type "float"',
}
"""Lines, and an error of each."""


def test_a_users_file_under_mypy_strict(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    reveals = [f"reveal_type(moe_fp8.{name})" for name in moe_fp8.__all__]
    lines = [*RIGHT.splitlines(), *reveals, *WRONG]
    (tmp_path / "user.py").write_text("\n".join(lines) + "\n")
    # As for an installed package, errors inside the package are not reported.
    options = ["--strict", "--follow-imports=silent", "--config-file=", "--no-error-summary"]
    cache = f"--cache-dir={ROOT / '.mypy_cache/user'}"
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, cache, "user.py"],
        cwd=tmp_path, capture_output=True, text=True,
        env=os.environ | {"MYPYPATH": str(ROOT / "solutions")},
    )  # fmt: skip
    types = re.findall(r'Revealed type is "(.*)"', done.stdout)
    assert len(types) == len(reveals) and all(t.startswith("def (") for t in types), done.stdout
    errors = re.findall(r"^user\.py:(\d+): error: (.*)$", done.stdout, re.M)
    assert {lines[int(number) - 1] for number, _ in errors} == {*WRONG}, done.stdout
    for line, message in WRONG.items():
        assert any(lines[int(n) - 1] == line and message in text for n, text in errors), line


def test_a_star_import_brings_the_public_names_alone() -> None:
    names: dict[str, object] = {}
    exec("from moe_fp8 import *", names)
    assert names.keys() - {"__builtins__"} == {*moe_fp8.__all__} == moe_fp8.PUBLIC.keys()
    assert {name for name in dir(moe_fp8) if name[0] != "_"} == {*moe_fp8.__all__}
