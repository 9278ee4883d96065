"""How fast NIXL reads blocks from another process, beside what its way gives to whoever uses it directly.

    uv run --group nixl python benchmarks/nixl_rate.py
    uv run --group nixl python benchmarks/nixl_rate.py --quick     # a few turns, to see that it runs

UCX, which moves NIXL's bytes, is held to one way by `UCX_TLS`. `sm` between two processes' own memories is a copy
that the kernel makes; beside it stand the same call, made directly, for the same scattered blocks
(`process_vm_readv`), and a copy out of memory that both share. `tcp` goes over loopback; beside it stands a plain
socket. Blocks are scattered on both sides, as a paged cache scatters them. All ways take turns; a share is the median
of the turns' ratios, so what else the machine does falls on both. The table is followed by one line of JSON, which
goes to benchmarks/results/nixl_rate.cpu.json too (not with --quick, unless --json names a file).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import random
import socket
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import shared_memory
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

from minivllm.errors import MinivllmError
from minivllm.kv_connector.nixl.agent import NixlAgent, Region
from minivllm_lab.cli import Parser, positive_int, run
from minivllm_lab.progress import track
from minivllm_lab.results import ensure_writable, record, write_json
from minivllm_lab.tables import table
from minivllm_lab.timing import in_turns

RESULTS = Path(__file__).resolve().parent / "results"
MEBIBYTE, PIECE = 1 << 20, 32 << 10  # a block's keys of one layer: 16 tokens, 8 heads of 64, fp32
SIZES = (1, 4, 16, 64)  # MiB
ROOM = 2 * SIZES[-1] * MEBIBYTE
WAYS = {"sm": "sm,tcp,self", "tcp": "tcp,self"}  # sm alone cannot make a connection; it moves the bytes where it can
SECONDS_BETWEEN_LOOKS = 0.0001  # UCX's own threads need the cores
PIECES_A_CALL = 1024  # the most that process_vm_readv takes


class IOVec(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def serve(pipe: Connection, shared_name: str) -> None:
    """The other process: an agent for each way over one memory, a plain socket, and all that this one needs to know."""
    memory = filled()
    agents = [agent_of(way, f"{way} there", memory) for way in WAYS]
    shared = shared_memory.SharedMemory(shared_name)
    shared.buf[:ROOM] = memory.numpy().tobytes()
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=send_plainly, args=(listener, memoryview(memory.numpy())), daemon=True).start()
    pipe.send(([agent.metadata() for agent in agents], memory.data_ptr(), os.getpid(), listener.getsockname()[1]))
    pipe.recv()
    for agent in agents:
        agent.close()
    shared.close()


def filled() -> torch.Tensor:
    """Bytes that are nowhere alike."""
    return torch.randint(0, 256, (ROOM,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def agent_of(way: str, name: str, memory: torch.Tensor) -> NixlAgent:
    """An agent that has only this way, with this memory."""
    os.environ["UCX_TLS"] = WAYS[way]
    agent = NixlAgent(name)
    agent.register([memory])
    return agent


def send_plainly(listener: socket.socket, data: memoryview) -> None:
    """Sends as many bytes as 8 bytes ask for, for as long as there is somebody."""
    sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while asked := sock.recv(8):
        sock.sendall(data[: int.from_bytes(asked, "big")])


class Reader:
    """This process: every way to get pieces from the other one."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, there = context.Pipe()
        self.shared = shared_memory.SharedMemory(create=True, size=ROOM)
        self.process = context.Process(target=serve, args=(there, self.shared.name), daemon=True)
        self.process.start()
        there.close()  # so that its end is noticed here
        self.memory = torch.zeros(ROOM, dtype=torch.uint8)
        metadata, self.address, self.pid, port = self.pipe.recv()
        self.agents = {way: agent_of(way, f"{way} here", self.memory) for way in WAYS}
        self.lists = {}
        for (way, agent), theirs in zip(self.agents.items(), metadata, strict=True):
            local = agent.prepare(None, [self._region(self.memory.data_ptr())])
            self.lists[way] = local, agent.prepare(agent.add_peer(theirs), [self._region(self.address)])
        self.sock = socket.create_connection(("127.0.0.1", port))
        self.mapped = np.ndarray((ROOM,), np.uint8, self.shared.buf)
        self.libc = ctypes.CDLL(None, use_errno=True)

    def ways(self, into: Sequence[int], pieces: Sequence[int]) -> dict[str, Callable[[], None]]:
        """Each reads all of these pieces."""
        mine, theirs = np.array(into), np.array(pieces)
        here, there = self.memory.numpy().reshape(-1, PIECE), self.mapped.reshape(-1, PIECE)

        def share() -> None:
            here[mine] = there[theirs]

        return {
            "NIXL, sm": lambda: self.read("sm", mine, theirs),
            "process_vm_readv": lambda: self.read_directly(into, pieces),
            "a copy from shared memory": share,
            "NIXL, tcp": lambda: self.read("tcp", mine, theirs),
            "a plain socket": lambda: self.receive(len(into) * PIECE),
        }

    def read(self, way: str, into: np.ndarray, pieces: np.ndarray) -> None:
        """By NIXL, from the order until the last byte is here."""
        local, remote = self.lists[way]
        transfer = self.agents[way].read(local, into, remote, pieces, b"")
        while (state := transfer.state()) == "PROC":
            time.sleep(SECONDS_BETWEEN_LOOKS)
        if state != "DONE":
            raise MinivllmError(f"NIXL's transfer by {way} has failed")
        transfer.release()

    def read_directly(self, into: Sequence[int], pieces: Sequence[int]) -> None:
        """By the kernel's call."""
        for start in range(0, len(into), PIECES_A_CALL):
            mine, theirs = into[start : start + PIECES_A_CALL], pieces[start : start + PIECES_A_CALL]
            local = (IOVec * len(mine))(*((self.memory.data_ptr() + place * PIECE, PIECE) for place in mine))
            remote = (IOVec * len(mine))(*((self.address + place * PIECE, PIECE) for place in theirs))
            count = ctypes.c_ulong(len(mine))
            self.libc.process_vm_readv.restype = ctypes.c_ssize_t
            if (
                self.libc.process_vm_readv(self.pid, local, count, remote, count, ctypes.c_ulong(0))
                != len(mine) * PIECE
            ):
                raise MinivllmError(f"process_vm_readv: {os.strerror(ctypes.get_errno())}")

    def receive(self, num_bytes: int) -> None:
        """By a socket, into one place."""
        room, received = memoryview(self.memory.numpy()), 0
        self.sock.sendall(num_bytes.to_bytes(8, "big"))
        while received < num_bytes:
            received += self.sock.recv_into(room[received:num_bytes])

    def close(self) -> None:
        """Ends both processes' parts."""
        for agent in self.agents.values():
            agent.close()
        self.sock.close()
        self.pipe.send("end")
        self.process.join(10)
        del self.mapped
        self.shared.unlink()

    def _region(self, address: int) -> Region:
        return Region(address, PIECE, 0, PIECE, ROOM // PIECE)


def check(reader: Reader) -> None:
    """Every way but the socket brings the pieces that were asked for. Raises `MinivllmError` if one does not."""
    into, pieces, expected = [5, 0, 9], [1, 100, 7], filled().view(-1, PIECE)
    for name, way in reader.ways(into, pieces).items():
        reader.memory.zero_()
        way()
        if name != "a plain socket" and not reader.memory.view(-1, PIECE)[into].equal(expected[pieces]):
            raise MinivllmError(f"{name} has brought something else")


def measure(reader: Reader, rounds: int) -> dict[str, dict[str, float]]:
    """For each size in MiB: GB/s of all ways, and the shares."""
    figures = {}
    for size in track(SIZES, "sizes"):
        count, draw = size * MEBIBYTE // PIECE, random.Random(size)
        into, pieces = (draw.sample(range(ROOM // PIECE), count) for _ in range(2))
        seconds = in_turns(reader.ways(into, pieces), rounds)
        rates = {name: size * MEBIBYTE / statistics.median(taken) / 1e9 for name, taken in seconds.items()}
        for ours, own in (("sm", "process_vm_readv"), ("sm", "a copy from shared memory"), ("tcp", "a plain socket")):
            ratios = [theirs / mine for theirs, mine in zip(seconds[own], seconds[f"NIXL, {ours}"], strict=True)]
            rates[f"{ours} / {own}"] = statistics.median(ratios)
        figures[str(size)] = rates
    return figures


def show(figures: dict[str, dict[str, float]]) -> None:
    """Prints the table."""
    first = next(iter(figures.values()))
    rows = [
        (name, *(f"{found[name]:.0%}" if "/" in name else f"{found[name]:.2f}" for found in figures.values()))
        for name in first
    ]
    table("Reading from another process, GB/s and shares", ("", *(f"{size} MiB" for size in figures)), rows)


def main(arguments: argparse.Namespace) -> None:
    """Measures."""
    torch.set_num_threads(1)
    path = arguments.json or (None if arguments.quick else RESULTS / "nixl_rate.cpu.json")
    if path:
        ensure_writable(path)
    reader = Reader()
    try:
        check(reader)
        figures = measure(reader, 3 if arguments.quick else arguments.rounds)
    finally:
        reader.close()
    show(figures)
    print(json.dumps(record("nixl_rate", figures)))
    if path:
        write_json(path, "nixl_rate", figures)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    flags = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--rounds", type=positive_int, default=15, help="turns of each comparison (default: 15)")
    flags.add_argument("--quick", action="store_true", help="a few turns, to see that it runs; writes no file")
    flags.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    return flags


if __name__ == "__main__":
    run(main, parser())
