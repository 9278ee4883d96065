"""Measure the cost of moving keys and values: gather and scatter against a plain copy, TCP against
what loopback itself gives.

    uv run python benchmarks/kv_transfer.py
    uv run python benchmarks/kv_transfer.py --device cuda     # the kernel alone, as shares of a copy's bandwidth

The first table compares moving blocks of all layers between a paged cache and a staging buffer with
a plain copy of as many bytes. The second has a prefill engine's rank in a process of its own, and
times a load from it, from the order until the last block is in the cache, with connection, proofs
and checksums; it is compared with a socket that sends as many bytes from one buffer into another.
Everything that a row compares is measured in turns, and the share is the median of the turns'
ratios, so that the machine's other work affects both sides. If there is much other work, only
processor time is reliable: milliseconds per GB on the side that takes longer, system calls
included, which bounds the rate on an otherwise idle machine.

The tables are followed by one line of JSON, which also goes to benchmarks/results/kv_transfer.<cpu
or the GPU's name>.json (not with --quick, unless --json names a file).
"""

from __future__ import annotations

import argparse
import json
import secrets
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from minivllm.config.kv_transfer import KVTransferConfig
from minivllm.core.kv_connector import KVConnectorConfig
from minivllm.errors import MinivllmError
from minivllm.kernels.copy_blocks import BlockRegions, gather_blocks, scatter_blocks
from minivllm.kv_connector.pull_params import RemotePrefill
from minivllm.kv_connector.pull_scheduler import ReadOrder
from minivllm.kv_connector.tcp.worker import TCPConnectorWorker
from minivllm.platforms.device import DEVICES, pick_device
from minivllm_lab.cli import Parser, positive_int, run
from minivllm_lab.progress import track
from minivllm_lab.results import ensure_writable, record, write_json
from minivllm_lab.tables import table
from minivllm_lab.timing import in_turns

RESULTS = Path(__file__).resolve().parent / "results"
MEBIBYTE = 1 << 20
LAYERS, BLOCK_SIZE, KV_HEADS, HEAD_DIM = 8, 16, 8, 64  # 64 KiB a layer's K and V in fp32: 512 KiB a block
TRANSFERS = (1, 4, 16, 64)  # MiB
COPIES = ((4, 16), (64, 16), (64, 64), (64, 512))  # (KiB of a block in a region, blocks)


def paged(block_bytes: int, blocks: int, regions: int, device: torch.device) -> list[torch.Tensor]:
    """Return the regions of a cache four times as large as what is moved, written once so that the
    pages exist.
    """
    return [torch.full((4 * blocks, block_bytes), 1, dtype=torch.uint8, device=device) for _ in range(regions)]


def copies(block_kib: int, blocks: int, rounds: int, device: torch.device) -> dict[str, float]:
    """Measure GB/s (each gathered byte counts once, although it is read and written) and shares of
    a plain copy.
    """
    regions = BlockRegions.of(paged(block_kib * 1024, blocks, 2 * LAYERS, device))
    ids = (torch.randperm(4 * blocks - 1)[:blocks] + 1).to(device)
    staging = torch.zeros(blocks * regions.record_bytes, dtype=torch.uint8, device=device)
    other = torch.ones_like(staging)
    functions: dict[str, Callable[[], object]] = {
        "copy": lambda: other.copy_(staging),
        "gather": lambda: gather_blocks(regions, ids, staging),
        "scatter": lambda: scatter_blocks(regions, ids, staging),
    }
    seconds = in_turns(functions, rounds, device)
    figures = {f"{name}_gb_s": staging.numel() / statistics.median(seconds[name]) / 1e9 for name in functions}
    for name in ("gather", "scatter"):
        ratios = [copied / taken for copied, taken in zip(seconds["copy"], seconds[name], strict=True)]
        figures[f"{name}_share"] = statistics.median(ratios)
    return figures


