"""Match the pieces of two paged caches whose blocks differ in size.

A block's tokens are contiguous in every region, so any number of tokens that divides both block
sizes makes a piece that both sides can address; the greatest such number makes the fewest pieces.
In regions of `n` pieces each, region r has the indices r n to r n + n - 1.
"""

import math
from collections.abc import Sequence

import numpy as np

from minivllm.kv_connector.nixl.agent import Region


def tokens_of_a_piece(block_size: int, other_block_size: int) -> int:
    """Return the number of tokens per piece, for two block sizes in tokens."""
    return math.gcd(block_size, other_block_size)


def regions_in_pieces(
    addresses: Sequence[int], block_lens: Sequence[int], device_id: int, num_blocks: int, per_block: int
) -> list[Region]:
    """Return a cache's regions, every block of `block_lens[i]` bytes cut into `per_block` pieces.

    Blocks must be contiguous, as they are in this engine's caches.
    """
    return [
        Region(address, length // per_block, device_id, length // per_block, num_blocks * per_block)
        for address, length in zip(addresses, block_lens, strict=True)
    ]


def piece_indices(
    block_ids: Sequence[int], block_size: int, first_token: int, tokens: range, num_blocks: int, num_regions: int
) -> np.ndarray:
    """Return the indices of the pieces that hold these tokens, [num_regions * pieces].

    `tokens` holds the first token of each piece; its step is the number of tokens per piece.
    `first_token` is the first token of `block_ids[0]`, and `num_blocks` the number of blocks per
    region.
    """
    per_block = block_size // tokens.step
    # The index of each piece within the request, then its block and its place in it.
    places = (np.arange(tokens.start, tokens.stop, tokens.step) - first_token) // tokens.step
    pieces = np.asarray(block_ids)[places // per_block] * per_block + places % per_block
    # The same pieces in every region: layers, keys and values lie in regions of their own.
    return (np.arange(num_regions)[:, None] * (num_blocks * per_block) + pieces).ravel()
