"""What the starter kit's own packer makes of an export runs on the GPU: the bits of the solution
that was measured, whose package has folders and another hash.
"""

import pytest
import test_layer
import torch
from flashinfer_bench.agents import pack_solution_from_files
from flashinfer_bench.compile import BuilderRegistry
from flashinfer_bench.data import BuildSpec
from moe_fp8 import v4_flat as v4
from moe_fp8 import v5_fused as v5
from test_layer import new_output, output_of

from scripts.common.project import DEFINITION, ROOT
from scripts.data.dataset import load
from scripts.pack.pack import generations
from scripts.submit import forms
from scripts.submit.forms import FORMS, export_of

pytestmark = pytest.mark.gpu

weights, make_inputs = test_layer.weights, test_layer.make_inputs


@pytest.mark.parametrize("module", [v4, v5], ids=["flat", "fused"])
def test_what_the_kit_packs_gives_the_same_bits(module, make_inputs, tmp_path, monkeypatch):
    tomllib = pytest.importorskip("tomllib")
    monkeypatch.setenv("FIB_CACHE_PATH", str(tmp_path / "cache"))
    monkeypatch.setattr(BuilderRegistry, "_instance", None)
    stem = module.__name__.split(".")[-1]
    export = export_of(next(g for g in generations() if g.path.stem == stem), "some-team")
    definition = load(ROOT)[0].definitions[DEFINITION]
    forms.write(FORMS["kit"], tmp_path / "kit", [export], definition)
    config = tomllib.loads((tmp_path / "kit/config.toml").read_text("utf-8"))
    solution = pack_solution_from_files(
        path=str(tmp_path / "kit" / forms.KIT_FOLDER),
        spec=BuildSpec(target_hardware=["cuda"], **config["build"]),
        **config["solution"],
    )
    registry = BuilderRegistry.get_instance()
    runnable = registry.build(definition, solution)
    try:
        for tokens in (1, 80, 901):
            inputs = make_inputs(tokens)
            output = new_output(inputs)
            runnable(*inputs, output)
            assert torch.equal(output, output_of(module, inputs)), tokens
    finally:
        registry.cleanup()
