"""Set how threads wait for each other. Import it before torch, whose OpenMP reads the setting once, when it is loaded.

torch on Linux uses libgomp's OpenMP. A waiting thread first spins, by default 300,000 turns (some milliseconds), and then
sleeps. If other processes use the same cores, a spinning thread often occupies the core that the awaited thread needs. 2,000
turns are enough for the gaps within a step on a quiet machine, and end soon on a busy machine (docs/PERFORMANCE.md, "Training
while other processes run"). If the user sets GOMP_SPINCOUNT or OMP_WAIT_POLICY, that setting stays.
"""

import os

TURNS = 2000

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", str(TURNS))
