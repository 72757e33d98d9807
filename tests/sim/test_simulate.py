"""Whole clusters under a virtual clock, from seeds; and that the simulator can see a fault at all."""

import os
import re
import shlex
import subprocess
import time

import pytest

import cluster as cl
from conftest import FULL, SEED

SIMULATE = os.path.join(cl.BUILD, "deploy", "simulate", "simulate")
PLANTED = os.path.join(cl.BUILD, "tests", "sim", "simulate-planted")
RUNS = 200 if cl.SANITIZED else 100_000 if FULL else 10_000
JOBS = len(os.sched_getaffinity(0))
FIRST = SEED % 1_000_000_000


def run(program, *arguments, timeout_s=1500):
    result = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=timeout_s, check=False)
    return result.returncode, result.stdout, result.stderr


def simulate(*arguments, **options):
    return run(SIMULATE, *arguments, **options)


def told(out):
    """What a failed run says: its seeds and why, not the hundreds that went well."""
    return "\n".join(line for line in out.splitlines() if "FAILED" in line or "repeat" in line or "never" in line) or out[-2000:]


def failures(out):
    """(seed, why and, of a run that came to its end, with which journal; the command that repeats it) of each failed run."""
    return re.findall(r"^seed (\d+): FAILED: (.*)\nto repeat it: (.*)$", out, re.M)


@pytest.mark.timeout(2400)
def test_standard_runs_keep_every_promise_and_show_every_state():
    """2 routers, 4 workers, 30 requests and 10 faults at least; every row of the lifecycle table is taken."""
    began = time.monotonic()
    status, out, err = simulate("--seed", FIRST, "--runs", RUNS, "--jobs", JOBS, *([] if cl.SANITIZED else ["--whole"]), timeout_s=2300)
    took = time.monotonic() - began
    print(out[-6000:])
    assert status == 0, f"seeds from {FIRST}:\n{told(out)}\n{err[-1500:]}"
    assert out.splitlines()[-1] == f"{RUNS} passed, 0 failed, 0 skipped"
    if FULL and not cl.SANITIZED:
        assert took < 900 * max(1, 2 / JOBS), f"{RUNS} standard runs took {took:.0f} s"


def good_runs(faults, runs):
    """So many runs of these faults, all good; how often each kind happened in them."""
    runs = max(runs, 20)
    status, out, err = simulate("--seed", FIRST, "--runs", runs, "--jobs", JOBS, "--faults", faults)
    assert status == 0, f"seeds from {FIRST}, faults {faults}:\n{told(out)}\n{err[-1500:]}"
    assert out.splitlines()[-1] == f"{runs} passed, 0 failed, 0 skipped"
    happened = re.search(r"^faults:((?: [a-z-]+ \d+)+)$", out, re.M)[1]
    return {kind: int(count) for kind, count in re.findall(r"([a-z-]+) (\d+)", happened)}


KINDS = ["crash", "freeze", "pool", "cut", "partition", "router-crash", "router-freeze", "router-leave", "hang-up", "slow", "corrupt", "short", "poison", "lose", "duplicate", "reorder", "slow-link"]


