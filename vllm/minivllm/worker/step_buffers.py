"""A step's inputs at fixed addresses, for CUDA graphs and a CPU's recordings, which always read the
addresses they were captured with.

Tokens and requests beyond the real ones are padding, and harmless: a padding token has slot −1, so
its key and value are not written; a padding request has no queries and no keys (`query_start_loc`
does not advance, `seq_lens` is 0), so attention skips it; and a padding token has id 0 and position
0, which are valid in every table. Their outputs are ignored.

Everything that changes per step is assembled on the host, in pinned memory, and copied
asynchronously in two transfers: the per-row numbers, and as many columns of the block tables as the
longest request needs.

In vLLM v0.33.0: `vllm/v1/worker/gpu/input_batch.py` (`InputBuffers`),
`vllm/v1/worker/gpu/block_table.py`.
"""

import numpy as np
import torch

from minivllm.worker.input_batch import StepInputs
from minivllm.worker.paged_attention import AttentionMetadata

TOKEN = (("positions", torch.int64), ("slot_mapping", torch.int64), ("input_ids", torch.int32))
PADDING_SLOT = -1


class StepBuffers:
    """Buffers for `size` requests of `tokens_each` tokens.

    `input_ids`, `positions` and `metadata(requests)` are views of what the graphs read.
    """

    def __init__(self, size: int, max_num_blocks: int, device: torch.device, tokens_each: int = 1) -> None:
        self.size = size
        self.tokens_each = tokens_each
        pinned = device.type == "cuda"
        layout = [(name, dtype, size * tokens_each) for name, dtype in TOKEN]
        layout += [("seq_lens", torch.int32, size), ("query_start_loc", torch.int32, size + 1)]
        num_bytes = sum(count * dtype.itemsize for _, dtype, count in layout)
        self._rows_here = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        self._table_here = torch.zeros(size * max_num_blocks, dtype=torch.int32, pin_memory=pinned)
        self._rows_there = self._rows_here.to(device)
        self._table_there = self._table_here.to(device)
        self.block_table = torch.zeros(size, max_num_blocks, dtype=torch.int32, device=device)
        self._host: dict[str, np.ndarray] = {}
        views: dict[str, torch.Tensor] = {}
        start = 0
        for name, dtype, count in layout:
            end = start + count * dtype.itemsize
            self._host[name] = self._rows_here[start:end].view(dtype).numpy()
            views[name] = self._rows_there[start:end].view(dtype)  # what the graphs read
            start = end
        self.input_ids, self.positions = views["input_ids"], views["positions"]
        self.slot_mapping, self.seq_lens = views["slot_mapping"], views["seq_lens"]
        self.query_start_loc = views["query_start_loc"]
        self._copied = torch.cuda.Event() if pinned else None

    def metadata(self, requests: int, max_seq_len: int) -> AttentionMetadata:
        """Return the attention metadata of a step with this many requests, as views of the buffers."""
        return AttentionMetadata(
            self.query_start_loc[: requests + 1],
            self.seq_lens[:requests],
            self.block_table[:requests],
            self.slot_mapping[: requests * self.tokens_each],
            max_seq_len,
            max_query_len=self.tokens_each,
        )

    def load(self, inputs: StepInputs) -> None:
        """Load a step of at most `tokens_each` tokens per request, followed by padding."""
        if self._copied is not None:
            # The last copy must have read the host buffers before they are overwritten.
            self._copied.synchronize()
        tokens = len(inputs.input_ids)
        count = len(inputs.seq_lens)
        host = self._host
        for name, padding in (("positions", 0), ("slot_mapping", PADDING_SLOT), ("input_ids", 0), ("seq_lens", 0)):
            real = getattr(inputs, name)
            host[name][: len(real)] = real
            host[name][len(real) :] = padding
        host["query_start_loc"][: count + 1] = inputs.query_start_loc
        host["query_start_loc"][count + 1 :] = tokens  # requests of padding have no queries
        columns = inputs.block_table.shape[1]  # as many as the longest request needs
        if self._copied is None:  # on a CPU, here is there
            self.block_table.numpy()[:count, :columns] = inputs.block_table
            return
        self._rows_there.copy_(self._rows_here, non_blocking=True)
        used = count * columns
        self._table_here.numpy()[:used] = inputs.block_table.reshape(-1)
        self._table_there[:used].copy_(self._table_here[:used], non_blocking=True)
        self.block_table[:count, :columns].copy_(self._table_there[:used].view(count, columns))
        self._copied.record()
