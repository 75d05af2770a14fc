"""Use the installed package as a user does. Start it in the package's environment."""

import importlib.metadata
import re
import sys

import moe_fp8

assert moe_fp8.__file__.startswith(sys.prefix), moe_fp8.__file__
metadata = importlib.metadata.metadata("moe-fp8-cutedsl")
assert moe_fp8.__version__ == metadata["Version"], metadata["Version"]
for group in ("vllm.general_plugins", "sglang.srt.plugins"):
    (plugin,) = importlib.metadata.entry_points(group=group, name="moe_fp8")
    plugin.load()()  # not asked for: it does nothing
(example,) = re.findall(r"^```python\n(.*?)^```", metadata.json["description"], re.M | re.S)
exec(example)
