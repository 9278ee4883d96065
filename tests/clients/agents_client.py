"""Frameworks against the server: `python agents_client.py URL NAME`.

Those for agents make two turns: the model must call a tool, the framework runs it, and the model
answers. The model has learnt Python only, so what it then says does not matter. Outlines and
instructor have no tools: they ask for structured output. litellm forwards requests.
"""

import asyncio
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from typing import Literal

from expected import ANSWER, COMPLETION, MODEL, NUM_TOKENS, PROMPT, QUESTION
from openai import OpenAI
from pydantic import BaseModel

City = Literal["Rome"]
calls: list[str] = []
KEY = "x"
LINE = {"stop": ["\n"]}
"""Lets the model end its answer: a response that is cut off is an error to some."""
MESSAGES = [{"role": "user", "content": QUESTION}]
SETTINGS = {"temperature": 0, "max_tokens": 60}


class Verdict(BaseModel):
    """An answer that a schema allows."""

    good: bool


def weather(city: City) -> str:
    """Return the weather in a city."""
    calls.append(city)
    return "sunny"


def openai_agents(url: str) -> None:
    """Try both of its models: responses, which are its default, and chats; whole and streamed."""
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    tool = agents.function_tool(weather)
    required = {"tool_choice": "required", "parallel_tool_calls": False}
    settings = agents.ModelSettings(store=False, extra_body=LINE, **required, **SETTINGS)

    async def turns(kind: type) -> None:
        client = AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0)
        agent = agents.Agent("a", instructions="b", model=kind(MODEL, client), tools=[tool], model_settings=settings)
        # After its first call, the framework lets the model choose.
        assert isinstance((await agents.Runner.run(agent, QUESTION, max_turns=2)).final_output, str)
        streamed = agents.Runner.run_streamed(agent, QUESTION, max_turns=2)
        async for _ in streamed.stream_events():
            pass
        assert isinstance(streamed.final_output, str)

    for kind in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
        before = len(calls)
        asyncio.run(turns(kind))
        assert calls[before:] == ["Rome"] * 2


def pydantic_ai(url: str) -> None:
    """Try its models of responses and of chats: an output tool after another tool, and a schema."""
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.exceptions import UsageLimitExceeded
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider
    from pydantic_ai.usage import UsageLimits

    def once(city: City) -> str:
        """Return the weather in a city."""
        return weather(city)

    provider, name = OpenAIProvider(base_url=url, api_key=KEY), {"name": "once"}
    chats, responses = {"type": "function", "function": name}, {"type": "function", **name}
    for kind, choice in ((OpenAIChatModel, chats), (OpenAIResponsesModel, responses)):
        model = kind(MODEL, provider=provider)
        native = Agent(model, output_type=NativeOutput(Verdict), model_settings=SETTINGS)
        assert isinstance(native.run_sync(QUESTION).output, Verdict)
        before = len(calls)
        agent = Agent(model, tools=[once], model_settings=SETTINGS | {"extra_body": {"tool_choice": choice}})
        # The model is made to call each time, so the third turn is one too many.
        with suppress(UsageLimitExceeded):
            agent.run_sync(QUESTION, usage_limits=UsageLimits(request_limit=2))
        assert calls[before:] == ["Rome"] * 2


def instructor(url: str) -> None:
    """Try its modes: a tool, and a schema."""
    import instructor as library

    for mode in (library.Mode.TOOLS, library.Mode.JSON_SCHEMA):
        client = library.from_openai(OpenAI(base_url=url, api_key=KEY, max_retries=0), mode=mode)
        asked = {"model": MODEL, "messages": MESSAGES, "response_model": Verdict, "max_retries": 1}
        verdict = client.chat.completions.create(**asked, **SETTINGS)
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

    model = OpenAIServerModel(MODEL, api_base=url, api_key=KEY, **SETTINGS)
    messages = [ChatMessage(role=MessageRole.USER, content=[{"type": "text", "text": QUESTION}])]
    call = '<tool_call>{"name": "forecast", "arguments": {"city": "Rome"}}</tool_call>'
    choice = {"structured_outputs": {"choice": [call]}}
    answer = model.generate(messages, tools_to_call_from=[forecast], tool_choice="auto", extra_body=choice)
    [call] = answer.tool_calls
    assert call.function.name == "forecast"
    result = ChatMessage(role=MessageRole.TOOL_RESPONSE, content=[{"type": "text", "text": "sunny"}])
    assert isinstance(model.generate([*messages, answer, result], max_tokens=3).content, str)


