"""A cluster whose processes the tests start, kill, stop and start again themselves.

Two prefill and two decode workers and a router, started by hand as on several machines: the same
deployment file for all, `--name`, and `--set` for what differs. Three places to be in:

  shm    one host, unix sockets, KV blocks over shared memory
  tcp    one host, ZeroMQ and KV blocks over tcp
  hosts  each service on a host of its own (tests/faults/hosts.py), all over tcp

Nobody outlives the test run, however that ends. A keeper thread does what an init system does: a service that has ended is started again, at the
same addresses, a moment later. The control plane runs through a tap (tests/faults/tap.py), so that
a test can act at the very message that it means."""

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import uuid

import cluster as cl
import hosts as ns
import tap as taps

SEED = int(os.environ.get("KVFERRY_SEED", "1"))
FULL = os.environ.get("KVFERRY_FULL", "0") == "1"
BIN = os.path.join(cl.BUILD, "deploy")
CONTEXT = 512
CHUNK = 64
LOST_AFTER_S = 1.5
REBIRTH_S = 0.25  # between a death and the next start
CHANNELS = ("control", "tokens")
# what no stream may wait longer for; in all, also the test's own patience
DEADLINES = {"queue": 15, "lease": 3, "prefill": 20, "transfer": 10, "decode_idle": 10, "total": 60}


class Service:
    def __init__(self, name, role):
        self.name, self.role = name, role
        self.process = None  # what was started; the program itself may be a child of it
        self.pid = None
        self.starts = 0
        self.ended_at = None
        self.held_down = False  # the keeper leaves it dead
        self.excused = True  # its next end is the test's doing
        self.ends = []  # (status, excused)


class Wire(http.client.HTTPConnection):
    """HTTP to the router, wherever it is."""

    def __init__(self, field, timeout):
        super().__init__(field.address, field.port, timeout=timeout)
        self.field = field

    def connect(self):
        host = self.field.host_of("router")
        self.sock = host.socket() if host else socket.socket()
        self.sock.settimeout(self.timeout)
        self.sock.connect((self.host, self.port))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class Stream:
    """One streamed answer and when each token of it came (time.monotonic)."""

    def __init__(self, identity, body):
        self.identity, self.body = identity, body
        self.tokens, self.times, self.text, self.finish = [], [], "", None
        self.status, self.error, self.cut = None, None, ""
        self.began = self.ended = None

    def longest_wait(self):
        stops = [self.began, *self.times, self.ended]
        return max(after - before for before, after in zip(stops, stops[1:]))


