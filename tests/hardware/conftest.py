"""The fixtures of the layer at the geometry of DeepSeek-V3."""

from deepseek import make_inputs, weights  # noqa: F401
