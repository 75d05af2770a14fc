"""Compiled kernels on disk: one directory for all solutions, and a program that lists or clears it.

    python -m moe_fp8.cache             # list the kernels, the last used first
    python -m moe_fp8.cache --clear     # remove all of them

The directory is $MOE_FP8_CACHE_DIR, else it lies under the user's cache directory.

An entry is a directory named by a digest of everything that decides its machine code. It holds the
object file, its digest and a description, and appears by one atomic rename. An entry whose digest
does not match is built again. Kernels are code: `require_trusted` says which entries are loaded.

Beyond `LIMIT_BYTES` (256 MiB) the entries used longest ago are removed. Nothing else is ever
removed but directories that bear the cache's names: `$MOE_FP8_CACHE_DIR` can be any directory.

The sources of a kernel are part of its digest (`import_closure`). The same function says what a
packed solution consists of, so that an edit changes exactly the solutions that import the file.
"""

import argparse
import ast
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
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CACHE_VARIABLE = "MOE_FP8_CACHE_DIR"
NAME = "moe_fp8"
"""Name of the directory. The package's own name differs from one packed solution to the next."""

OBJECT, DIGEST, DESCRIPTION = "kernel.o", "sha256", "made_of.json"
ENTRY = re.compile(r"\w+-[0-9a-f]{32}")
DRAFT = re.compile(rf"\.{ENTRY.pattern}-\w{{8}}")
LIMIT_BYTES = 256 * 2**20
STALE_SECONDS = 3600.0
"""Age from which an unfinished entry counts as left behind by a killed process."""
_said: set[tuple[Path, str | None]] = set()
"""The warnings of this process: directory and cause."""


