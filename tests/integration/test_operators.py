"""What operators see and count on: deaths are seen at once, who stands still is replaced, a router
that stood still catches up, and `kvferry status --kv` says who holds what."""

import json
import os
import signal
import threading
import time

import httpx
import pytest

import cluster as cl

LOST_AFTER_S = 2


@pytest.fixture(scope="module")
def watched():
    """Workers that stand still for 1 s beyond lost_after are killed."""
    with cl.Cluster(workers=3, ratio="1:2", heartbeat={"lost_after": f"{LOST_AFTER_S}s", "hung_after": "1s"}) as one:
        yield one


def ready_again(one, name, before):
    def is_back():
        try:
            now = one.worker(name)
            return now is not None and now["incarnation"] != before["incarnation"] and now["state"] == "ready"
        except httpx.HTTPError:
            return False

    cl.wait_until(is_back, 30, lambda: f"{name} did not come back: {one.worker(name)}")


@pytest.mark.parametrize("name", ["decode-1", "prefill-0"])
def test_a_killed_worker_is_given_up_at_once(watched, name):
    before = watched.worker(name)
    os.kill(before["pid"], signal.SIGKILL)
    killed = time.monotonic()
    cl.wait_until(lambda: (watched.worker(name) or {}).get("incarnation") != before["incarnation"], 5, f"{name} is still there")
    took_s = time.monotonic() - killed
    assert took_s < 0.3 * cl.SLOW, f"{name} was given up after {took_s:.3f} s"
    assert any("its process has ended" in line and name in line for line in watched.logs()["logs/router.log"].splitlines())
    ready_again(watched, name, before)


def test_a_stopped_worker_is_killed_and_replaced(watched):
    before = watched.worker("decode-0")
    os.kill(before["pid"], signal.SIGSTOP)
    ready_again(watched, "decode-0", before)
    assert watched.worker("decode-0")["pid"] != before["pid"]
    status, out, err = watched.kvferry("status", "-f", watched.file)
    assert status == 0, err
    assert "decode-0: its last run stood still for" in out
    watched.assert_clean()


def test_a_router_that_stood_still_catches_up(watched):
    """Its workers drop what it had and begin anew: a request of that moment is answered, not lost."""
    state = json.loads(watched.kvferry("status", "-f", watched.file, "--json")[1])
    pid = next(service["pid"] for service in state["services"] if service["name"] == "router")
    answers = []
    running = threading.Thread(target=lambda: answers.append(watched.stream("Hello", cl.scaled(600), ignore_eos=True)))
    running.start()
    cl.wait_until(lambda: any(worker["running"] for worker in watched.workers()), 20, "nothing runs")
    os.kill(pid, signal.SIGSTOP)
    time.sleep(LOST_AFTER_S + 1.5)
    os.kill(pid, signal.SIGCONT)
    started = time.monotonic()
    late = watched.complete("Good morning", 4, ignore_eos=True)
    assert len(late.token_ids) == 4
    assert time.monotonic() - started < 10 * cl.SLOW  # not a deadline's 120 s
    running.join(timeout=30 * cl.SLOW)
    assert answers, "the stream that ran before waits for a deadline"
    assert answers[0].error is None or answers[0].error["message"], answers[0].error
    logs = watched.logs()
    assert "begins anew" in logs["logs/router.log"] or "began anew" in logs["logs/router.log"]
    assert any("the router is silent" in text and "session=" in text for path, text in logs.items() if "decode" in path)
    watched.assert_clean(timeout_s=20)


