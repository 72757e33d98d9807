"""Tensor parallelism: any split of any role gives one rank's tokens, KV goes between workers with other
splits by head slices, and a rank that dies ends its worker alone."""

import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

import cluster as cl
from conftest import FULL

PROMPTS = [
    "Once upon a time",
    "The ship left the harbour before dawn, and nobody on the quay " * 6,
    "1 2 3 4 5 6 7 8 9 " * 20,
    "A list of rivers, of towns and of the people who live in them. " * 12,
]
TOKENS = cl.scaled(40)
SPLITS = [(2, 2), (2, 1), (2, 4), (1, 4)] + ([(4, 2), (4, 4), (4, 1), (1, 2), (8, 2), (8, 8)] if FULL else [])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random llama with 8 KV heads: SmolLM2's three divide by nothing but three."""
    path = tmp_path_factory.mktemp("model") / "random.gguf"
    subprocess.run([sys.executable, os.path.join(cl.ROOT, "tests", "tools", "make_model.py"), "--tokenizer", cl.MODEL,
                    "--out", str(path)], check=True)
    return str(path)


def split_cluster(model, prefill, decode, /, **changes):
    one = {
        "model": {"path": model, "context": cl.CONTEXT},
        "prefill": {"tensor_parallel": prefill, "chunk_tokens": 64},
        "decode": {"tensor_parallel": decode},
        "kv": {"memory": "64MiB"},
    }
    return cl.Cluster(**cl.merged(one, changes))


def answers(one):
    return [answer.token_ids for answer in one.together([lambda p=p: one.complete(p, TOKENS) for p in PROMPTS])]


@pytest.fixture(scope="module")
def want(model):
    """What one rank of each role says."""
    with split_cluster(model, 1, 1) as one:
        said = answers(one)
    assert all(len(tokens) == TOKENS for tokens in said)
    assert len({tuple(tokens) for tokens in said}) == len(said), "prompts that all get the same answer prove little"
    return said


def ranks_of(one, name):
    """{rank: pid} of a worker's other ranks."""
    found = {}
    for pid in one.processes():
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                words = file.read().decode().split("\0")
        except OSError:
            continue
        if "--rank" in words and words[words.index("--name") + 1] == name:
            found[int(words[words.index("--rank") + 1].split("/")[0])] = int(pid)
    return found


@pytest.mark.parametrize("prefill, decode", SPLITS)
def test_any_split_gives_the_same_tokens(model, want, prefill, decode):
    with split_cluster(model, prefill, decode) as one:
        assert answers(one) == want
        assert answers(one) == want  # by the prefix cache
        assert len(ranks_of(one, "prefill-0")) == prefill - 1
        assert len(ranks_of(one, "decode-0")) == decode - 1
        assert sorted(one.worker("decode-0")["rank_pids"]) == sorted(ranks_of(one, "decode-0").values())
        _, status, _ = one.kvferry("status", "-f", one.file)
        for name, ranks in (("prefill-0", prefill), ("decode-0", decode)):
            worker, log = one.worker(name), one.logs()[f"logs/{name}.log"]
            places = [worker["placement"], *worker["rank_placements"]]
            assert len(places) == ranks
            for rank, place in enumerate(places):  # /workers, the rank's log and `status` say the same of where it is
                called = f"{name}/{rank}" if rank else name
                placed = [line for line in log.splitlines() if f' svc={called} msg="placed" gpu=none ' in line]
                assert len(placed) == 1 and f' cpus={place["cpus"]} ' in placed[0], placed
                assert [line for line in status.splitlines() if line.startswith(f"{called}: host's cores, NUMA node ")], status


def test_slices_go_over_tcp_too(model, want):
    with split_cluster(model, 4, 2, transfer={"transport": "tcp"}) as one:
        assert answers(one) == want


