"""Studies: their arms, learning rates, runs, records and tables."""
