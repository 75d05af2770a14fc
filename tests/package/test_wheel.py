"""The wheel, made from the sdist and installed into an environment without the project."""

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
from moe_fp8 import experts, fused_moe
from moe_fp8.shape import MoeShape

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "solutions" / "moe_fp8"
pytestmark = pytest.mark.xdist_group("wheel")  # it is built once
SHAPE = MoeShape(hidden_size=256, intermediate_size=128)

CALLS = """
import moe_fp8, torch

given = torch.load("arguments.pt")
outputs = [getattr(moe_fp8, name)(**arguments) for name, arguments in given.items()]
torch.save(outputs, "outputs.pt")
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with both, built from a copy: a build writes beside the sources."""
    folder = tmp_path_factory.mktemp("built")
    copy_files(folder / "clone")
    # What builds is one of the extras: without isolation nothing is fetched.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, "clone"]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return folder


def test_the_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    metadata = f"{wheel.name.rsplit('-', 3)[0]}.dist-info/"
    names = {n for n in zipfile.ZipFile(wheel).namelist() if not n.startswith(metadata)}
    sources = (*PACKAGE.rglob("*.py"), PACKAGE / "py.typed")
    assert names == {path.relative_to(PACKAGE.parent).as_posix() for path in sources}
    assert len(names) > 50


def test_the_sdist_holds_what_the_wheel_is_made_of(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as file:
        paths = [member.name.split("/")[1:] for member in file if member.isfile()]
    made = {"PKG-INFO", "setup.cfg"}
    read = {"LICENSE", "README.md", "docs/pypi.md", "pyproject.toml"}
    others = {"/".join(path) for path in paths if path[0] != "solutions"}
    assert others == made | read


def test_the_long_description_renders_without_the_repository(built: Path) -> None:
    """PyPI has no file that a relative link or picture could lead to."""
    (wheel,) = built.glob("*.whl")
    metadata = next(n for n in zipfile.ZipFile(wheel).namelist() if n.endswith("/METADATA"))
    parsed = email.message_from_bytes(zipfile.ZipFile(wheel).read(metadata))
    assert parsed["Description-Content-Type"] == "text/markdown"
    targets = re.findall(r"\]\(([^)]*)|(?:href|src)=\"([^\"]*)", parsed.get_payload())
    assert all(target.startswith("https://") for target in map("".join, targets))


@pytest.fixture
def environment(built: Path, tmp_path: Path) -> Path:
    """The interpreter of an environment with the wheel, beside what it requires as it is installed
    here: the .pth files there, which would add the clone, are not read."""
    venv.create(tmp_path / "environment", with_pip=False, symlinks=True)
    python = tmp_path / "environment" / "bin" / "python"
    (packages,) = (tmp_path / "environment" / "lib").glob("python*/site-packages")
    (wheel,) = built.glob("*.whl")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*command, "--target", packages, wheel], check=True)
    installed = [*site.getsitepackages(), Path(cutlass.__file__).parents[1]]
    (packages / "requirements.pth").write_text("".join(f"{path}\n" for path in installed))
    return python


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
