"""Whole clusters under a virtual clock, from seeds; and that the simulator can see a fault at all."""

import os
import re
import subprocess

import pytest

import cluster as cl
from conftest import FULL, SEED

SIMULATE = os.path.join(cl.BUILD, "deploy", "simulate", "simulate")
RUNS = 20000 if FULL else 60 if cl.SANITIZED else 600


def simulate(*arguments, timeout_s=1500):
    result = subprocess.run([SIMULATE, *map(str, arguments)], capture_output=True, text=True, timeout=timeout_s, check=False)
    return result.returncode, result.stdout, result.stderr


def told(out):
    """What a failed run says: its seeds and why, not the hundreds that went well."""
    return "\n".join(line for line in out.splitlines() if "FAILED" in line or "repeat" in line) or out[-2000:]


@pytest.mark.parametrize("faults", ["none", "crash", "hang-up", "freeze", "corrupt", "all"])
def test_every_request_ends_once_and_everything_comes_back(faults):
    first = SEED % 1_000_000_000
    runs = max(RUNS // (1 if faults == "all" else 4), 10)
    status, out, err = simulate("--seed", first, "--runs", runs, "--faults", faults)
    assert status == 0, f"seeds from {first}, faults {faults}:\n{told(out)}\n{err[-1500:]}"
    assert out.splitlines()[-1] == f"{runs} passed, 0 failed, 0 skipped"


@pytest.mark.parametrize("seed", [563330922])  # a link broke with both ends alive, and its last word was lost
def test_seeds_that_failed_once(seed):
    status, out, err = simulate("--seed", seed, "--faults", "all")
    assert status == 0, f"{told(out)}\n{err[-1500:]}"


def test_the_same_seed_gives_the_same_journal():
    status, out, _ = simulate("--seed", SEED % 1_000_000_000, "--runs", 20, "--twice")
    assert status == 0, told(out)
    journals = re.findall(r"^seed (\d+): .*journal ([0-9a-f]{16})$", out, re.M)
    assert len(journals) == 40
    assert all(journals[index] == journals[index + 1] for index in range(0, 40, 2))
    assert len({journal for _, journal in journals}) == 20, "different seeds, the same journal"


def test_the_faults_do_happen():
    """Crashes, freezes, hang-ups and corrupted blocks are drawn, and most requests still end well."""
    status, out, _ = simulate("--seed", 1, "--runs", 100)
    assert status == 0, told(out)
    sums = {word: sum(map(int, re.findall(rf"{word} (\d+)", out))) for word in ("finished", "cancelled", "crashes", "freezes", "corrupted")}
    assert all(value > 0 for value in sums.values()), sums
    assert sums["finished"] > 1000, sums


FOUND = [
    ("hang-up", 130), ("hang-up", 173), ("all", 2),  # a cancel while a lease was asked for: quarantined for ever
    ("freeze", 8), ("freeze", 27),  # a worker given up that went on believed itself registered
    ("all", 613),  # a link's number used anew during a long step: another request's memory
]


@pytest.mark.parametrize("faults,seed", FOUND)
def test_seeds_that_found_something_before(faults, seed):
    status, out, _ = simulate("--seed", seed, "--faults", faults)
    assert status == 0, told(out)


def test_bad_arguments_are_refused():
    for arguments in (["--seed", "x"], ["--runs", "0"], ["--faults", "rain"], ["extra"], ["--no-such"]):
        status, _, err = simulate(*arguments)
        assert status == 2 and "usage" in err, arguments
