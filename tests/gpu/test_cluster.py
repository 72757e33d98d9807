"""Prefill and decode on one GPU, KV over UCX: the answers of the scalar reference."""

import ctypes
import os
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
