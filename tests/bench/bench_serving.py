"""Serving over HTTP: a cluster of one prefill and one decode worker, a thread each, beside llama-server with two threads.

A public load generator (AIPerf) asks each server for answers of 64 tokens to prompts of 512, none of which was ever asked
before: so many at once, or at Poisson rates. A round is one turn of every server through all loads; only one server runs at
a time, started for its turn. A figure is the median of the rounds' figures. Rates and what counts as good service follow
from a first turn without load, so that they fit the machine.
"""

import contextlib
import pathlib
import site
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

import llama_cpp
import load

HELP = "A 1:1 cluster beside llama-server under load: TTFT, TPOT, worst gap, tokens/s, goodput; in turns, medians."
MODEL = "models/SmolLM2-135M-Instruct.Q4_1.gguf"
SERVERS = ("kvferry Q4_1", "llama.cpp Q4_1", "llama.cpp Q4_0")
PROMPT, ANSWER = 512, 64
SLOTS = 16                  # sequences that llama-server and the decode worker run at once
SLOT_TOKENS = 1024          # room for each of them
SLO_FIRST, SLO_EACH = 5, 4  # good service: so many times the best server's figures without load
GAP_GOAL = 3                # the worst gap between two tokens of a stream, in TPOTs
CALIBRATION = 4             # requests of the turn without load
# requests of a run with so many at once: twice as many as there are places, so that newcomers meet running streams
COUNTS = {1: 4, 4: 12, 16: 32}
START_S = 60


def options(parser):
    parser.add_argument("--rounds", type=int, default=3, help="turns of each server (default 3)")
    parser.add_argument("--concurrency", default="1,4,16", help="requests at once (default %(default)s; empty: none)")
    parser.add_argument("--rates", default="0.3,0.6,0.9",
                        help="Poisson rates, as shares of the prompts that our prefill worker can take (default %(default)s; empty: none)")
    parser.add_argument("--rate-requests", type=int, default=12, help="requests of a run at a rate (default 12)")
    parser.add_argument("--servers", default=",".join(SERVERS), help="(default %(default)s; also 'kvferry Q4_0')")
    parser.add_argument("--short", action="store_true", help="one round of a few requests: does it run?")


