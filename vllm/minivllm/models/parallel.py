"""Tensor parallel: ranks that each compute a part of every layer, and the one sum that they owe each other per half.

A half block is two matrix products with something in between that works on each head, or each element, by itself. The
first product is divided by its outputs (columns): a rank computes its own heads, or its own part of the MLP's width,
from the whole input. The second is divided by its inputs (rows): a rank multiplies what it has just computed, which is
one term of every output. One all-reduce adds the terms, and every rank goes on with the same whole hidden states.

So a rank's model is a decoder with fewer heads and a narrower MLP (`shard_config`), and the only thing that it does
differently is that sum. A step sums 2 × L × tokens × hidden_size numbers for L layers, in the model's dtype; fewer in
the last layer, where only the rows that sample go on.

Key-value heads are divided too while there are enough; beyond one head a rank they are held several times over.
Embedding and head stay whole on every rank, which is the simplest that is correct: the lookup costs nothing, and only
rank 0, which samples, computes logits. Dividing both by vocabulary, as vLLM does, would save each rank
(size − 1) / size of their bytes, and cost one more all-reduce after the lookup and a gather of the logits.

Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053. In vLLM v0.33.0: `vllm/distributed/parallel_state.py`
(`GroupCoordinator`), `vllm/model_executor/layers/linear.py` (`QKVParallelLinear`, `RowParallelLinear`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist

from minivllm.config import ModelConfig
from minivllm.errors import LostPeerError, MinivllmError
from minivllm.memory.bytes_per_token import kv_heads_on_rank


class GroupCoordinator:
    """The ranks that share one model, as `rank` sees them. A group of one has nothing to exchange.

    `bytes_reduced` counts what went into all-reduces so far: bytes of one rank's terms.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        """A group of more than one takes torch.distributed's default process group, which must be there."""
        self.rank, self.size = rank, size
        self.bytes_reduced = 0

    def all_reduce(self, terms: torch.Tensor) -> torch.Tensor:
        """Adds up the `terms` of all ranks, in place: the same shape, and the same sum on every rank.

        Raises:
            LostPeerError: another rank is gone.
        """
        if self.size == 1:
            return terms
        self.bytes_reduced += terms.nbytes
        with self._peers():
            dist.all_reduce(terms)
        return terms

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Puts what rank 0 has in `tensor` into that of every rank: same shape and dtype everywhere.

        Raises:
            LostPeerError: another rank is gone.
        """
        if self.size > 1:
            with self._peers():
                dist.broadcast(tensor, src=0)

    @contextmanager
    def _peers(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise LostPeerError(f"rank {self.rank} lost another rank: {error}") from error


def shard_config(config: ModelConfig, size: int) -> ModelConfig:
    """The shape of one rank's part of a model: its heads and its width of the MLP.

    Raises:
        MinivllmError: the model cannot be divided so; the message names the sizes that work.
    """
    if size == 1:
        return config
    possible = possible_sizes(config)
    if size not in possible:
        name = config.architecture or config.model_type or "the model"
        raise MinivllmError(
            f"tensor_parallel_size is {size}, but {name} has {config.num_attention_heads} attention heads, "
            f"{config.num_key_value_heads} key-value heads and an MLP {config.intermediate_size} wide, which must all "
            f"be divided evenly: use one of {', '.join(map(str, possible))}"
        )
    return replace(
        config,
        num_attention_heads=config.num_attention_heads // size,
        num_key_value_heads=kv_heads_on_rank(config, size),
        intermediate_size=config.intermediate_size // size,
    )


def possible_sizes(config: ModelConfig) -> list[int]:
    """Numbers of ranks that the model can be divided over.

    Each has as many heads and as much of the MLP's width as any other; key-value heads are divided, or else each is
    held by equally many ranks.
    """
    heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.intermediate_size
    sizes = [size for size in range(1, heads + 1) if heads % size == 0 and width % size == 0]
    return [size for size in sizes if kv_heads % size == 0 or size % kv_heads == 0]


def kv_part(config: ModelConfig, group: GroupCoordinator) -> tuple[int, int]:
    """(which part, of how many) of the whole model's key-value heads a rank has. Neighbouring ranks share one."""
    parts = min(config.num_key_value_heads, group.size)
    return group.rank * parts // group.size, parts
