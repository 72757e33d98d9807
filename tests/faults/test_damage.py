"""What is shipped is damaged on purpose (common/worker/ship_faults.h): each damage is caught, none is answered from."""

import collections
import random
import re

import pytest

import cluster as cl
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
    return sum(len(re.findall(rf'msg="fault" kind={kind} ', one.log(name))) for name in one.services if name != "router")


def count_damage(one, report, what):
    """Counts what was damaged for the run's last lines, and says it."""
    done = {kind: damaged(one, kind) for kind in (*KINDS, "notice", "step") if damaged(one, kind)}
    for kind, times in done.items():
        report.count(f"damage in {what}", kind, times)
    report.count("damage answered by", "fetching again", one.metric("kvferry_refetches_total"))
    report.count("damage answered by", "another attempt (wrong twice)", one.metric("kvferry_seal_failures_total"))
    return done


NAMES_BLOCKS = re.compile(r"msg=\"fetched again: .* blocks? (\d+) to (\d+) of layer group (\d+)")
NAMES_ONE = re.compile(r"msg=\"a block's seal does not match.* group=(\d+) block=(\d+)")
ENDS_ATTEMPT = re.compile(r"msg=\"(a block's seal does not match|blocks that were written|too much is missing)")


def judged(shipped, received):
    """{kind: {"named": n, "over": n, "missed": lines}} of all damages that the sender's log tells. Named: a line of the
    receiver's has this very block, one line for each time it was damaged. Over: its attempt had ended for another block
    before it came to this one, and nothing is read from such an attempt."""
    named, over, result = collections.Counter(), set(), {}
    for line in received.splitlines():
        attempt = re.search(r"request=(\d+) epoch=(\d+)", line)
        blocks, one = NAMES_BLOCKS.search(line), NAMES_ONE.search(line)
        if blocks is not None:
            first, last, group = map(int, blocks.groups())
            named.update((attempt.groups(), group, block) for block in range(first, last + 1))
        if one is not None:
            named[attempt.groups(), *map(int, one.groups())] += 1
        if ENDS_ATTEMPT.search(line):
            over.add(attempt.groups())
    for line in re.findall(r'msg="fault" .*', shipped):
        attempt = re.search(r"request=(\d+) epoch=(\d+)", line).groups()
        kind, group, block = re.search(r"kind=(\w+) .* group=(\d+) block=(\d+)", line).groups()
        of = result.setdefault(kind, {"named": 0, "over": 0, "missed": []})
        place = (attempt, int(group), int(block))
        if named[place]:
            named[place] -= 1
            of["named"] += 1
        elif attempt in over:
            of["over"] += 1
        else:
            of["missed"].append(line)
    return result


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
        goal = dict.fromkeys(kinds, TRIES)
        for _ in range(10):  # until so many of each kind were named
            ask_all(one, bodies, want, lambda: all(damaged(one, kind) >= goal[kind] for kind in kinds))
            one.assert_clean()
            done = judged(one.log("prefill-0"), one.log("decode-0"))
            if all(done[kind]["named"] >= TRIES for kind in kinds):
                break
            goal = {kind: damaged(one, kind) + TRIES - min(done[kind]["named"], TRIES) + 1 for kind in kinds}
        assert all(done[kind]["named"] >= TRIES for kind in kinds), done
        lines = [line for line in one.log("decode-0").splitlines() if "msg=\"fetched again: " in line or ENDS_ATTEMPT.search(line)]
        assert all("prefill-0 to decode-0" in line or "sender=prefill-0 receiver=decode-0" in line for line in lines), lines[:3]
        for kind in kinds:
            # A block that is left out is none where the same prompt's bytes lie from before: about one in a hundred.
            harmless = max(1, damaged(one, kind) // 20) if kind == "missing" else 0
            assert len(done[kind]["missed"]) <= harmless, (kind, done[kind])
            report.count("damage named to the block", kind, done[kind]["named"])
        assert one.metric("kvferry_refetches_total") > 0
        count_damage(one, report, "prompts' blocks")


def test_a_notice_that_never_comes_is_asked_for_again(known, report):
    bodies, want = known
    count = 200 if FULL else 4
    with fl.Field("shm", prefill=1, decode=1, tapped=False, env={"prefill": faulty("notice:13")}, kv={"prefix_cache": False}) as one:
        ask_all(one, bodies, want, lambda: damaged(one, "notice") >= count)
        one.assert_clean()
        assert one.metric("kvferry_refetches_total") > 0
        count_damage(one, report, "prompts' blocks")


def test_a_prefill_worker_that_always_ships_damage_is_left_for_another(known, report):
    """Wrong twice: prefilled elsewhere."""
    bodies, want = known
    with fl.Field("shm", prefill=2, decode=1, tapped=False, env={"prefill-0": faulty("bit:1")}, kv={"prefix_cache": False}) as one:
        ask_all(one, bodies, want, lambda: damaged(one, "bit") >= (200 if FULL else 8))
        one.assert_clean()
        assert one.metric("kvferry_seal_failures_total") > 0
        count_damage(one, report, "prompts' blocks")


def test_a_prefill_that_fails_after_its_first_chunk_costs_the_others_nothing(rng, report):
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
        count_damage(one, report, "a step of prefill")


# ---- what decode workers send


def found_wrong(one, what):
    return [line for line in one.log("router").splitlines() if f'msg="{what} blocks did not arrive right' in line]


DECODE_DAMAGE = "bit:3,other:5,missing:7,epoch:11,count:13,notice:17"


def test_moved_blocks_that_are_damaged_are_caught(golden, rng, report):
    """A small decode worker, alone, learns that answers are short, and promises room to more of them
    than it has room for. Then they are long, another worker comes, and what moves there is damaged."""
    case = next(case for case in golden.values() if (case["hf_fp32"].get("eos_at") or 0) > 2)
    soon = {**fl.asked(case["prompt_ids"] + case["hf_fp32"]["ids"][: case["hf_fp32"]["eos_at"] - 2], 6), "ignore_eos": False}
    enough, rounds = (40, 100) if FULL else (4, 12)
    long = [fl.asked([rng.randrange(100, 40000) for _ in range(20)], 90) for _ in range(16)]
    with fl.Field("shm", prefill=1, decode=1, tapped=False) as plain:
        want = [stream.tokens for stream in fl.at_once([lambda body=body: plain.stream(body) for body in long])]
    assert all(len(tokens) == 90 for tokens in want)
    sets = {"decode": ["kv.prefix_cache=false"], "decode-0": ["kv.memory=10MiB"], "decode-1": ["kv.memory=64MiB"]}
    with fl.Field("shm", prefill=1, decode=2, tapped=False, sets=sets, env={"decode-0": faulty(DECODE_DAMAGE)}) as one:
        for _ in range(rounds):
            one.services["decode-1"].held_down = True
            one.kill("decode-1")
            cl.wait_until(lambda: all(worker["name"] != "decode-1" for worker in one.workers()), 5, "decode-1 is still there")
            ended = fl.at_once([lambda: one.stream(soon) for _ in range(50)])
            assert all(stream.finish == "stop" for stream in ended), [moments.Case._say(stream) for stream in ended]
            one.services["decode-1"].held_down = False
            for stream, tokens in zip(fl.at_once([lambda body=body: one.stream(body) for body in long]), want):
                assert stream.error is None and not stream.cut and stream.tokens == tokens, f"{moments.Case._say(stream)} got {stream.tokens} want {tokens}"
            if len(found_wrong(one, "moved")) >= enough:
                break
            one.wait_ready()
        one.assert_clean()
        done = count_damage(one, report, "moved blocks")
        moved, failed = one.metric("kvferry_moves_total"), one.metric("kvferry_moves_failed_total")
        report.count("sequences that moved under damage", "came whole", moved)
        report.count("sequences that moved under damage", "went another way", failed)
        assert len(found_wrong(one, "moved")) >= enough, f"{moved:.0f} moves, {failed:.0f} failed, damaged: {done}"
        assert moved > 0, f"none came whole: {done}"


def test_pulled_blocks_that_are_damaged_are_caught(rng, report):
    """Second turns: the answer's blocks are fetched from the decode worker that made it, damaged."""
    enough, rounds = (60, 240) if FULL else (4, 24)
    with fl.Field("shm", prefill=1, decode=1, tapped=False, env={"decode": faulty(DECODE_DAMAGE)}) as one, \
            fl.Field("shm", prefill=1, decode=1, tapped=False, kv={"prefix_cache": False}) as plain:
        for _ in range(rounds):
            prompt = [rng.randrange(100, 40000) for _ in range(40)]
            first = one.stream(fl.asked(prompt, 100))
            assert first.error is None and len(first.tokens) == 100, moments.Case._say(first)
            one.assert_clean()
            turn = fl.asked(prompt + first.tokens + [rng.randrange(100, 40000) for _ in range(16)], 4)
            second, right = fl.at_once([lambda: one.stream(turn), lambda: plain.stream(turn)])
            assert second.error is None and second.tokens == right.tokens, f"{moments.Case._say(second)} got {second.tokens} want {right.tokens}"
            if len(found_wrong(one, "pulled")) >= enough:
                break
        one.assert_clean()
        done = count_damage(one, report, "pulled blocks")
        pulls, failed = one.metric("kvferry_pulls_total"), one.metric("kvferry_pulls_failed_total")
        report.count("pulls under damage", "came whole", pulls - failed)
        report.count("pulls under damage", "computed after all", failed)
        assert len(found_wrong(one, "pulled")) >= enough, f"{pulls:.0f} pulls, {failed:.0f} failed, damaged: {done}"
