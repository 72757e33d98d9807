"""A kernel without one of its barriers or waits fails its own tests, and so does the model.

Each cu_sync, cu_sync_warp, cu_async_wait and cu_barrier_wait of kernels/cuda is taken out, one at a
time; the file is compiled as Meson compiles it (the checked form), the kernel's test linked with it
and run until its first failure. In the C files above the kernels, each record of an event and each
wait for one or for a stream is taken out, and the test of the model (that of ranks, for what they exchange) must
notice: its streams run late. At least 90 %
must be caught. KVFERRY_FULL=1 does all of them, otherwise a few, chosen by KVFERRY_SEED, so that
runs one after the other come to all.
"""

import concurrent.futures
import functools
import json
import os
import pathlib
import random
import re
import shlex
import shutil
import signal
import subprocess
import threading

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("KVFERRY_BUILD", ROOT / "build"))
KERNELS = ROOT / "kernels" / "cuda"
FEW = 3
CPU_S, LIMIT_S = 30, 400  # of a test; the longest takes half the first, and a mutant may go on for ever
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


def program_of(source):
    """The test of a file: attention_decode.cu's is test_gpu_attention_checked, what ranks exchange has theirs; None: it is not built."""
    name = f"{source.stem.split('_')[0]}_checked" if source.suffix == ".cu" else "ranks" if source.stem == "comm" else "model"
    exe = BUILD / "tests" / "gpu-emu" / f"test_gpu_{name}"
    return exe if exe.exists() else None


def blanked(text):
    """Comments gone, lengths kept: a call that is only spoken of is none."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m.group(0)), text, flags=re.S)


def sources():
    """What is compiled by itself and has a test."""
    every = sorted(KERNELS.glob("*.cu")) + sorted(KERNELS.glob("*.c"))
    return [source for source in every if program_of(source) and compile_command(source)]


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
    command += ["-Wno-error", "-w"]
    subprocess.run(command, cwd=BUILD, check=True, capture_output=True, text=True)
    return folder / f"{kernel.stem}.o"


def run(exe):
    """What the test says first of what is wrong; "": nothing is."""
    env = dict(os.environ, KVFERRY_SOURCE=str(ROOT), KVFERRY_FULL="0", KVFERRY_SEED="1")
    env.pop("CMOCKA_MESSAGE_OUTPUT", None)  # in its own form a failure is on stderr, at once
    limited = ["sh", "-c", f'ulimit -t {CPU_S}; exec "$0"', exe]
    with subprocess.Popen(limited, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as test:
        clock = threading.Timer(LIMIT_S, test.kill)
        clock.start()
        said, failed = "", False
        for line in test.stderr:
            if "ERROR: " in line:
                said = said or line.split("ERROR: ", 1)[1].strip()
            if line.startswith("[  FAILED  ]"):
                failed = True
                test.kill()
                break
        status = test.wait()
        late = not clock.is_alive()
        clock.cancel()
    if late:
        return f"no end in {LIMIT_S} s"
    if status in (-signal.SIGXCPU, -signal.SIGKILL) and not failed:
        return f"no end in {CPU_S} s of CPU"
    return said or "failed" if failed else "" if status == 0 else f"exit {status}"


def caught(tmp, mutant):
    """What the tests said of it, "" when nothing."""
    path, start, end, instead, what = mutant
    folder = tmp / f"{path.name}.{start}"
    (folder / "kernels" / "cuda").mkdir(parents=True)
    text = path.read_text()
    (folder / "kernels" / "cuda" / path.name).write_text(text[:start] + instead + text[end:])
    said = ""
    for exe in sorted({program_of(source) for source in users(path)}):
        objects = [str(build(folder, source)) for source in users(path) if program_of(source) == exe]
        command = link_command(exe)
        out = command.index("-o")
        mutated = folder / exe.name
        command[out + 1] = str(mutated)
        command[out + 2 : out + 2] = objects  # in front of the libraries, which then need not give theirs
        subprocess.run(command, cwd=BUILD, check=True, capture_output=True, text=True)
        said = said or run(mutated).replace(f"{folder}/", "")
    shutil.rmtree(folder)
    print(f"{what}: {'caught: ' + said if said else 'SURVIVED'}", flush=True)
    return said


def test_a_missing_barrier_is_found(tmp_path):
    if not (BUILD / "compile_commands.json").exists() or not list((BUILD / "tests").glob("gpu-emu/test_gpu_*_checked")):
        pytest.skip("there is no C++ compiler, or the build has a sanitizer: no kernel is built in its checked form")
    every = list(mutants())
    assert every, "no kernel has a barrier or wait"
    full = os.environ.get("KVFERRY_FULL") == "1"
    chosen = every
    if not full and len(every) > FEW:
        seed = int(os.environ.get("KVFERRY_SEED", "1"))
        rounds = (len(every) + FEW - 1) // FEW
        random.Random(seed // rounds).shuffle(every)
        chosen = every[seed % rounds :: rounds]
    only = os.environ.get("KVFERRY_MUTANTS")  # "sample.cu": by hand, those alone
    if only:
        chosen = [mutant for mutant in mutants() if re.search(only, mutant[-1])]
    nothing = (KERNELS / "rows.cu", 0, 0, "", "rows.cu, nothing taken out")
    assert not caught(tmp_path, nothing), "what is not changed fails"
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        said = list(pool.map(lambda mutant: caught(tmp_path, mutant), chosen))
    missed = [what for (*_, what), text in zip(chosen, said) if not text]
    print(f"{len(chosen) - len(missed)} of {len(chosen)} caught")
    # of a few, one may be among the tenth that no test can show
    allowed = len(chosen) // 10 if full else max(1, len(chosen) // 10)
    assert len(missed) <= allowed, f"{len(missed)} of {len(chosen)} not found: {', '.join(missed)}"
