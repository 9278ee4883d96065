"""Tell the prefill engine when a request is refused here while it still holds the keys and values
of the request's prompt.

Otherwise those blocks would be held until their lease ends, and a client that keeps sending
requests that cannot be served, for example with too many tokens, could fill the prefill engine's
cache with them. The prefill engine itself has nothing to refuse: its request is for one token.
"""

from collections.abc import AsyncIterator
from typing import Any

from fastapi import Depends, Request
from fastapi.exceptions import RequestValidationError

from minivllm.engine.async_llm import AsyncLLM
from minivllm.entrypoints.openai.errors import RequestError
from minivllm.errors import MinivllmError


def tell_if_declined(engine: AsyncLLM) -> Any:
    """Return a dependency for the routes that generate. A request refused only for now (503) is not
    declined: it may be sent to another server.
    """

    async def watch(request: Request) -> AsyncIterator[None]:
        try:
            yield
        except (MinivllmError, RequestValidationError) as refusal:
            # A server that is only busy may serve the request later, and needs the blocks then.
            if not isinstance(refusal, RequestError) or refusal.status < 500:
                engine.decline(_transfer_params(await request.json()))
            raise

    return Depends(watch)


def _transfer_params(body: Any) -> Any:
    return body.get("kv_transfer_params") if isinstance(body, dict) else None
