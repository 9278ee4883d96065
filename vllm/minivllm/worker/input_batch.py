"""The persistent batch: the worker's state of each running request, kept across steps as one row in
each of several arrays.

The scheduler sends only changes: new requests in full, and for known ones their new block ids and
the number of computed tokens. A step then gathers its inputs from the rows without a loop over
requests.

In vLLM v0.33.0: `vllm/v1/worker/gpu/states.py` (`RequestState`),
`vllm/v1/worker/gpu/block_table.py` (`BlockTables`), `vllm/v1/worker/gpu/input_batch.py`
(`InputBatch`). There the arrays live on the device and are updated by staged writes; here they live
on the host, and each step copies the gathered inputs to the device.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from operator import attrgetter

import numpy as np
import torch

from minivllm.core.lora_request import LoRARequest
from minivllm.core.scheduler_output import NewRequestData, SchedulerOutput
from minivllm.platforms.device_memory import refuse_beyond_memory
from minivllm.worker.sample.states import SamplingStates

# Approximate 4-byte words per row in addition to the tables, including the row of `SamplingStates`.
NUMBERS_OF_ROW = 32


@dataclass(slots=True)
class TokenSpans:
    """The inputs of a forward pass over consecutive tokens of several requests, flattened.

    - `rows` [requests]: the requests' rows in the batch.
    - `input_ids`, `positions`, `slot_mapping` [tokens]: each token's id, its position in its
      request, and the slot for its key and value, `block_table[position // block_size] * block_size
      + position % block_size`.
    - `query_start_loc` [requests + 1]: where each request's tokens start in the flat batch.
      `seq_lens` [requests]: the length of each request up to and including these tokens.
    - `block_table` [requests, blocks]: as many columns as the longest request needs; shorter rows
      are padded with zero (the null block).
    """

    rows: np.ndarray
    input_ids: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    block_table: np.ndarray


@dataclass(slots=True)
class StepInputs(TokenSpans):
    """The flattened inputs of one step: the tokens of all its requests, one request after another.

    - `req_ids` [requests]: in scheduling order.
    - `sampling` [n]: indices of the requests that reach their last known token and therefore
      sample. `num_sampled` [n]: 1 plus the number of drafts, since a token is sampled after each
      draft too.
    - `logits_indices` [sum of num_sampled]: indices, in the flat batch, of the tokens whose logits
      are sampled from.
    - `drafts`: draft tokens to verify, by request id; they are the last tokens of these requests.
    """

    req_ids: list[str]
    sampling: np.ndarray
    num_sampled: np.ndarray
    logits_indices: np.ndarray
    drafts: dict[str, list[int]]


_fields_of_spans = attrgetter(*(field.name for field in fields(TokenSpans)))


class InputBatch:
    """The state of the running requests, one row each. Rows do not move; a freed row is reused for
    a later request.
    """

    def __init__(self, max_num_reqs: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        max_num_blocks = -(-max_model_len // block_size)
        self.token_ids = np.zeros((max_num_reqs, max_model_len), np.int32)
        self.block_table = np.zeros((max_num_reqs, max_num_blocks), np.int32)
        self.num_blocks = np.zeros(max_num_reqs, np.int32)
        self.num_tokens = np.zeros(max_num_reqs, np.int32)
        self.num_prompt_tokens = np.zeros(max_num_reqs, np.int32)
        self.num_computed_tokens = np.zeros(max_num_reqs, np.int32)
        # By row: the number of its request, among all that were added.
        self.admissions = np.zeros(max_num_reqs, np.int64)
        self._next_admission = 1
        self.sampling = SamplingStates(max_num_reqs)
        self.lora_requests: dict[int, LoRARequest] = {}  # by row, of those that have one
        self.row_of: dict[str, int] = {}
        self.req_ids = [""] * max_num_reqs  # by row; one that is free keeps its last
        self._free_rows = list(range(max_num_reqs - 1, -1, -1))

    def update(self, output: SchedulerOutput) -> None:
        """Apply the changes since the last step: finished and preempted requests, new requests, and
        new blocks.
        """
        for req_id in (*output.finished_req_ids, *output.preempted_req_ids):
            self._remove_request(req_id)
        for request in output.scheduled_new_reqs:
            self._add_request(request)
        cached = output.scheduled_cached_reqs
        if cached.req_ids:
            rows = self.rows_of(cached.req_ids)
            # Only a stage that has not sampled these tokens itself gets them.
            for row, start, token_ids in zip(rows, cached.num_computed_tokens, cached.new_token_ids, strict=False):
                self._take_token_ids(row, start, token_ids)
            # A scheduler that is ahead does not know yet which drafts were rejected. The last token
            # is never computed.
            self.num_computed_tokens[rows] = np.minimum(cached.num_computed_tokens, self.num_tokens[rows] - 1)
            for row, block_ids in zip(rows, cached.new_block_ids, strict=True):
                if block_ids:
                    self._append_block_ids(row, block_ids)

    def forget_computed(self, num_scheduled_tokens: dict[str, int]) -> dict[str, int]:
        """Reset these requests so that they recompute from their first token; return how many
        tokens each has to compute.

        Without a KV cache, this happens in every step.
        """
        rows = {req_id: self.row_of[req_id] for req_id in num_scheduled_tokens}
        counts = {req_id: int(self.num_computed_tokens[row]) for req_id, row in rows.items()}
        self.num_computed_tokens[list(rows.values())] = 0
        return {req_id: count + num_scheduled_tokens[req_id] for req_id, count in counts.items()}

    def prepare(self, num_scheduled_tokens: dict[str, int], drafts: dict[str, list[int]]) -> StepInputs:
        """Gather the inputs of a step; a request's `num_scheduled_tokens` includes its drafts."""
        for req_id, token_ids in drafts.items():
            row = self.row_of[req_id]
            # Behind the known tokens, where sampled ones will overwrite them.
            self.token_ids[row, self.num_tokens[row] : self.num_tokens[row] + len(token_ids)] = token_ids
        req_ids = list(num_scheduled_tokens)
        rows = self.rows_of(req_ids)  # [requests]
        counts = np.fromiter(num_scheduled_tokens.values(), np.int32, len(req_ids))  # [requests]
        spans = self.spans(rows, self.num_computed_tokens[rows], counts)

        # A chunk of a prompt that stops before its end samples nothing.
        sampling = np.flatnonzero(spans.seq_lens >= self.num_tokens[rows])  # [n], indices into req_ids
        num_sampled = np.ones(len(sampling), np.int64)  # [n]
        if drafts:
            num_sampled += [len(drafts.get(req_ids[index], ())) for index in sampling]
        ends = spans.query_start_loc[1:][sampling]  # [n], one past the last token of each
        return StepInputs(
            *_fields_of_spans(spans),
            req_ids=req_ids,
            sampling=sampling,
            num_sampled=num_sampled,
            # [sum of num_sampled]
            logits_indices=consecutive(ends - num_sampled, num_sampled) if drafts else ends - num_sampled,
            drafts=drafts,
        )

    def spans(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> TokenSpans:
        """Flatten `counts` tokens of each row in `rows`, beginning at position `starts`; all three
        are [requests], int32 or int64.

        The tokens' blocks must be in the block tables; their ids need not be known yet.
        """
        seq_lens = (starts + counts).astype(np.int32)  # [requests]
        query_start_loc = np.zeros(len(rows) + 1, np.int32)  # [requests + 1]
        np.cumsum(counts, out=query_start_loc[1:])
        token_rows, positions = flattened(rows, starts, counts)  # [tokens] each
        blocks, offsets = np.divmod(positions, self.block_size)  # [tokens] each
        max_num_blocks = -(-int(seq_lens.max()) // self.block_size)
        return TokenSpans(
            rows=rows,
            input_ids=self.token_ids[token_rows, positions],
            positions=positions,
            slot_mapping=np.multiply(self.block_table[token_rows, blocks], self.block_size, dtype=np.int64) + offsets,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_table=self.block_table[rows, :max_num_blocks],
        )

    def rows_of(self, req_ids: Collection[str]) -> np.ndarray:
        """Return the rows of these requests [len(req_ids)], int64."""
        return np.fromiter(map(self.row_of.__getitem__, req_ids), np.int64, len(req_ids))

    def append_tokens(self, rows: np.ndarray, token_ids: Sequence[Sequence[int]]) -> None:
        """Append sampled tokens, one list for each row in `rows` [n], overwriting any drafts stored
        there.
        """
        counts = np.fromiter(map(len, token_ids), np.int64, len(rows))  # [n]
        lengths = self.num_tokens[rows]  # [n]
        self.token_ids[flattened(rows, lengths, counts)] = list(chain.from_iterable(token_ids))
        self.num_tokens[rows] = lengths + counts

    def _add_request(self, request: NewRequestData) -> None:
        row = self._free_rows.pop()
        self.row_of[request.req_id] = row
        self.req_ids[row] = request.req_id
        self.admissions[row] = self._next_admission
        self._next_admission += 1
        num_tokens = len(request.prefill_token_ids)
        self.token_ids[row, :num_tokens] = request.prefill_token_ids
        self.num_tokens[row] = num_tokens
        self.num_prompt_tokens[row] = len(request.prompt_token_ids)
        self.num_computed_tokens[row] = request.num_computed_tokens
        self.num_blocks[row] = 0  # the row's last request had its own
        self._append_block_ids(row, request.block_ids)
        self.sampling.add_request(row, request.sampling_params)
        if request.lora_request is not None:
            self.lora_requests[row] = request.lora_request

    def _take_token_ids(self, row: int, start: int, token_ids: list[int]) -> None:
        """Store tokens that the last stage sampled, beginning at position `start`; the sampling
        rank already has them.
        """
        end = start + len(token_ids)
        self.token_ids[row, start:end] = token_ids
        self.num_tokens[row] = max(self.num_tokens[row], end)  # the sampling rank has counted them already

    def _append_block_ids(self, row: int, block_ids: list[int]) -> None:
        start = self.num_blocks[row]
        self.block_table[row, start : start + len(block_ids)] = block_ids
        self.num_blocks[row] = start + len(block_ids)

    def _remove_request(self, req_id: str) -> None:
        row = self.row_of.pop(req_id, None)
        if row is not None:
            # The row's next request may have fewer blocks, and its table must be padded with the
            # null block.
            self.block_table[row, : self.num_blocks[row]] = 0
            self.lora_requests.pop(row, None)
            self._free_rows.append(row)


def check_batch_memory(max_num_reqs: int, max_model_len: int, block_size: int) -> None:
    """Refuse a batch whose tables exceed host memory: 4 bytes per token and per block, plus a few
    words per row.

    Raises:
        MinivllmError: the tables exceed host memory.
    """
    refuse_beyond_memory(
        max_num_reqs * (max_model_len + -(-max_model_len // block_size) + NUMBERS_OF_ROW) * 4,
        torch.device("cpu"),
        f"the batch of max_num_seqs = {max_num_reqs} requests of {max_model_len} tokens",
        "lower max_num_seqs",
    )


def flattened(rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the row and the position of each of `counts[i]` tokens of `rows[i]`, starting at
    position `starts[i]`: [sum of counts] each, int64.
    """
    if (counts == 1).all():  # a step of decodes; all the rest would take three times as long
        return rows, starts.astype(np.int64)
    return np.repeat(rows, counts), consecutive(starts, counts)


def consecutive(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Concatenate the ranges `starts[i]`, ..., `starts[i] + counts[i] - 1` over all i: [sum of
    counts], int64.
    """
    ends = np.cumsum(counts, dtype=np.int64)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - ends + counts, counts)
