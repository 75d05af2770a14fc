"""The promise of docs/determinism.md for our packed solutions, by the program that measures it."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.programs import check

pytestmark = pytest.mark.gpu

RUN_TO_RUN = ["again", "stream", "after others", "graph"]
BATCH = ["reversed", "doubled", "alone", "7 at a time", "80 at a time"]
WAITING = {"v1", "v2", "v3"}
"""Their host waits for the routing, so their calls cannot be captured."""


@pytest.fixture(scope="module")
def record(tmp_path_factory) -> dict[str, Any]:
    path: Path = tmp_path_factory.mktemp("invariance") / "figures.json"
    arguments = ["--only", "bits", "--solutions", "cutedsl_moe_fp8_*"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["check.py", *arguments, "--json", str(path)])
        assert check.main() == 0
    return json.loads(path.read_text())["bits"]


@pytest.mark.parametrize("name", ["v1", "v2", "v3", "flat", "fused", "fused_hifi"])
def test_the_bits_of_a_token_are_its_own(name, record):
    assert record["tokens"] == 901
    checks = record["results"][f"cutedsl_moe_fp8_{name}"]["checks"]
    assert list(checks) == RUN_TO_RUN + BATCH
    assert ("not_tried" in checks["graph"]) == (name in WAITING)
    tried = {check: found for check, found in checks.items() if "not_tried" not in found}
    assert {check: found["differ"] for check, found in tried.items()} == dict.fromkeys(tried, 0)
    assert checks["doubled"]["compared"] == 1802 and checks["alone"]["compared"] == 128
