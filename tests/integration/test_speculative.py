"""Speculative decoding in a real cluster: with every method the tokens of every answer are those without, greedy and
drawn, alone and in a crowd, also when a decode worker is killed under them; and what cannot work is refused with its
reason."""

import os
import signal
import subprocess
import sys
import threading

import pytest

import cluster as cl

MAKE_SHORTER = os.path.join(cl.ROOT, "tests", "tools", "make_shorter.py")
MAKE_MODEL = os.path.join(cl.ROOT, "tests", "tools", "make_model.py")
DIALOGUE = (
    "Repeat the list word for word, twice.\nred apple, green pear, yellow quince, blue plum, black cherry\n"
    "red apple, green pear, yellow quince, blue plum, black cherry\nred apple, green pear,"
)
PROMPTS = [
    DIALOGUE,
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n    return",
    "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is",
    "Once upon a time there was a fox who",
    "1, 2, 3, 4, 5, 6, 7,",
]
ANSWER = 48


def requests(one):
    """Every prompt, greedy and with a seed, at the same time."""
    calls = []
    for number, prompt in enumerate(PROMPTS):
        calls.append(lambda prompt=prompt: one.complete(prompt, cl.scaled(ANSWER)))
        calls.append(lambda prompt=prompt, number=number: one.complete(
            prompt, cl.scaled(ANSWER), temperature=0.8, top_p=0.95, seed=number))
    return calls


def answers(one, crowd):
    calls = requests(one)
    got = one.together(calls) if crowd else [call() for call in calls]
    return [(answer.token_ids, answer.finish) for answer in got]


@pytest.fixture(scope="module")
def expected():
    with cl.Cluster() as one:
        alone = answers(one, crowd=False)
        assert one.metric("kvferry_spec_draft_tokens_total") is None
        return alone


@pytest.fixture(scope="module")
def shorter(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("draft") / "shorter.gguf")
    subprocess.run([sys.executable, MAKE_SHORTER, cl.MODEL, path, "--layers", "6"], check=True)
    return path


def method(name, **more):
    return {"decode": {"speculative": {"method": name, **more}}}


def counts(one):
    return [one.metric(f"kvferry_spec_{what}_tokens_total") for what in ("draft", "accepted")]


@pytest.mark.parametrize("name,more", [
    ("prompt_lookup", {"adaptive": False}),
    ("prompt_lookup", {"ngram_min": 2, "draft_tokens": 15}),
    ("lookahead", {"adaptive": False}),
    ("lookahead", {}),
])
def test_answers_are_the_same(expected, name, more):
    with cl.Cluster(**method(name, **more)) as one:
        assert answers(one, crowd=False) == expected
        assert answers(one, crowd=True) == expected
        cl.wait_until(lambda: counts(one)[1] > 0, 5, "no draft was accepted")
        drafted, accepted = counts(one)
        assert drafted >= accepted
        shown = one.of_role("decode")[0]["speculative"]
        assert shown["method"] == name and shown["draft_tokens"] >= shown["accepted_tokens"] > 0


@pytest.mark.parametrize("same", [True, False])
def test_a_draft_model_changes_no_token(expected, shorter, same):
    with cl.Cluster(**method("draft_model", draft_model=cl.MODEL if same else shorter, adaptive=False, draft_tokens=4)) as one:
        assert answers(one, crowd=False) == expected
        assert answers(one, crowd=True) == expected
        cl.wait_until(lambda: counts(one)[1] > 0, 5, "no draft was accepted")
        drafted, accepted = counts(one)
        # what the same model says the same way is always right; the drafts behind an answer's end count
        assert accepted == drafted if same else accepted < drafted


def test_a_killed_worker_changes_no_token(expected, shorter):
    over = method("draft_model", draft_model=shorter, adaptive=False)
    over["workers"], over["ratio"] = 3, "1:2"
    with cl.Cluster(**over) as one:
        calls = requests(one)
        victim = one.of_role("decode")[0]["pid"]
        calls.append(lambda: cl.wait_until(lambda: (one.metric("kvferry_spec_accepted_tokens_total") or 0) > 0, 60, "no draft")
                     and os.kill(victim, signal.SIGKILL))
        got = one.together(calls)[:-1]
        assert [(answer.token_ids, answer.finish) for answer in got] == expected
        cl.wait_until(lambda: len(one.of_role("decode")) == 2, 30, "the worker did not come back")


