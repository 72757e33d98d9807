"""Load on an OpenAI-compatible server by a public generator, AIPerf (PyPI: aiperf), and what its per-request records say.

The generator has a virtual environment of its own in .cache/aiperf. Prompts come from a file that is made here, every one
new, so that no server finds a prefix that it has seen; lengths are what the server itself counts.
"""

import json
import random
import statistics
import subprocess
import sys

REQUIREMENT = "aiperf==0.13.0"
TIMEOUT_S = 900
# each, with the space before it, is one token of the model's vocabulary; the records say whether that is so
WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand part "
    "place case week company system program question work government number night point home water room mother area money "
    "story fact month lot right study book eye job word business issue side kind head house service friend father power "
    "hour game line end member law car city community name president team minute idea body information back parent face "
    "others level office door health person art war history party result change morning reason research moment air teacher "
    "force education"
).split()
# AIPerf wants a tokenizer at its start, from a folder if not from the network. None of its figures come from it here.
TOKENIZER = """
import sys
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="[UNK]").save_pretrained(sys.argv[1])
"""


class Generator:
    def __init__(self, context, folder, prompt_tokens, answer_tokens):
        self.folder, self.prompt_tokens, self.answer_tokens = folder, prompt_tokens, answer_tokens
        self.rng, self.runs = random.Random(20260101), 0
        venv = context.cache / "aiperf"
        self.program = venv / "bin" / "aiperf"
        if not self.program.exists():
            context.command([sys.executable, "-m", "venv", venv])
            context.command([venv / "bin" / "pip", "install", "-q", REQUIREMENT])
        self.tokenizer = folder / "tokenizer"
        context.output([venv / "bin" / "python", "-c", TOKENIZER, self.tokenizer])

    def prompts(self, count):
        """A file of as many new prompts."""
        path = self.folder / f"prompts-{self.runs}.jsonl"
        self.runs += 1
        with open(path, "w", encoding="utf-8") as file:
            for _ in range(count):
                file.write(json.dumps({"text": " ".join(self.rng.choice(WORDS) for _ in range(self.prompt_tokens))}) + "\n")
        return path

    def load(self, url, model, prompts, count, seed, concurrency=None, rate=None):
        """So many requests at once, or at a Poisson rate (a second); a Load. Ends the bench when the generator fails."""
        self.runs += 1
        out = self.folder / f"run-{self.runs}"
        how = ["--concurrency", concurrency] if rate is None else ["--request-rate", f"{rate:.4f}", "--arrival-pattern", "poisson"]
        body = {"max_tokens": self.answer_tokens, "ignore_eos": True, "temperature": 0}
        argv = [self.program, "profile", "-m", model, "--url", url, "--endpoint-type", "completions", "--streaming",
                "--input-file", prompts, "--custom-dataset-type", "single_turn", "--dataset-sampling-strategy", "sequential",
                "--request-count", count, *how, "--random-seed", seed, "--extra-inputs", json.dumps(body),
                "--use-server-token-count", "--tokenizer", self.tokenizer, "--ui", "none", "--export-level", "records",
                "--workers-max", 1, "--record-processors", 1, "--no-gpu-telemetry", "--no-server-metrics",
                "--request-timeout-seconds", TIMEOUT_S, "--output-artifact-dir", out]
        done = subprocess.run([str(part) for part in argv], cwd=self.folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, check=False, timeout=2 * TIMEOUT_S)
        records = out / "profile_export.jsonl"
        if done.returncode != 0 or not records.exists():
            sys.exit(f"tests/bench/run serving: aiperf failed ({done.returncode}): {done.stdout[-3000:]}")
        with open(records, encoding="utf-8") as file:
            return Load([json.loads(line) for line in file], count, self.prompt_tokens, self.answer_tokens)


class Load:
    """What came of one run. Times in ms."""

    def __init__(self, records, count, prompt_tokens, answer_tokens):
        good = [record for record in records if not record.get("error") and not record["metadata"]["was_cancelled"]]
        self.failed = count - len(good)
        self.errors = sorted({json.dumps(record["error"])[:300] for record in records if record.get("error")})
        self.first = [self.metric(record, "time_to_first_token") for record in good]
        self.each = [self.metric(record, "inter_token_latency") for record in good]
        self.gaps = [max(self.metric(record, "inter_chunk_latency")) for record in good]
        self.tokens = sum(self.metric(record, "output_sequence_length") for record in good)
        self.seconds = 0.0
        if good:
            begun = min(record["metadata"]["request_start_ns"] for record in records)
            self.seconds = (max(record["metadata"]["request_end_ns"] for record in records) - begun) * 1e-9
        for record in good:
            read, said = self.metric(record, "input_sequence_length"), self.metric(record, "output_sequence_length")
            cached = record["metrics"].get("usage_prompt_cache_read_tokens", {}).get("value", 0)
            # a token of begin-of-text may come on top
            if not prompt_tokens <= read <= prompt_tokens + 1 or said != answer_tokens or cached > 1:
                sys.exit(f"tests/bench/run serving: a request of {read} tokens ({cached} of them cached) had {said} in its answer; "
                         f"wanted were {prompt_tokens}, none cached, and {answer_tokens}")

    @staticmethod
    def metric(record, name):
        return record["metrics"][name]["value"]

    def figures(self, slo):
        """Of this run: medians of its requests, its worst gap, its rates; slo: (ms to the first token, ms a token)."""
        if not self.first:
            return None
        kept = sum(first <= slo[0] and each <= slo[1] for first, each in zip(self.first, self.each))
        each = statistics.median(self.each)
        return {"ttft": statistics.median(self.first), "ttft_max": max(self.first), "tpot": each, "tpot_max": max(self.each),
                "gap": max(self.gaps), "gap_tpot": max(self.gaps) / each, "tokens_s": self.tokens / self.seconds,
                "goodput": kept / self.seconds, "failed": self.failed}
