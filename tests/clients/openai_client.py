"""openai-python, versions 2 and 3, against the server: `python openai_client.py URL`."""

import asyncio
import json
import sys

import openai
from expected import ANSWER, COMPLETION, FREE_CALL, MODEL, NUM_TOKENS, PROMPT, QUESTION, WEATHER
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
    sampled = GREEDY | {"temperature": 0.7}
    many = client.completions.create(prompt=[PROMPT, "import os\n"], **sampled, n=2, seed=1, logprobs=2)
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    assert all(len(choice.logprobs.token_logprobs) == NUM_TOKENS for choice in many.choices)
    usage = {"stream_options": {"include_usage": True}}
    events = list(client.completions.create(prompt=PROMPT, stream=True, **usage, **GREEDY))
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


def tool_loop(client: OpenAI) -> None:
    """Have the model call a tool freely, whole and streamed, and send the tool's result back."""
    tools = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
    body = GREEDY | {"messages": MESSAGES, "tools": tools, "max_tokens": 100}
    message = client.chat.completions.create(**body, extra_body=FREE_CALL).choices[0].message
    assert (message.content, json.loads(message.tool_calls[0].function.arguments)) == ("I look. ", {"city": "Rome"})
    with client.chat.completions.stream(**body, extra_body=FREE_CALL) as stream:
        [call] = stream.get_final_completion().choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    turns = [*MESSAGES, message.model_dump(exclude_none=True), result]
    assert client.chat.completions.create(**body | {"messages": turns, "max_tokens": 3}).usage.completion_tokens == 3


def responses(client: OpenAI) -> None:
    """Try a response whole, streamed and parsed, and a tool loop of two turns."""
    greedy = {"model": MODEL, "max_output_tokens": NUM_TOKENS, "temperature": 0, "store": False}
    reply = client.responses.create(input=QUESTION, **greedy)
    assert (reply.output_text, reply.status, reply.usage.output_tokens) == (ANSWER, "incomplete", NUM_TOKENS)
    with client.responses.stream(input=QUESTION, **greedy) as stream:
        kinds = [event.type for event in stream]
        assert kinds[0] == "response.created"
        assert "response.output_text.delta" in kinds
    events = list(client.responses.create(input=QUESTION, stream=True, **greedy))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ANSWER
    assert events[-1].response.output_text == ANSWER
    parsed = client.responses.parse(input=QUESTION, text_format=Verdict, **greedy | {"max_output_tokens": 60})
    assert isinstance(parsed.output_parsed, Verdict)
    tools = [{"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}]
    patient = greedy | {"max_output_tokens": 100, "tools": tools}
    with client.responses.stream(input=QUESTION, **patient, extra_body=FREE_CALL) as stream:
        final = stream.get_final_response()
    _, call = final.output
    assert json.loads(call.arguments) == {"city": "Rome"}
    turns = [{"role": "user", "content": QUESTION}, *(item.model_dump(exclude_none=True) for item in final.output)]
    turns.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
    assert client.responses.create(input=turns, **patient | {"max_output_tokens": 3}).usage.output_tokens == 3


def errors(client: OpenAI) -> None:
    """Expect the client's own exception class for each error, and the parameter at fault."""
    for wrong, kind, param in (
        ({"model": "nope"}, openai.NotFoundError, "model"),
        ({"max_tokens": 10**6}, openai.BadRequestError, "max_tokens"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
    ):
        fault = None
        try:
            client.completions.create(prompt=PROMPT, **GREEDY | wrong)
        except kind as error:
            fault = error.param
        assert fault == param, wrong


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
    tool_loop(client)
    responses(client)
    errors(client)
    asyncio.run(at_once(url))


if __name__ == "__main__":
    main(f"{sys.argv[1]}/v1")
    print(f"openai {openai.__version__}")
