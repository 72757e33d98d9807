"""A kernel without one of its barriers or waits fails its own tests, and so does the model.

Each cu_sync, cu_sync_warp, cu_async_wait and cu_barrier_wait of kernels/cuda is taken out, one at a
time; the file is compiled as Meson compiles it (the checked form), the kernel's test linked with it
and run until its first failure. In the C files above the kernels, each record of an event and each
wait for one or for a stream is taken out, and the test of the model (or TESTS) must notice: its
streams run late. At least 90 % must be caught, and each says by what. KVFERRY_FULL=1 does all of
them, and with nothing taken out every test must pass; otherwise a few, chosen by KVFERRY_SEED, so
that runs one after the other come to all.
"""

import collections
import concurrent.futures
import functools
import json
import math
import os
import pathlib
import random
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("KVFERRY_BUILD", ROOT / "build"))
KERNELS = ROOT / "kernels" / "cuda"
FEW = 3
FULL = os.environ.get("KVFERRY_FULL") == "1"
# Of a test, when several run at once: one that is beyond it is looked at again, alone, with as many
# times what the same test took beside it with nothing taken out.
CPU_S, LIMIT_S = 60, 400
CPU_TIMES, WALL_TIMES = 4, 8
MODEL, RANKS = "gpu-emu/test_gpu_model", "gpu-emu/test_gpu_ranks"
TESTS = {  # of the C files that have others than the model's
    "comm": [RANKS, "unit/kernels/test_kernels_cuda_comm"],
    "model": [RANKS, MODEL],
    "wide": ["gpu-emu/test_gpu_wide"],
}
CALL = re.compile(
    r"\b(cu_sync\s*\(\s*\)|cu_sync_warp\s*\([^;]*\)|cu_async_wait\s*<[^;]*>\s*\(\s*\)|cu_barrier_wait\s*\([^;]*\))\s*;"
)
EVENT = re.compile(r"\bgpu_(?:event_record|event_wait|stream_wait_event|stream_wait)\s*\([^;{}:]*?\)(?=\s*[;:])")


def includes(path):
    """The files of kernels/cuda that path includes, itself too."""
    seen, left = set(), [path]
    while left:
        at = left.pop()
        if at in seen:
            continue
        seen.add(at)
        for name in re.findall(r'#include "kernels/cuda/([\w.]+)"', at.read_text()):
            other = KERNELS / name
            if other.exists() and not name.startswith("words"):
                left.append(other)
    return seen


def programs_of(source):
    """The tests of a file that are built: attention_decode.cu's is test_gpu_attention_checked; what ranks do is theirs."""
    names = [f"gpu-emu/test_gpu_{source.stem.split('_')[0]}_checked"] if source.suffix == ".cu" else TESTS.get(source.stem, [MODEL])
    return [exe for name in names if (exe := BUILD / "tests" / name).exists()]


def blanked(text):
    """Comments gone, lengths kept: a call that is only spoken of is none."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m.group(0)), text, flags=re.S)


def sources():
    """What is compiled by itself and has a test."""
    every = sorted(KERNELS.glob("*.cu")) + sorted(KERNELS.glob("*.c"))
    return [source for source in every if programs_of(source) and compile_command(source)]


def users(path):
    """The sources that path is a part of."""
    return [source for source in sources() if path in includes(source)]


def mutants():
    """(file, start, end, in its place, what) of every call that a tested source makes."""
    for path in sorted(set().union(*(includes(source) for source in sources()))):
        text = path.read_text()
        pattern, instead = (EVENT, "PD_OK") if path.suffix == ".c" else (CALL, "(void)0;")
        for match in pattern.finditer(blanked(text)):
            line = text.count("\n", 0, match.start()) + 1
            comment = text[match.end() :].split("\n", 1)[0]
            if "the compiler" in comment or "after a failure" in comment:
                continue  # it says itself that it orders no two threads, or nothing that is used
            what = match.group(0).rstrip(";")
            yield path, match.start(), match.end(), instead, f"{path.name}:{line} {what}"


def compile_command(source):
    """How Meson compiles the kernel's checked form, or the C file; None: it is not built."""
    folder, end = "kernels-checked", f"emu_{source.stem}.cpp"
    if source.suffix == ".c":
        folder, end = "libcuda-model.a.p", f"kernels/cuda/{source.name}"
    for entry in commands():
        if folder in entry["output"] and entry["file"].endswith(end):
            return shlex.split(entry["command"])
    return None


