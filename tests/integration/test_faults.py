"""Workers killed at random moments: a clear error for who was hit, everything comes back."""

import contextlib
import os
import signal
import subprocess
import threading
import time

import pytest

import cluster as cl
from conftest import FULL

ROUNDS = 12 if FULL else 1
TOKENS = 24


@pytest.fixture(scope="module")
def hardies():
    """1:2, so that a decode worker's death leaves another one. The pause before a restart
    grows while a worker ends within 10 s each: after nine tests it is another cluster's turn."""
    with contextlib.ExitStack() as stack:
        used = {"tests": 0, "one": None}

        def next_one():
            if used["tests"] % 9 == 0:
                stack.close()
                used["one"] = stack.enter_context(cl.Cluster(workers=3, ratio="1:2"))
            used["tests"] += 1
            return used["one"]

        yield next_one


@pytest.fixture
def hardy(hardies):
    return hardies()


def kill_and_wait(one, name, before):
    """kill -9, then until another incarnation of that name is ready."""
    os.kill(before["pid"], signal.SIGKILL)

    def restarted():
        try:
            now = one.worker(name)
            return now is not None and now["incarnation"] != before["incarnation"] and now["state"] == "ready"
        except cl.httpx.HTTPError:
            return False

    cl.wait_until(restarted, 30, lambda: f"{name} did not come back: {one.worker(name)}")
    cl.wait_until(lambda: one.http.get("/ready").status_code == 200, 20, "/ready is not 200 again")


def assert_clear(answer, want):
    """An answer is right, or it is an error that says so; never a wrong or a silently short one."""
    if answer.error is None:
        assert answer.token_ids == want
        assert answer.finish == "length"
        return True
    assert answer.status in (200, 429, 503, 504), (answer.status, answer.error)
    assert answer.error["message"] and answer.error["type"] != "cut", answer.error
    assert answer.token_ids == want[: len(answer.token_ids)]
    return False


@pytest.mark.parametrize("name", ["prefill-0", "decode-0", "decode-1"])
@pytest.mark.parametrize("round_number", range(ROUNDS))
def test_a_killed_worker_costs_a_clear_error_at_most(hardy, rng, name, round_number):
    prompts = [[rng.randrange(100, 40000) for _ in range(cl.scaled(rng.choice((20, 300))))] for _ in range(4)]
    want = [hardy.complete(prompt, TOKENS, ignore_eos=True).token_ids for prompt in prompts]
    fresh = [[rng.randrange(100, 40000)] + prompt for prompt in prompts]
    before = hardy.worker(name)
    delay_s = rng.random() * 1.0
    killer = threading.Timer(delay_s, kill_and_wait, (hardy, name, before))
    killer.start()
    calls = [lambda prompt=prompt: hardy.stream(prompt, TOKENS, ignore_eos=True) for prompt in prompts]
    calls += [lambda prompt=prompt: hardy.complete(prompt, TOKENS, expect=None, ignore_eos=True) for prompt in fresh]
    answers = hardy.together(calls)
    killer.join()
    cl.wait_until(lambda: (hardy.worker(name) or {}).get("incarnation") not in (None, before["incarnation"]), 30, f"{name} did not restart")
    hardy.assert_clean(timeout_s=20)
    for answer, tokens in zip(answers, want):
        assert_clear(answer, tokens)
    for prompt, answer in zip(fresh, answers[len(prompts):]):
        assert_clear(answer, hardy.complete(prompt, TOKENS, ignore_eos=True).token_ids)
    again = [hardy.complete(prompt, TOKENS, ignore_eos=True).token_ids for prompt in prompts]
    assert again == want, "the cluster answers otherwise than before"


def test_a_prefill_worker_killed_while_it_ships_over_tcp_spoils_nobodys_blocks(rng):
    """What its socket still holds must not land in blocks that others lease at once: two prompts
    nearly fill the pool, so that freed blocks are used again."""
    with cl.Cluster(workers=3, ratio="2:1", model={"context": 2048}, kv={"memory": "96MiB"}, transfer={"transport": "tcp"},
                    prefill={"threads": 1, "chunk_tokens": 64}) as one:
        prompts = [[rng.randrange(100, 40000) for _ in range(cl.scaled(600))] for _ in range(4)]
        cl.wait_until(lambda: one.worker("prefill-1") is not None and one.worker("prefill-1")["state"] == "ready", 30, "prefill-1 is not ready")
        for _ in range(4 if FULL else 1):
            killer = threading.Timer(0.3 + rng.random() * 0.7, kill_and_wait, (one, "prefill-0", one.worker("prefill-0")))
            killer.start()
            answers = one.together([lambda prompt=prompt: one.stream(prompt, TOKENS, ignore_eos=True) for prompt in prompts])
            killer.join()
            one.assert_clean(timeout_s=20)
            for prompt, answer in zip(prompts, answers):
                fresh = one.complete(prompt, TOKENS, ignore_eos=True)
                assert_clear(answer, fresh.token_ids)
            prompts = [[rng.randrange(100, 40000)] + prompt for prompt in prompts]


def test_the_request_id_is_in_the_logs_of_every_service(plain):
    identity = f"trace-{time.monotonic_ns()}"
    response = plain.http.post("/v1/completions", json=plain.body("Hello there", 4, ignore_eos=True), headers={"x-request-id": identity})
    assert response.status_code == 200
    assert response.headers.get("x-request-id") == identity

    def in_all():
        logs = plain.logs()
        return all(any(service in path and identity in text for path, text in logs.items()) for service in ("router", "prefill-0", "decode-0"))

    cl.wait_until(in_all, 5, lambda: {path: identity in text for path, text in plain.logs().items()})


@pytest.mark.parametrize("key, other, ours", [("kv.block_tokens", "32", "16"), ("kv.dtype", "int8", "f16")])
def test_a_worker_of_another_layout_is_refused(plain, key, other, ours):
    """A decode worker with other blocks wants to join: both values are named, the cluster goes on without it."""
    program = os.path.join(cl.BUILD, "deploy", "decode-worker")
    path = os.path.join(plain.path, "stranger.log")
    sets = ("workers=3", "ratio=1:2", f"{key}={other}", "prefill.threads=1", "decode.threads=1")
    with open(path, "w", encoding="utf-8") as log:
        stranger = subprocess.run(
            [program, "-f", plain.file, "--name", "decode-1", *(word for one in sets for word in ("--set", one))],
            cwd=cl.ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=60 * cl.SLOW, check=False,
            env=dict(os.environ, **{cl.MARK: plain.mark}),
        )
    with open(path, encoding="utf-8") as log:
        said = log.read()
    assert stranger.returncode == 2, said
    last = said.splitlines()[-1]
    assert "refuses" in last and other in last and ours in last, said
    assert [worker["name"] for worker in plain.workers()] == ["decode-0", "prefill-0"]
    assert len(plain.complete("Hello", 3, ignore_eos=True).token_ids) == 3
