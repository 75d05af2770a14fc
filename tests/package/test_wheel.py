"""The wheels of the package and of the emulator, made from their sdists and installed into an
environment without the project."""

import email
import os
import re
import site
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import bruteforce
import cutlass
import pytest
import torch
from clone import copy_files
from markers import more
from moe_fp8 import experts, fused_moe
from moe_fp8.shape import MoeShape

from scripts.measuring.emulate import why_not

ROOT = Path(__file__).parents[2]
PACKAGE, EMULATOR = ROOT / "solutions" / "moe_fp8", ROOT / "emulator"
pytestmark = pytest.mark.xdist_group("wheel")  # they are built once
SHAPE = MoeShape(hidden_size=256, intermediate_size=128)

CALLS = """
import moe_fp8, torch

given = torch.load("arguments.pt")
outputs = [getattr(moe_fp8, name)(**arguments) for name, arguments in given.items()]
torch.save(outputs, "outputs.pt")
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the wheels and sdists, built from a copy: a build writes beside the sources."""
    folder = tmp_path_factory.mktemp("built")
    copy_files(folder / "clone")
    # What builds is one of the extras: without isolation nothing is fetched.
    for project in ("clone", "clone/emulator"):
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, project]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return folder


def one(built: Path, pattern: str) -> Path:
    (path,) = built.glob(pattern)
    return path


def files_of(package: Path) -> set[str]:
    """Return a package's files, as a wheel names them."""
    files = (*package.rglob("*.py"), package / "py.typed", *(package / "core").glob("*"))
    return {path.relative_to(package.parent).as_posix() for path in files}


@pytest.mark.parametrize("package", [PACKAGE, EMULATOR / "ptxemu"], ids=lambda path: path.name)
def test_a_wheel_holds_its_package_and_nothing_else(package: Path, built: Path) -> None:
    wheel = one(built, f"{package.name}*.whl")
    metadata = f"{wheel.name.rsplit('-', 3)[0]}.dist-info/"
    names = {n for n in zipfile.ZipFile(wheel).namelist() if not n.startswith(metadata)}
    assert names == files_of(package) and len(names) > 40
    assert wheel.name.endswith("-py3-none-any.whl")
    licence = zipfile.ZipFile(wheel).read(f"{metadata}licenses/LICENSE")
    assert licence == (ROOT / "LICENSE").read_bytes()


def files_in(sdist: Path) -> set[str]:
    """Return an sdist's files, but those that setuptools makes."""
    with tarfile.open(sdist) as file:
        names = {member.name.partition("/")[2] for member in file if member.isfile()}
    return {n for n in names if n not in ("PKG-INFO", "setup.cfg") and ".egg-info/" not in n}


def test_an_sdist_holds_what_the_wheel_is_made_of(built: Path) -> None:
    """The emulator's also holds its tests."""
    read = {"LICENSE", "README.md", "docs/pypi.md", "pyproject.toml"}
    names = files_in(one(built, "moe_fp8*.tar.gz"))
    assert {name for name in names if not name.startswith("solutions/")} == read
    names = files_in(one(built, "ptxemu*.tar.gz"))
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(listing, cwd=EMULATOR, capture_output=True, text=True).stdout
    assert not listed or names == {n for n in listed.splitlines() if (EMULATOR / n).is_file()}
    assert "tests/conftest.py" in names


@pytest.mark.parametrize("project", ["moe_fp8", "ptxemu"])
def test_a_long_description_renders_without_the_repository(project: str, built: Path) -> None:
    """PyPI has no file that a relative link or picture could lead to."""
    wheel = one(built, f"{project}*.whl")
    metadata = next(n for n in zipfile.ZipFile(wheel).namelist() if n.endswith("/METADATA"))
    parsed = email.message_from_bytes(zipfile.ZipFile(wheel).read(metadata))
    assert parsed["Description-Content-Type"] == "text/markdown"
    targets = re.findall(r"\]\(([^)]*)|(?:href|src)=\"([^\"]*)", parsed.get_payload())
    assert all(target.startswith("https://") for target in map("".join, targets))


