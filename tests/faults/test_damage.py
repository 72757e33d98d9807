"""What is shipped is damaged on purpose (common/worker/ship_faults.h): each damage is caught, none is answered from."""

import random
import re

import pytest

import field as fl
import moments
from field import FULL

KINDS = ("bit", "other", "epoch", "missing", "count")
TRIES = 1000 if FULL else 5  # of each kind
AT_ONCE = 6


def bodies_of(rng, count):
    """Every third asks for a partial block, some for more than one group's worth."""
    return [fl.asked([rng.randrange(100, 40000) for _ in range(rng.choice((7, 16, 23, 40, 70)))], 3) for _ in range(count)]


def faulty(kinds):
    return {"KVFERRY_FAULTS": kinds, "KVFERRY_ALLOW_FAULTS": "1"}


def damaged(one, kind):
    return sum(len(re.findall(rf'msg="fault" kind={kind} ', one.log(name))) for name in ("prefill-0", "prefill-1") if name in one.services)


def ask_all(one, bodies, want, enough):
    """Asks, some at once, until enough() or every body was asked often enough; every answer must be right."""
    wrong = []
    rounds = 0
    while not enough() and rounds < 4000:
        rounds += 1
        picked = [(rounds * AT_ONCE + i) % len(bodies) for i in range(AT_ONCE)]
        for index, stream in zip(picked, fl.at_once([lambda index=index: one.stream(bodies[index]) for index in picked])):
            if stream.error is not None or stream.cut or stream.tokens != want[index]:
                wrong.append(f"{moments.Case._say(stream)} got {stream.tokens} want {want[index]}")
        assert not wrong, "\n".join(wrong)
        assert rounds < 60 or any(damaged(one, kind) for kind in (*KINDS, "notice")), "nothing is damaged: is the hook there?"


@pytest.fixture(scope="module")
def known():
    """Bodies and their answers, from a cluster that nobody damages."""
    rng = random.Random(fl.SEED)
    bodies = bodies_of(rng, 24)
    with fl.Field("shm", prefill=1, decode=1, tapped=False) as plain:
        want = [stream.tokens for stream in fl.at_once([lambda body=body: plain.stream(body) for body in bodies])]
    assert all(len(tokens) == 3 for tokens in want)
    return bodies, want


@pytest.mark.parametrize("kinds", [(kind,) for kind in KINDS] if FULL else [KINDS], ids="+".join)
def test_every_damage_is_caught(kinds, known, report):
    bodies, want = known
    every = (41,) if FULL else (97, 101, 103, 107, 109)  # primes: not five in a row; a prompt has 15 parts and 4 attempts
    env = {"prefill": faulty(",".join(f"{kind}:{n}" for kind, n in zip(kinds, every)))}
    with fl.Field("shm", prefill=1, decode=1, tapped=False, env=env, kv={"prefix_cache": False}) as one:
        ask_all(one, bodies, want, lambda: all(damaged(one, kind) >= TRIES for kind in kinds))
        done = {kind: damaged(one, kind) for kind in kinds}
        assert all(count >= TRIES for count in done.values()), done
        one.assert_clean()
        refetched = one.metric("kvferry_refetches_total")
        failed = one.metric("kvferry_seal_failures_total")
        found = [line for line in one.log("decode-0").splitlines() if re.search("fetched again: a seal|msg=\"a block's seal does not match", line)]
        assert all("prefill-0 to decode-0" in line or "sender=prefill-0 receiver=decode-0" in line for line in found), found[:3]
        # one line a damage; what is damaged in a landing that was given up already needs none
        assert len(found) >= 0.75 * sum(done.values()), f"{len(found)} found of {done}"
        assert refetched > 0
        report.lines.append(f"damage on landing: {done}, all caught ({refetched:.0f} fetched again, {failed:.0f} wrong twice)")


def test_a_notice_that_never_comes_is_asked_for_again(known):
    bodies, want = known
    count = 200 if FULL else 4
    with fl.Field("shm", prefill=1, decode=1, tapped=False, env={"prefill": faulty("notice:13")}, kv={"prefix_cache": False}) as one:
        ask_all(one, bodies, want, lambda: damaged(one, "notice") >= count)
        one.assert_clean()


def test_a_prefill_worker_that_always_ships_damage_is_left_for_another(known):
    """Wrong twice: prefilled elsewhere."""
    bodies, want = known
    with fl.Field("shm", prefill=2, decode=1, tapped=False, env={"prefill-0": faulty("bit:1")}, kv={"prefix_cache": False}) as one:
        ask_all(one, bodies, want, lambda: damaged(one, "bit") >= (200 if FULL else 8))
        one.assert_clean()
        assert one.metric("kvferry_seal_failures_total") > 0


def test_a_prefill_that_fails_after_its_first_chunk_costs_the_others_nothing(rng):
    """Every third step with a later chunk fails: the answer is right, or a clear error within its deadline, never other text."""
    count = 50 if FULL else 8
    with fl.Field("tcp", prefill=2, decode=1, tapped=False, env={"prefill": {"KVFERRY_STEP_FAULTS": "3", "KVFERRY_ALLOW_FAULTS": "1"}}, kv={"prefix_cache": False}) as one:
        bodies = [fl.asked([rng.randrange(100, 40000) for _ in range(100)], 6) for _ in range(count)]
        with fl.Field("shm", prefill=1, decode=1, tapped=False) as plain:
            want = [stream.tokens for stream in fl.at_once([lambda body=body: plain.stream(body) for body in bodies])]
        results = []
        for at in range(0, count, 4):
            results += fl.at_once([lambda body=body: one.stream(body) for body in bodies[at:at + 4]])
        assert damaged(one, "step") > 0
        for stream, tokens in zip(results, want):
            assert stream.tokens == tokens[: len(stream.tokens)] and not stream.cut, moments.Case._say(stream)
            assert stream.tokens == tokens or stream.status in (500, 502, 503, 504) or stream.error, moments.Case._say(stream)
        assert sum(stream.error is None for stream in results) >= count // 2, [stream.error for stream in results]
        one.assert_clean(5)
