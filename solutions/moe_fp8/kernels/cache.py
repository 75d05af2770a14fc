"""Compiled kernels on disk: one directory for all solutions, that no other user can write to.

An entry is a directory named by a digest of everything that decides its machine code. It holds the
object file, its digest and what it was made of, and appears by one atomic rename; one whose digest
does not match is dropped and built again. Nothing is read that is another user's or that others
could have written: it is run.

Beyond `LIMIT_BYTES` the entries that were used longest ago go. Nothing is ever removed but
directories that bear the cache's names: `$MOE_FP8_CACHE_DIR` can be set to any directory.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CACHE_VARIABLE = "MOE_FP8_CACHE_DIR"
NAME = "moe_fp8"
"""Of the directory: the package's own name differs from one packed solution to the next."""

OBJECT, DIGEST, DESCRIPTION = "kernel.o", "sha256", "made_of.json"
ENTRY = re.compile(r"\w+-[0-9a-f]{32}")
DRAFT = re.compile(rf"\.{ENTRY.pattern}-\w{{8}}")
LIMIT_BYTES = 256 * 2**20
STALE_SECONDS = 3600.0
"""After which what a killed process was writing is nobody's any more."""


def cache_dir() -> Path | None:
    """Where compiled kernels are kept: `$MOE_FP8_CACHE_DIR`, else under the user's cache directory.

    None (nothing is kept) when the variable is set to the empty string, or the directory is to be
    below the home of a user who has none.
    """
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen == "":
        return None
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    try:
        return (Path(chosen) if chosen else user_cache / NAME / "kernels").expanduser()
    except RuntimeError:
        return None


@dataclass(frozen=True)
class CachedKernel:
    """One compiled kernel of the cache."""

    path: Path  # its directory
    made_of: dict[str, Any]  # what decided its machine code, by name; {} where that is unreadable
    size: int  # bytes on disk
    used: float  # when it was stored or last loaded, seconds since the epoch


