"""The HTTP door of a real cluster against raw sockets and many clients: bodies of every kind, ids, logs,
metrics, company."""

import asyncio
import json
import re
import socket
import time

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

import cluster as cl
from test_cases import CASES, JSON

SMALL = {"model": cl.MODEL_NAME, "prompt": "hi", "max_tokens": 1}


def raw(plain, *pieces):
    """Sends pieces as they are; all that comes back until the server closes."""
    with socket.create_connection(("127.0.0.1", plain.port), timeout=30 * cl.SLOW) as sock:
        for piece in pieces:
            sock.sendall(piece)
        out = b""
        while data := sock.recv(65536):
            out += data
        return out


def request(body=json.dumps(SMALL).encode(), headers="", method="POST", path="/v1/completions", version="1.1", length=True):
    head = f"{method} {path} HTTP/{version}\r\nHost: x\r\nConnection: close\r\n{headers}"
    return (head + (f"Content-Length: {len(body)}\r\n" if length else "") + "\r\n").encode() + body


def status(answer):
    return int(answer.split(b" ", 2)[1])


@pytest.mark.parametrize("body", [
    b"", b"\0", b'\xef\xbb\xbf{"model":"M","prompt":"a"}', b'{"model":"M","prompt":"a\0b"}', b'{"model":"M","prompt":"a\xff"}',
    b'{"model":"M","prompt":"\xed\xa0\x80"}', b'{"model":"M","prompt":"a","prompt":"b"}', b'{"model":"M","prompt":"a"} x',
    '{"model":"M","prompt":"a"}'.encode("utf-16"), b"[1]", b"null", b"{", b'{"model":"M","prompt":"a\\u0000',
])
def test_a_body_that_is_no_json_is_400(plain, body):
    response = plain.http.post("/v1/completions", content=body.replace(b'"M"', json.dumps(cl.MODEL_NAME).encode()), headers=JSON)
    assert response.status_code == 400
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_forms_of_a_request(plain):
    body = json.dumps(SMALL).encode()
    chunks = b"".join(b"1\r\n" + bytes([byte]) + b"\r\n" for byte in body) + b"0\r\n\r\n"
    stream = json.dumps({**SMALL, "stream": True}).encode()
    assert status(raw(plain, request(chunks, "Transfer-Encoding: chunked\r\n", length=False))) == 200
    assert status(raw(plain, request(headers="Content-Type: text/plain\r\n"))) == 200
    assert status(raw(plain, request(version="1.0"))) == 200
    whole = raw(plain, request(stream, version="1.0"))
    assert b"chunked" not in whole and whole.endswith(b"data: [DONE]\n\n"), "HTTP/1.0 knows no chunks"
    head, rest = request(headers="Expect: 100-continue\r\n").split(b"\r\n\r\n")
    assert b"100 Continue" in raw(plain, head + b"\r\n\r\n", rest)
    answers = raw(plain, request(b"{}").replace(b"Connection: close\r\n", b"") + request())
    assert re.findall(rb"HTTP/1.1 (\d+)", answers) == [b"400", b"200"], "pipelined"
    for method, want in (("HEAD", 405), ("OPTIONS", 405), ("PUT", 405), ("FOO", 405)):
        answer = raw(plain, request(b"", method=method))
        assert status(answer) == want and b"\r\nAllow: POST\r\n" in answer
        assert b"access-control" not in answer.lower(), "no other site's page may read answers"
    answer = raw(plain, request(b"", method="HEAD", path="/v1/models"))
    assert status(answer) == 200 and answer.endswith(b"\r\n\r\n")


def test_over_the_limit_is_413_whatever_the_form(plain):
    piece = b"x" * (1 << 16)

    def chunks():
        for _ in range(320):
            yield piece

    for content in (piece * 320, chunks()):
        started = time.monotonic()
        response = plain.http.post("/v1/completions", content=content, headers=JSON)
        assert response.status_code == 413 and response.json()["error"]["code"] == "body_too_large"
        assert time.monotonic() - started < 5 * cl.SLOW