def test_status_kv_says_who_holds_what(watched):
    watched.assert_clean()
    status, out, err = watched.kvferry("status", "--kv", "-f", watched.file)
    assert status == 0, out + err
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line}
    totals = [int(rows[name][2]) for name in ("prefill-0", "decode-0", "decode-1")]
    assert min(totals) > 0 and int(rows["sum"][1]) == sum(totals)
    assert "in balance" in out
    stop = threading.Event()
    busy = threading.Thread(target=lambda: watched.stream("Hello", cl.scaled(1500), ignore_eos=True, hang_up=lambda _: stop.is_set()))
    busy.start()
    try:
        cl.wait_until(lambda: any(worker["ledger"]["running"] for worker in watched.workers()), 20, "nothing runs")
        status, out, err = watched.kvferry("status", "--kv", "--json", "-f", watched.file)
    finally:
        stop.set()
        busy.join()
    said = json.loads(out)
    assert status == 0 and said["balanced"], out + err
    assert sum(worker["ledger"]["running"] for worker in said["workers"]) > 0
    assert watched.metric("kvferry_kv_ledger_imbalance") == 0
    assert watched.metric("kvferry_bus_received_total") > 0
    watched.assert_clean()


def test_who_has_not_reported_is_not_said_to_agree(watched):
    """A new router knows nothing of what workers hold; for two seconds it says so."""
    state = json.loads(watched.kvferry("status", "-f", watched.file, "--json")[1])
    cl.wait_until(lambda: watched.http.get("/audit").json()["agree"], 10, "router and workers do not agree")
    os.kill(next(service["pid"] for service in state["services"] if service["name"] == "router"), signal.SIGKILL)
    seen = []

    def agrees():
        try:
            page = watched.http.get("/audit").json()
            seen.append(page)
        except httpx.HTTPError:
            return False
        return len(page["workers"]) == 3 and page["agree"]

    cl.wait_until(agrees, 30, lambda: f"router and workers do not agree: {seen[-1:]}")
    for page in seen:
        silent = [worker for worker in page["workers"] if not worker["reported"]]
        assert page["not_reported"] == len(silent)
        assert all(worker["note"] == "no report yet" for worker in silent)
        assert page["agree"] is (None if silent or not page["workers"] else True), page
    assert any(page["not_reported"] for page in seen), "nobody was seen before it reported: the test says nothing"
    cl.wait_until(lambda: watched.http.get("/ready").status_code == 200, 30, "not ready again")
    watched.assert_clean()


def test_a_pool_that_runs_full_is_counted():
    """Two answers that grow beyond what was predicted, on one decode worker: one of them stands still and moves."""
    names = ("kvferry_worker_suspended_total", "kvferry_worker_moved_total")
    with cl.Cluster(workers=3, ratio="1:2", kv={"memory": "12MiB"}, model={"context": 512}) as one:
        assert [one.metric(name) for name in names] == [0, 0]
        assert all(one.metric("kvferry_worker_stalled_total", worker=worker["name"]) is not None for worker in one.of_role("decode"))
        total = one.of_role("decode")[0]["ledger"]["total"]
        assert total == 34, "the numbers below are for 34 blocks"

        def short(_):
            body = {"model": cl.MODEL_NAME, "messages": [{"role": "user", "content": "Say OK."}], "max_tokens": 100, "temperature": 0}
            answer = one.http.post("/v1/chat/completions", json=body).json()
            assert answer["choices"][0]["finish_reason"] == "stop", answer

        def later(prompt, tokens):
            cl.wait_until(lambda: any(worker["running"] for worker in one.of_role("decode")), 20, "nothing runs")
            return one.stream(prompt, tokens, ignore_eos=True)

        for attempt in range(4):
            # answers are short, as far as either worker knows
            one.together([lambda index=index: short(index) for index in range(16)])
            # one worker is full while the two arrive at the other: 2 blocks each, and 19 at their ends
            answers = one.together([lambda: one.stream([504 + attempt] * 440, 64, ignore_eos=True)]
                                   + [lambda n=n: later([604 + 10 * attempt + n] * 30, 270) for n in range(2)])
            assert [len(answer.token_ids) for answer in answers] == [64, 270, 270], [answer.error for answer in answers]
            one.assert_clean()
            if all(one.metric(name) for name in names):
                break
        suspended, moved = [one.metric(name) for name in names]
        assert suspended >= moved > 0
        assert sum(worker["suspended"] for worker in one.workers()) == suspended
        assert suspended == one.metric("kvferry_sequences_suspended_total") and moved == one.metric("kvferry_moves_total")
        assert one.metric("kvferry_worker_shipped_bytes_total") == one.metric("kvferry_shipped_bytes_total") > 0
