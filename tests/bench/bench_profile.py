"""Where a step's time goes, by kernel: samples of engine_bench, taken by perf."""

import pathlib
import re
import shutil
import sys
import tempfile

HELP = ("Shares of a step's time by kernel, one thread: decode at batch 1 and 32, and a prefill step. "
        "Samples of perf(1) (cpu-clock), without what the kernel of the system and loading take.")
MODEL = "models/SmolLM2-135M-Instruct.Q4_1.gguf"
LIMIT = 5.0  # percent that nothing but products and attention may take
# A step of what is only there because engine_bench needs a prompt, or a token, is one of many.
STEPS = (("decode_1", 1, 64, 12, 1), ("decode_32", 1, 32, 8, 32), ("prefill_512", 512, 1, 12, 1))
KERNELS = (
    ("products", r"fast_matmul|q_product|amx_"),
    ("attention", r"att_|fast_attention|attend_"),
    ("quantising", r"fast_quantize|fast_residual|quantize_"),
    ("SwiGLU", r"fast_silu"),
    ("norm", r"fast_rms|normalize"),
    ("RoPE", r"fast_rope|kern_rope"),
    ("K and V to the pool", r"fast_store|kern_kv_row|place_"),
    ("hashes for seals", r"pd_seal|tile"),
    ("sampling", r"sample|draw|pick"),
    ("waiting", r"kern_team|wait_for|open_gate"),
)
# engine_bench's own, and loading
NOT_THE_STEP = re.compile(r"read_part|kern_pack|kern_packs|pd_model_file|main$|memset|hash|XXH")


def options(parser):
    parser.add_argument("--model", default=None, help=f"a GGUF file (default {MODEL})")
    parser.add_argument("--device", default="cpu", help="our backend (default cpu: the best)")
    parser.add_argument("--program", default=None, help="an engine_bench to use instead of building one")


def kernel_of(symbol):
    for name, pattern in KERNELS:
        if re.match(pattern, symbol):
            return name
    return "the rest"


def sample(context, program, model, device, step):
    """Samples by kernel."""
    _, prefill, decode, repeats, batch = step
    with tempfile.TemporaryDirectory() as folder:
        data = pathlib.Path(folder) / "perf.data"
        context.output(["perf", "record", "-q", "-e", "cpu-clock:u", "-F", 2000, "-o", data, "--",
                        program, model, device, 1, prefill, decode, repeats, batch])
        text = context.output(["perf", "report", "-i", data, "--stdio", "--no-children", "-q",
                               "-F", "sample,sym", "-t", ";"])
    found = {}
    for line in text.splitlines():
        count, _, symbol = line.partition(";")
        symbol = symbol.strip().removeprefix("[.]").removeprefix("[k]").strip()
        if not count.strip().isdigit() or NOT_THE_STEP.search(symbol):
            continue
        name = kernel_of(symbol)
        found[name] = found.get(name, 0) + int(count)
    return found


def run(context, args):
    model = pathlib.Path(args.model) if args.model else context.root / MODEL
    if shutil.which("perf") is None:
        print("tests/bench/run profile: skipped, there is no perf(1) here", file=sys.stderr)
        return
    program = args.program or context.program("tests/bench/engine_bench")
    for step in STEPS:
        found = sample(context, program, model, args.device, step)
        total = sum(found.values())
        if total == 0:
            sys.exit(f"tests/bench/run profile: perf took no samples of {step[0]}")
        shares = {name: 100 * count / total for name, count in found.items()}
        for name, share in sorted(shares.items(), key=lambda item: -item[1]):
            yield context.result(f"profile_{step[0]}: {name}", share, "%")
        others = max(share for name, share in shares.items()
                     if name not in ("products", "attention"))
        yield context.result(f"profile_{step[0]}: left below {LIMIT:g} % by the largest other",
                             LIMIT - others, "%", goal=0)
