"""KV shipping beside a scattered put, NIXL, Mooncake and memcpy, in one run."""

import os
import re
import shutil
import statistics
import subprocess
import sys

HELP = ("Scattered blocks of 64 KiB from one process into another's pool, 4 and 64 MiB a batch, over shared "
        "memory and tcp, beside UCX alone, NIXL, Mooncake and a copy; counted when acknowledged.")

POST_GOAL = 0.1  # at most
PACKAGES = ["nixl==1.5.1", "mooncake-transfer-engine-non-cuda==0.3.13.post1"]
LINE = re.compile(r"^(\d+\.\d+) (\d+\.\d+)$", re.M)
SHM = {"UCX_TLS": "posix,sysv,cma,self", "UCX_ALLOC_PRIO": "md:sysv,md:posix,thp,mmap,heap"}
TCP = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo", "UCX_TCP_TX_SEG_SIZE": "1m",
       "UCX_TCP_RX_SEG_SIZE": "1m", "UCX_RNDV_THRESH": "inf"}


def options(parser):
    parser.add_argument("--rounds", type=int, default=3, help="of each; medians count (default: 3)")
    parser.add_argument("--no-peers", action="store_true", help="without NIXL and Mooncake")
    parser.add_argument("--no-wheel", action="store_true", help="without the build against PyPI's UCX")


def peers_python(context):
    """A virtual environment of this benchmark's own."""
    venv = context.cache / "transfer-venv"
    python = venv / "bin" / "python"
    if not python.exists():
        context.command([sys.executable, "-m", "venv", venv])
    context.command([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "numpy",
                     *PACKAGES])
    return python


def wheel_build(context):
    """A second build, against the UCX of PyPI."""
    build = context.cache / "build-ucx-cu13"
    context.command([context.root / "tests" / "ucx-wheel", "--setup", build, "-Dtests=true", "-Dcuda=disabled", "-Dgpu_emu=disabled"])
    meson = context.root / ".venv" / "bin" / "meson"
    context.command([meson, "compile", "-C", build, "transfer_bench", "put_bench"])
    return build


def measure(name, argv, env):
    """(GB/s, microseconds, posting's share of the wire time or None) of one run, or None with the reason on stderr."""
    try:
        done = subprocess.run([str(part) for part in argv], env={**os.environ, **env}, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=180,
                              check=False)
        found = LINE.search(done.stdout)
    except subprocess.TimeoutExpired:
        print(f"{name}: no result in 180 s", file=sys.stderr)
        return None
    if found is None:  # some crash at their end, after the result
        print(f"{name}: failed ({done.returncode}): {done.stderr[-600:]}", file=sys.stderr)
        return None
    share = re.search(r"post_share=(\S+)", done.stderr)
    return float(found.group(1)), float(found.group(2)), float(share.group(1)) if share else None


def candidates(builds, python, transport, blocks):
    """name: (argv, environment) of all that is compared in one round."""
    shm = transport == "shm"
    found = {}
    for ucx, build in builds.items():
        bench = build / "tests" / "bench"
        for seals in (0, 1):
            found[f"kvferry ucx {ucx}{' sealed' if seals else ''}"] = (
                [bench / "transfer_bench", "ship", transport, blocks, seals], {})
        found[f"put ucx {ucx}"] = ([bench / "put_bench", blocks], SHM if shm else TCP)
    bench = builds["1.13"] / "tests" / "bench" / "transfer_bench"
    found["copy" if shm else "socket"] = ([bench, "copy", blocks] if shm else [bench, "socket"], {})
    if python is not None:
        peers = context_file("transfer_peers.py")
        # without the last one UCX leaves shared memory out of connections that report failures
        env = ({"UCX_TLS": "posix,sysv,cma,self", "UCX_MM_ERROR_HANDLING": "y"} if shm
               else {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"})
        found["nixl"] = ([python, peers, "nixl", blocks], env)
        found["nixl progress thread"] = ([python, peers, "nixl", blocks, "progress"], env)
        if not shm:
            found["nixl any device"] = ([python, peers, "nixl", blocks], {"UCX_TLS": "tcp"})
            found["mooncake"] = ([python, peers, "mooncake", blocks], {})
    return found


def context_file(name):
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), name)


