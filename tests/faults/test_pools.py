"""All workers of a role are lost at once, under streams: who waits goes on when they are there again, at the same
addresses, and is told clearly when they are not."""

import http.client
import json
import threading
import time

import pytest

import cluster as cl
import field as fl
import moments

QUEUE_S = 6  # router.deadlines.queue
DOWN_S = 1.0  # how long a pool that comes back is away
STREAMS, ANSWER = 6, 48
PATIENT = {"interval": "100ms", "lost_after": "3s"}  # nobody is given up for being late on a busy machine
SOON_S = 2.5  # for an answer of the router that does not depend on work, on a busy machine


def bodies_of(rng, count, tokens, answer):
    return [fl.asked([rng.randrange(100, 40000) for _ in range(tokens)], answer) for _ in range(count)]


@pytest.fixture(scope="module")
def pools_field():
    with fl.Field("tcp", router={"deadlines": {"queue": f"{QUEUE_S}s"}}, heartbeat=PATIENT) as one:
        yield one


@pytest.fixture
def pools(pools_field):
    pools_field.wait_ready(20)
    pools_field.forget_requests()
    yield pools_field
    for service in pools_field.services.values():
        service.held_down = False
    pools_field.wait_ready(20)
    pools_field.assert_clean()
    for service in pools_field.services.values():
        assert all(excused for _, excused in service.ends), f"{service.name} ended by itself: {service.ends}"
        service.ends.clear()


def right(one, bodies):
    """From the cluster itself, before anything happens to it."""
    streams = fl.at_once([lambda body=body: one.stream(body) for body in bodies])
    assert all(s.error is None and not s.cut and len(s.tokens) == s.body["max_tokens"] for s in streams), [moments.Case._say(s) for s in streams]
    one.assert_clean()
    return [stream.tokens for stream in streams]


def lose(one, roles):
    """SIGKILL for all of them, and nobody starts them again; gone when this returns."""
    names = [service.name for service in one.services.values() if service.role in roles]
    for name in names:
        one.services[name].held_down = True
    for name in names:
        one.kill(name)
    cl.wait_until(lambda: not any(w["name"] in names for w in one.workers()), 5, f"{names} are not given up")
    return names


def bring_back(one, names):
    for name in names:
        one.services[name].held_down = False


def refusal(one, body):
    """(status, Retry-After or None, error, seconds) of a request that is not streamed."""
    wire = fl.Wire(one, 30)
    began = time.monotonic()
    try:
        wire.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        answer = wire.getresponse()
        return answer.status, answer.getheader("Retry-After"), json.loads(answer.read()).get("error"), time.monotonic() - began
    finally:
        wire.close()


class Streams:
    """Streams that run while the test does something; each can be waited for at a number of tokens."""

    def __init__(self, one, bodies):
        self.one, self.bodies = one, bodies
        self.streams = [None] * len(bodies)
        self.results = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self):
        def ask(index):
            def register(stream, _):
                self.streams[index] = stream

            return self.one.stream(self.bodies[index], register=register)

        self.results = fl.at_once([lambda index=index: ask(index) for index in range(len(self.bodies))])

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, kind, *_):
        if kind is None:
            self.thread.join(fl.DEADLINES["total"])
            assert self.results is not None, "streams without an end"

    def counts(self):
        return [len(stream.tokens) if stream is not None else 0 for stream in self.streams]

    def wait_for(self, tokens):
        cl.wait_until(lambda: all(count >= tokens for count in self.counts()), 15, lambda: f"tokens: {self.counts()}")


def assert_whole(streams, want):
    wrong = [f"{moments.Case._say(stream)} got {stream.tokens} want {tokens}" for stream, tokens in zip(streams, want)
             if stream.error is not None or stream.cut or stream.tokens != tokens or stream.finish != "length"]
    assert not wrong, "\n".join(wrong)


def assert_not_ready(one, role):
    status, body = one.get("/ready")
    assert status == 503, f"{status}: {body}"
    assert not any(worker["role"] == role for worker in one.workers())


