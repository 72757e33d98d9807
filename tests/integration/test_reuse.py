"""What is there already is neither sent nor computed again: blocks that the decode side holds, and the last answer's
blocks, which the prefill side fetches from the decode side when that is cheaper than computing them."""

import re

import pytest

import cluster as cl

BLOCK = 16


@pytest.fixture(scope="module")
def pair():
    with cl.Cluster() as one:
        yield one


def random_tokens(rng, count):
    return [rng.randrange(100, 40000) for _ in range(count)]


def counters(one):
    names = ("kvferry_pulls_total", "kvferry_pulls_failed_total", "kvferry_shipped_bytes_total")
    return [one.metric(name) for name in names]


def ask(one, prompt, answer):
    """An answer, and by how much it moved (pulls, failed pulls, bytes shipped)."""
    before = counters(one)
    got = one.complete(prompt, answer, ignore_eos=True)
    one.assert_clean()
    return got, [after - old for after, old in zip(counters(one), before)]


@pytest.fixture(scope="module")
def each(pair):
    """Bytes of one block over all layers: what a prompt of three whole blocks shipped, nothing of which was there."""
    _, (_, _, shipped) = ask(pair, [40001] * (3 * BLOCK), 2)
    assert shipped > 0 and shipped % 3 == 0
    return shipped // 3


def last_prefill(one, name="prefill-0"):
    """The fields of the newest `prefill ends` line."""
    log = next(text for path, text in one.logs().items() if path.endswith(f"{name}.log"))
    line = [line for line in log.splitlines() if 'msg="prefill ends"' in line][-1]
    return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)\b", line)}


@pytest.mark.parametrize("held,fresh", [(0, 5 * BLOCK), (4, 3 * BLOCK), (7, 2 * BLOCK + 5), (9, 3)])
def test_only_missing_blocks_are_sent(pair, each, rng, held, fresh):
    head = random_tokens(rng, held * BLOCK)
    if held:
        # the answer's second token is written behind the head, so that every block of it is whole
        _, (_, _, shipped) = ask(pair, head, 2)
        assert shipped == held * each
    prompt = head + random_tokens(rng, fresh)
    _, (pulls, _, shipped) = ask(pair, prompt, 2)
    missing = (len(prompt) + BLOCK - 1) // BLOCK - held
    assert pulls == 0
    assert shipped == missing * each, f"{shipped / each} blocks were sent, {missing} were missing"
    assert last_prefill(pair)["held_blocks"] == held


def test_a_prompt_that_is_all_there_sends_its_last_block_at_most(pair, each, rng):
    prompt = random_tokens(rng, 6 * BLOCK + 3)
    first, _ = ask(pair, prompt, 8)
    again, (_, _, shipped) = ask(pair, prompt, 8)
    assert again.token_ids == first.token_ids
    assert shipped == each  # the partial block at its end


@pytest.fixture(scope="module")
def forgetful():
    """A cluster that keeps nothing: what is right."""
    with cl.Cluster(kv={"prefix_cache": False}) as one:
        yield one


def test_the_second_turn_fetches_the_first_ones_answer(pair, forgetful, rng):
    prompt = random_tokens(rng, cl.scaled(60))
    answer = cl.scaled(300)
    first, (pulls, _, _) = ask(pair, prompt, answer)
    assert pulls == 0
    turn = prompt + first.token_ids + random_tokens(rng, 20)
    second, (pulls, failed, _) = ask(pair, turn, 12)
    if cl.SANITIZED and pulls == 0:
        pytest.skip("with the sanitizers' prices and a short answer, computing was cheaper")
    assert (pulls, failed) == (1, 0)
    # all whole blocks but perhaps the one that ends with the last token, which was never written
    known = (len(prompt) + answer - 1) // BLOCK * BLOCK
    said = last_prefill(pair)
    assert said["cached"] == known and said["computed"] == len(turn) - known
    assert second.usage["prompt_tokens_details"]["cached_tokens"] == known
    assert second.token_ids == forgetful.complete(turn, 12, ignore_eos=True).token_ids
    # once fetched they are there
    third, (pulls, _, _) = ask(pair, turn + second.token_ids[:4], 4)
    assert pulls == 0 and third.token_ids == second.token_ids[4:8]


def test_a_second_turn_without_a_whole_new_block_fetches_nothing(pair, rng):
    prompt = random_tokens(rng, 4 * BLOCK + 1)
    first, _ = ask(pair, prompt, 8)  # its tokens lie in the prompt's last block
    _, (pulls, failed, _) = ask(pair, prompt + first.token_ids + random_tokens(rng, 30), 4)
    assert (pulls, failed) == (0, 0)


def test_without_a_cache_at_decode_nothing_is_fetched(forgetful, rng):
    prompt = random_tokens(rng, 40)
    first, _ = ask(forgetful, prompt, 60)
    _, (pulls, failed, _) = ask(forgetful, prompt + first.token_ids + random_tokens(rng, 10), 4)
    assert (pulls, failed) == (0, 0)
