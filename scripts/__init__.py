"""The programs and what they share, by purpose; `python3 run.py` lists the programs."""
