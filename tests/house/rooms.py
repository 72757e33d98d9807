"""The house rules as functions from a checkout to a list of complaints.

Each check takes the root of a checkout (or of a build of it) and returns lines such as
"router/http.c:12: includes kernels/...". Nothing here knows pytest; test_house.py plants violations
in a copy of the tree and sees each check fail.
"""

import os
import re
import shlex
import subprocess

# who a room may know, itself apart
ROOMS = {
    "common": set(),
    "kernels": {"common"},
    "router": {"common"},
    "prefill-worker": {"common", "kernels"},
    "decode-worker": {"common", "kernels"},
    "deploy": {"common", "kernels", "router", "prefill-worker", "decode-worker"},
    "tests": {"common", "kernels", "router", "prefill-worker", "decode-worker", "deploy"},
}
# what a room's public symbols start with
PREFIXES = {
    "kernels": ("kern_",),
    "router": ("router_",),
    "prefill-worker": ("prefill_",),
    "decode-worker": ("decode_",),
}
# a third-party header (by pattern) and the files that may include it
DOORS = [
    (r"microhttpd\.h", r"router/http\.c"),
    (r"jansson\.h", r"common/base/json\.c"),
    (r"xxhash\.h", r"common/base/hash\.c"),
    (r"(google/)?protobuf-c/.*|.*\.pb-c\.h", r"common/wire/[^/]+\.c"),
    (r"yaml\.h", r"common/config/yaml\.c"),
    (r"pcre2(posix)?\.h", r"common/text/tokenizer\.c"),
    (r"zmq(_utils)?\.h", r"common/wire/bus\.c"),
    (r"(ucp|uct|ucs|ucm)/.*", r"common/transfer/ucx(_context|_pool)?\.[ch]|tests/bench/put_bench\.c"),
    (r"nccl\.h", r"tests/unit/transfer/test_nccl_abi\.c"),
    (r"cublasLt\.h", r"kernels/cuda/blaslt_cuda\.cu"),
    (r"cuda.*", r"((kernels/cuda|tests/gpu)/.*|tests/unit/transfer/test_nccl_abi\.c)"),
    (r"[a-z]*intrin\.h|cpuid\.h", r"kernels/cpu/.*|common/(kv/tile_sum|transfer/copy)_x86\.c|tests/bench/peak_bench\.c"),
    (r"cmocka\.h", r"tests/.*"),
]
# headers of the C library and the kernel: no door needed
SYSTEM = re.compile(
    r"(assert|complex|ctype|errno|fenv|float|inttypes|iso646|limits|locale|math|setjmp|signal|"
    r"stdalign|stdarg|stdatomic|stdbool|stddef|stdint|stdio|stdlib|stdnoreturn|string|strings|"
    r"threads|time|uchar|wchar|wctype|dirent|dlfcn|fcntl|getopt|grp|ifaddrs|netdb|poll|pthread|"
    r"pwd|sched|semaphore|spawn|termios|unistd|glob|fnmatch|libgen|regex|syslog|malloc|byteswap|"
    r"endian|features|link|elf|execinfo|error|alloca|ucontext)\.h"
    r"|atomic|type_traits|utility"
    r"|(sys|linux|netinet|arpa|net|bits|asm|sanitizer)/.*"
)
BANNED = ("strcpy", "strcat", "sprintf", "vsprintf", "strtok", "atoi", "atol", "atof", "gets")
HEAP = ("malloc", "calloc", "realloc", "free", "strdup", "strndup", "asprintf", "vasprintf")
HEAP_DOOR = "common/base/mem.c"
LINES_MAX = 1000
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')


def sources(root, endings=(".c", ".h", ".cu", ".cpp")):
    """Paths of the checkout's own sources, relative to root."""
    for room in ROOMS:
        for folder, _, names in os.walk(os.path.join(root, room)):
            for name in sorted(names):
                if name.endswith(endings):
                    yield os.path.relpath(os.path.join(folder, name), root)


def read(root, path):
    with open(os.path.join(root, path), encoding="utf-8") as file:
        return file.read()


