"""Compiled kernels on disk: one directory for all solutions, and a program that lists or clears it.

    python -m moe_fp8.cache             # list the kernels, the last used first
    python -m moe_fp8.cache --clear     # remove all of them

The directory is $MOE_FP8_CACHE_DIR, else it lies under the user's cache directory.

An entry is a directory. Its name contains a digest of everything that decides the machine code. It
contains the object file, the file's digest and a description, and appears by one atomic rename. An
entry with a wrong digest is built again. Kernels are code: only entries that pass `require_trusted`
are loaded.

Above `LIMIT_BYTES` (256 MiB) the least recently used entries are removed. Only directories with the
cache's names are ever removed: `$MOE_FP8_CACHE_DIR` can be any directory.
"""

import argparse
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CACHE_VARIABLE = "MOE_FP8_CACHE_DIR"
CACHE_NAME = "moe_fp8"
"""Name of the directory. A literal, as `__package__` differs in each packed solution."""

OBJECT, DIGEST, DESCRIPTION = "kernel.o", "sha256", "made_of.json"
ENTRY = re.compile(r"\w+-[0-9a-f]{32}")
DRAFT = re.compile(rf"\.{ENTRY.pattern}-\w{{8}}")
LIMIT_BYTES = 256 * 2**20
STALE_SECONDS = 3600.0
"""Age at which an unfinished entry is taken for the rest of a killed process."""
NOT_KEPT = "kernels are compiled and not kept"
"""The beginning of the warning about a directory where nothing can be stored."""
_warned: set[tuple[Path, str | None]] = set()
"""The directory and the cause of each warning of this process."""


def cache_dir() -> Path | None:
    """Return the directory of the kernels: `$MOE_FP8_CACHE_DIR`, else under the user's cache.

    None (nothing is stored) when the variable is the empty string, or the user has no home.
    """
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen == "":
        return None
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    try:
        return (Path(chosen) if chosen else user_cache / CACHE_NAME / "kernels").expanduser()
    except RuntimeError:
        return None


@dataclass(frozen=True)
class CachedKernel:
    """One compiled kernel of the cache."""

    path: Path  # its directory
    description: dict[str, Any]  # of its machine code's inputs; {} if unreadable
    size: int  # bytes on disk
    used: float  # when it was stored or last loaded, seconds since the epoch


