"""A call kernel by kernel: work by hand, the rows, the table, and the program."""

from types import SimpleNamespace

import pytest
import torch
from programs import RATES
from test_clock import FLUSH, calls_of

from scripts.common.definitions import DEFAULT, find, pair_flops
from scripts.measuring import cases, clock, kernels, layers
from scripts.measuring.cases import Histogram
from scripts.measuring.kernels import Work
from scripts.publishing import rows
from scripts.publishing.tables import kernels_table

OURS = "kernel_cutlass_kernel_moe_fp8_3f2a{}_object_at__tensor00_o_i64_div471681110_Cop_3"
FUSED = [
    OURS.format(path)
    for path in (
        "kernelsrouteChooseExperts",
        "kernelsrouteNumberRows",
        "kernelspermutePermute",
        "kernelsgemm_sm90GemmSm90",
        "kernelsgemm_sm90GemmSm90",
        "kernelscombineCombine",
    )
]
FUSED_STAGES = ["choose", "number", "permute", "gemm1", "gemm2", "combine"]


@pytest.fixture
def profiled(monkeypatch):
    """Rows of a call with these kernels, traced three times."""

    def run(*names: str, device: dict | None = None, waits: bool = False) -> list[dict]:
        spans, each = calls_of(*names, calls=3), len(names) + 1
        traced = [spans[i * each + 1 : (i + 1) * each] for i in range(3)]
        device = device or {"ms": 0.009, "p10": 0.008, "p90": 0.01, "calls": 3, "method": "graph"}
        monkeypatch.setattr(kernels, "waits", lambda call: waits)
        monkeypatch.setattr(kernels, "captured", lambda call: call)
        monkeypatch.setattr(kernels, "flush_buffer", lambda: torch.zeros(1))
        monkeypatch.setattr(kernels, "traced_calls", lambda *_: traced)
        monkeypatch.setattr(kernels, "device_times", lambda *_: {"": device})
        into, h = rows.Writer("kernels", "a GPU", "m"), Histogram("a", 3, (3, 0, 1), hit=2)
        solution = SimpleNamespace(name="x", hash=lambda: "1")
        kernels.measure(into, solution, lambda: None, h, DEFAULT, RATES, 5.0, 3)
        return into.rows

    return run


def test_figures_are_medians_and_gaps_may_be_negative(profiled) -> None:
    a, b, span, device = profiled("a", "b")
    facts = {"subject": "x", "hash": "1", "uuid": "a", "definition": DEFAULT.name, "pairs": 4}
    assert all(row.items() >= facts.items() for row in (a, b, span, device))
    assert (a["value"], a["p10"], a["p90"]) == (11.0, 10.0, 14.0) and "gap" not in a
    assert (b["value"], b["p10"], b["p90"], b["gap"]) == (12.0, 11.0, 15.0, -2.0)
    assert (span["value"], span["sum"], span["part"]) == (21.0, 23.0, "span")
    assert profiled("a", "short")[2]["value"] == 11.0, "the last one ends before the first"
    methods = [profiled("a", waits=waits)[1]["method"] for waits in (False, True)]
    assert methods == ["replays of a CUDA graph", "calls"]
    assert span["roofline"] == device["roofline"] == pytest.approx(5.0)
    assert (device["value"], device["clock"], device["unit"]) == (
        pytest.approx(9.0),
        "device",
        "us",
    )
    failed = profiled("a", "b", device={"error": "RuntimeError: no"})[-1]
    assert failed["error"] == "RuntimeError: no" and "value" not in failed


