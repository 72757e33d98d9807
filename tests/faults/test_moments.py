"""Every kind of process is killed, stopped, cut off and started again, at every moment of a request."""

import contextlib
import random
import statistics

import pytest

import field as fl
import moments
from field import FULL, SEED

CHOSEN = {"shm": 4, "tcp": 3, "hosts": 7}  # of each place, without --full
GROWTH_BYTES, GROWTH_FDS = 32 << 20, 12


def cases(place):
    if FULL:
        return moments.all_cases(place)
    return moments.some_cases(place, CHOSEN[place], random.Random(f"{SEED} {place}"))


class Ground:
    """A cluster that many cases share, and what its services held when it was warm."""

    def __init__(self, field, references):
        self.field, self.references = field, references
        self.used = 0
        self.warm = {}
        self.prefill_s = statistics.median(reference[2] for reference in references)

    def next_set(self):
        bodies, answers, _ = self.references[self.used % len(self.references)]
        self.used += 1
        return bodies, answers

    def check_memory(self):
        """Who has lived since the third case holds no more than then."""
        for name, service in self.field.services.items():
            held = self.field.held(name)
            known = self.warm.get(name)
            if held is None or self.used < 3:
                continue
            if known is None or known[0] != service.pid:
                self.warm[name] = (service.pid, held, self.used)
                continue
            _, (bytes_then, fds_then, threads_then), since = known
            assert held[0] <= bytes_then + GROWTH_BYTES, f"{name} grew from {bytes_then >> 20} to {held[0] >> 20} MiB in {self.used - since} cases"
            assert held[1] <= fds_then + GROWTH_FDS, f"{name} has {held[1]} descriptors, {fds_then} {self.used - since} cases ago"
            assert held[2] <= threads_then + 2, f"{name} has {held[2]} threads, {threads_then} {self.used - since} cases ago"


def ground_of(place, stack, references):
    return Ground(stack.enter_context(fl.Field(place)), references)


@pytest.fixture(scope="module")
def grounds(references):
    """One cluster a place, made when it is first asked for; another one after a failed case."""
    with contextlib.ExitStack() as stack:
        made = {}

        def ground(place):
            if place not in made:
                for other in list(made):  # one at a time: two cores
                    made.pop(other)[1].close()
                own = stack.enter_context(contextlib.ExitStack())
                made[place] = (ground_of(place, own, references), own)
            return made[place][0]

        def spoilt(place):
            ground, own = made.pop(place)
            ground.field.tell_logs()
            own.close()

        yield ground, spoilt


def run(place, case, grounds, report, rng):
    ground, spoilt = grounds
    here = ground(place)
    bodies, answers = here.next_set()
    try:
        moments.Case(here.field, *case, rng, report, here.prefill_s).run(bodies, answers)
        here.check_memory()
    except BaseException:
        spoilt(place)
        raise


@pytest.mark.parametrize("case", cases("shm"), ids="-".join)
def test_on_one_host_over_shared_memory(case, grounds, report, rng):
    run("shm", case, grounds, report, rng)


@pytest.mark.parametrize("case", cases("tcp"), ids="-".join)
def test_on_one_host_over_tcp(case, grounds, report, rng):
    run("tcp", case, grounds, report, rng)


@pytest.mark.parametrize("case", cases("hosts"), ids="-".join)
def test_across_hosts(case, grounds, report, rng, no_hosts):
    if no_hosts:
        pytest.skip(no_hosts)
    run("hosts", case, grounds, report, rng)


@pytest.mark.every_part
def test_streams_go_on_within_a_second_of_the_death(report):
    """Of all SIGKILLs of decode workers in this run: a second where they are many; a few on a busy machine get more."""
    if not report.gaps_s:
        pytest.skip("no decode worker was killed while it had streams, with this seed")
    assert statistics.median(report.gaps_s) < (1.0 if FULL else 2.5), sorted(report.gaps_s)
