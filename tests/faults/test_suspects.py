"""Workers that die under requests that may be what they die of: who gets no third, and who is never taken for it
(docs/lifecycle.md, Suspects)."""

import random
import threading
import time

import pytest

import cluster as cl
import field as fl
import moments
from field import FULL

ABSOLVED = 64  # tokens of an attempt, router/request_table.h
WORKERS = 3  # of each role
ANSWER = 160
LONG_PROMPT = 440
CROWD, CROWD_ANSWER = 16, 120
ROUNDS = 6 if FULL else 2
PATIENT = {"interval": "100ms", "lost_after": "3s"}  # nobody is given up for being late on a busy machine
COUNTED = ("kvferry_requests_suspect_total", "kvferry_requests_failed_total")


def body_of(rng, tokens=24, answer=ANSWER):
    return fl.asked([rng.randrange(100, 40000) for _ in range(tokens)], answer)


@pytest.fixture(scope="module")
def plain():
    """Undisturbed workers: what is right."""
    with fl.Field("shm", prefill=1, decode=1, tapped=False, kv={"memory": "96MiB"}) as one:
        yield one


def right(plain, bodies):
    streams = fl.at_once([lambda body=body: plain.stream(body) for body in bodies])
    assert all(s.error is None and not s.cut and len(s.tokens) == s.body["max_tokens"] for s in streams), [moments.Case._say(s) for s in streams]
    return [stream.tokens for stream in streams]


@pytest.fixture(scope="module")
def wide_field():
    with fl.Field("shm", prefill=WORKERS, decode=WORKERS, kv={"memory": "96MiB"}, heartbeat=PATIENT) as one:
        yield one


@pytest.fixture
def wide(wide_field):
    """The cluster that these tests share: whole at the start, whole and empty at the end, whoever was killed."""
    wide_field.wait_ready(20)
    wide_field.forget_requests()
    for service in wide_field.services.values():
        service.excused = False
    yield wide_field
    raise_all(wide_field)
    wide_field.wait_ready(20)
    wide_field.assert_clean()
    for service in wide_field.services.values():
        assert all(excused for _, excused in service.ends), f"{service.name} ended by itself: {service.ends}"
        service.ends.clear()


def raise_all(one):
    one.tap.drop = None
    for service in one.services.values():
        service.held_down = False


def keep_only(one, role, names):
    """Of that role only these are there."""
    for service in one.services.values():
        if service.role == role and service.name not in names:
            service.held_down = True
            one.kill(service.name)
    cl.wait_until(lambda: {w["name"] for w in one.workers() if w["role"] == role} == set(names), 10, f"others than {names} are there")
    one.wait_ready(10)


def counted(one):
    return [one.metric(name) for name in COUNTED]


