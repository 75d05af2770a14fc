"""The kernel that only reads weights: every chunk of the active experts, once, and nothing else."""

import pytest
import torch
from markers import backends, more

from scripts.measuring.weight_stream import CHUNK, STAGES, readers

pytestmark = backends("emulator")
CHUNKS = STAGES + 3


@pytest.mark.parametrize("ctas", [4, *more(1, 40)])
@pytest.mark.parametrize("active", [[0], [1, 3], [0, 1, 2, 3]], ids=str)
def test_reads_the_active_experts_once(active, ctas, mode, emulator):
    torch.manual_seed(ctas)
    bytes_ = torch.randint(0, 256, (4, CHUNKS, CHUNK), dtype=torch.uint8)
    experts = torch.tensor(active, dtype=torch.int32)
    read = torch.full((ctas,), -1, dtype=torch.int64)
    weights, counts = bytes_.view(torch.float8_e4m3fn), []
    for read_all in readers(weights, experts, read, "sm_90a"):
        read.fill_(-1)
        read_all()
        assert int(read.sum()) == len(active) * CHUNKS and read.max() - read.min() <= 1
        assert emulator.reports[-1].hazards == []
        counts.append(read.tolist())
    assert (counts[0] == counts[1]) == (len(active) * CHUNKS % ctas == 0), "in two orders"
    for add_up in readers(weights, experts, read, "sm_90a", add_up=True):
        add_up()
        assert int(read.sum()) == int(bytes_[active].sum(dtype=torch.int64))
        assert emulator.reports[-1].hazards == []


def test_weights_of_broken_chunks_are_refused():
    weights = torch.zeros(2, 100, 128, dtype=torch.uint8).view(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="expected whole chunks of 16384 bytes"):
        readers(weights, torch.zeros(1), torch.zeros(1), "sm_90a")
