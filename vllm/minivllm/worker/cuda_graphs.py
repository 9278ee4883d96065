"""Decode steps as CUDA graphs: everything between the token ids and the hidden states launched at once.

A decode step of a small batch takes the GPU less time than the host needs to launch its kernels one by one. A graph is
captured once for a number of rows and launched as a whole ever after. What it may not do is change: it reads and writes
the addresses that it was captured with (`step_buffers.py`), and launches the same grids. So a batch is padded to the
next size that there is a graph for, and what the host would choose by looking at the step is chosen for all steps: the
number of parts that attention splits the keys into, which follows from `max_seq_len`, is that of the longest request
there may be. Prompts and chunks, drafts, and batches larger than the largest graph are launched kernel by kernel.

All graphs share one pool of memory, since only one of them runs at a time. The largest is captured first, and the
others fit into what it took. The result is copied to a buffer outside the pool, where the next graph leaves it alone.

In vLLM v0.33.0: `vllm/v1/worker/gpu/cudagraph_utils.py` (`CudaGraphManager`), `vllm/config/vllm.py`
(`_set_cudagraph_sizes`): its mode FULL_DECODE_ONLY.
"""

import bisect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from minivllm.errors import MinivllmError
from minivllm.models.decoder import Decoder
from minivllm.models.forward_context import ForwardContext
from minivllm.worker.input_batch import StepInputs
from minivllm.worker.paged_attention import PagedAttention
from minivllm.worker.step_buffers import PADDING_SLOT, StepBuffers

MOST_ROWS = 512
TUNING_KEYS = 2048
"""Keys of each request in the step by which the kernels' configurations are chosen before capture."""

Record = Callable[[Callable[[], None]], Callable[[], None]]


def capture_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, then by 8, from 256 on by 16, up to min(2 × max_num_seqs, 512); none that no decode batch needs."""
    limit = min(2 * max_num_seqs, MOST_ROWS)
    ladder = [size for size in (1, 2, 4, *range(8, 256, 8), *range(256, MOST_ROWS + 1, 16)) if size <= limit]
    return ladder[: bisect.bisect_left(ladder, max_num_seqs) + 1]


def padded_size(num_rows: int, sizes: Sequence[int]) -> int | None:
    """The smallest of the ascending `sizes` that so many rows fit into; None where none does."""
    index = bisect.bisect_left(sizes, num_rows)
    return sizes[index] if index < len(sizes) else None


def is_decode(inputs: StepInputs) -> bool:
    """Whether every request of the step computes one token."""
    return len(inputs.input_ids) == len(inputs.req_ids)


class CudaGraphs:
    """The graphs of one model with its cache. `replays` counts what they did; `pool_bytes` is what they took."""

    def __init__(
        self,
        model: Decoder,
        attention: PagedAttention,
        *,
        sizes: Sequence[int],
        max_num_blocks: int,
        max_model_len: int,
        block_size: int,
    ) -> None:
        weight = model.embed_tokens.weight
        self.model, self.attention, self.sizes = model, attention, sorted(sizes)
        self.max_model_len, self.block_size = max_model_len, block_size
        self.buffers = StepBuffers(self.sizes[-1], max_num_blocks, weight.device)
        self.hidden = torch.zeros(self.sizes[-1], model.config.hidden_size, dtype=weight.dtype, device=weight.device)
        self.replays = self.pool_bytes = 0
        self._replay: dict[int, Callable[[], None]] = {}
        self._bytes_reduced: dict[int, int] = {}

    @torch.inference_mode()
    def capture(self, record: Record | None = None) -> None:
        """Captures a graph for each size, the largest first; `record` does it, None: `cuda_recorder`."""
        record = record or cuda_recorder(self.model.group.size)
        before = _reserved(self.hidden.device)
        for size in reversed(self.sizes):
            self.buffers.load(self._tuning_step(size))
            self._replay[size] = record(self._step(size))
        self.pool_bytes = _reserved(self.hidden.device) - before

    def size_for(self, inputs: StepInputs) -> int | None:
        """The graph that computes this step; None where the step is not for graphs."""
        return padded_size(len(inputs.input_ids), self.sizes) if is_decode(inputs) else None

    def replay(self, inputs: StepInputs) -> torch.Tensor:
        """Hidden states of all tokens of the step, [tokens, hidden]; valid until the next replay.

        Raises:
            MinivllmError: there is no graph for such a step.
        """
        size = self.size_for(inputs)
        if size not in self._replay:
            raise MinivllmError(
                f"no CUDA graph for {len(inputs.input_ids)} tokens of {len(inputs.req_ids)} requests: they are for one "
                f"token each of up to {max(self._replay, default=0)} requests"
            )
        self.buffers.load(inputs)
        self._replay[size]()
        self.replays += 1
        self.model.group.bytes_reduced += self._bytes_reduced[size]
        return self.hidden[: len(inputs.input_ids)]

    def _step(self, size: int) -> Callable[[], None]:
        """A decode of `size` rows on the buffers. What is recorded of it runs without Python, which counts nothing."""
        buffers, group = self.buffers, self.model.group
        context = ForwardContext(self.attention.of_step(buffers.metadata(size, self.max_model_len)))

        def step() -> None:
            before = group.bytes_reduced
            hidden = self.model(buffers.input_ids[:size], buffers.positions[:size], context)
            self.hidden[:size].copy_(hidden)
            self._bytes_reduced[size] = group.bytes_reduced - before
            group.bytes_reduced = before

        return step

    def _tuning_step(self, size: int) -> StepInputs:
        """Requests with long contexts that read all over the cache, and write nothing."""
        keys = min(self.max_model_len, TUNING_KEYS)
        columns, num_blocks = -(-keys // self.block_size), len(self.attention.kv_caches[0].keys)
        nothing = np.zeros(0, np.int64)
        return StepInputs(
            req_ids=[""] * size,
            rows=nothing,
            input_ids=np.zeros(size, np.int32),
            positions=np.full(size, keys - 1),
            slot_mapping=np.full(size, PADDING_SLOT),
            query_start_loc=np.arange(size + 1, dtype=np.int32),
            seq_lens=np.full(size, keys, np.int32),
            block_table=(np.arange(size * columns) % num_blocks).astype(np.int32).reshape(size, columns),
            sampling=nothing,
            num_sampled=nothing,
            logits_indices=nothing,
            drafts={},
        )


def cuda_recorder(ranks: int) -> Record:
    """What captures functions on the GPU, one after another, into one pool.

    Each is run before, outside of the capture: that compiles its kernels, times their configurations, and sets up
    NCCL, none of which could be done inside. With several ranks, NCCL's own thread goes on asking the driver while
    this one captures, which only the error mode "thread_local" allows.
    """
    pool: Any = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream()

    def record(function: Callable[[], None]) -> Callable[[], None]:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        mode = "global" if ranks == 1 else "thread_local"
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=mode):
            function()
        return graph.replay

    return record


def _reserved(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