def worker(role: str, secret: str, blocks: int) -> TCPConnectorWorker:
    """Return one rank's side of the connector over a cache of `blocks` blocks, without an
    engine.
    """
    extra = {"secret": secret, "kv_lease_duration": 600.0}
    transfer = KVTransferConfig(kv_connector="TCPConnector", kv_role=role, kv_connector_extra_config=extra)
    config = KVConnectorConfig(
        kv_transfer_config=transfer,
        model_fingerprint="none",
        block_size=BLOCK_SIZE,
        num_gpu_blocks=blocks,
        num_layers=LAYERS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        kv_cache_dtype="float32",
    )
    side = TCPConnectorWorker(config)
    shape = (blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    side.register_kv_caches({f"layer {index}": (torch.rand(shape), torch.rand(shape)) for index in range(LAYERS)})
    return side


def serve(secret: str, blocks: int) -> None:
    """Run the other process: a rank that leases all its blocks to each request announced to it, and
    a plain socket.
    """
    side = worker("kv_producer", secret, blocks)
    everything = scattered(blocks)
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=send_plainly, args=(listener, blocks), daemon=True).start()
    print(json.dumps({"port": side.get_handshake_metadata(), "plain": listener.getsockname()[1]}), flush=True)
    while request_id := sys.stdin.readline().strip():
        side.leases.grant({request_id: everything})
        side.get_finished(set())
        print(time.process_time(), flush=True)


def scattered(blocks: int) -> list[int]:
    """Return all blocks except the first, in an order that both processes know, since a request is
    read in the order of its blocks.
    """
    return (torch.randperm(blocks - 1, generator=torch.Generator().manual_seed(0)) + 1).tolist()