class KernelCache:
    """The compiled kernels in one directory, shared by processes and threads.

    The directory is made, for this user alone, when the first kernel is stored. `load(path)` makes
    a function of an object file, `export(function, path)` writes one.
    """

    def __init__(self, directory: Path, load: Any = None, export: Any = None):
        self.directory, self._load, self._export = directory, load, export

    def get(self, made_of: dict[str, str], build: Callable[[], Any]) -> Any:
        """The kernel that is made of this: from the directory, or built and kept there.

        Of several processes one builds, the others wait and load. Where nothing can be kept the
        kernel is built all the same, with a warning that says why.
        """
        entry, text = self._entry(made_of)
        function, trusted = None, False
        try:
            self._make_directory()
            why = why_untrusted(self.directory)
            if not why and entry.exists():
                why = why_untrusted(entry)
            if why:
                _warn(f"{why}: it is not used")
                return build()
            trusted = True
            # A file for many entries: they would stay behind when the entries go.
            with self.lock(entry.name[-32:-30]):
                function = self._read(entry)
                if function is None:
                    function = build()
                    self._store(function, entry, text)
        except OSError as error:
            if trusted and function is None:  # in a directory that can only be read
                function = self._read(entry)
                if function is not None:
                    return function
            _warn(f"compiled kernels cannot be kept in {self.directory} ({error})")
        return build() if function is None else function

    def has(self, made_of: dict[str, str]) -> bool:
        """Whether `get` would find the kernel. Nothing is read: it may prove damaged."""
        entry, _ = self._entry(made_of)
        try:
            return entry.exists() and not (why_untrusted(self.directory) or why_untrusted(entry))
        except OSError:  # of a directory that cannot be searched, or of an entry that has gone
            return False

    def _entry(self, made_of: dict[str, str]) -> tuple[Path, str]:
        """(the directory that such a kernel is kept in, what it is made of as text)."""
        text = json.dumps(made_of, indent=1, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:32]
        return self.directory / f"{made_of['kernel']}-{digest}", text

    def _make_directory(self) -> None:
        """For this user alone, and so are those above it that are not there, whatever the umask."""
        for directory in (*reversed(self.directory.parents), self.directory):
            directory.mkdir(mode=0o700, exist_ok=True)

    @contextlib.contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """A lock that all who use this directory share. Raises OSError: it cannot be had there, or
        others could hold it for ever."""
        self._make_directory()
        if why := why_untrusted(self.directory):
            raise OSError(why)
        # Not filelock's: where the file system has no locks, old versions of it wait for ever, new
        # ones for a process that was killed on another host.
        file = os.open(self.directory / f"lock-{name}", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)  # a fork may have the file, too
        finally:
            os.close(file)

    def entries(self) -> list[CachedKernel]:
        """What is kept, the last used first."""
        found = []
        for path in self._named(ENTRY):
            try:
                digest = path / DIGEST
                used = digest.stat().st_mtime
                size = sum(file.stat().st_size for file in path.iterdir())
            except OSError:  # gone meanwhile
                continue
            try:
                made_of = json.loads((path / DESCRIPTION).read_text(encoding="utf-8"))
            except (OSError, ValueError):
                made_of = {}
            found.append(CachedKernel(path, made_of, size, used))
        return sorted(found, key=lambda entry: -entry.used)

    def trim(self, limit: int = LIMIT_BYTES) -> list[CachedKernel]:
        """Remove the entries used longest ago until the rest fits, and what killed processes left;
        return them."""
        removed, total = [], 0
        for entry in self.entries():
            total += entry.size
            if total > limit:
                shutil.rmtree(entry.path, ignore_errors=True)
                removed.append(entry)
        for draft in self._named(DRAFT):
            try:
                abandoned = time.time() - draft.stat().st_mtime > STALE_SECONDS
            except OSError:
                continue
            if abandoned:
                shutil.rmtree(draft, ignore_errors=True)
        return removed

    def _named(self, pattern: re.Pattern[str]) -> list[Path]:
        """The directories with such a name. A symbolic link is none: what it names is elsewhere."""
        paths = self.directory.iterdir() if self.directory.is_dir() else ()
        return [p for p in paths if pattern.fullmatch(p.name) and p.is_dir() and not p.is_symlink()]

    def _read(self, entry: Path) -> Any | None:
        """The function in an entry; one that is damaged or cannot be loaded is dropped."""
        kernel, digest = entry / OBJECT, entry / DIGEST
        try:
            foreign = why_untrusted(kernel) or why_untrusted(digest)
            if foreign:
                _warn(f"{foreign}: the kernel is compiled anew")
            expected = "" if foreign else digest.read_text("ascii")
            if hashlib.sha256(kernel.read_bytes()).hexdigest() == expected:
                with contextlib.suppress(OSError):
                    os.utime(digest)  # when it was last used
                try:
                    return self._load(kernel)
                except Exception as error:  # the loader's own, of many types
                    _warn(f"{kernel} cannot be loaded ({type(error).__name__}): compiled anew")
        except (OSError, UnicodeDecodeError):
            pass
        shutil.rmtree(entry, ignore_errors=True)
        return None

    def _store(self, function: Any, entry: Path, made_of: str) -> None:
        """Put a function where `_read` finds it."""
        draft = Path(tempfile.mkdtemp(prefix=f".{entry.name}-", dir=self.directory))
        try:
            self._export(function, draft / OBJECT)
            content = (draft / OBJECT).read_bytes()
            (draft / DIGEST).write_text(hashlib.sha256(content).hexdigest(), encoding="ascii")
            (draft / DESCRIPTION).write_text(made_of, encoding="utf-8")
            for path in draft.iterdir():
                path.chmod(0o600)
            os.rename(draft, entry)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        self.trim()


def why_untrusted(path: Path) -> str | None:
    """Why another user may have made or changed this path, naming what it is about; None if not.

    The directories above it count as well: who can write to one of them can put another in its
    place, unless its sticky bit (/tmp) forbids that.
    """
    user = os.geteuid()
    status = path.lstat()
    if status.st_uid != user:
        return f"{path} belongs to another user (uid {status.st_uid})"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not stat.S_ISLNK(status.st_mode):
        return f"{path} can be written by other users (mode {stat.S_IMODE(status.st_mode):o})"
    for parent in path.resolve().parents:
        status = parent.stat()
        replaceable = status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX
        if replaceable or status.st_uid not in (user, 0):
            return f"{path} lies in {parent}, which other users can write to"
    return None


def _warn(message: str) -> None:
    warnings.warn(
        f"{message}; set {CACHE_VARIABLE} to a directory of your own",
        RuntimeWarning,
        stacklevel=2,
    )
