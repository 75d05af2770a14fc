"""The pass that compares bits: what it notices, what it leaves out, and what the ranking shows."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import small
import torch
from flashinfer_bench.compile import BuilderRegistry
from flashinfer_bench.data import Definition
from small_record import ranked, trace

from scripts.common.command_line import EXIT_FAILED, EXIT_OK
from scripts.data import rows
from scripts.measuring import layers
from scripts.report import generated, report
from scripts.table import rank_text, recorded, tables

TOKENS = 100
# A product of matrices is no example: how torch sums it may depend on the number of rows.
OWN = "def run(x, w, factor, output):\n    output.copy_(x * factor)\n"
OTHERS = "def run(x, w, factor, output):\n    output.copy_(x * factor + x.sum())\n"
PLACE = "def run(x, w, factor, output):\n    output.copy_(x)\n    output[3:4] *= 2\n"
FEW = "def run(x, w, factor, output):\n    output.copy_(x * (2 if len(x) < 80 else 1))\n"
CALLS = "calls = []\ndef run(x, w, factor, output):\n    calls.append(1)\n"
CALLS += "    output.copy_(x + len(calls))\n"
KEEPS = "seen = []\ndef run(x, w, factor, output):\n    seen.append(len(x))\n"
SMALLEST = KEEPS + "    output.copy_(x + (min(seen) < 8))\n"
KEEPS += "    output.copy_(x + len(set(seen)))\n"
VANDAL = OWN + "    w.zero_()\n"
FAILS = "def run(x, w, factor, output): raise KeyError('a\\nb')\n"

EVERY = ["again", "after others", "reversed", "doubled", "alone", "7 at a time", "80 at a time"]


@pytest.fixture
def as_many_as_on_a_gpu(monkeypatch) -> None:
    monkeypatch.setattr(layers, "CPU_BATCHES", layers.BATCHES)


def inputs(tokens: int = TOKENS, zeros: slice = slice(0)) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, small.WIDTH, generator=generator)
    x[zeros] = 0
    return [x, torch.ones(small.WIDTH, small.WIDTH, dtype=torch.bfloat16), 2.0]


def looked_at(content: str, **options: Any) -> dict[str, Any]:
    into = rows.Writer("bits", "GPU A", "m")
    of = [small.solution("x", content)]
    layers.measure_bits(into, {}, small.definition(), of, inputs(**options), "cpu")
    told = ("compared", "differ", "largest")
    return {row["part"]: {name: row[name] for name in told} for row in into.rows}


def failing(content: str) -> list[str]:
    return [name for name, check in looked_at(content).items() if check["differ"]]


def test_a_token_of_its_own_bits_passes_every_check(as_many_as_on_a_gpu) -> None:
    found = looked_at(OWN)
    assert list(found) == EVERY
    assert all(check["differ"] == check["largest"] == 0 for check in found.values())
    compared = {name: check["compared"] for name, check in found.items()}
    assert compared == dict.fromkeys(EVERY, TOKENS) | {"doubled": 2 * TOKENS}


@pytest.mark.parametrize(
    ("content", "fails"),
    [
        (OTHERS, ["doubled", "alone", "7 at a time", "80 at a time"]),
        (PLACE, ["reversed", "doubled", "alone", "7 at a time", "80 at a time"]),
        (FEW, ["alone", "7 at a time", "80 at a time"]),  # 20 tokens are left for the last
        (CALLS, EVERY),
        (KEEPS, ["after others", "reversed", "doubled", "alone", "7 at a time", "80 at a time"]),
        (SMALLEST, ["after others", "reversed", "alone", "7 at a time", "80 at a time"]),
    ],
    ids=["others", "place", "few", "calls", "keeps", "smallest"],
)
def test_what_is_noticed(as_many_as_on_a_gpu, content: str, fails: list[str]) -> None:
    assert failing(content) == fails


def test_how_many_and_how_far(as_many_as_on_a_gpu) -> None:
    found = looked_at(FEW)
    assert found["80 at a time"] == {"compared": TOKENS, "differ": 20, "largest": 1.0}
    nan = torch.full((2, 3), torch.nan)
    assert layers.compare(nan, nan.clone())["differ"] == 0
    assert layers.compare(nan, torch.ones(2, 3))["largest"] == float("inf")
    zeros = torch.zeros(2, 3)
    assert layers.compare(-zeros, zeros)["differ"] == 2


def test_batches_without_an_output_are_left_out_and_the_others_evenly_drawn() -> None:
    output = torch.ones(TOKENS, 2)
    output[10:50] = 0
    alone = layers.batches(output, 1, 1000)
    assert [int(index) for index in alone] == [*range(10), *range(50, TOKENS)]
    few = [int(index) for index in layers.batches(output, 1, 5)]
    assert few == [0, 54, 69, 84, 99]
    assert [int(index[0]) for index in layers.batches(output, 7, 1000)][:3] == [0, 7, 49]
    # What has no output at all has only the checks of all tokens.
    assert "alone" not in looked_at(OWN, zeros=slice(None))


def test_a_few_tokens_have_no_larger_batches() -> None:
    assert list(looked_at(OWN, tokens=7)) == EVERY[:5]
    assert list(looked_at(OWN, tokens=1)) == EVERY[:4]


def test_tokens_are_taken_along_their_own_axis() -> None:
    """Float8, for which torch has no index, and scales whose tokens are columns."""
    spec = {"shape": ["seq_len", "width"], "dtype": "float8_e4m3fn"}
    given = small.definition().model_dump(mode="json")
    given["inputs"] = {
        "x": spec,
        "scale": {"shape": ["width", "seq_len"], "dtype": "float32"},
        "w": {"shape": ["width", "width"], "dtype": "bfloat16"},
        "factor": {"shape": None, "dtype": "float32"},
    }
    given["reference"] = "def run(x, scale, w, factor): return x"
    x = torch.randn(5, small.WIDTH).to(torch.float8_e4m3fn)
    scale, w = torch.randn(small.WIDTH, 5), torch.ones(small.WIDTH, small.WIDTH)
    index = torch.tensor([4, 0, 4])
    definition = Definition.model_validate(given)
    part = layers.part(definition, [x, scale, w, 2.0], index)
    assert torch.equal(part[0].float(), x.float()[index])
    assert torch.equal(part[1], scale[:, index]) and part[1].is_contiguous()
    assert part[2] is w and part[3] == 2.0


def test_a_replay_comes_after_other_calls_into_an_output_of_nothing(monkeypatch) -> None:
    """Tests the part for GPUs as far as a CPU can."""
    build = BuilderRegistry.get_instance().build
    seen: list[str] = []

    class Graph:
        def __init__(self, call: Callable[[], None]) -> None:
            self.call = call

        def replay(self) -> None:
            seen.append("replay")
            self.call()

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(layers, "capture", Graph)
    monkeypatch.setattr(layers, "waits", lambda call: False)

    def replayed(solution: Any) -> torch.Tensor | str:
        runnable = build(small.definition(), solution)
        return layers.replayed(runnable, inputs(3), "cpu", lambda: seen.append("others"))

    output = replayed(small.solution("x", OWN))
    assert seen == ["others", "replay"] and torch.equal(output, (2 * inputs(3)[0]).bfloat16())
    half = "def run(x, w, factor, output):\n    output[:1] = x[:1]\n"
    assert replayed(small.solution("half", half))[1:].isnan().all(), "what is not written shows"
    returns = "def run(x, w, factor):\n    return x\n"
    assert replayed(small.solution("returns", returns, dps=False)) == "returns its output"
    monkeypatch.setattr(layers, "waits", lambda call: True)
    assert replayed(small.solution("x", OWN)) == "its host waits for the GPU"
    assert tables._check({"not_tried": "its host waits for the GPU"}) == "-"


@pytest.mark.parametrize(
    ("differ", "cell"),
    [([], "-"), ([0], "yes"), ([0, 0], "yes"), ([0, 3], "no"), ([3, 0], "no")],
)
def test_what_is_batch_invariant_was_tried_and_never_differed(differ: list, cell: str) -> None:
    checks = {"replayed": {"not_tried": "its host waits"}, "alone": {"error": "no memory"}}
    checks |= {str(n): {"compared": 4, "differ": tokens} for n, tokens in enumerate(differ)}
    assert tables.batch_invariant(checks) == cell


# --- the program and the ranking ------------------------------------------------------------------


@pytest.fixture
def program(monkeypatch):
    named = {"own": OWN, "few": FEW, "fails": FAILS, "vandal": VANDAL}
    ours = [small.solution(name, content) for name, content in named.items()]
    return small.measure(monkeypatch, ours, (3, 901, 14), "bits")


def traces_of(hashes: dict[str, str], hardware: str = "GPU A") -> list[dict]:
    made = [
        trace(name, 901, 1.0, hardware=hardware, libs={"solution_hash": source})
        for name, source in hashes.items()
    ]
    for one in made:
        one["workload"]["uuid"] = "uuid-901-1"
    return made


@pytest.mark.all
def test_a_run_gets_the_file_and_its_ranking_the_column(program, tmp_path: Path, capsys) -> None:
    ranked(tmp_path, traces_of({n: program.hashes[n] for n in ("own", "few")}))
    assert program("--run", str(tmp_path), "--workloads", "901") == EXIT_OK
    found = rows.read(tmp_path)
    assert {row["tokens"] for row in found.rows} == {901}
    assert found.hashes("bits") == {n: program.hashes[n] for n in ("own", "few")}

    # Another source of `few` was measured than was looked at, and `absent` was not looked at.
    hashes = {"own": program.hashes["own"], "few": "f" * 40, "absent": "a" * 40}
    (other,) = ranked(tmp_path, traces_of(hashes))
    (same,) = ranked(tmp_path, traces_of({n: program.hashes[n] for n in ("own", "few")}))

    def column(table: tables.Table) -> dict[str, str]:
        return dict(zip(table.frame["solution"], table.frame[tables.BATCH_INVARIANT], strict=True))

    assert column(tables.summary_table(same)) == {"own": "yes", "few": "no"}
    assert column(tables.summary_table(other)) == {"own": "yes", "few": "-", "absent": "-"}
    assert column(tables.short_table(same, pd.DataFrame())) == {"own": "yes", "few": "no"}
    checks = tables.checks_table(same).frame
    assert list(checks) == ["solution", *EVERY, tables.BATCH_INVARIANT]
    assert checks.iloc[1].tolist() == ["own", *["yes"] * len(EVERY), "yes"]
    few = checks.iloc[0]
    # Four batches of a width on a CPU: of the eighties the last one, of 21 tokens, differs.
    assert few["again"] == few["doubled"] == "yes" and few["80 at a time"] == "no: 21/261"
    assert few["alone"] == "no: 4/4"
    for style in ("text", "markdown"):
        text = rank_text.print_rankings([same], style)
        assert "no: 21/261" in text and tables.BITS_NOTE in text
    (ranking,) = json.loads(rank_text.print_rankings([same], "json"))
    assert ranking["summary"][0]["checks"]["again"]["differ"] == 0

    assert ">no: 21/261<" in report.render(recorded.read(tmp_path))
    block = "<!-- generated: invariance -->\n<!-- /generated -->"
    page = generated.generate(block, recorded.read(tmp_path))
    assert "no: 21/261" in page and "T=901" in page
    (elsewhere,) = ranked(tmp_path, traces_of(program.hashes, hardware="GPU B"))
    assert not tables.checks_table(elsewhere)
    assert tables.BATCH_INVARIANT not in rank_text.print_rankings([elsewhere])
    # The sentence is wrapped, where depends on the length of the directory's name.
    assert "not recorded." in " ".join(generated.generate(block, recorded.read(tmp_path)).split())


def test_what_fails_is_said_and_has_no_checks(program, tmp_path: Path, capsys) -> None:
    path = tmp_path / "figures.jsonl"
    assert program("--out", str(path)) == EXIT_FAILED
    found = rows.read(path).rows
    assert {row["tokens"] for row in found} == {14}, "the largest that the CPU takes unasked"
    errors = {row["subject"]: row["error"] for row in found if "error" in row}
    assert errors["fails"] == "KeyError: 'a\\nb'" and "changes its inputs: w" in errors["vandal"]
    out, err = capsys.readouterr()
    assert "error: fails at T=14: KeyError" in err and "error: vandal at T=14: " in err
    assert [line.split()[0] for line in out.splitlines()[2:] if line] == ["few", "own"]
