"""The pass that measures device time, off the GPU: what it captures, traces, keeps and refuses."""

import sys
from types import SimpleNamespace

import pytest
import small
import torch
from fake_cuda import Kernel

from scripts.common.command_line import EXIT_FAILED, EXIT_OK, UsageError
from scripts.measure import device_time
from scripts.measure.kernel_trace import Span
from scripts.measure.second_pass import Pass


def test_a_summary_has_the_spread() -> None:
    samples = [5.0, 1.0, 3.0, 2.0, 4.0, 6.0, 9.0, 7.0, 8.0, 10.0]
    assert device_time.summary(samples, method="graph") == {
        "method": "graph", "ms": 5.5, "p10": 2.0, "p90": 10.0, "calls": 10,
    }  # fmt: skip


def timed(kernel: Kernel) -> device_time.Timed:
    return device_time.Timed(kernel, [1, kernel.out])


def test_calls_that_wait_are_traced_and_others_replayed_in_turns(cuda, monkeypatch) -> None:
    """On a cold L2 cache each, the replay alone between the events, without the warm-up."""
    monkeypatch.setattr(device_time, "traced", cuda.traced)
    a, waits = Kernel(cuda, "a"), Kernel(cuda, "waits", waits=99)
    b = Kernel(cuda, "b", waits=1)  # to compile, say
    calls = {kernel.name: timed(kernel) for kernel in (a, waits, b)}
    found = device_time.device_times(calls, repeats=9)
    for kernel in (a, b):
        expected = device_time.summary(kernel.took[-9:], method="graph")
        assert found[kernel.name] == pytest.approx(expected)
        assert found[kernel.name]["ms"] == pytest.approx(kernel.took[-5]), "the median"
    expected = device_time.summary(waits.took[-7:], method="kernel sum")
    assert found["waits"] == pytest.approx(expected), "tracing takes long: seven times"
    of_a, of_b = (["flush", "event", name, "event", "wait"] for name in "ab")
    timed_log = cuda.log[-11 * 10 :]
    assert timed_log == [*of_a, *of_b] * 11, "two rounds of warm-up and nine that count"
    traced = [x for x in cuda.log[: -11 * 10] if x in ("flush", "waits")]
    assert traced[-14:] == ["flush", "waits"] * 7
    assert cuda.streams == 1, "a solution keeps its buffers for each"


@pytest.mark.parametrize(
    "broken", [dict(value=float), dict(captures=False)], ids=["another output", "none"]
)
def test_a_replay_that_does_not_write_what_the_call_writes_is_an_error(
    cuda, broken, capsys
) -> None:
    kernels = Kernel(cuda, "broken", **broken), Kernel(cuda, "right")
    found = device_time.device_times({k.name: timed(k) for k in kernels}, repeats=3)
    assert found["broken"] == {
        "error": "RuntimeError: a replay of the captured call gives another output than the call"
    }
    assert found["right"]["calls"] == 3
    assert "Traceback" in capsys.readouterr().err, "the log says where"