class Server:
    """A server of one kind: how it is started, asked and ended."""

    def __init__(self, name, model, cluster=None, program=None):
        self.name, self.model_path, self.cluster, self.program = name, model, cluster, program

    @contextlib.contextmanager
    def up(self, folder):
        """(url, name of the model) of a running server that has answered once."""
        with (self.up_ours() if self.program is None else self.up_peer(folder)) as found:
            warm(*found)
            yield found

    @contextlib.contextmanager
    def up_ours(self):
        changes = {"log_level": "warn", "model": {"path": str(self.model_path), "context": SLOT_TOKENS},
                   "decode": {"max_batch": SLOTS}, "kv": {"memory": "512MiB"}}
        with self.cluster.Cluster(**changes) as one:
            yield one.base, self.cluster.MODEL_NAME

    @contextlib.contextmanager
    def up_peer(self, folder):
        port = self.cluster.free_ports(1)[0]
        argv = [self.program, "-m", self.model_path, "-t", 2, "-tb", 2, "-c", SLOTS * SLOT_TOKENS, "-np", SLOTS, "-a", "bench",
                "--host", "127.0.0.1", "--port", port, "--no-cache-prompt", "--cache-ram", 0, "--no-ui", "--offline"]
        log_path = folder / "llama-server.log"
        with open(log_path, "w", encoding="utf-8") as log:
            process = subprocess.Popen([str(part) for part in argv], cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            try:
                wait_health(process, f"http://127.0.0.1:{port}/health", log_path)
                yield f"http://127.0.0.1:{port}", "bench"
                if process.poll() is not None:
                    sys.exit(f"tests/bench/run serving: {self.name} ended by itself: {log_path.read_text()[-2000:]}")
            finally:
                process.terminate()
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def wait_health(process, url, log_path):
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    sys.exit(f"tests/bench/run serving: llama-server is not ready: {log_path.read_text()[-2000:]}")


def warm(url, model):
    """A prompt as long as the others, unmeasured: memory is touched, threads have run."""
    body = load.json.dumps({"model": model, "prompt": "warm " * (PROMPT // 2), "max_tokens": 8}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=load.TIMEOUT_S) as answer:
        answer.read()


def servers(context, args):
    """The servers that were asked for; builds what they need."""
    context.build_dir()
    context.command(["bash", "-c", "set -euo pipefail; . deploy/lib.sh; kv_venv httpx"], cwd=context.root)
    for folder in (context.root / ".venv").glob("lib/python*/site-packages"):
        site.addsitedir(str(folder))
    sys.path.insert(0, str(context.root / "tests" / "integration"))
    import cluster  # the same cluster as the tests'

    programs, found, names = {}, [], args.servers.split(",")
    if any(name != "kvferry Q4_1" for name in names):
        programs = llama_cpp.build(context, context.root / MODEL)
    for name in names:
        who, _, dtype = name.partition(" ")
        if who not in ("kvferry", "llama.cpp") or dtype not in ("Q4_1", "Q4_0"):
            sys.exit(f"tests/bench/run serving: no server '{name}'")
        model = pathlib.Path(context.root / MODEL)
        if dtype == "Q4_0":
            model = llama_cpp.q4_0(context, programs, model)
        found.append(Server(name, model, cluster, programs["llama-server"] if who != "kvferry" else None))
    if not found[0].name.startswith("kvferry"):
        sys.exit("tests/bench/run serving: the first server must be ours: rates follow from it")
    return found


class Bench:
    def __init__(self, context, args, folder):
        self.args, self.folder, self.servers = args, folder, servers(context, args)
        self.generator = load.Generator(context, folder, PROMPT, ANSWER)
        self.began, self.rows = time.monotonic(), {}
        self.rates, self.slo = [], None

    def say(self, text):
        print(f"serving: {time.monotonic() - self.began:.0f} s: {text}", file=sys.stderr, flush=True)

    def calibrate(self):
        """Without load: what good service is, and how many prompts a second are a full load."""
        unloaded = {}
        count = 2 if self.args.short else CALIBRATION
        for server in self.servers:
            with server.up(self.folder) as (url, model):
                got = self.generator.load(url, model, self.generator.prompts(count), count, 1, concurrency=1)
            if got.failed:
                sys.exit(f"tests/bench/run serving: {server.name} failed without load: {got.errors}")
            unloaded[server] = statistics.median(got.first), statistics.median(got.each)
            self.say(f"{server.name} without load: {unloaded[server][0]:.0f} ms to the first token, {unloaded[server][1]:.1f} ms a token")
        self.slo = tuple(factor * min(both[i] for both in unloaded.values()) for i, factor in enumerate((SLO_FIRST, SLO_EACH)))
        capacity = 1000 / unloaded[self.servers[0]][0]
        self.rates = [float(share) * capacity for share in self.args.rates.split(",") if share]
        self.say(f"good service: {self.slo[0]:.0f} ms to the first token, {self.slo[1]:.1f} ms a token")

    def cells(self):
        """(name, number of requests, what the load generator is told)."""
        for text in filter(None, self.args.concurrency.split(",")):
            at_once = int(text)
            count = max(2, at_once) if self.args.short else COUNTS.get(at_once, 2 * at_once)
            yield f"{at_once} at once", count, {"concurrency": at_once}
        for rate in self.rates:
            yield f"Poisson, {rate:.2f}/s", 3 if self.args.short else self.args.rate_requests, {"rate": rate}

    def round(self, number):
        """All servers through all cells, with the same prompts and arrivals; who begins changes from round to round."""
        prompts = {name: self.generator.prompts(count) for name, count, _ in self.cells()}
        turn = number % len(self.servers)
        for server in self.servers[turn:] + self.servers[:turn]:
            with server.up(self.folder) as (url, model):
                for name, count, how in self.cells():
                    got = self.generator.load(url, model, prompts[name], count, number + 1, **how)
                    figures = got.figures(self.slo)
                    self.rows.setdefault((name, server.name), []).append(figures)
                    self.say(f"round {number + 1}, {server.name}, {name}: "
                             + (" ".join(f"{key} {value:.1f}" for key, value in figures.items()) if figures else "none answered")
                             + (f"; {got.failed} failed: {got.errors}" if got.failed else ""))

    def median(self, cell, server, what):
        rows = self.rows[cell, server]
        return None if None in rows else statistics.median(row[what] for row in rows)


METRICS = (("ttft", "time to the first token", "ms", True), ("tpot", "time a token after it", "ms", True),
           ("gap", "worst gap between two tokens", "ms", True), ("tokens_s", "tokens", "tokens/s", False),
           ("goodput", "goodput", "requests/s", False))


def results(context, bench, args):
    ours = bench.servers[0].name
    for name, _, how in bench.cells():
        failed = sum(row["failed"] if row else 1 for row in bench.rows[name, ours])
        if failed:
            yield {**context.result(f"{name}: requests that failed", failed, "requests"), "met": False}
        if bench.median(name, ours, "tpot") is None:
            continue
        gap = context.result(f"{name}: worst gap in times of the time a token", bench.median(name, ours, "gap_tpot"), "times")
        yield {**gap, "goal": GAP_GOAL, "met": gap["value"] <= GAP_GOAL, "server": ours}
        for server in bench.servers[1:]:
            for what, label, unit, lower in METRICS:
                mine, beside = bench.median(name, ours, what), bench.median(name, server.name, what)
                row = context.result(f"{name}: {label}", mine, unit, server.name, beside)
                if beside is not None:  # a rate of 0 is a figure, too
                    row["peer_value"] = round(beside, 2)
                    row["ratio"] = round(beside / mine, 3) if lower else row["ratio"]
                # arrivals say how many tokens there are to make a second, as long as a server keeps up with them
                # and nothing is better where no request was served well by anybody, or a peer answered none
                if not (what == "tokens_s" and "rate" in how) and beside is not None and not mine == beside == 0:
                    row.update(goal=1.0, met=mine <= beside if lower else mine >= beside)
                lost = sum(row["failed"] if row else 1 for row in bench.rows[name, server.name])
                values = sorted(row[what] for row in bench.rows[name, ours])
                yield {**row, "server": ours, "peer_failed": lost, "spread": [round(value, 2) for value in values],
                       "slo_ms": [round(value, 1) for value in bench.slo]}


def run(context, args):
    if args.short:
        args.rounds = 1
    with tempfile.TemporaryDirectory(prefix="kvferry-serving-", dir="/var/tmp") as text:
        bench = Bench(context, args, pathlib.Path(text))
        bench.calibrate()
        for number in range(args.rounds):
            bench.round(number)
        bench.say("done")
        yield from results(context, bench, args)
