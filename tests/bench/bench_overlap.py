"""Blocks that leave while later ones are computed, on a link on which shipping takes as long as prefill."""

import random
import re
import signal
import site
import statistics
import sys

HELP = ("Time to the second token, with and without overlap, over a link between two hosts (network namespaces) that is "
        "shaped so that shipping a prompt takes as long as computing it; medians of pairs.")
GOAL = 1.15  # times the larger of prefill alone and shipping alone
POST_GOAL = 0.1  # of the wire time
SHORT = 8


def options(parser):
    parser.add_argument("--tokens", type=int, action="append", help="prompt tokens; may be repeated (default: 512, 2048; short ones first, from which the router learns the link)")
    parser.add_argument("--rounds", type=int, default=7, help="pairs of each length (default 7)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the deployment, for trying something")


def harness(context):
    """The modules of the fault tests: hosts that are namespaces, and a cluster on them."""
    context.build_dir()
    context.command(["bash", "-c", "set -euo pipefail; . deploy/lib.sh; kv_venv httpx; kv_apt_install iproute2"], cwd=context.root)
    for folder in (context.root / ".venv").glob("lib/python*/site-packages"):
        site.addsitedir(str(folder))
    for folder in ("integration", "faults"):
        sys.path.insert(0, str(context.root / "tests" / folder))
    import field
    import hosts
    hosts.sweep()
    return field, hosts


class Case:
    """A cluster with overlap or without."""

    def __init__(self, fl, overlap, sets, place="hosts"):
        self.fl, self.overlap = fl, overlap
        self.field = fl.Field(
            place, prefill=1, decode=1, tapped=False, sets={"prefill": ["prefill.chunk_tokens=512", *sets], "decode": sets},
            model={"context": 4096}, kv={"memory": "192MiB"}, transfer={"overlap": overlap},
            heartbeat={"interval": "200ms", "lost_after": "10s"}, router={"deadlines": {"prefill": "60s", "transfer": "60s"}})

    def shape(self, bytes_per_s):
        rate = int(bytes_per_s * 8)
        if not self.field.network.shape("prefill-0", f"{rate}bit"):
            sys.exit("tests/bench/run overlap: tc could not shape the link (it needs the tbf queueing discipline)")

    def ask(self, rng, tokens, answer):
        """Seconds from the request to each token of the answer."""
        prompt = [rng.randrange(100, 40000) for _ in range(tokens)]
        stream = self.field.stream(self.fl.asked(prompt, answer))
        if stream.error or stream.cut or len(stream.times) != answer:
            self.field.tell_logs()
            sys.exit(f"tests/bench/run overlap: a request failed: {stream.error or stream.cut or stream.finish}")
        return [time - stream.began for time in stream.times]

    def ends(self):
        """What the prefill worker said of each prompt that has ended: {tokens computed: [fields]}, oldest first."""
        found = {}
        for line in self.field.log("prefill-0").splitlines():
            if 'msg="prefill ends"' in line:
                fields = {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)\b", line)}
                found.setdefault(fields["cached"] + fields["computed"], []).append(fields)
        return found

    def token_bytes(self):
        ends = [one for ends in self.ends().values() for one in ends if one["bytes"] and one["computed"] % 16 == 0]
        return ends[-1]["bytes"] / ends[-1]["computed"]

    def posting(self):
        """(posting, wire) in ms over all shipments; the prefill worker is ended for it."""
        service = self.field.services["prefill-0"]
        service.held_down = service.excused = True
        self.field.signal("prefill-0", signal.SIGTERM)
        service.process.wait(30)
        lines = [line for line in self.field.log("prefill-0").splitlines() if 'msg="shipped"' in line]
        return [sum(float(re.search(rf"{key}=([0-9.]+)", line)[1]) for line in lines) for key in ("post_ms", "wire_ms")]


