"""A kernel without one of its barriers or waits fails its own tests.

Each cu_sync, cu_sync_warp, cu_async_wait and cu_barrier_wait of kernels/cuda is taken out, one at a
time. The file is compiled as Meson compiles it (the checked form), the kernel's test linked with it
and run. At least 90 % must be caught. KVFERRY_FULL=1 does all of them, otherwise a few, chosen by
KVFERRY_SEED, so that runs one after the other come to all.
"""

import concurrent.futures
import json
import os
import pathlib
import random
import re
import shlex
import shutil
import subprocess
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("KVFERRY_BUILD", ROOT / "build"))
KERNELS = ROOT / "kernels" / "cuda"
FEW = 8
CALL = re.compile(
    r"\b(cu_sync\s*\(\s*\)|cu_sync_warp\s*\([^;]*\)|cu_async_wait\s*<[^;]*>\s*\(\s*\)|cu_barrier_wait\s*\([^;]*\))\s*;"
)


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


def test_of(kernel):
    """The test of a kernel file, or None: attention_decode.cu's is test_gpu_attention_checked."""
    exe = BUILD / "tests" / "gpu-emu" / f"test_gpu_{kernel.stem.split('_')[0]}_checked"
    return exe if exe.exists() else None


def blanked(text):
    """Comments gone, lengths kept: a call that is only spoken of is none."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m.group(0)), text, flags=re.S)


def mutants():
    """(file, start, end, what) of every call that a tested kernel's sources make."""
    tested = [k for k in sorted(KERNELS.glob("*.cu")) if test_of(k) and compile_command(k)]
    files = sorted(set().union(*(includes(k) for k in tested))) if tested else []
    for path in files:
        text = path.read_text()
        for match in CALL.finditer(blanked(text)):
            line = text.count("\n", 0, match.start()) + 1
            yield path, match.start(), match.end(), f"{path.name}:{line} {match.group(1)}"


def compile_command(kernel):
    """How Meson compiles the kernel's checked form; None: it is not built."""
    for entry in json.loads((BUILD / "compile_commands.json").read_text()):
        if "kernels-checked" in entry["output"] and entry["file"].endswith(f"emu_{kernel.stem}.cpp"):
            return shlex.split(entry["command"])
    return None


def link_command(exe):
    name = os.path.relpath(exe, BUILD)
    ninja = shutil.which("ninja") or "ninja"
    out = subprocess.run([ninja, "-C", BUILD, "-t", "commands", "-s", name], check=True, capture_output=True, text=True)
    return shlex.split([line for line in out.stdout.splitlines() if f"-o {name}" in line][-1])


def build(folder, kernel):
    """kernel with folder/kernels/cuda in front of the tree's own; the object."""
    command = [word for word in compile_command(kernel) if os.path.basename(word) != "ccache"]
    out = command.index("-o")
    wrapper = folder / f"{kernel.stem}.cpp"
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


def run(exe, limit_s):
    env = dict(os.environ, KVFERRY_SOURCE=str(ROOT), KVFERRY_FULL="0", KVFERRY_SEED="1")
    try:
        done = subprocess.run([exe], env=env, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return f"no end in {limit_s:.0f} s"
    if done.returncode == 0:
        return ""
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("ERROR")]
    return lines[0] if lines else f"exit {done.returncode}"


def caught(tmp, mutant, limits):
    """What the tests said of it, "" when nothing."""
    path, start, end, _ = mutant
    folder = tmp / f"{path.name}.{start}"
    (folder / "kernels" / "cuda").mkdir(parents=True)
    text = path.read_text()
    (folder / "kernels" / "cuda" / path.name).write_text(text[:start] + "(void)0;" + text[end:])
    kernels = [k for k in sorted(KERNELS.glob("*.cu")) if path in includes(k) and test_of(k)]
    said = ""
    for exe in sorted({test_of(k) for k in kernels}):
        objects = [str(build(folder, k)) for k in kernels if test_of(k) == exe]
        command = link_command(exe)
        out = command.index("-o")
        mutated = folder / exe.name
        command[out + 1] = str(mutated)
        command[out + 2 : out + 2] = objects  # in front of the libraries, which then need not give theirs
        subprocess.run(command, cwd=BUILD, check=True, capture_output=True, text=True)
        said = said or run(mutated, limits[exe])
    shutil.rmtree(folder)
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
    limits = {}
    for path, *_ in chosen:
        for exe in {test_of(k) for k in sorted(KERNELS.glob("*.cu")) if path in includes(k) and test_of(k)}:
            if exe not in limits:
                begun = time.monotonic()
                assert run(exe, 600) == "", f"{exe.name} fails as it is"
                limits[exe] = 20 + 8 * (time.monotonic() - begun)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        said = list(pool.map(lambda mutant: caught(tmp_path, mutant, limits), chosen))
    missed = []
    for (*_, what), text in zip(chosen, said):
        print(f"{what}: {text or 'NOT FOUND'}")
        if not text:
            missed.append(what)
    # of a few, one may be among the tenth that no test can show
    allowed = len(chosen) // 10 if full else max(1, len(chosen) // 10)
    assert len(missed) <= allowed, f"{len(missed)} of {len(chosen)} not found: {', '.join(missed)}"
