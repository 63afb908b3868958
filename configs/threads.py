"""How the threads of a step wait for each other. Imported before torch, whose OpenMP reads it once, when it is loaded.

libgomp, the OpenMP of torch on Linux, lets a thread that waits spin 300,000 times by default, some milliseconds, before it
sleeps. Beside another process the thread that it waits for is often not running, and the spinning takes that thread's core.
2,000 turns outlast the gaps within a step on a quiet machine, and are given up soon on a busy one (docs/PERFORMANCE.md,
"Beside other processes"). Whoever sets GOMP_SPINCOUNT or OMP_WAIT_POLICY keeps that.
"""

import os

TURNS = 2000

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", str(TURNS))
