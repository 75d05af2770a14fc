"""Pack each generation into one self-contained flashinfer-bench Solution JSON, or export solutions.

    python3 run.py pack [NAME ...]                        pack generations, all by default
    python3 run.py pack --to trace NAME ... [options]     for a pull request to flashinfer-trace
    python3 run.py pack --to apply [NAME ...] [options]   a data set for flashinfer_bench.apply

A generation is a file of solutions/moe_fp8 with a literal SOLUTION at its top level. Its packed
form is solutions/<author>/<op_type>/<definition>/<name>.json: the closure of its relative imports
and an entry file that loads them, the same bytes on every machine. A SOLUTION with "routings" is
packed for further definitions, too: docs/adding-a-solution.md.

A solution is exported only if traces (--results: records, runs, data sets) back it: it must have
passed on every workload of the data set, on the named GPU, with the exported sources. Otherwise it
is refused, and the workloads without such a trace are listed. For `apply` any workloads will do. Of
several solutions the fastest is taken, and without a name the fastest of all that have traces.
`pack --to FORM --help` lists the options of an export.
"""

import argparse
import json
import math
import re
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.common import sources
from scripts.common.definitions import DEFAULT, find
from scripts.common.program import (
    DEFINITION,
    EXIT_OK,
    OP_TYPE,
    ROOT,
    TRACES_DIR,
    Failure,
    UsageError,
    option_type,
    parser,
    run_main,
    say,
    skipped_text,
    write_file,
)

if TYPE_CHECKING:
    import pandas as pd
    from flashinfer_bench.data import Definition, Solution, Trace, Workload


TRACE, APPLY = FORMS = ("trace", "apply")
FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
AUTHOR = option_type(
    str, "folder's name of letters, digits and . _ -", lambda s: bool(FOLDER.fullmatch(s))
)


@dataclass(frozen=True)
class Export:
    """The JSON of a packed solution, and of the traces that back it."""

    content: dict[str, Any]
    traces: tuple[dict[str, Any], ...] = ()

    @property
    def name(self) -> str:
        return str(self.content["name"])

    @property
    def solution(self) -> "Solution":
        from flashinfer_bench.data import Solution

        return Solution.model_validate(self.content)


def export_of(generation: sources.Generation, author: str | None = None) -> Export:
    """Pack the generation, with `author` or the author in its file. The author is no part of
    flashinfer-bench's hash. Raises PackError."""
    content = json.loads(sources.pack(generation))
    return Export(content | ({"author": author} if author else {}))


class Refused(Failure):
    """A solution that is not exported, with the reasons, one a line."""


def backing_traces(
    solution: "Solution",
    results: "pd.DataFrame",
    workloads: "Sequence[Trace]",
    gpu: str,
    other_sources: bool = False,
    synthetic: bool = True,
    every: bool = True,
) -> tuple[tuple[dict[str, Any], ...], str]:
    """Return the traces that back a packed solution on the GPU whose name has the words of `gpu`,
    in the data set's order, and a text about them.

    The latest trace of a workload counts. Traces of other sources than the packed ones (known by
    flashinfer-bench's hash) count only with `other_sources`, and then only those of the last
    measured source. Without `synthetic`, measurements on this repository's own tensors do not
    count: the data set has others under the same uuids. Without `every`, workloads that are not
    backed are left out, if at least one is backed.

    Raises:
        Refused: a workload, or without `every` all of them, has no trace that passed. The message
            lists them, with the reasons.
        UsageError: `gpu` fits several GPUs, or the traces are of several tolerances or clocks.
    """
    from scripts.measuring.cases import tokens
    from scripts.publishing.rows import run_info

    name, packed = solution.name, solution.hash()
    mine = results[(results.solution == name) & ~results.cpu.astype(bool)]
    hardware = _one_gpu(name, set(mine.hardware), gpu)
    ordered = mine[mine.hardware == hardware].sort_values("timestamp", kind="stable")
    measured: list[Any] = list(ordered.itertuples())
    wanted = measured[-1].hash if other_sources else packed
    chosen = {r.uuid: r for r in measured if r.hash == wanted}
    latest = {r.uuid: r for r in measured}
    # Sources whose run.json says that the tensors were this repository's.
    ours = {s for s in ordered.source.unique() if run_info(Path(s)).get("dataset") == "."}

    def against(workload: "Workload") -> str:
        """Return the reason why a workload is not backed; empty if it is."""
        if workload.uuid not in latest:
            return "no trace"
        if workload.uuid not in chosen:
            was = _source(latest[workload.uuid].hash)
            return f"measured with {was}, not with {_source(wanted)}"
        result = chosen[workload.uuid]
        if not result.passed:
            return f"{result.status}: {result.reason}"
        if type(workload).model_validate(result.trace["workload"]) != workload:
            return "measured on other inputs than the data set's workload of this uuid"
        if result.source in ours and not synthetic:
            return "measured on this repository's synthetic tensors, not on those of the data set"
        return ""

    reasons = [(t.workload, against(t.workload)) for t in workloads]
    unbacked = {f"T={tokens(w)} {w.uuid[:8]}": why for w, why in reasons if why}
    if unbacked and (every or len(unbacked) == len(workloads)):
        raise Refused(
            f"{name} is not exported: on {hardware} {len(unbacked)} of {len(workloads)} "
            f"workloads are not backed:\n  {skipped_text(unbacked, chr(10) + '  ')}"
        )
    backed = [chosen[workload.uuid] for workload, why in reasons if not why]
    ways = {f"{r.source}: {r.tolerance}; {r.timing}": (r.tolerance, r.timing) for r in backed}
    if len(set(ways.values())) > 1:
        many = "the traces are of several tolerances or clocks, name one run"
        raise UsageError("\n  ".join([f"{name}: {many}:", *sorted(ways)]))
    lines = [
        f"{len(backed)} of {len(workloads)} workloads passed on {hardware} "
        f"({backed[0].tolerance or 'tolerance unknown'})"
    ]
    if wanted != packed:
        lines.append(f"the traces are of {_source(wanted)}, the exported one is {packed[:8]}")
    if ours & {r.source for r in backed}:
        lines.append(
            "measured on this repository's synthetic routing (docs/dataset.md), not on the "
            "captured tensors: bench --local PATH measures on those"
        )
    return tuple(r.trace for r in backed), "\n".join(f"{name}: {line}" for line in lines)


