"""The kernels under NVIDIA's compute-sanitizer."""

import pytest
from markers import backends
from sanitizer import TOOLS, sanitized

pytestmark = backends("gpu")


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("tool", TOOLS)
def test_the_fused_layer(tool, terms):
    """All kernels of a small layer, one and two of the routing, with every way to load rows."""
    if tool == "initcheck" and terms == 1:
        pytest.skip("does not see what TMA writes: the second GEMM's rows pass for uninitialised")
    sanitized(
        tool,
        f"""
from dataclasses import replace
from gemm_configs import FUSED, target
from moe_fp8 import layer
from moe_fp8.call import MoeInputs, MoeShape
shape = MoeShape(num_experts=16, num_local_experts=5, hidden_size=384, intermediate_size=256,
                 n_group=4, topk_group=2, top_k=3)
def fp8(*size):
    return torch.randn(*size, device="cuda").to(torch.float8_e4m3fn)
def f32(*size):
    return torch.randn(*size, device="cuda")
for config in FUSED[target()]:
    for tokens in (1, 9, 41):
        torch.manual_seed(tokens)
        inputs = MoeInputs(
            f32(tokens, 16), f32(16).bfloat16(), fp8(tokens, 384), f32(3, tokens),
            fp8(5, 512, 384), f32(5, 4, 3), fp8(5, 384, 256), f32(5, 3, 2), 4, 2.5,
        )
        out = torch.empty(tokens, 384, dtype=torch.bfloat16, device="cuda")
        configs = config.with_swiglu({terms}), replace(config, terms={terms})
        layer.make_call(tokens, out.device, shape, {terms}, configs)(inputs, out)
        assert bool(out.isfinite().all())
""",
    )
