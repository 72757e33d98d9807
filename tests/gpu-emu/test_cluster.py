"""A whole cluster whose workers compute on the emulated GPU: the reference's tokens where the reference
is sure, whatever the chunks and the company; K and V go from a GPU's pool to a GPU's pool, or to a
host's, sealed and checked."""

import os

import pytest

import cluster as cl
from conftest import FULL

GAP_SURE = 0.4  # logits: below this an engine with 8-bit activations may choose the other token
TOKENS = 4
SURE = "english_short"  # in golden.json; its first TOKENS tokens are sure
OTHER = [1604, 3987, 46477, 24, 94, 727, 253]  # compared with itself alone

PLUGIN = os.path.join(cl.BUILD, "kernels", "cuda", "kv_cuda_emu.so")

pytestmark = [
    pytest.mark.skipif(not os.path.exists(PLUGIN), reason="built without the emulated GPU (a C++17 compiler)"),
    pytest.mark.skipif(cl.SANITIZED, reason="emulation under a sanitizer takes minutes a token"),
]


def workers_on(prefill, decode):
    return {
        "model": {"context": 256},
        "prefill": {"device": prefill, "chunk_tokens": 16},
        "decode": {"device": decode, "max_batch": 4},
        "kv": {"memory": "64MiB"},
        # kernels of a tenth of a second on the cores that all share
        "heartbeat": {"lost_after": "20s", "hung_after": "60s"},
    }


def ask(one, prompt):
    return one.complete(prompt, TOKENS, ignore_eos=True).token_ids


def assert_sure(golden, tokens):
    case = golden[SURE]["hf_fp32"]
    assert all(gap >= GAP_SURE for gap, _ in case["top2_gap_and_runner_up"][:TOKENS])
    assert tokens == case["ids"][:TOKENS]


def backends(one):
    """What the workers say that they compute on."""
    lines = [line for text in one.logs().values() for line in text.splitlines() if 'msg="loaded"' in line]
    assert len(lines) == 2, lines
    return lines


def test_tokens_of_the_emulated_gpu_are_the_references(golden):
    with cl.Cluster(**workers_on("cuda-emu", "cuda-emu")) as one:
        assert all("cuda-emu emulated" in line for line in backends(one)), backends(one)
        prompts = [golden[SURE]["prompt_ids"], OTHER]
        alone = [ask(one, prompt) for prompt in prompts]
        assert_sure(golden, alone[0])
        assert one.together([lambda prompt=prompt: ask(one, prompt) for prompt in prompts]) == alone
        cl.wait_until(lambda: one.metric("kvferry_shipped_bytes_total") > 0, 20, "nothing was shipped")


@pytest.mark.skipif(not FULL, reason="with --full: the other ways that a pool's blocks may go")
@pytest.mark.parametrize("prefill,decode", [("cuda-emu", "cpu-ref"), ("cpu-ref", "cuda-emu")])
def test_a_gpu_and_a_host_exchange_blocks(golden, prefill, decode):
    """An emulated GPU's pool is host memory; with a real one kvferry check refuses the pair (tests/gpu/test_cluster.py)."""
    with cl.Cluster(**workers_on(prefill, decode)) as one:
        assert_sure(golden, ask(one, golden[SURE]["prompt_ids"]))
