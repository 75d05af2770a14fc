"""Moved to scripts/publishing/rankings.py."""

import sys

from scripts.publishing import rankings as moved
from scripts.publishing.rankings import *  # noqa: F403

sys.modules[__name__] = moved