def test_a_connection_lives_through_errors(plain):
    before = plain.metric("kvferry_http_connections")
    with httpx.Client(base_url=plain.base, timeout=60 * cl.SLOW) as one:
        for body, want in [("{}", 400), ("", 400), ('{"model":"x","prompt":"a"}', 404), (json.dumps(SMALL), 200),
                           (json.dumps({**SMALL, "stream": True}), 200)] * 4:
            response = one.post("/v1/completions", content=body)
            assert response.status_code == want
        assert plain.metric("kvferry_http_connections") <= before + 1, "one connection carried them all"


def test_a_name_with_nul_is_not_the_name_before_it(plain):
    assert plain.http.get(f"/v1/models/{cl.MODEL_NAME}").status_code == 200
    assert plain.http.get(f"/v1/models/{cl.MODEL_NAME}%00x").status_code == 404
    response = plain.http.post("/v1/completions", json={**SMALL, "model": cl.MODEL_NAME + "\0x"})
    assert response.status_code == 404 and cl.MODEL_NAME + "?x" in response.json()["error"]["message"]


PROMPTS = ["Emoji: 😀 🎉 👩‍👩‍👧 and", "漢字とひらがな", "日本の首都は", "안녕하세요", "Привет, как", "naïve café", "مرحبا", "🙂🙂🙂🙂", "𝔘𝔫𝔦", "\0abc",
           "\n\n\n", "   ", "é\u0301", "🇫🇷🇩🇪", "List emojis:", "<|im_start|>user\nhi<|im_end|>\n", '{"a":', "```python\ndef", "\ufeffx", "\u2028"]


@pytest.mark.parametrize("temperature", [0, 1.9])
def test_streams_join_to_the_whole_text(plain, temperature):
    """At 1.9 the answers are bytes of all kinds, whole characters and pieces of them."""
    options = {"temperature": temperature, "seed": 3, "ignore_eos": True, "skip_special_tokens": False}

    def check(prompt):
        whole = plain.complete(prompt, cl.scaled(40), **options)
        body = plain.body(prompt, cl.scaled(40), stream=True, stream_options={"include_usage": True}, **options)
        with plain.http.stream("POST", "/v1/completions", json=body, headers={"x-request-id": "the-id"}) as response:
            assert response.headers["content-type"] == "text/event-stream"
            assert response.headers["x-request-id"] == "the-id"
            chunks = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
        texts = [choice["text"] for chunk in chunks for choice in chunk["choices"]]
        assert "".join(texts) == whole.text, prompt
        assert [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]] == [whole.finish]
        assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == whole.usage["completion_tokens"]
        back = plain.http.post("/detokenize", json={"tokens": whole.token_ids}).json()["prompt"]
        assert back == whole.text, prompt

    plain.together([lambda prompt=prompt: check(prompt) for prompt in PROMPTS])


def test_a05_a_seed_does_not_depend_on_its_company(plain):
    one = lambda **options: plain.complete("The harbour was", 32, **{"temperature": 0.9, "seed": 1234, **options})  # noqa: E731
    alone = one().token_ids
    for seeded in (False, True):
        others = [lambda i=i: plain.complete(f"Stranger {i}", 32, temperature=1.2, seed=i if seeded else None) for i in range(7)]
        assert plain.together([one] + others)[0].token_ids == alone
    body = plain.body("The harbour was", 32, temperature=0.9, seed=1234, n=3)
    choices = plain.http.post("/v1/completions", json={**body, "temperature": 0.9}).json()["choices"]
    assert choices[0]["token_ids"] == alone and len({tuple(choice["token_ids"]) for choice in choices}) == 3
    assert len({tuple(one(seed=None).token_ids) for _ in range(5)}) > 1


