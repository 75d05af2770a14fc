"""Check the solutions against the reference and rank them by speed-up.

Packs the solutions, makes the workloads' tensors, runs flashinfer-bench's own Benchmark on the GPUs
of this machine and prints the ranking. Every run keeps its traces, in flashinfer-bench's format, in
a directory of its own under traces/, with run.json beside them: environment, settings, hashes of
the solutions. Ctrl-C keeps and ranks what was measured; --resume goes on, on the same machine with
the same settings. A solution that cannot run here (another GPU, a package that is not installed) is
left out, and the ranking says why.

Without a GPU the same packed solutions run as their torch model on the CPU, on the small workloads:
outputs are checked, the times are CPU times and no GPU figure is reported.
"""

import argparse
import json
import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from threading import Event, Thread
from types import FrameType
from typing import TYPE_CHECKING, Any

import environment
import rank
from availability import is_peer, other_versions, say_skipped, split_available, this_machine
from common import (
    DEFINITION,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    ROOT,
    TRACES_DIR,
    Progress,
    UsageError,
    duration,
    parser,
    run_main,
    text_table,
)
from dataset import (
    add_solutions,
    load,
    make_missing_workloads,
    ours,
    packed_solutions,
    select_solutions,
    select_workloads,
    tokens,
)
from pack import PackError, write_packed

if TYPE_CHECKING:
    from flashinfer_bench.bench import BenchmarkConfig
    from flashinfer_bench.data import Solution, Trace, TraceSet

CPU_MAX_TOKENS = 16
CPU_ITERATIONS = 3


class Run:
    """The directory of one run: traces.jsonl, appended to as results come, and run.json."""

    def __init__(self, directory: Path, resumed: bool):
        self.directory = directory
        self.traces = directory / "traces.jsonl"
        self.info: dict[str, Any] = {}
        if resumed:
            self.info = json.loads((directory / "run.json").read_text(encoding="utf-8"))
        directory.mkdir(parents=True, exist_ok=True)

    def save_info(self, **fields: Any) -> None:
        self.info.update(fields)
        partial = self.directory / "run.tmp"
        partial.write_text(json.dumps(self.info, indent=1) + "\n", encoding="utf-8")
        partial.replace(self.directory / "run.json")

    def check_same(self, **now: Any) -> None:
        """Refuse to go on with a run of another machine, other packages or other settings: its
        results would stand beside ours as if they were comparable."""
        changed = environment.differences(self.info["environment"], now.pop("environment"))
        for key, value in now.items():
            before = self.info.get(key)
            if before != value:
                changed.append(f"{key} {before!r} then, {value!r} now")
        if changed:
            raise UsageError(
                f"{self.directory} cannot be resumed, start a new run:\n  " + "\n  ".join(changed)
            )

    def done(self, hashes: dict[str, str]) -> set[tuple[str, str]]:
        """(uuid, solution) that this run has results for, of the solutions' current sources."""
        before = self.info.get("solutions", {})
        if not self.traces.is_file():
            return set()
        return {
            (r.uuid, r.solution)
            for r in rank.read_records([self.traces])
            if before.get(r.solution) == hashes.get(r.solution)
        }


def new_run(traces: Path, hardware: str) -> Run:
    slug = re.sub(r"[^a-z0-9]+", "-", hardware.lower()).strip("-")[:40]
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    directory, n = traces / f"{stamp}-{slug}", 1
    while directory.exists():
        n += 1
        directory = traces / f"{stamp}-{slug}-{n}"
    return Run(directory, resumed=False)


def find_run(traces: Path, wanted: Path | None) -> Run:
    """The run to go on with: the named directory, or the latest."""
    candidates = [wanted] if wanted else sorted(p.parent for p in traces.glob("*/run.json"))
    if not candidates or not (candidates[-1] / "run.json").is_file():
        raise UsageError(f"no run to resume in {wanted or traces}")
    return Run(candidates[-1], resumed=True)


