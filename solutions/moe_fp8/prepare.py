"""The program `python -m moe_fp8.prepare`, which is `serving/bake.py`."""

import sys

from .serving.bake import main
from .serving.prepare import prepare

if __name__ == "__main__":
    sys.exit(main())
# `moe_fp8.prepare` is the function, even after `import moe_fp8.prepare` has set that name.
sys.modules[__name__] = prepare  # type: ignore[assignment]
