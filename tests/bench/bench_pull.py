"""The second turn of a chat: the first one's answer fetched from the decode side, beside computing it again."""

import random
import statistics
import sys

import bench_overlap as overlap

HELP = ("Time to the first token of a second turn, whose first answer the decode side holds: with fetching its blocks "
        "and with computing them, for answers of several lengths; over shared memory, or a shaped link between two hosts.")
PROMPT = 64
NEW = 16


def options(parser):
    parser.add_argument("--answer", type=int, action="append", help="tokens; may be repeated (default: 32, 128, 512)")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of each length (default 5)")


def cluster(fl, place, fetch):
    """With fetch: the decode side keeps what it has, so that it can be fetched."""
    return fl.Field(place, prefill=1, decode=1, tapped=False, model={"context": 2048}, kv={"memory": "96MiB"},
                    sets={"prefill": ["prefill.chunk_tokens=512"], "decode": [f"kv.prefix_cache={str(fetch).lower()}"]},
                    heartbeat={"interval": "200ms", "lost_after": "10s"})


def turn(fl, field, rng, answer):
    """Two turns: seconds to the second one's first token, whether blocks were fetched for it, and failures of that."""
    prompt = [rng.randrange(100, 40000) for _ in range(PROMPT)]
    first = field.stream(fl.asked(prompt, answer))
    field.assert_clean()
    before = [field.metric(f"kvferry_pulls{name}_total") for name in ("", "_failed")]
    second = field.stream(fl.asked(prompt + first.tokens + [rng.randrange(100, 40000) for _ in range(NEW)], 2))
    if first.error or second.error or len(first.tokens) != answer or len(second.tokens) != 2:
        field.tell_logs()
        sys.exit(f"tests/bench/run pull: a request failed: {first.error or second.error or second.cut}")
    field.assert_clean()
    after = [field.metric(f"kvferry_pulls{name}_total") for name in ("", "_failed")]
    return second.times[0] - second.began, *(new - old for new, old in zip(after, before))


def compare(context, fl, place, answers, rounds):
    with cluster(fl, place, True) as fetches, cluster(fl, place, False) as computes:
        rng = random.Random(3)
        for answer in (16, 64, 64):  # so that the router has measured both
            for field in (fetches, computes):
                turn(fl, field, rng, answer)
        for answer in answers:
            rows = []
            for number in range(rounds):
                fields = (fetches, computes) if number % 2 else (computes, fetches)
                times = {field is fetches: turn(fl, field, rng, answer) for field in fields}
                rows.append((times[True], times[False][0]))
            fetched = 1e3 * statistics.median(row[0][0] for row in rows)
            computed = 1e3 * statistics.median(row[1] for row in rows)
            yield context.result(f"pull_first_token_{place}_answer_of_{answer}", fetched, "ms", "computing", computed)
            yield context.result(f"pull_taken_{place}_answer_of_{answer}", sum(row[0][1] for row in rows), f"of {rounds}")
            yield context.result(f"pull_failed_{place}_answer_of_{answer}", sum(row[0][2] for row in rows), f"of {rounds}")


def run(context, args):
    fl, _ = overlap.harness(context)
    yield from compare(context, fl, "shm", args.answer or (32, 128, 512), args.rounds)
