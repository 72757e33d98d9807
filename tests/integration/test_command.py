#!/usr/bin/env python3
"""The kvferry command and its supervisor, with stand-ins for the services (standin.py).

Usage: test_command.py [-v] [TEST ...]; KVFERRY names the command (default build/deploy/kvferry).
"""
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
KVFERRY = os.path.abspath(os.environ.get("KVFERRY", os.path.join(ROOT, "build/deploy/kvferry")))

YAML = """
cluster: t
state_dir: {state}
model: {{path: {model}, cache_dir: none}}
workers: 3
ratio: "2:1"
router: {{listen: "127.0.0.1:0"}}
"""


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):  # the latter between open and read
        return False


def wait_for(what, seconds=10):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if what():
            return True
        time.sleep(0.05)
    return False


class Command(unittest.TestCase):
    def setUp(self):
        self.dir = tempfile.mkdtemp(prefix="kvf")
        self.bin = os.path.join(self.dir, "bin")
        os.mkdir(self.bin)
        for name in ("router", "prefill-worker", "decode-worker"):
            shutil.copy(os.path.join(HERE, "standin.py"), os.path.join(self.bin, name))
            os.chmod(os.path.join(self.bin, name), 0o755)
        self.model = os.path.join(self.dir, "m.gguf")
        open(self.model, "w").close()
        self.state = os.path.join(self.dir, "state")
        self.file = os.path.join(self.dir, "c.yaml")
        self.write(YAML.format(state=self.state, model=self.model))

    def tearDown(self):
        self.run_kvferry("down", "-f", self.file)
        left = [pid for pid in os.listdir("/proc") if pid.isdigit() and self.bin in self.command_line(pid)]
        shutil.rmtree(self.dir)
        self.assertEqual(left, [], "processes left behind")

    @staticmethod
    def command_line(pid):
        try:
            with open(f"/proc/{pid}/cmdline") as f:
                return f.read()
        except OSError:
            return ""

    def write(self, text):
        with open(self.file, "w") as f:
            f.write(text)

    def env(self, **standin):
        return dict(os.environ, KVFERRY_BIN_DIR=self.bin, STANDIN_DIR=self.dir, **standin)

    def run_kvferry(self, *args, **standin):
        done = subprocess.run([KVFERRY, *args], env=self.env(**standin), capture_output=True, text=True, timeout=120,
                              stdin=subprocess.DEVNULL)
        return done.returncode, done.stdout, done.stderr

    def up(self, *args, **standin):
        return self.run_kvferry("up", "-f", self.file, "--detach", *args, **standin)

    def status(self):
        rc, out, err = self.run_kvferry("status", "-f", self.file, "--json")
        return json.loads(out)

    def service(self, name):
        return next(s for s in self.status()["services"] if s["name"] == name)

    def assert_refused(self, result, *parts):
        rc, out, err = result
        self.assertNotEqual(rc, 0)
        self.assertEqual(err.count("\n"), 1, err)
        for part in parts:
            self.assertIn(part, err)
        self.assertFalse(self.status()["running"])

    # --- arguments and check ---

    def test_usage_errors_are_one_line_that_helps(self):
        for args, part in ((["chek"], "did you mean 'check'"), (["frobnicate"], "unknown command"),
                           (["up", "--fiel", "x"], "unknown option"), (["up"], "-f FILE"),
                           (["up", "-f"], "needs a value"), (["up", "--json", "-f", "x"], "unknown option"),
                           (["up", "-f", "x", "-f", "y"], "twice"), (["up", "y"], "unknown argument"),
                           (["up", "--detach=1"], "takes no value"), (["up", "--timeout", "5"], "no unit")):
            rc, out, err = self.run_kvferry(*args)
            self.assertEqual((rc, out, err.count("\n")), (2, "", 1), (args, err))
            self.assertIn(part, err)
        for args in (["--help"], ["up", "--help"], ["down", "-h"], ["status", "--help"], ["check", "--help"]):
            rc, out, err = self.run_kvferry(*args)
            self.assertEqual((rc, err), (0, ""))
            self.assertIn("usage: kvferry", out)

    def test_check_prints_all_faults(self):
        rc, out, err = self.run_kvferry("check", "-f", os.path.join(ROOT, "tests/cases/yaml/wrong_values.yaml"))
        self.assertEqual((rc, out, err.count("\n")), (1, "", 6))
        rc, out, err = self.run_kvferry("check", "-f", self.file, "--set", "kv.memory=2GB")
        self.assertEqual((rc, out), (1, ""))
        self.assertIn("--set 1: kv.memory:", err)
        rc, out, err = self.run_kvferry("check", "-f", self.file, "--set=kv.memory=64MiB", "--effective")
        self.assertEqual((rc, err), (0, ""))
        self.assertIn("memory: 64MiB", out)
        for name in ("deploy/local.yaml", "deploy/examples/2p1d.yaml"):
            self.assertEqual(self.run_kvferry("check", "-f", os.path.join(ROOT, name))[0], 0)
        rc, out, err = self.run_kvferry("check", "--keys")
        self.assertIn("prefill.chunk_tokens", out)

    # --- up, status, down ---

    def test_up_status_down(self):
        rc, out, err = self.up()
        self.assertEqual((rc, err), (0, ""))
        status = self.status()
        self.assertTrue(status["ready"] and status["running"])
        self.assertEqual([s["name"] for s in status["services"]], ["router", "prefill-0", "prefill-1", "decode-0"])
        self.assertTrue(all(alive(s["pid"]) and s["process"] == "running" for s in status["services"]))
        self.assertEqual(status["workers"][0]["ledger"]["total"], 64)
        rc, table, err = self.run_kvferry("status", "-f", self.file)
        self.assertIn("posix+cma", table)
        self.assertIn("60/64", table)
        rc, out, err = self.up()
        self.assertEqual((rc, err.count("\n")), (1, 1))
        self.assertIn("already running", err)
        self.assertEqual(self.run_kvferry("down", "-f", self.file)[:2], (0, "cluster t has ended\n"))
        self.assertFalse(any(alive(s["pid"]) for s in status["services"]))
        self.assertFalse(os.path.exists(os.path.join(self.state, "state.json")))
        self.assertEqual(self.run_kvferry("down", "-f", self.file)[:2], (0, f"cluster t was not running (state_dir {self.state})\n"))
        self.assertEqual(self.run_kvferry("status", "-f", self.file)[0], 1)

    def test_status_tells_where_every_rank_is(self):
        self.assertEqual(self.up()[0], 0)
        place = {"gpu": None, "nic": None, "nic_distance": None, "cpus": "0-31", "numa_node": None, "bound": False, "threads": None, "pinned": None}
        gpus = [dict(place, gpu=f"0000:{bus}:00.0", nic=f"mlx5_{n} (eth{n})", nic_distance="behind one bridge", numa_node=n // 2, bound=True)
                for n, bus in enumerate(("1b", "3d", "9a"))]
        worker = {"name": "decode-0", "tensor_parallel": 3, "rank_pids": [71, 72], "placement": gpus[0], "rank_placements": gpus[1:]}
        self.tell("workers", [worker, {"name": "prefill-0", "placement": dict(place, threads=1), "rank_placements": [dict(place, threads=2, pinned="4-5")]}])
        rc, table, err = self.run_kvferry("status", "-f", self.file)
        self.assertEqual((rc, err), (0, ""))
        self.assertEqual([line for line in table.splitlines() if ": " in line and line.startswith(("decode-0", "prefill-0"))], [
            "decode-0: ranks 1 to 2 are pids 71, 72",
            "prefill-0: host's cores, NUMA node unknown, NIC unknown, CPUs 0-31 (not bound), 1 thread",
            "prefill-0/1: host's cores, NUMA node unknown, NIC unknown, CPUs 0-31 (not bound), 2 threads pinned to 4-5",
            "decode-0: GPU 0000:1b:00.0, NUMA node 0, NIC mlx5_0 (eth0) behind one bridge, CPUs 0-31",
            "decode-0/1: GPU 0000:3d:00.0, NUMA node 0, NIC mlx5_1 (eth1) behind one bridge, CPUs 0-31",
            "decode-0/2: GPU 0000:9a:00.0, NUMA node 1, NIC mlx5_2 (eth2) behind one bridge, CPUs 0-31"])

    def test_auto_threads_are_shared_out(self):
        cpus = len(os.sched_getaffinity(0))
        for sets, prefill, decode in (((), max(1, cpus // 3), max(1, cpus // 3)), (("--set", "prefill.threads=1"), 1, max(1, cpus - 2)),
                                      (("--set", "decode.threads=3"), max(1, (cpus - 3) // 2), 3)):
            self.assertEqual(self.up(*sets)[0], 0)
            for name, threads in (("prefill-0", f"prefill.threads={prefill}"), ("decode-0", f"decode.threads={decode}")):
                words = self.command_line(self.service(name)["pid"]).split("\0")
                self.assertEqual([word for word in words if word.startswith(threads.split("=")[0])][-1], threads, sets)
            self.assertEqual(self.run_kvferry("down", "-f", self.file)[0], 0)
        self.assert_refused(self.up("--set", "decode.threads=some"), "--set 1: decode.threads: must be", "auto", "some")
        self.write(YAML.format(state=self.state, model=self.model) + "prefill: {threads: -1}\n")
        rc, out, err = self.up()
        self.assertEqual((rc, err.count("\n")), (1, 1), err)
        self.assertIn(f"{self.file}:8:20: prefill.threads: must be", err)

    def test_up_fails_with_the_services_own_error(self):
        for mode in ("fail", "usage"):
            self.assert_refused(self.up(STANDIN_DECODE_0=mode, STANDIN_ROUTER="unready"),
                                "decode-0 ended with status", "cannot do it name=decode-0", "decode-0.log")

    def test_up_gives_up_in_time(self):
        started = time.monotonic()
        self.assert_refused(self.up("--timeout", "1s", STANDIN_ROUTER="unready"), "not ready after 1 s", "503")
        self.assertLess(time.monotonic() - started, 8)

    def test_nothing_starts_on_a_bad_deployment(self):
        self.assert_refused(self.up("--set", "model.path=/nowhere/m.gguf"), "model.path", "No such file")
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = "127.0.0.1:%d" % taken.getsockname()[1]
            self.assert_refused(self.up("--set", "router.listen=" + address), "router.listen", address, "in use")
        os.unlink(os.path.join(self.bin, "decode-worker"))
        self.assert_refused(self.up(), "no executable 'decode-worker'")
        self.assert_refused(self.up("--set", "state_dir=/proc/x"), "state_dir", "/proc/x")
        self.assertFalse(os.path.exists(os.path.join(self.state, "logs", "router.log")))

    def test_ports_are_picked(self):
        rc, out, err = self.up("--set", "router.bus=tcp")
        self.assertEqual((rc, err), (0, ""))
        line = self.command_line(self.service("decode-0")["pid"])
        ports = [part.rpartition(":")[2] for part in line.split("\0") if part.startswith("router.") and ":" in part]
        self.assertEqual(len(set(ports)), 4, line)

    # --- what goes wrong later ---

    def test_a_killed_worker_is_restarted(self):
        self.assertEqual(self.up()[0], 0)
        before = self.service("prefill-1")
        os.kill(before["pid"], signal.SIGKILL)
        self.assertTrue(wait_for(lambda: self.service("prefill-1")["process"] == "waiting", 3))
        self.assertIn("killed by signal 9", self.service("prefill-1")["last_error"])
        self.assertTrue(wait_for(lambda: self.service("prefill-1")["process"] == "running"))
        after = self.service("prefill-1")
        self.assertEqual(after["restarts"], 1)
        self.assertNotEqual(after["pid"], before["pid"])

    def tell_workers(self, *names):
        """What the router says from now on: it hears of these."""
        workers = [{"name": name, "pid": self.service(name)["pid"], "heartbeat_age_ms": 10} for name in names]
        self.tell("workers", workers)

    def tell(self, page, workers):
        path = os.path.join(self.dir, page + ".json")
        with open(path + ".new", "w") as f:
            json.dump({"workers": workers}, f)
        os.rename(path + ".new", path)

    def test_a_worker_that_stands_still_is_killed_and_started_anew(self):
        self.assertEqual(self.up("--set", "heartbeat.lost_after=500ms", "--set", "heartbeat.hung_after=1s")[0], 0)
        before = self.service("prefill-1")
        self.tell_workers("prefill-1", "decode-0")  # prefill-0 loads its model, for all that is known
        time.sleep(2)
        self.assertEqual(self.service("prefill-1")["restarts"], 0)
        self.tell_workers("decode-0")
        os.kill(before["pid"], signal.SIGSTOP)
        self.assertTrue(wait_for(lambda: self.service("prefill-1")["restarts"] == 1, 8))
        self.assertIn("stood still for 1 s and was killed", self.service("prefill-1")["last_error"])
        self.assertNotEqual(self.service("prefill-1")["pid"], before["pid"])
        time.sleep(2)
        self.assertEqual([self.service(name)["restarts"] for name in ("router", "prefill-0", "prefill-1", "decode-0")], [0, 0, 1, 0])

    def test_with_hung_after_0s_nobody_is_killed(self):
        self.assertEqual(self.up("--set", "heartbeat.lost_after=500ms", "--set", "heartbeat.hung_after=0s")[0], 0)
        self.tell_workers("prefill-1")
        time.sleep(1.5)
        self.tell_workers()
        time.sleep(3)
        self.assertEqual(self.service("prefill-1")["restarts"], 0)

    # --- status --kv ---

    @staticmethod
    def holder(name, total=100, free=100, running=0, quarantined=0, **more):
        ledger = {"total": total, "free": free, "cached": 0, "leased": 0, "running": running, "quarantined": quarantined}
        return dict({"name": name, "role": name.partition("-")[0], "incarnation": "00000000000000" + name[-1] + name[0],
                     "ledger": ledger, "running": running, "waiting": 0, "inflight": 0}, **more)

    @staticmethod
    def view(name, reported=True, **more):
        if not reported:
            return {"name": name, "reported": False, "note": "no report yet"}
        return dict({"name": name, "reported": True, "age_ms": 1, "holds": {}, "unknown": [], "missing": [], "waits_for": []}, **more)

    def kv_status(self, *args):
        return self.run_kvferry("status", "--kv", "-f", self.file, *args)

    def test_status_kv_tells_who_holds_what(self):
        self.assertEqual(self.kv_status()[:2], (1, "cluster t: not running\n"))
        self.assertFalse(json.loads(self.kv_status("--json")[1])["running"])
        self.assertEqual(self.up()[0], 0)
        self.tell("workers", [self.holder("decode-0", free=60, running=30, quarantined=10), self.holder("prefill-0")])
        self.tell("audit", [self.view("decode-0", reported=False), self.view("prefill-0", reported=False)])
        rc, out, err = self.kv_status()
        self.assertEqual((rc, err), (0, ""))
        self.assertIn("in balance, by the workers' ledgers alone\n", out)
        self.assertIn("no report yet to compare with the router's view: decode-0, prefill-0\n", out)
        self.assertNotIn("agree", out)
        holds = {"promised": 3, "suspended": 2}
        waits = [{"incarnation": "1", "state": "lives", "name": "prefill-0"}, {"incarnation": "2", "state": "gone", "name": "prefill-1"},
                 {"incarnation": "feed", "state": "unknown", "name": None}]
        self.tell("audit", [self.view("decode-0", age_ms=1500, holds=holds, waits_for=waits), self.view("prefill-0", reported=False)])
        rc, out, err = self.kv_status()
        self.assertEqual((rc, err), (0, ""))
        rows = {line.split()[0]: line.split(maxsplit=10) for line in out.splitlines() if line}
        self.assertEqual(rows["decode-0"][1:], ["decode", "100", "60", "0", "0", "30", "10", "3", "2", "prefill-0, prefill-1 (gone), gone (name unknown)"])
        self.assertEqual(rows["prefill-0"][8:], ["-", "-", "-"])
        self.assertEqual(rows["sum"][1:], ["200", "160", "0", "0", "30", "10", "3", "2"])
        self.assertIn("router and workers agree (1 asked, the oldest answer 1.5 s ago)\nno report yet to compare with the router's view: prefill-0\n", out)
        self.tell("audit", [self.view("decode-0", age_ms=1500, holds=holds), self.view("prefill-0", age_ms=200)])
        rc, out, err = self.kv_status()
        self.assertEqual((rc, err), (0, ""))
        self.assertIn("router and workers agree (2 asked, the oldest answer 1.5 s ago)", out)
        self.assertNotIn("no report yet", out)
        said = json.loads(self.kv_status("--json")[1])
        self.assertTrue(said["balanced"])
        self.assertEqual((said["workers"][0]["ledger"]["quarantined"], said["audit"][0]["holds"]["promised"]), (10, 3))

    def test_status_kv_fails_when_a_ledger_does_not_add_up(self):
        self.assertEqual(self.up()[0], 0)
        self.tell("workers", [self.holder("decode-0", free=98, inflight=1), self.holder("prefill-0", free=99, running=1, total=100)])
        rc, out, err = self.kv_status()
        self.assertEqual((rc, err), (1, ""))
        self.assertIn("out of balance: decode-0: the ledger does not add up: 100 blocks in all, 98 by who holds them\n", out)
        self.assertEqual(out.count("out of balance"), 1)
        said = json.loads(self.kv_status("--json")[1])
        self.assertEqual((said["balanced"], len(said["faults"])), (False, 1))
        self.assertIn("does not answer GET /audit", said["router_silent"])  # what was read is wrong enough

    def test_a_router_that_does_not_answer_is_named_and_nothing_is_judged(self):
        self.assertEqual(self.up()[0], 0)
        self.tell("workers", [self.holder("decode-0"), self.holder("prefill-0")])
        rc, out, err = self.kv_status()  # GET /audit is 404
        self.assertEqual((rc, err), (3, ""))
        self.assertIn("not known: the router does not answer GET /audit at http://127.0.0.1:", out)
        self.assertIn(": HTTP status 404 (process ", out)
        self.assertNotIn("balance", out)
        self.tell("audit", [self.view("decode-0"), self.view("prefill-0")])
        self.assertEqual(self.kv_status()[0], 0)
        self.tell("workers", [])
        rc, out, err = self.kv_status()
        self.assertEqual((rc, err), (3, ""))
        self.assertIn("not known: no worker is registered", out)
        pid = self.service("router")["pid"]
        os.kill(pid, signal.SIGSTOP)  # it listens, and says nothing
        rc, out, err = self.kv_status()
        self.assertEqual((rc, err), (3, ""))
        self.assertRegex(out, fr"not known: the router does not answer GET /workers at http://127.0.0.1:\d+: silent for 2 s \(process {pid} is there\)\n")
        self.assertNotIn("balance", out)
        rc, out, err = self.run_kvferry("status", "-f", self.file, "--json")
        said = json.loads(out)
        self.assertEqual((rc, err, said["running"], said["ready"], said["workers"]), (3, "", True, False, None))
        self.assertIn("silent for 2 s", said["router_silent"])
        os.kill(self.status()["supervisor_pid"], signal.SIGSTOP)  # it starts no other
        os.kill(pid, signal.SIGKILL)
        self.assertTrue(wait_for(lambda: not alive(pid)))
        for args in (["--kv"], []):
            rc, out, err = self.run_kvferry("status", "-f", self.file, *args)
            self.assertEqual((rc, err), (3, ""))
            self.assertIn(f"nobody is there, or no HTTP server (process {pid} is dead)\n", out)
            self.assertNotIn("balance", out)
        said = json.loads(self.kv_status("--json")[1])
        self.assertEqual((said["balanced"], said["faults"], said["workers"]), (None, [], None))
        os.kill(self.status()["supervisor_pid"], signal.SIGCONT)
        self.assertTrue(wait_for(lambda: self.run_kvferry("status", "-f", self.file)[0] == 0))

    def test_status_kv_fails_for_what_stays_different_only(self):
        self.assertEqual(self.up()[0], 0)
        self.tell("workers", [self.holder("decode-0"), self.holder("prefill-0")])
        strange = [{"number": 31, "epoch": 2, "state": "running", "blocks": 7}]
        self.tell("audit", [self.view("decode-0", unknown=strange, missing=[42]), self.view("prefill-0")])
        rc, out, err = self.kv_status()
        self.assertEqual(rc, 1)
        self.assertIn("decode-0: holds request 31 epoch 2 (running, 7 blocks), which the router does not know", out)
        self.assertIn("decode-0: does not have request 42, on which the router counts", out)
        look = subprocess.Popen([KVFERRY, "status", "--kv", "-f", self.file], env=self.env(), stdout=subprocess.PIPE, text=True)
        time.sleep(1)
        self.tell("audit", [self.view("decode-0"), self.view("prefill-0")])
        out, _ = look.communicate(timeout=60)
        self.assertEqual(look.returncode, 0, out)
        self.tell("workers", [self.holder("decode-0", free=90, quarantined=10), self.holder("prefill-0")])
        self.assertEqual(self.kv_status()[0], 0)  # it waits for a sender that may still write
        leak = self.holder("decode-0", free=90)
        leak["ledger"]["leased"] = 10
        self.tell("workers", [leak])
        rc, out, err = self.kv_status()
        self.assertEqual(rc, 1)
        self.assertIn("decode-0: it has no request, and holds blocks for one", out)

    def test_a_wrong_configuration_is_not_restarted(self):
        self.assertEqual(self.up(STANDIN_DECODE_0="late")[0], 0)
        open(os.path.join(self.dir, "go"), "w").close()
        self.assertTrue(wait_for(lambda: self.service("decode-0")["process"] == "failed"))
        self.assertIn("status 2: cannot do it", self.service("decode-0")["last_error"])
        self.assertTrue(alive(self.service("router")["pid"]))

    def test_a_crash_loop_goes_on_but_slowly(self):
        """What brings a service down may pass: six crashes in a row are no reason to give it up."""
        self.assertEqual(self.up(STANDIN_PREFILL_0="crash")[0], 0)
        open(os.path.join(self.dir, "go"), "w").close()
        started = time.monotonic()
        self.assertTrue(wait_for(lambda: self.service("prefill-0")["restarts"] >= 6, 60))
        self.assertGreater(time.monotonic() - started, 10)  # 0.5 + 1 + 2 + 4 + 8 s of pauses
        self.assertTrue(alive(self.service("router")["pid"]))

    def test_services_die_with_their_supervisor(self):
        self.assertEqual(self.up()[0], 0)
        status = self.status()
        os.kill(status["supervisor_pid"], signal.SIGKILL)
        self.assertTrue(wait_for(lambda: not any(alive(s["pid"]) for s in status["services"]), 5))
        self.assertFalse(self.status()["running"])
        self.assertEqual(self.up()[0], 0)  # stale state is no obstacle

    def test_down_kills_what_does_not_end(self):
        self.assertEqual(self.up(STANDIN_PREFILL_0="hang")[0], 0)
        pid = self.service("prefill-0")["pid"]
        self.assertEqual(self.run_kvferry("down", "-f", self.file)[0], 0)
        self.assertFalse(alive(pid))

    def test_down_never_touches_a_stranger(self):
        stranger = subprocess.Popen(["sleep", "60"])
        try:
            os.makedirs(self.state)
            process = {"pid": stranger.pid, "start": 1}  # the pid was given away meanwhile
            with open(os.path.join(self.state, "state.json"), "w") as f:
                json.dump({"version": 1, "cluster": "t", "file": "x", "listen": "127.0.0.1:1", "ready": True,
                           "supervisor": process, "services": [dict(process, name="router", role="router",
                                                                    phase="running")]}, f)
            self.assertEqual(self.run_kvferry("down", "-f", self.file)[:2], (0, f"cluster t was not running (state_dir {self.state})\n"))
            self.assertIsNone(stranger.poll())
        finally:
            stranger.kill()
            stranger.wait()

    def test_a_broken_state_file_is_told(self):
        os.makedirs(self.state)
        for text in ("", "{", "[]", '{"version": 2}', '{"version": 1, "services": 3}'):
            with open(os.path.join(self.state, "state.json"), "w") as f:
                f.write(text)
            rc, out, err = self.run_kvferry("down", "-f", self.file)
            self.assertEqual((rc, err.count("\n")), (1, 1))
            self.assertIn("state.json", err)
        self.assertEqual(self.up()[0], 0)  # no supervisor holds the lock, so it is written anew

    # --- foreground, signals ---

    def foreground(self, *args, **standin):
        return subprocess.Popen([KVFERRY, "up", "-f", self.file, *args], env=self.env(**standin), text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)

    def test_the_foreground_ends_in_order_on_ctrl_c(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            process = self.foreground()
            self.assertTrue(wait_for(lambda: self.status()["ready"]))
            pids = [s["pid"] for s in self.status()["services"]]
            process.send_signal(number)
            out, err = process.communicate(timeout=15)
            self.assertEqual((process.returncode, err), (0, ""))
            self.assertIn("ready after", out)
            self.assertIn("has ended", out)
            self.assertFalse(any(map(alive, pids)))

    def test_an_interrupted_start_leaves_nothing(self):
        for args in ([], ["--detach"]):
            process = self.foreground(*args, STANDIN_ROUTER="unready")
            self.assertTrue(wait_for(lambda: len(self.status()["services"]) == 4))
            pids = [s["pid"] for s in self.status()["services"]]
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=15)
            self.assertNotEqual(process.returncode, 0)
            self.assertFalse(any(map(alive, pids)))

    def test_a_killed_waiter_takes_the_start_with_it(self):
        process = self.foreground("--detach", STANDIN_ROUTER="unready")
        self.assertTrue(wait_for(lambda: len(self.status()["services"]) == 4))
        pids = [s["pid"] for s in self.status()["services"]]
        process.kill()
        process.communicate()
        self.assertTrue(wait_for(lambda: not any(map(alive, pids)), 15))


if __name__ == "__main__":
    unittest.main()
