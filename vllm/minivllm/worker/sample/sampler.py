"""From logits to tokens, each row using its own request's sampling parameters.

Order: log probabilities of the raw logits; allowed tokens, bias, bad words, minimum length; penalties; then the most
likely token, or temperature, min-p, top-k, top-p and a random draw (`gumbel.py`). A batch of plain greedy requests
skips all of this: it is one argmax.

In vLLM v0.33.0: `vllm/v1/sample/sampler.py` (`Sampler`), `vllm/v1/worker/gpu/sample/sampler.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntFlag

import numpy as np
import torch

from minivllm.core.messages import TokenLogprobs
from minivllm.sampling_params import SamplingParams
from minivllm.worker.sample.gumbel import gumbel_max, row_keys
from minivllm.worker.sample.logit_bias import apply_logit_bias
from minivllm.worker.sample.logprobs import token_logprobs
from minivllm.worker.sample.penalties import apply_penalties, has_penalties
from minivllm.worker.sample.top_k_top_p import mask_below_min_p, mask_beyond_top_k_top_p


class Needs(IntFlag):
    """The features that the rows of a batch use; a feature that no row uses is not computed."""

    RANDOM = 1
    MIN_P = 2
    TOP_K_TOP_P = 4
    BIAS = 8
    PENALTIES = 16
    LOGPROBS = 32

    @classmethod
    def of(cls, params: SamplingParams) -> "Needs":
        """The features that one request uses."""
        needs = cls(0)
        if not params.is_greedy:
            needs |= cls.RANDOM
            needs |= cls.MIN_P if params.min_p > 0.0 else cls(0)
            needs |= cls.TOP_K_TOP_P if params.top_k > 0 or params.top_p < 1.0 else cls(0)
        if params.logit_bias or params.allowed_token_ids or params.bad_words_token_ids or params.min_tokens:
            needs |= cls.BIAS
        if has_penalties(params):
            needs |= cls.PENALTIES
        if params.logprobs is not None:
            needs |= cls.LOGPROBS
        return needs


@dataclass(slots=True)
class SamplingMetadata:
    """Sampling parameters of one step's rows. Arrays and lists are [rows].

    `prompt_token_ids` and `output_token_ids` hold one array per row. The lists are empty if `needs` does not use them.
    """

    needs: Needs
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    seeds: np.ndarray
    num_output_tokens: np.ndarray
    params: Sequence[SamplingParams] = ()
    prompt_token_ids: Sequence[np.ndarray] = ()
    output_token_ids: Sequence[np.ndarray] = ()


_NONE = np.empty(0)
NOTHING_NEEDED = SamplingMetadata(Needs(0), _NONE, _NONE, _NONE, _NONE, _NONE, _NONE)
"""For rows that only take the argmax: no parameter is read, so none is gathered."""


@dataclass(slots=True)
class SamplerOutput:
    """One token per row; `logprobs` is empty, or has None for the rows that did not request it.

    `largest` [rows] is the model's largest logit of each row. It is NaN if any is, so it tells which rows are usable.
    """

    token_ids: list[int]
    largest: np.ndarray
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)


def sample(logits: torch.Tensor, metadata: SamplingMetadata) -> SamplerOutput:
    """Chooses a token for each row of logits [rows, vocab], float32. Overwrites the logits."""
    needs = metadata.needs
    token_ids, largest = argmax(logits)
    if not needs:
        return SamplerOutput(token_ids.tolist(), largest)
    wanted = [row for row, params in enumerate(metadata.params) if params.logprobs is not None]
    raw_logprobs = logits[wanted].log_softmax(dim=-1) if wanted else None
    if needs & Needs.BIAS:
        apply_logit_bias(logits, metadata.params, metadata.output_token_ids)
    if needs & Needs.PENALTIES:
        apply_penalties(logits, metadata.params, metadata.prompt_token_ids, metadata.output_token_ids)
    if needs & (Needs.BIAS | Needs.PENALTIES):
        token_ids, _ = argmax(logits)
    if needs & Needs.RANDOM:
        _sample_random(token_ids, logits, metadata)
    output = SamplerOutput(token_ids.tolist(), largest)
    if raw_logprobs is not None:
        output.logprobs = [None] * len(output.token_ids)
        numbers = [metadata.params[row].logprobs or 0 for row in wanted]
        chosen = [output.token_ids[row] for row in wanted]
        for row, entry in zip(wanted, token_logprobs(raw_logprobs, chosen, numbers), strict=True):
            output.logprobs[row] = entry
    return output


def argmax(logits: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The most likely token of each row, the first in a tie, and its logit. On a CPU numpy is ten times as fast."""
    if logits.device.type == "cpu":
        numbers = logits.numpy()
        best = numbers.argmax(-1)
        return best, numbers[np.arange(len(best)), best]
    best = logits.argmax(dim=-1, keepdim=True)
    return best.squeeze(-1).cpu().numpy(), logits.gather(-1, best).squeeze(-1).cpu().numpy()


def _sample_random(token_ids: np.ndarray, logits: torch.Tensor, metadata: SamplingMetadata) -> None:
    """Draws anew for the rows of `token_ids` with a temperature above 0."""
    random_rows = np.flatnonzero(metadata.temperature > 0.0)
    if len(random_rows) < len(logits):
        logits = logits[torch.from_numpy(random_rows).to(logits.device)]
    logits.div_(_column(metadata.temperature[random_rows], logits))
    if metadata.needs & Needs.MIN_P:
        mask_below_min_p(logits, _column(metadata.min_p[random_rows], logits).squeeze(-1))
    if metadata.needs & Needs.TOP_K_TOP_P:
        top_k = torch.from_numpy(metadata.top_k[random_rows]).to(logits.device)
        mask_beyond_top_k_top_p(logits, top_k, _column(metadata.top_p[random_rows], logits).squeeze(-1))
    keys = row_keys(metadata.seeds[random_rows], metadata.num_output_tokens[random_rows])
    token_ids[random_rows] = gumbel_max(logits, keys).cpu().numpy()


def _column(values: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values).to(logits.device).unsqueeze(-1)
