"""A whole record of this GPU in one command: tests, benchmark, stages, GEMM, profile, one archive.

    python3 run.py record

For any GPU that there are kernels for; meant above all for those that nobody has measured here yet.
Runs the project's own programs one after the other, each as `run.py` would: the GPU tests, the
ranking of all solutions that run here on the 19 workloads with its floors, accuracy and device
times, the stages, the GEMM alone (the layer's two, the 81 configurations of the study), a profile
and the page. A step that fails or takes too long is noted, and the next one begins. Everything goes
into one directory, laid out as those in results/, and into an archive beside it: that file is all
there is to send back. It holds the GPU's and the packages' versions and the steps' output, no
variables of the environment.

Takes about an hour. Ctrl-C ends the step under way and packs what there is.
"""

import re
from datetime import datetime, timezone
from pathlib import Path

from scripts.common.command_line import parser, positive, run_main, say
from scripts.common.project import TRACES_DIR
from scripts.measure import record


def main() -> int:
    arguments = parser(__doc__)
    add = arguments.add_argument
    add("--only", nargs="+", default=record.STEPS, choices=record.STEPS, help="these steps")
    add("--limit", type=positive, default=120, metavar="MINUTES", help="of a step (120)")
    # Not among the runs: the latest of those is what `report` and `bench --resume` take.
    place = TRACES_DIR / "records"
    add("--out", type=Path, default=place, metavar="DIR", help="where it is made (traces/records)")
    args = arguments.parse_args()

    from scripts.measure.gpu import gpu_arch, require_gpu

    hardware, target = require_gpu(), gpu_arch()
    now = datetime.now(timezone.utc)
    slug = re.sub(r"[^a-z0-9]+", "-", hardware.lower()).strip("-")
    directory = args.out.resolve() / f"record-{slug}-{now:%Y-%m-%d-%H%M%S}"
    directory.mkdir(parents=True)
    steps = {name: c for name, c in record.commands(directory).items() if name in args.only}
    say(f"{hardware}, {target}: {', '.join(steps)}")
    record.describe_machine(directory)
    header = {"hardware": hardware, "target": target, "time": now.isoformat(timespec="seconds")}
    return record.record(steps, directory, 60 * args.limit, **header)


if __name__ == "__main__":
    run_main(main)
