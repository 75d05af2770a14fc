"""What a run records of its machine, and when two captures are of the same."""

import pytest

from scripts.common import environment

SMI = "NVIDIA H200, 580.1, 143771 MiB, 1980 MHz, 1980 MHz, 3201 MHz, 37, 700.00 W"


def test_capture_has_what_a_result_depends_on() -> None:
    captured = environment.capture()
    assert {"python", "torch", "flashinfer-bench", "nvidia-cutlass-dsl"} <= set(
        captured["versions"]
    )
    assert captured["time"].endswith("+00:00") and captured["platform"]
    assert len(captured["source"]["hash"]) == 16


def test_gpus_are_read_from_nvidia_smi(monkeypatch) -> None:
    monkeypatch.setattr(environment, "_output", lambda command: f"{SMI}\n{SMI}")
    first, second = environment.gpus()
    assert first == second
    known = {"name": "NVIDIA H200", "driver": "580.1", "sm_clock": "1980 MHz"}
    assert first | known == first


def test_source_hash_follows_the_files(monkeypatch, tmp_path) -> None:
    package = tmp_path / "solutions" / "moe_fp8"
    (tmp_path / "scripts").mkdir()
    package.mkdir(parents=True)
    (package / "a.py").write_text("1\n")
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setattr(environment, "PACKAGE_DIR", package)
    before = environment.source_hash()
    assert environment.source_hash() == before
    (package / "a.py").write_text("2\n")
    changed = environment.source_hash()
    (package / "a.py").rename(package / "b.py")
    assert len({before, changed, environment.source_hash()}) == 3
    for name in ("program.py", "folder/program.py"):  # what times is part of the source, too
        before = environment.source_hash()
        (tmp_path / "scripts" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "scripts" / name).write_text("1\n")
        assert environment.source_hash() != before


def test_without_git_nothing_is_said_about_modifications(monkeypatch) -> None:
    monkeypatch.setattr(environment, "_output", lambda command: "")
    source = environment.source()
    assert source["commit"] == "" and source["modified"] is None and source["hash"]


CAPTURE = {
    "gpus": [{"name": "NVIDIA H200", "driver": "580.1", "sm_clock": "345 MHz"}],
    "cuda": "13.0",
    "versions": {"torch": "2.11.0", "triton": "3.6.0"},
}


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ({}, []),
        ({"gpus": [{"name": "NVIDIA H200", "driver": "580.1", "sm_clock": "1980 MHz"}]}, []),
        (
            {"gpus": [{"name": "NVIDIA H100", "driver": "580.1"}]},
            ["GPUs NVIDIA H200 then, NVIDIA H100 now"],
        ),
        ({"gpus": []}, ["GPUs NVIDIA H200 then, none now", "driver 580.1 then, none now"]),
        ({"cuda": "12.8"}, ["CUDA 13.0 then, 12.8 now"]),
        (
            {"versions": {"torch": "2.12.0", "numpy": "2"}},
            [
                "torch 2.11.0 then, 2.12.0 now",
                "triton 3.6.0 then, absent now",
                "numpy absent then, 2 now",
            ],
        ),
    ],
)
def test_differences_that_change_results(now: dict, said: list[str]) -> None:
    assert environment.differences(CAPTURE, CAPTURE | now) == said
