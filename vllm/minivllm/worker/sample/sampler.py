"""The sampler: it turns each row of logits into a token, by the sampling parameters of the row's
own request.

Order: log probabilities of the raw logits; allowed tokens, bias, bad words, minimum length;
penalties; then the most likely token, or temperature, min-p, top-k, top-p and a random draw
(`gumbel.py`). A batch of plain greedy requests skips all of this: it is one argmax.

In vLLM v0.33.0: `vllm/v1/sample/sampler.py` (`Sampler`), `vllm/v1/worker/gpu/sample/sampler.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntFlag

import numpy as np
import torch

from minivllm.core.engine_messages import TokenLogprobs
from minivllm.platforms.device import on_device
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
        """Return the features that one request uses."""
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


# The features that `choose` handles: the host needs neither earlier tokens nor the logits for them.
ON_DEVICE = Needs.RANDOM | Needs.MIN_P | Needs.TOP_K_TOP_P


# A row's parameters; aligned, so that each field is a tensor's column.
FLOATS = [(name, np.float32) for name in ("temperature", "top_p", "min_p")]
VALUES = np.dtype([("seed", np.uint64), ("top_k", np.int64), *FLOATS], align=True)


@dataclass(slots=True)
class SamplingMetadata:
    """Sampling parameters of one step's rows. Arrays and lists are [rows].

    `values` has a field for each number that `choose` reads, with the dtype `VALUES`.
    `prompt_token_ids` and `output_token_ids` hold one array per row. The lists are empty if `needs`
    does not use them.
    """

    needs: Needs
    values: np.ndarray
    num_output_tokens: np.ndarray
    params: Sequence[SamplingParams] = ()
    prompt_token_ids: Sequence[np.ndarray] = ()
    output_token_ids: Sequence[np.ndarray] = ()


# Rows that only take the argmax read no parameter, so none is gathered.
NOTHING_NEEDED = SamplingMetadata(Needs(0), np.empty(0, VALUES), np.empty(0))


@dataclass(slots=True)
class SamplerOutput:
    """The sampled tokens, one per row; `logprobs` is empty, or has None for rows that did not
    request any.

    `largest` [rows] is each row's largest logit, as the model computed it. It is NaN if any logit
    of the row is, so it shows which rows are usable. In a step with drafts, the rows after the last
    token that a request keeps have token -1 and no log probability.
    """

    token_ids: list[int]
    largest: np.ndarray
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)


def sample(logits: torch.Tensor, metadata: SamplingMetadata) -> SamplerOutput:
    """Choose a token for each row of logits [rows, vocab], float32, overwriting the logits."""
    raw_logprobs = raw_logprobs_of(logits, metadata)
    token_ids, largest = argmax(logits)
    if not metadata.needs:  # asking for each feature would take as long as the argmax
        return SamplerOutput(token_ids.tolist(), largest.cpu().numpy())
    if metadata.needs & (Needs.BIAS | Needs.PENALTIES):
        apply_constraints(logits, metadata)
        token_ids, _ = argmax(logits)  # of what the constraints have left
    token_ids = _with_draws(token_ids, logits, metadata)
    output = SamplerOutput(token_ids.tolist(), largest.cpu().numpy())
    add_logprobs(output, raw_logprobs, metadata)
    return output


def choose(logits: torch.Tensor, metadata: SamplingMetadata) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample rows that need only features in `ON_DEVICE`; return tokens, int64 [rows], and the
    largest logits [rows].

    Both stay on the logits' device, and the host does not wait for them. The logits are
    overwritten.
    """
    token_ids, largest = argmax(logits)
    return _with_draws(token_ids, logits, metadata), largest


def _with_draws(token_ids: torch.Tensor, logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
    """Replace the tokens of the rows that are not greedy by drawn ones."""
    if not metadata.needs & Needs.RANDOM:
        return token_ids
    random_rows = np.flatnonzero(metadata.values["temperature"] > 0.0)
    keys = row_keys(metadata.values["seed"][random_rows], metadata.num_output_tokens[random_rows])
    drawn = gumbel_max(tempered(logits, random_rows, metadata), keys)
    return token_ids.index_copy(0, on_device(random_rows, logits.device), drawn)


def raw_logprobs_of(logits: torch.Tensor, metadata: SamplingMetadata) -> dict[int, torch.Tensor]:
    """Return, by row, the log probabilities [vocab] of the unchanged logits, for the rows that
    request any.
    """
    rows = [row for row, params in enumerate(metadata.params) if params.logprobs is not None]
    return dict(zip(rows, logits[rows].log_softmax(dim=-1), strict=True)) if rows else {}


def add_logprobs(output: SamplerOutput, raw: dict[int, torch.Tensor], metadata: SamplingMetadata) -> None:
    """Add the log probabilities of the chosen tokens, and of as many others as each row requests."""
    if not raw:
        return
    output.logprobs = [None] * len(output.token_ids)
    # In a step with drafts, rows behind the last token have none.
    rows = [row for row in raw if output.token_ids[row] >= 0]
    numbers = [metadata.params[row].logprobs or 0 for row in rows]
    chosen = [output.token_ids[row] for row in rows]
    entries = token_logprobs(torch.stack([raw[row] for row in rows]), chosen, numbers) if rows else []
    for row, entry in zip(rows, entries, strict=True):
        output.logprobs[row] = entry


def apply_constraints(logits: torch.Tensor, metadata: SamplingMetadata) -> None:
    """Apply bias, forbidden tokens and penalties, in place, to the rows that have any."""
    if metadata.needs & Needs.BIAS:
        apply_logit_bias(logits, metadata.params, metadata.output_token_ids)
    if metadata.needs & Needs.PENALTIES:
        apply_penalties(logits, metadata.params, metadata.prompt_token_ids, metadata.output_token_ids)


def argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the most likely token of each row, the first in a tie, and its logit, both on the
    logits' device.
    """
    if logits.device.type == "cpu":
        scores = logits.numpy()
        likeliest = scores.argmax(-1)  # ten times as fast as torch's
        return torch.from_numpy(likeliest), torch.from_numpy(scores[np.arange(len(scores)), likeliest])
    best = logits.argmax(dim=-1)
    return best, logits.gather(-1, best.unsqueeze(-1)).squeeze(-1)


def tempered(logits: torch.Tensor, random_rows: np.ndarray, metadata: SamplingMetadata) -> torch.Tensor:
    """Return these rows' logits divided by their temperature, with -inf where min-p, top-k or top-p
    excludes a token.

    The logits are changed in place if `random_rows` covers all rows; otherwise the result is a
    copy.
    """
    if len(random_rows) < len(logits):  # greedy rows keep their logits
        logits = logits[on_device(random_rows, logits.device)]
    # Temperature comes first: min-p and top-p are about the tempered distribution.
    # Indexed by rows last, so that each column is contiguous and reaches a GPU without a wait.
    values = metadata.values
    logits.div_(_column(values["temperature"][random_rows], logits))
    if metadata.needs & Needs.MIN_P:
        mask_below_min_p(logits, _column(values["min_p"][random_rows], logits).squeeze(-1))
    if metadata.needs & Needs.TOP_K_TOP_P:
        top_k = on_device(values["top_k"][random_rows], logits.device)
        mask_beyond_top_k_top_p(logits, top_k, _column(values["top_p"][random_rows], logits).squeeze(-1))
    return logits


def _column(values: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
    return on_device(values, logits.device).unsqueeze(-1)