def run_on_gpu(
    trace_set: "TraceSet",
    pairs: "Sequence[tuple[Trace, list[Solution]]]",
    config: "BenchmarkConfig",
    libs: dict[str, str],
    store: "Callable[[list[Trace]], None]",
    progress: Progress,
) -> list[str]:
    """flashinfer-bench's Benchmark, one workload at a time on one set of worker processes, so that
    every workload's results are kept as soon as they are there. Returns what went wrong."""
    from flashinfer_bench.bench import Benchmark
    from flashinfer_bench.data import TraceSet

    messages: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger = logging.getLogger("flashinfer_bench")
    handler = Collect(level=logging.ERROR)
    logger.addHandler(handler)
    logger.propagate = False

    errors = []
    one = TraceSet(root=trace_set.root, definitions=trace_set.definitions)
    with ignored_interrupts():  # which the worker processes inherit
        benchmark = Benchmark(one, config)
    try:
        for trace, solutions in pairs:
            workload = trace.workload
            names = [s.name for s in solutions]
            progress.step(f"T={tokens(workload)} ({workload.uuid[:8]}): {len(names)} solutions")
            one.workloads = {DEFINITION: [trace]}
            one.solutions = {DEFINITION: solutions}
            messages.clear()
            with (
                finish_before_interrupt() as interrupted,
                announce(Path(config.log_dir), names, progress),
            ):
                results = benchmark.run_all(dump_traces=False).traces.get(DEFINITION, [])
            for result in results:
                if result.evaluation is not None:
                    result.evaluation.environment.libs.update(libs)
            if interrupted.is_set():  # a failure may be the interrupt's doing; --resume will tell
                results = [r for r in results if _record(r).passed]
            store(results)
            for record in map(_record, results):
                speed = (
                    f" {record.speedup:.2f}x {record.latency_ms:.4f} ms" if record.passed else ""
                )
                reason = f": {record.reason}" if record.reason else ""
                progress.note(f"{record.solution}: {record.status}{speed}{reason}")
            missing = {s.name for s in solutions} - {r.solution for r in results}
            if missing and not interrupted.is_set():
                why = messages[-1] if messages else "no result"
                errors.append(f"T={tokens(workload)} ({workload.uuid}): {sorted(missing)}: {why}")
                progress.note(errors[-1])
            progress.finish(_weight(tokens(workload)))
            if interrupted.is_set():
                raise KeyboardInterrupt
    finally:
        benchmark.close()
        logger.removeHandler(handler)
        logger.propagate = True
    return errors


@contextmanager
def ignored_interrupts() -> Iterator[None]:
    """Ctrl-C reaches every process of the terminal; those started here leave it to this one."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def finish_before_interrupt() -> Iterator[Event]:
    """The first Ctrl-C sets the event and nothing else, so that the workload under way is finished
    and kept; flashinfer-bench would evaluate its remaining solutions anyway and then drop them all.
    The second one ends the process."""
    interrupted = Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if interrupted.is_set():
            for child in multiprocessing.active_children():
                child.terminate()
            print("stopped; `run.py rank` shows what was kept", file=sys.stderr, flush=True)
            os._exit(EXIT_INTERRUPTED)
        interrupted.set()
        print("finishing this workload; Ctrl-C again stops at once", file=sys.stderr, flush=True)

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def announce(log_dir: Path, names: Sequence[str], progress: Progress) -> Iterator[None]:
    """A line for each solution when its evaluation begins. flashinfer-bench hands over the results
    of a workload all at once, but its worker opens the log file `<solution>_<time>.log` before
    each."""
    begin, over = time.time(), Event()

    def watch() -> None:
        seen: set[str] = set()
        while not over.wait(0.25):
            for path in log_dir.glob("*.log"):
                name, _, stamp = path.stem.rpartition("_")
                if name in names and name not in seen and float(stamp) >= begin:
                    seen.add(name)
                    spent = duration(progress.elapsed())
                    progress.note(f"running {name} ({len(seen)} of {len(names)}), elapsed {spent}")

    thread = Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _record(trace: "Trace") -> rank.Record:
    record = rank.parse_record(json.loads(trace.model_dump_json()), "")
    assert record is not None
    return record


def _weight(length: int) -> float:
    """Roughly how long a workload takes: the reference's fixed cost, then its tokens."""
    return 1 + length / 4000


