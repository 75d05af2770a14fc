"""Several processes at once on one GPU, one of which is killed."""

import hashlib
import subprocess
import sys
import threading
from pathlib import Path

import torch
from deepseek import SHAPE, output_of, random_fp8, v4, v5
from markers import backends
from moe_fp8.call import MoeInputs

pytestmark = backends("gpu")
PROCESSES = 8


def digest(calls: int = 20) -> str:
    """Return a digest of the outputs of flat and fused at two sizes, after `calls` repeats."""
    generator = torch.Generator("cuda").manual_seed(0)
    e, h, i = SHAPE.num_local_experts, SHAPE.hidden_size, SHAPE.intermediate_size

    def normal(*dims: int) -> torch.Tensor:
        return torch.randn(dims, generator=generator, device="cuda")

    weights = (
        random_fp8(generator, e, 2 * i, h), normal(e, 2 * i // 128, h // 128),
        random_fp8(generator, e, h, i), normal(e, h // 128, i // 128),
    )  # fmt: skip
    outputs = hashlib.sha256()
    for tokens in (7, 80):
        inputs = MoeInputs(
            normal(tokens, 256), normal(256).bfloat16(),
            random_fp8(generator, tokens, h), normal(h // 128, tokens), *weights, 64, 2.5,
        )  # fmt: skip
        for module in (v4, v5):
            first = output_of(module, inputs)
            for _ in range(calls):
                assert torch.equal(output_of(module, inputs), first)
            outputs.update(first.view(torch.uint8).cpu().numpy().tobytes())
    return outputs.hexdigest()


def start(code: str, log: Path) -> subprocess.Popen:
    paths = [str(Path(__file__).parent), *sys.path]
    with log.open("w") as errors:
        return subprocess.Popen(
            [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}\n{code}"],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )


ENDLESS = "import test_processes\nwhile True: print(test_processes.digest(1), flush=True)"
TWICE = "import test_processes\nfor n in (1, 20): print(test_processes.digest(n), flush=True)"
PATIENCE_S = 300.0


def test_eight_processes_at_once_and_one_that_is_killed(tmp_path):
    wanted = digest(1)
    logs = [tmp_path / str(i) for i in range(PROCESSES + 1)]
    processes = [start(ENDLESS if log is logs[0] else TWICE, log) for log in logs]
    victim, *others = processes
    # Whoever hangs gives no further line, so that the test fails and does not wait for ever.
    timer = threading.Timer(PATIENCE_S, lambda: [process.kill() for process in processes])
    timer.start()
    try:
        for process, log in zip(processes, logs, strict=True):
            assert process.stdout.readline().strip() == wanted, log.read_text()[-2000:]
        victim.kill()  # in the midst of a call, while the others are in theirs
        for process, log in zip(others, logs[1:], strict=True):
            assert process.stdout.readline().strip() == wanted, log.read_text()[-2000:]
            assert process.wait() == 0, log.read_text()[-2000:]
    finally:
        timer.cancel()
        for process in processes:
            process.kill()
            process.wait()
    assert digest(1) == wanted