@pytest.mark.parametrize("prefill, decode", [(2, 4), (2, 1)])
def test_a_damaged_slice_is_found_and_fetched_again(model, want, monkeypatch, prefill, decode):
    monkeypatch.setenv("KVFERRY_FAULTS", "bit:61,other:79,missing:97")
    monkeypatch.setenv("KVFERRY_ALLOW_FAULTS", "1")
    with split_cluster(model, prefill, decode, kv={"prefix_cache": False}) as one:
        for _ in range(4):
            assert answers(one) == want
        log = one.logs()["logs/decode-0.log"]
        slices = re.findall(r"fetched again: a seal does not match its bytes, KV heads (\d) to (\d) \(slice (\d) of (\d), rank (\d) here\)", log)
        assert slices, "nothing was found"
        count = max(prefill, decode)
        for first, last, number, of, rank in (tuple(map(int, found)) for found in slices):
            assert (first, last, of) == (number * 8 // count, (number + 1) * 8 // count - 1, count)
            assert rank == first * decode // 8
        planted = set(re.findall(r'msg="fault" kind=\w+ .* slice=(\d)', one.logs()["logs/prefill-0.log"]))
        assert planted and {found[2] for found in slices} <= planted


@pytest.mark.parametrize("prefill, decode", [(1, 2), (4, 1)] + ([(2, 1), (2, 4), (1, 4)] if FULL else []))
def test_the_second_turn_fetches_the_first_ones_answer_from_another_split(model, prefill, decode):
    """Prefill on the scalar reference, which is slow: fetching is always cheaper than computing. A machine that is busy
    elsewhere may not fetch within the time that a pull is given: then all is computed, with the same tokens, and the next
    conversation has another try."""
    turns = []
    with split_cluster(model, prefill, decode, prefill={"device": "cpu-ref"}) as one:
        for attempt in range(6):
            prompt, fresh = list(range(300 + attempt, 330 + attempt)), list(range(400, 420))
            first = one.complete(prompt, cl.scaled(100), ignore_eos=True).token_ids
            one.assert_clean()
            assert one.metric("kvferry_pulls_total") == attempt
            turns.append(prompt + first + fresh)
            second = one.complete(turns[-1], 12, ignore_eos=True)
            turns[-1] = (turns[-1], second.token_ids)
            one.assert_clean()
            assert one.metric("kvferry_pulls_total") == attempt + 1
            if one.metric("kvferry_pulls_failed_total") == attempt:
                break
        assert one.metric("kvferry_pulls_failed_total") == attempt, "no pull came whole"
        known = (len(prompt) + len(first) - 1) // 16 * 16
        assert second.usage["prompt_tokens_details"]["cached_tokens"] == known
        assert one.metric("kvferry_seal_failures_total") == 0
    with split_cluster(model, 1, 1, kv={"prefix_cache": False}) as plain:
        for turn, tokens in turns:
            assert plain.complete(turn, 12, ignore_eos=True).token_ids == tokens


@pytest.mark.parametrize("before, after", [(2, 1), (1, 4)] + ([(4, 2), (2, 8)] if FULL else []))
def test_a_sequence_that_gives_way_moves_to_another_split(model, before, after):
    """Two answers of which the pool holds one. Nothing is left to chance: the first has a low priority, so that its end is
    in nobody's way when the second asks for room, which it does while the worker is stopped; stopped again, it has both
    when the worker comes that one of them moves to; and prefill is slow, so that computing again would be dearer."""
    bodies = [(list(range(300, 310)), 220, 1), (list(range(400, 410)), 190, 0)]  # prompt, tokens, priority: the lower goes first

    def stream(one, index, hang_up=None):
        prompt, tokens, priority = bodies[index]
        return one.stream(prompt, tokens, hang_up=hang_up, ignore_eos=True, priority=priority)

    with split_cluster(model, 1, 1, kv={"prefix_cache": False}) as plain:
        want = [answer.token_ids for answer in plain.together([lambda i=i: stream(plain, i) for i in range(2)])]
    assert [len(tokens) for tokens in want] == [tokens for _, tokens, _ in bodies]
    slow = {"prefill": {"device": "cpu-ref"}, "decode": {"device": "cpu-ref"}, "heartbeat": {"lost_after": "30s", "hung_after": "60s"}}
    with split_cluster(model, 1, before, kv={"memory": "1MiB"}, **slow) as one:
        assert one.worker("decode-0")["ledger"]["total"] == 16, "the numbers above are for 16 blocks, and 15 and 13 at their ends"
        pid, answers, stopped = one.worker("decode-0")["pid"], [None, None], [threading.Event(), threading.Event()]

        def ask(index):
            def stop(tokens):
                if tokens >= 2 and not stopped[index].is_set():  # the first comes from the prefill worker
                    os.kill(pid, signal.SIGSTOP)
                    stopped[index].set()
                return False
            answers[index] = stream(one, index, stop)

        threads = [threading.Thread(target=ask, args=(index,)) for index in range(2)]
        try:
            for index in range(2):
                threads[index].start()
                cl.wait_until(lambda: one.logs()["logs/router.log"].count('msg="placed"') == index + 1, 20, "it was not placed")
                os.kill(pid, signal.SIGCONT)
                assert stopped[index].wait(60 * cl.SLOW), one.worker("decode-0")
            assert one.metric("kvferry_sequences_suspended_total") == 0
            with cl.late_worker(one, "decode-1", workers=3, ratio="1:2", decode={"tensor_parallel": after}, kv={"memory": "64MiB"}):
                os.kill(pid, signal.SIGCONT)
                for thread in threads:
                    thread.join()
                assert [answer.error for answer in answers] == [None, None]
                assert [answer.token_ids for answer in answers] == want
                assert (one.metric("kvferry_moves_total"), one.metric("kvferry_moves_failed_total")) == (1, 0)
                assert one.metric("kvferry_seal_failures_total") == 0
                assert re.search(r'msg="moved" from=decode-0 to=decode-1 blocks=\d+ ', one.logs()["logs/router.log"])
                assert (len(ranks_of(one, "decode-0")), len(ranks_of(one, "decode-1"))) == (before - 1, after - 1)
                one.assert_clean()
        finally:
            os.kill(pid, signal.SIGCONT)
            for thread in threads:
                thread.join()


@pytest.fixture
def peers_die(monkeypatch):
    """Leak checks know what UCX forgets when it meets a dead process's memory."""
    monkeypatch.setenv("LSAN_OPTIONS", f"print_suppressions=0:suppressions={os.path.join(cl.ROOT, 'tests', 'lsan.supp')}")


@pytest.mark.parametrize("victim, blow", [("decode-0", signal.SIGKILL), ("prefill-0", signal.SIGKILL), ("decode-0", signal.SIGSTOP)])
def test_a_rank_that_is_killed_or_stands_still_ends_its_worker_alone(model, want, peers_die, victim, blow):
    """Streams that it hits end with an error that says so or go on and are right; afterwards all is as before. One that
    stands still is waited for twice lost_after, and killed."""
    with split_cluster(model, 2, 4, workers=4, ratio="1:1", heartbeat={"lost_after": "1s"} if blow == signal.SIGSTOP else {}) as one:
        before, others = one.worker(victim), {w["name"]: w["incarnation"] for w in one.workers() if w["name"] != victim}
        ranks = ranks_of(one, victim)
        begun, results = threading.Event(), []

        def stream(prompt):
            def note(tokens):
                if tokens > 3 or victim.startswith("prefill"):
                    begun.set()
                return False
            results.append((prompt, one.stream(prompt, TOKENS, hang_up=note)))

        threads = [threading.Thread(target=stream, args=(prompt,)) for prompt in PROMPTS * 2]
        for thread in threads:
            thread.start()
        assert begun.wait(60)
        os.kill(ranks[1], blow)
        for thread in threads:
            thread.join()
        for prompt, answer in results:
            if answer.error is None:
                assert answer.token_ids == want[PROMPTS.index(prompt)]
        assert sum(answer.error is None for _, answer in results) >= (len(results) if blow == signal.SIGSTOP else len(results) // 2)

        def restarted():
            now = one.worker(victim)
            return now is not None and now["incarnation"] != before["incarnation"] and now["state"] == "ready"

        cl.wait_until(restarted, 30, lambda: f"{victim} did not come back: {one.worker(victim)}")
        assert {w["name"]: w["incarnation"] for w in one.workers() if w["name"] != victim} == others
        line = f'msg="a tensor-parallel rank was killed, and its worker ends with it" rank=1 pid={ranks[1]} signal=9'
        log = one.logs()[f"logs/{victim}.log"]
        if blow == signal.SIGKILL:
            assert log.count(line) == 1
        else:
            assert log.count('msg="a tensor-parallel rank stands still, and is killed" rank=1 ') == 1
            _, out, _ = one.kvferry("status", "-f", one.file)
            assert f"{victim}: its last run ended with status 1: what computes has failed: this worker ends" in out, out
            assert "reason=tensor-parallel rank 1 stood still in a step: waited for it for " in out, out
        assert not set(ranks.values()) & set(map(int, one.processes())), "a rank outlived its worker"
        assert answers(one) == want
        one.assert_clean()


def test_a_leader_that_is_killed_leaves_no_rank(model, want, peers_die):
    with split_cluster(model, 2, 2) as one:
        before, ranks = one.worker("decode-0"), ranks_of(one, "decode-0")
        os.kill(before["pid"], signal.SIGKILL)
        cl.wait_until(lambda: not set(ranks.values()) & set(map(int, one.processes())), 5, "its rank lives on")
        cl.wait_until(lambda: (one.worker("decode-0") or before)["incarnation"] != before["incarnation"]
                      and one.worker("decode-0")["state"] == "ready", 30, "decode-0 did not come back")
        assert answers(one) == want


def test_a_worker_whose_rank_stands_still_leaves_when_it_is_told(model):
    with split_cluster(model, 1, 2) as one:
        pid, rank = one.worker("decode-0")["pid"], ranks_of(one, "decode-0")[1]
        os.kill(rank, signal.SIGSTOP)
        asker = threading.Thread(target=lambda: one.stream(PROMPTS[0], TOKENS), daemon=True)
        asker.start()
        cl.wait_until(lambda: one.worker("decode-0")["running"] == 1, 10, "the request did not come to the stopped rank")
        for _ in range(2):  # the second one asks for no grace
            os.kill(pid, signal.SIGTERM)
            time.sleep(0.5)
        cl.wait_until(lambda: not {pid, rank} & set(map(int, one.processes())), 5, "it was told to leave, and has not left")
        asker.join(60)


def test_what_does_not_divide_is_refused_with_the_reason():
    one = cl.Folder(decode={"tensor_parallel": 2})
    try:
        for command in ("check", "up"):
            status, out, err = one.kvferry(command, "-f", one.file, *(["--detach"] if command == "up" else []))
            assert status != 0, out
            assert "decode.tensor_parallel: 9 heads do not divide among 2 ranks" in err, (out, err)
        one.assert_no_process()
    finally:
        one.remove()