def cache_dir() -> Path | None:
    """Return the directory of the kernels: `$MOE_FP8_CACHE_DIR`, else under the user's cache.

    None (nothing is stored) when the variable is the empty string, or the user has no home.
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
    made_of: dict[str, Any]  # its description: what decided the machine code; {} if unreadable
    size: int  # bytes on disk
    used: float  # when it was stored or last loaded, seconds since the epoch


class KernelCache:
    """The compiled kernels in one directory, shared by processes and threads.

    The directory is made when the first kernel is stored. `load(path)` makes a function of an
    object file, `export(function, path)` writes one.
    """

    def __init__(self, directory: Path, load: Any = None, export: Any = None):
        self.directory, self._load, self._export = directory, load, export

    def get(self, made_of: dict[str, str], build: Callable[[], Any]) -> Any:
        """Return the kernel that is made of this: from the directory, or built and kept there.

        An entry is loaded without a lock and without writing. Of several processes one builds, the
        others wait and load; without locks several build. Where nothing can be kept the kernel is
        built all the same, with one warning that says why.
        """
        entry, text = self._entry(made_of)
        function = None
        try:
            function = self._read(entry)
            if function is None:
                # A file for many entries: they would stay behind when the entries go.
                with self.lock(entry.name[-32:-30]):
                    function = self._read(entry)  # another process may have stored it
                    if function is None:
                        function = build()
                        self._store(function, entry, text)
        except OSError as error:
            why = f"kernels are compiled and not kept in {self.directory} ({error})"
            self._warn(error.strerror, f"{why}; set {CACHE_VARIABLE} to a directory of your own")
        return build() if function is None else function

    def has(self, made_of: dict[str, str]) -> bool:
        """True if `get` would find the kernel. Nothing is read: it may prove damaged."""
        with contextlib.suppress(OSError):
            require_trusted(self._entry(made_of)[0] / OBJECT)
            return True
        return False

    def _entry(self, made_of: dict[str, str]) -> tuple[Path, str]:
        """Return the directory that such a kernel is kept in, and what it is made of as text."""
        text = json.dumps(made_of, indent=1, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:32]
        return self.directory / f"{made_of['kernel']}-{digest}", text

    @contextlib.contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Make the directory and hold a lock that all who use it share, if there are locks.

        Raises OSError: nothing can be stored in the directory, or others could have written to it.
        """
        for directory in (*reversed(self.directory.parents), self.directory):
            directory.mkdir(mode=0o755, exist_ok=True)  # not for others to write
        require_trusted(self.directory)
        if not os.access(self.directory, os.W_OK, effective_ids=True):
            raise PermissionError(errno.EACCES, "cannot be written", str(self.directory))
        path, flags = self.directory / f"lock-{name}", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        with contextlib.ExitStack() as held:
            # Not filelock's: where the file system has no locks, old versions of it wait for ever,
            # new ones for a process that was killed on another host.
            with contextlib.suppress(OSError):  # no locks here, or another user's file
                file = os.open(path, flags, 0o600)
                held.callback(os.close, file)
                # Who can read a file can hold its lock for ever.
                if not _why_untrusted(os.fstat(file), stat.S_IROTH | stat.S_IWOTH):
                    fcntl.flock(file, fcntl.LOCK_EX)
                    held.callback(fcntl.flock, file, fcntl.LOCK_UN)  # a fork may have the file
            yield

    def entries(self) -> list[CachedKernel]:
        """Return what is kept, the last used first."""
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
        return the entries that are gone."""
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
        """Return the directories with such a name, but no symbolic link to one elsewhere."""
        paths = self.directory.iterdir() if self.directory.is_dir() else ()
        return [p for p in paths if pattern.fullmatch(p.name) and p.is_dir() and not p.is_symlink()]

    def _read(self, entry: Path) -> Any | None:
        """Return the function in an entry; None if there is none, or a damaged one.

        Raises OSError: others could have written the entry, or it cannot be read.
        """
        kernel, digest = entry / OBJECT, entry / DIGEST
        try:
            require_trusted(kernel)
            found = hashlib.sha256(kernel.read_bytes()).hexdigest()
            if found.encode() != digest.read_bytes():
                return None
        except FileNotFoundError:
            return None
        with contextlib.suppress(OSError):  # in a directory that can only be read
            os.utime(digest)  # when it was last used
        try:
            return self._load(kernel)
        except Exception as error:  # the loader's own, of many types
            why = f"cannot be loaded ({type(error).__name__})"
            self._warn(why, f"{kernel} {why}: compiled anew")
            return None

    def _store(self, function: Any, entry: Path, made_of: str) -> None:
        """Put a function where `_read` finds it, for others to read as the umask says."""
        draft = Path(tempfile.mkdtemp(prefix=f".{entry.name}-", dir=self.directory))
        try:
            self._export(function, draft / OBJECT)
            content = (draft / OBJECT).read_bytes()
            (draft / DIGEST).write_text(hashlib.sha256(content).hexdigest(), encoding="ascii")
            (draft / DESCRIPTION).write_text(made_of, encoding="utf-8")
            for path in draft.iterdir():
                path.chmod(path.stat().st_mode & 0o755)
            draft.chmod(0o755)  # after its files: nobody else has opened one of them for writing
            shutil.rmtree(entry, ignore_errors=True)  # a damaged one
            os.rename(draft, entry)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        self.trim()

    def _warn(self, cause: str | None, message: str) -> None:
        """Warn once in a process of one cause, for the first of its kernels."""
        if (self.directory, cause) not in _said:
            _said.add((self.directory, cause))
            warnings.warn(message, RuntimeWarning, stacklevel=3)


def require_trusted(path: Path) -> None:
    """Raise a PermissionError if others could have made or changed this path, an OSError if it is
    not there.

    Of the path, of each directory above it, and of each symbolic link and what it names, the owner
    is this user or root, and nobody else can write to it but the groups of this process. In a
    directory with a sticky bit (/tmp) others can write, but not replace what is not theirs.
    """
    path.stat()  # raises if it is missing, or a link that leads to itself
    for step in (*reversed(path.absolute().parents), path.absolute()):
        status = step.lstat()
        if why := _why_untrusted(status, stat.S_IWOTH):
            raise PermissionError(errno.EACCES, why, str(step))
        if stat.S_ISLNK(status.st_mode):
            require_trusted(step.parent / step.readlink())


def _why_untrusted(status: os.stat_result, rights: int) -> str | None:
    """Return why others have made this or have one of these rights to it, such as S_IWOTH."""
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to another user (uid {status.st_uid})"
    if status.st_gid not in (os.getegid(), *os.getgroups()):
        rights |= rights << 3  # the group's
    sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    if status.st_mode & rights and not sticky and not stat.S_ISLNK(status.st_mode):
        mode = stat.S_IMODE(status.st_mode)
        return f"can be written by other users (mode {mode:o}, gid {status.st_gid})"
    return None


# --- sources ------------------------------------------------------------------------------------

PACKAGE = "moe_fp8"


class ClosureError(ValueError):
    """An import that a self-contained bundle of the sources could not resolve."""


def import_closure(entry: Path, root: Path) -> list[Path]:
    """Return all files under `root` that importing `entry` may import, sorted by path.

    The files are parsed, nothing is imported. Imports inside functions count, and so do the
    `__init__.py` files on the way. `root` is the directory of the top-level package, under whatever
    name it is imported.

    Raises:
        ClosureError: an import leaves `root`, names no file there, or reaches the package by its
            absolute name (a bundle is imported under another one).
    """
    root = root.resolve()
    pending = [entry.resolve()]
    closure: set[Path] = set()
    while pending:
        path = pending.pop()
        if path in closure:
            continue
        if not path.is_relative_to(root):
            raise ClosureError(f"{path} is not under {root}")
        closure.add(path)
        pending.extend(_package_inits(path, root))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
            pending.extend(_imported_files(node, path, root))
    return sorted(closure, key=lambda path: path.relative_to(root).as_posix())


def _package_inits(path: Path, root: Path) -> Iterator[Path]:
    """Yield the `__init__.py` of each package around `path`, up to and including `root`."""
    directory = path.parent
    while directory.is_relative_to(root):
        init = directory / "__init__.py"
        if not init.is_file():
            raise ClosureError(f"{directory} has no __init__.py, which {path.name} needs")
        yield init
        directory = directory.parent


def _imported_files(node: ast.AST, path: Path, root: Path) -> Iterator[Path]:
    """Yield the files that a statement or call of the file `path` imports from `root`."""

    def fail(why: str) -> ClosureError:
        where = f"{path.relative_to(root).as_posix()}:{getattr(node, 'lineno', 0)}"
        return ClosureError(f"{where}: {why}")

    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.split(".")[0] == PACKAGE:
                raise fail(f"'import {alias.name}' is absolute; use a relative import")
    elif isinstance(node, ast.ImportFrom) and node.level == 0:
        if (node.module or "").split(".")[0] == PACKAGE:
            raise fail(f"'from {node.module} import ...' is absolute; use a relative import")
    elif isinstance(node, ast.ImportFrom):
        base = path.parent
        for _ in range(node.level - 1):
            base = base.parent
        if not base.is_relative_to(root):
            raise fail(f"relative import of level {node.level} leaves the package")
        target = base.joinpath(*(node.module or "").split(".")) if node.module else base
        source = _module_file(target)
        if source is None:
            raise fail(f"'{'.' * node.level}{node.module or ''}' is no module of the package")
        yield source
        if source.name == "__init__.py":
            # A name that is no module is defined in the `__init__.py`.
            yield from filter(None, (_module_file(target / alias.name) for alias in node.names))
    elif isinstance(node, ast.Call):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        called = node.func.id if isinstance(node.func, ast.Name) else called
        if called in ("import_module", "__import__") and node.args:
            name = node.args[0]
            text = name.value if isinstance(name, ast.Constant) else None
            if isinstance(text, str) and (text.startswith(".") or text.split(".")[0] == PACKAGE):
                raise fail(f"{called}({text!r}) cannot be followed; use an import statement")


def _module_file(target: Path) -> Path | None:
    """Return the file of a module, given its path without suffix."""
    for candidate in (target / "__init__.py", target.with_name(target.name + ".py")):
        if candidate.is_file():
            return candidate
    return None


# --- program ------------------------------------------------------------------------------------


def mebibytes(entries: Sequence[CachedKernel]) -> str:
    return f"{sum(entry.size for entry in entries) / 2**20:.1f} MiB"


def line(entry: CachedKernel) -> str:
    # The file may hold any JSON.
    made_of = entry.made_of if isinstance(entry.made_of, dict) else {}
    kernel = made_of.get("kernel", entry.path.name)
    made = made_of.get("parameters", "?")
    hours = max(0.0, time.time() - entry.used) / 3600
    return f"{entry.size / 1024:6.0f} KiB  used {hours:7.1f} h ago  {kernel} {made}"


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
    except OSError as error:  # another user's
        parser.error(str(error))
    if args.clear:
        removed = cache.trim(0)
        said = f"removed {len(removed)} of {len(entries)} kernels, {mebibytes(removed)}"
    else:
        for entry in entries:
            print(line(entry))
        limit = f"{LIMIT_BYTES / 2**20:.0f} MiB at most"
        said = f"{len(entries)} kernels, {mebibytes(entries)} ({limit})"
    print(f"{directory}: {said}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
