"""Frameworks that run tools against the server: `python agents_client.py URL NAME`.

Each makes two turns: the model must call a tool, the framework runs it, and the model answers. The
model has learnt Python only, so what it then says does not matter. Outlines has no tools: it asks
for structured output.
"""

import asyncio
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from typing import Literal

from expected import MODEL, QUESTION

City = Literal["Rome"]
calls: list[str] = []
KEY = "x"
LINE = {"stop": ["\n"]}
"""Lets the model end its answer: a response that is cut off is an error to some."""


def weather(city: City) -> str:
    """Return the weather in a city."""
    calls.append(city)
    return "sunny"


def openai_agents(url: str) -> None:
    """Try both of its models: responses, which are its default, and chats; whole and streamed."""
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    tool = function_tool(weather)
    settings = ModelSettings(
        tool_choice="required", parallel_tool_calls=False, temperature=0, max_tokens=60, store=False, extra_body=LINE
    )

    async def turns(kind: type) -> None:
        client = AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0)
        agent = Agent("a", instructions="b", model=kind(MODEL, client), tools=[tool], model_settings=settings)
        # After its first call, the framework lets the model choose.
        assert isinstance((await Runner.run(agent, QUESTION, max_turns=2)).final_output, str)
        streamed = Runner.run_streamed(agent, QUESTION, max_turns=2)
        async for _ in streamed.stream_events():
            pass
        assert isinstance(streamed.final_output, str)

    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        before = len(calls)
        asyncio.run(turns(kind))
        assert calls[before:] == ["Rome"] * 2


def pydantic_ai(url: str) -> None:
    """Try its models of responses and of chats: an output tool after another tool, and a schema."""
    from pydantic import BaseModel
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.exceptions import UsageLimitExceeded
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider
    from pydantic_ai.usage import UsageLimits

    class Verdict(BaseModel):
        good: bool

    provider = OpenAIProvider(base_url=url, api_key=KEY)
    settings = {"temperature": 0, "max_tokens": 60}
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        model = kind(MODEL, provider=provider)
        native = Agent(model, output_type=NativeOutput(Verdict), model_settings=settings)
        assert isinstance(native.run_sync(QUESTION).output, Verdict)
        before = len(calls)

        def once(city: City) -> str:
            """Return the weather in a city."""
            return weather(city)

        agent = Agent(model, tools=[once], model_settings=settings | {"extra_body": {"tool_choice": forced(kind)}})
        # The model is made to call each time, so the third turn is one too many.
        with suppress(UsageLimitExceeded):
            agent.run_sync(QUESTION, usage_limits=UsageLimits(request_limit=2))
        assert calls[before:] == ["Rome"] * 2


def forced(kind: type) -> object:
    """Return the tool choice that names the tool, in the form of this model's API."""
    name = {"name": "once"}
    return {"type": "function", **name} if "Responses" in kind.__name__ else {"type": "function", "function": name}


def instructor(url: str) -> None:
    """Try its modes: a tool, and a schema."""
    import instructor as library
    from openai import OpenAI
    from pydantic import BaseModel

    class Verdict(BaseModel):
        good: bool

    for mode in (library.Mode.TOOLS, library.Mode.JSON_SCHEMA):
        client = library.from_openai(OpenAI(base_url=url, api_key=KEY, max_retries=0), mode=mode)
        messages = [{"role": "user", "content": QUESTION}]
        verdict = client.chat.completions.create(
            model=MODEL, messages=messages, response_model=Verdict, max_retries=1, temperature=0, max_tokens=60
        )
        assert isinstance(verdict, Verdict)


