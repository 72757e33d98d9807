"""Start, stop, ratio; answers of one token; ends of text; clients that go away."""

import threading
import time

import pytest

import cluster as cl
from conftest import FULL


def test_ratio_2_to_1_with_3_workers_is_2_and_1():
    with cl.Cluster(workers=3, ratio="2:1") as one:
        assert [worker["name"] for worker in one.of_role("prefill")] == ["prefill-0", "prefill-1"]
        assert [worker["name"] for worker in one.of_role("decode")] == ["decode-0"]
        assert len(one.complete("Hello", 4, ignore_eos=True).token_ids) == 4


def test_down_ends_exactly_what_up_started():
    with cl.Cluster() as other, cl.Cluster() as one:
        assert len(one.processes()) >= 3, one.processes()
        one.down()
        assert other.http.get("/ready").status_code == 200
        assert len(other.complete("Hello", 2, ignore_eos=True).token_ids) == 2
        one.up()
        assert len(one.complete("Hello", 2, ignore_eos=True).token_ids) == 2


def test_status_tells_every_service(plain):
    status, out, err = plain.kvferry("status", "-f", plain.file)
    assert status == 0, err
    for name in ("router", "prefill-0", "decode-0"):
        assert name in out, out


def test_health_and_ready(plain):
    assert plain.http.get("/health").status_code == 200
    assert plain.http.get("/ready").status_code == 200


def shipped_bytes(one):
    value = one.metric("kvferry_shipped_bytes_total")
    assert value is not None, "no metric kvferry_shipped_bytes_total"
    return value


def test_an_answer_of_one_token_never_ships(plain, rng):
    prompt = [rng.randrange(100, 40000) for _ in range(50)]
    before = shipped_bytes(plain)
    answer = plain.complete(prompt, 1, ignore_eos=True)
    assert len(answer.token_ids) == 1 and answer.finish == "length"
    plain.assert_clean()
    assert shipped_bytes(plain) == before
    again = plain.complete(prompt, 3, ignore_eos=True)
    assert again.token_ids[0] == answer.token_ids[0]
    plain.assert_clean()
    assert shipped_bytes(plain) > before, "the counter does not count: the test above says nothing"


@pytest.fixture(scope="module")
def ends_at_once(golden):
    """Prompt ids whose first greedy token is an end of text: a golden prompt up to where it ended."""
    for case in golden.values():
        at = case["hf_fp32"].get("eos_at")
        if at is not None and case["hf_fp32"]["top2_gap_and_runner_up"][at][0] >= 0.4:
            return case["prompt_ids"] + case["hf_fp32"]["ids"][:at]
    pytest.skip("no golden prompt ends with certainty")


def test_end_of_text_as_first_token_ends_the_request(plain, ends_at_once):
    answer = plain.complete(ends_at_once, 8)
    assert answer.finish == "stop" and answer.text == ""
    assert len(answer.token_ids) <= 1
    plain.assert_clean()
    streamed = plain.stream(ends_at_once, 8)
    assert (streamed.error, streamed.finish, streamed.text) == (None, "stop", "")


def test_ignore_eos_goes_on_after_the_end_of_text(plain, ends_at_once):
    answer = plain.complete(ends_at_once, 8, ignore_eos=True)
    assert answer.finish == "length" and len(answer.token_ids) == 8


def test_the_contexts_end_ends_an_answer(plain):
    context = plain.deployment["model"]["context"]
    answer = plain.complete([504] * (context - 3), 3, ignore_eos=True)
    assert answer.finish == "length" and len(answer.token_ids) == 3
    refused = plain.complete([504] * (context + 1), 3, expect=400)
    assert refused.status == 400 and str(context) in refused.error["message"]


@pytest.mark.parametrize("round_number", range(40 if FULL else 3 if cl.SANITIZED else 8))
def test_a_client_that_hangs_up_leaves_nothing_behind(plain, rng, round_number):
    """At a random moment: while queued, in prefill, while blocks travel, in decode."""
    prompt = [rng.randrange(100, 40000) for _ in range(cl.scaled(rng.choice((20, 200, 900))))]
    if rng.random() < 0.5:
        after = rng.randrange(0, 12)
        plain.stream(prompt, 200, ignore_eos=True, hang_up=lambda tokens: tokens >= after)
    else:
        delay_s = rng.random() * (0.6 if len(prompt) > 100 else 0.2)
        client = cl.httpx.Client(base_url=plain.base)
        body = plain.body(prompt, 200, ignore_eos=True)

        def post():
            try:
                client.post("/v1/completions", json=body, timeout=delay_s)
            except cl.httpx.TimeoutException:
                pass

        thread = threading.Thread(target=post)
        thread.start()
        thread.join()
        client.close()
    plain.assert_clean()


def test_a_crowd_half_of_which_leaves(plain, rng):
    """Those who stay get what they would have got alone."""
    want = plain.complete("A list of animals:", 24, ignore_eos=True).token_ids
    moments = [rng.randrange(0, 20) for _ in range(12)]

    def stay():
        return plain.complete("A list of animals:", 24, ignore_eos=True).token_ids

    def leave(moment):
        return plain.stream(f"Number {moment}, and", 200, ignore_eos=True, hang_up=lambda tokens: tokens >= moment)

    calls = [stay if index % 2 else (lambda moment=moment: leave(moment)) for index, moment in enumerate(moments)]
    results = plain.together(calls)
    assert all(result == want for result in results[1::2])
    plain.assert_clean()


def test_more_requests_than_blocks_wait_and_are_all_served():
    """A pool of few blocks: requests queue for room, nobody is lost, nothing deadlocks."""
    with cl.Cluster(kv={"memory": "8MiB" if cl.SANITIZED else "24MiB"}) as one:
        calls = [
            lambda n=n: one.complete([504 + n] * cl.scaled(200), 24, ignore_eos=True).token_ids for n in range(8)
        ]
        answers = one.together(calls)
        assert [len(answer) for answer in answers] == [24] * 8
        assert answers[3] == one.complete([507] * cl.scaled(200), 24, ignore_eos=True).token_ids


def test_a_request_that_can_never_fit_is_refused():
    with cl.Cluster(kv={"memory": "3MiB" if cl.SANITIZED else "12MiB"}) as one:
        started = time.monotonic()
        answer = one.complete([504] * cl.scaled(1500), 64, expect=None)
        assert answer.status in (400, 413, 429, 503), answer.status
        assert answer.error["message"]
        assert time.monotonic() - started < 20 * cl.SLOW
        assert len(one.complete("Hello", 4, ignore_eos=True).token_ids) == 4