def environment_with(wheel: Path, place: Path) -> Path:
    """Return the interpreter of an environment with the wheel, beside what it requires as it is
    installed here: the .pth files there, which would add the clone, are not read."""
    venv.create(place / "environment", with_pip=False, symlinks=True)
    python = place / "environment" / "bin" / "python"
    (packages,) = (place / "environment" / "lib").glob("python*/site-packages")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*command, "--target", packages, wheel], check=True)
    installed = [*site.getsitepackages(), Path(cutlass.__file__).parents[1]]
    (packages / "requirements.pth").write_text("".join(f"{path}\n" for path in installed))
    return python


@pytest.fixture
def environment(built: Path, tmp_path: Path) -> Path:
    return environment_with(one(built, "moe_fp8*.whl"), tmp_path)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A directory outside of the clone."""
    path = tmp_path / "elsewhere"
    path.mkdir()
    return path


def without_python_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def test_the_installed_wheel_does_what_its_description_says(
    environment: Path, elsewhere: Path
) -> None:
    command = [environment, Path(__file__).with_name("installed.py")]
    options = {"cwd": elsewhere, "env": without_python_variables(), "text": True}
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, **options).stdout
    assert printed == "torch.Size([4, 512]) torch.bfloat16\n"


def test_the_installed_wheel_gives_the_bits_of_the_clone(
    environment: Path, elsewhere: Path
) -> None:
    inputs = bruteforce.random_inputs(SHAPE, 13, 32, 13, favourite=40)
    names = ("w13", "w13_scale", "w2", "w2_scale")
    routed = {
        "topk_ids": torch.randint(30, 66, (13, 8), dtype=torch.int32),
        "topk_weights": torch.rand(13, 8),
        "x": torch.randn(13, SHAPE.hidden_size).bfloat16(),
        **dict(zip(names, inputs[4:8], strict=True)),
        "local_expert_offset": 32,
        "num_experts": SHAPE.num_experts,
    }
    arguments = {"fused_moe": inputs._asdict(), "experts": routed}
    torch.save(arguments, elsewhere / "arguments.pt")
    command = [environment, "-c", CALLS]
    subprocess.run(command, cwd=elsewhere, env=without_python_variables(), check=True)
    outputs = torch.load(elsewhere / "outputs.pt")
    for output, wanted in zip(
        outputs, (fused_moe(**arguments["fused_moe"]), experts(**routed)), strict=True
    ):
        assert wanted.isfinite().all() and wanted.any() and torch.equal(output, wanted)


SCRIPT = (ROOT / "examples" / "first_gemm.py").read_text("utf-8")


@pytest.fixture
def with_emulator(built: Path, tmp_path: Path) -> Path:
    if reason := why_not():
        pytest.skip(reason)
    return environment_with(one(built, "ptxemu*.whl"), tmp_path)


def test_the_emulators_wheel_alone_runs_a_script(with_emulator: Path, elsewhere: Path) -> None:
    """It needs a compiler, and says so where there is none."""
    (elsewhere / "script.py").write_text(SCRIPT)
    command = [with_emulator, "-m", "ptxemu", "script.py"]
    options = {"cwd": elsewhere, "capture_output": True, "text": True}
    done = subprocess.run(command, env=without_python_variables(), **options)
    assert done.returncode == 0 and "1 launches, 0 hazards" in done.stderr, done.stderr
    assert re.search(r"error \S+$", done.stdout, re.M), done.stdout
    nowhere = {"PATH": "", "HOME": str(elsewhere)}
    done = subprocess.run(command, env=nowhere, **options)
    assert done.returncode == 1
    assert re.fullmatch(r"error: .* needs a C\+\+17 compiler: .*apt install g\+\+.*\n", done.stderr)


@pytest.mark.parametrize("tests", ["test_dsl.py", *more(".")])
def test_the_emulators_tests_pass_on_its_wheel(
    tests: str, with_emulator: Path, elsewhere: Path
) -> None:
    origin = [with_emulator, "-c", "import ptxemu; print(ptxemu.__file__)"]
    options = {"cwd": elsewhere, "env": without_python_variables(), "text": True}
    where = subprocess.run(origin, check=True, stdout=subprocess.PIPE, **options).stdout
    assert Path(where).is_relative_to(with_emulator.parents[1])
    command = [with_emulator, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command.append(EMULATOR / "tests" / tests)
    done = subprocess.run(command, stdout=subprocess.PIPE, **options)
    assert done.returncode == 0, done.stdout
