"""Prefill and decode on one GPU, KV over UCX: the answers of the scalar reference."""

import ctypes
import os
import subprocess
import sys

import pytest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "integration"))
import cluster as cl  # noqa: E402

PROMPTS = ["The capital of France is", "Once upon a time, in a small village by the sea, there lived " * 20]


def has_gpu():
    """By the driver's own word."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


@pytest.fixture(scope="module")
def expected():
    if not has_gpu():
        pytest.skip("there is no GPU here")
    with cl.Cluster(prefill={"device": "cpu-ref"}, decode={"device": "cpu-ref"}) as reference:
        return [reference.complete(prompt, 24, ignore_eos=True).token_ids for prompt in PROMPTS]


@pytest.mark.parametrize("prefill, decode", [("cuda", "cuda"), ("cpu", "cuda"), ("cuda", "cpu")])
def test_a_gpu_gives_the_references_tokens(expected, prefill, decode):
    """Attention's sums are not the reference's: a token may differ where two logits nearly tie, so the
    first half of each answer is compared."""
    with cl.Cluster(prefill={"device": prefill}, decode={"device": decode}) as one:
        for prompt, tokens in zip(PROMPTS, expected):
            given = one.complete(prompt, 24, ignore_eos=True).token_ids
            assert given[: len(tokens) // 2] == tokens[: len(tokens) // 2]
        assert one.metric("kvferry_seal_failures_total") == 0


@pytest.mark.skipif(not has_gpu(), reason="there is no GPU here")
def test_ranks_give_one_ranks_tokens(tmp_path, monkeypatch):
    """On a machine with too few GPUs they share one, and exchange their products through memory."""
    monkeypatch.setenv("KVFERRY_SHARE_DEVICE", "1")
    path = tmp_path / "random.gguf"
    subprocess.run([sys.executable, os.path.join(cl.ROOT, "tests", "tools", "make_model.py"), "--tokenizer", cl.MODEL,
                    "--out", str(path)], check=True)
    given = []
    for prefill, decode in ((1, 1), (2, 4)):
        with cl.Cluster(model={"path": str(path), "context": cl.CONTEXT}, kv={"memory": "64MiB"},
                        prefill={"device": "cuda", "tensor_parallel": prefill},
                        decode={"device": "cuda", "tensor_parallel": decode}) as one:
            given.append([one.complete(prompt, 24, ignore_eos=True).token_ids for prompt in PROMPTS])
            assert one.metric("kvferry_seal_failures_total") == 0
    assert given[0] == given[1]
