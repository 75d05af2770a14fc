"""Search the parameters behind the synthetic logits, and write the spec and the workload file.

    python3 run.py fit_workloads                       fit every workload again (minutes)
    python3 run.py fit_workloads --workload 1a4c6ba1   only this one
    python3 run.py fit_workloads --index               only write the workload file anew
    python3 run.py fit_workloads --definition kimi_k2  write those of another definition

The spec names the captured statistics; the search replaces model, counts and hash of an entry when
it finds a better draw. The search itself need not repeat exactly anywhere: the draw from the spec
does. A definition whose workloads stand for no captured ones has nothing to be fitted to: its
strengths are set here, and the first seed is taken whose draw is usable. A grouped GEMM's take the
rows of the experts from the first definition's workloads.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import random
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scripts.common.command_line import UsageError, run_main

# isort: split
# After what makes Ctrl-C end quietly while it is imported.
import numpy as np

from scripts.common import files
from scripts.common.definitions import DEFAULT, GemmDefinition, MoeDefinition, find
from scripts.common.project import ROOT
from scripts.data import gemm_workloads
from scripts.data.make_definition import interface_of
from scripts.data.make_workloads import (
    Spec,
    WorkloadSpec,
    blob_bytes,
    load_specs,
    select,
    spec_path,
    workloads_path,
)
from scripts.data.routing_numpy import RoutingCounts, count_local
from scripts.data.synthetic_logits import (
    Draw,
    LogitModel,
    draw_logits,
)

EXACT_BELOW = 100  # tokens; below, the number of pairs must be met exactly
MOMENT_TOLERANCE = 2e-3
MIN_MARGIN_GAP = 1e-12  # float64 scores near 10 are rounded by 2e-15

# Strengths are searched inside these limits, so that no workload is met by an odd extreme.
LIMITS = {
    "expert": (0, 900),
    "group": (0, 500),
    "local": (-700, 700),
    "token": (0, 300),
    "request": (0, 1200),
    "request_group": (0, 800),
}


# Of workloads of our own: experts differ in popularity and the tokens of a request are alike, about
# as much as the search found it of captured ones.
OWN_STRENGTHS = {"expert": 200, "request": 500, "token": 100}
TOKENS_OF_A_REQUEST = 64


@dataclass(frozen=True)
class Trial:
    cost: float
    model: LogitModel
    draw: Draw
    counts: RoutingCounts


def is_usable(draw: Draw, definition: MoeDefinition) -> bool:
    logits = draw.logits.astype(np.float64)
    return (
        abs(float(logits.mean()) - definition.logits_mean) < MOMENT_TOLERANCE
        and abs(float(logits.std()) - definition.logits_std) < MOMENT_TOLERANCE
        and draw.margin_gap > MIN_MARGIN_GAP
    )


def misfit(counts: RoutingCounts, captured: dict[str, int | None], scale: float = 1.0) -> float:
    """0 for a perfect fit, squared units of the accepted deviation otherwise.

    scale: share of the tokens that counts was taken over, where it was not all of them.
    """
    pairs, hit, active = (captured[key] or 0 for key in ("pairs", "hit", "active"))
    accepted = max(1.0, 0.002 * pairs)
    cost = ((counts.pairs / scale - pairs) / accepted) ** 2
    cost += ((counts.hit / scale - hit) / max(1.0, 0.002 * hit)) ** 2
    cost += float(counts.active - active) ** 2
    if (fullest := captured["max"]) is not None:
        cost += ((counts.max / scale - fullest) / max(1.0, 0.02 * fullest)) ** 2
    return cost


def try_model(spec: WorkloadSpec, model: LogitModel, tokens: int | None = None) -> Trial:
    tokens = tokens or spec.seq_len
    draw = draw_logits(model, tokens, spec.local_expert_offset, spec.definition)
    counts = count_local(draw.ids, spec.local_expert_offset, spec.definition)
    cost = misfit(counts, spec.captured, tokens / spec.seq_len)
    if tokens == spec.seq_len and not is_usable(draw, spec.definition):
        cost = math.inf
    return Trial(cost, model, draw, counts)


def random_model(rng: random.Random, tokens: int) -> LogitModel:
    strengths = {name: rng.randint(low, high) for name, (low, high) in LIMITS.items()}
    return LogitModel(
        seed=rng.randrange(1, 1 << 31), requests=rng.randint(1, 1 + min(tokens, 64)), **strengths
    )


def vary(rng: random.Random, model: LogitModel, step: float) -> LogitModel:
    """The same seed with one or two strengths moved."""
    moved = {}
    for name in rng.sample(sorted(LIMITS), rng.choice((1, 1, 2))):
        low, high = LIMITS[name]
        value = (
            getattr(model, name) + round(rng.gauss(0, step * (high - low))) + rng.choice((-1, 1))
        )
        moved[name] = min(high, max(low, value))
    return replace(model, **moved)


def improve(
    spec: WorkloadSpec, trial: Trial, tokens: int, rng: random.Random, deadline: float
) -> Trial:
    """Small moves of the strengths, in shrinking steps, as long as they pay."""
    for move in range(60):
        if trial.cost == 0 or time.monotonic() > deadline:
            break
        moved = vary(rng, trial.model, step=0.1 * 0.93**move)
        trial = min(trial, try_model(spec, moved, tokens), key=lambda t: t.cost)
    return trial


def fit(spec: WorkloadSpec, seconds: float, report: Callable[[str], None]) -> Trial:
    """The spec's own draw improved, then random restarts; the best trial found."""
    rng = random.Random(spec.uuid)
    deadline = time.monotonic() + seconds
    # Screening a large workload on fewer tokens costs little and predicts the strengths well.
    screen = spec.seq_len if spec.seq_len < 1000 else spec.seq_len // 16

    best = improve(spec, try_model(spec, spec.model), spec.seq_len, rng, deadline)
    report(f"misfit {best.cost:.2f}  {best.counts}")
    while best.cost > 0 and time.monotonic() < deadline:
        screened = [try_model(spec, random_model(rng, spec.seq_len), screen) for _ in range(30)]
        trial = min(screened, key=lambda t: t.cost)
        trial = improve(spec, trial, screen, rng, deadline)
        if screen != spec.seq_len:
            trial = try_model(spec, trial.model)
            if trial.cost < 100 * max(best.cost, 1):  # else not worth full-size trials
                trial = improve(spec, trial, spec.seq_len, rng, deadline)
        if trial.cost < best.cost:
            best = trial
            report(f"misfit {best.cost:.2f}  {best.counts}")
    return best