def test_a_moved_sequence_keeps_its_tokens():
    """Two answers of which the pool holds one, on the only decode worker. It is stopped when it has begun both, until the one
    comes that one of them moves to, drafts and all. The first has the lower priority, so that the second is taken beside it."""
    over = method("prompt_lookup", adaptive=False)
    over.update(workers=2, ratio="1:1", kv={"memory": "12MiB"}, model={"context": 512}, heartbeat={"lost_after": "30s", "hung_after": "60s"})
    prompts = [[604 + 10 * n] * 30 for n in range(2)]
    begun, stopped, answers = [threading.Event(), threading.Event()], threading.Event(), [None, None]
    with cl.Cluster(**over) as one:
        pid = one.worker("decode-0")["pid"]

        def ask(index):
            def note(tokens):
                if tokens >= 2:  # the first comes from the prefill worker
                    begun[index].set()
                if begun[0].is_set() and begun[1].is_set() and not stopped.is_set():
                    stopped.set()
                    os.kill(pid, signal.SIGSTOP)
                return False
            answers[index] = one.stream(prompts[index], 400, hang_up=note, ignore_eos=True, priority=1 - index)

        threads = [threading.Thread(target=ask, args=(index,)) for index in range(2)]
        try:
            for index in range(2):
                threads[index].start()
                assert begun[index].wait(30 * cl.SLOW), one.worker("decode-0")
            assert stopped.wait(10 * cl.SLOW)
            with cl.late_worker(one, "decode-1", workers=3, ratio="1:2", kv={"memory": "64MiB"}):
                os.kill(pid, signal.SIGCONT)
                for thread in threads:
                    thread.join()
                assert [answer.error for answer in answers] == [None, None]
                assert (one.metric("kvferry_moves_total"), one.metric("kvferry_moves_failed_total")) == (1, 0)
                assert counts(one)[1] > 0
                one.assert_clean()
        finally:
            os.kill(pid, signal.SIGCONT)
            for thread in threads:
                thread.join()
    with cl.Cluster() as plain:
        for prompt, answer in zip(prompts, answers):
            assert plain.complete(prompt, 400, ignore_eos=True).token_ids == answer.token_ids



def refused(what, **over):
    folder = cl.Folder(**over)
    try:
        status, out, err = folder.kvferry("up", "-f", folder.file, "--detach")
        text = out + err + "".join(folder.logs().values())
        assert status != 0 and what in text, text[-3000:]
        folder.assert_no_process()
    finally:
        folder.remove()


def test_another_vocabulary_is_refused_with_the_token(tmp_path):
    path = str(tmp_path / "other.gguf")
    subprocess.run([sys.executable, MAKE_MODEL, "--vocab", "300", "--layers", "1", "--out", path], check=True)
    refused("has another vocabulary: the model has 49152 tokens, the draft model 300", **method("draft_model", draft_model=path))


def test_a_broken_draft_model_is_refused_with_the_reason(tmp_path, shorter):
    path = str(tmp_path / "cut.gguf")
    with open(shorter, "rb") as whole, open(path, "wb") as cut:
        cut.write(whole.read(2_000_000))
    refused("cut.gguf", **method("draft_model", draft_model=path))
    refused("missing.gguf", **method("draft_model", draft_model=str(tmp_path / "missing.gguf")))


def test_drafts_at_the_contexts_end(expected):
    """An answer that fills the context to its last place ends there, with and without drafts."""
    got = []
    for name in ("off", "prompt_lookup", "lookahead"):
        over = method(name, adaptive=False)
        over["model"] = {"context": 64}
        with cl.Cluster(**over) as one:
            answer = one.complete([500, 501, 502] * 10, 34, ignore_eos=True)
            got.append((answer.token_ids, answer.finish))
    assert got[0] == got[1] == got[2] and got[0][1] == "length" and len(got[0][0]) == 34


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
