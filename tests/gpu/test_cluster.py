"""Prefill and decode on one GPU, KV over UCX: every token of every answer is what the reference would say
after those before it.

KVFERRY_GPU_DEVICE is what computes in place of `cuda` (tests/gpu/run --dry-run goes through this on the
host, which has to give the reference's own tokens); KVFERRY_GPU_MODEL a model that is made already."""

import ctypes
import os
import random
import re
import subprocess
import sys

import pytest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "integration"))
import cluster as cl  # noqa: E402

DEVICE = os.environ.get("KVFERRY_GPU_DEVICE", "cuda")
LANE = os.environ.get("KVFERRY_GPU_LANE", "")  # what must carry blocks; "": whatever does
JUDGE = os.path.join(cl.BUILD, "tests", "gpu", "tokens")
TOKENS = 24
LENGTHS = (5, 70, 300, 700)  # of prompts: also more than a chunk of 256, and than attention's splits of 256 and 512
GAP = 0.1  # logits: what a device's other sums may turn round
SURE = 0.4  # on the trained model, against an fp32 engine


def has_gpu():
    """By the driver's own word."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


on_the_device = pytest.mark.skipif(DEVICE == "cuda" and not has_gpu(), reason="there is no GPU here")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Every format there are kernels for: Q4_0, Q4_1, Q8_0 and BF16."""
    given = os.environ.get("KVFERRY_GPU_MODEL")
    if given:
        return os.path.abspath(given)
    path = tmp_path_factory.mktemp("model") / "made.gguf"
    subprocess.run([sys.executable, os.path.join(cl.ROOT, "tests", "tools", "make_model.py"), "--vocab", "2048", "--bf16",
                    "--layers", "4", "--hidden", "512", "--ffn", "1536", "--heads", "8", "--kv-heads", "4", "--head-dim", "64",
                    "--out", str(path)], check=True)
    return str(path)


@pytest.fixture(scope="module")
def cluster(model):
    roles = {"prefill": {"device": DEVICE, "threads": 2, "chunk_tokens": 256}, "decode": {"device": DEVICE, "threads": 2}}
    with cl.Cluster(model={"path": model, "context": 1024}, kv={"memory": "256MiB"}, **roles) as one:
        yield one
        tell_shipping(one)


def tell_shipping(one):
    """What the prefill worker says of all that it shipped, when it leaves; for tests/gpu/run's summary."""
    one.assert_clean()
    one.down()
    said = re.findall(r'msg="shipped" (.*)', one.logs()["logs/prefill-0.log"])
    assert said, "nothing is said of what was shipped"
    path = os.environ.get("KVFERRY_GPU_FIGURES")
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.writelines(f"shipped from {DEVICE} to {DEVICE} over UCX: {line}\n" for line in said)
    one.up()


def judged(model, pairs):
    """[[(first choice, second, gap) of each token of the answer]] for pairs of prompt and answer."""
    lines = "".join(" ".join(map(str, [len(prompt), *prompt, *answer])) + "\n" for prompt, answer in pairs)
    out = subprocess.run([JUDGE, "--judge", model], input=lines, check=True, capture_output=True, text=True).stdout
    found = []
    for line in out.splitlines():
        words = line.split()
        found.append([(int(words[i]), int(words[i + 1]), float(words[i + 2])) for i in range(0, len(words), 3)])
    assert len(found) == len(pairs)
    return found


def assert_right(model, pairs):
    missed = 0
    for (prompt, answer), choices in zip(pairs, judged(model, pairs)):
        assert len(answer) == len(choices) == TOKENS
        for at, (token, (first, second, gap)) in enumerate(zip(answer, choices)):
            assert token == first or (DEVICE == "cuda" and token == second and gap < GAP), \
                f"prompt of {len(prompt)}, token {at}: {token}, the reference says {first}, then {second}, {gap} below"
            missed += token != first
    assert missed <= TOKENS * len(pairs) // 8, "so many near ties are no chance"


@on_the_device
def test_every_token_is_the_references(cluster, model):
    rng = random.Random(11)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in LENGTHS]
    alone = [cluster.complete(prompt, TOKENS, ignore_eos=True).token_ids for prompt in prompts]
    assert_right(model, list(zip(prompts, alone)))
    together = cluster.together([lambda prompt=prompt: cluster.complete(prompt, TOKENS, ignore_eos=True).token_ids for prompt in prompts])
    assert together == alone  # whatever the company, and by the prefix cache
    cl.wait_until(lambda: cluster.metric("kvferry_shipped_bytes_total") > 0, 20, "nothing was shipped")
    assert cluster.metric("kvferry_seal_failures_total") == 0 and cluster.metric("kvferry_refetches_total") == 0


