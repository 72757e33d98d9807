"""kv_cuda.so can be loaded, and says what is missing, on a machine that has no driver."""

import ctypes
import os
import re
import subprocess

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PLUGIN = os.path.join(os.environ.get("KVFERRY_BUILD", os.path.join(ROOT, "build")), "kernels", "cuda", "kv_cuda.so")


@pytest.fixture(autouse=True)
def built():
    if not os.path.exists(PLUGIN):
        pytest.skip("kv_cuda.so is not built: there is no nvcc")


def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_it_needs_none_of_a_gpus_libraries():
    needed = re.findall(r"NEEDED.*\[(.*)\]", run("readelf", "-d", PLUGIN))
    assert any(lib.startswith("libc.so") for lib in needed)
    assert [lib for lib in needed if re.match(r"lib(cu|nv|nccl)", lib)] == []


def test_it_shows_its_table_alone():
    """cudart and common are linked into it, and must not meet those of the program or of another plugin."""
    symbols = [line.split()[-1] for line in run("nm", "-D", "--defined-only", PLUGIN).splitlines()]
    assert symbols == ["kern_backend_plugin"]


def test_it_loads():
    ctypes.CDLL(PLUGIN, mode=os.RTLD_NOW | os.RTLD_LOCAL)


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_it_holds_machine_code_for_each_arch_and_no_other(arch):
    """cuobjdump is not everywhere; a cubin's ELF header is: machine EM_CUDA (190), the arch in its flags."""
    data = open(PLUGIN, "rb").read()
    flags = set()
    at = data.find(b"\x7fELF", 1)
    while at >= 0:
        if int.from_bytes(data[at + 18 : at + 20], "little") == 190:
            word = int.from_bytes(data[at + 48 : at + 52], "little")
            # since CUDA 13's ABI (ELF ABI version 8) the arch is in the second byte
            flags.add((word >> 8) & 0xFF if data[at + 8] >= 8 else word & 0xFF)
        at = data.find(b"\x7fELF", at + 1)
    if not flags:
        pytest.skip("the machine code is compressed")
    assert arch in flags and flags <= {80, 90, 100}
