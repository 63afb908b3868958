"""Set how threads wait for each other. Import it before torch, whose OpenMP reads the setting once, when it is loaded.

libgomp, the OpenMP of torch on Linux, lets a thread that waits spin 300,000 times by default, some milliseconds, before it
sleeps. Beside another process the thread that it waits for is often not running, and the spinning takes that thread's core.
2,000 turns outlast the gaps within a step on a quiet machine, and end soon on a busy machine (docs/PERFORMANCE.md,
"Training while other processes run"). If the user sets GOMP_SPINCOUNT or OMP_WAIT_POLICY, that setting stays.
"""

import os

TURNS = 2000

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", str(TURNS))
