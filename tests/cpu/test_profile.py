"""The profile of a call's kernels: work by hand, the table, and the program."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_timing import FLUSH, calls_of

import run
from scripts.common.definitions import find
from scripts.common.floors import pair_flops
from scripts.measure import floors, gpu, plan, profile, timing
from scripts.measure.gemm_problems import Histogram
from scripts.measure.profile import Work
from scripts.programs import profile as program

RATES = {"copy_bytes_per_s": 4e12, "read_bytes_per_s": 3e12, "fp8_flops_per_s": 1.5e15}
OURS = "kernel_cutlass_kernel_moe_fp8_3f2a{}_object_at__tensor00_o_i64_div471681110_Cop_3"
FUSED = [
    OURS.format(path)
    for path in (
        "kernelsrouteChooseExperts",
        "kernelsrouteNumberRows",
        "kernelspermutePermute",
        "kernelssm90gemmGroupedGemmSm90",
        "kernelssm90gemmGroupedGemmSm90",
        "kernelscombineCombine",
    )
]
FUSED_STAGES = ["choose", "number", "permute", "gemm1", "gemm2", "combine"]


def test_timings_are_medians_and_gaps_may_be_negative() -> None:
    calls = timing.split(calls_of("a", "b", calls=3), 3)
    kernels = [
        {"name": "a", "us": 11.0, "us_p10": 10.0, "us_p90": 12.0, "gap_us": None},
        {"name": "b", "us": 12.0, "us_p10": 11.0, "us_p90": 13.0, "gap_us": -2.0},
    ]
    assert profile.timings(calls) == {"kernels": kernels, "sum_us": 23.0, "span_us": 21.0}


# --- the work --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "short", "stage"),
    [
        (FUSED[0], "ChooseExperts", "choose"),
        (FUSED[3], "GroupedGemmSm90", None),  # one GEMM alone: which is not known
        (OURS.format("kernelsswiglu_quantSwigluQuant"), "SwigluQuant", "swiglu_quant"),
        ("_route_kernel", "_route_kernel", "choose"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>>(int)",
            "vectorized_elementwise_kernel",
            None,
        ),
        ("void (anonymous namespace)::elementwise<int>(int)", "elementwise", None),
        ("void at::native::reduce_kernel<512, 1>(int)", "reduce_kernel", None),
        (FLUSH, "Memset", None),
    ],
)
def test_names_of_kernels(name: str, short: str, stage: str | None) -> None:
    assert profile.short_name(name) == short
    assert profile.stages([name]) == [stage]


@pytest.mark.parametrize(
    "gemm",
    [
        "_grouped_gemm_kernel",
        "void deep_gemm::sm90_fp8_gemm_1d2d_impl<(cute::UMMA::Major)0, 128u>(float*)",
        "void hpc::group_gemm::kernels::group_gemm_blockwise_fp8_kernel<Config<int>, true>(int*)",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<int>>(Params)",
    ],
)
def test_the_gemms_of_peers_are_told_apart_by_their_order(gemm: str) -> None:
    names = [gemm, "other", "_swiglu_quant_kernel", gemm]
    assert profile.stages(names) == ["gemm1", None, "swiglu_quant", "gemm2"]


def test_a_stage_in_several_launches_has_no_work_of_its_own() -> None:
    assert profile.stages(FUSED) == FUSED_STAGES
    assert profile.stages(FUSED * 2) == [None] * 12


def test_the_work_is_that_of_the_layer() -> None:
    """Three tokens, two of which have a local expert; 4 pairs on 2 experts."""
    h = Histogram("a", 3, (3, 0, 1), hit=2)
    w13, w2 = 4096 * 7168 + 4 * 32 * 56, 7168 * 2048 + 4 * 56 * 16
    token, q = 7168 + 4 * 56, 2048 + 4 * 16
    assert profile.work(h, gathers=False, quantises=False) == {
        "route": Work(3 * (4 * 256 + 4 * 8 + 4 * 8)),
        "choose": Work(3 * (4 * 256 + 4 * 8 + 4 * 8)),
        "number": Work(3 * (4 * 8 + 4 * 8)),
        "permute": Work(3 * 4 * 8 + 2 * token + 4 * token),
        "gemm1": Work(2 * w13 + 4 * (token + 2 * 4096), 2 * 4 * 4096 * 7168),
        "swiglu_quant": Work(4 * (2 * 4096 + q)),
        "gemm2": Work(2 * w2 + 4 * (q + 2 * 7168), 2 * 4 * 7168 * 2048),
        "combine": Work(4 * 2 * 7168 + 3 * (4 * 8 + 4 * 8) + 3 * 2 * 7168),
    }
    gathers = profile.work(h, gathers=True, quantises=False)
    assert gathers["gemm1"].bytes == 2 * w13 + 2 * token + 4 * (4 + 2 * 4096)
    fused = profile.work(h, gathers=False, quantises=True)
    zeros = 2 * 7168  # of the one token without a local expert
    assert fused["gemm1"] == Work(2 * w13 + 4 * (token + q) + zeros, 2 * 4 * 4096 * 7168)
    assert fused["combine"] == Work(4 * 2 * 7168 + 3 * (4 * 8 + 4 * 8) + 2 * 2 * 7168)
    flops = sum(w.flops for name, w in fused.items())
    assert flops == 4 * pair_flops()
    other = profile.work(h, True, True, layer=find("qwen3_next"))
    assert other["gemm1"].flops == 2 * 4 * 2 * 512 * 2048
    assert other["route"] == Work(3 * (2 * 128 + 4 * 10 + 4 * 10)), "bfloat16 logits"
    two_terms = profile.work(h, gathers=False, quantises=True, terms=2)
    assert two_terms["gemm1"].bytes == fused["gemm1"].bytes + 4 * 2048
    assert two_terms["gemm2"] == Work(2 * w2 + 4 * (q + 2048 + 4 * 7168), 4 * 4 * 7168 * 2048)
    assert two_terms["combine"].bytes == fused["combine"].bytes + 4 * 2 * 7168


def test_the_floor_is_the_larger_of_bytes_and_flops() -> None:
    read = profile.rates_of(Work(8e6, 3e6), 4.0, RATES)  # 2 us at 4 TB/s
    assert read["floor_us"] == pytest.approx(2.0) and read["percent_of_floor"] == pytest.approx(50)
    assert read["gbytes"] == pytest.approx(2000) and read["tflops"] == pytest.approx(0.75)
    multiplied = profile.rates_of(Work(8e6, 4.5e9), 4.0, RATES)
    assert multiplied["floor_us"] == pytest.approx(3.0)


def of(name: str, us: float) -> dict:
    return {"name": name, "us": us, "us_p10": us, "us_p90": us, "gap_us": None}


def test_kernels_get_the_work_of_their_call() -> None:
    """A call without a kernel for SwiGLU has it in the first GEMM, which writes less; one without a
    kernel that copies the tokens to their rows gathers them there."""
    h = Histogram("a", 3, (3, 0, 1), hit=2)
    fused = profile.with_work([of(name, 2.0) for name in FUSED], h, RATES)
    assert [k["stage"] for k in fused] == FUSED_STAGES
    assert fused[3]["bytes"] == profile.work(h, False, True)["gemm1"].bytes
    few = [OURS.format("kernelsrouteRouteWord"), *FUSED[3:]]
    gathers = profile.with_work([of(name, 2.0) for name in few], h, RATES)
    assert [k["stage"] for k in gathers] == ["route", "gemm1", "gemm2", "combine"]
    assert gathers[1]["bytes"] == profile.work(h, True, True)["gemm1"].bytes
    gemm = "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<int>>(Params)"
    library = profile.with_work([of(n, 2.0) for n in (gemm, "its own", gemm)], h, RATES)
    assert library[0]["bytes"] == profile.work(h, False, False)["gemm1"].bytes
    float32_rows = OURS.format("kernelscombineCombine").replace("tensor00", "tensorptrf32gmem")
    hifi = profile.with_work([of(n, 2.0) for n in (*FUSED[:-1], float32_rows)], h, RATES)
    assert hifi[-2]["flops"] == 2 * fused[-2]["flops"]
    extra = [*FUSED[:4], OURS.format("kernelsswiglu_quantSwigluQuant"), *FUSED[4:], "other"]
    flat = profile.with_work([of(name, 2.0) for name in extra], h, RATES)
    assert flat[3]["bytes"] == profile.work(h, False, False)["gemm1"].bytes
    assert flat[-1]["stage"] is None and "bytes" not in flat[-1]


# --- the program -----------------------------------------------------------------------------


def test_the_table_has_a_line_for_each_kernel() -> None:
    h = Histogram("a" * 12, 3, (3, 0, 1), hit=2)
    kernels = profile.with_work([of(n, 2.0) for n in [*FUSED, "other"]], h, RATES)
    kernels[1]["gap_us"] = -0.5
    table = profile.table({"kernels": kernels})
    assert table.kernel.tolist() == [*FUSED_STAGES, "other"]
    assert table.gap[:3].tolist() == ["-", "-0.50", "-"]
    assert table["TFLOP/s"][2:4].tolist() == ["-", f"{kernels[3]['tflops']:.0f}"]
    assert table.MB.iloc[-1] == table["% of floor"].iloc[-1] == "-"
    assert table["p10-p90"][0] == "2.00-2.00"
    device = {"ms": 0.009, "method": "graph"}
    line = profile.summary({"device": device, "floor_us": 5.0, "sum_us": 14.0, "span_us": 10.0})
    assert "14.00" in line and "10.00" in line and "9.00 (graph)" in line
    assert "floor 5.00 (50 % of the span)" in line


def test_a_call_is_marked_once(monkeypatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: made.append("wait"))
    for name in ("start", "stop"):
        monkeypatch.setattr(torch.cuda.profiler, name, lambda name=name: made.append(name))
    profile.one_call(lambda: made.append("call"))
    assert made[-6:] == ["call", "wait", "start", "call", "wait", "stop"]


@pytest.mark.all
def test_the_whole_program_off_the_gpu(monkeypatch, tmp_path, capsys) -> None:
    """Everything but the GPU's own measurements, on the smallest workload."""
    measured = {
        "traced": "replays of a CUDA graph",
        **profile.timings(timing.split(calls_of(*FUSED, calls=3), 3)),
        "device": {"error": "RuntimeError: no"},
    }
    choose = plan.choose
    monkeypatch.setattr(gpu, "require_gpu", lambda: "a GPU")
    monkeypatch.setattr(gpu, "measure_rates", lambda: RATES)
    monkeypatch.setattr(floors, "measure_reading", lambda found, *_: {found[0].uuid: 0.04})
    monkeypatch.setattr(timing, "timed", lambda definition, solution, inputs: "call")
    monkeypatch.setattr(profile, "measure", lambda call, repeats, eager: measured)
    monkeypatch.setattr(program.Inputs, "of", lambda self, workload: [])
    monkeypatch.setattr(plan, "choose", lambda local, on_gpu, **kind: choose(local, False, **kind))
    out = tmp_path / "profile.json"
    arguments = ["--workloads", "1", "--json", str(out), "--markdown"]
    monkeypatch.setattr(sys, "argv", ["profile.py", *arguments])
    assert program.main() == 0
    printed = capsys.readouterr().out
    assert "### cutedsl_moe_fp8_fused, T=1 (e05c6c03: 3 pairs" in printed
    assert "| gemm1 " in printed and "RuntimeError: no" in printed
    record = json.loads(out.read_text())
    (result,) = record["results"]
    assert list(record["solutions"]) == ["cutedsl_moe_fp8_fused"]
    assert result["floor_us"] == pytest.approx(40.0) and result["workload"]["active"] == 3
    assert [k["stage"] for k in result["kernels"]] == FUSED_STAGES
    of_first = result["kernels"][3]["flops"]

    monkeypatch.setattr(sys, "argv", ["profile.py", *arguments, "--definition", "dsv3_tp8"])
    assert program.main() == 0
    (result,) = json.loads(out.read_text())["results"]
    assert result["solution"] == "cutedsl_moe_fp8_fused_dsv3_tp8"
    assert result["workload"]["active"] == 8, "all experts are here"
    assert result["kernels"][3]["flops"] == of_first * 8 / 3 / 8, "an eighth of each"

    marked: list[str] = []
    monkeypatch.setattr(profile, "one_call", marked.append)
    monkeypatch.setattr(sys, "argv", ["profile.py", *arguments, "--only-call"])
    assert program.main() == 0 and marked == ["call"]


def test_a_program_does_not_hide_pythons_own_module() -> None:
    """Python puts a program's folder first on the path, and cProfile imports `profile`."""
    path = Path(program.__file__)
    code = (
        "import runpy, sys\n"
        f"sys.path.insert(0, {str(path.parent)!r})\n"
        "sys.argv = ['profile.py', '--help']\n"
        "try:\n"
        f"    runpy.run_path({str(path)!r}, run_name='__main__')\n"
        "except SystemExit:\n"
        "    import cProfile, profile\n"
        f"    assert profile.__file__ != {str(path)!r}\n"
        "    print('not hidden')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=run.environment(), capture_output=True, text=True
    )
    assert done.stdout.endswith("not hidden\n"), done.stderr
