"""Pack each solution into one self-contained flashinfer-bench Solution JSON, or export solutions.

    python3 run.py pack [NAME ...]          write solutions/, all by default
    python3 run.py pack --to trace [NAME ...] --gpu H200 --output DIR
    python3 run.py pack --to apply [NAME ...] --gpu H200 --output DIR

A solution is a file of solutions/moe_fp8 with a literal SOLUTION at its top level. Its packed form
is solutions/<author>/<op_type>/<definition>/<name>.json: the closure of its relative imports and an
entry file that loads them, the same bytes on every machine. A SOLUTION with "routings" is packed
for further definitions, too: docs/adding-a-solution.md.

An export has solutions, and the traces of one run that back them: of the latest run of bench or
record on a GPU (--gpu), or of --results. `trace` is for a pull request to flashinfer-trace, and for
traces/ of this repository. `apply` is a data set for flashinfer_bench.apply with the solution that
is fastest on average. A trace counts if the solution passed, and if its present sources are those
that were measured or have the same machine code. `trace` exports a solution only if all workloads
have such a trace.
"""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.common import hashes, options, packer
from scripts.common.definitions import MoeDefinition, find
from scripts.common.program import (
    EXIT_OK,
    RESULTS_DIR,
    ROOT,
    RUNS_DIR,
    Failure,
    UsageError,
    input_path,
    output_path,
    parser,
    run_main,
    say,
    skipped_text,
    write_file,
)

if TYPE_CHECKING:
    import pandas as pd
    from flashinfer_bench.data import Trace

    from scripts.publishing.rows import Run

TRACE, APPLY = FORMS = ("trace", "apply")


# --- the traces that back a solution --------------------------------------------------------------


def latest_run(gpu: str, definition: MoeDefinition) -> Path:
    """Return the traces of the latest run or record of the definition on the GPU of exactly that
    name, or on the only one that has all its words. Raises UsageError."""
    from scripts.publishing.rows import TRACES, run_info

    paths = (*RUNS_DIR.glob(f"*/{TRACES}"), *RESULTS_DIR.glob(f"*/*/{TRACES}"))
    infos = {path: run_info(path) for path in paths}
    known = {
        path: info["hardware"]
        for path, info in infos.items()
        if info.get("definition") == definition.name and "hardware" in info
    }
    meant = {name for name in known.values() if name.lower() == gpu.lower()}
    meant = meant or {
        name for name in known.values() if _words(gpu) and _words(gpu) <= _words(name)
    }
    if len(meant) != 1:
        there = f"means {' and '.join(sorted(meant))}" if meant else "no run of bench, no record"
        others = ", ".join(sorted(set(known.values()))) or "none"
        raise UsageError(f"--gpu {gpu}: {there}; there are {others}; or name a run by --results")
    return max(
        (path for path, name in known.items() if name in meant),
        key=lambda path: infos[path].get("environment", {}).get("time", ""),
    )


def _words(name: str) -> set[str]:
    """Return the words of a GPU's name: an H200 is no H20."""
    return set(re.findall(r"[a-z0-9]+", name.lower()))


def backing(
    name: str, results: "pd.DataFrame", workloads: "Sequence[Trace]", other_sources: bool
) -> "tuple[pd.DataFrame, dict[str, str]]":
    """Return the results that back a solution, the latest of each workload, in the order of the
    workloads; and for each of the other workloads the reason."""
    from scripts.measuring.cases import named

    f = results[(results.solution == name) & ~results.cpu.astype(bool)]
    f = f.sort_values("timestamp", kind="stable").drop_duplicates("uuid", keep="last")
    latest: dict[str, Any] = {result.uuid: result for result in f.itertuples()}
    as_measured = {was: other_sources or hashes.as_measured(name, was) for was in set(f.hash)}

    def against(workload: Any) -> str:
        """Return the reason why a workload is not backed; empty if it is."""
        if (result := latest.get(workload.uuid)) is None:
            return "no trace"
        if not as_measured[result.hash]:
            return (
                f"measured with sources {result.hash[:8] or '(unknown)'}, of which no record says "
                "that they give the present machine code: --other-sources takes these traces"
            )
        if not result.passed:
            return f"{result.status}: {result.reason}"
        if type(workload).model_validate(result.trace["workload"]) != workload:
            return "measured on other inputs than the data set's workload of this uuid"
        return ""

    reasons = {trace.workload.uuid: against(trace.workload) for trace in workloads}
    backed = [uuid for uuid, why in reasons.items() if not why]
    texts = {named(t.workload): why for t in workloads if (why := reasons[t.workload.uuid])}
    if len(texts) == len(workloads) and len(set(texts.values())) == 1:
        texts = {"all workloads": next(iter(texts.values()))}
    return f.set_index("uuid", drop=False).loc[backed], texts


def fastest(backed: "pd.DataFrame", mix: bool) -> list[str]:
    """Return the solution that is fastest in the mean of the workloads that back all of them: a
    token's output must not depend on the fastest solution at a batch's size. With `mix`, return the
    fastest of each workload. Raises UsageError: no workload backs all."""
    import numpy as np

    speedups = backed.pivot(index="uuid", columns="solution", values="speedup").astype(float)
    if mix:
        return sorted(set(speedups.idxmax(axis="columns")))
    if (shared := speedups.dropna()).empty:
        raise UsageError("no workload backs all of these solutions: name one, or give --mix")
    return [str(np.log(shared).mean().idxmax())]


