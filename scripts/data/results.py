"""Moved to scripts/publishing/rows.py."""

import sys

from scripts.publishing import rows
from scripts.publishing.rows import *  # noqa: F403

sys.modules[__name__] = rows
