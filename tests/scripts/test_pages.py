"""Everything that pages name exists: paths, tests, programs and their options, links, commits."""

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest
from clone import PAGES

import run

ROOT = Path(__file__).parents[2]
MADE = ("blob/", "runs/", "traces/", "solutions/moe-fp8-cutedsl/", "solutions/baseline/", ".venv")
"""Made by the programs; not part of a clone."""
FOLDERS = ("", "docs", "docs/notes", "solutions/moe_fp8", "solutions/moe_fp8/kernels", "tests")
"""Folders that a page's paths may be relative to."""
ELSEWHERE = {
    # Files of a packed solution and of other projects.
    *("main.py", "config.json", "hpc/fuse_moe.py", "hpc/group_gemm.py"),
    # Examples.
    *("solutions/moe_fp8/ladder/v7_idea.py", "x.py", "x/__init__.py"),
}


@pytest.fixture(params=PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def page(request) -> Path:
    return request.param


def spans(page: Path) -> list[str]:
    """Return the text in backticks, outside of blocks of code."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", text)


@cache
def files() -> list[str]:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    listed = done.stdout.split() or [p.relative_to(ROOT).as_posix() for p in ROOT.rglob("*")]
    return [*listed, *{parent.as_posix() for p in listed for parent in Path(p).parents}]


def exists(path: str) -> bool:
    """Return True if the path is in a folder where a page's paths may start. The end of a path is
    enough for a file's name."""
    path = path.rstrip("/")
    if any((ROOT / folder / path).exists() for folder in FOLDERS):
        return True
    return any(f"/{known}".endswith(f"/{path}") for known in files())


def paths(page: Path) -> list[str]:
    names = [s for s in spans(page) if re.fullmatch(r"[\w.-]*[\w/-]+(\.(py|md|json|html)|/)", s)]
    return [p for p in names if not p.startswith(MADE) and p not in ELSEWHERE]


def links(page: Path) -> list[str]:
    """Return the links to files of the repository."""
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text("utf-8"))
    return [t for t in targets if not t.startswith("https://")]


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


def anchored(page: Path) -> list[tuple[Path, str]]:
    """Return the links to a heading: the page and the anchor."""
    text = page.read_text("utf-8")
    targets = re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", text)
    return [((page.parent / t).resolve() if t else page, a) for t, a in targets if "://" not in t]


def names_of_tests(page: Path) -> list[str]:
    return re.findall(r"\btest_\w+", page.read_text("utf-8"))


def starts(page: Path) -> list[tuple[str, list[str]]]:
    """Return the programs that a page starts, each with its options."""
    calls = re.findall(r"run\.py ([a-z_]+)([^`\n]*)", page.read_text("utf-8"))
    options = re.compile(r"(?<=\s)--([a-z0-9-]+)")
    return [(n, options.findall(text)) for n, text in calls if n not in ("test", "setup")]


def commits(page: Path) -> list[str]:
    text = re.sub(r"\]\([^)]*\)", "]", page.read_text("utf-8"))
    return re.findall(r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*[0-9])[0-9a-f]{7}\b", text)


def options(page: Path) -> list[str]:
    return [option for _, option_names in starts(page) for option in option_names]


@pytest.mark.parametrize(
    ("finder", "least"),
    [
        (paths, 60),
        (links, 30),
        (anchored, 20),
        (names_of_tests, 30),
        (starts, 15),
        (options, 15),
        (commits, 10),
    ],
)
def test_the_checks_find_their_targets_on_the_pages(finder, least: int) -> None:
    """A test that finds nothing to look up cannot fail."""
    assert sum(len(finder(page)) for page in PAGES) >= least


def test_paths(page: Path) -> None:
    assert [p for p in paths(page) if not exists(p)] == []


def test_links(page: Path) -> None:
    assert [t for t in links(page) if not (page.parent / t).exists()] == []


def test_anchors(page: Path) -> None:
    assert [a for target, a in anchored(page) if a not in anchors(target)] == []


@cache
def defined_tests() -> set[str]:
    sources = [p for f in ("tests", "emulator/tests") for p in (ROOT / f).rglob("test_*.py")]
    defined = {n for p in sources for n in re.findall(r"^def (test_\w+)", p.read_text(), re.M)}
    return defined | {p.stem for p in sources}


def test_names_of_tests(page: Path) -> None:
    """A page may name a file without its ending, or a common beginning of several tests."""
    named = set(names_of_tests(page))
    assert [n for n in named if not any(known.startswith(n) for known in defined_tests())] == []


def test_programs_and_their_options(page: Path) -> None:
    programs = run.programs()
    shared = (ROOT / "scripts" / "common" / "options.py").read_text("utf-8")
    for name, option_names in starts(page):
        assert name in programs, name
        own = programs[name].read_text("utf-8")
        for option in option_names:
            assert f'"--{option}"' in own + shared, (name, option)


def test_commits(page: Path) -> None:
    """Commits that pages name can be looked up, in a clone with its history."""
    history = subprocess.run(
        ["git", "rev-list", "--abbrev-commit", "--abbrev=7", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    ours = set(history.stdout.split())
    if len(ours) < 100:
        pytest.skip("a clone without its history")
    # flashinfer-bench, hpc-ops.
    others = {"40e6ca7", "6e2eced"}
    assert set(commits(page)) - others <= ours
