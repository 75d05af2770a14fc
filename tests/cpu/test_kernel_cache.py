"""The cache of compiled kernels: its keys, what it trusts, where it may lie, what it removes."""

import errno
import fcntl
import functools
import hashlib
import importlib
import json
import multiprocessing
import os
import pwd
import re
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cutlass import Float32
from markers import more
from moe_fp8 import cache as program
from moe_fp8.kernels import cache as kernel_cache
from moe_fp8.kernels import compile as compiling
from moe_fp8.kernels import operations as kernels
from moe_fp8.kernels import route
from moe_fp8.kernels.architectures import HOPPER
from moe_fp8.kernels.cache import CACHE_VARIABLE, KernelCache, cache_dir
from moe_fp8.kernels.configs import GemmConfigSm90 as GemmConfig
from moe_fp8.kernels.swiglu import SwigluQuant
from moe_fp8.kernels.sync import NamedBarrierId
from moe_fp8.problem import SILU, Form, Swiglu

ARCH = "sm_90a"
PATHS = os.pathsep.join(filter(None, [str(compiling.PACKAGE_ROOT.parent), *sys.path]))
"""For processes of their own."""
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


def test_what_others_put_into_the_cache_stays(tmp_path, monkeypatch):
    """As with `MOE_FP8_CACHE_DIR=$HOME`."""
    directory, outside = tmp_path / "kernels", tmp_path / "outside"
    kept = kernels_in(directory)
    kept.get({"kernel": "Gemm"}, lambda: "built")
    theirs = (
        ".git/HEAD",
        "results/sha256",
        f".Gemm-{HEX}/notes",  # like a draft, but for what mkdtemp adds
        f"Gemm-{HEX}.d/sha256",
        f"Gemm-{HEX[:-1]}/sha256",
        f"Gemm-{HEX.upper()}/sha256",
        f"Combine-{HEX}/notes",  # the name alone is no proof
        "lock-file",
    )
    for name in theirs:
        put(directory, name)
    put(outside, "entry/sha256")
    put(outside, "draft/file")
    (directory / f"Gemm-{HEX}").symlink_to(outside / "entry")
    (directory / f".Gemm-{HEX}-abcdefgh").symlink_to(outside / "draft")
    before = tree(tmp_path)
    (entry,) = kept.entries()
    put(directory, f".Gemm-{HEX}-12345678/kernel.o")
    monkeypatch.setenv(CACHE_VARIABLE, str(directory))
    assert program.main(["--clear"]) == 0
    assert kept.entries() == []
    assert tree(tmp_path) == {n: c for n, c in before.items() if entry.path.name not in n}
    assert len([*directory.iterdir()]) == len(theirs) + 2 + 1, "theirs, the links, a lock"


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


