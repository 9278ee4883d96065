"""Log probabilities of the chosen and the most likely tokens.

In vLLM v0.33.0: `vllm/v1/sample/sampler.py` (`gather_logprobs`).
"""

from collections.abc import Sequence

import torch

from minivllm.core.engine_messages import TokenLogprobs


def token_logprobs(
    logprobs: torch.Tensor, chosen: Sequence[int], num_most_likely: Sequence[int]
) -> list[TokenLogprobs]:
    """Return each row's chosen and most likely tokens with their log probabilities and ranks.

    `logprobs` is [rows, vocab]; -1 in `num_most_likely` [rows] means all tokens.
    """
    vocab = logprobs.shape[-1]
    numbers = [vocab if number == -1 else min(number, vocab) for number in num_most_likely]
    ids = torch.tensor(chosen, dtype=torch.int64, device=logprobs.device).unsqueeze(-1)
    values = logprobs.gather(-1, ids)
    ranks = (logprobs > values).sum(dim=-1) + 1  # 1 for the most likely token
    # Once for all rows; each takes its own number of them.
    likely = logprobs.topk(max(numbers, default=0), dim=-1)
    rows = zip(
        numbers, chosen, values.squeeze(-1).tolist(), ranks.tolist(), likely.indices.tolist(), likely.values.tolist(),
        strict=True,
    )  # fmt: skip
    return [
        TokenLogprobs([token_id, *most_likely[:number]], [value, *their_values[:number]], [rank, *range(1, number + 1)])
        for number, token_id, value, rank, most_likely, their_values in rows
    ]