def smolagents(url: str) -> None:
    """Try its model of an OpenAI server with a tool that must be called, and the result sent back."""
    from smolagents import ChatMessage, MessageRole, OpenAIServerModel, tool

    @tool
    def forecast(city: str) -> str:
        """Return the weather in a city.

        Args:
            city: its name.
        """
        return "sunny"

    model = OpenAIServerModel(MODEL, api_base=url, api_key=KEY, temperature=0, max_tokens=60)
    messages = [ChatMessage(role=MessageRole.USER, content=[{"type": "text", "text": QUESTION}])]
    choice = {
        "structured_outputs": {"choice": ['<tool_call>{"name": "forecast", "arguments": {"city": "Rome"}}</tool_call>']}
    }
    answer = model.generate(messages, tools_to_call_from=[forecast], tool_choice="auto", extra_body=choice)
    [call] = answer.tool_calls
    assert call.function.name == "forecast"
    result = ChatMessage(role=MessageRole.TOOL_RESPONSE, content=[{"type": "text", "text": "sunny"}])
    assert isinstance(model.generate([*messages, answer, result], max_tokens=3).content, str)


def langchain(url: str) -> None:
    """Try a tool loop of two turns over chats and over responses, and a stream of each."""
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    bound = tool(weather)
    for uses_responses in (False, True):
        chat = ChatOpenAI(
            model=MODEL, base_url=url, api_key=KEY, temperature=0, max_tokens=60, max_retries=0,
            use_responses_api=uses_responses,
        )  # fmt: skip
        messages = [HumanMessage(QUESTION)]
        answer = chat.bind_tools([bound], tool_choice="any").invoke(messages)
        [call, *_] = answer.tool_calls
        assert call["args"] == {"city": "Rome"}
        messages += [answer, *(bound.invoke(each) for each in answer.tool_calls)]
        assert chat.bind_tools([bound], tool_choice="none").invoke(messages).usage_metadata["output_tokens"] > 0
        assert sum(len(str(chunk.content)) for chunk in chat.stream(QUESTION)) > 0


def llama_index(url: str) -> None:
    """Try a tool loop of two turns, and a stream."""
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    llm = OpenAILike(
        model=MODEL, api_base=url, api_key=KEY, is_chat_model=True, is_function_calling_model=True,
        context_window=512, temperature=0, max_tokens=60, max_retries=0,
    )  # fmt: skip
    tool = FunctionTool.from_defaults(weather)
    messages = [ChatMessage(role="user", content=QUESTION)]
    answer = llm.chat_with_tools([tool], chat_history=messages, tool_required=True)
    [call] = llm.get_tool_calls_from_response(answer)
    assert (call.tool_name, call.tool_kwargs) == ("weather", {"city": "Rome"})
    result = tool(**call.tool_kwargs).content
    said = ChatMessage(role="tool", content=result, additional_kwargs={"tool_call_id": call.tool_id})
    messages += [answer.message, said]
    whole = llm.chat(messages).message.content
    assert whole
    assert "".join(part.delta or "" for part in llm.stream_chat(messages)) == whole


def outlines(url: str) -> None:
    """Try each kind of structured output, and a stream."""
    import re

    import outlines as library
    from openai import OpenAI
    from outlines.types import CFG, Regex
    from pydantic import BaseModel

    class Verdict(BaseModel):
        good: bool

    model = library.from_vllm(OpenAI(base_url=url, api_key=KEY, max_retries=0), MODEL)
    settings = {"temperature": 0, "max_tokens": 60}
    verdict = model(QUESTION, Verdict, **settings)
    assert isinstance(Verdict.model_validate_json(verdict), Verdict)
    assert "".join(model.stream(QUESTION, Verdict, **settings)) == verdict
    assert model(QUESTION, Literal["yes", "no"], **settings) in ("yes", "no")
    assert re.fullmatch("[0-9]{3}", model(QUESTION, Regex("[0-9]{3}"), **settings))
    assert model(QUESTION, CFG('start: "a" "b"'), **settings) == "ab"


CLIENTS: dict[str, Callable[[str], None]] = {
    "openai-agents": openai_agents,
    "pydantic-ai-slim": pydantic_ai,
    "instructor": instructor,
    "smolagents": smolagents,
    "langchain-openai": langchain,
    "llama-index-llms-openai-like": llama_index,
    "outlines": outlines,
}

if __name__ == "__main__":
    name = sys.argv[2]
    CLIENTS[name](f"{sys.argv[1]}/v1")
    print(f"{name} {version(name)}")
