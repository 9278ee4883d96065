"""Hashes of full blocks: equal hashes mean equal tokens, equal prefixes and equal extra keys.

    hash = H(hash of the previous block, tokens of this block, extra keys)

Because of the chain, a block's hash identifies the whole prefix that ends with it. Extra keys add
what the tokens do not show: the LoRA adapter (its name, path and a fingerprint of what was read
there, in every block) and the cache salt (in the first block; the chain carries it on to the
others).

In vLLM v0.33.0: `vllm/v1/core/kv_cache_utils.py` (`hash_block_tokens`,
`generate_block_hash_extra_keys`, `get_request_block_hasher`).
"""

import hashlib
import struct
from collections.abc import Callable, Sequence

from minivllm.core.lora_request import LoRARequest

BlockHash = bytes

HashBlockTokens = Callable[[BlockHash, Sequence[int], bytes], BlockHash]
"""The type of `hash_block_tokens` and of its replacements."""

NONE_HASH: BlockHash = hashlib.sha256(b"no block before this one").digest()
"""The parent hash of a chain's first block. Fixed, so that all processes compute the same
hashes.
"""


def generate_block_hash_extra_keys(lora_request: LoRARequest | None, cache_salt: str | None) -> bytes:
    """Return the extra keys of one block, each tagged and length-prefixed; pass `cache_salt` for
    the first block only.

    Tags distinguish an adapter from a salt of the same name; lengths distinguish ("ab", "c") from
    ("a", "bc").
    """
    keys: list[str] = []
    if lora_request is not None:
        keys += ["lora", lora_request.lora_name, lora_request.lora_path, lora_request.fingerprint]
    if cache_salt is not None:
        keys += ["salt", cache_salt]
    encoded = [key.encode() for key in keys]
    return b"".join(len(key).to_bytes(8, "little") + key for key in encoded)


def hash_block_tokens(parent: BlockHash, token_ids: Sequence[int], extra_keys: bytes = b"") -> BlockHash:
    """Return the SHA-256 hash (32 bytes) of a block that holds `token_ids` and follows the block
    whose hash is `parent`.
    """
    # For a given block size, parent and tokens have fixed lengths, so the concatenation is
    # unambiguous.
    return hashlib.sha256(parent + struct.pack(f"<{len(token_ids)}q", *token_ids) + extra_keys).digest()


def hash_new_full_blocks(
    block_hashes: list[BlockHash],
    token_ids: Sequence[int],
    block_size: int,
    first_block_keys: bytes = b"",
    later_block_keys: bytes = b"",
    *,
    hash_block: HashBlockTokens = hash_block_tokens,
) -> None:
    """Extend `block_hashes`, which covers the first full blocks of `token_ids`, to cover all of
    them.
    """
    parent = block_hashes[-1] if block_hashes else NONE_HASH
    for start in range(len(block_hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        keys = later_block_keys if start else first_block_keys
        parent = hash_block(parent, token_ids[start : start + block_size], keys)
        block_hashes.append(parent)
