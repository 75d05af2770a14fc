"""Moved to scripts/publishing/tables.py."""

import sys

from scripts.publishing import tables
from scripts.publishing.tables import *  # noqa: F403

sys.modules[__name__] = tables