class Deaths:
    """Kills the workers that compute one request, each at a moment of its attempt:

    ("token", N)       the decode worker, as it has said its N-th token of this attempt; later ones die with it
    ("started", S)     the prefill worker, S seconds after it has said that its step runs
    ("unheard", S)     the same, S seconds after it was asked, and that word dies with it
    ("shipping", S)    the decode worker, S seconds after it was told to start, as blocks land

    The dead stay dead, unless restart."""

    def __init__(self, one, identity, plan, restart=False):
        self.one, self.identity, self.plan, self.restart = one, identity, list(plan), restart
        self.number = None
        self.made = 0
        self.asked = []  # (worker, epoch), of leases and prefills
        self.victims = []
        self.tokens = []  # that had gone to the router at each death
        self.told = 0
        self.acting = False
        self.mute = set()  # (worker, how often it was started): says nothing more
        self.due = None  # the message behind which it dies

    def __enter__(self):
        self.one.tap.watch(self.seen)
        self.one.tap.drop = self.lost
        return self

    def __exit__(self, *_):
        self.one.tap.forget(self.seen)
        self.one.tap.drop = None

    def _is_mine(self, seen):
        if seen.kind == "StepTokens":
            return self.number is not None and any(number == self.number for number, _, _ in seen.tokens())
        keyed = seen.kind in ("PrefillRequest", "PrefillStarted", "DecodeStart")
        return keyed and self.number is not None and (seen.key() or (0, 0, 0))[1] == self.number

    def lost(self, seen):
        """What a dead one's socket still holds, and the word that is not heard."""
        if (seen.worker, self.one.services[seen.worker].starts if seen.worker in self.one.services else 0) in self.mute and seen.kind == "StepTokens":
            return True
        return bool(self.plan) and self.plan[0][0] == "unheard" and seen.kind == "PrefillStarted" and self._is_mine(seen)

    def kill(self, name):
        self.acting = False
        self.plan.pop(0)
        self.victims.append(name)
        self.tokens.append(self.told)
        service = self.one.services[name]
        service.held_down = not self.restart
        self.mute.add((name, service.starts))
        self.one.kill(name)

    def _later(self, name, seconds):
        if self.acting:
            return
        self.acting = True
        timer = threading.Timer(seconds, self.kill, (name,))
        timer.daemon = True
        timer.start()

    def seen(self, seen):
        if seen is self.due:
            self.kill(seen.worker)
            return False
        if seen.kind in ("LeaseRequest", "PrefillRequest") and seen.text(2) == self.identity:
            self.number = seen.key()[1]
            self.asked.append((seen.worker, seen.key()[2]))
            self.made = 0
        if not self._is_mine(seen):
            return False
        kind, when = self.plan[0] if self.plan else ("", 0)
        if seen.kind == "StepTokens":
            self.told += 1
            if seen.worker.startswith("decode"):
                self.made += 1
                if kind == "token" and self.made == when:
                    self.due = seen
                    return True
        elif (kind, seen.kind) in (("started", "PrefillStarted"), ("unheard", "PrefillRequest"), ("shipping", "DecodeStart")):
            self._later(seen.worker, when)
        return False


def assert_convicted(stream, deaths, want):
    """With both names, after what its client had been sent, and given to nobody else."""
    first, second = deaths.victims[-2:]
    assert stream.error is not None, f"it went on: {moments.Case._say(stream)}, killed {deaths.victims}"
    assert stream.error["code"] == "request_suspect" and stream.error["type"] == "server_error", stream.error
    message = stream.error["message"]
    assert first in message and second in message and stream.identity in message, message
    assert stream.status == (200 if stream.tokens else 500), stream.status
    assert stream.tokens == want[: deaths.tokens[-1]], f"{len(stream.tokens)} tokens, {deaths.tokens} had been made: {stream.tokens} {want}"
    last = max(epoch for _, epoch in deaths.asked)
    assert (second, last) in deaths.asked, f"it was asked of others after {second} had died: {deaths.asked}"


PAIRS = {
    "two-decode-workers": [("token", 10), ("token", 10)],
    "two-decode-workers-late": [("token", 90), ("token", ABSOLVED - 2)],
    "decode-workers-as-blocks-land": [("shipping", 0.0), ("token", 1)],
    "two-prefill-workers": [("started", 0.0), ("started", 0.1)],
    "two-prefill-workers-unheard": [("unheard", 0.1), ("unheard", 0.1)],
    "one-of-each": [("started", 0.05), ("token", ABSOLVED - 2)],
    "the-other-way-round": [("token", 30), ("started", 0.02)],
}