class KernelCache:
    """The compiled kernels in one directory, shared by processes and threads.

    Storing the first kernel makes the directory. `load(path)` makes a function from an object file,
    `export(function, path)` writes one.
    """

    def __init__(self, directory: Path, load: Any = None, export: Any = None):
        self.directory, self._load, self._export = directory, load, export

    def get(self, description: dict[str, str], build: Callable[[], Any]) -> Any:
        """Return the kernel with this description: load it, or build and store it.

        Loading an entry takes no lock and writes only its time of use. One process builds, others
        wait and load; on a file system without locks several build. If nothing can be stored, the
        kernel is built anyway, with one warning that says why.
        """
        entry, text = self._entry(description)
        function = failed = None
        try:
            function = self._read(entry)
            if function is None:
                # One of 256, by the digest's first byte: lock files stay when entries are removed.
                with self.lock(entry.name[-32:-30]):
                    function = self._read(entry)  # another process may have stored it
                    if function is None:
                        try:
                            function = build()
                        except OSError as error:  # of the compiler, not of the cache
                            failed = error
                        else:
                            self._store(function, entry, text)
        except OSError as error:
            why = f"{NOT_KEPT} in {self.directory} ({error})"
            self._warn(error.strerror, f"{why}; set {CACHE_VARIABLE} to a directory of your own")
        if failed is not None:
            raise failed
        return build() if function is None else function

    def has(self, description: dict[str, str]) -> bool:
        """True if the directory has the kernel, and it is not damaged."""
        with contextlib.suppress(OSError):
            return _is_whole(self._entry(description)[0])
        return False

    def _entry(self, description: dict[str, str]) -> tuple[Path, str]:
        """Return the directory of the entry with this description, and the description as text."""
        text = json.dumps(description, indent=1, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:32]
        return self.directory / f"{description['kernel']}-{digest}", text

    @contextlib.contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Make the directory and take one of its locks, if the file system has locks.

        Raises OSError: nothing can be stored in the directory, or others could have written to it.
        """
        for directory in (*reversed(self.directory.parents), self.directory):
            try:
                directory.mkdir(mode=0o755, exist_ok=True)  # others cannot write
            except FileExistsError:
                why = "no directory, nor a link to one"
                raise NotADirectoryError(errno.ENOTDIR, why, str(directory)) from None
        require_trusted(self.directory)
        if not os.access(self.directory, os.W_OK, effective_ids=True):
            raise PermissionError(errno.EACCES, "cannot be written", str(self.directory))
        path, flags = self.directory / f"lock-{name}", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        with contextlib.ExitStack() as cleanup:
            # Not filelock's: without locks of the file system its old versions wait for ever, its
            # new ones wait for a process that was killed on another host.
            with contextlib.suppress(OSError):  # no locks here, or another user's file
                file = os.open(path, flags, 0o600)
                cleanup.callback(os.close, file)
                # A user who can read the file could hold its lock for ever.
                if not _why_untrusted(os.fstat(file), stat.S_IROTH | stat.S_IWOTH):
                    fcntl.flock(file, fcntl.LOCK_EX)
                    cleanup.callback(fcntl.flock, file, fcntl.LOCK_UN)  # a fork may have the file
            yield

    def entries(self) -> list[CachedKernel]:
        """Return the stored kernels, the last used first."""
        kernels = []
        for path in self._named(ENTRY):
            try:
                files = {file.name: file.stat() for file in path.iterdir()}
                # A process that was killed while it removed the entry may leave no digest.
                used = (files.get(DIGEST) or path.stat()).st_mtime
            except OSError:  # another process removed it
                continue
            if not files.keys() & {OBJECT, DIGEST, DESCRIPTION}:
                continue  # another program's: the name alone is no proof
            size = sum(file.st_size for file in files.values())
            try:
                description = json.loads((path / DESCRIPTION).read_text(encoding="utf-8"))
            except (OSError, ValueError):
                description = {}
            if not isinstance(description, dict):  # the file may hold any JSON
                description = {}
            kernels.append(CachedKernel(path, description, size, used))
        return sorted(kernels, key=lambda entry: -entry.used)

    def trim(self, limit: int = LIMIT_BYTES) -> list[CachedKernel]:
        """Remove the least recently used entries above `limit` bytes, and the drafts of killed
        processes; return the removed entries."""
        removed, total = [], 0
        for entry in self.entries():
            total += entry.size
            if total > limit:
                shutil.rmtree(entry.path, ignore_errors=True)
                if not entry.path.exists():
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
        """Return the directories whose name matches `pattern`, without symbolic links."""
        paths = self.directory.iterdir() if self.directory.is_dir() else ()
        return [p for p in paths if pattern.fullmatch(p.name) and p.is_dir() and not p.is_symlink()]

    def _read(self, entry: Path) -> Any | None:
        """Return the function of an entry; None if the entry is missing or damaged.

        Raises OSError: others could have written the entry, or it cannot be read.
        """
        kernel = entry / OBJECT
        if not _is_whole(entry):
            return None
        with contextlib.suppress(OSError):  # the directory may be read-only
            os.utime(entry / DIGEST)  # the time of the last use
        try:
            return self._load(kernel)
        except Exception as error:  # the loader raises many types
            why = f"cannot be loaded ({type(error).__name__})"
            self._warn(why, f"{kernel} {why}: compiled anew")
            return None

    def _store(self, function: Any, entry: Path, description: str) -> None:
        """Store a function as an entry. The umask decides who can read it."""
        draft = Path(tempfile.mkdtemp(prefix=f".{entry.name}-", dir=self.directory))
        try:
            self._export(function, draft / OBJECT)
            content = (draft / OBJECT).read_bytes()
            (draft / DIGEST).write_text(hashlib.sha256(content).hexdigest(), encoding="ascii")
            (draft / DESCRIPTION).write_text(description, encoding="utf-8")
            for path in draft.iterdir():
                path.chmod(path.stat().st_mode & 0o755)
            draft.chmod(0o755)  # must come after the files' chmod, or others may open one to write
            shutil.rmtree(entry, ignore_errors=True)  # a damaged entry
            os.rename(draft, entry)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        self.trim()

    def _warn(self, cause: str | None, message: str) -> None:
        """Warn once per process, directory and cause."""
        if (self.directory, cause) not in _warned:
            _warned.add((self.directory, cause))
            warnings.warn(message, RuntimeWarning, stacklevel=3)


def _is_whole(entry: Path) -> bool:
    """True if an entry has an object file with the digest that is stored beside it. Raises OSError:
    others could have written it, or it cannot be read."""
    try:
        require_trusted(entry / OBJECT)
        actual = hashlib.sha256((entry / OBJECT).read_bytes()).hexdigest()
        return actual.encode() == (entry / DIGEST).read_bytes()
    except FileNotFoundError:
        return False


def require_trusted(path: Path) -> None:
    """Raise a PermissionError if others could have made or changed this path, an OSError if it does
    not exist.

    Checks the path, each directory above it, each symbolic link and the link's target. Each must
    belong to this user or root, and only they and this process's groups may write to it. A
    directory with a sticky bit (/tmp) passes: others can write to it, but not replace files there.

    A user namespace (Apptainer, enroot) does not show root as the owner of "/" and "/home". There
    the first directories of a path may have a hidden owner, up to this user's own or a sticky one.
    """
    path.stat()  # raises for a missing path and for a link that leads to itself
    may_hide, hidden = True, _hidden_id("uid")
    for step, status in _steps(path.absolute()):
        may_hide |= step == Path(step.anchor)  # a link's target begins anew
        is_hidden = status.st_uid == hidden
        if why := _why_untrusted(status, stat.S_IWOTH, may_hide and is_hidden):
            raise PermissionError(errno.EACCES, why, str(step))
        may_hide &= is_hidden and not status.st_mode & stat.S_ISVTX
    if is_hidden:
        raise PermissionError(errno.EACCES, _OTHERS.format(hidden), str(step))


def _steps(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield each directory above an absolute path, the path, and the steps of symbolic links."""
    for step in (*reversed(path.parents), path):
        status = step.lstat()
        yield step, status
        if stat.S_ISLNK(status.st_mode):
            yield from _steps((step.parent / step.readlink()).absolute())


