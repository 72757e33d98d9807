"""KV of one byte a value through a whole cluster: shipped, cached, fetched back, moved to other splits and made again
after a death, the tokens are the same, whatever computes them."""

import os
import signal
import subprocess
import sys
import threading

import pytest

import cluster as cl

FORMATS = ["int8", "fp8_e4m3"]
TOKENS = cl.scaled(48)


def cluster(dtype, **changes):
    return cl.Cluster(**cl.merged({"kv": {"dtype": dtype}}, changes))


def random_tokens(rng, count):
    return [rng.randrange(100, 40000) for _ in range(count)]


@pytest.fixture(scope="module")
def prompts():
    return ["Once upon a time", "The ship left the harbour before dawn, and nobody on the quay " * 8,
            "A list of rivers, of towns and of the people who live in them. " * 20]


def answers(one, prompts):
    got = one.together([lambda p=p: one.complete(p, TOKENS, ignore_eos=True) for p in prompts])
    return [answer.token_ids for answer in got]


@pytest.fixture(scope="module")
def want(prompts):
    """{format: answers}, one request after the other, nothing kept, on AVX2 alone."""
    said = {}
    for dtype in FORMATS:
        with cluster(dtype, kv={"prefix_cache": False}, prefill={"device": "cpu-avx2"}, decode={"device": "cpu-avx2"}) as one:
            said[dtype] = [one.complete(prompt, TOKENS, ignore_eos=True).token_ids for prompt in prompts]
            one.assert_clean()
    return said


@pytest.mark.parametrize("dtype", FORMATS)
def test_the_tokens_do_not_depend_on_the_company(prompts, want, dtype):
    with cluster(dtype) as one:
        assert answers(one, prompts) == want[dtype]
        assert answers(one, prompts) == want[dtype]  # by the prefix cache
        assert one.metric("kvferry_shipped_bytes_total") > 0
        one.assert_clean()


def test_a_block_is_little_more_than_half_of_f16s(rng):
    shipped = {}
    for dtype in ("f16", "int8"):
        with cluster(dtype) as one:
            one.complete(random_tokens(rng, 48), 2, ignore_eos=True)
            shipped[dtype] = one.metric("kvferry_shipped_bytes_total")
    # 64 codes and a scale of four bytes against 64 values of two
    assert shipped["int8"] * 128 == shipped["f16"] * 68


def test_the_second_turn_fetches_the_first_ones_answer(rng):
    prompt, answer = random_tokens(rng, cl.scaled(60)), cl.scaled(300)
    with cluster("int8", kv={"prefix_cache": False}) as forgetful, cluster("int8") as one:
        first = one.complete(prompt, answer, ignore_eos=True)
        turn = prompt + first.token_ids + random_tokens(rng, 20)
        second = one.complete(turn, 12, ignore_eos=True)
        assert cl.SANITIZED or one.metric("kvferry_pulls_total") == 1
        assert one.metric("kvferry_pulls_failed_total") == 0
        assert second.token_ids == forgetful.complete(turn, 12, ignore_eos=True).token_ids
        one.assert_clean()


def test_a_killed_decode_worker_costs_no_token(prompts, want):
    with cluster("int8", workers=3, ratio="1:2") as one:
        begun, results = threading.Event(), []

        def stream(at):
            def note(tokens):
                if tokens > 3:
                    begun.set()
                return False
            results.append((at, one.stream(prompts[at], TOKENS, hang_up=note, ignore_eos=True)))

        threads = [threading.Thread(target=stream, args=(at % len(prompts),)) for at in range(2 * len(prompts))]
        victims = [one.worker(name) for name in ("decode-0", "decode-1")]
        for thread in threads:
            thread.start()
        assert begun.wait(60)
        victim = max(victims, key=lambda w: one.worker(w["name"])["running"])
        os.kill(victim["pid"], signal.SIGKILL)
        for thread in threads:
            thread.join()
        for at, answer in results:
            assert answer.error is None, answer.error
            assert answer.token_ids == want["int8"][at]


def test_any_split_gives_the_same_tokens(tmp_path, prompts):
    model = str(tmp_path / "random.gguf")
    subprocess.run([sys.executable, os.path.join(cl.ROOT, "tests", "tools", "make_model.py"), "--tokenizer", cl.MODEL,
                    "--out", model], check=True)
    said = []
    for prefill, decode in ((1, 1), (2, 1)):
        with cluster("int8", model={"path": model, "context": cl.CONTEXT}, kv={"memory": "64MiB"},
                     prefill={"tensor_parallel": prefill, "chunk_tokens": 64}, decode={"tensor_parallel": decode}) as one:
            said.append(answers(one, prompts))
            one.assert_clean()
    assert said[0] == said[1]


def test_what_no_worker_reads_is_refused_where_it_stands():
    folder = cl.Folder(kv={"dtype": "int8"}, decode={"device": "cuda"})
    try:
        rc, out, err = folder.kvferry("check", "-f", folder.file)
        with open(folder.file, encoding="utf-8") as file:
            line = next(at for at, text in enumerate(file, 1) if "dtype" in text)
        assert rc != 0 and not out
        assert f"{folder.file}:{line}:" in err and "kv.dtype: int8 is computed by CPUs alone so far" in err, err
    finally:
        folder.remove()
