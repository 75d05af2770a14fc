"""Files are written whole or not at all."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.common import files
from scripts.common.project import ROOT


def test_text_and_bytes_are_written_as_they_are_into_directories_that_are_made(tmp_path) -> None:
    path = tmp_path / "a" / "b.txt"
    for content, written in (("é\n", "é\n".encode()), (b"\r\n", b"\r\n")):
        files.write(path, content)
        assert path.read_bytes() == written
    (tmp_path / "other").touch()
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_full_disk_leaves_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    files.write(path, "old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # files cannot grow beyond
    try:
        with pytest.raises(OSError) as caught:
            files.write(path, "x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.filename == str(path), "not that of the file beside it"
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link_and_a_device_a_device(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    files.write(link, "new")
    assert link.is_symlink() and target.read_text() == "new"
    files.write(Path(os.devnull), "x")
    assert not Path(os.devnull).is_file()
    code = "import pathlib, sys; from scripts.common import files; print(1, flush=True); "
    code += "files.write(pathlib.Path('/dev/stdout'), '2\\n'); print(3)"
    program = [sys.executable, "-c", code]
    assert subprocess.run(program, cwd=ROOT, stdout=-1).stdout == b"1\n2\n3\n"
    with (tmp_path / "redirected").open("wb") as file:
        subprocess.run(program, cwd=ROOT, stdout=file, check=True)
    assert sorted((tmp_path / "redirected").read_text()) == ["\n", "\n", "\n", "1", "2", "3"]
