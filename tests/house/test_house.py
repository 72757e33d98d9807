"""The rooms rule and the house's other rules hold, and each check can fail."""

import os
import shutil
import sys

import pytest

sys.path.insert(0, os.path.dirname(__file__))
import rooms  # noqa: E402

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BUILD = os.environ.get("KVFERRY_BUILD", os.path.join(ROOT, "build"))


@pytest.mark.parametrize("check", rooms.SOURCE_CHECKS, ids=lambda check: check.__name__[6:])
def test_the_tree_keeps(check):
    assert check(ROOT) == []


def test_no_program_links_a_room_it_may_not_know():
    assert list(rooms.link_lines(BUILD)), "no link line found: is this a build folder?"
    assert rooms.check_links(BUILD) == []


def test_no_object_refers_to_a_room_it_may_not_know():
    assert rooms.check_undefined(BUILD) == []


def test_the_router_holds_no_tensor_code_and_no_data_plane():
    program = os.path.join(BUILD, "router", "router")
    if not os.path.exists(program):
        pytest.skip("there is no router program")
    assert rooms.symbols(program), "nm finds no symbols: the check would see nothing"
    assert rooms.check_router(program) == []


def test_no_program_loads_a_gpus_libraries():
    seen = [os.path.relpath(path, BUILD) for path in rooms.programs(BUILD)]
    for service in ("deploy/kvferry", "deploy/prefill-worker", "deploy/decode-worker"):
        assert service in seen
    assert any(lib.startswith("libucp") for lib in rooms.loaded(os.path.join(BUILD, "deploy", "prefill-worker")))
    assert rooms.check_gpu_libraries(BUILD) == []


@pytest.fixture
def copy(tmp_path):
    """The sources alone, free to spoil."""
    root = tmp_path / "tree"
    for room in rooms.ROOMS:
        if os.path.isdir(os.path.join(ROOT, room)):
            shutil.copytree(os.path.join(ROOT, room), root / room, ignore=shutil.ignore_patterns("__pycache__"))
    return root