@pytest.mark.parametrize(
    ("chosen", "users", "expected"),
    [
        ("~/my/kernels", "/somewhere", "/home/me/my/kernels"),
        (None, None, "/home/me/.cache/moe_fp8/kernels"),
        (None, "/somewhere", "/somewhere/moe_fp8/kernels"),
        ("", "/somewhere", None),
    ],
)
def test_the_cache_lies_where_the_environment_says(chosen, users, expected, monkeypatch):
    """One directory for all solutions: a packed one's package has another name after every edit."""
    monkeypatch.setattr(compiling, "PACKAGE_ROOT", Path("/bundles/fib_python_1234"))
    monkeypatch.setenv("HOME", "/home/me")
    for name, value in ((CACHE_VARIABLE, chosen), ("XDG_CACHE_HOME", users)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert cache_dir() == (expected and Path(expected))


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
    with pytest.raises(SystemExit, match="2"):
        program.main([])
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


@pytest.fixture
def listing(monkeypatch, tmp_path, capsys):
    """Runs `python -m moe_fp8.cache` on a directory with two kernels; what it prints."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    kept = kernels_in(tmp_path)
    for name in ("Gemm", "Combine"):
        kept.get({"kernel": name, "parameters": f"({name.lower()} of 7168,)"}, lambda: "built")

    def run(*arguments: str) -> str:
        assert program.main(arguments) == 0
        return capsys.readouterr().out

    return run


def test_the_program_lists_and_clears(listing, tmp_path) -> None:
    said = listing()
    assert "Gemm" in said and "(combine of 7168,)" in said
    assert f"{tmp_path}: 2 kernels, 0.0 MiB (256 MiB at most)" in said
    assert "removed 2 kernels" in listing("--clear")
    assert "0 kernels" in listing()
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


@pytest.mark.parametrize("content", ["", "{", "[1]", '"text"', "null", "\udcff"])
def test_an_entry_whose_description_is_damaged_is_listed_by_its_name(
    content: str, listing, tmp_path
) -> None:
    (damaged,) = tmp_path.glob("Gemm-*")
    (damaged / "made_of.json").write_text(content, errors="surrogateescape")
    said = listing()
    assert f"{damaged.name} ?" in said and "(combine of 7168,)" in said
    assert "removed 2 kernels" in listing("--clear")


def test_without_a_cache_it_is_a_usage_error(listing, monkeypatch, capsys) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, "")
    with pytest.raises(SystemExit, match="2"):
        listing("--clear")
    assert f"{CACHE_VARIABLE} is empty" in capsys.readouterr().err


# --- keys, damage, other users and processes ---


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache and the number of compilations so far, each of which one process does once."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "kernels"))
    count = [0]
    original = compiling.cute.compile

    def counting(kernel, *args, **kwargs):
        count[0] += 1
        if kernel.hidden not in COMBINE:
            COMBINE[kernel.hidden] = original(kernel, *args, **kwargs)
        return COMBINE[kernel.hidden]

    monkeypatch.setattr(compiling.cute, "compile", counting)
    return tmp_path / "kernels", count


COMBINE: dict[int, Any] = {}
"""Compiled functions of `build`, by the kernel's width."""


def build(hidden: int = 512):
    """What a new process would do: nothing remembered in memory."""
    return kernels.compile_combine.make(hidden, 4, ARCH)


def never_called(*_: object, **__: object) -> None:
    pytest.fail("loaded")  # no Exception, which the cache would take for a kernel it cannot load


def entries(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if path.is_dir()]


def test_second_start_loads(cache):
    directory, count = cache
    build()
    build()
    assert count == [1]
    build(1024)  # another parameter, another entry
    assert count == [2] and len(entries(directory)) == 2


@pytest.mark.parametrize(
    "damage", ["truncated", "flipped", "another machine", "no digest", "no object", "empty"]
)
def test_damaged_entry_is_rebuilt(cache, damage):
    directory, count = cache
    build()
    (entry,) = entries(directory)
    kernel, digest = entry / kernel_cache.OBJECT, entry / kernel_cache.DIGEST
    content = kernel.read_bytes()
    if damage == "truncated":
        kernel.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        kernel.write_bytes(content[:5000] + bytes([content[5000] ^ 1]) + content[5001:])
    elif damage == "another machine":  # whole, so that only the loader can refuse it
        object_file = bytearray(content)
        struct.pack_into("<H", object_file, 18, 183 if object_file[18] == 62 else 62)
        kernel.write_bytes(object_file)
        digest.write_text(hashlib.sha256(object_file).hexdigest())
    elif damage == "no digest":
        digest.unlink()
    elif damage == "no object":
        kernel.unlink()
    else:
        shutil.rmtree(entry)
        entry.mkdir()
    build()
    build()
    assert count == [2]


BASE = {"config": GemmConfig(), "n": 4096, "k": 7168, "experts": 32, "arch": ARCH}
OTHER = {
    "config": GemmConfig(stages=4),
    "n": 7168,
    "k": 2048,
    "experts": 8,
    "arch": "sm_100a",
}
KEYS = {  # compile function -> arguments, and for each another value
    "grouped_gemm": (BASE, OTHER),
    "permute": (
        {"hidden": 512, "top_k": 4, "arch": ARCH, "form": Form(), "ue8m0": False},
        {
            "hidden": 1024,
            "top_k": 8,
            "arch": "sm_100a",
            "form": Form(strided_scales=True),
            "ue8m0": True,
        },
    ),
    "swiglu_quant": (
        {"intermediate": 512, "arch": ARCH, "swiglu": SILU, "ue8m0": False},
        {"intermediate": 256, "arch": "sm_100a", "swiglu": Swiglu(10.0), "ue8m0": True},
    ),
    "combine": (
        {"hidden": 512, "top_k": 4, "arch": ARCH},
        {"hidden": 1024, "top_k": 8, "arch": "sm_100a"},
    ),
}


@pytest.fixture
def key_of(monkeypatch, tmp_path):
    """The names of the entries that a kernel is looked for under; nothing is compiled."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "kernels"))
    looked_for: list[dict[str, str]] = []
    monkeypatch.setattr(KernelCache, "get", lambda self, made_of, build: looked_for.append(made_of))
    # Of any target: there may be kernels for one only.
    monkeypatch.setattr(kernels, "of_target", lambda target: HOPPER)

    def key(name: str, arguments: dict) -> str:
        getattr(kernels, f"compile_{name}").make(*arguments.values())
        return json.dumps(looked_for.pop(), sort_keys=True)

    return key


@pytest.mark.parametrize("name", KEYS)
def test_every_argument_is_part_of_the_key(name, key_of):
    arguments, others = KEYS[name]
    first = key_of(name, arguments)
    assert key_of(name, dict(arguments)) == first
    assert list(others) == list(arguments)
    found = {first}
    for argument, value in others.items():
        found.add(key_of(name, {**arguments, argument: value}))
    assert len(found) == 1 + len(others)


def test_parameters_are_part_of_the_key_whatever_the_arguments_say():
    last = (4, 8, NamedBarrierId, kernels.Combine, SwigluQuant)
    keys = [compiling.made_of(kernels.Combine, (512, value), (), ARCH) for value in last]
    assert len({json.dumps(key) for key in keys}) == len(last)


def test_kernels_of_one_file_have_keys_of_their_own():
    of_route = route.Route, route.ChooseExperts
    first, second = (compiling.made_of(kernel, (), (), ARCH) for kernel in of_route)
    assert first["sources"] == second["sources"] and first != second


def test_what_the_compiler_is_told_is_part_of_the_key(key_of, monkeypatch):
    """The alignment of an argument, the options, the environment, the versions, the sources."""
    found = {key_of("combine", KEYS["combine"][0])}

    def other(patch) -> None:
        with monkeypatch.context() as context:
            patch(context)
            found.add(key_of("combine", KEYS["combine"][0]))

    align = compiling.Tensor.__init__

    def align_less(self, dtype, shape, **_) -> None:
        align(self, dtype, shape, align=4)

    other(lambda c: c.setattr(compiling.Tensor, "__init__", align_less))
    other(lambda c: c.setattr(compiling, "OPTIONS", compiling.OPTIONS + " --opt-level 1"))
    other(lambda c: c.setenv("CUTE_DSL_ANYTHING", "1"))
    other(lambda c: c.setattr(compiling, "_host", lambda: "other machine"))
    other(lambda c: c.setattr(compiling, "_versions", lambda: ("other version",)))
    other(lambda c: c.setattr(compiling, "_source_digest", lambda *modules: "other sources"))
    other(lambda c: c.setattr(compiling.cutlass, "CUDA_VERSION", "another of those installed"))
    assert len(found) == 8


X86 = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 1
model name\t: AMD EPYC
cpu MHz\t\t: {mhz}
flags\t\t: fpu sse avx2{more}

processor\t: 1
flags\t\t: fpu
"""
ARM = "processor\t: 0\nFeatures\t: fp{more}\nCPU implementer\t: 0x41\nCPU part\t: {part}\n"


def test_the_machine_and_its_cpu_are_part_of_the_key(monkeypatch, tmp_path):
    """What the host's code may use; nothing that changes from one moment to the next."""
    monkeypatch.setattr(compiling, "CPU", tmp_path / "cpuinfo")

    def host(cpu: str, machine: str = "x86_64") -> str:
        compiling.CPU.write_text(cpu)
        monkeypatch.setattr(compiling.platform, "machine", lambda: machine)
        return compiling._host.__wrapped__()

    same = host(X86.format(mhz=1500, more=""))
    assert same == host(X86.format(mhz=3700, more="").replace(": fpu\n", ": fpu vme\n"))
    assert "avx2" in same and "MHz" not in same
    others = [
        host(X86.format(mhz=1500, more=""), "i686"),
        host(X86.format(mhz=1500, more=" avx512f")),
        host(X86.format(mhz=1500, more="").replace("AMD", "Intel")),
        host(X86.format(mhz=1500, more="").replace(": 25", ": 26")),
        host(X86.format(mhz=1500, more="").replace("model\t\t: 1", "model\t\t: 17")),
        host(ARM.format(more="", part="0xd4f"), "aarch64"),
        host(ARM.format(more=" sve", part="0xd4f"), "aarch64"),
        host(ARM.format(more="", part="0xd40"), "aarch64"),
        host(ARM.format(more="", part="0xd4f").replace("0x41", "0x4e"), "aarch64"),
    ]
    assert len({same, *others}) == 10


@pytest.mark.parametrize("cpu", [None, "processor\t: 0\n"])
def test_of_an_unknown_cpu_the_hosts_name_is_part_of_the_key(cpu, monkeypatch, tmp_path):
    monkeypatch.setattr(compiling, "CPU", tmp_path / "cpuinfo")
    if cpu is not None:
        compiling.CPU.write_text(cpu)
    monkeypatch.setattr(compiling.platform, "machine", lambda: "ppc64le")
    monkeypatch.setattr(compiling.platform, "node", lambda: "node17")
    assert compiling._host.__wrapped__() == "ppc64le, node17"


def test_extents_of_one_name_are_one_size(monkeypatch):
    """And what divides it reaches the compiler."""
    made = compiling.fakes(
        [
            compiling.Tensor(Float32, (compiling.Extent("a", 4), 8)),
            compiling.Tensor(Float32, (8, compiling.Extent("a", 4)), align=4),
            compiling.Tensor(Float32, (8, compiling.Extent("b"))),
        ]
    )
    assert made[0].shape[0] is made[1].shape[1] and made[2].shape[1] is not made[0].shape[0]
    assert "div=4" in repr(made[0].shape[0]) and "div=1}" in repr(made[2].shape[1])
    assert [tensor._assumed_align for tensor in made] == [16, 4, 16]


def test_tensors_are_row_major():
    shapes = [(3, 5, 7), (compiling.Extent("a"), 6, 8), (4, compiling.Extent("b", 4)), (9,)]
    made = compiling.fakes([compiling.Tensor(Float32, shape) for shape in shapes])
    assert [tensor.stride for tensor in (made[0], made[1], made[3])] == [
        (35, 7, 1),
        (48, 8, 1),
        (1,),
    ]
    assert made[2].stride[0] is made[2].shape[1] and made[2].stride[1] == 1


def test_source_digest_follows_imports(tmp_path, monkeypatch):
    """Of the kernel, and of what turns its arguments into the compiler's."""
    shutil.copytree(compiling.PACKAGE_ROOT, tmp_path / "copied_moe_fp8")
    monkeypatch.syspath_prepend(tmp_path)
    copied = importlib.import_module("copied_moe_fp8.kernels.compile")
    kernel = importlib.import_module("copied_moe_fp8.kernels.gemm_sm90").GemmSm90

    def sources(edited: str) -> str:
        with (copied.PACKAGE_ROOT / "kernels" / f"{edited}.py").open("a") as file:
            file.write("\n")
        copied._source_digest.cache_clear()  # as in a new process
        return copied.made_of(kernel, (), (), ARCH)["sources"]

    first = copied.made_of(kernel, (), (), ARCH)["sources"]
    unrelated, of_the_kernel, of_its_arguments = map(sources, ("combine", "tiles", "compile"))
    assert first == unrelated and len({first, of_the_kernel, of_its_arguments}) == 3


def test_unwritable_directory_still_compiles(cache):
    directory, count = cache
    directory.parent.mkdir(exist_ok=True)
    directory.write_text("a file where the directory should be")
    with pytest.warns(RuntimeWarning, match=CACHE_VARIABLE):
        assert build() is not None
    assert count == [1]


@pytest.mark.parametrize(
    ("call", "error"),
    [("open", errno.EROFS), ("flock", errno.ENOSYS), ("flock", errno.ENOLCK)],
)
def test_where_nothing_can_be_written_what_is_there_is_read(call, error, cache, monkeypatch):
    """Nor where the file system has no locks."""
    _, count = cache
    build()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(error, os.strerror(error))

    if call == "open":
        monkeypatch.setattr(kernel_cache.KernelCache, "lock", refuse)
        monkeypatch.setattr(os, "utime", refuse)
    else:
        monkeypatch.setattr(fcntl, "flock", refuse)
    assert build() is not None and count == [1]
    with pytest.warns(RuntimeWarning, match="cannot be kept"):
        build(1024)
    assert count == [2]


def test_what_is_made_is_the_users_alone(cache):
    directory, _ = cache
    build()
    (entry,) = entries(directory)
    for path in (directory, entry, *entry.iterdir(), *directory.glob("lock-*")):
        assert path.stat().st_mode & 0o077 == 0, path


def test_directories_above_are_made_for_the_user_alone(tmp_path):
    kept = kernels_in(tmp_path / "user" / "kernels")
    mask = os.umask(0)
    try:
        assert kept.get({"kernel": "Gemm"}, lambda: "built") == "built"
        assert kept.get({"kernel": "Gemm"}, lambda: "again") == "built"
    finally:
        os.umask(mask)
    assert (tmp_path / "user").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("what", "mode"),
    [
        ("parent", 0o777),
        ("directory", 0o777),
        ("directory", 0o770),
        ("entry", 0o770),
        ("object", 0o666),
        ("digest", 0o620),
        ("directory", None),
        ("entry", None),
        ("object", None),
    ],
)
def test_what_others_can_write_or_own_is_not_loaded(cache, what, mode, monkeypatch):
    """An entry with a digest that matches, where another user could have put it.

    Args:
        mode: of the path; None: another user owns it.
    """
    directory, count = cache
    build()
    (entry,) = entries(directory)
    path = {
        "parent": directory.parent,
        "directory": directory,
        "entry": entry,
        "object": entry / kernel_cache.OBJECT,
        "digest": entry / kernel_cache.DIGEST,
    }[what]
    original = Path.lstat

    def lstat(self):
        status = original(self)
        if self == path:
            status = os.stat_result([*status[:4], os.geteuid() + 1, *status[5:10]])
        return status

    if mode is None:
        monkeypatch.setattr(Path, "lstat", lstat)
    else:
        path.chmod(mode)
    monkeypatch.setattr(compiling, "load_module", never_called)
    why = "belongs to another user" if mode is None else ""
    with pytest.warns(RuntimeWarning, match=f"{re.escape(str(path))}.*{why}"):
        assert build() is not None
    assert count == [2]


