"""`python -m moe_fp8.cache` lists and clears the compiled kernels."""

import pytest
from moe_fp8 import cache
from moe_fp8.kernels.cache import CACHE_VARIABLE, KernelCache


@pytest.fixture
def program(monkeypatch, tmp_path, capsys):
    """Runs the program on a directory with two kernels; what it prints."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    kept = KernelCache(tmp_path, lambda path: path, lambda function, path: path.write_text("code"))
    for name in ("Gemm", "Combine"):
        kept.get({"kernel": name, "parameters": f"({name.lower()} of 7168,)"}, lambda: "built")

    def run(*arguments: str) -> str:
        assert cache.main(arguments) == 0
        return capsys.readouterr().out

    return run


def test_lists_and_clears(program, tmp_path) -> None:
    said = program()
    assert "Gemm" in said and "(combine of 7168,)" in said
    assert f"{tmp_path}: 2 kernels, 0.0 MiB (256 MiB at most)" in said
    assert "removed 2 kernels" in program("--clear")
    assert "0 kernels" in program()
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


@pytest.mark.parametrize("foreign", [False, True])
def test_what_is_no_cache_is_a_usage_error(
    program, monkeypatch, tmp_path, capsys, foreign: bool
) -> None:
    directory = tmp_path / "foreign" if foreign else ""
    if foreign:
        directory.mkdir()
        (directory / "file").touch()
    monkeypatch.setenv(CACHE_VARIABLE, str(directory))
    with pytest.raises(SystemExit, match="2"):
        program("--clear")
    said = "is no cache of kernels" if foreign else f"{CACHE_VARIABLE} is empty"
    assert said in capsys.readouterr().err
