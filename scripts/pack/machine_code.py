from scripts.common.sources import DIGESTS as FILE  # noqa: F401
from scripts.common.sources import (  # noqa: F401  # moved
    MEASURED,
    digest,
    launches,
    normalised_ptx,
    triton_digest,
    unchanged,
)
from scripts.common.sources import compiler_versions as versions  # noqa: F401
from scripts.common.sources import read_digests as read  # noqa: F401
from scripts.common.sources import write_digests as write  # noqa: F401