@functools.cache
def commands():
    return json.loads((BUILD / "compile_commands.json").read_text())


def link_command(exe):
    name = os.path.relpath(exe, BUILD)
    ninja = shutil.which("ninja") or "ninja"
    out = subprocess.run([ninja, "-C", BUILD, "-t", "commands", "-s", name], check=True, capture_output=True, text=True)
    return shlex.split([line for line in out.stdout.splitlines() if f"-o {name}" in line][-1])


def build(folder, kernel):
    """kernel with folder/kernels/cuda in front of the tree's own; the object."""
    command = [word for word in compile_command(kernel) if os.path.basename(word) != "ccache"]
    out = command.index("-o")
    wrapper = folder / (kernel.stem + (".c" if kernel.suffix == ".c" else ".cpp"))
    wrapper.write_text(f'#include "kernels/cuda/{kernel.name}"\n')
    command[out + 1] = str(folder / f"{kernel.stem}.o")
    source = command.index("-c")
    command[source + 1] = str(wrapper)
    for word in ("-MQ", "-MF"):
        command[command.index(word) + 1] = str(folder / "deps")
    command.insert(1, f"-I{folder}")
    # a place's name as in the tree, where its comment says what it may cost
    command += ["-Wno-error", "-w", f"-ffile-prefix-map={folder}/=../"]
    subprocess.run(command, cwd=BUILD, check=True, capture_output=True, text=True)
    return folder / f"{kernel.stem}.o"


