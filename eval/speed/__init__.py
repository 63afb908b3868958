"""What scripts/bench.py is made of: rows that are timed in turn and shown, processes of their own, and what is timed."""
