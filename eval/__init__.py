"""Evaluations of a trained run: one file and one command each."""
