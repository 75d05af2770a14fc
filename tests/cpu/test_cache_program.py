"""`run.py cache` lists and clears the compiled kernels."""

import sys

import pytest
from moe_fp8.kernels.cache import CACHE_VARIABLE, KernelCache

from scripts.common.command_line import UsageError
from scripts.pack import cache


@pytest.fixture
def program(monkeypatch, tmp_path, capsys):
    """Runs the program on a directory with two kernels; what it prints."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    kept = KernelCache(tmp_path, lambda path: path, lambda function, path: path.write_text("code"))
    for name in ("Gemm", "Combine"):
        kept.get({"kernel": name, "parameters": f"({name.lower()} of 7168,)"}, lambda: "built")

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["cache.py", *arguments])
        assert cache.main() == 0
        return capsys.readouterr().out

    return run


def test_lists_and_clears(program, tmp_path) -> None:
    said = program()
    assert "Gemm" in said and "(combine of 7168,)" in said
    assert f"{tmp_path}: 2 kernels, 0.0 MiB (256 MiB at most)" in said
    assert "removed 2 kernels" in program("--clear")
    assert "0 kernels" in program()
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_a_cache_that_is_switched_off_is_said(program, monkeypatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, "")
    with pytest.raises(UsageError, match=f"{CACHE_VARIABLE} is empty"):
        program()
