"""How threads wait for each other beside other processes (training/cores.py)."""

import json
import os
import subprocess
import sys
import threading

import pytest
import torch

from configs.provenance import ROOT
from training import cores

linux = pytest.mark.skipif(
    (os.cpu_count() or 1) < 2 or cores.seconds_without_core() is None,
    reason="needs two cores and a system that tells how long threads wait for one",
)
QUIET, BUSY = (0.25, 0.0), (0.13, 0.12)  # seconds for each thread between two looks: used, without a core


def looks(*between: tuple[float, float], threads: int = 2) -> list[bool]:
    """What `Crowd` says at the start and after each of `between`."""
    crowd, used, waited = cores.Crowd(threads), 10.0, 1.0
    said = [crowd.look(used, waited)]
    for more, without in between:
        used, waited = used + threads * more, waited + without
        said.append(crowd.look(used, waited))
    return said


def test_other_processes_are_seen_at_the_next_look_and_forgotten_after_calm_seconds() -> None:
    assert looks(QUIET, QUIET, BUSY, BUSY) == [False] * 3 + [True] * 2
    calm = round(cores.CALM / QUIET[0])
    assert looks(BUSY, *[QUIET] * (calm - 1), BUSY, *[QUIET] * calm)[-1] is False
    assert all(looks(BUSY, *[QUIET] * (calm - 1), BUSY, *[QUIET] * (calm - 1))[1:])


def test_a_pause_of_the_process_says_nothing_about_other_processes() -> None:
    """An evaluation, a checkpoint or another row of a bench: the threads want no core for a while."""
    idle = (0.001, 0.0)
    assert all(looks(BUSY, *[idle] * 100)[1:])
    assert not any(looks(QUIET, *[idle] * 100))
    assert looks((0.05, 0.05), (0.05, 0.05), (0.05, 0.05), (0.05, 0.05))[-1] is True  # short looks add up


def test_short_tasks_of_others_are_no_crowd() -> None:
    assert not any(looks(*[(0.24, 0.03)] * 100))


@pytest.mark.parametrize("variable", ["none", *cores.CHOSEN])
def test_nothing_is_watched_with_one_thread_or_with_a_choice_of_the_user(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    for name in cores.CHOSEN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "300000")
    monkeypatch.setattr(threading.Thread, "start", lambda self: started.append(self.name))
    monkeypatch.setattr(cores, "seconds_without_core", lambda: 1.0)
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        cores.share_cores.__wrapped__()
    assert started == (["share_cores"] if variable == "none" else [])
    monkeypatch.setattr(cores, "seconds_without_core", lambda: None)  # not Linux
    cores.share_cores.__wrapped__()
    assert len(started) <= 1


def in_two_threads(code: str) -> list:
    """What `code` prints as JSON in a process that computes with two threads and whose user chose nothing."""
    env = {key: value for key, value in os.environ.items() if key not in cores.CHOSEN} | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@linux
def test_two_threads_on_one_core_are_a_crowd() -> None:
    watching, ended = in_two_threads("""
import json, os, threading, time
import torch
from training.distributed import join_world

join_world("cpu")
x, found = torch.zeros(2**21), [threading.active_count()]
x.mul_(1.0001)  # starts the second thread
for task in os.listdir("/proc/self/task"):
    os.sched_setaffinity(int(task), {min(os.sched_getaffinity(0))})
end = time.time() + 60
while threading.active_count() == found[0] and time.time() < end:
    x.mul_(1.0001)
print(json.dumps([found[0], time.time() > end]))
""")
    assert watching == 2 and not ended


@linux
def test_sleepers_are_one_thread_more_than_cores() -> None:
    """In a process of its own, because threads of other tests would be counted."""
    cases = [(2, 2, 1), (2, 1, 1), (4, 4, 1), (32, 64, 33), (3, 8, 6)]  # threads, cores, OpenMP threads that are added
    found = in_two_threads(f"""
import json, os, time
import torch
from training.cores import TASKS, Sleepers

def settled(count):
    "Whether this process gets `count` threads within 10 s"
    end = time.time() + 10
    while count != len(list(TASKS.iterdir())) and time.time() < end:
        time.sleep(0.01)
    return count == len(list(TASKS.iterdir()))

found = []
for threads, cores, more in {cases}:
    os.sched_getaffinity = lambda process, cores=cores: set(range(cores))
    sleepers, before = Sleepers(threads), len(list(TASKS.iterdir()))
    for wanted in (True, True, False, False):  # a repeated call changes nothing
        sleepers.keep(wanted)
        found.append(settled(before + wanted * (more + 1)))  # the first thread of the team is one of Python's
print(json.dumps(found))
""")
    assert len(found) == 4 * len(cases) and all(found)


@linux
def test_a_thread_spins_less_beside_sleepers() -> None:
    long, short, again = in_two_threads("""
import json, time
import torch
from training.cores import Sleepers

x, sleepers, spun = torch.zeros(2**17), Sleepers(2), []
for sleeping in (False, True, False):
    sleepers.keep(sleeping)
    time.sleep(0.2)
    x.add_(1)
    before = time.process_time()
    for _ in range(200):  # the second thread waits while the first one sleeps
        x.add_(1)
        time.sleep(0.003)
    spun.append(time.process_time() - before)
print(json.dumps(spun))
""")
    assert short < 0.7 * long and short < 0.7 * again