def send_plainly(listener: socket.socket, blocks: int) -> None:
    """Answer each 8-byte length with that many bytes of one buffer until the connection closes."""
    buffer = memoryview(bytearray(b"\1") * (blocks * MEBIBYTE // 2))
    sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while asked := sock.recv(8):
        sock.sendall(buffer[: int.from_bytes(asked, "big")])


class Peer:
    """The other process, and both methods of getting bytes from it: the connector and a plain
    socket.
    """

    def __init__(self, blocks: int) -> None:
        self.loads, self.secret = 0, secrets.token_hex(16)
        command = [sys.executable, __file__, "--serve", str(blocks), "--secret", self.secret]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.ports = json.loads(self._answer())
        self.side = worker("kv_consumer", self.secret, blocks)
        self.sock = socket.create_connection(("127.0.0.1", self.ports["plain"]))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.room = memoryview(bytearray(b"\1") * (blocks * MEBIBYTE // 2))

    def next_turn(self) -> tuple[float, float]:
        """Let the other process lease all blocks to another request; return the processor seconds
        that both processes have used so far.
        """
        assert self.process.stdin is not None
        self.loads += 1
        self.process.stdin.write(f"{self.loads}\n")
        self.process.stdin.flush()
        return float(self._answer()), time.process_time()

    def load(self, blocks: int) -> float:
        """Load `blocks` blocks, scattered over both caches, and return the seconds that it takes."""
        assert self.process.stdin is not None
        self.loads += 1
        self.process.stdin.write(f"{self.loads}\n")
        self.process.stdin.flush()
        self._answer()
        ids = tuple(scattered(self.side.regions.num_blocks)[:blocks])
        remote = RemotePrefill("P", str(self.loads), "127.0.0.1", self.ports["port"], ids)
        order = ReadOrder(remote, ids[::-1], 0, BLOCK_SIZE * blocks)
        self.side._wanted.add(order)
        return self.side._load(order)["xfer_time_seconds"]

    def plain(self, nbytes: int) -> float:
        """Receive `nbytes` bytes over a plain socket, and return the seconds that it takes."""
        start, received = time.perf_counter(), 0
        self.sock.sendall(nbytes.to_bytes(8, "big"))
        while received < nbytes:
            received += self.sock.recv_into(self.room[received:nbytes])
        return time.perf_counter() - start

    def close(self) -> None:
        """Close both sides."""
        self.side.shutdown()
        self.sock.close()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(10)

    def _answer(self) -> str:
        assert self.process.stdout is not None
        if line := self.process.stdout.readline():
            return line
        raise MinivllmError(f"the other process exited with {self.process.wait()}")


def transfers(rounds: int) -> dict[str, dict[str, float]]:
    """Measure each size over TCP and over a plain socket, in turns: GB/s, processor time, and the
    ratio of both rates.
    """
    block = MEBIBYTE // 2
    peer = Peer(1 + TRANSFERS[-1] * MEBIBYTE // block)
    try:
        return {str(size): compared(peer, size * MEBIBYTE, rounds) for size in track(TRANSFERS, "transfers")}
    finally:
        peer.close()


def compared(peer: Peer, nbytes: int, rounds: int) -> dict[str, float]:
    """Compare both methods at one size."""
    ways = {"plain": lambda: peer.plain(nbytes), "tcp": lambda: peer.load(2 * nbytes // MEBIBYTE)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    spent = {name: [0.0, 0.0] for name in ways}
    for turn in range(rounds + 2):  # the first two are for warming up
        for name, way in ways.items():
            before, taken = peer.next_turn(), way()
            if turn > 1:
                seconds[name].append(taken)
                spent[name] = [
                    sum(one) for one in zip(spent[name], map(float.__sub__, peer.next_turn(), before), strict=True)
                ]
    figures = {f"{name}_gb_s": nbytes / statistics.median(taken) / 1e9 for name, taken in seconds.items()}
    figures["share"] = statistics.median(map(float.__truediv__, seconds["plain"], seconds["tcp"]))
    figures["share_of_the_fastest"] = min(seconds["plain"]) / min(seconds["tcp"])
    cost = {name: max(both) / rounds / nbytes * 1e12 for name, both in spent.items()}
    figures |= {f"{name}_ms_per_gb": taken for name, taken in cost.items()}
    return figures


def show(figures: dict) -> None:
    """Print the tables."""
    rows = []
    for name, one in figures["copies"].items():
        rates = [f"{one[key]:.1f}" for key in ("copy_gb_s", "gather_gb_s", "scatter_gb_s")]
        rows.append((name, *rates, *(f"{one[key]:.0%}" for key in ("gather_share", "scatter_share"))))
    columns = ("blocks", "copy, GB/s", "gather", "scatter", "gather / copy", "scatter / copy")
    table(f"Blocks of {2 * LAYERS} regions to one buffer and back", columns, rows)
    if "transfers" not in figures:
        return
    columns = ("MiB", "socket, GB/s", "TCPConnector", "share", "of the fastest", "socket, ms/GB", "TCPConnector")
    rows = []
    for size, one in figures["transfers"].items():
        rates = f"{one['plain_gb_s']:.2f}", f"{one['tcp_gb_s']:.2f}"
        shares = f"{one['share']:.0%}", f"{one['share_of_the_fastest']:.0%}"
        rows.append((size, *rates, *shares, f"{one['plain_ms_per_gb']:.0f}", f"{one['tcp_ms_per_gb']:.0f}"))
    table("A load over loopback, cache to cache", columns, rows)


def main(arguments: argparse.Namespace) -> None:
    """Run the measurements that the device allows, print them and save them."""
    torch.set_num_threads(1)
    if arguments.serve:
        serve(arguments.secret, arguments.serve)
        return
    device = pick_device(arguments.device)
    name = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device).replace(" ", "_")
    path = arguments.json or (None if arguments.quick else RESULTS / f"kv_transfer.{name}.json")
    if path:
        ensure_writable(path)
    rounds = 3 if arguments.quick else arguments.rounds
    shapes = COPIES[:1] if arguments.quick else COPIES
    figures: dict = {"copies": {f"{n} × {kib} KiB": copies(kib, n, rounds, device) for kib, n in shapes}}
    if device.type == "cpu":
        figures |= {"transfers": transfers(rounds)}
    show(figures)
    print(json.dumps(record("kv_transfer", figures)))
    if path:
        write_json(path, "kv_transfer", figures)


def parser() -> argparse.ArgumentParser:
    flags = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--device", choices=DEVICES, default="auto", help="device to measure (default: the GPU, if any)")
    flags.add_argument("--rounds", type=positive_int, default=15, help="rounds of each comparison (default: 15)")
    flags.add_argument("--quick", action="store_true", help="a few rounds, as a smoke test; writes no file")
    flags.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    flags.add_argument("--serve", type=int, default=0, help=argparse.SUPPRESS)  # the other process
    flags.add_argument("--secret", default="", help=argparse.SUPPRESS)
    return flags


if __name__ == "__main__":
    run(main, parser())
