#!/usr/bin/env python3
"""Asks a kvferry cluster one question, shows the answer as it streams, and what the client saw:
TTFT (time to first token) and TPOT (time per output token after it).

Usage: ask.py http://127.0.0.1:8080 "question" [max tokens]; needs nothing but Python itself.
"""
import http.client
import json
import sys
import time
import urllib.parse


def fail(text):
    sys.stdout.flush()
    print("ask:", " ".join(str(text).split()), file=sys.stderr)
    sys.exit(1)


def events(response):
    """The data of each server-sent event, as it arrives."""
    for line in response:
        line = line.strip()
        if line.startswith(b"data:"):
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            yield json.loads(data)
    raise ConnectionError("the stream ended before [DONE]")


def ask(address, question, tokens):
    connection = http.client.HTTPConnection(address, timeout=300)
    connection.request("GET", "/v1/models")
    models = json.loads(connection.getresponse().read())
    body = {"model": models["data"][0]["id"], "messages": [{"role": "user", "content": question}],
            "max_tokens": tokens, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    start = time.monotonic()
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        fail(f"{response.status}: {response.read().decode(errors='replace')}")
    first = last = None
    count, usage = 0, None
    for event in events(response):
        if "error" in event:
            fail(event["error"].get("message", event["error"]))
        usage = event.get("usage") or usage
        for choice in event.get("choices", []):
            text = choice.get("delta", {}).get("content")
            if text:
                last = time.monotonic()
                first = first or last
                count += 1
                print(text, end="", flush=True)
    print()
    if first is None:
        fail("the answer is empty")
    count = usage["completion_tokens"] if usage else count
    line = f"TTFT {(first - start) * 1000:.0f} ms"
    if count > 1:
        tpot = (last - first) / (count - 1)
        line += f", TPOT {tpot * 1000:.1f} ms" + (f" ({1 / tpot:.0f} tokens/s)" if tpot > 0 else "")
    prompt = f", {usage['prompt_tokens']} prompt tokens" if usage else ""
    print(f"    [{line}{prompt}, {count} tokens]")


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        fail('usage: ask.py http://HOST:PORT "question" [max tokens]')
    try:
        ask(urllib.parse.urlsplit(sys.argv[1]).netloc, sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 64)
    except BrokenPipeError:
        sys.exit(1)
    except (OSError, http.client.HTTPException, ValueError, KeyError, IndexError) as error:
        fail(f"{sys.argv[1]}: {type(error).__name__}: {error}")
