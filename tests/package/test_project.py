"""Check what pyproject.toml, the changelog, CI, pre-commit and the API page have in common."""

import re
from pathlib import Path

from moe_fp8 import PUBLIC
from packaging.specifiers import SpecifierSet

import run

ROOT = Path(__file__).parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text("utf-8")
EMULATOR = (ROOT / "emulator" / "pyproject.toml").read_text("utf-8")
WORKFLOW = (ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8")
VERSION = r"3\.\d+"


def test_the_changelog_begins_with_the_version() -> None:
    (version,) = re.findall(r'^version = "(.+)"$', PYPROJECT, re.MULTILINE)
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert re.findall(r"^## (.+)$", changes, re.MULTILINE)[0] == version


def test_the_pythons_are_named_alike() -> None:
    """CI runs the tests with the oldest, the newest and one between."""
    oldest, newest = run.PYTHONS
    pythons = [f"3.{minor}" for minor in range(oldest[1], newest[1] + 1)]
    for project in (PYPROJECT, EMULATOR):
        assert re.findall(rf'"Programming Language :: Python :: ({VERSION})"', project) == pythons
    (required,) = {
        version
        for project in (PYPROJECT, EMULATOR)
        for version in re.findall(r'^requires-python = "(.+)"$', project, re.MULTILINE)
    }
    every = [f"3.{minor}" for minor in range(30)]
    assert [*SpecifierSet(required).filter(every)] == pythons
    (checked,) = re.findall(rf'^python_version = "({VERSION})"$', PYPROJECT, re.MULTILINE)
    (target,) = re.findall(r'^target-version = "py3(\d+)"$', PYPROJECT, re.MULTILINE)
    assert checked == f"3.{target}" == pythons[0], "types and syntax are the oldest's"
    (tested,) = re.findall(r"python: \[(.+)\]", WORKFLOW)
    assert {pythons[0], pythons[-1]} <= {*re.findall(VERSION, tested)} <= {*pythons}


def test_the_emulator_takes_the_same_versions_of_the_dsl() -> None:
    dsl = [re.findall(r'"(nvidia-cutlass-dsl.*)"', project) for project in (PYPROJECT, EMULATOR)]
    assert len(dsl[0]) == 1 and dsl[0] == dsl[1]


def test_the_checkers_have_one_version() -> None:
    """pre-commit and the API page use those of the extra `dev`."""
    pinned = {r for r in run.requirements("dev") if r.startswith(("ruff==", "mypy=="))}
    hooks = (ROOT / ".pre-commit-config.yaml").read_text("utf-8")
    assert len(pinned) == 2 and set(re.findall(r'"(\w+==.+?)"', hooks)) == pinned
    assert set(re.findall(r'"((?:ruff|mypy)==.+?)"', PYPROJECT)) == pinned


def test_the_api_page_has_every_public_function_and_no_other() -> None:
    """Name each by its module: a heading shows the name alone."""
    page = (ROOT / "docs" / "api" / "index.md").read_text("utf-8")
    described = re.findall(r"^::: (.+)$", page, re.MULTILINE)
    public = [f"moe_fp8.{module}.{name}" for name, module in PUBLIC.items()]
    assert sorted(described) == sorted(public)
