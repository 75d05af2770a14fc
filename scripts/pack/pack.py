from scripts.common.program import PACKAGE_DIR  # noqa: F401  # moved
from scripts.common.sources import (  # noqa: F401
    ENTRY_FILE,
    Generation,
    PackError,
    every_generation,
    generations,
    pack,
    select,
)
from scripts.pack import validate, write_packed  # type: ignore[attr-defined]  # noqa: F401
