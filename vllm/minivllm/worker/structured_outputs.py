"""Grammars in a step that samples: the rows of its logits that each bitmask applies to.

In vLLM v0.33.0: `vllm/v1/worker/gpu/structured_outputs.py` (`StructuredOutputsWorker`).
"""

import numpy as np
import torch

from minivllm.core.scheduler_output import GrammarOutput
from minivllm.kernels.grammar_bitmask import apply_grammar_bitmask
from minivllm.platforms.device import on_device
from minivllm.worker.input_batch import StepInputs, consecutive


def mask_by_grammars(logits: torch.Tensor, inputs: StepInputs, grammar_output: GrammarOutput | None) -> None:
    """Mask the tokens that a request's grammar rejects, in the rows of the requests that have a
    grammar.

    logits [sum of num_sampled, vocab]; `grammar_output` is None if no request has a grammar.
    """
    if grammar_output is None:
        return
    # Among the requests that sample.
    place_of = {inputs.req_ids[index]: place for place, index in enumerate(inputs.sampling)}
    places = [place_of[req_id] for req_id in grammar_output.structured_output_request_ids]
    starts = np.cumsum(inputs.num_sampled) - inputs.num_sampled  # [n]
    rows = consecutive(starts[places], inputs.num_sampled[places]).astype(np.int32)
    bitmask = on_device(grammar_output.grammar_bitmask, logits.device)
    apply_grammar_bitmask(logits, bitmask, on_device(rows, logits.device))
