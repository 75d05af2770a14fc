"""What can be tried of the grouped GEMM's configs on the GPU that there is.

An architecture's configs have fields of their own, so each has a module here that says which
values are worth a try: `tuning_sm90`, `tuning_sm100`. The config classes decide what is legal.
"""

from collections.abc import Iterator
from typing import Any, Protocol

from scripts.measure import gpu, tuning_sm90, tuning_sm100


class Tuning(Protocol):
    """What such a module has.

    Attributes:
        GemmConfig: the class of the architecture's configs.
        FEW_ROWS: rows per expert up to which swapping the operands is tried.
    """

    GemmConfig: Any
    FEW_ROWS: int

    def candidates(self, rows: float) -> Iterator[dict[str, Any]]:
        """Fields of the configs worth timing for experts with about so many rows, legal or not."""

    def changes(self, base: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        """(name, changed fields) of what an ablation takes from `base` or adds to it, legal or
        not; the first are the cluster's."""


MODULES: tuple[Tuning, ...] = (tuning_sm90, tuning_sm100)


def tuning() -> Tuning:
    """Of this GPU; without one, of Hopper."""
    kind = type(gpu.architecture().config)
    return next(module for module in MODULES if module.GemmConfig is kind)


def candidates(rows: float) -> list[Any]:
    """This GPU's legal configs worth timing for experts with about so many rows, each once."""
    found: dict[str, Any] = {}
    for fields in tuning().candidates(rows):
        try:
            config = tuning().GemmConfig(**fields)
        except ValueError:
            continue
        # By what they say: 0 stages and the number that fits are the same config.
        found.setdefault(str(config), config)
    return list(found.values())