def own_specs(definition: MoeDefinition) -> list[WorkloadSpec]:
    """Workloads that stand for no captured ones, for the ranks in turns; not drawn yet."""
    ranks = definition.num_experts // definition.num_local_experts
    specs = []
    for number, tokens in enumerate(definition.tokens):
        name = uuid.uuid5(uuid.NAMESPACE_URL, f"{definition.name}/{tokens}")
        requests = 1 + tokens // TOKENS_OF_A_REQUEST
        specs.append(
            WorkloadSpec(
                uuid=str(name),
                seq_len=tokens,
                local_expert_offset=number % ranks * definition.num_local_experts,
                blob=name.hex,
                captured=dict.fromkeys(("pairs", "hit", "active", "max")),
                model=LogitModel(seed=1 + number, requests=requests, **OWN_STRENGTHS),
                counts=RoutingCounts(0, 0, 0, 0),
                redrawn=0,
                sha256="",
                definition=definition,
            )
        )
    return specs


def first_usable(spec: WorkloadSpec) -> Trial:
    """The draw of the spec's strengths with the first seed, from its own on, that is usable."""
    for seed in itertools.count(spec.model.seed, 1000):
        trial = try_model(spec, replace(spec.model, seed=seed))
        if math.isfinite(trial.cost):
            return trial
    raise AssertionError("seeds do not end")


def entry_of(spec: WorkloadSpec, trial: Trial) -> WorkloadSpec:
    content = blob_bytes(trial.draw.logits, spec.definition)  # not drawn again
    return replace(
        spec,
        model=trial.model,
        counts=trial.counts,
        redrawn=trial.draw.redrawn,
        sha256=hashlib.sha256(content).hexdigest(),
    )


def write_spec(specs: Sequence[Spec], path: Path) -> None:
    name = specs[0].definition.name
    document = {"definition": name, "workloads": [spec.to_json() for spec in specs]}
    files.write(path, json.dumps(document, indent=1) + "\n")


def workload_line(spec: Spec) -> str:
    """The workload as flashinfer-bench reads it. The path has the form of the official data set."""
    path = f"./{spec.blob_path.as_posix()}"
    pinned: dict[str, dict[str, Any]] = {
        name: {"type": "safetensors", "path": path, "tensor_key": name} for name in spec.tensors()
    }
    pinned |= {n: {"type": "scalar", "value": value} for n, value in spec.scalars().items()}
    names = interface_of(spec.definition).inputs
    inputs = {name: pinned.get(name, {"type": "random"}) for name in names}
    workload = {"axes": spec.axes, "inputs": inputs, "uuid": spec.uuid}
    record = {
        "definition": spec.definition.name,
        "workload": workload,
        "solution": None,
        "evaluation": None,
    }
    return json.dumps(record)


def write_index(specs: Sequence[Spec], path: Path) -> None:
    files.write(path, "".join(workload_line(spec) + "\n" for spec in specs))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="data set root")
    parser.add_argument("--definition", default=DEFAULT.name, metavar="NAME", help="of which")
    parser.add_argument("--workload", nargs="+", metavar="UUID", help="only these (or prefixes)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="only up to N tokens")
    parser.add_argument("--seconds", type=float, default=60, help="limit for each workload")
    parser.add_argument("--index", action="store_true", help="only write the workload file")
    args = parser.parse_args(argv)

    try:
        definition = find(args.definition)
    except UsageError as error:
        parser.error(str(error))
    spec_file = args.root / spec_path(definition)
    if definition.tokens:
        own: Sequence[Spec]
        if isinstance(definition, GemmDefinition):
            own = gemm_workloads.own_specs(definition, load_specs())
        else:
            own = [entry_of(spec, first_usable(spec)) for spec in own_specs(definition)]
        write_spec(own, spec_file)
        write_index(own, args.root / workloads_path(definition))
        return 0
    specs = load_specs(spec_file)
    if not args.index:
        chosen = {spec.uuid for spec in select(specs, args.workload, args.max_tokens)}
        for number, spec in enumerate(specs):
            if spec.uuid not in chosen:
                continue
            print(f"{spec.uuid}  T={spec.seq_len}  {spec.captured}", file=sys.stderr, flush=True)
            trial = fit(
                spec,
                args.seconds,
                lambda line: print(f"    {line}", file=sys.stderr, flush=True),
            )
            specs[number] = entry_of(spec, trial)
            write_spec(specs, spec_file)
    write_index(specs, args.root / workloads_path(definition))
    return 0


if __name__ == "__main__":
    run_main(main)
