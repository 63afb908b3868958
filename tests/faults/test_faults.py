"""The short form of `make test-faults`: one process, whose forks are the trials."""

import re
import sys

from omegaconf import OmegaConf

import train  # noqa: F401  # registers its schema
from configs import check_ranges
from configs.composing import compose_job
from tests.conftest import ROOT, run_command
from tests.faults import ends
from tests.faults.__main__ import SIZES, main, plan
from tests.faults.runs import RUN

# The other rows of the table train as these do; tests/training/test_checkpoint.py, test_ends.py and test_parallel.py cause
# their faults within one process.
SHORT = {"second signal", "full pipe", "closed output", "SIGHUP, second trainer", "full disk", "requeued job"}


def test_faults_are_survived() -> None:
    done = run_command("-m", "tests.faults.test_faults", timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.strip("|").split("|") for line in done.stdout.splitlines()[2:]]
    trials = {name.strip(): (count.strip(), survived.strip()) for name, count, survived, _ in rows}
    assert {name for name, counts in trials.items() if counts == ("1", "1")} == SHORT | {"kill in training"}


def test_every_row_stands_in_the_table_and_its_run_can_be_composed() -> None:
    table = (ROOT / "docs" / "RELIABILITY.md").read_text()
    rows = re.findall(r"^\| ([^|]+?) +\| \d", table, re.M)
    assert {name for name, count, _ in plan(SIZES) if count} <= set(rows)
    of_two = ("parallel=fsdp", "checkpoint.background=true", "steps=6")  # the others are those of the first test
    check_ranges(OmegaConf.to_object(compose_job("train", [*RUN, *of_two])))


if __name__ == "__main__":  # one trial of the rows SHORT, and of a kill
    ends.ENDS = {name: trial for name, trial in ends.ENDS.items() if name in SHORT}
    sys.argv[1:] = ["kills=1", *(f"{key}=0" for key in ("parts", "injections", "damages", "restarts", "storage", "ranks"))]
    sys.exit(main())
