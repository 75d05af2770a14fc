"""The machine in a run's record, and the comparison of two captures."""

from typing import Any

import pytest

from scripts.common import environment

SMI = "NVIDIA H200, 580.1, 143771 MiB, 1980 MHz, 1980 MHz, 3201 MHz, 37, 700.00 W"


def test_capture_has_what_a_result_depends_on(monkeypatch) -> None:
    monkeypatch.setattr(environment, "_output", lambda command: f"{SMI}\n{SMI}")
    captured = environment.capture()
    packages = {"python", "torch", "flashinfer-bench", "nvidia-cutlass-dsl"}
    assert packages <= set(captured["versions"])
    assert captured["time"].endswith("+00:00") and captured["platform"]
    assert len(captured["source"]["hash"]) == 16
    first, second = captured["gpus"]
    known = {"name": "NVIDIA H200", "driver": "580.1", "sm_clock": "1980 MHz"}
    assert first == second == first | known


def test_source_hash_follows_the_files_and_their_names(monkeypatch, tmp_path) -> None:
    package = tmp_path / "solutions" / "moe_fp8"
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setattr(environment, "PACKAGE_DIR", package)
    hashes = []
    for path, content in (
        (package / "a.py", "1\n"),
        (package / "a.py", "2\n"),
        (tmp_path / "scripts/program.py", "1\n"),  # what times is part of the source, too
        (tmp_path / "scripts/folder/program.py", "1\n"),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        hashes.append(environment.source_hash())
    assert environment.source_hash() == hashes[-1]
    (package / "a.py").rename(package / "b.py")
    assert len({*hashes, environment.source_hash()}) == 5


def test_without_git_nothing_is_said_about_modifications(monkeypatch) -> None:
    monkeypatch.setattr(environment, "_output", lambda command: "")
    source = environment.source()
    assert source["commit"] == "" and source["modified"] is None and source["hash"]


CAPTURE: dict[str, Any] = {
    "gpus": [{"name": "NVIDIA H200", "driver": "580.1", "sm_clock": "345 MHz"}],
    "cuda": "13.0",
    "versions": {"torch": "2.11.0", "triton": "3.6.0"},
}


OTHERS = {
    "": {},
    "GPUs NVIDIA H200 then, H100 now": {"gpus": [{"name": "H100", "driver": "580.1"}]},
    "GPUs NVIDIA H200 then, none now; driver 580.1 then, none now": {"gpus": []},
    "CUDA 13.0 then, 12.8 now": {"cuda": "12.8"},
    "torch 2.11.0 then, 2.12.0 now; triton 3.6.0 then, absent now": {
        "versions": {"torch": "2.12.0"}
    },
    "numpy absent then, 2 now": {"versions": CAPTURE["versions"] | {"numpy": "2"}},
}


@pytest.mark.parametrize("sentence", OTHERS)
def test_differences_that_change_results_are_said_and_clocks_are_none(sentence: str) -> None:
    clock = {"gpus": [CAPTURE["gpus"][0] | {"sm_clock": "1980 MHz"}]}
    now = CAPTURE | clock | OTHERS[sentence]
    assert "; ".join(environment.differences(CAPTURE, now)) == sentence
