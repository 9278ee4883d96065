"""Tensor parallelism: each rank computes a part of every layer, with one all-reduce after attention
and one after MLP.

Attention and MLP are each two matmuls with a per-head or element-wise operation in between.
The first matmul is divided by its outputs (columns): a rank computes its own heads, or its own
part of the MLP's width, from the whole input. The second is divided by its inputs (rows): a rank
multiplies what it has just computed, which gives one term of every output. One all-reduce adds the
terms, and every rank continues with the same full hidden states.

So a rank's model is a decoder with fewer heads and a narrower MLP (`shard_config`), plus these
all-reduces. A step reduces 2 × L × tokens × hidden_size numbers for L layers, in the model's dtype;
fewer in the last layer, where only the rows that sample continue.

Key-value heads are divided as long as each rank gets at least one; with more ranks than heads, they
are replicated. Embedding and head are replicated on every rank, the simplest correct choice: the
lookup is cheap, and only rank 0, which samples, computes logits. Dividing both by vocabulary, as
vLLM does, would save each rank (size − 1) / size of their bytes, and cost one more all-reduce after
the lookup and a gather of the logits.

Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053. In vLLM v0.33.0:
`vllm/distributed/parallel_state.py` (`GroupCoordinator`), `vllm/model_executor/layers/linear.py`
(`QKVParallelLinear`, `RowParallelLinear`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist

from minivllm.config import ModelConfig
from minivllm.errors import LostPeerError, MinivllmError
from minivllm.memory.bytes_per_token import kv_heads_on_rank
from minivllm.models.pipeline import Stage

ONE_STAGE = Stage()
Connect = Callable[[int], dist.ProcessGroup | None]


class GroupCoordinator:
    """The ranks that share the layers of one pipeline stage, as seen by `rank`. A group of one
    exchanges nothing.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        connect: Connect | None = None,
        stage: Stage = ONE_STAGE,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Join the group. Several ranks use torch.distributed's default process group, which must
        be initialized.

        `connect(n)` initializes it again, for the n-th time, once all ranks call it, and returns
        the stage's group in the form of `process_group`: None for the default group. Without
        `connect`, the ranks cannot rejoin.
        """
        self.rank = rank
        self.size = size
        self.stage = stage
        self._connect = connect
        self._num_connections = 0
        self._process_group = process_group
        self._sending: tuple[dist.Work, torch.Tensor] | None = None

    @property
    def world_rank(self) -> int:
        """Return this rank's number among the ranks of all stages, which are numbered stage by
        stage.
        """
        return self.stage.rank * self.size + self.rank

    @property
    def world_size(self) -> int:
        """Return the number of ranks of all stages."""
        return self.stage.size * self.size

    @property
    def samples(self) -> bool:
        """Return whether this rank samples; only the first rank of the last stage does."""
        return self.rank == 0 and self.stage.is_last

    def all_reduce(self, terms: torch.Tensor) -> torch.Tensor:
        """Sum the `terms` of all ranks, in place: all have the same shape, and every rank gets the
        same sum.

        Raises:
            LostPeerError: another rank is gone.
        """
        if self.size == 1:
            return terms
        with self._peers():
            dist.all_reduce(terms, group=self._process_group)
        return terms

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Copy rank 0's `tensor` into every rank's `tensor`; shape and dtype must match.

        Raises:
            LostPeerError: another rank is gone.
        """
        if self.size > 1:
            with self._peers():
                # Rank 0 of this stage, by its number in the world.
                dist.broadcast(tensor, src=self.world_rank - self.rank, group=self._process_group)

    def send_to_next_stage(self, hidden: torch.Tensor) -> None:
        """Start sending a step's hidden states to the same rank of the next stage, once the earlier
        ones have been sent.

        Raises:
            LostPeerError: that rank is gone.
        """
        with self._peers():
            # One send at a time: the buffer of the one before is free then.
            if self._sending is not None:
                self._sending[0].wait()
            work = dist.isend(hidden, self.world_rank + self.size)
            assert work is not None
            self._sending = work, hidden  # the tensor must live until it is sent

    def receive_from_previous_stage(self, hidden: torch.Tensor) -> torch.Tensor:
        """Wait for a step's hidden states; fill and return `hidden`, which has their shape.

        Raises:
            LostPeerError: the rank that would send them is gone.
        """
        with self._peers():
            dist.recv(hidden, self.world_rank - self.size)
        return hidden

    def leave(self) -> None:
        """End the connections to the other ranks: a rank that waits for this one, now or later,
        gets `LostPeerError`.
        """
        if self._connect is not None and dist.is_initialized():
            # A stage's own group keeps its connections for as long as there is a reference to it.
            self._sending = self._process_group = None
            dist.destroy_process_group()

    def rejoin(self) -> None:
        """Reconnect the ranks, whatever state a failed step has left their connections in. All
        ranks must call this.

        Raises:
            LostPeerError: another rank is gone.
        """
        if self._connect is not None:
            self.leave()
            self._num_connections += 1
            with self._peers():
                self._process_group = self._connect(self._num_connections)

    @contextmanager
    def _peers(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise LostPeerError(f"rank {self.rank} lost another rank: {error}") from error


def shard_config(config: ModelConfig, size: int) -> ModelConfig:
    """Return the config of one rank's part of a model: its share of the heads and of the MLP's
    width.

    Raises:
        MinivllmError: the model cannot be divided over `size` ranks; the message names the sizes
            that work.
    """
    if size == 1:
        return config
    possible = possible_sizes(config)
    if size not in possible:
        name = config.architecture or config.model_type or "the model"
        shape = (
            f"{config.num_attention_heads} attention heads, {config.num_key_value_heads} key-value heads and "
            f"an MLP {config.intermediate_size} wide"
        )
        raise MinivllmError(
            f"tensor_parallel_size is {size}, but {name} has {shape}, which must all be divided evenly: "
            f"use one of {', '.join(map(str, possible))}"
        )
    return replace(
        config,
        num_attention_heads=config.num_attention_heads // size,
        num_key_value_heads=kv_heads_on_rank(config, size),
        intermediate_size=config.intermediate_size // size,
    )


def possible_sizes(config: ModelConfig) -> list[int]:
    """Return the numbers of ranks that the model can be divided over.

    Attention heads and the MLP's width must divide evenly; key-value heads are either divided
    evenly, or each is held by the same number of ranks.
    """
    heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.intermediate_size
    sizes = [size for size in range(1, heads + 1) if heads % size == 0 and width % size == 0]
    return [size for size in sizes if kv_heads % size == 0 or size % kv_heads == 0]


def kv_part(config: ModelConfig, group: GroupCoordinator) -> tuple[int, int]:
    """Return (index, number of parts) of the rank's share of the KV heads; adjacent ranks hold
    replicated heads.
    """
    # With more ranks than heads, several hold the same one.
    parts = min(config.num_key_value_heads, group.size)
    return group.rank * parts // group.size, parts
