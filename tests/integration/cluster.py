"""A real cluster for tests: a deployment file, free ports, a state directory of its own, `kvferry up`
and `down`, and the conditions that must hold after every test."""

import contextlib
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

import httpx

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BUILD = os.environ.get("KVFERRY_BUILD", os.path.join(ROOT, "build"))
KVFERRY = os.path.join(BUILD, "deploy", "kvferry")
MODEL = os.path.join(ROOT, "models", "SmolLM2-135M-Instruct.Q4_1.gguf")
MODEL_NAME = "smollm2-135m"
SANITIZED = "asan" in os.path.basename(BUILD)
SLOW = 6 if SANITIZED else 1  # what waits may take longer by
CONTEXT = 512 if SANITIZED else 2048
MARK = "KVFERRY_TEST_MARK"


def scaled(count):
    """Tokens of a prompt or an answer: fewer where every one takes ten times as long."""
    return max(1, count // 4) if SANITIZED else count


def free_ports(count):
    """Ports that were free a moment ago, all different."""
    sockets = []
    for _ in range(count):
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        sockets.append(sock)
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


def marked_processes(mark):
    """{pid: command line} of living processes started with this mark in their environment."""
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError):
            with open(f"/proc/{name}/environ", "rb") as file:
                if f"{MARK}={mark}".encode() not in file.read().split(b"\0"):
                    continue
            with open(f"/proc/{name}/stat", encoding="ascii", errors="replace") as file:
                if file.read().rsplit(")", 1)[1].split()[0] == "Z":
                    continue
            with open(f"/proc/{name}/cmdline", "rb") as file:
                found[int(name)] = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
    return found


def wait_until(condition, timeout_s, what):
    """Polls until condition() is true; what says in words what was waited for."""
    end = time.monotonic() + timeout_s * SLOW
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end, f"not within {timeout_s * SLOW} s: {what() if callable(what) else what}"
        time.sleep(0.05)


def to_yaml(value, indent=0):
    """Nested dicts of plain scalars as YAML; strings are quoted."""
    lines = []
    for key, item in value.items():
        if isinstance(item, dict):
            lines += [" " * indent + f"{key}:", to_yaml(item, indent + 4)]
        else:
            text = str(item).lower() if isinstance(item, bool) else json.dumps(item) if isinstance(item, str) else str(item)
            lines.append(" " * indent + f"{key}: {text}")
    return "\n".join(line for line in lines if line)


def merged(base, over):
    result = dict(base)
    for key, item in over.items():
        result[key] = merged(result.get(key, {}), item) if isinstance(item, dict) else item
    return result


class Folder:
    """A state directory, a deployment file in it, and the kvferry command over them."""

    def __init__(self, **changes):
        self.mark = uuid.uuid4().hex
        self.path = tempfile.mkdtemp(prefix="kvferry-test-", dir="/tmp")  # a socket's path has 107 bytes
        self.port = free_ports(1)[0]
        self.file = os.path.join(self.path, "cluster.yaml")
        self.state_dir = os.path.join(self.path, "state")
        self.deployment = merged(
            {
                "cluster": "test",
                "state_dir": self.state_dir,
                "log_level": "debug",
                "model": {"name": MODEL_NAME, "path": MODEL, "context": CONTEXT,
                          "cache_dir": os.path.join(ROOT, ".cache", "weights")},
                "workers": 2,
                "ratio": "1:1",
                "router": {"listen": f"127.0.0.1:{self.port}"},
                "prefill": {"threads": 1, "chunk_tokens": 512},
                "decode": {"threads": 1, "max_batch": 16},
                "kv": {"memory": "128MiB"},
                "transfer": {"transport": "shm"},
            },
            changes,
        )
        with open(self.file, "w", encoding="utf-8") as file:
            file.write(to_yaml(self.deployment) + "\n")

    def kvferry(self, *arguments, timeout_s=120):
        """Runs the command to its end; its output lies in files, so that what it leaves behind in
        the background cannot hold a pipe open."""
        out_path, err_path = os.path.join(self.path, "out"), os.path.join(self.path, "err")
        with open(out_path, "w+", encoding="utf-8") as out, open(err_path, "w+", encoding="utf-8") as err:
            result = subprocess.run(
                [KVFERRY, *arguments], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                env=dict(os.environ, **{MARK: self.mark}), timeout=timeout_s * SLOW, check=False,
            )
        with open(out_path, encoding="utf-8", errors="replace") as out, open(err_path, encoding="utf-8", errors="replace") as err:
            return result.returncode, out.read(), err.read()

    def processes(self):
        return marked_processes(self.mark)

    def assert_no_process(self, timeout_s=10):
        wait_until(lambda: not self.processes(), timeout_s, lambda: f"left behind: {self.processes()}")

    def logs(self):
        """{path: text} of every log of the cluster."""
        found = {}
        for folder, _, names in os.walk(self.state_dir):
            for name in names:
                if name.endswith(".log"):
                    path = os.path.join(folder, name)
                    with open(path, encoding="utf-8", errors="replace") as file:
                        found[os.path.relpath(path, self.state_dir)] = file.read()
        return found

    def remove(self):
        """Ends whatever the test left (a failed test must not spoil the next) and the files."""
        for pid in self.processes():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if os.environ.get("KVFERRY_KEEP", "0") == "0":
            shutil.rmtree(self.path, ignore_errors=True)