@pytest.mark.parametrize("plan", PAIRS.values(), ids=PAIRS)
def test_the_only_request_under_which_two_workers_die_is_given_no_third(plan, wide, plain, rng):
    # a prefill worker has to die before a prompt is done, however fast the machine is
    short = all(kind == "token" for kind, _ in plan)
    body = body_of(rng, 100 if short else LONG_PROMPT, 3 if plan[1][0] in ("unheard", "started") and plan[0][0] != "token" else ANSWER)
    after = body_of(rng, 40, 12)
    body["max_tokens"] = min(body["max_tokens"], fl.CONTEXT - len(body["prompt"]))
    want, next_want = right(plain, [body, after])
    before = counted(wide)
    lives = {name: service.pid for name, service in wide.services.items()}
    identity = f"suspect-{rng.randrange(1 << 30):x}"
    with Deaths(wide, identity, plan) as deaths:
        stream = wide.stream(body, identity)
    assert len(deaths.victims) == 2 and deaths.victims[0] != deaths.victims[1], f"{deaths.victims}: {moments.Case._say(stream)}"
    assert_convicted(stream, deaths, want)
    roles = {wide.services[name].role for name in deaths.victims}
    thirds = [name for name, service in wide.services.items() if service.role in roles and name not in deaths.victims]
    if len(roles) == 1:
        assert not any(name in thirds for name, _ in deaths.asked), f"{deaths.asked}, killed {deaths.victims}"
    again = wide.stream(after)
    assert again.error is None and again.tokens == next_want, moments.Case._say(again)
    assert [now - then for now, then in zip(counted(wide), before)] == [1, 1]
    wide.assert_clean()
    for name, pid in lives.items():
        assert name in deaths.victims or wide.services[name].pid == pid and wide.services[name].process.poll() is None, f"{name} did not live through it"


def test_a_worker_that_dies_of_it_and_comes_back_is_not_killed_a_third_time(wide, plain, rng):
    """There is one decode worker, which is started again each time."""
    body = body_of(rng)
    want, = right(plain, [body])
    keep_only(wide, "decode", ["decode-0"])
    before, starts = counted(wide), wide.services["decode-0"].starts
    identity = f"again-{rng.randrange(1 << 30):x}"
    with Deaths(wide, identity, [("token", 5), ("token", 5)], restart=True) as deaths:
        stream = wide.stream(body, identity)
    assert deaths.victims == ["decode-0"] * 2, f"{deaths.victims}: {moments.Case._say(stream)}"
    assert_convicted(stream, deaths, want)
    assert "again (started anew)" in stream.error["message"], stream.error
    assert [now - then for now, then in zip(counted(wide), before)] == [1, 1]
    cl.wait_until(lambda: wide.services["decode-0"].starts == starts + 2, 5, "it was not started again")


@pytest.mark.parametrize("moment", ("DecodeStart", "PrefillDone", "Landed", "token"))
def test_who_was_alone_where_several_died_in_one_moment_is_no_suspect_of_all(moment, wide, plain, rng):
    """Its decode worker and all prefill workers, as when their host is lost. That they are dead the router hears one by one."""
    body = body_of(rng, LONG_PROMPT, 24)
    want, = right(plain, [body])
    before = counted(wide)
    identity = f"host-{rng.randrange(1 << 30):x}"
    prefills = [name for name, service in wide.services.items() if service.role == "prefill"]
    hit = []

    def seen(one):
        deaths.seen(one)
        mine = deaths._is_mine(one) if one.kind in ("StepTokens", "DecodeStart") else one.kind == moment and (one.key() or (0, 0, 0))[1] == deaths.number
        if mine and not hit and (one.kind == moment or moment == "token" and deaths.made == 4):
            hit.extend([wide.placed[identity]["decode"], *prefills])
            for name in hit:
                wide.kill(name)
        return False

    with Deaths(wide, identity, []) as deaths:
        wide.tap.forget(deaths.seen)
        wide.tap.watch(seen)
        stream = wide.stream(body, identity)
        wide.tap.forget(seen)
    assert len(hit) == 1 + WORKERS, f"{moment} was not seen: {moments.Case._say(stream)}"
    assert stream.error is None and stream.tokens == want, moments.Case._say(stream)
    assert counted(wide) == before


@pytest.mark.parametrize("between", (ABSOLVED - 1, ABSOLVED + 26))
def test_two_deaths_with_64_tokens_in_between_are_chance(between, wide, plain, rng):
    """Its prefill worker makes the first of them."""
    body = body_of(rng)
    want, = right(plain, [body])
    before = counted(wide)
    identity = f"innocent-{rng.randrange(1 << 30):x}"
    with Deaths(wide, identity, [("token", 8), ("token", between)]) as deaths:
        stream = wide.stream(body, identity)
    assert len(deaths.victims) == 2 and deaths.tokens == [9, 10 + between]
    assert stream.error is None and stream.finish == "length" and stream.tokens == want, f"{moments.Case._say(stream)}: {stream.tokens} want {want}"
    assert counted(wide) == before