@pytest.mark.parametrize("roles", (("decode",), ("decode", "prefill")), ids="-".join)
def test_streams_whose_decode_workers_are_all_killed_go_on_when_they_are_back(roles, pools, rng):
    """And so do requests that come meanwhile, and one that was alone."""
    bodies, late = bodies_of(rng, STREAMS, 24, ANSWER), bodies_of(rng, 2, 24, 8)
    want, late_want = right(pools, bodies), right(pools, late)
    suspects = pools.metric("kvferry_requests_suspect_total")
    with Streams(pools, bodies) as running:
        running.wait_for(3)
        names = lose(pools, roles)
        assert_not_ready(pools, "decode")
        had = running.counts()
        assert any(count < ANSWER for count in had), "all had ended before: the test says nothing"
        with Streams(pools, late) as waiting:
            time.sleep(DOWN_S)
            assert running.counts() == had or sum(running.counts()) - sum(had) <= STREAMS, "tokens of nobody"
            bring_back(pools, names)
    assert_whole(running.results, want)
    assert_whole(waiting.results, late_want)
    assert pools.metric("kvferry_requests_suspect_total") == suspects


def test_prompts_whose_prefill_workers_are_all_killed_wait_and_running_streams_do_not(pools, rng):
    bodies, prompts = bodies_of(rng, 3, 24, 150), bodies_of(rng, 3, 320, 6)
    want = right(pools, bodies)
    with Streams(pools, bodies) as running:
        running.wait_for(2)
        with Streams(pools, prompts) as waiting:
            cl.wait_until(lambda: pools.metric("kvferry_requests_active") >= 6 or None, 5, "they were not asked")
            names = lose(pools, ("prefill",))
            assert_not_ready(pools, "prefill")
            at_loss = running.counts()
            time.sleep(DOWN_S)
            meanwhile = running.counts()
            bring_back(pools, names)
    assert_whole(running.results, want)
    going = [index for index, count in enumerate(at_loss) if count < 150 - 20]
    assert going and all(meanwhile[index] > at_loss[index] for index in going), f"from {at_loss} to {meanwhile}: running streams need no prefill worker"
    assert_whole(waiting.results, right(pools, prompts))  # which were in no cache before


@pytest.mark.parametrize("role", ("decode", "prefill"))
def test_who_waits_for_a_pool_in_vain_is_told_so_at_the_queues_deadline(role, pools, rng):
    bodies, late = bodies_of(rng, 4, 24, 120), bodies_of(rng, 1, 40, 4)
    want, late_want = right(pools, bodies), right(pools, late)
    if role == "prefill":  # what is decoded needs none
        bodies, want = bodies_of(rng, 4, 420, 4), None
    before = pools.metric("kvferry_requests_failed_total")
    with Streams(pools, bodies) as running:
        if role == "decode":
            running.wait_for(3)
        else:
            cl.wait_until(lambda: pools.metric("kvferry_requests_active") >= 4, 5, "they were not asked")
        names = lose(pools, (role,))
        lost_at = time.monotonic()
        answers = fl.at_once([lambda: refusal(pools, late[0])] * 2)
    for status, retry_after, error, took_s in answers:
        assert (status, error["code"]) == (503, "no_worker") and error["message"].startswith(f"no {role} worker became ready within"), (status, error)
        assert retry_after is not None and 1 <= int(retry_after) <= 60, retry_after
        assert QUEUE_S - 0.2 <= took_s <= QUEUE_S + SOON_S, took_s
    hit = [stream for stream in running.results if stream.error is not None]
    for index, stream in enumerate(running.results):
        assert not stream.cut, moments.Case._say(stream)
        if stream.error is None:
            continue
        assert stream.error["code"] == "no_worker" and role in stream.error["message"], stream.error
        assert stream.status == (200 if stream.tokens else 503), stream.status
        assert want is None or stream.tokens == want[index][: len(stream.tokens)]
        assert QUEUE_S - SOON_S <= stream.ended - lost_at <= QUEUE_S + SOON_S, stream.ended - lost_at
    assert len(hit) >= (4 if role == "decode" else 1), [moments.Case._say(stream) for stream in running.results]
    assert pools.metric("kvferry_requests_failed_total") - before == len(hit) + len(answers)
    pools.assert_clean()  # those that are left hold nothing for them
    bring_back(pools, names)
    pools.wait_ready(20)
    assert_whole([pools.stream(late[0])], late_want)