def parse_arguments() -> argparse.Namespace:
    arguments = parser(__doc__)
    add = arguments.add_argument
    add(
        "--local",
        type=Path,
        default=ROOT,
        metavar="PATH",
        help="another data set: its workloads, and its solutions beside ours; not written to",
    )
    add("--solutions", nargs="+", default=[], metavar="NAME", help="names, * allowed; all")
    add(
        "--workloads",
        nargs="+",
        default=[],
        metavar="T|UUID",
        help="token counts or beginnings of uuids; all (on the CPU: the small ones)",
    )
    add("--max-tokens", type=int, metavar="T", help="only workloads up to T tokens")
    add("--list", action="store_true", help="list solutions and workloads and stop")
    add("--iterations", type=int, help="timed calls a trial (50; on the CPU at most 3)")
    add("--warmup", type=int, default=10, help="calls before the timed ones (10)")
    add("--trials", type=int, default=3, help="trials, each with new random inputs (3)")
    add("--rtol", type=float, default=0.2)
    add("--atol", type=float, default=0.1)
    add("--matched-ratio", type=float, default=0.85, help="share of values within tolerance (0.85)")
    add("--timeout", type=int, default=300, help="seconds for a solution on a workload (300)")
    add("--isolated", action="store_true", help="a new process for each solution and workload")
    add("--cpu", action="store_true", help="run the torch model on the CPU though a GPU is there")
    add("--seed", type=int, default=2026, help="of the CPU's inputs and of the accuracy pass")
    add("--no-accuracy", action="store_true", help="skip the pass that adds the accuracy columns")
    add("--traces", type=Path, default=TRACES_DIR, metavar="DIR", help="where runs are kept")
    add(
        "--store-in-dataset",
        action="store_true",
        help="also append the traces to the data set's own, as flashinfer-bench run does",
    )
    add(
        "--resume",
        nargs="?",
        type=Path,
        const=True,
        metavar="RUN",
        help="go on with this run's directory, or with the latest run",
    )
    add("--against", metavar="NAME", help="add the speed relative to a solution to the ranking")
    add("--peers", nargs="+", default=[], metavar="PATTERN", help="names that count as peers")
    add("--no-report", action="store_true", help="do not write the HTML report of the run")
    add("--markdown", type=Path, metavar="FILE", help="also write the ranking as Markdown")
    add("--json", type=Path, metavar="FILE", help="also write the ranking as JSON")
    return arguments.parse_args()


