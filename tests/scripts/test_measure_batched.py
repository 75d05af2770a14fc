"""Experts of tokens that lie by expert, beside DeepGEMM: the peer's arithmetic, rows and table."""

import sys

import fake_libraries
import pytest
import torch
from moe_fp8.reference import calc_diff
from moe_fp8.shape import BLOCK
from programs import RATES
from triton_interpreter import DEVICE, interpreter_that_rounds

from scripts.common.program import EXIT_FAILED, EXIT_OK, UsageError
from scripts.measuring import batched
from scripts.publishing.rows import Writer

BYTES = 1 + 4 / BLOCK**2
"""Bytes of a weight, with its share of a scale."""

__all__ = ["interpreter_that_rounds"]  # a fixture
DEVICE_NAME = DEVICE.type


@pytest.fixture(autouse=True)
def small(monkeypatch) -> None:
    """Use widths of 256 and 512, stand-ins for DeepGEMM and the clock, and no engine."""
    for name, size in (("HIDDEN", 256), ("WIDTH", 512), ("PLACES", 128)):
        monkeypatch.setattr(batched, name, size)
    monkeypatch.setitem(sys.modules, "deep_gemm", fake_libraries.deep_gemm())
    for engine in ("vllm", "sglang"):
        monkeypatch.setitem(sys.modules, engine, None)

    def device_times(calls, repeats):
        ms = {name: 0.01 * (1 + place) for place, name in enumerate(calls)}
        return {name: {"ms": t, "p10": t, "p90": t, "calls": repeats} for name, t in ms.items()}

    monkeypatch.setattr(batched, "device_times", device_times)


def measured(tokens: int, uneven: bool = False) -> list[dict]:
    into, weights = Writer("batched", "a GPU", "m"), batched.make_weights(2, 1, DEVICE_NAME)
    rates = RATES | {"fp8_flops_per_s": 15e12, "read_bytes_per_s": 2e12, "copy_bytes_per_s": 3e12}
    batched.measure(into, batched.make_case(weights, tokens, 1, uneven), rates, 3)
    return into.rows


@pytest.mark.parametrize(
    ("tokens", "uneven", "fullest", "least"),  # least: experts read, or multiplications that count
    [(1, False, 1, 2 * BYTES / 3e12), (1, True, 2, BYTES / 3e12), (5, False, 5, 2 * 10 / 15e12),
     (5, True, 7, 2 * 10 / 15e12)],
)  # fmt: skip
def test_ours_and_the_peer_compute_the_same(tokens, uneven, fullest, least) -> None:
    rows = {row["subject"]: row for row in measured(tokens, uneven)}
    assert [*rows] == [
        *("deepgemm + vLLM's", "deepgemm + SGLang's"),
        *("batched_experts fp8", "batched_experts bf16", "deepgemm + Triton"),
    ]
    for engine in ("vLLM", "SGLang"):
        row = rows.pop(f"deepgemm + {engine}'s")
        assert row["peer"] and engine.lower() in row["not_tried"] and "value" not in row
    for row in rows.values():
        assert 0 < row["calc_diff"] < 2e-3
        assert (row["experts"], row["rows"], row["fullest"]) == (2, tokens, fullest)
        assert row["roofline"] == pytest.approx(1e6 * 3 * 256 * 512 * least)
    assert [row["value"] for row in rows.values()] == pytest.approx([10, 20, 30])


def test_uneven_rows_keep_the_sum_and_spread() -> None:
    rows = batched.uneven_rows(500, 32, 1)
    assert sum(rows) == 16000 and rows == batched.uneven_rows(500, 32, 1)
    assert 1.3 < max(rows) / 500 < 3.0


def test_a_wrong_peer_has_no_time(monkeypatch) -> None:
    def halved(g, counts, expected):
        q, scale = batched.by_triton(g, counts, expected)
        return q, scale.transpose(1, 2).div(2).transpose(1, 2)

    monkeypatch.setitem(batched.BETWEEN, "deepgemm + Triton", lambda: halved)
    row = next(row for row in measured(3) if row["subject"] == "deepgemm + Triton")
    assert "value" not in row and row["peer"] and "calc_diff" in row["error"]
    monkeypatch.setattr(batched, "peer", lambda *arguments: None)
    row = next(row for row in measured(3) if row["subject"] == "deepgemm + Triton")
    assert row["error"] == "RuntimeError: calc_diff nan to the reference", "nothing is written"


def test_an_expert_with_more_tokens_than_it_has_room_for_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(batched, "PLACES", 16)
    with pytest.raises(UsageError, match="^24 tokens of an expert: expected at most 16"):
        measured(24)


def test_an_expert_without_a_token_and_one_with_all() -> None:
    """The kernel between DeepGEMM's two takes other counts than expected."""
    g = torch.randn(3, 8, 1024, device=DEVICE).bfloat16()
    counts = torch.tensor([0, 8, 3], dtype=torch.int32, device=DEVICE)
    q, scale = batched.by_triton(g, counts, 2)
    gate, up = g.float().chunk(2, dim=2)
    wanted = torch.nn.functional.silu(gate) * up
    got = q.float() * scale.repeat_interleave(128, dim=2)
    for expert, count in enumerate(counts.tolist()):
        assert not count or calc_diff(got[expert, :count], wanted[expert, :count]) < 1e-3
    assert scale.stride() == (4 * 8, 1, 8)


@pytest.mark.parametrize(("peer_fails", "ours_fail"), [(False, False), (True, False), (True, True)])
def test_the_program(peer_fails: bool, ours_fail: bool, measure, monkeypatch) -> None:
    def of_case(into, case, rates, repeats):
        tokens, fullest = case.expected, int(case.counts.max())
        case = {"experts": len(case.counts), "rows": tokens, "fullest": fullest}
        more = {"unit": "us", "clock": "device", "roofline": 20.0}
        for name, peer, us in (("batched_experts fp8", False, 25.0), ("deepgemm", True, 27.0)):
            if (peer and peer_fails) or (not peer and ours_fail and tokens == 4):
                into.add(case, name, peer=peer, error="RuntimeError: no")
            else:
                into.add(case, name, peer=peer, value=us + tokens * (not peer), **more)

    weights = batched.make_weights(8, 1, DEVICE_NAME)
    monkeypatch.setattr(batched, "make_weights", lambda experts, seed: weights)
    monkeypatch.setattr(batched, "EXPERTS", (2, 8))
    monkeypatch.setattr(batched, "measure", of_case)
    done, rows = measure("batched", "--rows", "1", "4", "--uneven", "--markdown")
    assert done.returncode == (EXIT_FAILED if ours_fail else EXIT_OK), done.stderr
    assert len(rows.rows_of("batched")) == 8 and rows.measurements["batched"]["uneven"]
    text = " ".join(done.stdout.split())
    assert ("| 8 | 4 | 8 | 20.0 | 27.0* | 29.0 | 74 % | 0.93x |" in text) == (not peer_fails)
    assert "| 2 | 1 | 2 | 20.0 |" in text and "26.0*" in text
    assert ("error: batched_experts fp8 at 8 experts, 4 rows: RuntimeError: no" in done.stderr) == (
        ours_fail
    )
