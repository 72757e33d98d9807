"""Speculative decoding: tokens of the decode worker's processor time with each method, against none, paired.

Two clusters of one prefill and one decode worker with a thread each stand side by side, one with speculation and one
without, and answer the same requests in turns: whatever else the machine does, it does to both. What is compared is the
processor time that the decode worker takes for an answer (on a machine to itself that is the time of its steps), and
the answers, which are the same to the token. The ratio of each pair, its median, and a 95 % interval of that by
resampling pairs.

The draft model is made in the run (tests/tools/make_draft.py), of the model's own first layers and a head fitted to
answers of the model's to prompts of a kind: "records". It is measured on other prompts of that kind, and on "story",
which it was not fitted to. With --shorter it is made of some of the model's layers alone (make_shorter.py).
"""

import json
import pathlib
import random
import site
import statistics
import sys
import tempfile

HELP = "speculative decoding against none, by method and batch"
GOAL_QUOTES, GOAL_ELSE = 1.8, 1.0
QUOTED = (
    "red apple, green pear, yellow quince, blue plum, black cherry, white grape, brown fig, golden peach, dark mulberry, "
    "pale lychee, sour gooseberry, sweet melon, ripe mango, small kumquat, large pomelo, wild strawberry\n"
)
STORY = "Once upon a time in a small town by the sea there lived an old clockmaker who"
NAMES = "Anna Tom Maria John Peter Lucy Karl Emma Paul Nina Oscar Clara Hugo Rosa Felix Ida".split()
CITIES = "Paris Rome Berlin Madrid Vienna Oslo Lisbon Prague Athens Dublin Warsaw Budapest".split()
KINDS = {"draft_model": "records,story"}
FITTED_TO, MEASURED_ON = 1, 2  # seeds of prompts
FITTED_TEXTS, FITTED_TOKENS = 48, 96


def options(parser):
    parser.add_argument("--methods", default="prompt_lookup,draft_model,lookahead")
    parser.add_argument("--batches", default="1,4,16,64")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--layers", type=int, default=2, help="of the draft model, made of the model's own")
    parser.add_argument("--shorter", action="store_true", help="a draft model of the model's own layers and nothing fitted")
    parser.add_argument("--draft", help="a draft model that is there already: a GGUF file")
    parser.add_argument("--kinds", default="", help="of text: quotes, records, story")
    parser.add_argument("--force", action="store_true", help="all drafts, always: what they cost")


def records(seed, count):
    """Beginnings of lists of records, none the same with another seed."""
    rng, texts = random.Random(seed), []
    while len(texts) < count:
        rows = [(row + 1, rng.choice(NAMES), rng.choice(CITIES), rng.randint(20, 69)) for row in range(3)]
        if sum(age for *_, age in rows) % 4 == seed:
            texts.append("[\n" + "".join('  {"id": %d, "name": "%s", "city": "%s", "age": %d},\n' % row for row in rows)
                         + '  {"id": 4,')
    return texts


def prompts(kind, batch):
    """Texts that quote what came before, or none that do; a different beginning each."""
    if kind == "records":
        return records(MEASURED_ON, batch)
    if kind == "quotes":
        return [f"List {n}, three times:\n" + QUOTED * 2 + QUOTED[:20] for n in range(batch)]
    return [f"Story {n}. {STORY}" for n in range(batch)]


def cpu_seconds(pid):
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100


def turn(one, texts, tokens):
    """Seconds of the decode worker's, and the answers."""
    pid = one.of_role("decode")[0]["pid"]
    before = cpu_seconds(pid)
    got = one.together([lambda text=text: one.complete(text, tokens, ignore_eos=True) for text in texts])
    return cpu_seconds(pid) - before, [answer.token_ids for answer in got]


def interval(values):
    rng = random.Random(1)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[1949]


