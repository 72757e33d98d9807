#!/usr/bin/env python3
"""A stand-in for a service, in tests of the supervisor alone: it keeps the contract of
deploy/supervise.h (arguments, signals, /ready, exit status) and does nothing else.

STANDIN_<NAME> (NAME in upper case, '-' as '_') makes a service misbehave:
  fail    one error line, exit 1 at once        usage   the same with exit 2
  hang    ignores SIGTERM                       unready /ready stays 503
  crash   ends 0.2 s after every start          late    exit 2 at the second start
GET /NAME answers with STANDIN_DIR/NAME.json when there is one.
"""
import http.server
import os
import signal
import sys
import threading
import time

role = os.path.basename(sys.argv[0])
args = sys.argv[1:]
assert args[0] == "-f", args
options, sets = {}, {}
for flag, value in zip(args[::2], args[1::2]):
    if flag == "--set":
        key, _, text = value.partition("=")
        sets[key] = text
    else:
        options[flag] = value
name = options.get("--name", "router")
mode = os.environ.get("STANDIN_" + name.upper().replace("-", "_"), "")
assert (role == "router") == ("--name" not in options)
for key in ("router.control", "router.tokens", "router.events"):
    assert sets[key] and not sets[key].endswith(":0"), sets
assert int(sets["prefill.threads"]) > 0 and int(sets["decode.threads"]) > 0
open_fds = os.listdir("/proc/self/fd")
assert len(open_fds) <= 4, open_fds  # 0, 1, 2 and the listing's own

print(f'level=info svc={role} msg="started" pid={os.getpid()}', file=sys.stderr, flush=True)
if mode == "late":
    mark = os.path.join(os.environ["STANDIN_DIR"], name)
    if os.path.exists(mark):
        mode = "usage"
    else:
        open(mark, "w").close()
        mode = "crash"
if mode in ("fail", "usage"):
    print(f'level=error svc={role} msg="cannot do it" name={name}', file=sys.stderr, flush=True)
    print(f'level=info svc={role} msg="after the error"', file=sys.stderr, flush=True)
    sys.exit(1 if mode == "fail" else 2)
if mode == "hang":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
if mode == "crash":
    def crash():
        time.sleep(0.2)
        while not os.path.exists(os.path.join(os.environ["STANDIN_DIR"], "go")):
            time.sleep(0.05)
        os._exit(1)
    threading.Thread(target=crash, daemon=True).start()

WORKERS = b"""{"workers": [{"name": "prefill-0", "role": "prefill", "state": "ready",
 "backend": "cpu-x", "lanes": "posix+cma", "ledger": {"total": 64, "free": 60, "cached": 4, "leased": 0,
 "running": 0, "quarantined": 0}, "queue_ms": 1.5, "incarnation": "7"}]}"""


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body, code = b"{}", 404
        if self.path == "/ready":
            code = 503 if mode == "unready" else 200
            body = b'{"waiting": "for the test"}'
        elif self.path == "/workers":
            code, body = 200, WORKERS
        told = os.path.join(os.environ["STANDIN_DIR"], self.path.strip("/") + ".json")
        if os.path.exists(told):
            with open(told, "rb") as file:
                code, body = 200, file.read()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


if role == "router":
    host, _, port = sets["router.listen"].rpartition(":")
    assert int(port) > 0
    http.server.ThreadingHTTPServer((host, int(port)), Handler).serve_forever()
while True:
    time.sleep(1)