def out_of_memory(*arguments: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nand more")


def test_what_fails_costs_no_other_solution_and_no_other_workload(cuda, monkeypatch) -> None:
    """For want of memory: for a solution's buffers, in its call, in the harness's copies of its
    arguments, or for the inputs; or because its code calls sys.exit."""
    kernels = {
        name: Kernel(cuda, name) for name in ("right", "buffers", "call", "harness", "exits")
    }
    monkeypatch.setitem(vars(kernels["call"]), "run", out_of_memory)
    monkeypatch.setitem(vars(kernels["exits"]), "run", sys.exit)

    def prepared(definition: object, solution: SimpleNamespace, inputs: object):
        if solution.name == "returns":
            return None
        return out_of_memory() if solution.name == "buffers" else timed(kernels[solution.name])

    def harness_times(call: device_time.Timed, repeats: int) -> dict:
        return out_of_memory() if call.runnable.name == "harness" else {"ms": 1.0}

    def of(workload: SimpleNamespace) -> list:
        return out_of_memory() if workload.uuid == "large" else []

    monkeypatch.setattr(device_time, "timed", prepared)
    monkeypatch.setattr(device_time, "harness_times", harness_times)
    monkeypatch.setattr(device_time, "Inputs", lambda *_: SimpleNamespace(of=of))
    names = ["buffers", "call", "harness", "exits", "returns", "right", "not wanted"]
    solutions = [SimpleNamespace(name=name) for name in names]
    workloads = [SimpleNamespace(workload=SimpleNamespace(uuid=u, axes={})) for u in ("large", "x")]
    wanted = {(w.workload.uuid, s.name) for w in workloads for s in solutions} - {
        ("x", "not wanted")
    }
    trace_set = SimpleNamespace(definitions={"d": None})
    large, found = device_time.measure(trace_set, solutions, workloads, 7, 3, wanted)
    error = {"error": "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"}
    assert large == {("large", name): error for name in names}
    right = found.pop(("x", "right"))
    assert right["device"]["method"] == "graph" and right["harness"] == {"ms": 1.0}
    assert right["timing_seed"] == 7
    assert found == {
        ("x", "buffers"): error,
        ("x", "call"): error,
        ("x", "harness"): error,
        ("x", "exits"): {"error": "SystemExit: "},
        ("x", "returns"): {"error": device_time.NOT_TIMED},
    }


def test_the_harness_gets_copies_and_keeps_every_call(monkeypatch) -> None:
    import flashinfer_bench.bench.timing

    seen = []

    def do_bench(fn, warmup, rep, setup, return_mode):
        assert return_mode == "all"
        for _ in range(warmup + rep):
            fn(setup())
        return [1.0, 5.0, 2.0]

    def vandal(x: torch.Tensor, factor: int, output: torch.Tensor) -> None:
        seen.append((int(x), factor))
        x.zero_()

    monkeypatch.setattr(flashinfer_bench.bench.timing, "do_bench", do_bench)
    call = device_time.Timed(vandal, [torch.tensor(7), 2, torch.zeros(1)])
    assert device_time.harness_times(call, 4) == device_time.summary([1.0, 5.0, 2.0])
    assert seen == [(7, 2)] * (device_time.WARMUP + 4)


def test_a_solution_has_its_own_tokens_and_shares_the_weights(monkeypatch, tmp_path) -> None:
    import flashinfer_bench.bench.evaluators.utils as utils

    real = utils.allocate_outputs
    monkeypatch.setattr(
        utils,
        "allocate_outputs",
        lambda definition, inputs, device: real(definition, inputs, "cpu"),
    )
    monkeypatch.setenv("FIB_CACHE_PATH", str(tmp_path))
    x, w = torch.ones(3, small.WIDTH), torch.ones(small.WIDTH, small.WIDTH, dtype=torch.bfloat16)
    call = device_time.timed(small.definition(), small.solution("right"), [x, w, 2.0])
    assert call is not None and call.arguments[0] is not x and torch.equal(call.arguments[0], x)
    assert call.arguments[1] is w and call.arguments[2] == 2.0
    call()
    assert torch.equal(call.output.float(), torch.full((3, small.WIDTH), 2.0 * small.WIDTH))
    returns = small.solution("returns", small.REFERENCE, dps=False)
    assert device_time.timed(small.definition(), returns, [x, w, 2.0]) is None


@pytest.mark.parametrize(
    ("error", "waiting"),
    [(None, False), ("called a synchronizing CUDA operation", True), ("out of memory", None)],
)
def test_a_call_waits_if_torch_says_so(error, waiting, monkeypatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def call() -> None:
        assert modes == ["error"]
        if error is not None:
            raise RuntimeError(error)

    if waiting is None:
        with pytest.raises(RuntimeError, match="out of memory"):
            device_time.waits(call)
    else:
        assert device_time.waits(call) == waiting
    assert modes == ["error", "default"]


def test_a_traced_call_takes_what_its_kernels_take(monkeypatch) -> None:
    spans = [Span("a", 100, 150), Span("b", 120, 130), Span("c", 300, 420)]
    monkeypatch.setattr(device_time, "traced", lambda call: spans)
    assert device_time.traced_ms(lambda: None) == pytest.approx(0.18)


def test_the_table_shows_times_and_errors() -> None:
    figures = {"ms": 0.5, "p10": 0.4, "p90": 0.6, "calls": 3}
    results = {
        ("b" * 8, "x"): {"device": {**figures, "method": "graph"}, "harness": figures},
        ("a" * 8, "x"): {"error": "RuntimeError: no"},
    }
    header, rows = device_time.table(results, {"a" * 8: 7, "b" * 8: 80})
    assert [len(row) for row in rows] == [len(header)] * 2
    assert rows[0][:4] == ["7", "a" * 8, "x", "RuntimeError: no"]
    assert rows[1][3:] == ["0.5000", "0.4000-0.6000", "graph", "0.5000", "0.4000-0.6000"]


def record(uuid: str, solution: str, device: object) -> SimpleNamespace:
    return SimpleNamespace(uuid=uuid, solution=solution, device=device)


@pytest.mark.parametrize("all_there", [False, True])
def test_what_is_missing_of_a_run(all_there, monkeypatch, tmp_path, capsys) -> None:
    """Nothing else is loaded: neither a workload nor a solution that has all of its times."""
    workloads = [SimpleNamespace(workload=SimpleNamespace(uuid=u, axes={})) for u in "abc"]
    solutions = [SimpleNamespace(name=name) for name in ("x", "y", "z")]
    pairs = {(u, s) for u in "abc" for s in ("x", "y", "z")}
    what = Pass(None, solutions, workloads, pairs, "GPU", tmp_path / "traces.jsonl")
    missing = set() if all_there else {("a", "x"), ("c", "y"), ("c", "x")}
    records = [record(u, s, None if (u, s) in missing else 1.0) for u, s in pairs]
    records += [record("d", "x", None)]
    monkeypatch.setattr(device_time, "require_gpu", lambda: "GPU")
    monkeypatch.setattr(device_time, "choose", lambda *_: what)
    monkeypatch.setattr(device_time, "read_records", lambda *_: records)
    monkeypatch.setattr(Pass, "merge", lambda self, figures: merged.append(figures) or 0)
    seen, merged = [], []

    def measure(trace_set, solutions, workloads, seed, repeats, wanted):
        seen.append(([t.workload.uuid for t in workloads], [s.name for s in solutions], wanted))
        yield {pair: {"error": "no"} for pair in wanted}

    monkeypatch.setattr(device_time, "measure", measure)
    argv = ["device_time.py", "--run", str(tmp_path), "--missing"]
    monkeypatch.setattr(sys, "argv", argv)
    assert device_time.main() == (EXIT_OK if all_there else EXIT_FAILED)
    assert not any(merged), "an error is no figure"
    assert seen == ([] if all_there else [(["a", "c"], ["x", "y"], missing)])
    assert ("or all have" in capsys.readouterr().err) == all_there
    monkeypatch.setattr(sys, "argv", argv[:1] + argv[3:])
    with pytest.raises(UsageError, match="--missing is of a run"):
        device_time.main()


def test_it_needs_a_gpu_and_at_least_one_repeat(monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["device_time.py", "--repeats", "0"])
    with pytest.raises(UsageError, match="at least 1"):
        device_time.main()
    if not torch.cuda.is_available():
        monkeypatch.setattr(sys, "argv", ["device_time.py"])
        with pytest.raises(UsageError, match="no GPU is visible"):
            device_time.main()
