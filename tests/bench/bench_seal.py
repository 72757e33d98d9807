"""What seals cost where K and V are written, when blocks leave, and when they have landed."""

import json
import os
import pathlib
import sys

HELP = ("The share of prefill and decode that hashing for seals takes, in pairs with and without it, and how "
        "many bytes a second are sealed and checked.")
MODEL = "models/SmolLM2-135M-Instruct.Q4_1.gguf"


def options(parser):
    parser.add_argument("--model", default=None, help=f"a GGUF file (default {MODEL})")
    parser.add_argument("--device", default="cpu", help="our backend (default cpu: the best)")
    parser.add_argument("--threads", type=int, action="append",
                        help="may be repeated (default: 1, and all usable cores)")
    parser.add_argument("--prefill", type=int, default=512, help="prompt tokens (default 512)")
    parser.add_argument("--decode", type=int, default=64, help="decoded tokens (default 64)")
    parser.add_argument("--pairs", type=int, default=21, help="pairs of runs (default 21)")


def run(context, args):
    model = pathlib.Path(args.model) if args.model else context.root / MODEL
    program = context.program("tests/bench/seal_bench")
    if not model.exists():
        sys.exit(f"tests/bench/run seal: no model at {model}")
    for threads in args.threads or sorted({1, len(os.sched_getaffinity(0))}):
        print(f"seal: {threads} threads", file=sys.stderr)
        found = json.loads(context.output([program, model, args.device, threads, args.prefill,
                                           args.decode, args.pairs]))
        where = f"{threads}t_{found['backend']}"
        # the goal is a share under 1 %, said as what is left of the speed: at least 0.99
        for what in ("prefill", "decode"):
            plain = found[f"{what}_ms"]
            tokens = args.prefill if what == "prefill" else 1
            yield context.result(f"seal_{what}_with_hashing_{where}",
                                 tokens * 1e3 / (plain * (1 + found[f"{what}_share"])), "tokens/s",
                                 "without", tokens * 1e3 / plain, 0.99)
        yield context.result(f"seal_hashing_alone_of_prefill_{where}",
                             100 * found["hash_ms"] / found["prefill_ms"] / threads, "%")
        if threads > 1:
            continue
        yield context.result("seal_from_bytes", found["compute_gbs"], "GB/s", goal=15)
        yield context.result("seal_check", found["check_gbs"], "GB/s", goal=15)
        yield context.result("seal_check_by_verifier", found["verifier_gbs"], "GB/s", goal=15)
        yield context.result(f"seal_by_tiles_of_{found['block_bytes'] // 1024}_KiB",
                             found["by_tiles_ns"], "ns")
