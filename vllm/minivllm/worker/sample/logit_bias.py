"""Per-request constraints on single tokens: allowed token ids, logit bias, bad words, minimum
length. All are applied in place.

In vLLM v0.33.0: `vllm/v1/sample/logits_processor/builtin.py` (`LogitBiasLogitsProcessor`,
`MinTokensLogitsProcessor`), `vllm/v1/sample/ops/bad_words.py`.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from minivllm.sampling_params import SamplingParams


def apply_logit_bias(
    logits: torch.Tensor, params: Sequence[SamplingParams], output_token_ids: Sequence[np.ndarray]
) -> None:
    """Apply allowed token ids, logit bias, bad words and the minimum number of tokens to the rows
    that set them.

    logits [rows, vocab]; `output_token_ids` holds each row's tokens so far, without the prompt.
    """
    for row, (each, output) in enumerate(zip(params, output_token_ids, strict=True)):
        if each.allowed_token_ids is not None:
            _allow_only(logits[row], each.allowed_token_ids)
        if each.logit_bias:
            ids = _ids(each.logit_bias, logits)
            logits[row, ids] += torch.tensor(list(each.logit_bias.values()), device=logits.device)
        impossible = _completing_bad_words(each.bad_words_token_ids, output)
        if len(output) < each.min_tokens:
            impossible += each.all_stop_token_ids
        if impossible:
            logits[row, _ids(impossible, logits)] = -torch.inf


def _allow_only(logits: torch.Tensor, token_ids: Iterable[int]) -> None:
    ids = _ids(token_ids, logits)
    allowed = logits[ids]  # kept, while all others become impossible
    logits.fill_(-torch.inf)
    logits[ids] = allowed


def _completing_bad_words(bad_words: Sequence[Sequence[int]], output: np.ndarray) -> list[int]:
    """Return the tokens that would complete a bad word: its last token, if the output ends with
    all the others.
    """
    tail = output.tolist()  # a bad word may begin in the output, not in the prompt
    return [word[-1] for word in bad_words if len(word) == 1 or tail[-(len(word) - 1) :] == list(word[:-1])]


def _ids(token_ids: Iterable[int], logits: torch.Tensor) -> torch.Tensor:
    return torch.tensor(list(token_ids), dtype=torch.int64, device=logits.device)