def test_the_fourth_worker_that_dies_with_nobody_else_there_is_the_last(wide, plain, rng):
    body = body_of(rng, answer=5 * (ABSOLVED + 10))
    want, = right(plain, [body])
    before = counted(wide)
    identity = f"fourth-{rng.randrange(1 << 30):x}"
    with Deaths(wide, identity, [("token", ABSOLVED + 2)] * 5, restart=True) as deaths:
        stream = wide.stream(body, identity)
    assert len(deaths.victims) == 4, deaths.victims
    assert_convicted(stream, deaths, want)
    assert [now - then for now, then in zip(counted(wide), before)] == [1, 1]


# ---- in company


class Crew:
    """Some streams at once, and who makes their tokens."""

    def __init__(self, one, bodies, rng):
        self.one, self.bodies = one, bodies
        self.stamp = f"{rng.randrange(1 << 30):x}"
        self.names = [f"c{index}.{self.stamp}" for index in range(len(bodies))]
        self.lock = threading.Lock()
        self.numbers = {}  # number -> index
        self.epochs = [0] * len(bodies)
        self.made = [dict() for _ in bodies]  # epoch -> [worker, tokens of the decode worker]
        self.over = [False] * len(bodies)
        self.dead = set()
        self.act = None  # called after each message of tokens
        self.results = None

    def __enter__(self):
        self.one.tap.watch(self.seen)
        self.one.tap.drop = lambda seen: seen.kind == "StepTokens" and seen.worker in self.dead
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        return self

    def _run(self):
        self.results = fl.at_once([lambda body=body, name=name: self.one.stream(body, name) for body, name in zip(self.bodies, self.names)])

    def __exit__(self, kind, *_):
        if kind is None:
            self.thread.join(fl.DEADLINES["total"])
        self.one.tap.forget(self.seen)
        self.one.tap.drop = None

    def kill(self, name):
        self.dead.add(name)
        self.one.services[name].held_down = True
        self.one.kill(name)

    def seen(self, seen):
        if seen.kind in ("LeaseRequest", "PrefillRequest") and seen.text(2) in self.names:
            index = self.names.index(seen.text(2))
            self.numbers[seen.key()[1]] = index
            self.epochs[index] = seen.key()[2]
        elif seen.kind == "StepTokens" and seen.worker not in self.dead:
            for number, _, finish in seen.tokens():
                index = self.numbers.get(number)
                if index is None:
                    continue
                self.over[index] |= finish != 0
                if seen.worker.startswith("decode"):
                    attempt = self.made[index].setdefault(self.epochs[index], [seen.worker, 0])
                    attempt[1] += 1
            if self.act is not None:
                self.act()
        return False

    def at(self, index):
        """(worker, tokens of it) of the attempt that runs; (None, 0): none is being decoded."""
        worker, tokens = self.made[index].get(self.epochs[index], (None, 0))
        return (None, 0) if self.over[index] or worker in self.dead else (worker, tokens)

    def there(self, name, least=1):
        """Of those that are decoded there, with so many tokens made there at least."""
        return [index for index in range(len(self.bodies)) if self.at(index)[0] == name and self.at(index)[1] >= least]


def once(condition, act):
    """act(what condition() is), the first time that is true."""
    done = threading.Event()

    def look():
        if not done.is_set():
            value = condition()
            if value:
                done.set()
                act(value)

    look.done = done
    return look


def decoders():
    return [f"decode-{index}" for index in range(WORKERS)]


