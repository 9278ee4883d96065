"""A step's output, made from its samples: each request's tokens, and whether it can continue."""

import numpy as np

from minivllm.core.scheduler_output import ModelRunnerOutput
from minivllm.worker.input_batch import StepInputs
from minivllm.worker.sample.sampler import SamplerOutput
from minivllm.worker.tokens_in_flight import HostCopy


def kept_of(inputs: StepInputs, sampled: SamplerOutput) -> ModelRunnerOutput:
    """Return an output with the tokens that each request keeps: its accepted drafts and the token
    after the last of them, which are those before its first -1.
    """
    output = ModelRunnerOutput({})
    start = 0
    for index, width in zip(inputs.sampling, inputs.num_sampled.tolist(), strict=True):
        req_id = inputs.req_ids[index]
        token_ids = sampled.token_ids[start : start + width]
        kept = token_ids.index(-1) if -1 in token_ids else width
        output.sampled_token_ids[req_id] = token_ids[:kept]
        # A request's first row tells for all.
        if sampled.logprobs and sampled.logprobs[start] is not None:
            output.logprobs[req_id] = sampled.logprobs[start : start + kept]
        start += width
    return output


def fill_in(copy: HostCopy, inputs: StepInputs, output: ModelRunnerOutput) -> None:
    """Wait until a step's tokens, one for each request that samples, are on the host, and put them
    into its output.
    """
    token_ids, largest = copy.wait()
    req_ids = [inputs.req_ids[index] for index in inputs.sampling]
    output.sampled_token_ids = {req_id: [token] for req_id, token in zip(req_ids, token_ids.tolist(), strict=True)}
    output.nonfinite_req_ids = nonfinite_req_ids(inputs, largest)


def nonfinite_req_ids(inputs: StepInputs, largest: np.ndarray) -> list[str]:
    """Return the ids of the requests without a usable sample: those with a row whose largest logit
    is not finite.

    `largest` is [sum of num_sampled]. A NaN anywhere in the row counts as the largest. A logit of
    minus infinity only excludes its token.
    """
    finite = np.isfinite(largest)
    if finite.all():
        return []
    places = np.unique(np.repeat(inputs.sampling, inputs.num_sampled)[~finite])
    return [inputs.req_ids[place] for place in places]