def langchain(url: str) -> None:
    """Try chats and completions, whole, streamed and at once, and a tool loop of two turns over chats and over
    responses.
    """
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langchain_openai import OpenAI as Completions

    flags = {"model": MODEL, "base_url": url, "api_key": KEY, "temperature": 0, "max_retries": 0}
    chat, bound = ChatOpenAI(**flags, max_tokens=NUM_TOKENS), tool(weather)

    async def at_once() -> None:
        assert len(await chat.abatch(["a", "b", "c"])) == 3
        assert "".join([chunk.content async for chunk in chat.astream(QUESTION)]) == ANSWER

    reply = chat.invoke(QUESTION)
    assert (reply.content, reply.usage_metadata["output_tokens"]) == (ANSWER, NUM_TOKENS)
    assert "".join(chunk.content for chunk in chat.stream(QUESTION)) == ANSWER
    usages = [chunk.usage_metadata for chunk in chat.stream(QUESTION, stream_usage=True) if chunk.usage_metadata]
    assert [usage["output_tokens"] for usage in usages] == [NUM_TOKENS]
    asyncio.run(at_once())
    assert Completions(**flags, max_tokens=NUM_TOKENS).invoke(PROMPT) == COMPLETION
    chosen = chat.bind(logprobs=True, top_logprobs=2).invoke(QUESTION).response_metadata["logprobs"]["content"]
    assert "".join(token["token"] for token in chosen) == ANSWER
    assert chat.bind_tools([bound]).invoke(QUESTION).tool_calls == []  # the model is free to call none
    for uses_responses in (False, True):
        chat = ChatOpenAI(**flags, max_tokens=60, use_responses_api=uses_responses)
        assert isinstance(chat.with_structured_output(Verdict, method="json_schema").invoke(QUESTION), Verdict)
        answer = chat.bind_tools([bound], tool_choice="any").invoke(QUESTION)
        assert answer.tool_calls[0]["args"] == {"city": "Rome"}
        messages = [HumanMessage(QUESTION), answer, *(bound.invoke(each) for each in answer.tool_calls)]
        assert chat.bind_tools([bound], tool_choice="none").invoke(messages).usage_metadata["output_tokens"] > 0
        assert sum(len(str(chunk.content)) for chunk in chat.stream(QUESTION)) > 0


def litellm(url: str) -> None:
    """Try chats and completions through the prefixes of two providers, responses, and an error."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it fetches a list of prices
    import litellm as library

    library.telemetry = False
    flags = {"api_base": url, "api_key": KEY}
    greedy = flags | {"max_tokens": NUM_TOKENS, "temperature": 0}
    for prefix, text_prefix in (("hosted_vllm/", "hosted_vllm/"), ("openai/", "text-completion-openai/")):
        chat = {"model": prefix + MODEL, "messages": MESSAGES, **greedy}
        reply = library.completion(**chat)
        assert reply.choices[0].message.content == ANSWER
        chunks = [*library.completion(**chat, stream=True, stream_options={"include_usage": True})]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
        assert chunks[-1].usage.total_tokens == reply.usage.total_tokens
        completion = library.text_completion(model=text_prefix + MODEL, prompt=PROMPT, **greedy)
        assert completion.choices[0].text == COMPLETION
    reply = library.responses(model="openai/" + MODEL, input=QUESTION, max_output_tokens=6, temperature=0, **flags)
    assert reply.output[0].content[0].text.startswith(ANSWER)  # litellm asks for 16 tokens at least
    chat, own = {"model": "hosted_vllm/" + MODEL, "messages": MESSAGES, **flags}, {"top_k": 1, "ignore_eos": True}
    assert library.completion(**chat, max_tokens=6, extra_body=own).choices[0].message.content == ANSWER
    later = library.acompletion(**chat, max_tokens=2)
    assert asyncio.run(later).choices[0].finish_reason == "length"
    try:
        library.completion(**chat | {"model": "hosted_vllm/nope"}, num_retries=0)
    except library.NotFoundError:
        return
    raise AssertionError("a model that does not exist was served")


def llama_index(url: str) -> None:
    """Try a tool loop of two turns, and a stream."""
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    llm = OpenAILike(
        model=MODEL, api_base=url, api_key=KEY, is_chat_model=True, is_function_calling_model=True,
        context_window=512, max_retries=0, **SETTINGS,
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
    from outlines.types import CFG, Regex

    model = library.from_vllm(OpenAI(base_url=url, api_key=KEY, max_retries=0), MODEL)
    verdict = model(QUESTION, Verdict, **SETTINGS)
    assert isinstance(Verdict.model_validate_json(verdict), Verdict)
    assert "".join(model.stream(QUESTION, Verdict, **SETTINGS)) == verdict
    assert model(QUESTION, Literal["yes", "no"], **SETTINGS) in ("yes", "no")
    assert re.fullmatch("[0-9]{3}", model(QUESTION, Regex("[0-9]{3}"), **SETTINGS))
    assert model(QUESTION, CFG('start: "a" "b"'), **SETTINGS) == "ab"


CLIENTS: dict[str, Callable[[str], None]] = {
    "openai-agents": openai_agents,
    "pydantic-ai-slim": pydantic_ai,
    "instructor": instructor,
    "smolagents": smolagents,
    "langchain-openai": langchain,
    "litellm": litellm,
    "llama-index-llms-openai-like": llama_index,
    "outlines": outlines,
}

if __name__ == "__main__":
    name = sys.argv[2]
    CLIENTS[name](f"{sys.argv[1]}/v1")
    print(f"{name} {version(name)}")