def test_a16_the_whole_prompt_is_cached(plain, rng):
    for blocks in (1, 4):
        prompt = [rng.randrange(100, 40000) for _ in range(16 * blocks)]
        first, second = plain.complete(prompt, 2), plain.complete(prompt, 2)
        assert first.token_ids == second.token_ids
        assert second.usage["prompt_tokens_details"]["cached_tokens"] == 16 * (blocks - 1), "the last token is computed"
        longer = plain.complete(prompt + [5, 6, 7], 1)
        assert longer.usage["prompt_tokens_details"]["cached_tokens"] == 16 * blocks, "the last block too is cached"


def families(plain):
    page = plain.http.get("/metrics").text
    found = list(text_string_to_metric_families(page))
    names = [family.name for family in found]
    assert len(names) == len(set(names)), "a family comes once"
    for family in found:
        assert family.documentation and family.type in ("counter", "gauge", "histogram"), family.name
        if family.type == "histogram":
            check_histogram(family)
    return {family.name: family for family in found}


def check_histogram(family):
    series = {}
    for sample in family.samples:
        key = tuple(sorted((k, v) for k, v in sample.labels.items() if k != "le"))
        series.setdefault(key, []).append(sample)
    for samples in series.values():
        buckets = [sample for sample in samples if sample.name.endswith("_bucket")]
        count = next(sample.value for sample in samples if sample.name.endswith("_count"))
        values = [sample.value for sample in buckets]
        bounds = [float(sample.labels["le"]) for sample in buckets]
        assert values == sorted(values) and bounds == sorted(set(bounds)) and bounds[-1] == float("inf")
        assert values[-1] == count and bounds[-2] >= 600


def test_a31_names_from_requests_do_not_reach_the_metrics(plain, rng):
    before = families(plain)
    with open(f"{CASES}/metric_names.jsonl", encoding="utf-8") as file:
        names = [json.loads(line) for line in file if line.strip()]
    names = [name if isinstance(name, str) else name.get("model", name.get("name", "")) for name in names]
    names += ["x%d" % rng.randrange(10**9) for _ in range(100)]
    for name in names:
        assert plain.http.post("/v1/completions", json={**SMALL, "model": name}).status_code in (400, 404)
    after = families(plain)
    assert set(after) == set(before)
    assert sum(len(f.samples) for f in after.values()) <= sum(len(f.samples) for f in before.values()) + 2


def test_a32_every_request_is_counted_once(plain):
    def sums():
        found = families(plain)
        reasons = {sample.labels["finished_reason"]: sample.value for sample in found["vllm:request_success"].samples}
        total = lambda name, end: sum(s.value for s in found[name].samples if s.name.endswith(end))  # noqa: E731
        return {**reasons, "prompt": total("vllm:prompt_tokens", "_total"), "prompt_sum": total("vllm:request_prompt_tokens", "_sum"),
                "ttft": total("vllm:time_to_first_token_seconds", "_count"),
                "tokens": total("vllm:generation_tokens", "_total"), "tokens_sum": total("vllm:request_generation_tokens", "_sum")}

    before = sums()
    prompt = "word " * cl.scaled(600)
    long = cl.CONTEXT - cl.scaled(600) - 50
    calls = [lambda i=i: plain.stream(f"{i} {prompt}", long, hang_up=lambda tokens: tokens > 0, ignore_eos=True) for i in range(5)]
    calls += [lambda i=i: plain.complete(f"{i} finished", 4, ignore_eos=True) for i in range(5)]
    calls += [lambda: plain.complete("refused", 0, expect=400) for _ in range(5)]
    plain.together(calls)
    plain.assert_clean()
    after = cl.wait_until(lambda: (now := sums())["abort"] - before["abort"] == 5 and now, 10, lambda: f"{before} {sums()}")
    change = {name: after[name] - before[name] for name in after}
    assert {name: change[name] for name in ("stop", "length", "abort", "error", "timeout", "ttft")} == {
        "stop": 0, "length": 5, "abort": 5, "error": 5, "timeout": 0, "ttft": 10}
    assert change["prompt"] == change["prompt_sum"] > 5 * cl.scaled(600)
    assert change["tokens"] == change["tokens_sum"]
    assert plain.metric("kvferry_requests_active") == 0 and plain.metric("kvferry_requests_queued") == 0


