"""The profile of a call's kernels: traces cut into calls, work by hand, ncu's CSV read."""

import argparse
import csv
import io
import json
import sys
import types
from pathlib import Path

import pytest
import torch
from moe_fp8.layer.problem import DEEPSEEK_V3

from scripts.common.command_line import UsageError
from scripts.measure import floors, kernel_trace, kernel_work, ncu_metrics, profile_kernels
from scripts.measure.kernel_trace import Span
from scripts.measure.kernel_work import Work
from scripts.measure.problems import Histogram
from scripts.measure.second_pass import choose

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
FLUSH = "Memset (Device)"


# --- the trace -------------------------------------------------------------------------------


def calls_of(*kernels: str, calls: int) -> list[Span]:
    """Each call 1000 us after the one before; kernel i runs for 10 + i + call us and begins 2 us
    before the end of the kernel before."""
    spans = []
    for call in range(calls):
        spans.append(Span(FLUSH, 1000.0 * call, 1000.0 * call + 100))
        at = 1000.0 * call + 150
        for i, name in enumerate(kernels):
            spans.append(Span(name, at, at + 10 + i + call))
            at = spans[-1].end - 2
    return spans


def test_a_trace_is_cut_into_calls_without_their_flush() -> None:
    parts = kernel_trace.split(calls_of("a", "b", calls=3), 3)
    assert [[s.name for s in part] for part in parts] == [["a", "b"]] * 3
    assert [part[0].start for part in parts] == [150, 1150, 2150]


@pytest.mark.parametrize(
    "spans",
    [
        calls_of("a", "b", calls=3)[:-1],
        calls_of(calls=3),
        [*calls_of("a", "b", calls=2), *calls_of("b", "a", calls=1)],
    ],
)
def test_calls_that_differ_are_refused(spans: list[Span]) -> None:
    with pytest.raises(RuntimeError, match="do not repeat call by call"):
        kernel_trace.split(spans, 3)


def test_timings_are_medians_and_gaps_may_be_negative() -> None:
    calls = kernel_trace.split(calls_of("a", "b", calls=3), 3)
    assert kernel_trace.timings(calls) == [
        {"name": "a", "us": 11.0, "us_p10": 10.0, "us_p90": 12.0, "gap_us": None},
        {"name": "b", "us": 12.0, "us_p10": 11.0, "us_p90": 13.0, "gap_us": -2.0},
    ]
    assert kernel_trace.totals(calls) == {"sum_us": 23.0, "span_us": 21.0}


def test_only_what_the_gpu_did_is_traced(monkeypatch) -> None:
    cuda, cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
    seen = [(cuda, "late", 300, 420), (cpu, "aten::x", 0, 900), (cuda, "early", 100, 150)]
    seen.append((cuda, "Activity Buffer Request", 0, 5))

    class Profile:
        def __init__(self, activities): ...
        def __enter__(self):
            return self

        def __exit__(self, *_): ...
        def events(self):
            return [
                types.SimpleNamespace(
                    device_type=device,
                    name=name,
                    time_range=types.SimpleNamespace(start=start, end=end),
                )
                for device, name, start, end in seen
            ]

    monkeypatch.setattr(torch.profiler, "profile", Profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert kernel_trace.traced(lambda: None) == [Span("early", 100, 150), Span("late", 300, 420)]
    seen[:] = seen[1:2]
    with pytest.raises(RuntimeError, match="saw no kernel"):
        kernel_trace.traced(lambda: None)


def test_every_call_is_flushed_and_the_first_ones_do_not_count(monkeypatch) -> None:
    made: list[str] = []

    def traced(run) -> list[Span]:
        run()
        return calls_of("a", calls=made.count("call"))

    monkeypatch.setattr(kernel_trace, "traced", traced)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: made.append("wait"))
    calls = kernel_trace.traced_calls(
        lambda: made.append("call"), lambda: made.append("flush"), repeats=3
    )
    assert made == ["flush", "wait", "call", "wait"] * (kernel_trace.WARMUP + 3)
    assert [call[0].start for call in calls] == [2150, 3150, 4150]


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
    assert kernel_work.short_name(name) == short
    assert kernel_work.stages([name]) == [stage]


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
    assert kernel_work.stages(names) == ["gemm1", None, "swiglu_quant", "gemm2"]