_OTHERS = "belongs to another user (uid {})"


def _why_untrusted(status: os.stat_result, rights: int, may_be_hidden: bool = False) -> str | None:
    """Return the reason if another user owns a file or has one of these rights, such as S_IWOTH."""
    owners = {os.geteuid(), 0} - {_hidden_id("uid")}
    if status.st_uid not in owners and not may_be_hidden:
        return _OTHERS.format(status.st_uid)
    if status.st_gid not in {os.getegid(), *os.getgroups()} - {_hidden_id("gid")}:
        rights |= rights << 3  # the group's
    sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    if status.st_mode & rights and not sticky and not stat.S_ISLNK(status.st_mode):
        mode = stat.S_IMODE(status.st_mode)
        return f"can be written by other users (mode {mode:o}, gid {status.st_gid})"
    return None


def _hidden_id(kind: str) -> int | None:
    """Return the "uid" or "gid" that stands for all that this user namespace does not show; None if
    the id is a user's or a group's own, or the system does not tell."""
    try:
        overflow = int(Path(f"/proc/sys/kernel/overflow{kind}").read_text(encoding="ascii"))
        lines = Path(f"/proc/self/{kind}_map").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return None
    ranges = [tuple(map(int, line.split())) for line in lines]
    return None if any(i <= overflow < i + n for i, _, n in ranges) else overflow


# --- program ------------------------------------------------------------------------------------


def mebibytes(entries: Sequence[CachedKernel]) -> str:
    return f"{sum(entry.size for entry in entries) / 2**20:.1f} MiB"


def lines(entry: CachedKernel) -> str:
    """Return a kernel's size, age and name, then its parameters without those that are not set."""
    kernel = entry.description.get("kernel", entry.path.name)
    parameters = str(entry.description.get("parameters", "?"))
    parameters = re.sub(r"(, )?\w+=(False|None)\b", "", parameters).replace("(, ", "(")
    parameters = re.sub(r"<[\w.]+: ('\w+')>", r"\1", parameters)  # a value of an enum
    hours = max(0.0, time.time() - entry.used) / 3600
    first = f"{entry.size / 1024:6.0f} KiB  used {hours:7.1f} h ago  {kernel}"
    indent = 12 * " "
    rest = textwrap.wrap(parameters, 100, initial_indent=indent, subsequent_indent=indent)
    return "\n".join([first, *rest])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m moe_fp8.cache",
        description="List the compiled kernels that are cached on disk, or remove them.",
    )
    parser.add_argument("--clear", action="store_true", help="remove all of them")
    args = parser.parse_args(argv)
    directory = cache_dir()
    if directory is None:
        parser.error(f"{CACHE_VARIABLE} is empty, or there is no home: no kernel is cached")

    cache = KernelCache(directory)
    try:
        entries = cache.entries()
    except OSError as error:  # such as another user's directory
        parser.error(str(error))
    if args.clear:
        removed = cache.trim(0)
        summary = f"removed {len(removed)} of {len(entries)} kernels, {mebibytes(removed)}"
    else:
        for entry in entries:
            print(lines(entry))
        limit = f"{LIMIT_BYTES / 2**20:.0f} MiB at most"
        summary = f"{len(entries)} kernels, {mebibytes(entries)} ({limit})"
    print(f"{directory}: {summary}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