class Answer:
    """What came of one completion: token ids, text, why it ended, usage."""

    def __init__(self, status=200, token_ids=(), text="", finish=None, usage=None, error=None, prompt_token_ids=None):
        self.status, self.token_ids, self.text = status, list(token_ids), text
        self.finish, self.usage, self.error, self.prompt_token_ids = finish, usage, error, prompt_token_ids


class Cluster(Folder):
    """`kvferry up --detach` as a context: up at the start, checked and down at the end."""

    def __init__(self, **changes):
        super().__init__(**changes)
        self.base = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.base, timeout=120 * SLOW, limits=httpx.Limits(max_connections=64))
        self.is_up = False

    def __enter__(self):
        try:
            self.up()
        except BaseException:
            self.tell_logs()
            self.remove()
            raise
        return self

    def __exit__(self, kind, value, trace):
        try:
            if kind is None:
                self.assert_clean()
                self.down()
                self.assert_sanitizers_quiet()
        except BaseException:
            self.tell_logs()
            raise
        finally:
            if kind is not None:
                self.tell_logs()
            self.http.close()
            self.remove()

    def up(self):
        status, out, err = self.kvferry("up", "-f", self.file, "--detach")
        assert status == 0, f"kvferry up: {status}\n{out}\n{err}"
        self.is_up = True
        assert self.http.get("/ready").status_code == 200, "up returned before /ready was 200"

    def down(self):
        status, out, err = self.kvferry("down", "-f", self.file)
        assert status == 0, f"kvferry down: {status}\n{out}\n{err}"
        self.is_up = False
        self.assert_no_process()

    def tell_logs(self, lines=25):
        for path, text in sorted(self.logs().items()):
            print(f"---- {path}")
            print("\n".join(text.splitlines()[-lines:]))

    def assert_sanitizers_quiet(self):
        for path, text in self.logs().items():
            for word in ("AddressSanitizer", "LeakSanitizer", "runtime error:", "pd_assert"):
                assert word not in text, f"{path}: {text[max(0, text.index(word) - 500):][:4000]}"

    def workers(self):
        return self.http.get("/workers").json()["workers"]

    def worker(self, name):
        return next((worker for worker in self.workers() if worker["name"] == name), None)

    def of_role(self, role):
        return sorted((worker for worker in self.workers() if worker["role"] == role), key=lambda worker: worker["name"])

    def unclean(self):
        """What is still held, in words; "" when every block is free or cached and no queue holds anything."""
        lines = []
        for worker in self.workers():
            ledger = worker["ledger"]
            total = sum(ledger[kind] for kind in ("free", "cached", "leased", "running", "quarantined"))
            if ledger["total"] <= 0 or total != ledger["total"]:
                lines.append(f"{worker['name']}: the ledger's kinds do not add up: {ledger}")
            if ledger["free"] + ledger["cached"] != ledger["total"]:
                lines.append(f"{worker['name']}: {ledger}")
            if worker["running"] or worker["waiting"]:
                lines.append(f"{worker['name']}: running {worker['running']} waiting {worker['waiting']}")
        for name in ("kvferry_requests_active", "kvferry_requests_queued", "kvferry_kv_blocks_held_idle"):
            value = self.metric(name)
            if value != 0:
                lines.append(f"router: {name} is {value}")
        return "; ".join(lines)

    def assert_clean(self, timeout_s=10):
        wait_until(lambda: not self.unclean(), timeout_s, self.unclean)

    def metric(self, name, **labels):
        """The sum of a metric's samples that have these labels; None when there is no such metric."""
        total = None
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith("#") or not line.startswith(name) or line[len(name):len(name) + 1] not in (" ", "{"):
                continue
            if all(f'{key}="{value}"' in line for key, value in labels.items()):
                total = (total or 0) + float(line.rsplit(" ", 1)[1])
        return total

    # ---- requests

    @staticmethod
    def body(prompt, max_tokens, **options):
        return {"model": MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True, **options}

    def complete(self, prompt, max_tokens=16, expect=200, **options):
        response = self.http.post("/v1/completions", json=self.body(prompt, max_tokens, **options))
        body = response.json()
        if response.status_code != 200:
            assert expect != 200, f"{response.status_code}: {body}"
            return Answer(status=response.status_code, error=body["error"])
        choice = body["choices"][0]
        return Answer(200, choice.get("token_ids") or [], choice["text"], choice["finish_reason"], body["usage"],
                      prompt_token_ids=choice.get("prompt_token_ids"))

    def stream(self, prompt, max_tokens=16, hang_up=None, **options):
        """Streams an answer. hang_up(tokens so far) -> True closes the connection there and then."""
        answer = Answer()
        body = self.body(prompt, max_tokens, stream=True, **options)
        with self.http.stream("POST", "/v1/completions", json=body) as response:
            answer.status = response.status_code
            if response.status_code != 200:
                response.read()
                answer.error = response.json()["error"]
                return answer
            if hang_up is not None and hang_up(0):
                return answer
            for line in response.iter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    return answer
                event = json.loads(line[6:])
                if "error" in event:
                    answer.error = event["error"]
                    continue
                for choice in event.get("choices", []):
                    answer.text += choice.get("text") or ""
                    answer.token_ids += choice.get("token_ids") or []
                    answer.finish = choice.get("finish_reason") or answer.finish
                answer.usage = event.get("usage") or answer.usage
                if hang_up is not None and hang_up(len(answer.token_ids)):
                    return answer
        if answer.error is None:
            answer.error = {"message": "the stream was cut off without a word", "type": "cut", "code": None, "param": None}
        return answer

    def together(self, calls):
        """Runs the calls at the same time, each in a thread; their results in order."""
        results, errors = [None] * len(calls), []

        def work(index):
            try:
                results[index] = calls[index]()
            except BaseException as error:  # handed on to the test's own thread
                errors.append(error)

        threads = [threading.Thread(target=work, args=(index,)) for index in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results


@contextlib.contextmanager
def late_worker(one, name, **changes):
    """A worker of that cluster that is started by hand, from a file with those changes."""
    file = os.path.join(one.path, f"{name}.yaml")
    with open(file, "w", encoding="utf-8") as out:
        out.write(to_yaml(merged(one.deployment, changes)) + "\n")
    with open(os.path.join(one.state_dir, "logs", f"{name}.log"), "w", encoding="utf-8") as log:
        process = subprocess.Popen([os.path.join(BUILD, "deploy", f"{name.split('-')[0]}-worker"), "-f", file, "--name", name], cwd=ROOT,
                                   stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(os.environ, **{MARK: one.mark}))
    try:
        wait_until(lambda: process.poll() is not None or (one.worker(name) or {}).get("state") == "ready", 30, f"{name} is not ready")
        yield process.pid
        process.terminate()
        assert process.wait(20 * SLOW) == 0
    finally:
        process.kill()
        process.wait()
