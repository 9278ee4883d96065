"""Decode steps as CUDA graphs: everything from the token ids to the hidden states in a single
launch.

For a small batch of decodes, launching the kernels one by one takes the host longer than running
them takes the GPU. A graph is captured once per batch size and then replayed with a single launch.
A captured graph cannot change: it reads and writes the addresses it was captured with
(`step_buffers.py`) and launches the same grids. So a batch is padded to the next captured size, and
choices that the host would otherwise make per step are fixed at capture: the number of splits of
the keys in attention, which depends on `max_seq_len`, is that of the longest possible request.
Prefills (chunked or not) and batches larger than the largest graph run eagerly.

Steps that verify drafts have graphs of their own, in which each request has room for all of its
drafts and one more token. Requests with fewer drafts, or none, leave padding at the end:
attention's grid holds whatever the lengths are.

On a CPU, the same classes hold recordings of small steps, up to their logits
(`kernels/cpu/replay.py`).

All graphs share one memory pool, since only one runs at a time. The largest is captured first, and
the others fit into the memory it took. The result is copied to a buffer outside the pool, so that
the next graph does not overwrite it.

In vLLM v0.33.0: `vllm/v1/worker/gpu/cudagraph_utils.py` (`CudaGraphManager`), `vllm/config/vllm.py`
(`_set_cudagraph_sizes`): its mode FULL_DECODE_ONLY.
"""

import bisect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from minivllm.lora.worker_manager import LoRAManager
from minivllm.models.decoder import Decoder
from minivllm.models.forward_context import ForwardContext
from minivllm.worker.input_batch import StepInputs
from minivllm.worker.latent_attention import PagedLatentAttention
from minivllm.worker.paged_attention import PagedAttention
from minivllm.worker.settings import WorkerSettings
from minivllm.worker.step_buffers import PADDING_SLOT, StepBuffers

MOST_ROWS = 512
# On a CPU: a larger step computes for so long that its launches do not count.
MOST_ROWS_ON_CPU = 8
# Context length of each request in the step that tunes the kernels' configurations before capture.
# Short, as most contexts of large batches are: tuned at 2,048 keys, attention took 143 µs a layer
# in steps of 256 requests with 290 keys each, where the fastest configuration takes 78 (H200).
TUNING_KEYS = 512