def test_no_lock_is_waited_for_that_others_can_hold(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(OSError, match="can be written by other users"):
        with kernels_in(tmp_path).lock("prepare"):
            pytest.fail("locked")
    assert not [*tmp_path.iterdir()]


def test_what_get_would_not_load_is_not_there(tmp_path, monkeypatch):
    kept = kernels_in(tmp_path)
    assert not kept.has({"kernel": "Gemm"})
    kept.get({"kernel": "Gemm"}, lambda: "built")
    (entry,) = kept.entries()
    assert kept.has({"kernel": "Gemm"}) and not kept.has({"kernel": "Combine"})
    for path in (tmp_path, entry.path):
        mode = path.stat().st_mode
        path.chmod(0o777)
        assert not kept.has({"kernel": "Gemm"})
        path.chmod(mode)

    def refuse(path: Path) -> bool:
        raise PermissionError(path)

    monkeypatch.setattr(Path, "exists", refuse)
    assert not kept.has({"kernel": "Gemm"}), "in a directory that cannot be searched"


def test_the_cache_is_trimmed_to_its_limit(tmp_path):
    """Least recently used first; what a killed process left goes as well, once it is old."""
    made = kernels_in(tmp_path)
    for i in range(4):
        assert made.get({"kernel": f"K{i}"}, lambda i=i: f"code {i}") == f"code {i}"
        (tmp_path / next(tmp_path.glob(f"K{i}-*")) / kernel_cache.DIGEST).touch()
        os.utime(next(tmp_path.glob(f"K{i}-*")) / kernel_cache.DIGEST, (1000 + i, 1000 + i))
    assert made.get({"kernel": "K0"}, lambda: "never") == "code 0"  # used again
    old, young = (tmp_path / f".K0-{'0' * 32}-{name:_<8}" for name in ("old", "young"))
    for draft, age in ((old, 7200), (young, 60)):
        draft.mkdir()
        now = time.time() - age
        os.utime(draft, (now, now))
    assert [e.made_of["kernel"] for e in made.entries()] == ["K0", "K3", "K2", "K1"]
    size = made.entries()[0].size
    assert [e.made_of["kernel"] for e in made.trim(2 * size)] == ["K2", "K1"]
    assert [e.made_of["kernel"] for e in made.entries()] == ["K0", "K3"]
    assert [e.made_of["kernel"] for e in made.trim(2 * size - 1)] == ["K3"]
    assert [*tmp_path.glob(".*")] == [young]


def test_storing_trims(tmp_path, monkeypatch):
    monkeypatch.setattr(KernelCache.trim, "__defaults__", (1,))
    made = kernels_in(tmp_path)
    made.get({"kernel": "K"}, lambda: "longer than the limit")
    assert made.entries() == []


def _compile_in_process(directory: str, together: Any, counts: Any) -> None:
    os.environ[CACHE_VARIABLE] = directory
    compilations = []
    original = compiling.cute.compile
    compiling.cute.compile = lambda *a, **k: compilations.append(1) or original(*a, **k)
    together.wait()
    build(768)
    counts.put(len(compilations))


@pytest.mark.all
def test_four_processes_compile_once(tmp_path):
    """Of as many that are new, at the same time, as on a node of GPUs."""
    context = multiprocessing.get_context("spawn")
    together, counts = context.Barrier(4), context.Queue()
    given = (str(tmp_path), together, counts)
    start = functools.partial(context.Process, target=_compile_in_process, daemon=True)
    processes = [start(args=given) for _ in range(4)]
    for process in processes:
        process.start()
    assert sorted(counts.get(timeout=120) for _ in processes) == [0, 0, 0, 1]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert len(entries(tmp_path)) == 1


COMPILE_IN_THREADS = """
import sys, threading
from moe_fp8.kernels import compile as compiling
from moe_fp8.kernels import operations as kernels
from moe_fp8.kernels.configs import GemmConfigSm90 as GemmConfig
count, original = [], compiling.cute.compile
compiling.cute.compile = lambda *a, **k: count.append(1) or original(*a, **k)
start, made = threading.Barrier(8), []
def work(i):
    start.wait()
    # Some the same kernel, some different ones.
    made.append(kernels.compile_combine(256 * (1 + i % 3), 4, "sm_90a"))
    made.append(kernels.compile_grouped_gemm(GemmConfig(stages=2), 256, 256, 2, "sm_90a"))
threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
for t in threads: t.start()
for t in threads: t.join()
print(len(made), len(set(map(id, made))), len(count))
"""


@pytest.mark.all
@pytest.mark.parametrize("kept", [False, *more(True)], ids=["no cache", "cache"])
def test_eight_threads_compile_at_once(tmp_path, kept):
    """The DSL's compiler ends a process in which two threads use it."""
    directory = str(tmp_path / "kernels") if kept else ""
    result = subprocess.run(
        [sys.executable, "-c", COMPILE_IN_THREADS],
        env={**os.environ, CACHE_VARIABLE: directory, "PYTHONPATH": PATHS},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.split() == ["16", "4", "4"]


DIE_WHILE_COMPILING = """
import os, sys
from moe_fp8.kernels import compile as compiling
from moe_fp8.kernels import operations as kernels
if sys.argv[1] == "build":  # nothing is written yet
    compiling.cute.compile = lambda *a, **k: os.kill(os.getpid(), 9)
else:  # the object is there, its digest is not
    export = compiling._export
    def write_and_die(function, path):
        export(function, path)
        os.kill(os.getpid(), 9)
    compiling._export = write_and_die
kernels.compile_combine(512, 4, "sm_90a")
"""


@pytest.mark.all
@pytest.mark.parametrize("when", ["store", *more("build")])
def test_a_process_killed_while_it_compiles_leaves_nothing_in_the_way(cache, when):
    directory, count = cache
    result = subprocess.run(
        [sys.executable, "-c", DIE_WHILE_COMPILING, when],
        env={**os.environ, "PYTHONPATH": PATHS},
        capture_output=True,
    )
    assert result.returncode == -9, result.stderr[-2000:]
    build()
    build()
    assert count == [1]


def test_nothing_is_compiled_within_a_capture(monkeypatch):
    compile_it = compiling.CompiledOnce(lambda size: f"code {size}")
    monkeypatch.setattr(compiling.torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(compiling.torch.cuda, "is_current_stream_capturing", lambda: False)
    assert compile_it(1) == "code 1"
    monkeypatch.setattr(compiling.torch.cuda, "is_current_stream_capturing", lambda: True)
    assert compile_it(1) == "code 1", "what is there serves a capture"
    with pytest.raises(RuntimeError, match="warm up by a call with as many tokens"):
        compile_it(2)
