"""tests/gpu/achieved says met and not met where they are so, and refuses what it cannot compare with."""

import os
import subprocess
import sys

import pytest

ACHIEVED = os.path.join(os.path.dirname(os.path.abspath(__file__)), "achieved")
HEADER = "NVIDIA H7 PCIe, 10 SMs, sm_90: copies 1000 GB/s, mma.sync multiplies 100 TFLOP/s bf16, 200 TOP/s int8\n"
OWN = "prefill 2048: gate and up, bf16               50.0 us     500 GB/s  50 %    60.0 T/s  60 %  MISSED: ...\n"
FIRST = "prefill 2048: gate and up, cuBLASLt's first   10.0 us                                96.0 T/s  96 %\n"
OURS = "prefill 2048: gate and up, as in a model      10.0 us                                {0:.1f} T/s {0:3.0f} %\n"
GEMV = "decode 1: gate and up, bf16                   10.0 us     940 GB/s  94 %     1.0 T/s   1 %  reached: ...\n"
FIGURES = """\
sources:
  h7: "not an accelerator"
accelerators:
  h7-sxm:
    measured: {gemm_bf16: 9.9e13, hbm_gemv: 1.5e12}
  h7-pcie:
    flops: {bf16: 1e14}
    measured: {gemm_bf16: 1.0e14, gemm_fp8: 7, hbm_gemv: 1.0e12}
  b7:
    measured: {gemm_bf16: 1.0e15}
interconnects:
  h7-pcie:
    measured: {gemm_bf16: 1}
"""


def achieved(folder, bench, figures=None):
    (folder / "bench").write_text(bench)
    command = [sys.executable, ACHIEVED, str(folder / "bench")]
    if figures is not None:
        (folder / "figures.yaml").write_text(figures)
        command += ["--figures", str(folder / "figures.yaml")]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout.splitlines(), done.stderr


@pytest.mark.parametrize("share, status, word", [(70, 0, "met"), (69, 1, "NOT MET"), (95, 0, "met")])
def test_the_floor_is_of_the_measured_rate(tmp_path, share, status, word):
    code, lines, _ = achieved(tmp_path, HEADER + OWN + FIRST + OURS.format(share))
    assert code == status
    assert lines[0].startswith(f"floor 0.70 of the measured matmul rate: {word}: bf16 GEMM through cuBLASLt 0.{share}")
    assert lines[1].startswith("no goals") and len(lines) == 2


def test_without_an_algorithm_it_is_our_kernels(tmp_path):
    code, lines, _ = achieved(tmp_path, HEADER + OWN + FIRST)
    assert code == 1 and "NOT MET: bf16 GEMM by our kernel" in lines[0]
    assert achieved(tmp_path, HEADER)[0] == 1


def test_goals_are_those_of_the_device(tmp_path):
    code, lines, _ = achieved(tmp_path, HEADER + OWN + FIRST + OURS.format(94) + GEMV, FIGURES)
    assert code == 0
    assert "goal 0.95 of h7-pcie's gemm_bf16: not met: bf16 GEMM through cuBLASLt, our bits 0.94 (94.0 of 100.0 T/s)" in lines
    assert "goal 0.95 of h7-pcie's gemm_bf16: met: bf16 GEMM through cuBLASLt, its own bits 0.96 (96.0 of 100.0 T/s)" in lines
    assert "goal 0.95 of h7-pcie's hbm_gemv: not met: bf16 GEMV 0.94 (940.0 of 1000.0 GB/s)" in lines
    assert "goal 0.95 of h7-pcie's hbm_decode_attn: not compared: decode attention, no such figure" in lines


@pytest.mark.parametrize("figures, why", [
    ("accelerators:\n  b7:\n    measured: {gemm_bf16: 1e15}\n", "0 of these are NVIDIA H7 PCIe"),
    ("accelerators:\n  h7-x:\n    measured: {gemm_bf16: 1}\n  h7-y:\n    measured: {gemm_bf16: 1}\n", "2 of these are"),
    ("accelerators:\n  h7:\n    measured: {gemm_bf16: fast}\n", "h7: could not convert"),
    ("accelerators:\n  h7:\n    measured: {gemm_bf16: 0}\n", "not above 0"),
    ("h7:\n    measured: {gemm_bf16: 1}\n", "no accelerators"),
])
def test_figures_that_say_nothing_are_refused(tmp_path, figures, why):
    code, _, error = achieved(tmp_path, HEADER + OURS.format(99), figures)
    assert code == 2 and why in error
