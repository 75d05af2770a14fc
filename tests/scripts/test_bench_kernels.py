"""`bench` with the kernels themselves, emulated at a definition's true geometry: what passes, and
that one changed line of a kernel, which the reference model does not show, is found."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from flashinfer_bench.data import Trace, load_jsonl_file
from programs import call

from run import environment
from scripts.common.definitions import find
from scripts.data.traces import read_results

BREAKAGES = {
    "the combine waits for nothing": ("combine.py", "wait_for_previous()", "pass", "global-race"),
    "gate and up are exchanged": (
        "epilogue.py",
        "gate, up = (first, second)",
        "up, gate = (first, second)",
        "matched ratio 0",
    ),
}
SCRIPT = """
import json, sys
from flashinfer_bench.data import Solution
from scripts.common.command_line import run_main
from scripts.measuring import cases as plan
from scripts import bench

packed, breakages = plan.packed_solutions, json.loads(sys.argv.pop(1))

def with_broken(paths):
    found = packed(paths)
    (fused,) = (s for s in found if s.name == "cutedsl_moe_fp8_fused_qwen3_next")
    for name, (path, old, new, _) in breakages.items():
        sources = [
            s.model_copy(update={"content": s.content.replace(old, new)})
            if s.path == f"moe_fp8/kernels/{path}" else s
            for s in fused.sources
        ]
        assert sources != fused.sources, name
        # A copy would keep the hash, by which a build is found again.
        found.append(Solution(**{**dict(fused), "name": name, "sources": sources}))
    return found

plan.packed_solutions = with_broken
run_main(bench.main)
"""
LAYER = find("qwen3_next")
"""The least weights of all."""


@pytest.mark.all
def test_the_kernels_pass_and_what_is_broken_in_one_is_found(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("FIB_CACHE_PATH", str(tmp_path / "cache"))
    hifi = f"cutedsl_moe_fp8_fused_hifi_{LAYER.short}"
    arguments = ["--cpu", "--definition", LAYER.short, "--workloads", "T=1", "--no-report"]
    arguments += ["--traces", str(tmp_path / "t"), "--solutions", hifi]
    command = [sys.executable, "-c", SCRIPT, json.dumps(BREAKAGES), *arguments, *BREAKAGES]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "reference model on the CPU" in done.stderr and "not run: 7 workloads" in done.stderr
    assert re.search(rf"{hifi} +1/1 ", done.stdout)

    (made,) = (tmp_path / "t").iterdir()
    found = {r.solution: r for r in read_results([made / "traces.jsonl"], LAYER.name).itertuples()}
    assert found.keys() == {hifi, *BREAKAGES}
    assert {(r.emulated, r.cpu) for r in found.values()} == {("sm_90a", True)}, "the model is right"
    for name, (*_, reason) in BREAKAGES.items():
        assert not found[name].passed and reason in found[name].reason, found[name].reason
    right = found[hifi]
    assert right.passed and right.cosine > 0.999 and right.matched_ratio > 0.85
    (trace,) = (t for t in load_jsonl_file(Trace, made / "traces.jsonl") if t.solution == hifi)
    assert trace.is_successful() and trace.evaluation.performance.latency_ms == 0, "no time"
    info = json.loads((made / "run.json").read_text())
    assert info["finished"] and info["solutions"][hifi] == right.hash

    # Nothing is left to do for the same sources, and nothing is measured twice.
    again = call("bench", *arguments, "--resume")
    assert again.returncode == 1 and "0 workloads to run" in again.stderr
    assert len(read_results([made / "traces.jsonl"], LAYER.name)) == len(found)
