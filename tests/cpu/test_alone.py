"""Configs and probes, each in a process of its own: what hangs, dies or is wrong is named and takes
nothing else with it. Small functions stand for the kernels."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from moe_fp8.kernels.architectures import ARCHITECTURES, of_target
from moe_fp8.kernels.sm90 import heuristic as sm90
from moe_fp8.kernels.sm100 import heuristic as sm100
from moe_fp8.layer import model

from scripts.common.command_line import ENDING
from scripts.measure import alone, configs


def does(what: str, target: str, emulated: bool) -> Callable[[], str]:
    """A job that goes by its name."""
    assert target == "sm_90a"
    if what == "compiler fails":
        raise ValueError("no such\nkernel")
    if what == "compiler hangs":
        time.sleep(600)

    def run() -> str:
        if what == "is told to end":  # with the process that it is for
            for number in ENDING:
                os.kill(os.getpid(), number)
        if what == "hangs":
            time.sleep(600)
        if what == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "wrong":
            raise alone.WrongError("off by 2")
        return what

    return run


def rows_of(jobs: list[str], emulated: bool = True, limit_s: float = 1.0) -> dict[str, tuple]:
    found = alone.outcomes(jobs, does, "sm_90a", emulated, limit_s)
    return {row["job"]: (row["status"], row.get("error")) for row in found}


def test_what_becomes_of_a_job(monkeypatch) -> None:
    monkeypatch.setattr(alone, "COMPILE_LIMIT_S", 3.0)
    jobs = ["good", "hangs", "dies", "wrong", "compiler fails", "compiler hangs"]
    jobs += ["is told to end", "also good"]
    assert rows_of(jobs) == {
        "good": ("passed", None),
        "hangs": ("hangs", "running, ended after its limit"),
        "dies": ("died", f"running, exit code {-signal.SIGKILL}"),
        "wrong": ("wrong", "off by 2"),
        "compiler fails": ("error", "ValueError: no such"),
        "compiler hangs": ("hangs", "compiling, ended after its limit"),
        "is told to end": ("passed", None),
        "also good": ("passed", None),
    }
    assert not multiprocessing.active_children()


def test_without_the_emulator_nothing_is_forked() -> None:
    """A process that has used the GPU cannot be."""
    assert rows_of(["good", "wrong"], False, 60) == {
        "good": ("passed", None),
        "wrong": ("wrong", "off by 2"),
    }


def test_one_at_a_time_on_the_gpu(tmp_path: Path, monkeypatch) -> None:
    """They compile side by side, and each runs when no other one does."""
    monkeypatch.setattr(alone.os, "cpu_count", lambda: 3)

    def prepare(name: str, target: str, emulated: bool) -> Callable[[], str]:
        (tmp_path / f"{name} compiles").touch()
        while len(list(tmp_path.glob("* compiles"))) < 3:  # or it waits until the test's limit
            time.sleep(0.01)

        def run() -> str:
            (tmp_path / "running").touch(exist_ok=False)
            time.sleep(0.1)
            (tmp_path / "running").unlink()
            return name

        return run

    found = list(alone.outcomes("abcd", prepare, "sm_90a", True, 10.0))
    assert {row["job"]: row["output"] for row in found} == {name: name for name in "abcd"}


@pytest.mark.parametrize("target", sorted({a.target for a in ARCHITECTURES.values()}))
def test_every_config_that_ships_or_is_tried_is_checked(target: str) -> None:
    jobs = configs.jobs(target)
    shipped, names = configs.jobs(target, shipped=True), set(map(str, jobs))
    assert set(map(str, shipped)) < names and len(names) == len(jobs)
    layers = {job for job in shipped if len(job.configs) > 1}
    for tokens in (1, 7, 80, 901, 14107):
        for terms in (1, 2):
            pair = of_target(target).choose_layer(tokens, configs.DEEPSEEK_V3, terms)
            assert configs.Job(pair, terms) in layers
    alone_names = {str(job.configs[0]) for job in jobs if len(job.configs) == 1}
    for rows in configs.ROWS:
        tried = configs.candidates(rows, of_target(target))
        assert {str(config) for config in tried} <= alone_names
    if target != "sm_90a":
        assert set(map(str, sm100.PICKED)) <= {str(job.configs[0]) for job in shipped}
        assert len({str(c) for rows in configs.ROWS for c in configs.candidates(
            rows, of_target(target))}) == 98  # fmt: skip
    else:
        assert str(sm90.LARGEST) in {str(job.configs[0]) for job in shipped}


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda out: None, None),
        (lambda out: out[1].add_(8), "experts with 17 rows"),
        (lambda out: out[-1].fill_(1), "experts with no rows; rows of no expert are written"),
        (lambda out: out[0].fill_(torch.nan), "off by up to nan, in experts with 1 rows"),
    ],
)
def test_a_gemm_is_compared_exactly(spoil, said) -> None:
    at = configs.place("sm_90a", True)._replace(rows=(0, 1, 17), n=128, k=256)

    def gemm(a, a_scale, b, b_scale, out, expert_rows, config) -> None:
        model.grouped_gemm(a, a_scale, b, b_scale, out, expert_rows)
        spoil(out)

    if said is None:
        assert configs.run_gemm(gemm, None, at) == configs.run_gemm(gemm, None, at)
    else:
        with pytest.raises(alone.WrongError, match=said):
            configs.run_gemm(gemm, None, at)


@pytest.mark.parametrize("terms", [1, 2])
def test_a_layer_is_compared_with_its_model(terms: int) -> None:
    at = configs.place("sm_90a", True)._replace(tokens=16)
    right = lambda inputs, out: model.fused(inputs, out, at.shape, terms)  # noqa: E731
    assert configs.run_layer(right, terms, at) == configs.run_layer(right, terms, at)

    def one_row_off(inputs, out) -> None:
        right(inputs, out)
        out[3] *= 1.5

    for wrong in (one_row_off, lambda inputs, out: None):
        with pytest.raises(alone.WrongError, match="calc_diff"):
            configs.run_layer(wrong, terms, at)


def test_configs_with_other_bits_than_most() -> None:
    outputs = {"GEMM: a": "1", "GEMM: b": "2", "GEMM: c": "1", "layer, one term: d": "3"}
    rows = [{"job": job, "status": "passed", "output": bits} for job, bits in outputs.items()]
    rows.append({"job": "GEMM: e", "status": "hangs", "error": ""})
    assert [row["job"] for row in configs.odd_ones(rows)] == ["GEMM: b"]
