"""Grammars in a step that samples: which rows of its logits a bitmask is for.

In vLLM v0.33.0: `vllm/v1/worker/gpu/structured_outputs.py` (`StructuredOutputsWorker`).
"""

import numpy as np
import torch

from minivllm.core.scheduler_output import GrammarOutput
from minivllm.kernels.grammar_bitmask import apply_grammar_bitmask
from minivllm.platforms.device import on_device
from minivllm.worker.input_batch import StepInputs, consecutive


def mask_by_grammars(logits: torch.Tensor, inputs: StepInputs, grammar_output: GrammarOutput | None) -> None:
    """Mask the tokens that do not fit, in the rows of the requests that have a grammar; None: no
    request has one.

    logits [sum of num_sampled, vocab].
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
