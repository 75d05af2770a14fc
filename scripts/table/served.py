"""Moved to scripts/publishing/tables.py."""

from scripts.publishing.tables import SERVED, gains_table, timed_tables
from scripts.publishing.tables import served_checks as checks_table

__all__ = ["SERVED", "checks_table", "gains_table", "timed_tables"]
