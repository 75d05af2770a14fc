import sys

from scripts.common import program
from scripts.common.program import *  # noqa: F403

sys.modules[__name__] = program  # moved
