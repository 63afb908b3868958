"""The one comparison of runs and seeds: a page for people (python -m eval.report), tables and figures for an ablation."""
