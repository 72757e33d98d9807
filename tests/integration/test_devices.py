"""`device:` of a deployment: workers on a plugin serve as those on the host do, and one that cannot
be had ends `kvferry up` with the reason."""

import os
import re
import threading
import time

import pytest

import cluster as cl

PLUGINS = os.path.join(cl.BUILD, "tests", "unit", "kernels", "plugins")
PROMPTS = ["The capital of France is", "Once upon a time, in a small village by the sea, there lived " * 20]


def install(monkeypatch, folder, name):
    """That test plugin is kv_cuda.so for whatever is started from here."""
    os.symlink(os.path.join(PLUGINS, f"kv_cuda_{name}.so"), folder / "kv_cuda.so")
    monkeypatch.setenv("KVFERRY_PLUGINS", str(folder))


def read_sys(path):
    try:
        with open(os.path.join("/sys", path), encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return None


def assert_placed(one, name, status, gpu):
    """`status`, /workers and the worker's log say the same of its place, and it is this machine's."""
    place = one.worker(name)["placement"]
    line = next(line for line in status.splitlines() if line.startswith(f"{name}: ") and "NUMA node" in line)
    nodes = [n for n in os.listdir("/sys/devices/system/node") if re.fullmatch(r"node\d+", n)] if read_sys("devices/system/node/online") else []
    assert place["gpu"] == gpu
    assert line.startswith(f"{name}: GPU {gpu}, " if gpu else f"{name}: host's cores, "), line
    if gpu or len(nodes) == 1:  # the plugin says that its devices are on node 0
        assert place["numa_node"] == 0 and ", NUMA node 0, " in line, line
    if place["nic"] is None:
        assert ", NIC unknown, " in line
    else:
        net = re.sub(r".*\((.*)\)", r"\1", place["nic"])
        assert f", NIC {place['nic']} {place['nic_distance']}, " in line, line
        assert os.path.exists(f"/sys/class/net/{net}/device") or os.path.exists(f"/sys/class/infiniband/{net}/device"), place
    if len(nodes) < 2:
        assert not place["bound"] and " (not bound)" in line, line
        allowed = allowed_cpus("/proc/self")
        assert place["cpus"] == allowed and f", CPUs {allowed} " in line, line
    assert place["threads"] == (None if gpu else 1) and line.endswith(", 1 thread") == (not gpu), line
    placed = [text for text in one.logs()[f"logs/{name}.log"].splitlines() if 'msg="placed"' in text]
    assert len(placed) == 1 and f" gpu={gpu or 'none'} " in placed[0] and f" cpus={place['cpus']} " in placed[0], placed
    assert f" threads={0 if gpu else 1} " in placed[0], placed


@pytest.mark.parametrize("prefill, decode", [("cuda", "cuda:1"), ("cpu", "auto"), ("auto", "cpu")])
def test_workers_on_a_plugin_serve_as_the_hosts_do(plain, monkeypatch, tmp_path, prefill, decode):
    """The plugin computes on the host, in a pool that it allocates: all else is what a GPU's goes through."""
    expected = [plain.complete(prompt, 24, ignore_eos=True).token_ids for prompt in PROMPTS]
    install(monkeypatch, tmp_path, "works")
    with cl.Cluster(prefill={"device": prefill}, decode={"device": decode}) as one:
        for prompt, tokens in zip(PROMPTS, expected):
            assert one.complete(prompt, 24, ignore_eos=True).token_ids == tokens
        status, out, err = one.kvferry("status", "-f", one.file)
        assert status == 0, err
        for name, device in (("prefill-0", prefill), ("decode-0", decode)):
            line = next(line for line in out.splitlines() if line.startswith(name))
            assert ("cpu-" in line) == (device == "cpu"), line
            assert ("cuda the host in disguise" in line) == (device != "cpu"), line
            assert_placed(one, name, out, gpu=None if device == "cpu" else f"ffff:1d:00.{device[-1] if ':' in device else 0}")
        assert one.metric("kvferry_seal_failures_total") == 0 and one.metric("kvferry_refetches_total") == 0
        for path, text in one.logs().items():
            assert "cannot be mapped" not in text and "transfers within this host are slow" not in text, path


def allowed_cpus(path):
    with open(os.path.join(path, "status"), encoding="ascii") as file:
        return re.search(r"Cpus_allowed_list:\s*(\S+)", file.read()).group(1)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_pinned_workers_compute_on_cpus_of_their_own():
    """One thread of each, the one that computes; whatever else a worker runs may go anywhere."""
    with cl.Cluster(pin_threads="always") as one:
        first = one.complete(PROMPTS[0], 8, ignore_eos=True).token_ids
        _, status, _ = one.kvferry("status", "-f", one.file)
        places = {name: one.worker(name)["placement"] for name in ("prefill-0", "decode-0")}
        for name, place in places.items():
            assert re.fullmatch(r"\d+", place["pinned"]), place
            assert f", 1 thread pinned to {place['pinned']}\n" in status, status
            pid = next(pid for pid, command in one.processes().items() if f"--name {name} " in command)
            tasks = f"/proc/{pid}/task"
            masks = [allowed_cpus(os.path.join(tasks, task)) for task in os.listdir(tasks)]
            assert masks.count(place["pinned"]) == 1 and masks.count(place["cpus"]) == len(masks) - 1, masks
            placed = next(text for text in one.logs()[f"logs/{name}.log"].splitlines() if 'msg="placed"' in text)
            assert placed.endswith(f" pinned={place['pinned']}"), placed
        assert places["prefill-0"]["pinned"] != places["decode-0"]["pinned"]
    with cl.Cluster() as one:  # nothing is pinned unless somebody says so
        assert one.complete(PROMPTS[0], 8, ignore_eos=True).token_ids == first
        assert one.worker("decode-0")["placement"]["pinned"] is None
        _, status, _ = one.kvferry("status", "-f", one.file)
        assert "pinned" not in status, status


def once(condition, act):
    """For a stream's hang_up: does that when the condition is first true, and never hangs up."""
    done = []

    def look(tokens):
        if not done and condition(tokens):
            done.append(True)
            act()
        return False

    return look


def test_a_device_that_fails_for_good_ends_its_worker_and_costs_no_token(plain, monkeypatch, tmp_path):
    prompt, count = PROMPTS[0], 60
    expected = plain.complete(prompt, count, ignore_eos=True).token_ids
    broken = tmp_path / "broken"
    monkeypatch.setenv("KVFERRY_TEST_BREAK", str(broken))
    install(monkeypatch, tmp_path, "works")
    with cl.Cluster(workers=3, ratio="1:2", prefill={"device": "cuda"}, decode={"device": "cuda"}) as one:
        before = {worker["name"]: worker["incarnation"] for worker in one.workers()}
        answer = one.stream(prompt, count, hang_up=once(lambda tokens: tokens > 5, broken.touch), ignore_eos=True)
        assert answer.error is None and answer.token_ids == expected
        assert not broken.exists()
        why = "what computes has failed: this worker ends\" backend=\"cuda the host in disguise\" reason=\"an illegal memory access"
        assert len([path for path, text in one.logs().items() if why in text]) == 1
        cl.wait_until(lambda: len(one.workers()) == 3 and all(w["state"] == "ready" for w in one.workers()), 30, one.workers)
        assert len([w for w in one.workers() if w["incarnation"] != before[w["name"]]]) == 1


def fails_until_its_worker_ends(one, path, fault):
    """Asks while the device fails so, until the supervisor says that the worker has ended; what it ended of, and how often was asked."""
    said = "what computes keeps failing: this worker ends backend=cuda the host in disguise reason="

    def watch():
        cl.wait_until(lambda: said in one.logs()["logs/supervisor.log"], 60 * cl.SLOW, "it fails everything, and goes on")
        path.unlink()

    path.write_text(fault)
    watcher = threading.Thread(target=watch)
    watcher.start()
    asked = 0
    while watcher.is_alive():
        asked += 1
        one.stream(f"{asked} {PROMPTS[0]}", 6, ignore_eos=True)
    watcher.join()
    lines = [line for line in one.logs()["logs/supervisor.log"].splitlines() if said in line]
    assert len(lines) == 1 and "the device's last error: a copy failed, as the test has it" in lines[0], lines
    cl.wait_until(lambda: len(one.workers()) == 2 and all(w["state"] == "ready" for w in one.workers()), 30 * cl.SLOW, one.workers)
    return lines[0].split(said)[1], asked


@pytest.mark.parametrize("victim", ["prefill", "decode"])
@pytest.mark.parametrize("fault, why", [("nomem", "1 steps in a row failed, the last with no_memory; "), ("internal", "steps in a row failed, the last with internal; ")])
def test_a_device_that_fails_every_step_and_is_not_lost_ends_its_worker(monkeypatch, tmp_path, victim, fault, why):
    """Nothing says that the device is lost: that it fails whoever asks does."""
    monkeypatch.setenv("KVFERRY_TEST_FAIL", str(tmp_path / "fails"))
    install(monkeypatch, tmp_path, "works")
    with cl.Cluster(workers=2, ratio="1:1", prefill={"device": "cuda"}, decode={"device": "cuda"}) as one:
        expected = one.complete(PROMPTS[0], 6, ignore_eos=True).token_ids
        before = {worker["name"]: worker["incarnation"] for worker in one.workers()}
        reason, asked = fails_until_its_worker_ends(one, tmp_path / f"fails.{victim}-0", fault)
        assert why in reason and asked <= 6, (asked, reason)
        assert [w["name"] for w in one.workers() if w["incarnation"] != before[w["name"]]] == [f"{victim}-0"]
        assert one.complete(PROMPTS[0], 6, ignore_eos=True).token_ids == expected


def test_a_request_that_no_step_can_compute_ends_no_worker(monkeypatch, tmp_path):
    monkeypatch.setenv("KVFERRY_TEST_FAIL", str(tmp_path / "fails"))
    install(monkeypatch, tmp_path, "works")
    with cl.Cluster(workers=2, ratio="1:1", prefill={"device": "cuda"}, decode={"device": "cuda"}) as one:
        before = {worker["name"]: worker["incarnation"] for worker in one.workers()}
        good, bad = [7, 8, 9], [7, 8, 777]
        expected = one.complete(good, 6, ignore_eos=True).token_ids
        assert 777 not in expected
        for name in before:
            (tmp_path / f"fails.{name}").write_text("token 777")
        for _ in range(6):
            assert one.stream(bad, 6, ignore_eos=True).error is not None
            answer = one.stream(good, 6, ignore_eos=True)
            assert answer.error is None and answer.token_ids == expected
        assert {worker["name"]: worker["incarnation"] for worker in one.workers()} == before


def test_landed_blocks_that_the_device_cannot_read_are_not_called_damaged(monkeypatch, tmp_path):
    """It is this worker's trouble: nothing is fetched again, and where it stays the worker ends."""
    monkeypatch.setenv("KVFERRY_TEST_FAIL", str(tmp_path / "fails"))
    install(monkeypatch, tmp_path, "works")
    with cl.Cluster(workers=2, ratio="1:1", prefill={"device": "cuda"}, decode={"device": "cuda"}) as one:
        reason, _ = fails_until_its_worker_ends(one, tmp_path / "fails.decode-0", "check")
        assert "checks of landed blocks in a row failed, the last with internal; " in reason
        assert not any("does not match" in text for text in one.logs().values())
        assert one.metric("kvferry_refetches_total") == 0 and one.metric("kvferry_seal_failures_total") == 0


def test_a_device_that_can_make_no_seals_ends_its_worker(monkeypatch, tmp_path):
    monkeypatch.setenv("KVFERRY_TEST_FAIL", str(tmp_path / "fails"))
    install(monkeypatch, tmp_path, "works")
    with cl.Cluster(workers=2, ratio="1:1", prefill={"device": "cuda"}, decode={"device": "cuda"}) as one:
        reason, _ = fails_until_its_worker_ends(one, tmp_path / "fails.prefill-0", "seal")
        assert "seals of blocks that leave in a row failed, the last with internal; " in reason


@pytest.mark.parametrize(
    "name, device, why",
    [
        (None, "cuda", "no kv_cuda.so in KVFERRY_PLUGINS="),
        (None, "cuda-emu:3", "no kv_cuda_emu.so in KVFERRY_PLUGINS="),
        ("old", "cuda", "was built for another kvferry: ABI"),
        ("nameless", "cuda", "it has no symbol kern_backend_plugin"),
        ("refused", "cuda:1", "device 1: CUDA driver version is insufficient"),
    ],
)
def test_a_device_that_cannot_be_had_is_told_at_once(monkeypatch, tmp_path, name, device, why):
    if name is None:
        monkeypatch.setenv("KVFERRY_PLUGINS", str(tmp_path))
    else:
        install(monkeypatch, tmp_path, name)
    folder = cl.Folder(prefill={"device": device}, decode={"device": "auto"})
    try:
        status, _, _ = folder.kvferry("check", "-f", folder.file)
        assert status == 0  # nothing is wrong with the file
        started = time.monotonic()
        status, _, err = folder.kvferry("up", "-f", folder.file, "--detach")
        assert status == 1
        assert time.monotonic() - started < 20 * cl.SLOW
        lines = [line for line in err.splitlines() if why in line]
        assert len(lines) == 1 and "prefill-0 ended" in lines[0] and f"device={device}" in lines[0], err
        folder.assert_no_process()
    finally:
        folder.remove()


def test_nccl_between_hosts_memories_is_refused_at_once():
    folder = cl.Folder(transfer={"backend": "nccl"})
    try:
        started = time.monotonic()
        status, _, err = folder.kvferry("up", "-f", folder.file, "--detach")
        assert status == 1
        assert time.monotonic() - started < 20 * cl.SLOW
        assert "transfer.backend: nccl carries KV between GPUs alone, and prefill.device: cpu keeps it in the host's memory" in err, err
        folder.assert_no_process()
    finally:
        folder.remove()