def _one_gpu(solution: str, known: Collection[str], gpu: str) -> str:
    """Return the hardware of exactly that name, or the only one that has all the words."""
    meant = [name for name in known if name.lower() == gpu.lower()]
    # Whole words: an H200 is no H20.
    meant = meant or [n for n in sorted(known) if _words(gpu) and _words(gpu) <= _words(n)]
    if len(meant) > 1:
        raise UsageError(f"--gpu {gpu} means {' and '.join(meant)}: give the whole name")
    if not meant:
        some = f"some of {', '.join(sorted(known))}" if known else "none of any GPU"
        raise Refused(
            f"{solution} is not exported: no traces on a GPU named {gpu}; there are {some}"
        )
    return meant[0]


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))


def _source(digest: str) -> str:
    return f"source {digest[:8]}" if digest else "an unknown source"


def collect(
    names: Sequence[str],
    author: str | None,
    results: Sequence[Path],
    **options: Any,
) -> list[Export]:
    """Return the solutions with the traces among the results that back them; without names, those
    that have some. `options` are for `backing_traces`. Raises Refused, PackError, UsageError."""
    from scripts.publishing.rows import read_results

    chosen = sources.select(sources.generations(), [Path(name).name for name in names])
    frame = read_results(results, DEFINITION)
    exports, refused = [], []
    for generation in chosen:
        export = export_of(generation, author)
        try:
            traces, remark = backing_traces(export.solution, frame, **options)
        except Refused as error:
            if names:
                raise
            refused.append(str(error))
            continue
        exports.append(replace(export, traces=traces))
        say(remark)
    if not exports:
        raise Refused("\n".join(refused))
    for why in refused:
        say(why.splitlines()[0].rstrip(":"))
    return exports


def fastest(exports: Sequence[Export]) -> Export:
    """Return the solution that is fastest in the mean of the workloads that back all of them: a
    token's output must not depend on the fastest solution at a batch's size. Raises UsageError:
    there is no such workload, or clocks and tolerances differ."""
    from scripts.publishing.rows import TIMING, TOLERANCE

    traces = [trace for export in exports for trace in export.traces]
    libs = [trace["evaluation"]["environment"]["libs"] for trace in traces]
    ways = {(lib.get(TIMING), lib.get(TOLERANCE)) for lib in libs}
    shared = set.intersection(
        *({trace["workload"]["uuid"] for trace in export.traces} for export in exports)
    )
    if len(ways) > 1 or not shared:
        raise UsageError(
            "the traces of these solutions are of several clocks or tolerances, or of no workload "
            "in common: name one run, or one solution"
        )

    def score(export: Export) -> float:
        backing = (trace for trace in export.traces if trace["workload"]["uuid"] in shared)
        results = (trace["evaluation"]["performance"] for trace in backing)
        return sum(math.log(result["speedup_factor"]) for result in results)

    return max(exports, key=score)


