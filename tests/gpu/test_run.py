"""tests/gpu/run on a machine whose tools are stand-ins: what it asks of them, and what it makes of their answers."""

import os
import subprocess

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BUILD = os.environ.get("KVFERRY_BUILD", os.path.join(ROOT, "build"))
MODEL = os.path.join(BUILD, "tests", "gpu-emu", "test_gpu_model")

# A fault of the device is an error to memcheck, and so is a call that was refused, unless it is told otherwise. What a fault
# looks like is the emulated device's.
SANITIZER = """\
echo "compute-sanitizer $*"
refused=1
while [ "$#" -gt 1 ]; do
    [ "$1 $2" != "--report-api-errors no" ] || refused=0
    shift
done
said=$("$1" 2>&1) || exit 1
printf '%s\\n' "$said"
! printf '%s\\n' "$said" | grep -q 'emulated gpu: .*kernels/cuda/.*(kernel ' || exit 1
exit $refused
"""


def tool(folder, name, script="exit 0"):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.fixture(name="machine")
def fixture_machine(tmp_path):
    """(run, tools, programs): run(step, ...) gives the exit status and the output, a GPU is there."""
    tools, programs = tmp_path / "tools", tmp_path / "programs"
    tools.mkdir(), programs.mkdir()
    tool(tools, "nvidia-smi")

    def run(*steps):
        env = dict(os.environ, PATH=f"{tools}:{os.environ['PATH']}", KVFERRY_SOURCE=ROOT)
        env.pop("CMOCKA_MESSAGE_OUTPUT", None)
        done = subprocess.run([os.path.join(ROOT, "tests", "gpu", "run"), "--from", programs, *steps], env=env, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=200)
        return done.returncode, done.stdout.splitlines()

    return run, tools, programs


@pytest.mark.skipif(not os.path.exists(MODEL), reason="there is no emulated GPU in this build")
def test_what_faults_on_purpose_is_left_out_under_the_sanitizer(machine):
    run, tools, programs = machine
    tool(tools, "compute-sanitizer", SANITIZER)
    tool(programs, "test_device_model", f"KVFERRY_TESTS='a_lo*' exec {MODEL}")  # two of them: not all take seconds
    status, lines = run("sanitize")
    assert status == 0 and lines[-1] == "1 passed, 0 failed, 0 skipped", lines[-40:]
    said = "\n".join(lines)
    assert "OK ] a_long_row_is_the_same_beside_a_chunk" in said and "a_lost_device" not in said, lines


def test_each_kernel_is_profiled(machine):
    run, tools, programs = machine
    tool(programs, "bench")
    tool(tools, "ncu", 'echo "ncu $*"')
    status, lines = run("profile")
    assert status == 0 and lines[-1] == "3 passed, 0 failed, 0 skipped", lines
    for kernel in ("attention_decode", "matmul", "seal_bytes"):
        assert len([line for line in lines if line.startswith("ncu ") and f"regex:{kernel}" in line and "--launch-count 1 " in line]) == 1


@pytest.mark.parametrize("script, last, word", [
    ("echo '==ERROR== ERR_NVGPUCTRPERM - The user does not have permission'; exit 1", "0 passed, 0 failed, 3 skipped", "ERR_NVGPUCTRPERM"),
    ("echo '==WARNING== No kernels were profiled.'", "0 passed, 3 failed, 0 skipped", "status 1"),
    ("echo 'error while loading shared libraries: libx.so: cannot open'; exit 127", "0 passed, 0 failed, 3 skipped", "missing"),
])
def test_why_nothing_was_profiled_is_told(machine, script, last, word):
    run, tools, programs = machine
    tool(programs, "bench")
    tool(tools, "ncu", script)
    status, lines = run("profile")
    assert lines[-1] == last and (status != 0) == ("3 failed" in last), lines
    assert [word in line for line in lines if line.startswith(("skipped: ncu", "failed: ncu"))].count(True) >= 3, lines
