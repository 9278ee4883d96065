"""Tokens that a step has sampled and that are not on the host yet: the next step takes them from
the device.

A host that waits for a step's tokens before it prepares the next step leaves the GPU idle
meanwhile. But the positions, slots and tables of the next step do not depend on what the tokens
are, only on how many there are. So the batch counts each as an unknown token, and the last token of
every row stays on the device, where it is put into the next step's inputs. The host waits for its
copies only when the output is read.

Penalties, drafts and grammars are exceptions: the host computes with the tokens, so it waits for
them before such a step.

In vLLM v0.33.0: `vllm/v1/worker/gpu/async_utils.py` (`AsyncOutput`), `vllm/v1/worker/gpu/states.py`
(`last_sampled_tokens`).
"""

from collections import deque

import numpy as np
import torch

from minivllm.platforms.device import on_device
from minivllm.worker.input_batch import InputBatch, StepInputs


class HostCopy:
    """Copies of a step's tokens and largest logits, [n] each, on their way to the host."""

    def __init__(self, token_ids: torch.Tensor, largest: torch.Tensor) -> None:
        # From a GPU, torch copies to pinned memory, in the background.
        self._here = [tensor.to("cpu", non_blocking=True) for tensor in (token_ids, largest)]
        self._arrived = torch.cuda.Event() if token_ids.is_cuda else None
        if self._arrived is not None:
            self._arrived.record()

    def has_arrived(self) -> bool:
        """Return whether the copies can be read without waiting."""
        return self._arrived is None or self._arrived.query()

    def wait(self) -> tuple[np.ndarray, np.ndarray]:
        """Wait for the copies; return the tokens and the largest logits. Any thread may call
        this.
        """
        if self._arrived is not None:
            self._arrived.synchronize()
        token_ids, largest = self._here
        return token_ids.numpy(), largest.numpy()


class TokensInFlight:
    """The tokens that the steps in flight have sampled for the rows of a batch."""

    def __init__(self, batch: InputBatch, device: torch.device) -> None:
        self._batch = batch
        self._last_token = torch.zeros(len(batch.num_tokens), dtype=torch.int64, device=device)
        self._steps: deque[tuple[np.ndarray, np.ndarray, np.ndarray, HostCopy]] = deque()
        # How many of each row's tokens are unknown: always its last ones.
        self._num_unknown = np.zeros(len(batch.num_tokens), np.int64)
        self._admission = np.zeros(len(batch.num_tokens), np.int64)  # of the request that they belong to

    def append(self, rows: np.ndarray, token_ids: torch.Tensor, largest: torch.Tensor) -> HostCopy:
        """Append a token that the host does not know yet to each of these rows [n]; `token_ids` is
        int64 [n], `largest` [n].
        """
        batch = self._batch
        admissions = batch.admissions[rows]
        places = batch.num_tokens[rows].copy()
        # A row with another request starts counting again.
        self._num_unknown[rows] = np.where(self._admission[rows] == admissions, self._num_unknown[rows], 0) + 1
        self._admission[rows] = admissions
        batch.token_ids[rows, places] = 0  # a placeholder, which `fill` replaces on the device
        batch.num_tokens[rows] += 1
        self._last_token[on_device(rows, self._last_token.device)] = token_ids
        copy = HostCopy(token_ids, largest)
        self._steps.append((rows, admissions, places, copy))
        return copy

    def settle(self, wait: bool = False) -> None:
        """Put the tokens that have arrived into the batch, or all of them with `wait`. Rows that
        now belong to another request are skipped.
        """
        batch = self._batch
        while self._steps and (wait or self._steps[0][-1].has_arrived()):
            rows, admissions, places, copy = self._steps.popleft()
            still = batch.admissions[rows] == admissions  # rows that have the same request
            batch.token_ids[rows[still], places[still]] = copy.wait()[0][still]
            self._num_unknown[rows[still]] -= 1

    def fill(self, input_ids: torch.Tensor, inputs: StepInputs) -> None:
        """Put a step's unknown tokens into `input_ids`, [tokens] or longer, on the device."""
        rows = inputs.rows
        unknown = (self._num_unknown[rows] > 0) & (self._admission[rows] == self._batch.admissions[rows])
        if unknown.any():
            # A row's unknown tokens end with the step's last of it.
            last = inputs.query_start_loc[1:][unknown] - 1
            at, where = on_device(np.stack((last, rows[unknown])), input_ids.device)
            input_ids[at] = self._last_token[where].to(input_ids.dtype)
