"""Blocks of a paged cache as bytes to send, and bytes that were received as blocks.

A transfer is cut into pieces: some blocks of one layer each, or all of a few, at most `PIECE_BYTES`, in order, so
that whoever receives them can compute the first layers while later ones are under way. The kernel of
`kernels/copy_blocks.py` gathers a piece on a GPU, from where it crosses to pinned memory of the host in one copy. On
a CPU a socket takes blocks from the cache and puts them there, so nothing is gathered; a piece of that size stays in
a core's cache between its checksum and its copy into the socket. Cutting is the same on both sides: it depends on the
layers' sizes and the number of blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from minivllm.core.kv_connector import KVCaches
from minivllm.errors import MinivllmError
from minivllm.kernels.copy_blocks import BlockRegions, gather_blocks, scatter_blocks
from minivllm.kv_connector.tcp.checksums import Payload

PIECE_BYTES = 512 * 1024


@dataclass(frozen=True, slots=True)
class Piece:
    """`count` blocks of `layers` layers from `layer` on, from the `first` of those to be moved, and their bytes.

    Several layers only where all blocks of them are no more than a piece.
    """

    layer: int
    layers: int
    first: int
    count: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Span:
    """Consecutive layers: their regions, each region's address and bytes from block to block, its bytes on a CPU."""

    regions: BlockRegions
    addresses: np.ndarray
    steps: np.ndarray
    views: list[memoryview]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> _Span:
        regions = BlockRegions.of(tensors)
        table = regions.table.cpu().numpy()
        views = [_bytes_of(one) for one in tensors] if regions.device.type == "cpu" else []
        return cls(regions, table[:, :1].copy(), table[:, 1:2].copy(), views)