def test_the_second_worker_that_dies_convicts_only_who_was_at_both(wide, plain, rng):
    """Four streams on three workers: two of them, A and B, are together where the first dies. They go on apart, each beside one that
    runs there, and where the second dies one of them is: that one is convicted, and the other three end right."""
    bodies = [body_of(rng, answer=200) for _ in range(4)]
    want = right(plain, bodies)
    before = counted(wide)
    killed, suspects = [], []
    with Crew(wide, bodies, rng) as crew:
        def first(name):
            suspects.extend(crew.there(name))
            killed.append(name)
            crew.kill(name)
            crew.act = once(lambda: all(crew.at(index)[1] >= 3 for index in suspects) and suspects[0] + 1, second)

        def second(index):
            places = [crew.at(one)[0] for one in suspects]
            killed.append(places)
            killed.append(crew.at(index - 1)[0])
            crew.kill(killed[-1])

        crew.act = once(lambda: all(crew.at(index)[1] >= 3 for index in range(4))
                        and next((name for name in decoders() if len(crew.there(name)) == 2), None), first)
    assert len(killed) == 3, f"{killed}, {[moments.Case._say(stream) for stream in crew.results]}"
    one, places, other = killed
    assert len(suspects) == 2 and len(set(places)) == 2 and one not in places, f"they did not go on apart: {places}"
    for index, stream in enumerate(crew.results):
        if index == suspects[0]:
            assert stream.error is not None and stream.error["code"] == "request_suspect", moments.Case._say(stream)
            assert one in stream.error["message"] and other in stream.error["message"], stream.error
            assert stream.tokens == want[index][: len(stream.tokens)]
        else:
            assert stream.error is None and stream.tokens == want[index], moments.Case._say(stream)
    assert [now - then for now, then in zip(counted(wide), before)] == [1, 1]


@pytest.mark.parametrize("round_number", range(ROUNDS))
def test_two_kills_among_many_streams_convict_one_at_most_and_nobody_who_had_company(round_number, wide, plain, rng, report):
    """The second one is where most suspects are (even rounds; where two are, unless they do not meet within
    half a second), or wherever one of them is."""
    bodies = [body_of(rng, rng.randrange(8, 40), CROWD_ANSWER) for _ in range(CROWD)]
    want = right(plain, bodies)
    before = counted(wide)
    suspects, company, killed, fell = [], [], [], []
    with Crew(wide, bodies, rng) as crew:
        def first(name):
            suspects.extend(crew.there(name))
            killed.append(name)
            fell.append(time.monotonic())
            crew.kill(name)
            crew.act = once(lambda: next((name for name in pick() if ripe(name)), None), second)

        def pick():
            names = [name for name in decoders() if name not in crew.dead]
            return sorted(names, key=lambda name: -len(suspects_at(name))) if round_number % 2 == 0 else rng.sample(names, len(names))

        def suspects_at(name):
            return [index for index in suspects if crew.at(index)[0] == name]

        def ripe(name):
            there = suspects_at(name)
            few = round_number % 2 == 1 or time.monotonic() > fell[0] + 0.5
            return len(there) >= (1 if few else 2) and all(crew.at(index)[1] + 1 < ABSOLVED for index in there)

        def second(name):
            company.extend(suspects_at(name))
            killed.append(name)
            crew.kill(name)

        crew.act = once(lambda: next((name for name in decoders() if len(crew.there(name, 3)) >= 4), None), first)
    assert len(killed) == 2, f"{killed}, {[moments.Case._say(stream) for stream in crew.results]}"
    convicted = []
    for index, stream in enumerate(crew.results):
        if stream.error is None:
            assert stream.tokens == want[index] and stream.finish == "length", moments.Case._say(stream)
        else:
            assert stream.error["code"] == "request_suspect" and all(name in stream.error["message"] for name in killed), moments.Case._say(stream)
            assert stream.tokens == want[index][: len(stream.tokens)]
            convicted.append(index)
    assert len(convicted) <= (1 if len(company) == 1 else 0), f"{convicted} convicted, and {company} were there when {killed[1]} died"
    assert [now - then for now, then in zip(counted(wide), before)] == [len(convicted)] * 2
    kind = "several suspects at the second" if len(company) > 1 else "one suspect at the second"
    report.count(f"two decode workers killed by hand under {CROWD} streams, innocent ones convicted", kind, len(convicted))
    report.lines.append(f"two decode workers killed under {CROWD} streams: {len(suspects)} were at the first, {len(company)} of them at the second, {len(convicted)} convicted")
