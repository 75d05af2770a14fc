"""The command lines: options, calls and exit statuses; the work is in the other folders."""
