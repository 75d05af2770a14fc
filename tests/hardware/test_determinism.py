"""The promise of docs/determinism.md for our packed solutions, by the program that measures it."""

import sys
from pathlib import Path

import pytest
from markers import backends

from scripts import measure
from scripts.publishing import rows

pytestmark = backends("gpu")
RUN_TO_RUN = ["again", "stream", "after others", "graph"]
BATCH = ["reversed", "doubled", "alone", "7 at a time", "80 at a time"]
WAITING = {"v1", "v2", "v3"}
"""Their host waits for the routing, so their calls cannot be captured."""


@pytest.fixture(scope="module")
def bit_rows(tmp_path_factory) -> list[dict]:
    """The rows that `measure.py bits` writes for our solutions."""
    path: Path = tmp_path_factory.mktemp("bits") / "rows.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        arguments = ["bits", "--solutions", "cutedsl_moe_fp8_*", "--out", str(path)]
        patch.setattr(sys, "argv", ["measure.py", *arguments])
        assert measure.main() == 0
    return rows.read(path).rows_of("bits")


@pytest.mark.parametrize("name", ["v1", "v2", "v3", "flat", "fused", "fused_hifi"])
def test_the_bits_of_a_token_are_its_own(name, bit_rows):
    assert {row["tokens"] for row in bit_rows} == {901}
    checks = {row["part"]: row for row in bit_rows if row["subject"] == f"cutedsl_moe_fp8_{name}"}
    assert list(checks) == RUN_TO_RUN + BATCH
    assert ("not_tried" in checks["graph"]) == (name in WAITING)
    tried = {check: row for check, row in checks.items() if "not_tried" not in row}
    assert {check: row["differ"] for check, row in tried.items()} == dict.fromkeys(tried, 0)
    assert checks["doubled"]["compared"] == 1802 and checks["alone"]["compared"] == 128