def run(exe, cpu_s=CPU_S, limit_s=LIMIT_S):
    """(how, what it says first of what is wrong); ("", ""): nothing is; ("late", ...): it was not done.

    how: "check": the emulator found it; "result": the test itself; "exit": it died of it."""
    env = dict(os.environ, KVFERRY_SOURCE=str(ROOT), KVFERRY_FULL="0", KVFERRY_SEED="1")
    env["LD_LIBRARY_PATH"] = str(BUILD / "tests" / "nccl-stand-in")
    env.pop("CMOCKA_MESSAGE_OUTPUT", None)  # in its own form a failure is on stderr, at once
    limited = ["sh", "-c", f'ulimit -S -t {math.ceil(cpu_s)}; exec "$0"', exe]
    with subprocess.Popen(limited, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as test:
        late = threading.Event()
        clock = threading.Timer(limit_s, lambda: (late.set(), test.kill()))
        clock.start()
        said, failed = "", False
        for line in test.stderr:
            if "ERROR: " in line or "--- " in line:
                said = said or re.split("ERROR: |--- ", line, maxsplit=1)[1].strip()
            if line.startswith("[  FAILED  ]"):
                failed = True
                test.kill()
                break
        status = test.wait()
        clock.cancel()
    if failed:
        return "check" if "(order " in said or ") ()" in said else "result", said or "failed"
    if late.is_set():
        return "late", f"no end in {limit_s:.0f} s"
    if status == -signal.SIGXCPU:
        return "late", f"no end in {cpu_s:.0f} s of CPU"
    assert status != -signal.SIGKILL, f"{exe}: somebody else killed it"
    return ("exit", said or f"exit {status}") if status else ("", "")


def run_alone(exe, mutated):
    """run() of one that was late, when nothing else of ours runs."""
    before, start = os.times(), time.monotonic()
    how, said = run(exe, 10 * CPU_S, 10 * LIMIT_S)
    assert not how, f"{exe}, nothing taken out: {said}"
    after, wall_s = os.times(), time.monotonic() - start
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    how, said = run(mutated, CPU_TIMES * cpu_s + 10, WALL_TIMES * wall_s + 60)
    return ("hang", f"{said}; {cpu_s:.0f} s of CPU with nothing taken out") if how == "late" else (how, said)


def caught(tmp, mutant):
    """(how, what) the tests said of it, ("", "") when nothing; and the programs that were late, left for run_alone()."""
    path, start, end, instead, what = mutant
    folder = tmp / f"{path.name}.{start}"
    (folder / "kernels" / "cuda").mkdir(parents=True)
    text = path.read_text()
    (folder / "kernels" / "cuda" / path.name).write_text(text[:start] + instead + text[end:])
    how, said, late = "", "", []
    for exe in dict.fromkeys(exe for source in users(path) for exe in programs_of(source)):
        objects = [str(build(folder, source)) for source in users(path) if exe in programs_of(source)]
        command = link_command(exe)
        out = command.index("-o")
        mutated = folder / exe.name
        command[out + 1] = str(mutated)
        command[out + 2 : out + 2] = objects  # in front of the libraries, which then need not give theirs
        subprocess.run(command, cwd=BUILD, check=True, capture_output=True, text=True)
        how, said = run(mutated)
        if how == "late":
            late.append((exe, mutated))
        elif how:
            late = []
            break
    if not late:
        shutil.rmtree(folder)
        show(what, how, said)
    return how, said, late


def show(what, how, said):
    print(f"{what}: {f'caught ({how}): {said}' if how else 'SURVIVED'}", flush=True)


def caught_alone(what, late):
    for exe, mutated in late:
        how, said = run_alone(exe, mutated)
        if how:
            break
    show(what, how, said)
    return how, said


@pytest.mark.timeout(7200 if FULL else 1200)
def test_a_missing_barrier_is_found(tmp_path):
    if not (BUILD / "compile_commands.json").exists() or not list((BUILD / "tests").glob("gpu-emu/test_gpu_*_checked")):
        pytest.skip("there is no C++ compiler, or the build has a sanitizer: no kernel is built in its checked form")
    every = list(mutants())
    assert every, "no kernel has a barrier or wait"
    chosen = every
    if not FULL and len(every) > FEW:
        seed = int(os.environ.get("KVFERRY_SEED", "1"))
        rounds = (len(every) + FEW - 1) // FEW
        random.Random(seed // rounds).shuffle(every)
        chosen = every[seed % rounds :: rounds]
    only = os.environ.get("KVFERRY_MUTANTS")  # "sample.cu": by hand, those alone
    if only:
        chosen = [mutant for mutant in mutants() if re.search(only, mutant[-1])]
    # a file of each test that is used; attention_decode.cu and matmul_tiles.h have places that say what they cost
    of_test = {tuple(programs_of(users(path)[0])): path for path, *_ in (chosen if FULL else [])}
    for path in [KERNELS / "rows.cu", *of_test.values()]:
        how = caught(tmp_path, (path, 0, 0, "", f"{path.name}, nothing taken out"))[0]
        assert how in ("", "late"), f"{path.name}: what is not changed fails"
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        found = list(pool.map(lambda mutant: caught(tmp_path, mutant), chosen))
    # a machine that is busy is no reason to call one caught
    how = [caught_alone(what, late)[0] if late else how for (*_, what), (how, _, late) in zip(chosen, found)]
    missed = [what for (*_, what), how in zip(chosen, how) if not how]
    ways = ", ".join(f"{n} by {way}" for way, n in sorted(collections.Counter(filter(None, how)).items()))
    print(f"{len(chosen) - len(missed)} of {len(chosen)} caught: {ways}")
    # of a few, one may be among the tenth that no test can show
    allowed = len(chosen) // 10 if FULL else max(1, len(chosen) // 10)
    assert len(missed) <= allowed, f"{len(missed)} of {len(chosen)} not found: {', '.join(missed)}"
