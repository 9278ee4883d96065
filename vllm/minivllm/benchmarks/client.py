"""One streamed request, and what its client measures.

A client knows when an event came, not when its tokens were made: an event may have several tokens, and lies in buffers
on its way.

In vLLM v0.33.0: `vllm/benchmarks/lib/endpoint_request_func.py`.
"""

import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from minivllm.errors import MinivllmError

ENDPOINTS = {"openai": "/v1/completions", "vllm": "/v1/completions", "openai-chat": "/v1/chat/completions"}
"""The default path of each backend; "vllm" is another name of "openai"."""


@dataclass(frozen=True)
class SampleRequest:
    """A request to send: a text or token ids, their number, and the number of tokens to generate."""

    prompt: str | list[int]
    prompt_len: int
    expected_output_len: int


@dataclass(slots=True)
class RequestFuncOutput:
    """What came of a request. Times in seconds: `start_time` on `time.perf_counter`'s clock, the others since then.

    - `ttft`: to the first event with output. `itl`: between each such event and the next.
    - `latency`: to the last of them. `queue_time`: how long the request waited for its turn before it was sent.
    - `output_tokens`, `prompt_len`: as the server counts them.
    """

    success: bool = False
    error: str = ""
    start_time: float = 0.0
    queue_time: float = 0.0
    ttft: float = 0.0
    itl: list[float] = field(default_factory=list)
    latency: float = 0.0
    prompt_len: int = 0
    output_tokens: int = 0
    generated_text: str = ""


@dataclass(frozen=True)
class Target:
    """A server, and how it is asked.

    - `base_url`: such as http://127.0.0.1:8000. `model`: its name in the API.
    - `backend`: "openai" for completions, "openai-chat" for chat completions. `endpoint`: another path for them.
    - `headers`: of every request. `extra_body`: further fields of every request, such as {"temperature": 0}.
    """

    base_url: str
    model: str
    backend: str = "openai"
    endpoint: str | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.backend not in ENDPOINTS:
            raise MinivllmError(f"unknown backend {self.backend!r}; known are {', '.join(ENDPOINTS)}")
        if not self.base_url.startswith(("http://", "https://")):
            raise MinivllmError(f"the server's address is {self.base_url!r}; it must begin with http:// or https://")

    @property
    def url(self) -> str:
        """Where requests go."""
        return self.base_url.rstrip("/") + (self.endpoint or ENDPOINTS[self.backend])

    @property
    def is_chat(self) -> bool:
        """Whether prompts are messages."""
        return self.backend == "openai-chat"

    def body(self, sample: SampleRequest) -> dict[str, Any]:
        """Return the JSON of a request."""
        body: dict[str, Any] = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        if self.is_chat:
            if not isinstance(sample.prompt, str):
                raise MinivllmError("openai-chat needs prompts that are texts")
            body["messages"] = [{"role": "user", "content": [{"type": "text", "text": sample.prompt}]}]
            body["max_completion_tokens"] = sample.expected_output_len
            if self.logprobs is not None:
                body |= {"logprobs": True, "top_logprobs": self.logprobs}
        else:
            body |= {"prompt": sample.prompt, "max_tokens": sample.expected_output_len, "logprobs": self.logprobs}
        if self.ignore_eos:
            body["ignore_eos"] = True
        return body | dict(self.extra_body)


def new_session(connections: int | None = None) -> aiohttp.ClientSession:
    """Return a session for that many requests at once; None: any number. It must be closed."""
    connector = aiohttp.TCPConnector(limit=connections or 0, limit_per_host=connections or 0, keepalive_timeout=60)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=6 * 3600))


async def send(
    session: aiohttp.ClientSession, target: Target, sample: SampleRequest, request_id: str | None = None
) -> RequestFuncOutput:
    """Send a request and read its stream. What goes wrong is in the output."""
    output = RequestFuncOutput(prompt_len=sample.prompt_len, start_time=time.perf_counter())
    headers = dict(target.headers) | ({"X-Request-Id": request_id} if request_id else {})
    try:
        async with session.post(target.url, json=target.body(sample), headers=headers) as response:
            if response.status != 200:
                output.error = f"{response.status}: {(await response.text())[:500]}"
                return output
            await _read(response.content, target.is_chat, output)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        output.error = f"{type(error).__name__}: {error}"
    return output


async def _read(content: aiohttp.StreamReader, is_chat: bool, output: RequestFuncOutput) -> None:
    last, texts = 0.0, []
    async for data in events(content):
        now = time.perf_counter()
        event = json.loads(data)
        if "error" in event:
            output.error = str(event["error"].get("message", event["error"]))
            return
        text = text_of(event, is_chat)
        if text is None:
            if usage := event.get("usage"):
                output.output_tokens = usage.get("completion_tokens") or 0
                output.prompt_len = usage.get("prompt_tokens", output.prompt_len)
            continue
        texts.append(text)
        if not last:
            output.ttft = now - output.start_time
        else:
            output.itl.append(now - last)
        last = now
    output.generated_text = "".join(texts)
    output.success = bool(last)
    output.latency = last - output.start_time if last else 0.0
    output.error = "" if last else "the stream ended without any output"


async def events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event as soon as it is whole; comments and the final [DONE] are left out."""
    rest = b""
    async for piece in content.iter_any():
        *whole, rest = (rest + piece).split(b"\n\n")
        for event in whole:
            data = event.strip()
            if data.startswith(b"data:") and (data := data[5:].strip()) != b"[DONE]":
                yield data


def text_of(event: Mapping[str, Any], is_chat: bool) -> str | None:
    """Return the text of an event, which may be empty; None if it has no output: who speaks, or the usage."""
    choices = event.get("choices")
    if not choices:
        return None
    if not is_chat:
        return choices[0].get("text") or ""
    delta = choices[0].get("delta") or {}
    said = delta.get("content")
    if said or delta.get("reasoning") or delta.get("tool_calls"):
        return said or ""
    return "" if said == "" and "role" not in delta else None
