"""Moved to scripts/publishing/pages.py."""

import sys

from scripts.publishing import pages
from scripts.publishing.pages import *  # noqa: F403

sys.modules[__name__] = pages
