"""The program `python -m moe_fp8.prepare`, which is `serving/bake.py`."""

import sys

from .serving.bake import main
from .serving.prepare import prepare

if __name__ == "__main__":
    sys.exit(main())
# As a name of the package it is the function, also after an import of this module.
sys.modules[__name__] = prepare  # type: ignore[assignment]
