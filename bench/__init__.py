"""The parts of scripts/bench.py: rows that are timed in turn, their table, separate processes, and the works to time."""
