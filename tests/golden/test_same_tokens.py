"""The same tokens whatever the company: ratio, carrier, chunks, batch, cache, kernels; and the
reference's tokens as far as the reference itself is sure."""

import itertools
import random

import pytest

import cluster as cl
from conftest import FULL, SEED

RATIOS = {"1:1": 2, "2:1": 3, "1:2": 3}
TRANSPORTS = ("shm", "tcp")
CHUNKS = (16, 100, 512)
DEVICES = ("cpu", "cpu-ref")
GAP_SURE = 0.4  # logits: below this an engine with 8-bit activations may choose the other token
TOKENS = {"cpu": 12 if cl.SANITIZED else 24, "cpu-ref": 6}
LONG = "long_1500"


def combinations():
    """All of them with --full. Else a few, by the seed, in which every value of every kind occurs."""
    every = list(itertools.product(RATIOS, TRANSPORTS, CHUNKS, DEVICES))
    if FULL:
        return every
    rng = random.Random(SEED)
    if cl.SANITIZED:
        return [(rng.choice(list(RATIOS)), transport, 16, "cpu") for transport in TRANSPORTS]
    ratios, chunks = list(RATIOS), list(CHUNKS)
    rng.shuffle(ratios)
    rng.shuffle(chunks)
    transports = [TRANSPORTS[(SEED + index) % 2] for index in range(3)]
    fast = list(zip(ratios, transports, chunks, ("cpu",) * 3))
    return [*fast, (rng.choice(ratios), TRANSPORTS[(SEED + 1) % 2], rng.choice(chunks), "cpu-ref")]


def sure_length(case):
    """Tokens of the reference before its first step that it was not sure about."""
    for index, (gap, _) in enumerate(case["hf_fp32"]["top2_gap_and_runner_up"]):
        if gap < GAP_SURE:
            return index
    return len(case["hf_fp32"]["ids"])


def prompts_for(golden, device):
    names = [name for name in golden if name != LONG or (device == "cpu" and not cl.SANITIZED)]
    return {name: golden[name]["prompt_ids"] for name in names}


def eight(prompts):
    names = list(prompts)
    return [names[index % len(names)] for index in range(8)]


@pytest.fixture(scope="session")
def expected(golden):
    """Tokens of a plain cluster, asked one by one: what all others must equal."""
    with cl.Cluster() as one:
        return {
            name: one.complete(ids, TOKENS["cpu"], ignore_eos=True).token_ids
            for name, ids in prompts_for(golden, "cpu").items()
        }


def test_greedy_tokens_equal_the_reference_where_it_is_sure(expected, golden):
    compared = 0
    for name, tokens in expected.items():
        assert len(tokens) == TOKENS["cpu"], name
        sure = min(sure_length(golden[name]), len(tokens))
        assert tokens[:sure] == golden[name]["hf_fp32"]["ids"][:sure], name
        compared += sure
    assert compared >= 20, "the reference is too unsure for this test to mean anything"


@pytest.mark.parametrize("ratio,transport,chunk,device", combinations())
def test_same_tokens(expected, golden, rng, ratio, transport, chunk, device):
    prompts = prompts_for(golden, device)
    count = TOKENS[device]
    want = {name: expected[name][:count] for name in prompts}
    changes = {
        "workers": RATIOS[ratio], "ratio": ratio, "transfer": {"transport": transport},
        "prefill": {"chunk_tokens": chunk, "device": device}, "decode": {"device": device},
    }

    def ask(name):
        return one.complete(prompts[name], count, ignore_eos=True).token_ids

    def alone():
        for name in prompts:
            assert ask(name) == want[name], (name, "alone")

    def batched():
        names = eight(prompts)
        answers = one.together([lambda name=name: ask(name) for name in names])
        for name, answer in zip(names, answers):
            assert answer == want[name], (name, "in a batch of 8")

    with cl.Cluster(**changes) as one:
        steps = [alone, batched]  # the first of them is cold, the second warm
        rng.shuffle(steps)
        for step in steps:
            step()
        one.assert_clean()
        if steps[0] is alone and device == "cpu" and not cl.SANITIZED:
            alone()  # warm too
        lanes = [str(worker.get("lanes") or worker.get("transfer")) for worker in one.of_role("prefill")]
        assert all(transport in lane or (transport == "shm" and "posix" in lane) for lane in lanes), lanes


def test_a_warm_prefix_is_used_and_changes_nothing(plain, rng):
    """A prompt that shares whole blocks with one before: fewer tokens are computed, none differ."""
    prefix = [rng.randrange(100, 40000) for _ in range(96)]
    first, second = prefix + [5, 6, 7], prefix + [8, 9]
    cold = plain.complete(second, 12, ignore_eos=True)
    plain.complete(first, 12, ignore_eos=True)
    warm = plain.complete(second, 12, ignore_eos=True)
    assert warm.token_ids == cold.token_ids
    details = warm.usage.get("prompt_tokens_details") or {}
    assert details.get("cached_tokens", 0) >= 80, warm.usage
    assert warm.usage["prompt_tokens"] == len(second)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33, 48])
def test_prompts_around_a_block_border(plain, rng, length):
    """Asked twice: the second time whole blocks are held already, a full hit included."""
    prompt = [rng.randrange(100, 40000) for _ in range(length)]
    cold = plain.complete(prompt, 20, ignore_eos=True)
    warm = plain.complete(prompt, 20, ignore_eos=True)
    assert len(cold.token_ids) == 20
    assert warm.token_ids == cold.token_ids


def test_seeded_sampling_is_reproducible_in_any_company(plain, rng):
    seed = rng.randrange(1, 2**31)
    options = {"temperature": 0.9, "top_p": 0.95, "seed": seed, "ignore_eos": True}
    prompt = "Once upon a time"
    alone = plain.complete(prompt, 24, **options).token_ids
    calls = [lambda: plain.complete(prompt, 24, **options)]
    calls += [lambda n=n: plain.complete(f"Another story, number {n}", 24, ignore_eos=True) for n in range(7)]
    assert plain.together(calls)[0].token_ids == alone
    others = [plain.complete(prompt, 24, **{**options, "seed": seed + n}).token_ids for n in range(1, 4)]
    assert any(other != alone for other in others), "the seed has no effect"


def test_streamed_and_whole_answers_are_the_same(plain):
    whole = plain.complete("The three primary colours are", 24, ignore_eos=True)
    streamed = plain.stream("The three primary colours are", 24, ignore_eos=True)
    assert (streamed.error, streamed.token_ids, streamed.text) == (None, whole.token_ids, whole.text)
    assert streamed.finish == whole.finish == "length"