def test_a_stage_in_several_launches_has_no_work_of_its_own() -> None:
    assert kernel_work.stages(FUSED) == FUSED_STAGES
    assert kernel_work.stages(FUSED * 2) == [None] * 12


def test_the_work_is_that_of_the_layer() -> None:
    """Three tokens, two of which have a local expert; 4 pairs on 2 experts."""
    assert kernel_work.TOP_K == DEEPSEEK_V3.top_k
    h = Histogram("a", 3, (3, 0, 1), hit=2)
    w13, w2 = 4096 * 7168 + 4 * 32 * 56, 7168 * 2048 + 4 * 56 * 16
    token, q = 7168 + 4 * 56, 2048 + 4 * 16
    assert kernel_work.work(h, gathers=False, quantises=False) == {
        "route": Work(3 * (4 * 256 + 4 * 8 + 4 * 8)),
        "choose": Work(3 * (4 * 256 + 4 * 8 + 4 * 8)),
        "number": Work(3 * (4 * 8 + 4 * 8)),
        "permute": Work(3 * 4 * 8 + 2 * token + 4 * token),
        "gemm1": Work(2 * w13 + 4 * (token + 2 * 4096), 2 * 4 * 4096 * 7168),
        "swiglu_quant": Work(4 * (2 * 4096 + q)),
        "gemm2": Work(2 * w2 + 4 * (q + 2 * 7168), 2 * 4 * 7168 * 2048),
        "combine": Work(4 * 2 * 7168 + 3 * (4 * 8 + 4 * 8) + 3 * 2 * 7168),
    }
    gathers = kernel_work.work(h, gathers=True, quantises=False)
    assert gathers["gemm1"].bytes == 2 * w13 + 2 * token + 4 * (4 + 2 * 4096)
    fused = kernel_work.work(h, gathers=False, quantises=True)
    zeros = 2 * 7168  # of the one token without a local expert
    assert fused["gemm1"] == Work(2 * w13 + 4 * (token + q) + zeros, 2 * 4 * 4096 * 7168)
    assert fused["combine"] == Work(4 * 2 * 7168 + 3 * (4 * 8 + 4 * 8) + 2 * 2 * 7168)
    flops = sum(w.flops for name, w in fused.items())
    assert flops == 4 * floors.PAIR_FLOPS
    two_terms = kernel_work.work(h, gathers=False, quantises=True, terms=2)
    assert two_terms["gemm1"].bytes == fused["gemm1"].bytes + 4 * 2048
    assert two_terms["gemm2"] == Work(2 * w2 + 4 * (q + 2048 + 4 * 7168), 4 * 4 * 7168 * 2048)
    assert two_terms["combine"].bytes == fused["combine"].bytes + 4 * 2 * 7168


def test_the_floor_is_the_larger_of_bytes_and_flops() -> None:
    read = kernel_work.figures(Work(8e6, 3e6), 4.0, RATES)  # 2 us at 4 TB/s
    assert read["floor_us"] == pytest.approx(2.0) and read["percent_of_floor"] == pytest.approx(50)
    assert read["gbytes"] == pytest.approx(2000) and read["tflops"] == pytest.approx(0.75)
    multiplied = kernel_work.figures(Work(8e6, 4.5e9), 4.0, RATES)
    assert multiplied["floor_us"] == pytest.approx(3.0)


def timing(name: str, us: float) -> dict:
    return {"name": name, "us": us, "us_p10": us, "us_p90": us, "gap_us": None}


