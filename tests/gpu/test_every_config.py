"""Every config that ships, on the GPU against the reference model."""

import os
import subprocess
import sys
from concurrent.futures import as_completed

import every_config
import pytest
import torch
from moe_fp8.kernels import architectures

from scripts.measure.processes import process_pool

LIMIT_S = 600
"""Limit for all compilations, and for all runs."""
MOST_PROCESSES = 12


def test_every_config():
    """Configs compile in parallel and run in one process, which names each before it begins. If the
    process ends, the last one named has hung or crashed the GPU."""
    target = architectures.of_device(torch.device("cuda")).target
    todo = every_config.shipped(target)
    workers = min(os.cpu_count() or 1, MOST_PROCESSES)
    with process_pool(workers, "spawn") as pool:
        for done in as_completed([pool.submit(every_config.compile_job, j) for j in todo], LIMIT_S):
            done.result()
    code = f"import sys; sys.path[:0] = {sys.path!r}; import every_config; every_config.main()"
    command = [sys.executable, "-c", code]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired as late:
        # The output is bytes here, although text was asked for.
        pytest.fail(f"hangs: {(late.stdout or b'').decode().splitlines()[-1:]}")
    named = ran.stdout.splitlines()
    assert ran.returncode == 0, f"the last one: {named[-1:]}\n{ran.stderr[-2000:]}"
    assert named == list(map(str, todo))