def room_of(path):
    return path.split("/", 1)[0]


def code_only(text):
    """The text with comments and literals blanked out, line numbers kept."""
    pattern = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'", re.S)
    return pattern.sub(lambda m: re.sub(r"[^\n]", " ", m.group(0)), text)


def includes(root):
    for path in sources(root):
        for number, line in enumerate(read(root, path).splitlines(), 1):
            match = INCLUDE.match(line)
            if match:
                yield path, number, match.group(1) == '"', match.group(2)


def check_includes(root):
    """No room includes one that it may not know."""
    bad = []
    for path, number, own, header in includes(root):
        room, other = room_of(path), room_of(header)
        if not own:
            continue
        if other in ROOMS:
            if other != room and other not in ROOMS[room]:
                bad.append(f"{path}:{number}: {room} may not include {header}")
            elif not header.endswith(".pb-c.h") and not os.path.exists(os.path.join(root, header)):
                bad.append(f"{path}:{number}: {header} does not exist")
        elif not any(re.fullmatch(pattern, header) for pattern, _ in DOORS) and room != "tests":
            bad.append(f'{path}:{number}: "{header}" is not named from the root')
    return bad


def check_doors(root):
    """A library's header is included behind its one door only."""
    bad = []
    for path, number, own, header in includes(root):
        if room_of(header) in ROOMS and not header.endswith(".pb-c.h"):
            continue
        doors = [door for pattern, door in DOORS if re.fullmatch(pattern, header.split("common/wire/")[-1])]
        if doors:
            if not any(re.fullmatch(door, path) for door in doors):
                bad.append(f"{path}:{number}: {header} belongs behind {' or '.join(doors)}")
        elif not own and not SYSTEM.fullmatch(header):
            bad.append(f"{path}:{number}: <{header}> has no door: name one in tests/house/rooms.py")
    return bad


def check_banned(root):
    """No function that cannot be used safely; the heap through its door only, but for memory that the
    C library itself handed out, where the line says so. Tests are not held to it."""
    bad = []
    banned = re.compile(r"(?<![\w.>])(%s)\s*\(" % "|".join(BANNED))
    heap = re.compile(r"(?<![\w.>])(%s)\s*\(" % "|".join(HEAP))
    for path in sources(root):
        text = read(root, path)
        if room_of(path) == "tests":
            continue
        for line, code in zip(enumerate(text.splitlines(), 1), code_only(text).splitlines()):
            number, whole = line
            match = banned.search(code)
            if match is None and path != HEAP_DOOR and "the C library's" not in whole:
                match = heap.search(code)
            if match:
                bad.append(f"{path}:{number}: {match.group(1)}() is not used here")
    return bad


def check_headers(root):
    """Every .c but a program's main has its .h, or fills one of its folder (or the one above), which
    it includes; every .h starts with #pragma once and a contract."""
    bad = []
    for path in sources(root):
        if room_of(path) == "tests":
            continue
        text = read(root, path)
        if path.endswith(".c"):
            program = re.search(r"^int main\(", text, re.M)
            folder = os.path.dirname(path)
            own = [m.group(2) for m in map(INCLUDE.match, text.splitlines()) if m and m.group(1) == '"']
            filled = any(os.path.dirname(header) in (folder, os.path.dirname(folder)) for header in own)
            if not program and not filled and not os.path.exists(os.path.join(root, path[:-2] + ".h")):
                bad.append(f"{path}: has no header {path[:-2]}.h")
        elif path.endswith(".h"):
            if not text.startswith("#pragma once\n"):
                bad.append(f"{path}: does not start with #pragma once")
            if f"/* {path}" not in text:
                bad.append(f"{path}: has no contract at the top (/* {path} - what this is ...)")
    return bad


def check_sizes(root):
    bad = []
    for path in sources(root, (".c", ".h", ".py", ".cu", ".cpp")):
        lines = read(root, path).count("\n")
        if lines > LINES_MAX:
            bad.append(f"{path}: {lines} lines, more than {LINES_MAX}: look for the seam")
    return bad


