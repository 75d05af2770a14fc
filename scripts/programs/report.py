"""A run as an HTML page, a ranking in the terminal, or the generated blocks of README and docs."""

from scripts.common.command_line import run_main
from scripts.report import main

if __name__ == "__main__":
    run_main(main)