HEADER = "#pragma once\n\n/* {path} - planted. */\n"
PLANTED = {
    # check: file, text, what the complaint must name
    "common knows a service": (rooms.check_includes, "common/kv/planted.c", '#include "router/core.h"\n', "router/core.h"),
    "common knows kernels": (rooms.check_includes, "common/planted.h", '#include "kernels/model/forward.h"\n', "kernels/model/forward.h"),
    "kernels know a service": (rooms.check_includes, "kernels/cpu/planted.c", '#  include "decode-worker/batch.h"\n', "decode-worker/batch.h"),
    "the router knows kernels": (rooms.check_includes, "router/planted.c", '#include "kernels/model/sample.h"\n', "kernels/model/sample.h"),
    "prefill knows decode": (rooms.check_includes, "prefill-worker/planted.c", '#include "decode-worker/decode.h"\n', "decode-worker/decode.h"),
    "decode knows prefill": (rooms.check_includes, "decode-worker/planted.c", '#include "prefill-worker/ship.h"\n', "prefill-worker/ship.h"),
    "someone knows tests": (rooms.check_includes, "deploy/planted.c", '#include "tests/planted.h"\n', "tests/planted.h"),
    "an include not from the root": (rooms.check_includes, "common/kv/planted.c", '#include "layout.h"\n', '"layout.h"'),
    "an include of nothing": (rooms.check_includes, "common/kv/planted.c", '#include "common/kv/no_such.h"\n', "no_such.h"),
    "jansson by the window": (rooms.check_doors, "router/planted.c", "#include <jansson.h>\n", "common/base/json"),
    "zmq by the window": (rooms.check_doors, "deploy/planted.c", "#include <zmq.h>\n", "common/wire/bus"),
    "ucx by the window": (rooms.check_doors, "prefill-worker/planted.c", "#include <ucp/api/ucp.h>\n", "common/transfer"),
    "protobuf by the window": (rooms.check_doors, "router/planted.c", '#include "common/wire/messages.pb-c.h"\n', "common/wire"),
    "http by the window": (rooms.check_doors, "deploy/planted.c", "#include <microhttpd.h>\n", "router/http"),
    "an unknown library": (rooms.check_doors, "common/base/planted.c", "#include <curl/curl.h>\n", "curl/curl.h"),
    "strcpy": (rooms.check_banned, "router/planted.c", "void f(char *a) { strcpy (a, a); }\n", "strcpy"),
    "sprintf": (rooms.check_banned, "decode-worker/planted.c", "void f(char *a) { sprintf(a, a); }\n", "sprintf"),
    "the bare heap": (rooms.check_banned, "common/kv/planted.c", "void *f(void)\n{\n    return malloc(1);\n}\n", "planted.c:3: malloc"),
    "a bare free": (rooms.check_banned, "deploy/planted.c", "void f(void *p)\n{\n    free(p);\n}\n", "free"),
    "a source without header": (rooms.check_headers, "common/kv/planted.c", "int x;\n", "has no header"),
    "a header without contract": (rooms.check_headers, "common/kv/planted.h", "#pragma once\n", "no contract"),
    "a header without pragma": (rooms.check_headers, "common/kv/planted.h", "/* common/kv/planted.h - x */\n", "#pragma once"),
    "a file that is too long": (rooms.check_sizes, "common/kv/planted.c", "int x;\n" * 1101, "1101 lines"),
    "a machine's folder": (rooms.check_public_text, "common/kv/planted.c", "/* see " + "/home" + "/me/notes */\n", "planted.c:1"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_violation_is_found(copy, name):
    check, path, text, named = PLANTED[name]
    before = check(ROOT)
    os.makedirs(copy / os.path.dirname(path), exist_ok=True)
    (copy / path).write_text(text)
    bad = [line for line in check(str(copy)) if line not in before]
    assert len(bad) >= 1 and any(named in line for line in bad), bad


def test_what_is_only_mentioned_is_no_violation(copy):
    (copy / "common" / "planted.h").write_text(
        HEADER.format(path="common/planted.h")
        + '/* never call strcpy(a, b) or free(p) */\nstatic const char *const text = "malloc(1)";\nvoid pd_free(void *p);\n'
    )
    before = [line for check in rooms.SOURCE_CHECKS for line in check(ROOT)]
    assert [line for check in rooms.SOURCE_CHECKS for line in check(str(copy))] == before


def test_a_planted_link_is_found(tmp_path):
    (tmp_path / "build.ninja").write_text(
        "build router/router: c_LINKER router/router.p/main.c.o | common/libcommon.a $\n kernels/libkernels.a\n"
        "build prefill-worker/prefill: c_LINKER a.o | common/libcommon.a kernels/libkernels.a\n"
    )
    assert rooms.check_links(str(tmp_path)) == ["router/router: a program of router links kernels/libkernels.a"]


def test_a_planted_gpu_library_is_found(tmp_path):
    """Directly, and through a library that looks harmless."""
    (tmp_path / "empty.c").write_text("int nothing(void);\nint nothing(void) { return 0; }\n")
    (tmp_path / "main.c").write_text("int main(void) { return 0; }\n")
    os.makedirs(tmp_path / "deploy")
    link = f"cc -Wl,--no-as-needed -Wl,-rpath,{tmp_path} -L{tmp_path}"
    for command in (
        f"cc -shared -Wl,-soname,libcuda.so.1 -o {tmp_path}/libcuda.so.1 {tmp_path}/empty.c",
        f"{link} -shared -o {tmp_path}/libharmless.so {tmp_path}/empty.c -l:libcuda.so.1",
        f"{link} -o {tmp_path}/deploy/direct {tmp_path}/main.c -l:libcuda.so.1",
        f"{link} -o {tmp_path}/deploy/indirect {tmp_path}/main.c -lharmless",
    ):
        assert os.system(command) == 0
    bad = rooms.check_gpu_libraries(str(tmp_path))
    assert {line.split()[0] for line in bad} == {"deploy/direct", "deploy/indirect"}


def test_a_planted_reference_is_found(tmp_path):
    source = tmp_path / "planted.c"
    source.write_text("int kern_planted(void);\nint router_planted(void);\nint router_planted(void) { return kern_planted(); }\n")
    os.makedirs(tmp_path / "router")
    assert os.system(f"cc -c {source} -o {tmp_path}/router/planted.o") == 0
    assert rooms.check_undefined(str(tmp_path)) == ["router/planted.o: router refers to kern_planted of kernels"]
