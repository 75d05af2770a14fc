"""Moved to scripts/publishing/rows.py."""

from scripts.publishing.rows import append_traces as append
from scripts.publishing.rows import finite, read_results, trace_files, why_not_same
from scripts.publishing.rows import run_info as read_run

__all__ = ["append", "finite", "read_results", "read_run", "trace_files", "why_not_same"]
