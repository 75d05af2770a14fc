import sys

from scripts.common import definitions
from scripts.common.definitions import *  # noqa: F403

sys.modules[__name__] = definitions  # moved
