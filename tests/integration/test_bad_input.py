"""Bad input: one clear line that names the place, a status that is not 0, no process left."""

import os
import random
import re
import socket
import subprocess
import sys

import pytest

import cluster as cl
from conftest import FULL, SEED, TESTS

CASES = os.path.join(TESTS, "cases")


@pytest.fixture
def refused():
    """Runs `up --detach` over a changed deployment; returns what it said after checking that it refused."""
    folders = []

    def run(*patterns, text=None, lines_max=1, command="up", **changes):
        folder = cl.Folder(**changes)
        folders.append(folder)
        if text is not None:
            with open(folder.file, "w", encoding="utf-8") as file:
                file.write(text(folder) if callable(text) else text)
        arguments = [command, "-f", folder.file] + (["--detach"] if command == "up" else [])
        status, out, err = folder.kvferry(*arguments, timeout_s=60)
        assert status not in (0, None) and status > 0, f"status {status}\n{out}\n{err}"
        folder.assert_no_process()
        said = [line for line in err.splitlines() if line.strip()]
        assert 1 <= len(said) <= lines_max, err
        for pattern in patterns:
            assert re.search(pattern, err, re.I), f"{pattern!r} is not in: {err}"
        assert "Sanitizer" not in err and "assert" not in err.lower(), err
        return err

    yield run
    for folder in folders:
        folder.remove()


def test_a_missing_model(refused):
    refused(r"/no/such\.gguf", model={"path": "/no/such.gguf"})


def test_a_file_that_is_no_model(refused, tmp_path):
    path = tmp_path / "text.gguf"
    path.write_text("this is no model\n" * 100)
    refused(r"text\.gguf", model={"path": str(path)})


def cut_lengths():
    rng = random.Random(f"{SEED} cut")
    size = os.path.getsize(cl.MODEL)
    chosen = [0, 4, rng.randrange(24, 2000), rng.randrange(2000, 2_000_000)] + [rng.randrange(2_000_000, size) for _ in range(16 if FULL else 2)]
    return chosen + [size - 1]


@pytest.mark.parametrize("length", cut_lengths())
def test_a_model_that_is_cut_off(refused, tmp_path, length):
    path = tmp_path / "cut.gguf"
    with open(cl.MODEL, "rb") as whole, open(path, "wb") as cut:
        cut.write(whole.read(length))
    refused(r"cut\.gguf", model={"path": str(path)})


@pytest.fixture(scope="module")
def bad_models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    subprocess.run([sys.executable, os.path.join(TESTS, "unit", "text", "gen_gguf_bad.py"), str(folder)], check=True, stdout=subprocess.DEVNULL)
    return sorted(path for path in folder.iterdir() if path.suffix == ".gguf")


def test_malformed_models(refused, bad_models):
    """Files of cases A13 to A15; also the sound container, which is no whole model."""
    chosen = bad_models
    if not FULL:
        chosen = random.Random(f"{SEED} gguf").sample(bad_models, 8)
    for path in chosen:
        refused(re.escape(path.name), model={"path": str(path)})


def test_a_port_in_use(refused):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        refused(str(port), router={"listen": f"127.0.0.1:{port}"})


def test_no_memory_for_the_pool(refused):
    refused(r"memory|GiB|bytes", kv={"memory": "900000GiB"})


def test_a_pool_that_holds_no_block(refused):
    refused(r"kv\.memory|memory", kv={"memory": "64KiB"})


def test_a_ratio_that_does_not_divide_the_workers(refused):
    err = refused(r"ratio", workers=4, ratio="2:1")
    assert re.search(r"\b3\b", err) and re.search(r"\b6\b", err), f"says no total that would do: {err}"


def test_an_unknown_key_is_refused_with_the_nearest_one(refused):
    refused(r"cluster\.yaml:\d+:\d+", r"chunk_tokens", prefill={"chunk_tokenz": 16})


def test_a_value_of_the_wrong_type(refused):
    refused(r"cluster\.yaml:\d+:\d+", r"max_batch", decode={"max_batch": "many"})


def test_a_repeated_key(refused):
    def text(folder):
        with open(folder.file, encoding="utf-8") as file:
            return file.read() + "kv:\n    block_tokens: 16\n"

    refused(r"cluster\.yaml:\d+:\d+", r"kv", text=text)


def test_yaml_that_is_none(refused):
    refused(r"cluster\.yaml:\d+", text="cluster: [unclosed\nworkers: 2\n")


def test_an_empty_file(refused):
    refused(r"cluster\.yaml", text="", lines_max=3)


def test_all_faults_are_told_at_once(refused):
    err = refused(
        r"max_batch", r"block_tokens", r"ratio", command="check", lines_max=5,
        ratio="one to one", decode={"max_batch": 0}, kv={"block_tokens": 15},
    )
    assert len(err.splitlines()) >= 3


@pytest.mark.parametrize("name", ["dup_top", "dup_nested", "dup_quoted", "typo_key", "typo_nested", "wrong_level", "wrong_values"])
def test_yaml_cases(refused, name):
    with open(os.path.join(CASES, "yaml", f"{name}.yaml"), encoding="utf-8") as file:
        text = file.read()
    refused(r"cluster\.yaml:\d+:\d+", text=text, command="check", lines_max=60)


def test_check_accepts_a_sound_file():
    folder = cl.Folder()
    try:
        status, out, err = folder.kvferry("check", "-f", folder.file)
        assert status == 0, out + err
    finally:
        folder.remove()


def test_a_missing_file(refused):
    folder = cl.Folder()
    try:
        status, _, err = folder.kvferry("up", "-f", folder.path + "/none.yaml", "--detach")
        assert status > 0 and "none.yaml" in err and len(err.strip().splitlines()) == 1, err
        folder.assert_no_process()
    finally:
        folder.remove()


def test_unknown_commands_and_options():
    folder = cl.Folder()
    try:
        for arguments in (["fly"], ["up", "--no-such-option"], ["up", "-f"], ["up", "-f", folder.file, "--set", "kv.no_such=1", "--detach"]):
            status, _, err = folder.kvferry(*arguments)
            assert status > 0 and err.strip(), arguments
        folder.assert_no_process()
    finally:
        folder.remove()


BAD_BODIES = [b"", b"{", b"null", b"[]", b"\xff\xfe", b'{"model": "' + b"a" * 10, b'{"prompt": "x", "prompt": "y"}', b"{}" * 3, b"\0" * 64]


@pytest.mark.parametrize("index", range(len(BAD_BODIES)))
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_bad_json_is_refused_in_openais_shape(plain, path, index):
    response = plain.http.post(path, content=BAD_BODIES[index], headers={"content-type": "application/json"})
    assert response.status_code == 400
    error = response.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"


def test_bytes_that_are_no_http(plain, rng):
    for junk in (b"\r\n" * 10, b"GET", os.urandom(300), b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n", b"GET / HTTP/1.1\r\nA: " + b"b" * 100000 + b"\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", plain.port), timeout=5) as sock:
            sock.sendall(junk)
            if rng.random() < 0.5:
                sock.settimeout(0.2)
                try:
                    sock.recv(1000)
                except OSError:
                    pass
    assert plain.http.get("/health").status_code == 200
    assert len(plain.complete("Still here", 2, ignore_eos=True).token_ids) == 2