def rounds(on, off, tokens, count):
    """Per round, in seconds: prefill alone, shipping alone, time to the second token with and without overlap."""
    rng = random.Random(tokens)
    bytes_all = on.token_bytes() * tokens
    guess = statistics.median(on.ask(rng, tokens, 1)[0] for _ in range(3))
    rows = []
    for number in range(count):
        for case in (on, off):
            case.shape(bytes_all / guess)
        prefill = on.ask(rng, tokens, 1)[0]
        times = {}
        for case in ((on, off) if number % 2 else (off, on)):
            times[case.overlap] = case.ask(rng, tokens, 4)
        prefill = statistics.mean((prefill, on.ask(rng, tokens, 1)[0]))  # before and after
        late = times[False]
        shipping = late[1] - late[0] - (late[3] - late[2])  # less the decode step in it
        row = {"prefill": prefill, "wire": guess, "shipping": shipping, "on": times[True][1],
               "off": late[1], "first_on": times[True][0], "first_off": late[0]}
        print(f"overlap: {tokens} tokens, " + ", ".join(f"{key} {1e3 * value:.0f} ms" for key, value in row.items()), file=sys.stderr)
        rows.append(row)
        guess = statistics.median(one["prefill"] for one in rows)
    return rows


def report(context, tokens, rows):
    larger = [max(row["prefill"], row["shipping"]) for row in rows]
    for what in ("prefill", "shipping"):
        yield context.result(f"overlap_{what}_alone_{tokens}", 1e3 * statistics.median(row[what] for row in rows), "ms")
    for what, goal in (("on", GOAL), ("off", None)):
        ratio = statistics.median(row[what] / most for row, most in zip(rows, larger))
        value = 1e3 * statistics.median(row[what] for row in rows)
        result = context.result(f"overlap_{what}_second_token_{tokens}", value, "ms", "the larger of the two",
                                1e3 * statistics.median(larger))
        yield {**result, "ratio": round(ratio, 3), "goal": goal, "met": None if goal is None else ratio <= goal}


def crossover(context, case, rng, link):
    """From how many uncached tokens a prompt's groups leave one by one, as the prefill worker has measured by now; and
    in how many shipments a short and a long prompt left."""
    sizes = (SHORT, 512)
    for tokens in sizes:
        case.ask(rng, tokens, 4)
    case.field.assert_clean()
    ends = case.ends()
    yield context.result(f"overlap_from_{link}", ends[512][-1]["overlap_from"], "tokens")
    for tokens in sizes:
        yield context.result(f"overlap_shipments_of_{tokens}_tokens_{link}", ends[tokens][-1]["shipments"], "shipments")


def share(context, link, post_ms, wire_ms):
    """All posting, warming up included, as a share of the link's time."""
    return {**context.result(f"overlap_posting_{link}", post_ms, "ms", "wire time", wire_ms), "ratio": round(post_ms / wire_ms, 4),
            "goal": POST_GOAL, "met": post_ms <= POST_GOAL * wire_ms}


def run(context, args):
    fl, hosts = harness(context)
    why = hosts.why_not()
    if why:
        print(f"tests/bench/run overlap: skipped: {why}", file=sys.stderr)
        return
    on, off = Case(fl, True, args.set), Case(fl, False, args.set)
    with on.field, off.field:
        rng = random.Random(1)
        for case in (on, off):
            for tokens in (64, 512, 512):
                case.ask(rng, tokens, 4)
        yield from crossover(context, on, rng, "unshaped")
        seen = []
        for tokens in args.tokens or (512, 2048):
            rows = rounds(on, off, tokens, args.rounds)
            seen += rows
            yield from report(context, tokens, rows)
        yield from crossover(context, on, rng, "shaped")
        link_ms = 1e3 * sum(row["wire"] for row in seen)
        # over tcp the kernel takes what it can at once: the link's time is what was shaped, and only the rounds' own shipments
        yield share(context, "shaped", on.posting()[0], link_ms)
    fast = Case(fl, True, args.set, "shm")
    with fast.field:
        for tokens in (512,) * 4:
            fast.ask(rng, tokens, 4)
        yield share(context, "shm", *fast.posting())