def test_kernels_get_the_work_of_their_call() -> None:
    """A call without a kernel for SwiGLU has it in the first GEMM, which writes less; one without a
    kernel that copies the tokens to their rows gathers them there."""
    h = Histogram("a", 3, (3, 0, 1), hit=2)
    fused = kernel_work.with_work([timing(name, 2.0) for name in FUSED], h, RATES)
    assert [k["stage"] for k in fused] == FUSED_STAGES
    assert fused[3]["bytes"] == kernel_work.work(h, False, True)["gemm1"].bytes
    few = [OURS.format("kernelsrouteRouteWord"), *FUSED[3:]]
    gathers = kernel_work.with_work([timing(name, 2.0) for name in few], h, RATES)
    assert [k["stage"] for k in gathers] == ["route", "gemm1", "gemm2", "combine"]
    assert gathers[1]["bytes"] == kernel_work.work(h, True, True)["gemm1"].bytes
    gemm = "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<int>>(Params)"
    library = kernel_work.with_work([timing(n, 2.0) for n in (gemm, "its own", gemm)], h, RATES)
    assert library[0]["bytes"] == kernel_work.work(h, False, False)["gemm1"].bytes
    float32_rows = OURS.format("kernelscombineCombine").replace("tensor00", "tensorptrf32gmem")
    hifi = kernel_work.with_work([timing(n, 2.0) for n in (*FUSED[:-1], float32_rows)], h, RATES)
    assert hifi[-2]["flops"] == 2 * fused[-2]["flops"]
    extra = [*FUSED[:4], OURS.format("kernelsswiglu_quantSwigluQuant"), *FUSED[4:], "other"]
    flat = kernel_work.with_work([timing(name, 2.0) for name in extra], h, RATES)
    assert flat[3]["bytes"] == kernel_work.work(h, False, False)["gemm1"].bytes
    assert flat[-1]["stage"] is None and "bytes" not in flat[-1]


# --- Nsight Compute --------------------------------------------------------------------------

FIRST = ["ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream"]
FIRST += ["Block Size", "Grid Size", "Device", "CC"]
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
COLUMNS = {
    "dram__bytes_read.sum": ("Gbyte", "1.073655", "0.5"),
    "dram__bytes_write.sum": ("Mbyte", "30.630144", "192.164096"),
    "launch__registers_per_thread": ("register/thread", "168", "128"),
    "launch__func_cache_config": ("", "CachePreferNone", "CachePreferNone"),
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": ("%", "41.5", "n/a"),
    "l1tex__t_sectors_pipe_lsu_mem_local_op_ld.sum": ("sector", "1,024", "0"),
    "l1tex__t_sectors_pipe_lsu_mem_local_op_st.sum": ("sector", "512", "0"),
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": ("%", "81.2", "79.9"),
    STALL.format("selected"): ("inst", "1.000000", "1.000000"),
    STALL.format("gmma"): ("inst", "0.310000", "0.100000"),
    STALL.format("long_scoreboard"): ("inst", "2.250000", "3.000000"),
    STALL.format("wait"): ("inst", "0.500000", "0.050000"),
}


def report(names: list[str]) -> str:
    """As ncu writes it: its own lines before and after, all cells in quotes."""
    out = io.StringIO()
    writer = csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerow([*FIRST, *COLUMNS])
    writer.writerow([""] * len(FIRST) + [unit for unit, *_ in COLUMNS.values()])
    for i, name in enumerate(names):
        first = [i, 1132, "python3.12", "127.0.0.1", name, 1, 7, "(512, 1, 1)", "(132, 1, 1)", 0]
        writer.writerow([*first, "9.0", *(cells[1 + i % 2] for cells in COLUMNS.values())])
    return "==PROF== Connected to process 1132\n==PROF== Disconnected\n" + out.getvalue()


def test_ncus_table_is_read_in_base_units() -> None:
    first, second = ncu_metrics.parse(report([FUSED[3], FUSED[4]]))
    assert first == {
        "name": FUSED[3],
        "read_bytes": pytest.approx(1_073_655_000),
        "written_bytes": pytest.approx(30_630_144),
        "l2_percent": 41.5,
        "tensor_percent": 81.2,
        "registers": 168,
        "spill_sectors": 1536,
        "stalls": [("long_scoreboard", 2.25), ("wait", 0.5)],
    }
    assert second["l2_percent"] is None and second["spill_sectors"] == 0
    assert second["stalls"] == [("long_scoreboard", 3.0), ("gmma", 0.1)]


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [("2", "byte", 2), ("2", "Kbyte", 2e3), ("1.5", "Tbyte", 1.5e12), ("7", "us", 7)],
)
def test_bytes_have_prefixes(text: str, unit: str, value: float) -> None:
    assert ncu_metrics.number(text, unit) == value