# --- the work --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "short", "stage"),
    [
        (FUSED[0], "ChooseExperts", "choose"),
        (FUSED[3], "GemmSm90", None),  # one GEMM alone: which is not known
        (OURS.format("kernelsswiglu_quantSwigluQuant"), "SwigluQuant", "swiglu_quant"),
        ("_route_kernel", "_route_kernel", "choose"),
        ("_sort", "_sort", "number"),
        ("void process_input_kernel<Config, 0>(int)", "process_input_kernel", "swiglu_quant"),
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
    assert kernels.short_name(name) == short
    assert kernels.stages([name]) == [stage]


@pytest.mark.parametrize(
    "gemm",
    [
        "_grouped_gemm_kernel",
        "void deep_gemm::sm90_fp8_gemm_1d2d_impl<(cute::UMMA::Major)0, 128u>(float*)",
        "void hpc::group_gemm::kernels::group_gemm_blockwise_fp8_kernel<Config<int>, true>(int*)",
        "void humming<MmaOp, Shape<4096u, 7168u>>(CUtensorMap)",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<int>>(Params)",
    ],
)
def test_the_gemms_of_peers_are_told_apart_by_their_order(gemm: str) -> None:
    names = [gemm, "other", "_swiglu_quant_kernel", gemm]
    assert kernels.stages(names) == ["gemm1", None, "swiglu_quant", "gemm2"]


def test_a_stage_in_several_launches_has_no_work_of_its_own() -> None:
    assert kernels.stages(FUSED) == FUSED_STAGES
    assert kernels.stages(FUSED * 2) == [None] * 12


def test_the_work_is_that_of_the_layer() -> None:
    """Three tokens, two of which have a local expert; 4 pairs on 2 experts."""
    h = Histogram("a", 3, (3, 0, 1), hit=2)
    w13, w2 = 4096 * 7168 + 4 * 32 * 56, 7168 * 2048 + 4 * 56 * 16
    token, q = 7168 + 4 * 56, 2048 + 4 * 16
    assert kernels.work(h, gathers=False, quantises=False) == {
        "route": Work(3 * (4 * 256 + 4 * 8 + 4 * 8)),
        "choose": Work(3 * (4 * 256 + 4 * 8 + 4 * 8)),
        "number": Work(3 * (4 * 8 + 4 * 8)),
        "permute": Work(3 * 4 * 8 + 2 * token + 4 * token),
        "gemm1": Work(2 * w13 + 4 * (token + 2 * 4096), 2 * 4 * 4096 * 7168),
        "swiglu_quant": Work(4 * (2 * 4096 + q)),
        "gemm2": Work(2 * w2 + 4 * (q + 2 * 7168), 2 * 4 * 7168 * 2048),
        "combine": Work(4 * 2 * 7168 + 3 * (4 * 8 + 4 * 8) + 3 * 2 * 7168),
    }
    gathers = kernels.work(h, gathers=True, quantises=False)
    assert gathers["gemm1"].bytes == 2 * w13 + 2 * token + 4 * (4 + 2 * 4096)
    both = Work(2 * w13 + 2 * token + 4 * (4 + q), 2 * 4 * 4096 * 7168)
    assert kernels.work(h, gathers=True, quantises=True)["gemm1"] == both, "no zeros"
    fused = kernels.work(h, gathers=False, quantises=True)
    zeros = 2 * 7168  # of the one token without a local expert
    assert fused["gemm1"] == Work(2 * w13 + 4 * (token + q) + zeros, 2 * 4 * 4096 * 7168)
    assert fused["combine"] == Work(4 * 2 * 7168 + 3 * (4 * 8 + 4 * 8) + 2 * 2 * 7168)
    flops = sum(w.flops for name, w in fused.items())
    assert flops == 4 * pair_flops()
    other = kernels.work(h, True, True, layer=find("qwen3_next"))
    assert other["gemm1"].flops == 2 * 4 * 2 * 512 * 2048
    assert other["route"] == Work(3 * (2 * 128 + 4 * 10 + 4 * 10)), "bfloat16 logits"
    two_terms = kernels.work(h, gathers=False, quantises=True, terms=2)
    assert two_terms["gemm1"].bytes == fused["gemm1"].bytes + 4 * 2048
    assert two_terms["gemm2"] == Work(2 * w2 + 4 * (q + 2048 + 4 * 7168), 4 * 4 * 7168 * 2048)
    assert two_terms["combine"].bytes == fused["combine"].bytes + 4 * 2 * 7168


def test_the_least_time_is_the_larger_of_bytes_and_flops() -> None:
    assert Work(8e6, 3e6).least_us(RATES) == pytest.approx(2.0)  # at 4 TB/s
    assert Work(8e6, 4.5e9).least_us(RATES) == pytest.approx(3.0)


def test_kernels_get_the_work_of_their_call() -> None:
    """Without a SwiGLU kernel GEMM1 computes SwiGLU and writes less. Without a permute kernel GEMM1
    gathers the tokens."""
    h = Histogram("a", 3, (3, 0, 1), hit=2)

    def works_of(*names: str) -> list:
        return kernels.works(names, h)

    fused = works_of(*FUSED)
    assert [stage for _, stage, _ in fused] == FUSED_STAGES
    assert fused[3][2] == kernels.work(h, False, True)["gemm1"]
    gathers = works_of(OURS.format("kernelsrouteRouteWord"), *FUSED[3:])
    assert [stage for _, stage, _ in gathers] == ["route", "gemm1", "gemm2", "combine"]
    assert gathers[1][2] == kernels.work(h, True, True)["gemm1"]
    gemm = "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<int>>(Params)"
    assert works_of(gemm, "its own", gemm)[0][2] == kernels.work(h, False, False)["gemm1"]
    float32_rows = OURS.format("kernelscombineCombine").replace("tensor00", "tensorptrf32gmem")
    assert works_of(*FUSED[:-1], float32_rows)[-2][2].flops == 2 * fused[-2][2].flops
    flat = works_of(*FUSED[:4], OURS.format("kernelsswiglu_quantSwigluQuant"), *FUSED[4:], "other")
    assert flat[3][2] == kernels.work(h, False, False)["gemm1"]
    assert flat[-1] == ("other", None, None)
    other = find("qwen3_next")
    of_other = kernels.work(h, False, True, layer=other)["gemm1"]
    assert kernels.works(FUSED, h, other)[3][2] == of_other


def test_the_rows_and_the_table_have_a_line_for_each_kernel(profiled) -> None:
    lines = profiled(*FUSED, "other")
    assert [row["part"] for row in lines[:-1]] == [*FUSED_STAGES, "other", "span"]
    assert lines[3]["flops"] == 2 * 4 * 4096 * 7168 and "bytes" not in lines[-3]
    recorded = rows.Rows({lines[0]["of"]: {"id": lines[0]["of"], "name": "kernels"}}, lines)
    recorded.rows.append(lines[0] | {"uuid": "b"})
    table = kernels_table(recorded, "x", "a").frame
    assert table.kernel.tolist() == [*FUSED_STAGES, "other", "span", "without the profiler"]
    assert table.gap[:2].tolist() == ["-", "-2.00"]
    rate = lines[3]["flops"] / lines[3]["value"] / 1e6
    assert table["TFLOP/s"][2:4].tolist() == ["-", f"{rate:.0f}"]
    assert table.MB[6] == table["% of roofline"][6] == "-"
    assert table["p10-p90"][[0, 7]].tolist() == ["10.00-14.00", "-"]
    assert table["% of roofline"].iloc[-1] == "56", "5 of 9 us"


# --- the program -----------------------------------------------------------------------------


def test_a_call_is_marked_once(monkeypatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("wait"))
    for name in ("start", "stop"):
        monkeypatch.setattr(torch.cuda.profiler, name, lambda name=name: events.append(name))
    kernels.one_call(lambda: events.append("call"))
    assert events[-6:] == ["call", "wait", "start", "call", "wait", "stop"]


@pytest.mark.all
def test_each_definition_and_workload_has_its_rows_and_table(measure, monkeypatch) -> None:
    """Run everything but the GPU's measurements, on the smallest workload."""
    choose, seen, marked = cases.choose, [], []

    def measured(into, solution, call, h, layer, rates, least_us, repeats):
        assert least_us == pytest.approx(40.0)
        case = {"definition": layer.name, "uuid": h.uuid, **h.counts()}
        seen.append((solution.name, call, case["active"], layer.short, rates, repeats))
        source = {"hash": solution.hash()}
        into.add(case, solution.name, value=11.0, unit="us", part="gemm1", **source)

    monkeypatch.setattr(clock, "timed", lambda definition, solution, inputs, device: "call")
    monkeypatch.setattr(kernels, "measure", measured)
    monkeypatch.setattr(
        layers, "measure_reading", lambda histograms, *_: {histograms[0].uuid: 0.04}
    )
    monkeypatch.setattr(kernels, "one_call", marked.append)
    monkeypatch.setattr(cases.Inputs, "of", lambda self, workload: [])
    monkeypatch.setattr(cases, "choose", lambda local, on_gpu, **kind: choose(local, False, **kind))
    arguments = ["kernels", "--workloads", "1"]
    done, none = measure(*arguments, "--only-call")
    assert done.returncode == 0 and marked == ["call"] and not none.rows
    done, recorded = measure(*arguments, "--markdown", "--definition", DEFAULT.name, "dsv3_tp8")
    assert done.returncode == 0 and "| gemm1 " in done.stdout
    assert "cutedsl_moe_fp8_fused, T=1: 3 pairs, 3 experts" in done.stdout
    assert seen == [
        ("cutedsl_moe_fp8_fused", "call", 3, "", RATES, 20),
        ("cutedsl_moe_fp8_fused_dsv3_tp8", "call", 8, "dsv3_tp8", RATES, 20),
    ], "all experts are there in the second"
    assert list(recorded.hashes("kernels")) == [subject for subject, *_ in seen]
