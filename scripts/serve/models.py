"""The models that `serve` knows by name: their sizes as published, for random weights.

DeepSeek-V3 and GLM-5 have one dense layer in place of three, so that a few layers include experts.
`deepseek-v3-tp8` is the share of one of eight tensor-parallel ranks.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.common.command_line import UsageError
from scripts.common.text import error_line

DIRECTORY = Path(__file__).with_name("models")
LAYERS = {
    "deepseek-v3": 4,
    "deepseek-v3-tp8": 11,
    "glm-5": 5,
    "kimi-k2": 3,
    "minimax-m2": 12,
    "qwen3-235b-a22b": 16,
    "qwen3-30b-a3b": 48,
}
"""Layers that fit 80 GB with a cache for keys and values."""


@dataclass(frozen=True)
class Model:
    name: str
    directory: Path
    config: dict[str, Any]
    layers: int
    """The number of layers that are served."""

    @property
    def vocabulary(self) -> int:
        return int(self.config["vocab_size"])

    @property
    def overrides(self) -> dict[str, int]:
        """The served values that differ from the configuration's."""
        return {} if self.layers == self.published else {"num_hidden_layers": self.layers}

    @property
    def published(self) -> int:
        return int(self.config["num_hidden_layers"])


def find(name: str, layers: int | None, random_weights: bool) -> Model:
    """Return a model of `models/`, or one in a directory of weights. Raises UsageError."""
    known = name in LAYERS
    directory = DIRECTORY / name if known else Path(name)
    if not (directory / "config.json").is_file():
        raise UsageError(f"--model {name}: expected a directory, or one of {', '.join(LAYERS)}")
    if known and not random_weights:
        raise UsageError(f"--model {name} has no weights: give --random-weights, or a directory")
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        most, _ = (int(config[name]) for name in ("num_hidden_layers", "vocab_size"))
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{directory / 'config.json'}: {error_line(error)}") from None
    wanted = layers or LAYERS.get(name, most)
    if wanted > most:
        raise UsageError(f"--layers {wanted}: {name} has {most}")
    if wanted < most and not random_weights:
        raise UsageError("--layers: a part of trained weights says nothing; give --random-weights")
    return Model(name if known else directory.resolve().name, directory, config, wanted)