def check_public_text(root):
    """Nothing in the tree names a machine's own folders."""
    bad = []
    pattern = re.compile(r"(?<![\w.])/(work|home|root)/\w")
    for path in sources(root, (".c", ".h", ".py", ".md", ".sh", ".build", ".yaml", ".proto")):
        for number, line in enumerate(read(root, path).splitlines(), 1):
            if pattern.search(line) and "rooms.py" not in path:
                bad.append(f"{path}:{number}: names a folder of one machine")
    return bad


SOURCE_CHECKS = [check_includes, check_doors, check_banned, check_headers, check_sizes, check_public_text]


def link_lines(build):
    """(output, inputs) of every program's link line in build.ninja."""
    with open(os.path.join(build, "build.ninja"), encoding="utf-8") as file:
        text = file.read().replace("$\n", "")
    for match in re.finditer(r"^build ([^:\n]+): c(?:pp)?_LINKER\S* ([^\n]*)", text, re.M):
        outputs, inputs = match.group(1).split("|")[0].split(), match.group(2).replace("|", " ")
        yield outputs[0], shlex.split(inputs)


def check_links(build):
    """No program links another room's code than its own room may know."""
    bad = []
    for output, inputs in link_lines(build):
        room = room_of(output)
        if room not in ROOMS:
            continue
        for item in inputs:
            other = room_of(item)
            if other in ROOMS and other != room and other not in ROOMS[room]:
                bad.append(f"{output}: a program of {room} links {item}")
    return bad


def symbols(path, *options):
    text = subprocess.run(["nm", "-P", *options, path], capture_output=True, text=True, check=False).stdout
    return {line.split()[0] for line in text.splitlines() if line.strip()}


def check_undefined(build):
    """No object refers to a function of a room that its own may not know, with or without header."""
    bad = []
    for room in ROOMS:
        for folder, _, names in os.walk(os.path.join(build, room)):
            for name in names:
                if not name.endswith(".o"):
                    continue
                path = os.path.join(folder, name)
                for symbol in symbols(path, "-u"):
                    for other, prefixes in PREFIXES.items():
                        if symbol.startswith(prefixes) and other != room and other not in ROOMS[room]:
                            bad.append(f"{os.path.relpath(path, build)}: {room} refers to {symbol} of {other}")
    return bad


def needed(path):
    text = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=False).stdout
    return re.findall(r"\(NEEDED\).*\[([^\]]+)\]", text)


def programs(build):
    """Every program of a build (no libraries, no objects)."""
    for folder, _, names in os.walk(build):
        for name in names:
            path = os.path.join(folder, name)
            if re.search(r"\.(so|o|a)(\.|$)", name) or os.path.islink(path) or not os.access(path, os.X_OK):
                continue
            with open(path, "rb") as file:
                if file.read(4) == b"\x7fELF":
                    yield path


def loaded(program):
    """What the loader maps with a program, by name: the libraries of its libraries too."""
    text = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
    return [line.split()[0] for line in text.splitlines() if "=>" in line]


GPU_LIBRARY = re.compile(r"lib(cuda|cudart|cublas|cublasLt|nccl|nvidia[\w-]*|nvrtc)\.so")


def check_gpu_libraries(build):
    """GPU code comes with plugins alone: no program needs a GPU's libraries to start."""
    bad = []
    for path in programs(build):
        tests = room_of(os.path.relpath(path, build)) == "tests"
        for lib in needed(path) if tests else needed(path) + loaded(path):
            if GPU_LIBRARY.match(lib):
                bad.append(f"{os.path.relpath(path, build)} loads {lib}")
    return bad


def check_router(program):
    """The router holds no tensor code and does not load the data plane's library."""
    bad = [f"router contains {name}" for name in sorted(symbols(program)) if name.startswith("kern_")]
    bad += [f"router loads {lib}" for lib in needed(program) if re.match(r"lib(ucp|uct|ucs|nccl|cuda)", lib)]
    return bad
