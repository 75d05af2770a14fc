"""Files are written whole or not at all."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from scripts.common import files


@contextmanager
def disk_of(size: int) -> Iterator[None]:
    """Files cannot grow beyond the size, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_writes_text_and_bytes_and_makes_directories(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.txt"
    files.write(path, "é\n")
    assert path.read_bytes() == "é\n".encode()
    files.write(path, b"\r\n")
    assert path.read_bytes() == b"\r\n"
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask, "as any file that a program makes"


def test_a_full_disk_leaves_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    files.write(path, "old")
    with disk_of(1000), pytest.raises(OSError) as caught:
        files.write(path, "x" * 5000)
    assert caught.value.filename == str(path), "not that of the file beside it"
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 1000


def test_a_link_stays_a_link_and_a_device_a_device(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    files.write(link, "new")
    assert link.is_symlink() and target.read_text() == "new"
    files.write(Path(os.devnull), "x")
    assert not Path(os.devnull).is_file()
