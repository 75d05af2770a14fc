"""Break the fused layer's compiled kernels in one place: an error, a hazard or a wrong result must
show in some schedule."""

import re

import pytest
from markers import backends
from moe_fp8.call import MoeInputs
from moe_fp8.kernels import architectures
from moe_fp8.reference import calc_diff
from mutants import PARITY, WAIT, all_of
from mutants import noticed as noticed_in
from problems import (
    GATHERED,
    OVERWRITTEN,
    PERMUTED,
    SHAPE,
    TOLERANCE,
    by_model,
    few_local_rows,
    fused_output_of,
    inputs_of,
    messages,
    use_target,
    with_local_rows,
)
from ptxemu.testing import Edit, replace

pytestmark = [backends("emulator"), pytest.mark.all]


def noticed(name: str, edit: Edit, emulator, inputs: MoeInputs | None = None) -> bool:
    """Return True if a mutant of the layer's kernels is noticed."""
    inputs = inputs or inputs_of(41, 4)
    wanted = fused_output_of(inputs, name)
    return noticed_in(lambda: fused_output_of(inputs, name), wanted, edit, emulator)


@pytest.mark.parametrize("name", ["8 swapped", "64 overlapped", "128"])
@pytest.mark.parametrize("factor", ["0f00000000", "0f3F000000"], ids=["none", "half"])
def test_a_wrong_second_term(factor, name, emulator):
    """The second term is small: half of it must not pass for rounding."""
    inputs = inputs_of(41, 4)
    wanted = by_model(inputs, SHAPE, terms=2)
    # Only the rest after the first term is a difference of two float32.
    left = replace(r"sub\.f32\s+(%r\d+), [^;]*;", rf"\g<0>\nmul.f32 \1, \1, {factor};")
    emulator.host.ptx_transform = all_of(left)
    assert calc_diff(fused_output_of(inputs, name, 2), wanted) > 100 * TOLERANCE[2]


NOT_NEEDED_WITHIN_A_CALL = {"word", "choose"}
"""The first kernel waits for the call before: test_back_to_back."""


@pytest.mark.parametrize(
    ("name", "kernels", "which"),
    [("8 swapped", GATHERED, which) for which in GATHERED]
    + [("128", PERMUTED, which) for which in ("permute", "gemm1")],
)
def test_without_a_wait_for_the_kernel_before(name, kernels, which, emulator):
    edit = replace(r"griddepcontrol\.wait;", "", kernels.index(which))
    assert noticed(name, edit, emulator) == (which not in NOT_NEEDED_WITHIN_A_CALL)


def test_without_the_fence_between_the_gather_and_the_mma(emulator):
    edit = replace(r"fence\.proxy\.async\S*;", "", 0)
    assert noticed("8 swapped", edit, emulator)


HANDED_OVER = {
    "the rows are told before all threads have stored them": replace(
        r"bar\.sync[^;]*;((?:(?!bar\.sync)[\s\S])*?atom\.global\.release)", r"\1", 0
    ),
    "and without a release": replace(r"atom\.global\.release", "atom.global.relaxed", 0),
    "the poll has no acquire": replace(r"ld\.acquire\.gpu", "ld.relaxed.gpu"),
    "nobody polls": replace(
        r"ld\.acquire\.gpu\.global\.b32 (%r\d+), \[%rd\d+\]", r"mov.u32 \1, 99999"
    ),
    "TMA may overtake the poll": replace(r"fence\.proxy\.async;", ""),
    "the last kernel does not wait for it": replace(
        r"griddepcontrol\.wait;", "", GATHERED.index("combine")
    ),
}


@pytest.mark.parametrize("edit", HANDED_OVER.values(), ids=HANDED_OVER)
def test_without_a_part_of_the_handing_over(edit, emulator):
    assert noticed("8 swapped, early", edit, emulator)


AFTER_A_PERMUTE = {
    "a warp tells of its rows before all lanes have stored them": replace(
        r"bar\.warp\.sync[^;]*;((?:(?!bar\.warp\.sync)[\s\S])*?atom\.global\.release)", r"\1", 0
    ),
    "and without a release": HANDED_OVER["and without a release"],
    "nobody polls": HANDED_OVER["nobody polls"],
}


@pytest.mark.parametrize("edit", AFTER_A_PERMUTE.values(), ids=AFTER_A_PERMUTE)
def test_without_a_part_of_the_handing_over_after_a_permute(edit, emulator):
    assert noticed("192 on demand", edit, emulator, few_local_rows())


def test_without_the_wait_for_the_rows_it_would_overwrite(emulator, monkeypatch):
    monkeypatch.setattr(architectures, "num_sms", lambda device: 20)
    edit = replace(r"griddepcontrol\.wait;", "", PERMUTED.index("gemm2"))
    emulator.host.ptx_transform = edit
    seen = messages(with_local_rows(41, 123), emulator)
    assert any(re.search(OVERWRITTEN, message) for message in seen)


def without_the_other_s_maxima(ptx: str) -> str:
    """Go on without waiting for what the other CTA of the cluster sends."""
    start = ptx.rindex("st.async")
    return ptx[:start] + replace(WAIT, "setp.eq.u32 P1, 0, 0;", 0)(ptx[start:])


def one_place_for_maxima(ptx: str) -> str:
    """The barrier's phases do not change with the tiles."""
    start = ptx.rindex("st.async")
    return ptx[:start] + replace(PARITY, r"\1, 0", 0)(ptx[start:])


@pytest.mark.parametrize("name", ["8 swapped", "128"])
@pytest.mark.parametrize("edit", [without_the_other_s_maxima, one_place_for_maxima])
def test_without_the_exchange_of_maxima(name, edit, emulator):
    assert noticed(name, edit, emulator)


def test_scales_of_b_without_the_warp_sync_before_they_are_written(emulator):
    """With two terms GEMM2 has no barrier between the reads for one tile and the writes for the
    next, and wgmma.wait_group orders no lane's access before another's."""
    # The last three: before and after these writes, and the combine's.
    edit = replace(r"bar\.warp\.sync\s+-1;", "", -3)
    for emulator.host.ptx_transform, expected in ((None, set()), (edit, {"missing-warp-sync"})):
        emulator.reports.clear()
        fused_output_of(inputs_of(41, 4), "64 overlapped", 2)
        kinds = [report.hazard_kinds() for report in emulator.reports]
        assert kinds == [set()] * 4 + [expected, set()]


def test_without_the_fence_between_the_gather_and_the_mma_of_blackwell(emulator, monkeypatch):
    """cp.async writes through another proxy than the MMA reads."""
    use_target(monkeypatch, "sm_100a")
    for edit, hazards in (
        (None, set()),
        (replace(r"fence\.proxy\.async\S*;", "", 0), {"missing-proxy-fence-after-cp-async"}),
    ):
        emulator.reports.clear()
        emulator.host.ptx_transform = edit
        fused_output_of(inputs_of(9, 4), "16 swapped", target="sm_100a")
        assert set().union(*(report.hazard_kinds() for report in emulator.reports)) == hazards