def test_a_request_is_followed_through_every_log(plain):
    """Its id is in every service's log, and what it says is in none."""
    secret = "Xylophonzebra"
    headers = {"x-request-id": "follow.me:1_2-3"}
    plain.http.post("/v1/completions", json={**SMALL, "prompt": secret + " is", "max_tokens": 4, "ignore_eos": True}, headers=headers)
    plain.http.post("/v1/chat/completions", json={"model": cl.MODEL_NAME, "max_tokens": 2, "messages": [{"role": "user", "content": secret}]})
    plain.http.post("/v1/completions", content='{"model":"%s","prompt":"%s \\ud800"}' % (cl.MODEL_NAME, secret))
    plain.http.post("/v1/completions", content='{"%s is":1e999}' % secret)
    plain.http.post("/v1/completions", json={**SMALL, "stop": secret * 200})
    plain.http.post("/v1/chat/completions", json={"model": cl.MODEL_NAME, "messages": [{"role": secret, "content": secret}]})
    plain.assert_clean()
    logs = plain.logs()
    for service in ("router", "prefill-0", "decode-0"):
        text = next(text for path, text in logs.items() if service in path)
        assert "req=follow.me:1_2-3 " in text, service
    for path, text in logs.items():
        assert secret not in text, path
        for line in text.splitlines():
            assert re.match(r"level=\w+ ts=\S+ svc=\S+ (req=[\w.:-]+ )?msg=\"", line), line


def test_the_same_request_id_many_times_at_once(plain):
    def one(i):
        body = plain.body(f"The number {i} is", 8, ignore_eos=True)
        return plain.http.post("/v1/completions", json=body, headers={"x-request-id": "same"}).json()["choices"][0]["token_ids"]

    together = plain.together([lambda i=i: one(i) for i in range(8)])
    assert together == [one(i) for i in range(8)]


def test_many_streams_of_one_client_some_of_which_it_drops(plain):
    async def main():
        async with openai.AsyncOpenAI(base_url=plain.base + "/v1", api_key="none", max_retries=0, timeout=120 * cl.SLOW) as client:
            def ask(i, tokens):
                return client.completions.create(model=cl.MODEL_NAME, prompt=f"Number {i % 5}:", max_tokens=tokens, temperature=0,
                                                 stream=True, extra_body={"ignore_eos": True})

            async def whole(i):
                return "".join([chunk.choices[0].text async for chunk in await ask(i, 8)])

            async def dropped(i):
                stream = await ask(i, cl.CONTEXT // 2)
                async for _ in stream:
                    break
                await stream.close()

            return (await asyncio.gather(*[whole(i) for i in range(50)], *[dropped(i) for i in range(5)]))[:50]

    texts = asyncio.run(main())
    assert texts == [plain.complete(f"Number {i % 5}:", 8, ignore_eos=True).text for i in range(50)]
    client = openai.OpenAI(base_url=plain.base + "/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.2).completions.create(
            model=cl.MODEL_NAME, prompt="a", max_tokens=cl.CONTEXT - 50, extra_body={"ignore_eos": True})


def test_errors_of_overload_are_the_clients_own():
    with cl.Cluster(router={"limits": {"queue": 1, "requests": 1}}) as busy:
        with openai.OpenAI(base_url=busy.base + "/v1", api_key="none", max_retries=0, timeout=60 * cl.SLOW) as client:
            stream = client.completions.create(model=cl.MODEL_NAME, prompt="a", max_tokens=cl.CONTEXT - 50, stream=True,
                                               extra_body={"ignore_eos": True})
            next(iter(stream))
            with pytest.raises(openai.RateLimitError) as caught:
                client.completions.create(model=cl.MODEL_NAME, prompt="b", max_tokens=1)
            assert caught.value.response.headers["retry-after"] and caught.value.code
            stream.close()
            cl.wait_until(lambda: busy.metric("kvferry_requests_active") == 0, 10, "the stream's end")
            assert client.completions.create(model=cl.MODEL_NAME, prompt="b", max_tokens=1).usage.completion_tokens == 1