Record = Callable[[Callable[[], None]], Callable[[], None]]


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Return 1, 2, 4, then multiples of 8, from 256 on of 16, up to min(2 × max_num_seqs, 512).

    Sizes beyond the first that holds `max_num_seqs` rows are left out, as no decode batch would use
    them.
    """
    limit = min(2 * max_num_seqs, MOST_ROWS)
    ladder = [size for size in (1, 2, 4, *range(8, 256, 8), *range(256, MOST_ROWS + 1, 16)) if size <= limit]
    return ladder[: bisect.bisect_left(ladder, max_num_seqs) + 1]


def padded_size(num_rows: int, sizes: Sequence[int]) -> int | None:
    """Return the smallest of the ascending `sizes` that holds `num_rows`, or None if none does."""
    index = bisect.bisect_left(sizes, num_rows)
    return sizes[index] if index < len(sizes) else None


class CudaGraphs:
    """The graphs of one model and its cache. `replays` counts replays."""

    def __init__(
        self,
        model: Decoder,
        attention: PagedAttention | PagedLatentAttention,
        settings: WorkerSettings,
        lora: LoRAManager,
        sizes: Sequence[int],
        tokens_each: int = 1,
    ) -> None:
        """Prepare for batches of these `sizes`, in requests of at most `tokens_each` tokens.

        With adapters there are two graphs of each size, of which one has no launches for them.
        """
        weight = model.embed_tokens.weight
        self.model = model
        self.attention = attention
        self.sizes = sorted(sizes)
        self.max_model_len = settings.max_model_len
        self.block_size = settings.block_size
        self.tokens_each = tokens_each
        most_tokens = self.sizes[-1] * tokens_each
        max_num_blocks = -(-self.max_model_len // self.block_size)
        self.buffers = StepBuffers(self.sizes[-1], max_num_blocks, weight.device, tokens_each)
        # Outside the graphs' pool, which the next graph overwrites.
        self.hidden = torch.zeros(most_tokens, model.config.hidden_size, dtype=weight.dtype, device=weight.device)
        # Few requests' logits belong to a CPU's recordings: each list of programs wakes the threads once.
        self.logits = torch.zeros(most_tokens, model.config.vocab_size) if weight.is_cpu else None
        self.replays = 0
        self._replay: dict[tuple[int, bool], Callable[[], None]] = {}
        self.lora = lora.for_graphs(most_tokens)

    @torch.inference_mode()
    def capture(self, record: Record) -> None:
        """Capture a graph for each size, the largest first, using `record`, such as a
        `cuda_recorder`.
        """
        for size in reversed(self.sizes):
            self.buffers.load(self._tuning_step(size))
            tokens = size * self.tokens_each
            if self.lora is not None:
                self.lora.load(np.full(tokens, -1, np.int32), tokens)  # no adapters, but room for them
            self._replay[size, False] = record(self._step(size))
            if self.lora is not None:
                self._replay[size, True] = record(self.lora.around(self._step(size), tokens))

    def size_for(self, inputs: StepInputs) -> int | None:
        """Return the size of the graph that can run this step, or None if no graph can."""
        num_requests = len(inputs.query_start_loc) - 1
        # With as many tokens as requests, each has one.
        most = 1 if len(inputs.input_ids) == num_requests else np.diff(inputs.query_start_loc).max()
        return padded_size(num_requests, self.sizes) if most <= self.tokens_each else None

    def replay(
        self,
        inputs: StepInputs,
        lora_slots: np.ndarray | None = None,
        fill: Callable[[torch.Tensor, StepInputs], None] | None = None,
    ) -> torch.Tensor:
        """Return the hidden states of all tokens in a step that `size_for` has a size for, [tokens,
        hidden]; valid until the next replay.

        `lora_slots`: the slot of each token's adapter [tokens], -1 for none; None: no token has
        one. `fill` puts those of `input_ids` in place that the host does not know.
        """
        size = self.size_for(inputs)
        assert size is not None
        self.buffers.load(inputs)
        if fill is not None:
            fill(self.buffers.input_ids, inputs)
        if lora_slots is not None and self.lora is not None:
            self.lora.load(lora_slots, size * self.tokens_each)
        self._replay[size, lora_slots is not None]()
        self.replays += 1
        return self.hidden[: len(inputs.input_ids)]

    def _step(self, size: int) -> Callable[[], None]:
        """Return a step of `size` requests on the buffers."""
        buffers = self.buffers
        tokens = size * self.tokens_each
        # The longest possible request decides the number of splits, once and for all steps.
        context = ForwardContext(self.attention.of_step(buffers.metadata(size, self.max_model_len)))

        def step() -> None:
            hidden = self.model(buffers.input_ids[:tokens], buffers.positions[:tokens], context)
            if self.logits is not None:
                self.logits[:tokens].copy_(self.model.compute_logits(hidden))
            self.hidden[:tokens].copy_(hidden)

        return step

    def _tuning_step(self, size: int) -> StepInputs:
        """Return a step of requests with long contexts, which read blocks all over the cache and
        write none.
        """
        keys = min(self.max_model_len, TUNING_KEYS)
        each = self.tokens_each
        columns = -(-keys // self.block_size)
        num_blocks = len(self.attention.kv_caches[0][0])
        nothing = np.zeros(0, np.int64)
        return StepInputs(
            req_ids=[""] * size,
            rows=nothing,
            input_ids=np.zeros(size * each, np.int32),
            positions=np.tile(np.arange(keys - each, keys), size),
            slot_mapping=np.full(size * each, PADDING_SLOT),
            query_start_loc=np.arange(0, size * each + 1, each, dtype=np.int32),
            seq_lens=np.full(size, keys, np.int32),
            block_table=(np.arange(size * columns) % num_blocks).astype(np.int32).reshape(size, columns),
            sampling=nothing,
            num_sampled=nothing,
            logits_indices=nothing,
            drafts={},
        )


class CudaGraphManager:
    """A rank's graphs: of decode steps, and of those that verify drafts. There are none before
    `capture`.
    """

    def __init__(self) -> None:
        self.decode: CudaGraphs | None = None
        self.verification: CudaGraphs | None = None

    def capture(
        self,
        record: Record,
        model: Decoder,
        attention: PagedAttention | PagedLatentAttention,
        settings: WorkerSettings,
        lora: LoRAManager,
        most_rows: int = MOST_ROWS,
    ) -> None:
        """Capture the graphs of steps with at most `most_rows` tokens, using `record`.

        Latents are attended to in a form that depends on their number, so they have graphs of
        decode steps only.
        """

        def captured(tokens_each: int) -> CudaGraphs | None:
            sizes = [size for size in capture_sizes(settings.max_num_seqs) if size * tokens_each <= most_rows]
            if not sizes:
                return None
            graphs = CudaGraphs(model, attention, settings, lora, sizes, tokens_each)
            graphs.capture(record)
            return graphs

        self.decode = captured(1)
        if settings.num_speculative_tokens and model.config.kv_lora_rank is None:
            self.verification = captured(min(1 + settings.num_speculative_tokens, settings.max_model_len))

    def dispatch(self, inputs: StepInputs) -> CudaGraphs | None:
        """Return the graphs that hold this step, the smaller ones if both do."""
        for graphs in (self.decode, self.verification):
            if graphs is not None and graphs.size_for(inputs) is not None:
                return graphs
        return None

    def release_graphs(self) -> None:
        """Forget the graphs: from now on every step runs eagerly."""
        self.decode = self.verification = None


def cuda_recorder(ranks: int) -> Record:
    """Return a function that captures functions as CUDA graphs in one shared memory pool.

    Each function first runs once outside the capture: this compiles its kernels, autotunes their
    configurations and sets up NCCL, none of which is possible during capture. With several ranks,
    NCCL's watchdog thread keeps querying the driver during the capture, which only the error mode
    "thread_local" allows.
    """
    pool: Any = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream()

    # region: record
    def record(function: Callable[[], None]) -> Callable[[], None]:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()  # its replay launches what the function launches now
        mode = "global" if ranks == 1 else "thread_local"
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=mode):
            function()
        return graph.replay

    # endregion

    return record
