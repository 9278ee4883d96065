"""Log probabilities of a prompt's own tokens, gathered chunk by chunk.

In vLLM v0.33.0: `vllm/v1/worker/gpu/sample/prompt_logprob.py` (`PromptLogprobsWorker`).
"""

from collections.abc import Callable

import torch

from minivllm.core.engine_messages import TokenLogprobs
from minivllm.core.scheduler_output import SchedulerOutput
from minivllm.worker.input_batch import InputBatch, StepInputs
from minivllm.worker.sample.logprobs import token_logprobs


class PromptLogprobs:
    """The requests that want prompt log probabilities, with those that have been computed so far.

    A prompt is complete in the step that samples its request's first token.
    """

    def __init__(self) -> None:
        self._so_far: dict[str, list[TokenLogprobs]] = {}

    def __bool__(self) -> bool:
        """Return whether any prompt is in progress."""
        return bool(self._so_far)

    def update(self, output: SchedulerOutput) -> None:
        """Drop requests that finished or were preempted, and register new ones that want them.

        A request that is resumed with outputs is not registered: it got its log probabilities
        before it was preempted.
        """
        for req_id in (*output.finished_req_ids, *output.preempted_req_ids):
            self._so_far.pop(req_id, None)
        for request in output.scheduled_new_reqs:
            asked = request.sampling_params.prompt_logprobs is not None
            if asked and len(request.prefill_token_ids) == len(request.prompt_token_ids):
                self._so_far[request.req_id] = []

    def pass_over(self, inputs: StepInputs) -> None:
        """Drop the prompts that this step completes, without computing anything; called on ranks
        other than 0.
        """
        for index in inputs.sampling:
            self._so_far.pop(inputs.req_ids[index], None)

    def observe(
        self,
        batch: InputBatch,
        inputs: StepInputs,
        hidden: torch.Tensor,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
    ) -> dict[str, list[TokenLogprobs]]:
        """Compute log probabilities from a step's hidden states [tokens, hidden]; return those of
        the prompts that are now complete.
        """
        complete: dict[str, list[TokenLogprobs]] = {}
        for index, req_id in enumerate(inputs.req_ids):
            if req_id not in self._so_far:
                continue
            row, start, end = inputs.rows[index], inputs.query_start_loc[index], inputs.query_start_loc[index + 1]
            # Without a cache, a step begins at 0 again.
            start += len(self._so_far[req_id]) - inputs.positions[start]
            first = inputs.positions[start] + 1  # the token that the first of these hidden states predicts
            # What this chunk's hidden states predict, within the prompt.
            targets = batch.token_ids[row, first : min(first + end - start, batch.num_prompt_tokens[row])].tolist()
            params = batch.sampling.params[row]
            assert params is not None
            logits = compute_logits(hidden[start : start + len(targets)]).float()
            number = params.prompt_logprobs or 0
            self._so_far[req_id] += token_logprobs(logits.log_softmax(-1), targets, [number] * len(targets))
            if index in inputs.sampling:
                complete[req_id] = self._so_far.pop(req_id)
        return complete