@pytest.mark.parametrize("kind", KINDS)
def test_one_kind_of_fault_alone(kind):
    """Where only clients leave, or many ask at once, nothing may fail and nothing is tried twice; nor where links are only slow."""
    happened = good_runs(kind, RUNS // 100)
    assert set(happened) == set(KINDS), "a kind of fault that does not run alone"
    assert [other for other, count in happened.items() if count > 0] == [kind]


@pytest.mark.parametrize("faults", ["none", "hang-up,short", "cut,corrupt", "router-crash,router-freeze,router-leave", "lose,duplicate,reorder", "pool,poison", "slow-link,hang-up,short"])
def test_few_kinds_of_faults(faults):
    """Where nothing breaks (none; hang-up and short) nothing may fail and nothing is tried twice; nor where links are only slow."""
    assert {kind for kind, count in good_runs(faults, RUNS // 50).items() if count > 0} == set(faults.split(",")) - {"none"}


@pytest.mark.parametrize("links", ["memory", "messages"])
def test_one_kind_of_data_link_alone(links):
    """What is sent has landed everywhere; or it is in a socket everywhere, and lands when its sender is long done with it."""
    runs = max(RUNS // 10, 40)
    status, out, err = simulate("--seed", FIRST, "--runs", runs, "--jobs", JOBS, "--links", links)
    assert status == 0, f"seeds from {FIRST}, links {links}:\n{told(out)}\n{err[-1500:]}"
    sent, left, old = map(int, re.search(r"sent as messages (\d+) \(landed after their link's end (\d+), dropped behind a newer one's (\d+)\)", out).groups())
    assert (sent > 1000 and left > 0 and old > 0) if links == "messages" else sent + left + old == 0


def test_the_same_seed_gives_the_same_journal():
    status, out, _ = simulate("--seed", FIRST, "--runs", 20, "--twice", "--each")
    assert status == 0, told(out)
    journals = re.findall(r"^seed (\d+): .*journal ([0-9a-f]{16})$", out, re.M)
    assert len(journals) == 40
    assert all(journals[index] == journals[index + 1] for index in range(0, 40, 2))
    assert len({journal for _, journal in journals}) == 20, "different seeds, the same journal"


def test_suspects_are_seldom_innocent():
    """What kills workers is ended; what was only there is not taken for it."""
    runs = max(RUNS // 20, 40)
    status, out, _ = simulate("--seed", FIRST, "--runs", runs, "--faults", "poison", "--jobs", JOBS)
    assert status == 0, told(out)
    counts = re.search(r"suspects (\d+) \(innocent (\d+); harmless \d+, at silent workers \d+; third workers (\d+) of (\d+) killers\)", out)
    suspects, innocent, thirds, killers = map(int, counts.groups())
    assert suspects >= runs and innocent * 1000 <= suspects, told(out)
    # that many killers at a time meet at workers: where two do, their deaths cannot be told apart
    assert killers >= runs and thirds * 10 <= killers, told(out)


def test_jobs_give_what_one_process_gives():
    counts = []
    for jobs in (1, 3):
        status, out, _ = simulate("--seed", FIRST, "--runs", 60, "--jobs", jobs)
        assert status == 0, told(out)
        counts.append([line for line in out.splitlines() if line.startswith(("requests:", "faults:", "messages:", "lifecycle:"))])
    assert counts[0] == counts[1] and len(counts[0]) >= 3


# Each is found within so many standard runs (of these faults): a simulator that finds less is worth less.
PLANTS = [
    ("lease-not-renewed", "none", 400),
    ("cancel-lost", "all", 50),
    ("leased-evicted", "all", 20),
    ("stale-incarnation", "all", 200),
    ("no-budget", "all", 400),
    ("no-quarantine", "all", 1000),
    ("unwritten-believed", "all", 8000),
    ("seal-unchecked", "all", 100),
    ("blocks-kept", "all", 20),
    ("no-deadline", "all", 20),
    ("deadline-late", "all", 200),
    ("deadline-uncut", "all", 200),
    ("no-shared-budget", "all", 15000),
    ("priority-reversed", "all", 400),
    ("no-suspects", "poison", 400),
    ("progress-unheard", "slow-link", 400),
    ("late-is-lost", "slow-link", 400),
    ("any-session", "slow-link,router-freeze,short", 8000),
    ("sent-is-landed", "all", 2000),
    ("sent-is-landed", "slow-link,hang-up,short", 200),
]


@pytest.mark.parametrize("plant,faults,runs", PLANTS)
def test_a_planted_fault_is_found(plant, faults, runs):
    status, out, err = run(PLANTED, "--plant", plant, "--seed", FIRST, "--runs", runs, "--faults", faults, "--fail-fast", "--jobs", JOBS)
    assert status == 1, f"{plant} was not found in {runs} runs\n{out[-1500:]}\n{err[-500:]}"
    assert failures(out), out[-1500:]
    check_repeats(plant, failures(out)[0])


def check_repeats(plant, failure):
    """What a failed run says repeats it: it fails in the same way, after the same history."""
    seed, why, command = failure
    program, *arguments = shlex.split(command)
    assert program == "simulate"
    assert "; journal " in why or "the process died" in why, why
    for _ in range(2):
        status, out, err = run(PLANTED, "--plant", plant, *arguments)
        assert status == 1, f"{plant}: {command} does not fail again\n{out[-1500:]}\n{err[-1500:]}"
        assert failures(out) == [failure], f"{seed}: {why}\n{told(out)}"


@pytest.mark.parametrize("links", ["memory", "messages"])
def test_a_failure_among_links_of_one_kind_repeats_too(links):
    """Whatever the run was told, the printed command says it."""
    status, out, _ = run(PLANTED, "--plant", "blocks-kept", "--seed", FIRST, "--runs", 40, "--faults", "crash,cut,hang-up", "--links", links, "--jobs", JOBS)
    assert status == 1 and len(failures(out)) > 1, out[-1500:]
    for failure in failures(out)[:3]:
        check_repeats("blocks-kept", failure)


@pytest.mark.parametrize("faults", ["all", "none"])
def test_without_a_plant_nothing_is_found(faults):
    status, out, _ = run(PLANTED, "--plant", "none", "--seed", 1, "--runs", 400 if not cl.SANITIZED else 40, "--faults", faults, "--jobs", JOBS)
    assert status == 0, told(out)


FOUND = [  # what each showed in the code of its day; seeds do not keep their meaning, the promises do
    ("all", 653),  # a pull was forgotten while its last check read it
    ("cut,corrupt,hang-up,short", 58), ("all", 177),  # a last word lost with its link, or owed to one that was up already
    ("lose,hang-up,cut", 725), ("all", 549), ("all", 71),  # a pull's blocks waited for a word that nobody would say
    ("all", 1036),  # a worker died together with the only router that knew it
    ("all", 20536),  # a move with nothing to ship
    ("all", 1004420),  # fenced off, alive, and taken in again by a router that came later
    ("all", 2000259),
    ("all", 4005098), ("all", 50002648),  # a move of which its source never heard
    ("all", 2018),  # and whose router was lost
    ("all", 380300287),  # a word owed to the dead, for which nothing was written, kept the living waiting
    ("all", 509188213),  # the last word on a router, late, when that was back
    ("all", 971989298),  # a late heartbeat of the dead took its death back
]


@pytest.mark.parametrize("faults,seed", FOUND)
def test_seeds_that_found_something_before(faults, seed):
    status, out, _ = simulate("--seed", seed, "--faults", faults)
    assert status == 0, told(out)


def test_bad_arguments_are_refused():
    for arguments in (["--seed", "x"], ["--runs", "0"], ["--jobs", "0"], ["--faults", "rain"], ["--links", "rope"], ["extra"], ["--no-such"]):
        status, _, err = simulate(*arguments)
        assert status == 2 and "usage" in err, arguments
    for arguments in ([], ["--plant", "weeds"]):
        status, _, err = run(PLANTED, *arguments)
        assert status == 2 and "plant" in err, arguments
