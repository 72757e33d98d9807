"""Workers with several emulated GPUs each: the tokens of one rank and of the CPU's reference, K and V by
head slices between pools in pieces, and a rank that dies ends its worker alone."""

import os
import signal
import subprocess
import sys
import threading

import pytest

import cluster as cl
from conftest import FULL
from test_cluster import pytestmark  # noqa: F401  (built with the emulator, and no sanitizer)

TOKENS = 4
PROMPTS = [[1604, 3987, 46477, 24, 94, 727, 253], list(range(100, 120))]  # a block in part; two of them
SPLITS = [(2, 1), (2, 4)] + ([(1, 4), (4, 2), (4, 4), (8, 2)] if FULL else [])


def make(path, *options):
    """A random llama of two layers with 8 KV heads."""
    subprocess.run([sys.executable, os.path.join(cl.ROOT, "tests", "tools", "make_model.py"), "--tokenizer", cl.MODEL,
                    "--layers", "2", *options, "--out", str(path)], check=True)
    return str(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make(tmp_path_factory.mktemp("model") / "random.gguf")


def ranks_cluster(model, prefill, decode, devices=("cuda-emu", "cuda-emu"), speculative=None, **changes):
    one = {
        "model": {"path": model, "context": 128},
        "prefill": {"tensor_parallel": prefill, "device": devices[0], "chunk_tokens": 16},
        "decode": {"tensor_parallel": decode, "device": devices[1], "max_batch": 4},
        "kv": {"memory": "16MiB"},
        # kernels of a tenth of a second on the cores that all share
        "heartbeat": {"lost_after": "20s", "hung_after": "60s"},
    }
    if speculative is not None:
        one["decode"]["speculative"] = speculative
    return cl.Cluster(**cl.merged(one, changes))


def answers(one):
    return one.together([lambda p=p: one.complete(p, TOKENS, ignore_eos=True).token_ids for p in PROMPTS])


@pytest.fixture(scope="module")
def want(model):
    """What the CPU's reference says, and with it one emulated GPU a role."""
    with ranks_cluster(model, 1, 1, ("cpu-ref", "cpu-ref")) as one:
        said = answers(one)
    with ranks_cluster(model, 1, 1) as one:
        assert answers(one) == said
    assert all(len(tokens) == TOKENS for tokens in said) and said[0] != said[1]
    return said


def rank_pids(one, name):
    return list(map(int, one.worker(name)["rank_pids"]))


def alive(one, pids):
    return set(pids) & set(map(int, one.processes()))


@pytest.mark.parametrize("prefill, decode", SPLITS)
def test_any_split_gives_the_references_tokens(model, want, prefill, decode):
    with ranks_cluster(model, prefill, decode) as one:
        assert answers(one) == want
        assert len(rank_pids(one, "prefill-0")) == prefill - 1
        assert len(rank_pids(one, "decode-0")) == decode - 1
        for name, ranks in (("prefill-0", prefill), ("decode-0", decode)):
            log = one.logs()[f"logs/{name}.log"]
            assert f'backend="cuda-emu emulated sm_90 (0)" ranks={ranks} ' in log, log
            for rank in range(1, ranks):
                assert f'rank={rank} of={ranks} backend="cuda-emu emulated sm_90 ({rank})"' in log, log
            assert f"pieces={ranks}" in log, "its pool is not in pieces"
        cl.wait_until(lambda: one.metric("kvferry_shipped_bytes_total") > 0, 20, "nothing was shipped")


@pytest.mark.parametrize("decode", [1, 2] if FULL else [2])
def test_drafts_change_no_token(model, want, decode):
    """By the same model: what it drafts it draws as well, so that steps of several rows a sequence decide the answer."""
    speculative = {"method": "draft_model", "draft_model": model, "adaptive": False, "draft_tokens": 2}
    with ranks_cluster(model, 1, decode, speculative=speculative) as one:
        assert answers(one) == want
        cl.wait_until(lambda: one.metric("kvferry_spec_accepted_tokens_total") > 0, 5 * cl.SLOW, "no draft was accepted")


@pytest.mark.skipif(not FULL, reason="with --full: the other ways that a pool's blocks may go")
@pytest.mark.parametrize("devices", [("cuda-emu", "cpu-ref"), ("cpu-ref", "cuda-emu")])
def test_gpus_and_hosts_exchange_slices(model, want, devices):
    with ranks_cluster(model, 2, 4, devices) as one:
        assert answers(one) == want


def test_a_rank_that_is_killed_ends_its_worker_alone_and_the_stream_goes_on(model, want):
    with ranks_cluster(model, 1, 2, workers=3, ratio="1:2") as one:
        before = {worker["name"]: worker for worker in one.workers()}
        ranks, killed = {name: rank_pids(one, name)[0] for name in ("decode-0", "decode-1")}, []

        def kill(tokens):
            if tokens > 1 and not killed:  # the first comes from the prefill worker
                name = next(name for name in ranks if 'msg="joins the batch"' in one.logs()[f"logs/{name}.log"])
                killed.append((name, ranks[name]))
                os.kill(killed[0][1], signal.SIGKILL)
            return False

        answer = one.stream(PROMPTS[0], TOKENS, hang_up=kill, ignore_eos=True)
        assert answer.error is None and answer.token_ids == want[0]
        (name, pid), = killed
        line = f'msg="a tensor-parallel rank was killed, and its worker ends with it" rank=1 pid={pid} signal=9'

        def restarted():
            now = one.worker(name)
            return now is not None and now["incarnation"] != before[name]["incarnation"] and now["state"] == "ready"

        cl.wait_until(restarted, 60, lambda: f"{name} did not come back: {one.worker(name)}")
        assert one.logs()[f"logs/{name}.log"].count(line) == 1
        assert not alive(one, [pid, before[name]["pid"]])
        assert all(w["incarnation"] == before[w["name"]]["incarnation"] for w in one.workers() if w["name"] != name)


@pytest.mark.skipif(not FULL, reason="with --full: it is the CPU's way of leaving, too")
def test_a_worker_whose_rank_stands_still_leaves_when_it_is_told(model):
    with ranks_cluster(model, 1, 2) as one:
        pid, rank = one.worker("decode-0")["pid"], rank_pids(one, "decode-0")[0]
        os.kill(rank, signal.SIGSTOP)
        asker = threading.Thread(target=lambda: one.stream(PROMPTS[0], TOKENS, ignore_eos=True), daemon=True)
        asker.start()
        cl.wait_until(lambda: one.worker("decode-0")["running"] == 1, 20, "the request did not come to the stopped rank")
        for _ in range(2):  # the second one asks for no grace
            os.kill(pid, signal.SIGTERM)
        cl.wait_until(lambda: not alive(one, [pid, rank]), 10, "it was told to leave, and has not left")
        asker.join(60)


def test_more_ranks_than_devices_are_refused_with_the_reason(model):
    """The emulator has 8 devices."""
    folder = cl.Folder(model={"path": model, "context": 128}, decode={"tensor_parallel": 4, "device": "cuda-emu:6"})
    try:
        status, out, err = folder.kvferry("check", "-f", folder.file)
        assert status == 0, (out, err)
        status, _, err = folder.kvferry("up", "-f", folder.file, "--detach")
        assert status == 1
        lines = [line for line in err.splitlines() if "cuda-emu: 4 ranks need a device each, from 6 on, and there are 8" in line]
        assert len(lines) == 1 and "decode-0 ended" in lines[0], err
        folder.assert_no_process()
    finally:
        folder.remove()


def test_weights_that_no_kernel_reads_are_refused_with_the_tensor(tmp_path):
    path = make(tmp_path / "q4_k.gguf", "--q4-k")
    folder = cl.Folder(model={"path": path, "context": 128}, prefill={"device": "cpu"}, decode={"device": "cuda-emu"})
    try:
        status, _, err = folder.kvferry("up", "-f", folder.file, "--detach")
        assert status == 1
        why = f"cuda: no kernels for the weight format path={path} tensor=blk.0.ffn_down.weight format=Q4_K"
        lines = [line for line in err.splitlines() if why in line]
        assert len(lines) == 1 and "decode-0 ended" in lines[0], err
        folder.assert_no_process()
    finally:
        folder.remove()
