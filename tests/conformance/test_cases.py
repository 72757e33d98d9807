"""Requests that broke comparable systems: A02 usage in streams, A04 the validation matrix, A08 half
surrogate pairs, A38 deep JSON."""

import json
import os
import subprocess
import sys
import time

import pytest

import cluster as cl
from conftest import TESTS

CASES = os.path.join(TESTS, "cases")
JSON = {"content-type": "application/json"}


def table(name):
    with open(os.path.join(CASES, name), encoding="utf-8") as file:
        return [line.rstrip("\n").split("\t") for line in file if line.strip() and not line.startswith("#")]


def usage_cases():
    with open(os.path.join(CASES, "api_usage.jsonl"), encoding="utf-8") as file:
        return {case["id"]: case for case in map(json.loads, file)}


def events(plain, body):
    with plain.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]" and lines.count("[DONE]") == 1
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("name", "abcdefgh")
def test_a02_usage(plain, name):
    body = {**usage_cases()[name]["body"], "model": cl.MODEL_NAME}
    if name in "fg":
        response = plain.http.post("/v1/completions", json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"].startswith("stream_options")
        return
    if name == "e" and plain.http.post("/v1/completions", json={**body, "stream": False, "stream_options": None}).status_code == 400:
        pytest.skip("n over 1 is refused for now")
    chunks = events(plain, body)
    with_usage = [chunk for chunk in chunks if chunk.get("usage")]
    if name in "abch":
        assert with_usage == []
        return
    assert with_usage == [chunks[-1]] and chunks[-1]["choices"] == []
    usage = chunks[-1]["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    choices = body.get("n", 1)
    finishes = [choice["index"] for chunk in chunks for choice in chunk["choices"] if choice.get("finish_reason")]
    assert sorted(finishes) == list(range(choices))
    assert choices <= usage["completion_tokens"] <= 8 * choices


def vocabulary(plain):
    import struct  # the number of tokens, read off the model file itself
    with open(cl.MODEL, "rb") as file:
        head = file.read(4_000_000)
    at = head.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens")
    return struct.unpack_from("<Q", head, at + 8)[0]


def validation_rows():
    rows = [row + [""] * (4 - len(row)) for row in table("api_validation.tsv")]
    assert len(rows) >= 35
    return rows


@pytest.mark.parametrize("row", range(len(validation_rows())))
def test_a04_validation(plain, row):
    status, param, path, body = validation_rows()[row]
    raw = body.replace('"M"', json.dumps(cl.MODEL_NAME)).replace("[V]", f"[{vocabulary(plain)}]")
    accepted = plain.metric("kvferry_requests_accepted_total")
    response = plain.http.post(path, content=raw.encode(), headers=JSON)
    assert response.status_code == int(status), response.text
    if response.status_code == 200:
        return
    error = response.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"} and error["message"]
    assert error["type"] == "invalid_request_error"
    if param != "-":
        assert error["param"] == param, error
    assert plain.metric("kvferry_requests_accepted_total") == accepted, "a bad request went further than the check"


def test_a04_all_at_once_beside_good_streams(plain):
    want = plain.complete("A river is", 24, ignore_eos=True).token_ids
    vocab = vocabulary(plain)

    def bad(row):
        status, _, path, body = row
        raw = body.replace('"M"', json.dumps(cl.MODEL_NAME)).replace("[V]", f"[{vocab}]")
        return plain.http.post(path, content=raw.encode(), headers=JSON).status_code == int(status)

    calls = [lambda: plain.stream("A river is", 24, ignore_eos=True).token_ids == want for _ in range(8)]
    calls += [lambda row=row: bad(row) for row in validation_rows()]
    assert all(plain.together(calls))


def test_a08_half_an_emoji(plain):
    prompt_tokens, texts = [], []
    for status, raw in table("tok_surrogates.tsv"):
        body = raw.replace('"M"', json.dumps(cl.MODEL_NAME))
        response = plain.http.post("/v1/completions", content=body.encode(), headers=JSON)
        assert response.status_code == int(status), (raw, response.text)
        if status == "400":
            response.content.decode("utf-8")
            assert response.json()["error"]["type"] == "invalid_request_error"
    for raw in (r'"pair \ud83d\ude42 end"', '"pair 🙂 end"'):
        body = '{"model":"%s","prompt":%s,"max_tokens":6,"temperature":0}' % (cl.MODEL_NAME, raw)
        answer = plain.http.post("/v1/completions", content=body.encode(), headers=JSON).json()
        prompt_tokens.append(answer["usage"]["prompt_tokens"])
        texts.append(answer["choices"][0]["text"])
    assert len(set(prompt_tokens)) == 1 and len(set(texts)) == 1


@pytest.mark.parametrize("depth", [65, 1000, 10_000, 1_000_000])
def test_a38_deep_json(plain, depth):
    script = os.path.join(CASES, "gen_json_bomb.py")
    for shape in ("unknown", "object", "tools", "schema", "content", "truncated", "prompt"):
        raw = subprocess.run([sys.executable, script, shape, str(depth)], check=True, capture_output=True, text=True).stdout
        body = raw.replace('"M"', json.dumps(cl.MODEL_NAME)).encode()
        path = "/v1/completions" if shape == "prompt" else "/v1/chat/completions"
        started = time.monotonic()
        response = plain.http.post(path, content=body, headers=JSON)
        took_s = time.monotonic() - started
        assert response.status_code in ((400,) if depth < 1_000_000 else (400, 413)), (shape, response.text[:300])
        assert response.json()["error"]["message"]
        assert took_s < 2 * cl.SLOW, (shape, took_s)
    assert len(plain.complete("Still here", 2, ignore_eos=True).token_ids) == 2
