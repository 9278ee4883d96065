"""Blocks between a cache and host memory: the bytes are right, whatever their order and the
pieces they come in.
"""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from minivllm.kernels.copy_blocks import BlockRegions
from minivllm.kv_connector.host_copies import HostCopies, host_buffer, runs

BLOCKS, RECORDS = 12, 9
BLOCK_IDS, SLOTS = [3, 11, 1, 7, 2, 5], [4, 5, 6, 0, 8, 2]


class StreamDouble:
    """A CPU stand-in for a stream, on which everything is done immediately."""

    def __init__(self, device: torch.device) -> None:
        self.waited: list[Any] = []

    def wait_event(self, event: Any) -> None:
        self.waited.append(event)

    def synchronize(self) -> None:
        pass


@pytest.fixture(params=["cpu", "staged", pytest.param("cuda", marks=pytest.mark.gpu)])
def copies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> HostCopies:
    """Return copies as on a CPU, as on a GPU but in CPU memory, or on a real GPU. The staging
    buffer has room for four blocks.
    """
    device = torch.device("cuda" if request.param == "cuda" else "cpu")
    cache = [torch.randint(0, 256, (BLOCKS, size), dtype=torch.uint8, device=device) for size in (64, 64, 12)]
    regions = BlockRegions.of(cache)
    copies = HostCopies(regions, 4 * regions.record_bytes + 1)
    if request.param == "staged":
        monkeypatch.setattr(torch.cuda, "Stream", StreamDouble)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        copies._begin_staging()
    return copies


def record_of(copies: HostCopies, block: int) -> torch.Tensor:
    return torch.cat([tensor[block].cpu() for tensor in copies.regions.tensors])


def test_blocks_are_where_they_belong_and_nothing_else_is_written_there_and_back(copies: HostCopies) -> None:
    before = [record_of(copies, block) for block in range(BLOCKS)]
    record = copies.regions.record_bytes
    host = host_buffer(RECORDS, record, copies.regions.device.type == "cuda").fill_(7)
    copies.to_host(BLOCK_IDS, host, SLOTS)
    for slot in range(RECORDS):
        wanted = before[BLOCK_IDS[SLOTS.index(slot)]] if slot in SLOTS else torch.full((record,), 7)
        assert torch.equal(host.view(RECORDS, record)[slot], wanted.to(torch.uint8))
    for tensor in copies.regions.tensors:
        tensor[BLOCK_IDS] = 0
    copies.from_host(BLOCK_IDS, host, SLOTS)
    assert all(torch.equal(record_of(copies, block), wanted) for block, wanted in enumerate(before))


def test_a_store_waits_for_what_computes_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", StreamDouble)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    copies = HostCopies(BlockRegions.of([torch.ones(2, 8, dtype=torch.uint8)]))
    copies._begin_staging()
    event = object()
    copies.to_host([1], host_buffer(1, 8, pinned=False), [0], event)
    assert copies._stream.waited == [event]


def test_consecutive_records_cross_the_bus_as_one_piece() -> None:
    assert list(runs([4, 5, 6, 9, 2, 3])) == [(0, 4, 3), (3, 9, 1), (4, 2, 2)]
    assert list(runs([])) == []