def test_what_is_no_table_is_refused() -> None:
    for text in ("", "==ERROR== ERR_NVGPUCTRPERM", report([])):
        with pytest.raises(ValueError, match="no kernel"):
            ncu_metrics.parse(text)


def run_ncu(monkeypatch, written: str) -> list[list[str]]:
    started: list[list[str]] = []

    def run(command, **options):
        started.append(command)
        Path(command[command.index("--log-file") + 1]).write_text(written)
        return types.SimpleNamespace(stdout="", stderr="the program's own end")

    monkeypatch.setattr(ncu_metrics.shutil, "which", lambda name: name)
    monkeypatch.setattr(ncu_metrics.subprocess, "run", run)
    return started


def test_ncu_profiles_only_what_is_marked_and_leaves_the_clocks(monkeypatch) -> None:
    started = run_ncu(monkeypatch, report(FUSED))
    assert [k["name"] for k in ncu_metrics.measure(["python", "x.py"])] == FUSED
    (command,) = started
    assert command[0] == "ncu" and command[-2:] == ["python", "x.py"]
    options = " ".join(command)
    assert "--profile-from-start off" in options and "--clock-control none" in options
    assert "--page raw" in options and "--csv" in options
    for metric in ncu_metrics.METRICS:
        assert metric in COLUMNS and metric in options


def test_why_ncu_failed_is_said(monkeypatch) -> None:
    run_ncu(monkeypatch, "==ERROR== ERR_NVGPUCTRPERM - no permission\n")
    with pytest.raises(RuntimeError, match="ERR_NVGPUCTRPERM(.|\n)*own end"):
        ncu_metrics.measure(["python"])
    monkeypatch.setattr(ncu_metrics.shutil, "which", lambda name: None)
    with pytest.raises(UsageError, match="not on the PATH"):
        ncu_metrics.measure(["python"])


def test_counts_go_to_the_kernels_in_the_order_of_launch() -> None:
    kernels = [{"name": n, "short": kernel_work.short_name(n)} for n in (FLUSH, *FUSED[3:])]
    counts = ncu_metrics.parse(report(FUSED[3:]))
    joined = profile_kernels.with_counts(kernels, counts)
    assert "ncu" not in joined[0]
    assert [k["ncu"]["registers"] for k in joined[1:]] == [168, 128, 168]
    for wrong in (counts[:2], [counts[0], counts[2], counts[1]], [*counts, counts[0]]):
        with pytest.raises(RuntimeError, match="ncu saw"):
            profile_kernels.with_counts(kernels, wrong)


# --- the program -----------------------------------------------------------------------------


def a_result(ncu: bool) -> dict:
    h = Histogram("a" * 12, 3, (3, 0, 1), hit=2)
    kernels = kernel_work.with_work([timing(n, 2.0) for n in [*FUSED, "other"]], h, RATES)
    kernels[1]["gap_us"] = -0.5
    if ncu:
        kernels = profile_kernels.with_counts(kernels, ncu_metrics.parse(report([*FUSED, "other"])))
    (workload,) = floors.workloads([h])
    return {
        "solution": "x",
        "workload": workload,
        "traced": "calls",
        "floor_us": 5.0,
        "kernels": kernels,
        "sum_us": 14.0,
        "span_us": 10.0,
        "device": {"ms": 0.009, "method": "graph"},
    }


@pytest.mark.parametrize("ncu", [False, True])
def test_the_table_has_a_line_for_each_kernel(ncu: bool) -> None:
    result = a_result(ncu)
    header, rows = profile_kernels.table(result)
    assert [row[0] for row in rows] == [*FUSED_STAGES, "other"]
    assert {len(row) for row in rows} == {len(header)} and ("stalls" in header) == ncu
    column = {name: [row[i] for row in rows] for i, name in enumerate(header)}
    assert column["gap"][:3] == ["-", "-0.50", "-"]
    assert column["TFLOP/s"][2:4] == ["-", number_of(result["kernels"][3]["tflops"])]
    assert column["MB"][-1] == column["% of floor"][-1] == "-"
    if ncu:
        assert column["read MB"][0] == "1073.65" and column["spills"][0] == "1536"
        assert column["stalls"][0] == "long_scoreboard 2.2, wait 0.5"
    line = profile_kernels.summary(result)
    assert "14.00" in line and "10.00" in line and "9.00 (graph)" in line
    assert "floor 5.00 (50 % of the span)" in line