def fitted(context, cl, folder, layers):
    """A draft model fitted to what the model answers to prompts that are not measured."""
    venv, to = context.cache / "draft-venv", f"{folder}/draft.gguf"
    with cl.Cluster(decode={"max_batch": 64}) as one:
        answers = one.together([lambda text=text: one.complete(text, FITTED_TOKENS, ignore_eos=True)
                                for text in records(FITTED_TO, FITTED_TEXTS)])
    texts = pathlib.Path(folder) / "texts.json"
    texts.write_text(json.dumps([answer.prompt_token_ids + answer.token_ids for answer in answers]), encoding="utf-8")
    python = venv / "bin" / "python"
    if not python.exists():
        context.command([sys.executable, "-m", "venv", venv])
        context.command([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "numpy"])
    context.command([python, context.root / "tests" / "tools" / "make_draft.py", cl.MODEL, to, "--texts", texts,
                     "--layers", layers])
    return to


def shorter(context, cl, folder, layers):
    to = f"{folder}/draft.gguf"
    context.command([sys.executable, context.root / "tests" / "tools" / "make_shorter.py", cl.MODEL, to, "--layers", layers])
    return to


def measure(cl, method, more, args):
    """(kind, batch, ratios, accepted share) of each cell."""
    def over(**speculative):
        # room for 64 answers at once
        return {"decode": {"speculative": speculative, "max_batch": 64}, "kv": {"memory": "768MiB"}, "log_level": "info"}

    with cl.Cluster(**over(method="off")) as without, cl.Cluster(**over(method=method, **more)) as with_:
        for kind in (args.kinds or KINDS.get(method, "quotes,story")).split(","):
            for batch in (int(text) for text in args.batches.split(",")):
                texts, ratios = prompts(kind, batch), []
                counts = [with_.metric(f"kvferry_spec_{what}_tokens_total") for what in ("draft", "accepted")]
                for pair in range(args.pairs + 1):  # the first warms caches
                    order = (without, with_) if pair % 2 == 0 else (with_, without)
                    took = {one: turn(one, texts, args.tokens) for one in order}
                    if took[with_][1] != took[without][1]:
                        raise SystemExit(f"speculate: {method} changed an answer")
                    if pair > 0:
                        ratios.append(took[without][0] / max(took[with_][0], 0.01))
                cl.time.sleep(0.5)  # a heartbeat brings the counters
                after = [with_.metric(f"kvferry_spec_{what}_tokens_total") for what in ("draft", "accepted")]
                drafted, accepted = (a - b for a, b in zip(after, counts))
                yield kind, batch, ratios, drafted, accepted


def run(context, args):
    context.build_dir()
    context.command(["bash", "-c", "set -euo pipefail; . deploy/lib.sh; kv_venv httpx"], cwd=context.root)
    for folder in (context.root / ".venv").glob("lib/python*/site-packages"):
        site.addsitedir(str(folder))
    sys.path.insert(0, str(context.root / "tests" / "integration"))
    import cluster as cl  # the same cluster as the tests'

    with tempfile.TemporaryDirectory() as folder:
        for method in args.methods.split(","):
            more = {"adaptive": False} if args.force else {}
            if method == "draft_model":
                make = shorter if args.shorter else fitted
                more["draft_model"] = args.draft or make(context, cl, folder, args.layers)
            for kind, batch, ratios, drafted, accepted in measure(cl, method, more, args):
                low, high = interval(ratios)
                goal = GOAL_QUOTES if (method, kind, batch) == ("prompt_lookup", "quotes", 1) else GOAL_ELSE
                median = statistics.median(ratios)
                result = context.result(f"{method}, {kind}, batch {batch}: processor time without / with", median,
                                        "times", goal=goal)
                # not below without: as far as the pairs can tell
                result.update(met=median >= goal if goal > GOAL_ELSE else high >= goal, value=round(median, 3),
                              interval=[round(low, 3), round(high, 3)], draft_tokens=drafted,
                              accepted_tokens=accepted)
                yield result
