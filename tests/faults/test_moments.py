"""Every kind of process is killed, stopped, cut off and started again, at every moment of a request."""

import contextlib
import random
import statistics

import pytest

import field as fl
import moments
from field import FULL, SEED

CHOSEN = {"shm": 4, "tcp": 5, "hosts": 7}  # of each place, without --full: each fault once
MANY = 30  # streams whose worker was killed
GROWTH_MIB, GROWTH_FDS, GROWTH_THREADS = 16, 8, 2


def cases(place):
    if FULL:
        return moments.all_cases(place)
    return moments.some_cases(place, CHOSEN[place], random.Random(f"{SEED} {place}"))


class Ground:
    """A cluster that many cases share, and what its services held when it was warm."""

    def __init__(self, field, references, report):
        self.field, self.references, self.report = field, references, report
        self.used = 0
        self.prefill_s = statistics.median(reference[2] for reference in references)
        self.quiet_s = max(reference[3] for reference in references)
        self.warm = self._warm_up()

    def next_set(self):
        bodies, answers = self.references[self.used % len(self.references)][:2]
        self.used += 1
        return bodies, answers

    def _warm_up(self):
        """{service: (bytes, descriptors, threads)} after what a case does, without its fault."""
        for bodies, answers, *_ in self.references[-2:]:
            streams = fl.at_once([lambda body=body: self.field.stream(body) for body in bodies])
            assert [stream.tokens for stream in streams] == answers
        full = [fl.asked([1000 + at] * (fl.CONTEXT - 4), 3) for at in range(4)]
        assert all(stream.error is None for stream in fl.at_once([lambda body=body: self.field.stream(body) for body in full]))
        self.field.assert_clean()
        return {name: self.field.held(name) for name in self.field.services}

    def check_memory(self):
        """Nobody holds more than its kind did when warm, however many ends of others it has lived through."""
        for name, warm in self.warm.items():
            held = self.field.held(name)
            assert held is not None and warm is not None, f"{name} is not there"
            mib, fds, threads = (now - then for now, then in zip(held, warm))
            mib /= 1 << 20
            growth = self.report.growth
            growth["looks"] += 1
            for kind, more in (("MiB", mib), ("descriptors", fds), ("threads", threads)):
                growth[kind] = max(growth[kind], more)
            assert mib <= GROWTH_MIB, f"{name} grew by {mib:.1f} MiB to {held[0] >> 20} MiB in {self.used} cases"
            assert fds <= GROWTH_FDS, f"{name} has {held[1]} descriptors, {fds} more than when warm, after {self.used} cases"
            assert threads <= GROWTH_THREADS, f"{name} has {held[2]} threads, {threads} more than when warm, after {self.used} cases"


def ground_of(place, stack, references, report):
    return Ground(stack.enter_context(fl.Field(place)), references, report)


@pytest.fixture(scope="module")
def grounds(references, report):
    """One cluster a place, made when it is first asked for; another one after a failed case."""
    with contextlib.ExitStack() as stack:
        made = {}

        def ground(place):
            if place not in made:
                for other in list(made):  # one at a time: two cores
                    made.pop(other)[1].close()
                own = stack.enter_context(contextlib.ExitStack())
                made[place] = (ground_of(place, own, references, report), own)
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
        moments.Case(here.field, *case, rng, report, here.prefill_s, here.quiet_s).run(bodies, answers)
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
    """Of all SIGKILLs of decode workers in this run: a second where they are many; a few on a busy machine get more (all
    parts of a run together: `sums.py`)."""
    if not report.gaps_s:
        pytest.skip("no decode worker was killed while it had streams, with this seed")
    assert statistics.median(report.gaps_s) < (moments.GOES_ON_S if len(report.gaps_s) >= MANY else 2.5), sorted(report.gaps_s)