def collect(
    args: argparse.Namespace, run: "Run", workloads: "Sequence[Trace]", names: Sequence[str]
) -> "dict[str, pd.DataFrame]":
    """Return the solutions among `names` to export, with their results. Unless named, solutions
    that are not backed are left out. Raises Failure, UsageError."""
    import pandas as pd

    backed: dict[str, pd.DataFrame] = {}
    refused: dict[str, str] = {}
    for name in options.select_names(names, args.names):
        f, reasons = backing(name, run.results, workloads, args.other_sources)
        if f.empty or (reasons and args.to == TRACE):
            refused[name] = skipped_text(reasons, "\n    ")
        else:
            backed[name] = f
            say(f"{name}: {len(f)} of {len(workloads)} workloads passed")
    for name, why in refused.items():
        say(f"{name} is not exported:\n    {why}")
    if not backed or (args.names and refused):
        raise Failure(f"{run.directory} does not back {', '.join(refused)}")
    if args.to == APPLY:
        chosen = fastest(pd.concat(backed.values()), args.mix)
        backed = {name: f for name, f in backed.items() if name in chosen}
    return backed


# --- an export ------------------------------------------------------------------------------------


def export(args: argparse.Namespace) -> list[Path]:
    """Write solutions and traces at their paths in a data set, for `apply` with the definition.
    Return the files. Solutions that flashinfer-bench does not build leave none."""
    from scripts.measuring.cases import load
    from scripts.publishing.rows import finite, read_run

    output: Path = args.output
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"--output {output} is there already: name a new directory")
    run = read_run(args.results or latest_run(args.gpu, args.definition))
    definition = find(run.definition)
    place = ROOT if (local := run.info.get("dataset", ".")) == "." else Path(local)
    data_set = load(place, definition)[0]
    if not (workloads := data_set.workloads[definition.name]):
        raise UsageError(f"{place} has no workloads of {definition.name}")
    tensors = "this repository's synthetic tensors" if local == "." else local
    say(f"{run.directory}: {', '.join(run.results.hardware.unique())}, measured on {tensors}")
    files = dict[Path, bytes]()
    if args.to == APPLY:
        content = data_set.definitions[definition.name].model_dump(mode="json")
        files[definition.path] = _line(content, indent=2)
    generations = {g.name: g for g in packer.generations(definition=definition)}
    for name, f in collect(args, run, workloads, [*generations]).items():
        packed, below = packer.pack(generations[name]), generations[name].path_below
        packer.validate(packed, ROOT / definition.path)
        files["solutions" / below] = packed
        traces = "traces" / below.parents[1] / f"{definition.name}.jsonl"
        files[traces] = files.get(traces, b"") + b"".join(_line(finite(t)) for t in f.trace)
    for path, content in files.items():
        write_file(output / path, content)
    return [output / path for path in files]


def _line(content: Any, indent: int | None = None) -> bytes:
    return (json.dumps(content, indent=indent, ensure_ascii=False) + "\n").encode()


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser(__doc__)
    add = arguments.add_argument
    text = "solutions, also short (fused), * allowed (default: all, with --to all that have traces)"
    add("names", nargs="*", metavar="NAME", help=text)
    options.definition(arguments)
    text = "directory of the JSON files (default: their places below solutions/)"
    add("--output", type=output_path, metavar="DIR", help=text)
    add("--list", action="store_true", help="only list the solutions and their files")
    group = arguments.add_argument_group("an export")
    group.add_argument("--to", choices=FORMS, help="its form; --output names a new directory")
    source = group.add_mutually_exclusive_group()
    text = "take the latest run of bench (runs/) or record (results/) on this GPU: H200"
    source.add_argument("--gpu", metavar="NAME", help=text)
    text = "take this run or record"
    source.add_argument("--results", type=input_path, metavar="RUN", help=text)
    text = "take traces of all sources"
    group.add_argument("--other-sources", action="store_true", help=text)
    text = "with `apply`, export the fastest solution of each T; bits depend on T then"
    group.add_argument("--mix", action="store_true", help=text)
    args = arguments.parse_args(argv)
    if args.to and not (args.output and (args.gpu or args.results)):
        arguments.error("--to: also give --output DIR, and --gpu NAME or --results RUN")
    if not args.to and (args.gpu or args.results or args.other_sources):
        arguments.error("--gpu, --results, --other-sources: only with --to")
    if args.mix and args.to != APPLY:
        arguments.error("--mix: only with --to apply")
    if args.to:
        print(*export(args), sep="\n")
    elif args.list:
        for generation in packer.generations(definition=args.definition):
            print(f"{generation.name}  {generation.path.name}")
    else:
        for path in packer.write_packed(args.names, args.output, definition=args.definition):
            print(f"{path}  {path.stat().st_size / 1024:.0f} KiB")
    return EXIT_OK


if __name__ == "__main__":
    run_main(main)
