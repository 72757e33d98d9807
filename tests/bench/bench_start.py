"""How long a worker takes from exec to ready, and what memory a small cluster has."""

import os
import pathlib
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time

HELP = ("A worker's start with warm files, from exec until the router calls it ready, with weights that are "
        "kept and with its own packing, in turns; and the proportional set size of router, one prefill and "
        "one decode worker; medians.")
MODEL = "models/SmolLM2-135M-Instruct.Q4_1.gguf"
START_GOAL_MS = 300
PSS_GOAL_MIB = 400
WAIT_S = 60


def options(parser):
    parser.add_argument("--model", default=None, help=f"a GGUF file (default {MODEL})")
    parser.add_argument("--rounds", type=int, default=9, help="starts of each kind (default 9)")
    parser.add_argument("--kv", default="1GiB", help="KV memory of a worker (default 1GiB)")


class Service:
    """A process, and the lines that it logs with the time when each came."""

    def __init__(self, context, *argv):
        self.began = time.monotonic()
        self.process = subprocess.Popen([str(part) for part in argv], cwd=context.root, stdin=subprocess.DEVNULL,
                                        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.told = []

    def wait_line(self, *words):
        """The time when a line with all the words was read."""
        for line in self.process.stderr:
            self.told.append(line)
            if all(word in line for word in words):
                return time.monotonic()
        sys.exit(f"tests/bench/run start: it ended before it said {words}: {''.join(self.told[-5:])}")

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=WAIT_S)


def deployment(context, folder, args):
    model = pathlib.Path(args.model).resolve() if args.model else context.root / MODEL
    if not model.exists():
        sys.exit(f"tests/bench/run start: no model at {model}")
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    path = pathlib.Path(folder) / "start.yaml"
    os.mkdir(pathlib.Path(folder) / "state")
    path.write_text(f"cluster: start\nstate_dir: {folder}/state\nworkers: 2\n"
                    f"model: {{ path: {model}, cache_dir: {folder}/weights }}\n"
                    f"router: {{ listen: 127.0.0.1:{port} }}\nkv: {{ memory: {args.kv} }}\n"
                    "prefill: { threads: 1 }\ndecode: { threads: 1 }\n", encoding="utf-8")
    return path


def start(context, router, path, role, *sets):
    """A worker that the router has called ready, and the time that took in ms."""
    worker = Service(context, context.program(f"deploy/{role}-worker"), "-f", path, "--name", f"{role}-0", *sets)
    ready = router.wait_line('msg="worker is ready"', f"worker={role}-0")
    return worker, ((ready - worker.began) * 1000, cpu_ms(worker))


def cpu_ms(service):
    """User and system time of all its threads; says more than the clock on a machine that others use."""
    with open(f"/proc/{service.process.pid}/stat", encoding="ascii") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) * 1000 / os.sysconf("SC_CLK_TCK")


def pss_mib(service):
    with open(f"/proc/{service.process.pid}/smaps_rollup", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Pss:")) / 1024


def run(context, args):
    context.build_dir()
    with tempfile.TemporaryDirectory(prefix="kvferry-start-", dir="/var/tmp") as folder:
        path = deployment(context, folder, args)
        router = Service(context, context.program("router/router"), "-f", path)
        router.wait_line('msg="router listens"')
        kinds = {(role, kept): [] for role in ("prefill", "decode") for kept in (True, False)}
        for turn in range(args.rounds + 1):
            for (role, kept), times in kinds.items():
                sets = () if kept else ("--set", "model.cache_dir=none")
                worker, both = start(context, router, path, role, *sets)
                worker.end()
                if turn > 0:  # the first packs, and reads what is not in memory yet
                    times.append(both)
        for role in ("prefill", "decode"):
            for which, name in enumerate(("start", "start_cpu")):
                ms, own_ms = (statistics.median(both[which] for both in kinds[role, kept]) for kept in (True, False))
                result = context.result(f"{name}_{role}", ms, "ms", "weights packed by itself", own_ms)
                yield {**result, "goal": START_GOAL_MS, "met": ms <= START_GOAL_MS} if which == 0 else result
        for name, sets in (("", ()), ("_own_weights", ("--set", "model.cache_dir=none"))):
            mark = len(router.told)
            workers = [start(context, router, path, role, *sets)[0] for role in ("prefill", "decode")]
            if not any('msg="link up"' in line for line in router.told[mark:]):
                router.wait_line('msg="link up"')
            parts = [statistics.median(pss_mib(part) for _ in range(3)) for part in (router, *workers)]
            for worker in workers:
                worker.end()
            result = context.result(f"pss_1_1_1{name}", sum(parts), "MiB")
            result["parts"] = dict(zip(("router", "prefill", "decode"), (round(part, 1) for part in parts)))
            yield result if name else {**result, "goal": PSS_GOAL_MIB, "met": sum(parts) <= PSS_GOAL_MIB}
        router.end()
