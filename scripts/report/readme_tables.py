"""The README's figures from a recorded run: its tables, sentences with figures, and pictures.

    python3 run.py readme_tables --check              # fails if README and record disagree
    python3 run.py readme_tables                      # writes both anew
    python3 run.py readme_tables --record results/nvidia-h200/2026-12-24

Where the sources of what was measured have changed since, the text says so, and --check repeats it.

README.md names the record in `<!-- record: DIRECTORY -->`; what stands between
`<!-- generated: NAME -->` and `<!-- /generated -->` is written here. Pictures go to the record's
directory and carry a hash of its data, by which --check knows them.
"""

import hashlib
import re
from pathlib import Path

from scripts.common import files
from scripts.common.command_line import EXIT_FAILED, EXIT_OK, UsageError, parser, run_main
from scripts.common.project import ROOT
from scripts.gemm import plot_gemm
from scripts.report import run_data
from scripts.report.generated import BLOCKS, relative
from scripts.report.run_data import Recorded

README = ROOT / "README.md"
RECORD = re.compile(r"<!-- record: (\S+) -->")
BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- /generated -->)", re.DOTALL)
PICTURES = ("latency.png", "latency_device.png", "speedup.png", "gemm_layers.png", "gemm_grid.png")


def record_of(text: str) -> Path:
    """The directory of the record that the README names."""
    found = RECORD.findall(text)
    if len(found) != 1:
        raise UsageError("the README must name one record: <!-- record: DIRECTORY -->")
    return ROOT / found[0]


def generate(text: str, recorded: Recorded) -> str:
    """The README with every generated block made anew."""
    unknown = [name for _, name, _ in BLOCK.findall(text) if name not in BLOCKS]
    if unknown:
        raise UsageError(f"README: no block {', '.join(unknown)}; there are {', '.join(BLOCKS)}")

    def block(match: re.Match[str]) -> str:
        return f"{match[1]}\n{BLOCKS[match[2]](recorded)}\n\n{match[3]}"

    made = RECORD.sub(f"<!-- record: {relative(recorded)} -->", text)
    return BLOCK.sub(block, made)


def data_hash(directory: Path) -> str:
    """A hash of the data that pictures are drawn from."""
    digest = hashlib.sha256()
    for path in sorted(directory.glob("[!.]*.json*")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def draw(recorded: Recorded) -> list[Path]:
    """Write the pictures of the record."""
    from scripts.report.plots import plain_text, save_png
    from scripts.report.report import write_pictures

    source = data_hash(recorded.directory)
    written = write_pictures(recorded, recorded.directory, source)
    with plain_text():
        figures = {}
        if (record := recorded.gemm.get("gemm_layers")) is not None:
            figures["gemm_layers.png"] = plot_gemm.layers_figure(
                run_data.timed(record), record["floors"], record["hardware"]
            )
        if (record := recorded.gemm.get("gemm_study")) is not None:
            figures["gemm_grid.png"] = plot_gemm.grid_figure(
                run_data.timed(record), record["hardware"]
            )
        for name, figure in figures.items():
            if figure is not None:
                save_png(figure, recorded.directory / name, source)
                written.append(recorded.directory / name)
    return written


def stale(text: str, recorded: Recorded) -> list[str]:
    """What of the README and its pictures is not made of the record as it is now."""
    problems = []
    for (_, name, _), old, new in zip(
        BLOCK.findall(text),
        BLOCK.finditer(text),
        BLOCK.finditer(generate(text, recorded)),
        strict=True,
    ):
        if old[0] != new[0]:
            problems.append(f"README.md, block {name}: not what {relative(recorded)} says")
    source = data_hash(recorded.directory).encode()
    shown = re.findall(rf"{re.escape(relative(recorded))}/(\w+\.png)", text)
    present = [n for n in PICTURES if n in shown or (recorded.directory / n).is_file()]
    for name in present:
        picture = recorded.directory / name
        if not picture.is_file():
            problems.append(f"{relative(recorded)}/{name}: missing")
        elif source not in picture.read_bytes():
            problems.append(f"{relative(recorded)}/{name}: drawn from other data")
    return problems


def changes(recorded: Recorded) -> list[str]:
    """What of the record is no longer of the present sources, one line each."""
    found = {"traces.jsonl": run_data.changed_sources(recorded.main)}
    if recorded.stages is not None:
        found["stages.json"] = run_data.changed_since(recorded.stages)
    for name, record in recorded.gemm.items():
        found[f"{name}.json"] = run_data.changed_since(record)
    return [f"{relative(recorded)}/{name}: {text}" for name, text in found.items() if text]


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--record", type=Path, metavar="DIR", help="the record to take instead")
    arguments.add_argument("--check", action="store_true", help="write nothing; fail if stale")
    args = arguments.parse_args()
    text = README.read_text(encoding="utf-8")
    recorded = run_data.read(args.record or record_of(text))
    for line in changes(recorded):
        print(line)
    if args.check:
        problems = stale(text, recorded)
        print("\n".join(problems) or f"README and pictures are those of {relative(recorded)}")
        return EXIT_FAILED if problems else EXIT_OK
    files.write(README, generate(text, recorded))
    for path in draw(recorded):
        print(path)
    return EXIT_OK


if __name__ == "__main__":
    run_main(main)
