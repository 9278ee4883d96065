"""The groups in which a model's layers share one pool of blocks.

A model whose layers all keep every token has one group, and its cache grows by a fixed number of
bytes per token. Only such models run here; `minivllm_simulate.memory` counts others too.

In vLLM v0.33.0: `vllm/v1/kv_cache_interface.py` (`FullAttentionSpec`, `KVCacheConfig`).
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class FullLayer:
    """A layer that keeps every token; by default, chunked local attention (Llama 4) is allocated in
    the same way.
    """

    block_size: int
    page_bytes: int

    def blocks(self, num_tokens: int, in_flight: int) -> int:
        """Return the number of blocks for a request of `num_tokens` tokens, of which `in_flight`
        are not settled yet.
        """
        return -(-num_tokens // self.block_size)


@dataclass(frozen=True)
class KVGroups:
    """The groups of a model's layers on one GPU. Block `n` of the pool belongs to one group at a
    time.
    """

    # The layers' kind, once for each group.
    groups: tuple[FullLayer, ...]
    block_bytes: int
    # The most tokens that are scheduled and not settled yet.
    in_flight: int = 0

    @property
    def bytes_per_token(self) -> int | None:
        """Return the bytes per token, or None if there is no fixed number, because not every layer
        keeps every token.
        """
        only = self.groups[0]
        return self.block_bytes // only.block_size if len(self.groups) == 1 and type(only) is FullLayer else None

    def widened(self, bytes_per_token: int) -> "KVGroups":
        """Return these groups with `bytes_per_token` more for each token: a draft model's layers
        use the same blocks.
        """
        return replace(self, block_bytes=self.block_bytes + self.groups[0].block_size * bytes_per_token)

    def blocks_per_request(self, num_tokens: int) -> int:
        """Return the number of blocks for a request of `num_tokens` tokens, over all groups."""
        return sum(layer.blocks(num_tokens, self.in_flight) for layer in self.groups)
