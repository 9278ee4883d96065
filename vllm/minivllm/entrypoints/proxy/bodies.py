"""The bodies that the proxy sends to a request's two servers.

The prefill server gets the client's request, limited to one token, and is told to keep the prompt's
keys and values; it answers with `kv_transfer_params` that say where they are. The decode server
gets the client's request and those params.

In vLLM v0.33.0: `tests/v1/kv_connector/nixl_integration/toy_proxy_server.py`
(`send_request_to_service`), `docs/features/nixl_connector_usage.md`.
"""

import json
from collections.abc import Mapping
from typing import Any

from minivllm.entrypoints.openai.errors import RequestError
from minivllm.errors import MinivllmError

Body = dict[str, Any]
UNKNOWN_YET = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
ASK_TO_KEEP = {"do_remote_decode": True, "do_remote_prefill": False, **dict.fromkeys(UNKNOWN_YET)}
NOT_FOR_PREFILL = ("stream_options", "min_tokens", "min_completion_tokens")


def parse(content: bytes) -> Body:
    """Return a client's request. The servers check its fields; only the fields that the proxy sets
    itself are checked here.

    Raises:
        MinivllmError: it is not a JSON object, or has `kv_transfer_params`.
    """
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        raise MinivllmError("the body is not JSON") from None
    if not isinstance(body, dict):
        raise MinivllmError('the body must be a JSON object, such as {"prompt": "def add(a, b):"}')
    if body.get("kv_transfer_params"):
        raise MinivllmError(
            "kv_transfer_params are set by the proxy; leave them out, or send the request to a server itself",
            "kv_transfer_params",
        )
    return body


def prefill_body(body: Mapping[str, Any]) -> Body:
    """Return the body for the prefill server: one token, one completion, no stream."""
    kept = {name: value for name, value in body.items() if name not in NOT_FOR_PREFILL}
    # One token is the least that a request can ask for; it is thrown away.
    kept |= {"stream": False, "max_tokens": 1, "kv_transfer_params": dict(ASK_TO_KEEP)}
    # The newer name of `max_tokens` takes precedence over it. Each of `n` completions would keep
    # the prompt's blocks, and only one of them is ever read.
    return kept | {name: 1 for name in ("max_completion_tokens", "n") if name in kept}


def kept_params(content: bytes) -> Body | None:
    """Return the location of the keys and values from a prefill server's reply; None if it keeps
    none.

    Raises:
        RequestError: the reply is malformed.
    """
    try:
        params = json.loads(content).get("kv_transfer_params")
        return None if params is None else dict(params)
    except (ValueError, TypeError, AttributeError):
        wrong = "the prefill server's answer is not a completion, or its kv_transfer_params not an object"
        raise RequestError(wrong, 502) from None


def has_two_steps(body: Mapping[str, Any]) -> bool:
    """Return whether a prefill server can compute the prompt; else the decode server must.

    Keys and values are kept for only one prompt per request, and log probabilities of the prompt
    need its logits, which are not kept.
    """
    prompt = body.get("prompt")
    # A list of numbers is one prompt.
    if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
        return False
    shows_prompt = body.get("echo") and body.get("logprobs") is not None
    return not shows_prompt and body.get("prompt_logprobs") is None
