"""Processes that stand still, die together, or are ended under load."""

import contextlib
import os
import signal
import threading
import time

import pytest

import cluster as cl
from conftest import FULL, SEED


def pid_of(one, service):
    """Of a worker or the router, from the processes themselves: also when no router answers."""
    for pid, command in one.processes().items():
        if f"--name {service} " in command or (service == "router" and "/router " in command):
            return pid
    return None


def wait_all_ready(one, count, timeout_s=40):
    def there():
        try:
            workers = one.workers()
            return one.http.get("/ready").status_code == 200 and [w["state"] for w in workers] == ["ready"] * count
        except cl.httpx.HTTPError:
            return False

    cl.wait_until(there, timeout_s, "the cluster is not ready again")


def in_background(calls):
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    return threads


@pytest.fixture(scope="module")
def impatient():
    """A pool that two long prompts nearly fill, so that freed blocks are used again at once; small
    chunks, so that shipping takes a while."""
    with cl.Cluster(workers=3, ratio="2:1", model={"context": 2048}, heartbeat={"lost_after": "1s"}, kv={"memory": "96MiB"},
                    prefill={"threads": 1, "chunk_tokens": 64}) as one:
        wait_all_ready(one, 3)  # up waits for them too, but not for ever
        yield one


VICTIMS = ("prefill-0", "prefill-1", "decode-0")


@pytest.mark.parametrize("name", VICTIMS if FULL else [VICTIMS[SEED % 2], VICTIMS[2]])
def test_a_worker_that_stood_still_for_too_long_is_started_anew(impatient, rng, name):
    """While it stands still nobody waits for it; when it goes on, what it writes hurts nobody."""
    prompts = [[rng.randrange(100, 40000) for _ in range(1200)] for _ in range(2)]
    others = [[rng.randrange(100, 40000) for _ in range(100)] for _ in range(4)]
    before = impatient.worker(name)["incarnation"]
    threads = in_background([lambda prompt=prompt: impatient.stream(prompt, 4, ignore_eos=True) for prompt in prompts])
    time.sleep(0.2 + rng.random() * 0.5)
    pid = pid_of(impatient, name)
    os.kill(pid, signal.SIGSTOP)
    try:
        cl.wait_until(lambda: impatient.worker(name) is None, 10, "a silent worker is kept")
        calls = [lambda prompt=prompt: impatient.complete(prompt, 40, expect=None, ignore_eos=True) for prompt in others]
        resume = threading.Timer(0.5, os.kill, (pid, signal.SIGCONT))
        resume.start()
        answers = impatient.together(calls)
        resume.join()
    finally:
        with contextlib.suppress(ProcessLookupError):  # it has gone on, heard, and ended
            os.kill(pid, signal.SIGCONT)
    for thread in threads:
        thread.join()
    wait_all_ready(impatient, 3)
    assert impatient.worker(name)["incarnation"] != before
    impatient.assert_clean()
    for prompt, answer in zip(others, answers):
        assert answer.status in (200, 503), answer.error
        if answer.status == 200:
            assert answer.token_ids == impatient.complete(prompt, 40, ignore_eos=True).token_ids


def test_a_router_that_stood_still_keeps_its_workers(impatient):
    """Their heartbeats wait in its sockets: its own absence says nothing about them."""
    before = {w["name"]: w["incarnation"] for w in impatient.workers()}
    pid = pid_of(impatient, "router")
    os.kill(pid, signal.SIGSTOP)
    time.sleep(3)
    os.kill(pid, signal.SIGCONT)
    time.sleep(1.5)  # who is given up is so by now
    wait_all_ready(impatient, 3)
    assert {w["name"]: w["incarnation"] for w in impatient.workers()} == before
    assert impatient.complete("The sea", 12, ignore_eos=True).token_ids
    impatient.assert_clean()


