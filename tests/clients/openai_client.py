"""openai-python, versions 2 and 3, against the server: `python openai_client.py URL`."""

import asyncio
import sys

import openai
from expected import ANSWER, COMPLETION, MODEL, NUM_TOKENS, PROMPT, QUESTION
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

MESSAGES = [{"role": "user", "content": QUESTION}]
GREEDY = {"model": MODEL, "max_tokens": NUM_TOKENS, "temperature": 0}


class Verdict(BaseModel):
    """An answer that a schema allows."""

    good: bool


def completions(client: OpenAI) -> None:
    """Try whole and streamed completions, several prompts and choices, and log probabilities."""
    reply = client.completions.create(prompt=PROMPT, **GREEDY)
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == (COMPLETION, "length")
    assert reply.usage.completion_tokens == NUM_TOKENS
    many = client.completions.create(
        prompt=[PROMPT, "import os\n"], **GREEDY | {"temperature": 0.7}, n=2, seed=1, logprobs=2
    )
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    assert all(len(choice.logprobs.token_logprobs) == NUM_TOKENS for choice in many.choices)
    events = list(
        client.completions.create(prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **GREEDY)
    )
    assert "".join(event.choices[0].text for event in events if event.choices) == COMPLETION
    assert events[-1].usage.total_tokens == reply.usage.total_tokens
    raw = client.completions.with_raw_response.create(prompt=PROMPT, **GREEDY)
    assert raw.headers["content-type"] == "application/json"


def chats(client: OpenAI) -> None:
    """Try whole chats with log probabilities, the stream helper, and a parsed object."""
    reply = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=2, **GREEDY)
    assert reply.choices[0].message.content == ANSWER
    assert len(reply.choices[0].logprobs.content) == NUM_TOKENS
    assert len(reply.choices[0].logprobs.content[0].top_logprobs) == 2
    with client.chat.completions.stream(messages=MESSAGES, **GREEDY | {"max_tokens": 50}, stop=["\n"]) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_completion().choices[0].message.content == "#"
    assert {"chunk", "content.delta", "content.done"} <= kinds
    parsed = client.chat.completions.parse(messages=MESSAGES, response_format=Verdict, **GREEDY | {"max_tokens": 60})
    assert isinstance(parsed.choices[0].message.parsed, Verdict)


def errors(client: OpenAI) -> None:
    """Expect the client's own exception class for each error, and the parameter at fault."""
    for wrong, kind, param in (
        ({"model": "nope"}, openai.NotFoundError, "model"),
        ({"max_tokens": 10**6}, openai.BadRequestError, "max_tokens"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
    ):
        result = refusal(client, GREEDY | wrong)
        assert isinstance(result, kind), result
        assert result.param == param


def refusal(client: OpenAI, body: dict) -> openai.APIStatusError | None:
    """Return the exception that the client raises, or None if the request was served."""
    try:
        client.completions.create(prompt=PROMPT, **body)
    except openai.APIStatusError as error:
        return error
    return None


async def at_once(url: str) -> None:
    """Send twenty requests concurrently, and leave a stream early."""
    async with AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
        result = await asyncio.gather(*(client.completions.create(prompt=PROMPT, **GREEDY) for _ in range(20)))
        assert {reply.choices[0].text for reply in result} == {COMPLETION}
        stream = await client.chat.completions.create(messages=MESSAGES, stream=True, **GREEDY | {"max_tokens": 300})
        await anext(stream.__aiter__())
        await stream.close()


def main(url: str) -> None:
    """Run every check against the server at URL."""
    client = OpenAI(base_url=url, api_key="x", max_retries=0, timeout=120)
    (model,) = client.models.list().data
    assert (model.id, model.model_extra["max_model_len"]) == (MODEL, 512)
    completions(client)
    chats(client)
    errors(client)
    asyncio.run(at_once(url))


if __name__ == "__main__":
    main(f"{sys.argv[1]}/v1")
    print(f"openai {openai.__version__}")