def main() -> int:
    args = parse_arguments()
    # The reference allocates 5.6 GB anew for every call; in huge pages that takes half the time.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    import torch
    from flashinfer_bench.bench import BenchmarkConfig
    from flashinfer_bench.data import append_jsonl_file
    from flashinfer_bench.utils import hardware_from_device

    on_gpu = torch.cuda.is_available() and not args.cpu
    machine = this_machine(on_gpu)
    try:
        mine = packed_solutions(write_packed())
    except PackError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    trace_set, remarks = load(args.local)
    remarks += add_solutions(trace_set, mine)
    every = trace_set.solutions[DEFINITION]
    solutions, skipped = split_available(select_solutions(every, args.solutions), machine)
    workloads = trace_set.workloads[DEFINITION]
    if not on_gpu and not args.workloads and args.max_tokens is None:
        args.max_tokens = CPU_MAX_TOKENS
    chosen = select_workloads(workloads, args.workloads, args.max_tokens)
    not_run = [t for t in workloads if t not in chosen]
    remarks += other_versions(solutions, machine)
    for remark in remarks:
        print(remark, file=sys.stderr)
    if args.list:
        _, missing = split_available(every, machine)
        listed = [[s.name, s.author, missing.get(s.name, "yes")] for s in every]
        print(text_table(["solution", "author", "runs here"], listed, left=3))
        rows = [[str(tokens(t.workload)), t.workload.uuid] for t in workloads]
        print("\n" + text_table(["T", "workload"], rows, left=0))
        return EXIT_OK

    if not solutions:
        raise UsageError("no solution can run here:\n  " + say_skipped(skipped, "\n  "))
    try:
        config = BenchmarkConfig(
            warmup_runs=args.warmup,
            iterations=args.iterations or (50 if on_gpu else CPU_ITERATIONS),
            num_trials=args.trials if on_gpu else 1,
            rtol=args.rtol,
            atol=args.atol,
            required_matched_ratio=args.matched_ratio,
            timeout_seconds=args.timeout,
            use_isolated_runner=args.isolated,
        )
    except ValueError as error:
        raise UsageError(str(error)) from None
    make_missing_workloads(args.local, chosen)

    hardware = hardware_from_device("cuda:0" if on_gpu else "cpu")
    hashes = {s.name: s.hash() for s in solutions}
    if args.resume:
        run = find_run(args.traces, None if args.resume is True else args.resume)
    else:
        run = new_run(args.traces, hardware)
    done = run.done(hashes) if args.resume else set()
    import cpu_bench

    timing = cpu_bench.TIMING
    if on_gpu:
        timing = (
            f"flashinfer-bench {environment.versions()['flashinfer-bench']}, CUDA events, mean of "
            f"{config.iterations} calls x {config.num_trials} trials, L2 cleared"
        )
    libs = {
        **environment.versions(),
        "timing": timing,
        "tolerance": (
            f"rtol {config.rtol:g}, atol {config.atol:g}, "
            f"matched ratio {config.required_matched_ratio:g}"
        ),
    }
    settings = dict(
        hardware=hardware,
        environment=environment.capture(),
        configuration={k: v for k, v in vars(config).items() if k != "log_dir"},
        timing=timing,
        dataset="." if ours(args.local) else str(args.local.resolve()),
        seed=args.seed,
    )
    if args.resume:
        run.check_same(**settings)
        keys = ("command", "environment", "seconds")
        earlier = {k: run.info[k] for k in keys if k in run.info}
        run.info["earlier"] = [*run.info.get("earlier", []), earlier]
    run.save_info(
        definition=DEFINITION,
        command=sys.argv[1:],
        **settings,
        solutions={**run.info.get("solutions", {}), **hashes},
        peers={**run.info.get("peers", {}), **{s.name: is_peer(s) for s in every}},
        skipped={} if not on_gpu else skipped,
        finished=False,
    )

    pairs = [
        (t, left)
        for t in chosen
        if (left := [s for s in solutions if (t.workload.uuid, s.name) not in done])
    ]
    names = ", ".join(s.name for s in solutions)
    if skipped:
        print(f"left out: {say_skipped(skipped)}", file=sys.stderr)
    print(f"{hardware if on_gpu else f'CPU ({hardware})'}: {names}", file=sys.stderr)
    print(f"{len(pairs)} workloads to run, results in {run.directory}", file=sys.stderr)
    if not on_gpu:
        reason = "as asked (--cpu)" if torch.cuda.is_available() else "no GPU is visible"
        print(
            f"{reason}: the solutions run as their torch model on the CPU; no GPU time is measured",
            file=sys.stderr,
        )
    if not_run:
        lengths = ", ".join(f"T={tokens(t.workload)}" for t in not_run)
        print(f"not run: {len(not_run)} workloads ({lengths})", file=sys.stderr)

    def store(traces: "list[Trace]") -> None:
        append_jsonl_file(traces, run.traces)
        if args.store_in_dataset and not ours(args.local):
            trace_set.add_traces(traces)

    progress = Progress(len(pairs), sum(_weight(tokens(t.workload)) for t, _ in pairs))
    errors: list[str] = []
    interrupted = False
    try:
        if on_gpu:
            errors = run_on_gpu(trace_set, pairs, config, libs, store, progress)
        else:
            cpu_bench.run(trace_set, pairs, config, args.seed, libs, store, progress)
        run.save_info(finished=True, errors=errors)
        if on_gpu:
            add_measurements(run, args)
    except KeyboardInterrupt:
        interrupted = True
        print("interrupted; what was measured is kept", file=sys.stderr)
    finally:
        run.save_info(
            seconds=progress.elapsed(),
            ended=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            gpus_after=environment.gpus(),
        )
    if not run.traces.is_file():
        print("nothing was measured", file=sys.stderr)
        print("\n".join(f"error: {e}" for e in errors), file=sys.stderr)
        return EXIT_INTERRUPTED if interrupted else EXIT_FAILED

    ranked = rank.rankings(rank.read_records([run.traces]), against=args.against, peers=args.peers)
    print("\n" + rank.print_rankings(ranked))
    if errors:
        print("\n".join(f"error: {e}" for e in errors), file=sys.stderr)
    for path, style in ((args.markdown, "markdown"), (args.json, "json")):
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(rank.print_rankings(ranked, style) + "\n", encoding="utf-8")
    print(f"\n{duration(progress.elapsed())}; traces: {run.traces}", file=sys.stderr)
    if not args.no_report:
        write_report(run, args.peers)
    if interrupted:
        return EXIT_INTERRUPTED
    return EXIT_FAILED if errors or any(r.failures() for r in ranked) else EXIT_OK


def add_measurements(run: Run, args: argparse.Namespace) -> None:
    """The floors and the accuracy pass, in processes of their own: they must not inherit a GPU
    context that a failed solution left broken, nor the memory that the baselines hold here."""
    local = ["--local", str(args.local)]
    passes = {"floors": [*local, "--json", str(run.directory / "floors.json")]}
    if not args.no_accuracy:
        passes["accuracy"] = [*local, "--run", str(run.directory), "--seed", str(args.seed)]
    for name, arguments in passes.items():
        script = Path(__file__).with_name(f"{name}.py")
        out = subprocess.DEVNULL if name == "floors" else None
        result = subprocess.run([sys.executable, str(script), *arguments], stdout=out)
        if result.returncode != 0:
            print(f"{script.name} failed; its figures are incomplete", file=sys.stderr)


def write_report(run: Run, peers: list[str]) -> None:
    """The HTML page of the run, or one line that says what it needs."""
    import report

    try:
        print(f"report: {report.write(run.directory, peers=peers)}", file=sys.stderr)
    except UsageError as error:
        print(error, file=sys.stderr)


if __name__ == "__main__":
    run_main(main)