def write_tree(
    form: str, output: Path, exports: Sequence[Export], definition: "Definition"
) -> list[Path]:
    """Write solutions and traces at their paths in a data set, for `apply` with the definition, and
    build the solutions as flashinfer-bench does. Return the files. A solution that does not build
    leaves nothing. Raises PackError; UsageError: `output` has files, which could be mixed up."""
    from scripts.publishing.rows import finite

    here = output.resolve() == Path.cwd()  # replacing it would leave shells in the old directory
    if here or (output.exists() and (not output.is_dir() or any(output.iterdir()))):
        raise UsageError(f"{output} is there already: name a new directory")

    def to_json(value: Any) -> str:
        return json.dumps(value, indent=2, ensure_ascii=False) + "\n"

    files = dict[str, str]()
    if form == APPLY:
        path = f"definitions/{OP_TYPE}/{DEFINITION}.json"
        files[path] = to_json(definition.model_dump(mode="json"))
    for export in exports:
        below = f"{export.content['author']}/{OP_TYPE}/{DEFINITION}"
        files[f"solutions/{below}/{export.name}.json"] = to_json(export.content)
        lines = (json.dumps(finite(trace)) + "\n" for trace in export.traces)
        files[f"traces/{below}.jsonl"] = files.get(f"traces/{below}.jsonl", "") + "".join(lines)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as directory:
        folder = Path(directory) / output.name
        for name, content in files.items():
            write_file(folder / name, content)
        for solution in folder.glob("solutions/**/*.json"):
            sources.validate(solution.read_bytes())
        folder.replace(output)
    return [output / name for name in files]


def export_solutions(argv: Sequence[str] | None) -> None:
    arguments = parser(__doc__)
    add = arguments.add_argument
    text = "names of solutions or of their files; with `apply` all by default"
    add("solutions", nargs="*", metavar="SOLUTION", help=text)
    add("--to", choices=FORMS, required=True, help="the form of the export")
    add("--gpu", required=True, metavar="NAME", help="the GPU of the traces: 'H200'")
    add("--output", type=Path, required=True, metavar="DIR", help="a new directory")
    text = "trace files, runs, records or data sets; this repository's traces/"
    add("--results", nargs="+", type=Path, default=[TRACES_DIR], metavar="PATH", help=text)
    text = "submit under this name instead of the solution's"
    add("--author", type=AUTHOR, metavar="NAME", help=text)
    text = "the data set whose workloads must have passed; this repository"
    add("--local", type=Path, default=ROOT, metavar="PATH", help=text)
    text = "take traces that were measured with other sources than are exported"
    add("--other-sources", action="store_true", help=text)
    text = "with `apply`, for each T the fastest; bits depend on T then"
    add("--mix", action="store_true", help=text)
    args = arguments.parse_args(argv)
    if args.to == TRACE and (args.mix or not args.solutions):
        arguments.error("--mix: only with --to apply" if args.mix else "name the solutions")

    from scripts.measuring.cases import is_this_data_set, load

    data_set = load(args.local)[0]
    if not (workloads := data_set.workloads[DEFINITION]):
        raise UsageError(f"{args.local} has no workloads of {DEFINITION}")
    exports = collect(
        args.solutions,
        args.author,
        args.results,
        workloads=workloads,
        gpu=args.gpu,
        other_sources=args.other_sources,
        synthetic=is_this_data_set(args.local),
        every=args.to != APPLY,
    )
    if args.to == APPLY and not args.mix:
        exports = [fastest(exports)]
    print(*write_tree(args.to, args.output, exports, data_set.definitions[DEFINITION]), sep="\n")


def main(argv: Sequence[str] | None = None) -> int:
    form = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    form.add_argument("--to", nargs="?", const="")
    if form.parse_known_args(argv)[0].to is not None:
        export_solutions(argv)
        return EXIT_OK
    arguments = parser(__doc__)
    add = arguments.add_argument
    add("names", nargs="*", help="solutions (or their files) to pack; all")
    add("--definition", type=find, default=DEFAULT, metavar="NAME", help="another definition")
    add("--output", type=Path, metavar="DIR", help="directory of the JSON files")
    add("--list", action="store_true", help="only list the generations")
    args = arguments.parse_args(argv)
    if args.list:
        for generation in sources.generations(definition=args.definition):
            print(f"{generation.name}  {generation.path.name}")
    else:
        for path in sources.write_packed(args.names, args.output, definition=args.definition):
            print(f"{path}  {path.stat().st_size / 1024:.0f} KiB")
    return EXIT_OK


if __name__ == "__main__":
    run_main(main)