class BlockStaging:
    """All layers of one rank's cache, and how transfers of their blocks are cut."""

    def __init__(self, kv_caches: KVCaches, piece_bytes: int = PIECE_BYTES) -> None:
        """Raises `MinivllmError` if a layer's tensors cannot be copied by blocks."""
        self.layer_names = tuple(kv_caches)
        self._spans = {(index, 1): _Span.of(tensors) for index, tensors in enumerate(kv_caches.values())}
        self.layers = tuple(span.regions for span in self._spans.values())
        self.num_blocks = self.layers[0].num_blocks
        self.device = self.layers[0].device
        self.cache = tuple(
            tuple((str(one.dtype).removeprefix("torch."), tuple(one.shape[1:])) for one in tensors)
            for tensors in kv_caches.values()
        )
        self._piece_bytes = piece_bytes
        self._blocks_of_a_piece = tuple(max(1, piece_bytes // layer.record_bytes) for layer in self.layers)

    @staticmethod
    @functools.lru_cache(maxsize=256)
    def sizes(bytes_of_regions: tuple[int, ...], count: int) -> np.ndarray:
        """Bytes of each part of a piece: blocks in order, region after region; not to be changed."""
        return np.array(bytes_of_regions, np.int64).repeat(count)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all layers."""
        return sum(layer.record_bytes for layer in self.layers)

    @property
    def largest_piece(self) -> int:
        """Bytes that a buffer must have room for."""
        return max(self._piece_bytes, *(layer.record_bytes for layer in self.layers))

    def span(self, piece: Piece) -> _Span:
        """The layers of a piece."""
        key = piece.layer, piece.layers
        if key not in self._spans:
            layers = self.layers[piece.layer : piece.layer + piece.layers]
            self._spans[key] = _Span.of([tensor for layer in layers for tensor in layer.tensors])
        return self._spans[key]

    def pieces(self, num_blocks: int) -> Iterator[Piece]:
        """How a transfer of so many blocks is cut: layer by layer, blocks in order."""
        together = max(1, self._piece_bytes // max(1, num_blocks * max(layer.record_bytes for layer in self.layers)))
        for index in range(0, len(self.layers), together):
            layers = self.layers[index : index + together]
            record, most = sum(layer.record_bytes for layer in layers), self._blocks_of_a_piece[index]
            for first in range(0, num_blocks, most):
                count = min(most, num_blocks - first)
                yield Piece(index, len(layers), first, count, count * record)

    def ids(self, block_ids: Sequence[int]) -> torch.Tensor:
        """The ids on the cache's device, for `StagingBuffer`.

        Raises:
            MinivllmError: one is not a block of the pool; the null block, 0, is none.
        """
        if block_ids and not (min(block_ids) > 0 and max(block_ids) < self.num_blocks):
            raise MinivllmError(f"block ids must be from 1 to {self.num_blocks - 1}, got {_shortened(block_ids)}")
        return torch.tensor(block_ids, dtype=torch.int64).to(self.device)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes, one after the other."""
    if not tensor.is_contiguous():
        raise MinivllmError(f"a tensor of the cache must be contiguous; strides are {list(tensor.stride())}")
    return tensor.view(torch.uint8).view(-1).numpy().data


def _shortened(block_ids: Sequence[int]) -> str:
    shown = ", ".join(map(str, block_ids[:8]))
    return f"{shown}, ..." if len(block_ids) > 8 else shown


class StagingBuffer:
    """Where one thread's pieces are sent from and received into.

    On a CPU that is the cache itself: a socket takes and fills many buffers in one call, and every copy that is left
    out counts. On a GPU it is pinned memory, beside as much memory of the device.
    """

    def __init__(self, staging: BlockStaging) -> None:
        self._staging = staging
        if staging.device.type == "cpu":
            return
        self._host = torch.empty(staging.largest_piece, dtype=torch.uint8, pin_memory=True)
        self._there = torch.empty_like(self._host, device=staging.device)
        self._stream = torch.cuda.Stream(staging.device)  # beside that of the forward pass

    def gather(self, piece: Piece, ids: torch.Tensor) -> Payload:
        """The piece's bytes, to be sent; `ids` are those of the whole transfer. Valid until the next call."""
        if self._staging.device.type == "cpu":
            return self.room(piece, ids)
        chosen, layer = ids[piece.first : piece.first + piece.count], self._staging.span(piece).regions
        with torch.cuda.stream(self._stream):
            gather_blocks(layer, chosen, self._there[: piece.nbytes])
            self._host[: piece.nbytes].copy_(self._there[: piece.nbytes])  # returns when it is done
        return self.room(piece, ids)

    def room(self, piece: Piece, ids: torch.Tensor) -> Payload:
        """Where the piece's bytes are to be received."""
        staging = self._staging
        span = staging.span(piece)
        bytes_of_regions = span.regions.block_bytes
        sizes = staging.sizes(bytes_of_regions, piece.count)
        if staging.device.type == "cpu":
            chosen = ids[piece.first : piece.first + piece.count].numpy()
            addresses = (span.addresses + span.steps * chosen).ravel()
            views = zip(span.views, bytes_of_regions, strict=True)
            parts = [view[block * size : (block + 1) * size] for view, size in views for block in chosen.tolist()]
        else:
            ends = sizes.cumsum()
            addresses, whole = self._host.data_ptr() + ends - sizes, self._host.numpy().data
            parts = [whole[end - size : end] for end, size in zip(ends.tolist(), sizes.tolist(), strict=True)]
        return Payload(parts, addresses, sizes, piece.nbytes)

    def scatter(self, piece: Piece, ids: torch.Tensor) -> None:
        """Sees to it that what `room` has received is in the cache when this returns."""
        if self._staging.device.type == "cpu":
            return
        chosen, layer = ids[piece.first : piece.first + piece.count], self._staging.span(piece).regions
        with torch.cuda.stream(self._stream):
            self._there[: piece.nbytes].copy_(self._host[: piece.nbytes])
            scatter_blocks(layer, chosen, self._there[: piece.nbytes])
        self._stream.synchronize()
