import sys

from scripts.common import sources
from scripts.common.sources import *  # noqa: F403

sys.modules[__name__] = sources  # moved
