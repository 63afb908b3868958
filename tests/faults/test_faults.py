"""The short form of `make test-faults`, in one process of its own, whose forks are the trials.

The rows of storage= and ranks= are tested without processes of their own: tests/training/test_checkpoint.py and test_ends.py.
"""

from tests.conftest import run_command


def test_faults_are_survived() -> None:
    sizes = ("kills=2", "parts=1", "injections=1", "damages=1", "restarts=0", "storage=0", "ranks=0", "ends=1", "seed=7")
    done = run_command("-m", "tests.faults", *sizes)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.strip("|").split("|") for line in done.stdout.splitlines()[2:]]
    assert len(rows) > 15 and all(trials.strip() == survived.strip() for _, trials, survived, _ in rows)