def number_of(value: float) -> str:
    return f"{value:.0f}"


def test_ncu_runs_this_program_on_the_same_call(monkeypatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(profile_kernels.ncu_metrics, "measure", started.append)
    trace = types.SimpleNamespace(workload=types.SimpleNamespace(uuid="u-u"))
    args = argparse.Namespace(local=Path("/data"), seed=7)
    profile_kernels.counted(args, trace, types.SimpleNamespace(name="some_moe"))
    (command,) = started
    assert command[:3] == [sys.executable, str(Path(profile_kernels.__file__)), "--only-call"]
    monkeypatch.setattr(sys, "argv", command[1:])
    parsed = profile_kernels.parse_arguments()
    assert parsed.only_call and parsed.local == Path("/data") and parsed.seed == 7
    assert parsed.workloads == ["u-u"] and parsed.solutions == ["some_moe"]


def test_a_call_is_marked_once(monkeypatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: made.append("wait"))
    for name in ("start", "stop"):
        monkeypatch.setattr(torch.cuda.profiler, name, lambda name=name: made.append(name))
    profile_kernels.one_call(lambda: made.append("call"))
    assert made[-6:] == ["call", "wait", "start", "call", "wait", "stop"]


def test_the_whole_program_off_the_gpu(monkeypatch, tmp_path, capsys) -> None:
    """Everything but the GPU's own measurements, on the smallest workload."""
    pairs = calls_of(*FUSED, calls=3)
    measured = {
        "traced": "replays of a CUDA graph",
        "kernels": kernel_trace.timings(kernel_trace.split(pairs, 3)),
        **kernel_trace.totals(kernel_trace.split(pairs, 3)),
        "device": {"error": "RuntimeError: no"},
    }
    monkeypatch.setattr(profile_kernels, "require_gpu", lambda: "a GPU")
    monkeypatch.setattr(profile_kernels, "measure_floors", lambda: RATES)
    monkeypatch.setattr(floors, "measure_reading", lambda found, repeats: {found[0].uuid: 0.04})
    monkeypatch.setattr(profile_kernels, "timed", lambda definition, solution, inputs: "call")
    monkeypatch.setattr(profile_kernels, "measure", lambda call, repeats, eager: measured)
    monkeypatch.setattr(profile_kernels.Inputs, "of", lambda self, workload: [])
    monkeypatch.setattr(
        profile_kernels,
        "choose",
        lambda local, device, **named: choose(local, "cpu", **named),
    )
    out = tmp_path / "profile.json"
    arguments = ["--workloads", "1", "--json", str(out), "--markdown"]
    monkeypatch.setattr(sys, "argv", ["profile_kernels.py", *arguments])
    assert profile_kernels.main() == 0
    printed = capsys.readouterr().out
    assert "### cutedsl_moe_fp8_fused, T=1 (e05c6c03: 3 pairs" in printed
    assert "| gemm1 " in printed and "RuntimeError: no" in printed
    record = json.loads(out.read_text())
    (result,) = record["results"]
    assert list(record["solutions"]) == ["cutedsl_moe_fp8_fused"]
    assert result["floor_us"] == pytest.approx(40.0) and result["workload"]["active"] == 3
    assert [k["stage"] for k in result["kernels"]] == FUSED_STAGES

    # Where ncu fails, the times are kept.
    def fails(*arguments) -> list[dict]:
        raise RuntimeError("ncu: no permission")

    monkeypatch.setattr(profile_kernels, "counted", fails)
    monkeypatch.setattr(sys, "argv", ["profile_kernels.py", *arguments, "--ncu"])
    assert profile_kernels.main() == 1
    said = capsys.readouterr()
    assert "no permission" in said.err and "| gemm1 " in said.out
    assert json.loads(out.read_text())["results"][0]["ncu_error"] == "ncu: no permission"
