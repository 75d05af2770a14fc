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


@pytest.mark.parametrize("content", ["", "{", "[1]", '"text"', "null", "\udcff"])
def test_an_entry_whose_description_is_damaged_is_listed_by_its_name(
    content: str, program, tmp_path
) -> None:
    (damaged,) = tmp_path.glob("Gemm-*")
    (damaged / "made_of.json").write_text(content, errors="surrogateescape")
    said = program()
    assert f"{damaged.name} ?" in said and "(combine of 7168,)" in said
    assert "removed 2 kernels" in program("--clear")


def test_without_a_cache_it_is_a_usage_error(program, monkeypatch, capsys) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, "")
    with pytest.raises(SystemExit, match="2"):
        program("--clear")
    assert f"{CACHE_VARIABLE} is empty" in capsys.readouterr().err
