"""What scripts/bench.py is made of: timing rows in turn and showing them, and the arms of its attention bench."""
