"""Scattered blocks of 64 KiB by other engines, for bench_transfer.py, which runs this file with the
Python of a virtual environment that has them. Prints "GB/s microseconds" as transfer_bench does.

    transfer_peers.py nixl BLOCKS [progress]      transports by UCX_TLS; "progress": its own thread on
    transfer_peers.py mooncake BLOCKS             tcp

Two processes; a batch counts when the receiver has acknowledged its notification (Mooncake has
none: there a batch counts when its synchronous write returns, which is in its favour).
"""

import itertools
import multiprocessing
import statistics
import sys
import time

import numpy

BLOCK = 64 << 10
BLOCKS = 4096
ROUNDS = 16384
IN_FLIGHT = 256


def scattered(first, count, shift=0):
    return [(first + i + shift) * 1667 % BLOCKS for i in range(count)]


def nixl_agent_of(name, progress):
    from nixl._api import nixl_agent, nixl_agent_config
    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=progress, backends=["UCX"]))
    pool = numpy.full(BLOCKS * BLOCK, 7, dtype=numpy.uint8)
    agent.register_memory([(pool.ctypes.data, pool.nbytes, 0, "pool")], "DRAM")
    return agent, pool


def descs_of(base):
    return [(base + i * BLOCK, BLOCK, 0) for i in range(BLOCKS)]


def nixl_receiver(pipe, progress):
    agent, pool = nixl_agent_of("receiver", progress)
    pipe.send((agent.get_agent_metadata(), pool.ctypes.data))
    turns = itertools.count()
    while next(turns) % 64 or not pipe.poll():  # a look at the pipe is a system call, which NIXL shall not pay for
        for messages in agent.get_new_notifs().values():
            for message in messages:
                pipe.send(int(message))


def run_nixl(blocks, progress):
    ours, theirs = multiprocessing.Pipe()
    receiver = multiprocessing.get_context("spawn").Process(
        target=nixl_receiver, args=(theirs, progress), daemon=True)
    receiver.start()
    metadata, base = ours.recv()
    agent, pool = nixl_agent_of("sender", progress)
    remote = agent.add_remote_agent(metadata)
    local_side = agent.prep_xfer_dlist("", descs_of(pool.ctypes.data), "DRAM")
    remote_side = agent.prep_xfer_dlist(remote, descs_of(base), "DRAM")
    state = {"asked": 0, "acked": 0}
    under_way = []

    def start():
        first = state["asked"]
        handle = agent.make_prepped_xfer("WRITE", local_side, scattered(first, blocks), remote_side,
                                         scattered(first, blocks, 777), str(blocks).encode())
        if agent.transfer(handle) == "ERR":
            sys.exit("nixl: a transfer failed")
        under_way.append(handle)
        state["asked"] += blocks

    def turn():
        for handle in list(under_way):
            status = agent.check_xfer_state(handle)
            if status == "ERR":
                sys.exit("nixl: a transfer failed")
            if status == "DONE":
                agent.release_xfer_handle(handle)
                under_way.remove(handle)
        while ours.poll():
            state["acked"] += ours.recv()

    batches = ROUNDS // blocks
    times = []
    for _ in range(batches):
        began = time.perf_counter()
        start()
        while state["acked"] < state["asked"]:
            turn()
        times.append(time.perf_counter() - began)
    began = time.perf_counter()
    until = state["asked"] + batches * blocks
    while state["acked"] < until:
        while state["asked"] < until and \
                state["asked"] - state["acked"] < max(IN_FLIGHT, 2 * blocks):
            start()
        turn()
    seconds = time.perf_counter() - began
    print(f"{batches * blocks * BLOCK / seconds / 1e9:.3f} {statistics.median(times) * 1e6:.1f}")
    ours.send("end")
    receiver.join(5)


def mooncake_engine():
    from mooncake.engine import TransferEngine
    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
        sys.exit("mooncake: it does not start")
    pool = numpy.full(BLOCKS * BLOCK, 7, dtype=numpy.uint8)
    if engine.register_memory(pool.ctypes.data, pool.nbytes) != 0:
        sys.exit("mooncake: memory is refused")
    return engine, pool


def mooncake_receiver(pipe):
    engine, pool = mooncake_engine()
    pipe.send((f"127.0.0.1:{engine.get_rpc_port()}", pool.ctypes.data))
    pipe.recv()


def run_mooncake(blocks):
    ours, theirs = multiprocessing.Pipe()
    receiver = multiprocessing.get_context("spawn").Process(
        target=mooncake_receiver, args=(theirs,), daemon=True)
    receiver.start()
    name, base = ours.recv()
    engine, pool = mooncake_engine()
    batches = ROUNDS // blocks
    times = []
    for batch in range(batches):
        sources = [pool.ctypes.data + i * BLOCK for i in scattered(batch * blocks, blocks)]
        targets = [base + i * BLOCK for i in scattered(batch * blocks, blocks, 777)]
        began = time.perf_counter()
        if engine.batch_transfer_sync_write(name, sources, targets, [BLOCK] * blocks) != 0:
            sys.exit("mooncake: a transfer failed")
        times.append(time.perf_counter() - began)
    middle = statistics.median(times)
    print(f"{blocks * BLOCK / middle / 1e9:.3f} {middle * 1e6:.1f}")
    ours.send("end")
    receiver.join(5)


def main():
    if len(sys.argv) >= 3 and sys.argv[1] == "nixl":
        run_nixl(int(sys.argv[2]), "progress" in sys.argv[3:])
    elif len(sys.argv) == 3 and sys.argv[1] == "mooncake":
        run_mooncake(int(sys.argv[2]))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
