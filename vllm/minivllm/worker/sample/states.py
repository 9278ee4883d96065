"""Sampling parameters as arrays with one row per request: a step gathers its rows without a loop
over requests.

In vLLM v0.33.0: `vllm/v1/worker/gpu/sample/states.py` (`SamplingStates`).
"""

import numpy as np

from minivllm.sampling_params import SamplingParams
from minivllm.worker.sample.sampler import VALUES, Needs, SamplingMetadata

WITH_PARAMS = Needs.BIAS | Needs.PENALTIES | Needs.LOGPROBS
WITH_TOKENS = Needs.BIAS | Needs.PENALTIES
MOST = np.iinfo(np.int64).max


class SamplingStates:
    """The sampling parameters of the batch's rows. All arrays are [max_num_reqs]."""

    def __init__(self, max_num_reqs: int) -> None:
        self.params: list[SamplingParams | None] = [None] * max_num_reqs
        self.needs = np.zeros(max_num_reqs, np.int64)
        self.values = np.zeros(max_num_reqs, VALUES)

    def add_request(self, row: int, params: SamplingParams) -> None:
        """Fill a row. A missing seed counts as 0; the engine gives every request a seed."""
        self.params[row] = params
        self.needs[row] = Needs.of(params)
        seed = (params.seed or 0) % 2**64
        top_k = min(params.top_k, MOST)  # Python's integers may be larger
        self.values[row] = (seed, top_k, params.temperature, params.top_p, params.min_p)

    def needs_of(self, rows: np.ndarray) -> Needs:
        """Return the union of the features that these rows use."""
        return Needs(int(np.bitwise_or.reduce(self.needs[rows], initial=0)))

    def metadata(
        self, rows: np.ndarray, token_ids: np.ndarray, num_prompt_tokens: np.ndarray, num_tokens: np.ndarray
    ) -> SamplingMetadata:
        """Gather the sampler's inputs for `rows`, in order; a row with drafts is repeated for each
        sampled position.

        token_ids [max_num_reqs, max_model_len]: prompts, outputs and drafts. `num_prompt_tokens`,
        `num_tokens` [rows]: the length of each row's prompt, and the number of tokens before the
        sampled position.
        """
        needs = self.needs_of(rows)
        metadata = SamplingMetadata(needs, self.values[rows], num_tokens - num_prompt_tokens)
        if needs & WITH_PARAMS:
            metadata.params = [params for row in rows if (params := self.params[row]) is not None]
        if needs & WITH_TOKENS:
            spans = list(zip(rows, num_prompt_tokens, num_tokens, strict=True))
            metadata.prompt_token_ids = [token_ids[row, :start] for row, start, _ in spans]
            metadata.output_token_ids = [token_ids[row, start:end] for row, start, end in spans]
        return metadata
