"""The conditions that end a request. In vLLM v0.33.0: `vllm/v1/core/sched/utils.py`
(`check_stop`).
"""

from minivllm.core.request import Request, RequestStatus


def check_stop(request: Request, token_id: int, max_model_len: int) -> bool:
    """Return whether `token_id`, just appended, ends the request; if so, set its final status.

    The order matters: EOS, then the request's own stop tokens, then length. Stop tokens and length
    end the request even below `min_tokens`, which the sampler enforces.
    """
    # No `stop_reason`: clients tell EOS from their own stop tokens by it.
    if token_id in request.eos_token_ids:
        request.status = RequestStatus.FINISHED_STOPPED
        return True
    if token_id in request.stop_token_ids:
        request.status = RequestStatus.FINISHED_STOPPED
        request.stop_reason = token_id
        return True
    if request.num_tokens >= max_model_len or request.num_tokens - request.num_prompt_tokens >= request.max_tokens:
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        return True
    return False


def check_grammar(request: Request, token_id: int) -> bool:
    """Advance the request's grammar by one token; return whether that ends the request, and if so,
    set its final status.

    An end-of-sequence token fits only where the grammar may end, and nothing fits after it. So it
    ends the request even with `ignore_eos`.
    """
    assert request.structured_output_request is not None
    grammar = request.structured_output_request.grammar
    if not grammar.accept_token(token_id):
        request.status = RequestStatus.FINISHED_ERROR
        request.error = (
            "no token is left that fits the grammar and the other parameters, or the grammar exceeds its parser's "
            f"limits: {grammar.error}"
        )
        return True
    if grammar.is_terminated():
        request.status = RequestStatus.FINISHED_STOPPED
        return True
    return False
