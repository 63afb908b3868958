"""The one comparison of runs and seeds: an HTML page (python -m eval.report), or tables and figures of an ablation."""