def test_a_prefill_worker_given_up_by_a_router_that_died_serves_the_next_one():
    with cl.Cluster(heartbeat={"lost_after": "1s"}) as one:
        wait_all_ready(one, 2)
        before = one.worker("prefill-0")["incarnation"]
        pid = pid_of(one, "prefill-0")
        os.kill(pid, signal.SIGSTOP)
        try:
            cl.wait_until(lambda: one.worker("prefill-0") is None, 10, "a silent worker is kept")
            time.sleep(0.3)  # the decode worker has heard of it too
            os.kill(pid_of(one, "router"), signal.SIGKILL)
        finally:
            os.kill(pid, signal.SIGCONT)
        wait_all_ready(one, 2)
        assert one.worker("prefill-0")["incarnation"] == before
        assert one.complete("The sea", 12, ignore_eos=True).token_ids


@pytest.mark.parametrize("round_number", range(6 if FULL else 2))
def test_a_router_and_a_prefill_worker_killed_together_leave_no_block_behind(impatient, rng, round_number):
    """The new router has never heard of the old writer, so that no message tells of its death."""
    def ask(prompt):
        try:
            impatient.stream(prompt, 20, ignore_eos=True)
        except cl.httpx.HTTPError:
            pass  # its router is dead

    want = impatient.complete("The sea", 12, ignore_eos=True).token_ids
    prompts = [[rng.randrange(100, 40000) for _ in range(rng.choice((300, 1200)))] for _ in range(4)]
    threads = in_background([lambda prompt=prompt: ask(prompt) for prompt in prompts])
    time.sleep(0.2 + rng.random())
    for pid in [pid_of(impatient, name) for name in ("router", f"prefill-{rng.randrange(2)}")]:
        os.kill(pid, signal.SIGKILL)
    for thread in threads:
        thread.join()
    wait_all_ready(impatient, 3)
    impatient.assert_clean()
    assert impatient.complete("The sea", 12, ignore_eos=True).token_ids == want


@pytest.mark.skipif(not FULL, reason="the back-off makes it long: --full")
def test_a_service_is_restarted_however_often_it_dies(impatient):
    for _ in range(8):
        pid = cl.wait_until(lambda: pid_of(impatient, "prefill-0"), 20, "prefill-0 is not restarted")
        os.kill(pid, signal.SIGKILL)
        cl.wait_until(lambda pid=pid: pid_of(impatient, "prefill-0") != pid, 5, "prefill-0 survives SIGKILL")
    wait_all_ready(impatient, 3)
    impatient.assert_clean()


def test_down_under_load_answers_everybody():
    """Whoever is not answered in full hears why; nobody is cut off without a word."""
    with cl.Cluster(model={"context": 2048}) as one:
        results = {}

        def ask(number):
            try:
                if number % 2:
                    results[number] = one.stream(f"Story {number}:", 1500, ignore_eos=True)
                else:
                    results[number] = one.complete(f"Story {number}:", 1500, expect=None, ignore_eos=True)
            except cl.httpx.HTTPError as error:
                results[number] = error

        threads = in_background([lambda number=number: ask(number) for number in range(10)])
        cl.wait_until(lambda: one.metric("kvferry_requests_active") == 10, 10, "ten requests in flight")
        one.down()
        for thread in threads:
            thread.join()
        for number, answer in sorted(results.items()):
            assert isinstance(answer, cl.Answer), f"{number}: {answer!r}"
            if answer.error is not None:
                assert answer.status in (200, 503) and answer.error["type"] != "cut", (number, answer.error)
        one.up()  # the end of the context checks a running cluster


def test_a_prompt_that_fits_no_prefill_pool_is_the_clients_error():
    """An answer of one token asks for no lease: the prefill worker is the one who says no."""
    with cl.Cluster(kv={"memory": "12MiB"}, model={"context": 2048}) as one:
        for max_tokens in (1, 2):
            answer = one.complete([504] * 1500, max_tokens, expect=400)
            assert answer.status == 400 and "KV blocks" in answer.error["message"], answer.error


def test_pools_that_are_more_than_the_machine_has_are_refused_with_both_sizes():
    machine_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    folder = cl.Folder(kv={"memory": f"{int(machine_gib * 0.7) + 1}GiB"})
    try:
        status, _, err = folder.kvferry("up", "-f", folder.file, "--detach")
        assert status != 0
        assert "kv.memory" in err and f"{machine_gib:.2f} GiB" in err, err
        assert len(err.strip().splitlines()) == 1, err
        folder.assert_no_process()
    finally:
        folder.remove()