@on_the_device
@pytest.mark.skipif(not LANE, reason="this UCX has no cuda_ipc, or tests/gpu/run did not say that it has")
def test_blocks_go_by_that_lane(cluster):
    """And not through host memory, which would carry them as well."""
    prompt = [7] * 70
    cluster.complete(prompt, 4, ignore_eos=True)
    lanes = {name: cluster.worker(name)["lanes"] for name in ("prefill-0", "decode-0")}
    assert LANE in re.split(r"[+ =]", lanes["prefill-0"] or ""), lanes
    for path, text in cluster.logs().items():
        assert "through host memory" not in text, path


@on_the_device
def test_status_says_which_gpu_and_where(cluster):
    status, out, err = cluster.kvferry("status", "-f", cluster.file)
    assert status == 0, err
    for name in ("prefill-0", "decode-0"):
        place = cluster.worker(name)["placement"]
        line = next(line for line in out.splitlines() if line.startswith(name + ": "))
        assert (place["gpu"] is not None) == (DEVICE == "cuda"), place
        assert line.startswith(f"{name}: GPU {place['gpu']}, " if place["gpu"] else f"{name}: host's cores, "), line
        if place["gpu"]:
            node = f"/sys/bus/pci/devices/{place['gpu']}/numa_node"
            known = int(open(node, encoding="ascii").read()) if os.path.exists(node) else -1
            assert place["numa_node"] == (known if known >= 0 else None), place


@on_the_device
@pytest.mark.skipif(DEVICE != "cuda", reason="of the host it is tests/run golden that says this")
@pytest.mark.skipif(not os.path.exists(cl.MODEL), reason="there is no trained model in models/")
def test_the_trained_models_sure_tokens_are_an_fp32_engines(golden):
    with cl.Cluster(prefill={"device": DEVICE, "threads": 2}, decode={"device": DEVICE, "threads": 2}) as one:
        compared = 0
        for case in golden.values():
            said, gaps = case["hf_fp32"]["ids"], [gap for gap, _ in case["hf_fp32"]["top2_gap_and_runner_up"]]
            sure = next((at for at, gap in enumerate(gaps) if gap < SURE), len(said))
            given = one.complete(case["prompt_ids"], max(min(len(said), TOKENS), 1), ignore_eos=True).token_ids
            assert given[:sure] == said[: min(sure, TOKENS)], case["name"]
            compared += min(sure, TOKENS)
        assert compared > TOKENS


@pytest.mark.skipif(not has_gpu(), reason="there is no GPU here")
def test_ranks_give_one_ranks_tokens(model, monkeypatch):
    """On a machine with too few GPUs they share one, and exchange their products through memory."""
    monkeypatch.setenv("KVFERRY_SHARE_DEVICE", "1")
    rng = random.Random(12)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in LENGTHS]
    given = []
    for prefill, decode in ((1, 1), (2, 4)):
        with cl.Cluster(model={"path": model, "context": 1024}, kv={"memory": "64MiB"},
                        prefill={"device": "cuda", "tensor_parallel": prefill},
                        decode={"device": "cuda", "tensor_parallel": decode}) as one:
            given.append([one.complete(prompt, TOKENS, ignore_eos=True).token_ids for prompt in prompts])
            assert one.metric("kvferry_seal_failures_total") == 0
    assert given[0] == given[1]


@pytest.mark.parametrize("prefill, decode", [("cpu", "cuda"), ("cuda:0", "cpu-ref"), ("cuda", "cuda-emu")])
def test_a_gpus_pool_and_a_hosts_are_refused(prefill, decode):
    one = cl.Folder(prefill={"device": prefill}, decode={"device": decode})
    try:
        for command in (["check"], ["up", "--detach"]):
            status, out, err = one.kvferry(*command, "-f", one.file)
            assert status != 0, out
            assert f"decode.device: {decode} keeps KV in " in err and f"prefill.device: {prefill} in " in err, err
        one.assert_no_process()
    finally:
        one.remove()
