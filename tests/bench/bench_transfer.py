"""KV shipping beside memcpy and a plain socket, in one run."""

import json

HELP = ("Blocks from one process into another's pool, over shared memory and tcp, beside memcpy of the "
        "same blocks and a plain socket; and what a seal costs.")


def run(context, args):
    text = context.output([context.program("tests/bench/transfer_bench")])
    for line in text.splitlines():
        if line.startswith("{"):
            yield {**json.loads(line), "machine": context.machine}