def perftest(context, transport):
    """For orientation: it puts the same cached buffer again and again."""
    if shutil.which("ucx_perftest") is None:
        print("ucx_perftest: not installed (Debian's ucx-utils)", file=sys.stderr)
        return None
    env = {**os.environ, **(SHM if transport == "shm" else TCP)}
    server = subprocess.Popen(["ucx_perftest", "-p", "13777"], env=env, stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL)
    try:
        done = subprocess.run(["ucx_perftest", "127.0.0.1", "-p", "13777", "-t", "ucp_put_bw", "-s",
                               "65536", "-n", "20000", "-f"], env=env, text=True, check=False,
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=120)
    except subprocess.TimeoutExpired:
        return None
    finally:
        server.kill()
        server.wait()
    numbers = re.findall(r"\d+\.\d+", done.stdout.splitlines()[-1] if done.stdout else "")
    return float(numbers[-2]) * 1.048576e-3 if len(numbers) > 3 else None


def compare(context, transport, mib, rates, nixl):
    """Our rates of one transport and size beside the others'; nixl: whether it was asked for."""
    best_nixl = max((rate for name, rate in rates.items() if name.startswith("nixl")), default=None)
    for name, value in rates.items():
        if not name.startswith("kvferry"):
            yield context.result(f"{name}, {transport} {mib} MiB", value, "GB/s")
            continue
        sealed = name.endswith(" sealed")
        ucx = name.split()[2]
        figure = f"{name}, {transport} {mib} MiB"
        goals = [(f"put ucx {ucx}", rates.get(f"put ucx {ucx}"), 0.9)]
        if transport == "shm":
            goals += [("copy", rates.get("copy"), 0.75), ("nixl, the better", best_nixl, 2.0)]
        else:
            goals += [("nixl, the better", best_nixl, 1.0 if ucx == "1.22" else None),
                      ("mooncake", rates.get("mooncake"), None),
                      ("socket", rates.get("socket"), None)]
        for peer, peer_value, goal in goals:
            goal = None if sealed else goal
            if peer_value:
                yield context.result(figure, value, "GB/s", peer, peer_value, goal)
            elif goal is not None and (nixl or not peer.startswith("nixl")):
                yield {**context.result(figure, value, "GB/s", f"{peer}: not measured"), "goal": goal, "met": False}


def posting(context, figure, share):
    """The time spent starting puts, as a share of the time on the wire: the less the better."""
    return {**context.result(figure, share, "of the wire time"), "value": round(share, 4), "goal": POST_GOAL,
            "met": share <= POST_GOAL}


def run(context, args):
    builds = {"1.13": context.build_dir()}
    context.command(["bash", "-c", "set -euo pipefail; . deploy/lib.sh; kv_apt_install ucx-utils"], cwd=context.root)
    python = None if args.no_peers else peers_python(context)
    if not args.no_wheel:
        builds["1.22"] = wheel_build(context)
    for transport in ("shm", "tcp"):
        value = perftest(context, transport)
        if value:
            yield context.result(f"ucx_perftest put 64 KiB, {transport}, one cached buffer", value,
                                 "GB/s")
        for mib, blocks in ((4, 64), (64, 1024)):
            seen = {}
            table = candidates(builds, python, transport, blocks)
            for _ in range(args.rounds):  # side by side, so that a busy moment hits all
                for name, (argv, env) in table.items():
                    measured = measure(f"{name}, {transport} {mib} MiB", argv, env)
                    if measured is not None:
                        seen.setdefault(name, []).append(measured)
            rates = {name: statistics.median(rate for rate, _, _ in values)
                     for name, values in seen.items()}
            yield from compare(context, transport, mib, rates, python is not None)
            for name, values in seen.items():
                if name != "socket":
                    yield context.result(f"{name}, {transport} {mib} MiB, acknowledged",
                                         statistics.median(us for _, us, _ in values), "us")
                shares = [share for _, _, share in values if share is not None]
                if shares:
                    yield posting(context, f"{name}, {transport} {mib} MiB, posting", statistics.median(shares))
