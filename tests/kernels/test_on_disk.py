"""A kernel from disk is the one that would be compiled now, with its own PTX."""

from pathlib import Path

import on_disk
import pytest
import torch
from markers import backends
from moe_fp8.cache import CACHE_VARIABLE
from moe_fp8.kernels import compile as compiling
from moe_fp8.kernels.combine import Combine, compile_combine
from ptxemu import build
from test_tiles import Lookup

pytestmark = backends("emulator")
TARGET = "sm_90a"


def test_a_kernel_from_disk_has_the_ptx_of_the_compiled_one(emulator, monkeypatch, tmp_path):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "kernels"))
    o, weights = torch.randn(3, 512).bfloat16(), torch.rand(2, 2)
    pair_row = torch.tensor([[0, 2], [-1, 1]], dtype=torch.int32)
    seen = []

    def run() -> torch.Tensor:
        monkeypatch.setattr(emulator.host, "_ptx_of_image", {})
        emulator.host.ptx_transform = lambda ptx: seen.append(ptx) or ptx
        out = torch.full((2, 512), torch.nan, dtype=torch.bfloat16)
        compile_combine.make(512, 2, TARGET)(o, pair_row, weights, out, 1)
        assert emulator.reports[-1].hazards == []
        return out

    compiled = run()
    monkeypatch.setattr(compiling.cute, "compile", lambda *_, **__: pytest.fail("compiled anew"))
    assert torch.equal(run(), compiled) and compiled.isfinite().all()
    assert len(seen) == 2 and seen[0] == seen[1]
    assert TARGET in seen[0]


DIGEST = compiling._source_digest.__wrapped__
PACKAGE = compiling.PACKAGE_ROOT / "kernels"


@pytest.mark.parametrize(
    ("kernel", "edited", "other"),
    [
        (Combine, PACKAGE / "combine.py", True),
        (Combine, PACKAGE / "compile.py", True),
        (Combine, PACKAGE / "swiglu.py", False),
        (Combine, Path(build.__file__).with_name("fakecuda.py"), True),
        (Combine, on_disk.TESTS / "support/problems.py", False),
        (Lookup, PACKAGE / "swiglu.py", True),
        (Lookup, on_disk.TESTS / "support/problems.py", True),
    ],
    ids=lambda value: getattr(value, "__name__", None) or getattr(value, "name", str(value)),
)
def test_an_edit_makes_another_kernel(kernel, edited, other, monkeypatch):
    read = Path.read_bytes

    def key() -> dict[str, str]:
        """Return the key in a new process, which remembers no digest."""
        with pytest.MonkeyPatch.context() as context:
            context.setattr(compiling, "_source_digest", DIGEST)
            context.setenv("CUTE_DSL_PTXEMU", build.modules_digest())  # as the emulator's start
            on_disk.use(context)
            return compiling.description(kernel, (), (), TARGET)

    before = key()
    assert edited.exists() and key() == before
    monkeypatch.setattr(
        Path, "read_bytes", lambda self: read(self) + (b"\n" if self == edited else b"")
    )
    assert (key() != before) == other
