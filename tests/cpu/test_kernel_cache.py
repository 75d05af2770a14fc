"""Where the cache of compiled kernels may lie, and what it may remove there."""

import os
import pwd
import re
import sys
from pathlib import Path

import pytest
from moe_fp8 import cache as program
from moe_fp8.kernels import cache as kernel_cache
from moe_fp8.kernels.cache import CACHE_VARIABLE, TAG, TAG_TEXT, KernelCache, cache_dir

HEX = "0123456789abcdef" * 2


def kernels_in(directory: Path, load=Path.read_text) -> KernelCache:
    return KernelCache(directory, load, lambda function, path: path.write_text(function))


def put(root: Path, name: str, content: str = "the user's") -> None:
    """A file; its directory is as old as what the cache takes for abandoned."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    for directory in set(path.parents) - {root} - set(root.parents):
        os.utime(directory, (1000, 1000))


def tree(root: Path) -> dict[str, str]:
    return {str(p.relative_to(root)): p.read_text() for p in root.rglob("*") if p.is_file()}


def clear(directory: Path, monkeypatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(directory))
    monkeypatch.setattr(sys, "argv", ["cache.py", "--clear"])
    assert program.main() == 0


@pytest.mark.parametrize(
    "name",
    [
        ".git/HEAD",
        "results/sha256",
        f".Gemm-{HEX}/notes",  # like a draft, but for what mkdtemp adds
        f"Gemm-{HEX}.d/sha256",
        f"Gemm-{HEX[:-1]}/sha256",
        f"Gemm-{HEX.upper()}/sha256",
        "lock-file",
        TAG,
    ],
)
def test_a_directory_of_others_is_not_used(name, tmp_path, monkeypatch, capsys):
    """As `MOE_FP8_CACHE_DIR=$HOME`: nothing in it is changed, and nothing is added."""
    put(tmp_path, name)
    put(tmp_path, f"Gemm-{HEX}/sha256")  # the name alone is no proof
    before = tree(tmp_path)
    kept = kernels_in(tmp_path)
    why = f"{re.escape(str(tmp_path))} is no cache of kernels .it holds {Path(name).parts[0]}."
    with pytest.warns(RuntimeWarning, match=f"{why}: it is not used.*set {CACHE_VARIABLE}"):
        assert kept.get({"kernel": "Gemm"}, lambda: "built") == "built"
    assert kept.trim(0) == []
    with pytest.raises(SystemExit, match="2"):
        clear(tmp_path, monkeypatch)
    assert re.search(f"{why}: nothing is removed", capsys.readouterr().err)
    assert tree(tmp_path) == before


def test_what_others_put_into_the_cache_stays(tmp_path, monkeypatch):
    directory, outside = tmp_path / "kernels", tmp_path / "outside"
    kept = kernels_in(directory)
    kept.get({"kernel": "Gemm"}, lambda: "built")
    for name in (".git/HEAD", "results/sha256", f"Gemm-{HEX}.d/sha256", f".Gemm-{HEX}/HEAD"):
        put(directory, name)
    put(outside, "entry/sha256")
    put(outside, "draft/file")
    (directory / f"Gemm-{HEX}").symlink_to(outside / "entry")
    (directory / f".Gemm-{HEX}-abcdefgh").symlink_to(outside / "draft")
    before = tree(tmp_path)
    (entry,) = kept.entries()
    put(directory, f".Gemm-{HEX}-12345678/kernel.o")
    clear(directory, monkeypatch)
    assert kept.entries() == []
    assert tree(tmp_path) == {n: c for n, c in before.items() if entry.path.name not in n}
    assert len([*directory.iterdir()]) == 4 + 2 + 2, "theirs, the links, a lock and the tag"


@pytest.mark.parametrize("tag", [None, b"", TAG_TEXT[:40]], ids=["none", "empty", "half"])
def test_a_cache_without_a_whole_tag_gets_one(tag, tmp_path):
    """As every cache was before there was a tag, and as one is while another process writes it."""
    kept = kernels_in(tmp_path)
    kept.get({"kernel": "Gemm"}, lambda: "built")
    (tmp_path / TAG).unlink()
    if tag is not None:
        (tmp_path / TAG).write_bytes(tag)
    assert kept.get({"kernel": "Gemm"}, lambda: "never") == "built"
    assert (tmp_path / TAG).read_bytes() == TAG_TEXT
    # The specification's signature, which other programs look for.
    assert TAG_TEXT.startswith(b"Signature: 8a477f597d28d172789f06886806bc55\n")


def test_a_link_in_place_of_a_lock_makes_it_a_directory_of_others(tmp_path):
    """Opening a lock can empty what it names."""
    directory = tmp_path / "kernels"
    put(tmp_path, "file")
    kept = kernels_in(directory)
    kept.get({"kernel": "Gemm"}, lambda: "built")
    (lock,) = directory.glob("lock-*")
    for path in (lock, directory / TAG):
        path.unlink()
    lock.symlink_to(tmp_path / "file")
    with pytest.warns(RuntimeWarning, match=f"it holds {lock.name}"):
        assert kept.get({"kernel": "Gemm"}, lambda: "anew") == "anew"
    assert (tmp_path / "file").read_text() == "the user's"


@pytest.mark.parametrize("error", [RuntimeError, ValueError, OSError, AttributeError, MemoryError])
def test_what_cannot_be_loaded_is_built_anew(error, tmp_path):
    def refuse(path: Path) -> str:
        if path.read_text() == "of another machine":
            raise error("no such relocation")
        return path.read_text()

    made_of = {"kernel": "Gemm"}
    kept = kernels_in(tmp_path, refuse)
    kept.get(made_of, lambda: "of another machine")
    with pytest.warns(
        RuntimeWarning, match=f"{kernel_cache.OBJECT} cannot be loaded .{error.__name__}."
    ):
        assert kept.get(made_of, lambda: "of this machine") == "of this machine"
    assert kept.get(made_of, lambda: "never") == "of this machine"


def test_what_ends_the_process_while_loading_drops_nothing(tmp_path):
    def interrupted(path: Path) -> str:
        raise KeyboardInterrupt

    kernels_in(tmp_path).get({"kernel": "Gemm"}, lambda: "built")
    with pytest.raises(KeyboardInterrupt):
        kernels_in(tmp_path, interrupted).get({"kernel": "Gemm"}, lambda: "never")
    assert kernels_in(tmp_path).get({"kernel": "Gemm"}, lambda: "never") == "built"


def test_the_home_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(CACHE_VARIABLE, "~/my/kernels")
    assert cache_dir() == tmp_path / "my/kernels"
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == tmp_path / ".cache/moe_fp8/kernels"


def test_without_a_home_there_is_no_cache(monkeypatch, capsys, tmp_path):
    """As in a container with a user id of its own: no HOME, no entry in the table of users."""

    def no_entry(key: object) -> None:
        raise KeyError(key)

    for name in ("HOME", "XDG_CACHE_HOME", CACHE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    monkeypatch.setattr(pwd, "getpwnam", no_entry)
    assert cache_dir() is None
    for chosen in ("~/kernels", "~nobody/kernels"):
        monkeypatch.setenv(CACHE_VARIABLE, chosen)
        assert cache_dir() is None
    monkeypatch.setattr(sys, "argv", ["cache.py"])
    with pytest.raises(SystemExit, match="2"):
        program.main()
    assert "there is no home: no kernel is cached" in capsys.readouterr().err
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    assert cache_dir() == tmp_path, "which needs no home"


USER = 1234


@pytest.mark.parametrize(
    ("owner", "mode", "trusted"),
    [
        (USER, 0o755, True),
        (0, 0o755, True),
        (0, 0o1777, True),  # /tmp: the sticky bit keeps others from replacing what is in it
        (0, 0o777, False),
        (USER, 0o777, False),
        (USER + 1, 0o755, False),
        (USER + 1, 0o1777, False),
    ],
)
@pytest.mark.parametrize("above", [1, 2])
def test_who_may_own_a_directory_above(above, owner, mode, trusted, monkeypatch, tmp_path):
    path = (tmp_path / "a/b/kernels").resolve()
    path.mkdir(parents=True)
    parent = path.parents[above - 1]
    status = os.stat

    def stat(self: Path, **_: object) -> os.stat_result:
        uid, bits = {path: (USER, 0o700), parent: (owner, mode)}.get(self, (0, 0o755))
        return os.stat_result([0o040000 | bits, *status(self)[1:4], uid, *status(self)[5:10]])

    monkeypatch.setattr(Path, "stat", stat)
    monkeypatch.setattr(Path, "lstat", stat)
    monkeypatch.setattr(kernel_cache.os, "geteuid", lambda: USER)
    why = kernel_cache.why_untrusted(path)
    assert why == (None if trusted else f"{path} lies in {parent}, which other users can write to")


def test_an_entry_needs_no_description(tmp_path):
    kept = kernels_in(tmp_path)
    kept.get({"kernel": "Gemm"}, lambda: "built")
    (entry,) = kept.entries()
    (entry.path / "made_of.json").unlink()
    (left,) = kept.entries()
    assert left.made_of == {} and left.path == entry.path
    assert left.size == len("built") + len((entry.path / kernel_cache.DIGEST).read_text())
