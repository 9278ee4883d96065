"""langchain-openai against the server: `python langchain_client.py URL`."""

import asyncio
import sys
from importlib.metadata import version

from expected import ANSWER, COMPLETION, MODEL, NUM_TOKENS, PROMPT, QUESTION
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel


class Verdict(BaseModel):
    """An answer that a schema allows."""

    good: bool


def weather(city: str) -> str:
    """Return the weather in a city."""
    return city


async def at_once(chat: ChatOpenAI) -> None:
    """Try batches and an asynchronous stream."""
    assert len(await chat.abatch(["a", "b", "c"])) == 3
    assert "".join([chunk.content async for chunk in chat.astream(QUESTION)]) == ANSWER


def main(url: str) -> None:
    """Run every check against the server at URL."""
    flags = {"model": MODEL, "base_url": url, "api_key": "x", "temperature": 0, "max_retries": 0}
    chat = ChatOpenAI(**flags, max_tokens=NUM_TOKENS)
    reply = chat.invoke(QUESTION)
    assert (reply.content, reply.usage_metadata["output_tokens"]) == (ANSWER, NUM_TOKENS)
    assert "".join(chunk.content for chunk in chat.stream(QUESTION)) == ANSWER
    usages = [chunk.usage_metadata for chunk in chat.stream(QUESTION, stream_usage=True) if chunk.usage_metadata]
    assert [usage["output_tokens"] for usage in usages] == [NUM_TOKENS]
    asyncio.run(at_once(chat))
    assert OpenAI(**flags, max_tokens=NUM_TOKENS).invoke(PROMPT) == COMPLETION
    chosen = chat.bind(logprobs=True, top_logprobs=2).invoke(QUESTION).response_metadata["logprobs"]["content"]
    assert "".join(token["token"] for token in chosen) == ANSWER
    assert chat.bind_tools([weather]).invoke(QUESTION).tool_calls == []  # the model is free to call none
    patient = ChatOpenAI(**flags, max_tokens=60)
    assert isinstance(patient.with_structured_output(Verdict, method="json_schema").invoke(QUESTION), Verdict)


if __name__ == "__main__":
    main(f"{sys.argv[1]}/v1")
    print(f"langchain-openai {version('langchain-openai')}")
