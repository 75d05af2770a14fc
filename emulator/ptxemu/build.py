"""Builds the C++ core on first use and keeps it in the user's cache directory."""

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "core"
DIRECTORY_VARIABLE = "PTXEMU_BUILD_DIR"
MAX_LIBRARIES = 6
"""The most libraries in the cache: of other checkouts, and of older sources of this one."""
FLAGS = ["-std=c++17", "-O2", "-march=native", "-fPIC", "-shared", "-ffp-contract=off",
         "-fno-strict-aliasing", "-Wall"]  # fmt: skip


class NoCompiler(RuntimeError):
    """There is no C++ compiler; the message says how to get one."""


class BuildError(RuntimeError):
    """The C++ compiler failed; the message is its first error."""


def library() -> Path:
    """Return the shared library of the current sources; build it if necessary.

    Any number of processes may call this at once: one compiles, the others wait. The directory of
    the sources may be read-only.

    Raises:
        NoCompiler: the library must be built and there is no C++ compiler.
        BuildError: the compiler failed.
    """
    compiler = _compiler()
    built = _directory() / f"libptxemu-{_digest(compiler)}.so"
    with contextlib.suppress(FileNotFoundError):
        os.utime(built)  # it was used: processes of other sources do not remove it
        return built
    if compiler is None:
        raise NoCompiler(
            "the PTX emulator needs a C++17 compiler: set CXX or install g++ or clang++ "
            "(Debian, Ubuntu: apt install g++; conda: conda install -c conda-forge cxx-compiler)"
        )
    with open(built.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            draft = built.with_suffix(".tmp")
            command = [compiler, *FLAGS, "-o", str(draft), str(SOURCES / "core.cpp")]
            result = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace")
            if result.returncode != 0:
                error = _first_error(result.stderr)
                raise BuildError(f"{compiler} cannot build the PTX emulator: {error}")
            draft.rename(built)
            _remove_old(built.parent)
    return built


def _first_error(messages: str) -> str:
    """Return the first error among a compiler's messages, or else the first message."""
    lines = [line.strip() for line in messages.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return next(iter(errors or lines), "no message")


def _remove_old(directory: Path) -> None:
    """Remove the libraries that were not used for longest."""
    libraries = sorted(directory.glob("*.so"), key=lambda path: path.stat().st_mtime)
    for library in libraries[:-MAX_LIBRARIES]:
        library.unlink(missing_ok=True)
        library.with_suffix(".lock").unlink(missing_ok=True)


def _compiler() -> str | None:
    candidates = [os.environ.get("CXX"), "g++", "clang++", "c++"]
    return next((c for c in candidates if c and shutil.which(c)), None)


def _digest(compiler: str | None) -> str:
    """Return a digest of everything that decides the machine code.

    It covers sources, compiler, flags and the processor: machines with different processors may
    share a home directory.
    """
    digest = hashlib.sha256(repr((compiler, FLAGS, _processor())).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def modules_digest() -> str:
    """Return a digest of the Python modules, which write what `host` stores and loads."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _processor() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as cpuinfo:
        return next((line for line in cpuinfo if line.startswith(("flags", "Features"))), "")


def _directory() -> Path:
    """Return the directory of built libraries.

    It belongs to the user and nobody else can write to it, because its libraries are loaded.
    """
    chosen = os.environ.get(DIRECTORY_VARIABLE)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    candidates = [Path(chosen)] if chosen else [Path(base) / "ptxemu"]
    candidates.append(Path(tempfile.gettempdir()) / f"ptxemu-{os.getuid()}")
    for directory in candidates:
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:
            continue
        status = directory.stat()
        others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if status.st_uid == os.getuid() and not others_write and os.access(directory, os.W_OK):
            return directory
    return Path(tempfile.mkdtemp(prefix="ptxemu-"))