class Field:
    def __init__(self, place, prefill=2, decode=2, tapped=True, env=None, sets=None, **changes):
        self.place, self.mark = place, uuid.uuid4().hex
        self.path = tempfile.mkdtemp(prefix="kvf-", dir="/tmp")
        self.env, self.sets = env or {}, sets or {}
        self.services = {"router": Service("router", "router")}
        for role, count in (("prefill", prefill), ("decode", decode)):
            for index in range(count):
                self.services[f"{role}-{index}"] = Service(f"{role}-{index}", role)
        self.network = ns.Network(self.services) if place == "hosts" else None
        self.lock = threading.RLock()
        self.stopping = False
        self.tap = None
        self.placed = {}  # request id -> {"number", "prefill", "decode"}: who was asked last
        self.makers = {}  # (number, index of the token) -> who sampled it
        try:
            self._endpoints()
            self._write(prefill, decode, changes)
            if tapped:
                self.tap = taps.Tap({channel: self._listener(channel) for channel in CHANNELS}, self._to_router)
                self.tap.watch(self._note)
        except BaseException:
            self._clear()
            raise
        self.keeper = threading.Thread(target=self._keep, daemon=True)

    # ---- where things are

    def host_of(self, service):
        return self.network.hosts[service] if self.network else None

    def _endpoints(self):
        host = self.host_of("router")
        self.address = host.address if host else "127.0.0.1"
        ports = cl.free_ports(6)
        self.port = ports[0]
        if self.place == "shm":
            self.real = {channel: f"ipc://{self.path}/{channel}" for channel in (*CHANNELS, "events")}
            self.tapped = {channel: f"ipc://{self.path}/{channel}-tap" for channel in CHANNELS}
        else:
            self.real = {channel: f"tcp://{self.address}:{port}" for channel, port in zip((*CHANNELS, "events"), ports[1:])}
            self.tapped = {channel: f"tcp://{self.address}:{port}" for channel, port in zip(CHANNELS, ports[4:])}

    def _write(self, prefill, decode, changes):
        self.file = os.path.join(self.path, "cluster.yaml")
        deployment = cl.merged(
            {
                "cluster": "field",
                "state_dir": os.path.join(self.path, "state"),
                "log_level": "debug",
                "model": {"name": cl.MODEL_NAME, "path": cl.MODEL, "context": CONTEXT},
                "router": {
                    "listen": f"{self.address}:{self.port}",
                    **self.real,
                    "deadlines": {name: f"{seconds}s" for name, seconds in DEADLINES.items()},
                },
                "prefill": {"workers": prefill, "threads": 1, "chunk_tokens": CHUNK},
                "decode": {"workers": decode, "threads": 1, "max_batch": 16},
                "kv": {"memory": "40MiB"},
                "transfer": {"transport": "shm" if self.place == "shm" else "tcp", "device": "data0" if self.network else "lo"},
                "heartbeat": {"interval": "100ms", "lost_after": f"{int(LOST_AFTER_S * 1000)}ms"},
            },
            changes,
        )
        with open(self.file, "w", encoding="utf-8") as file:
            file.write(cl.to_yaml(deployment) + "\n")

    def _socket(self, endpoint):
        if endpoint.startswith("ipc://"):
            return socket.socket(socket.AF_UNIX), endpoint[6:]
        address, port = endpoint[6:].rsplit(":", 1)
        host = self.host_of("router")
        return host.socket() if host else socket.socket(), (address, int(port))

    def _listener(self, channel):
        sock, address = self._socket(self.tapped[channel])
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(64)
        return sock

    def _to_router(self, channel):
        sock, address = self._socket(self.real[channel])
        try:
            sock.settimeout(1)
            sock.connect(address)
        except OSError:
            sock.close()
            raise
        return sock

    def _note(self, seen):
        """Keeps who serves which request: what a lease and a prefill are asked of."""
        if seen.kind == "LeaseRequest":
            self.placed.setdefault(seen.text(2), {}).update(number=seen.key()[1], decode=seen.worker)
        elif seen.kind == "PrefillRequest":
            self.placed.setdefault(seen.text(2), {}).update(number=seen.key()[1], prefill=seen.worker)
        elif seen.kind == "StepTokens":
            name = seen.text(1)
            for number, index, _ in seen.tokens():
                self.makers.setdefault((number, index), name)
        return False

    def forget_requests(self):
        self.placed.clear()
        self.makers.clear()

    # ---- services

    def log_path(self, name):
        return os.path.join(self.path, f"{name}.log")

    def _start(self, service):
        binary = {"router": "router", "prefill": "prefill-worker", "decode": "decode-worker"}[service.role]
        folder = os.path.join(cl.BUILD, "router") if binary == "router" else BIN
        words = [os.path.join(folder, binary), "-f", self.file]
        if service.role != "router":
            words += ["--name", service.name]
            if self.tap is not None:
                words += [word for channel in CHANNELS for word in ("--set", f"router.{channel}={self.tapped[channel]}")]
        words += [word for one in (*self.sets.get(service.role, ()), *self.sets.get(service.name, ())) for word in ("--set", one)]
        host = self.host_of(service.name)
        with open(self.log_path(service.name), "a", encoding="utf-8") as log:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *(host.command(words) if host else words)], cwd=cl.ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env={**os.environ, **self.env.get(service.role, {}), **self.env.get(service.name, {}), cl.MARK: self.mark}, start_new_session=True,
            )
        with self.lock:
            service.process, service.pid, service.ended_at, service.excused = process, None, None, False
            service.starts += 1
        if host is None:
            service.pid = process.pid
        else:
            cl.wait_until(lambda: self._program(service, binary), 10, f"{service.name} does not start")

    @staticmethod
    def _program(service, binary):
        """The program below `ip netns exec ... unshare`."""
        if service.process.poll() is not None:
            return True  # the keeper will see it
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{service.process.pid}/task/{service.process.pid}/children", encoding="ascii") as file:
                child = int(file.read().split()[0])
            if os.path.basename(os.readlink(f"/proc/{child}/exe")) in (binary, "worker"):
                service.pid = child
                return True
        return False

    def _keep(self):
        while not self.stopping:
            for service in self.services.values():
                process = service.process
                if process is None or process.poll() is None:
                    continue
                if service.ended_at is None:
                    service.ended_at = time.monotonic()
                    service.ends.append((process.returncode, service.excused))
                elif not service.held_down and not self.stopping and time.monotonic() > service.ended_at + REBIRTH_S:
                    self._start(service)
            time.sleep(0.02)

    def signal(self, name, number):
        service = self.services[name]
        if number == signal.SIGKILL:
            service.excused = True
        if service.pid is not None and service.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(service.pid, number)
                return True
        return False

    def kill(self, name):
        return self.signal(name, signal.SIGKILL)

    def stop(self, name):
        self.services[name].excused = True  # given up meanwhile, it ends when it goes on
        return self.signal(name, signal.SIGSTOP)

    def go_on(self, name):
        return self.signal(name, signal.SIGCONT)

    def held(self, name):
        """What grows when something leaks: bytes of its own (a pool is touched whole at the start), descriptors, threads."""
        pid = self.services[name].pid
        with contextlib.suppress(OSError):
            return self.private_bytes(name), len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))
        return None

    def private_bytes(self, name):
        with contextlib.suppress(OSError), open(f"/proc/{self.services[name].pid}/status", encoding="ascii") as file:
            for line in file:
                if line.startswith("RssAnon:"):
                    return int(line.split()[1]) << 10
        return None

    # ---- life

    def __enter__(self):
        try:
            for service in self.services.values():
                self._start(service)
            self.keeper.start()
            self.wait_ready(20)
        except BaseException:
            self.tell_logs()
            self._clear()
            raise
        return self

    def __exit__(self, kind, value, trace):
        if kind is not None:
            self.tell_logs()
        self._clear()

    def _clear(self):
        self.stopping = True
        if getattr(self, "keeper", None) is not None and self.keeper.is_alive():
            self.keeper.join(15)
        for service in self.services.values():
            for sign in (signal.SIGCONT, signal.SIGKILL):
                self.signal(service.name, sign)
            if service.process is not None:
                with contextlib.suppress(OSError):
                    service.process.kill()
                service.process.wait(20)
        for pid in cl.marked_processes(self.mark):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if self.tap is not None:
            self.tap.close()
        if self.network is not None:
            self.network.remove()
        if os.environ.get("KVFERRY_KEEP", "0") == "0":
            shutil.rmtree(self.path, ignore_errors=True)

    def tell_logs(self, lines=30):
        for name in self.services:
            with contextlib.suppress(OSError), open(self.log_path(name), encoding="utf-8", errors="replace") as file:
                print(f"---- {name}")
                print("\n".join(file.read().splitlines()[-lines:]))

    def log(self, name):
        with open(self.log_path(name), encoding="utf-8", errors="replace") as file:
            return file.read()

    # ---- asking

    def get(self, path, timeout=10):
        wire = Wire(self, timeout)
        try:
            wire.request("GET", path)
            answer = wire.getresponse()
            return answer.status, answer.read().decode()
        finally:
            wire.close()

    def workers(self):
        return json.loads(self.get("/workers")[1])["workers"]

    def metric(self, name, **labels):
        total = None
        for line in self.get("/metrics")[1].splitlines():
            if line.startswith("#") or not line.startswith(name) or line[len(name):len(name) + 1] not in (" ", "{"):
                continue
            if all(f'{key}="{value}"' in line for key, value in labels.items()):
                total = (total or 0) + float(line.rsplit(" ", 1)[1])
        return total

    def missing(self):
        """What keeps the cluster from being whole, in words; "" when it is."""
        try:
            status, body = self.get("/ready", 5)
            workers = {worker["name"]: worker["state"] for worker in self.workers()}
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            return f"the router does not answer: {error!r}"
        if status != 200:
            return body
        prefill = sum(service.role == "prefill" for service in self.services.values())
        wanted = [name for name, service in self.services.items() if service.role != "router" and not service.held_down]
        bad = [f"{name} is {workers.get(name)}" for name in wanted if workers.get(name) != "ready"]
        links = json.loads(body)["links"]
        if not bad and len(wanted) == len(self.services) - 1 and links != prefill * (len(wanted) - prefill):
            bad.append(f"{links} links are up")
        return "; ".join(bad)

    def wait_ready(self, timeout_s=30):
        cl.wait_until(lambda: not self.missing(), timeout_s, lambda: f"the cluster is not whole: {self.missing()}")

    def unclean(self):
        """What is still held, in words; "" when every block of every worker is free or cached."""
        lines = []
        try:
            for worker in self.workers():
                ledger = worker["ledger"]
                kinds = {kind: ledger[kind] for kind in ("free", "cached", "leased", "running", "quarantined")}
                if ledger["total"] <= 0 or sum(kinds.values()) != ledger["total"]:
                    lines.append(f"{worker['name']}: does not add up: {ledger}")
                if kinds["free"] + kinds["cached"] != ledger["total"]:
                    lines.append(f"{worker['name']}: {ledger}")
                if worker["running"] or worker["waiting"] or worker["inflight"]:
                    lines.append(f"{worker['name']}: running {worker['running']} waiting {worker['waiting']} inflight {worker['inflight']}")
            for name in ("kvferry_requests_active", "kvferry_requests_queued", "kvferry_kv_blocks_held_idle"):
                if self.metric(name) != 0:
                    lines.append(f"{name} is {self.metric(name)}")
        except (OSError, http.client.HTTPException, ValueError) as error:
            lines.append(f"the router does not answer: {error!r}")
        return "; ".join(lines)

    def assert_clean(self, timeout_s=15):
        """Twice in a row: what is still on its way must not hide what it will hold."""
        for _ in range(2):
            cl.wait_until(lambda: not self.unclean(), timeout_s, self.unclean)
            time.sleep(0.12)

    def stream(self, body, identity=None, on_token=None, timeout=DEADLINES["total"] + 10, register=None):
        """Streams one answer. on_token(stream) -> True hangs up there and then."""
        identity = identity or f"s-{uuid.uuid4().hex[:12]}"
        stream = Stream(identity, body)
        wire = Wire(self, timeout)
        stream.began = time.monotonic()
        if register is not None:
            register(stream, wire)
        try:
            wire.request("POST", "/v1/completions", json.dumps({**body, "stream": True}),
                         {"content-type": "application/json", "x-request-id": identity})
            answer = wire.getresponse()
            stream.status = answer.status
            if answer.status != 200:
                stream.error = json.loads(answer.read())["error"]
                return stream
            self._events(answer, stream, on_token)
        except (OSError, http.client.HTTPException, ValueError) as error:
            stream.cut = repr(error)
        finally:
            stream.ended = time.monotonic()
            wire.close()
        return stream

    @staticmethod
    def _events(answer, stream, on_token):
        while True:
            line = answer.readline()
            if not line:
                if stream.error is None:
                    stream.cut = "the connection ended without [DONE]"
                return
            if not line.startswith(b"data: "):
                continue
            if line.strip() == b"data: [DONE]":
                return
            event = json.loads(line[6:])
            if "error" in event:
                stream.error = event["error"]
                continue
            now = time.monotonic()
            for choice in event.get("choices", []):
                fresh = choice.get("token_ids") or []
                stream.tokens += fresh
                stream.times += [now] * len(fresh)
                stream.text += choice.get("text") or ""
                stream.finish = choice.get("finish_reason") or stream.finish
                if fresh and on_token is not None and on_token(stream):
                    stream.cut = "hung up"
                    return

    def complete(self, body, identity=None, timeout=DEADLINES["total"] + 10):
        """(status, body as JSON) of one answer that is not streamed."""
        wire = Wire(self, timeout)
        try:
            wire.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json", "x-request-id": identity or "c"})
            answer = wire.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            wire.close()


def asked(prompt, max_tokens, **options):
    """A request's body; greedy unless options say otherwise."""
    return {"model": cl.MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, **options}


def at_once(calls):
    """Runs each call on a thread of its own: their results, in order."""
    results, errors = [None] * len(calls), []

    def work(index):
        try:
            results[index] = calls[index]()
        except BaseException as error:  # told by the caller's thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINES["total"] + 60)
    if errors:
        raise errors[0]
    return results
