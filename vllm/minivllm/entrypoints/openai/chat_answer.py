"""`POST /v1/chat/completions`: one conversation per request, answered `n` times.

In vLLM v0.33.0: `vllm/entrypoints/openai/chat_completion/serving.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from minivllm.entrypoints.openai.answer import Answer, Json
from minivllm.entrypoints.openai.chat_messages import normalize
from minivllm.entrypoints.openai.logprobs import chat_logprobs, prompt_logprobs
from minivllm.entrypoints.openai.protocol import ChatCompletionRequest
from minivllm.entrypoints.openai.tool_calls import CalledTools
from minivllm.entrypoints.openai.tool_parsers import ToolParser
from minivllm.errors import MinivllmError
from minivllm.inputs import TokensPrompt
from minivllm.outputs import CompletionOutput, RequestOutput

if TYPE_CHECKING:
    from minivllm.entrypoints.openai.serving_engine import OpenAIServing


class ChatAnswer(Answer):
    """The answer to a `ChatCompletionRequest`."""

    id_prefix, kind, event_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    needs_parser: ClassVar[bool] = True
    """True if a tool_choice of "auto" is refused where no parser finds the calls."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        request = self.request
        # A message that the request leaves open keeps its role.
        self._role = "assistant" if request.add_generation_prompt else request.messages[-1]["role"]
        # An echo repeats a message that the answer continues.
        last = request.messages[-1]
        self._echo = normalize([last], "string")[0]["content"] if request.echo and last["role"] == self._role else ""
        self._must_call_any = request.tool_choice == "required"
        tools = request.forced_tools
        # One for each choice, if tools may be called.
        self._tools: list[CalledTools] | list[ToolParser] = []
        if tools:
            name = None if self._must_call_any else tools[0].function.name
            self._tools = [CalledTools(name) for _ in range(self.n)]
        elif request.tool_choice == "auto" and (parser := self.serving.settings.auto_tool_parser):
            self._tools = [ToolParser(parser) for _ in range(self.n)]

    @classmethod
    async def prompts_of(cls, serving: OpenAIServing, request: ChatCompletionRequest) -> list[TokensPrompt]:
        if request.tool_choice == "auto" and serving.settings.auto_tool_parser is None and cls.needs_parser:
            raise MinivllmError('tool_choice "auto" needs the flags --enable-auto-tool-choice and --tool-call-parser')
        if request.tool_choice == "auto" and serving.settings.auto_tool_parser is not None:
            request.skip_special_tokens = False  # some models mark the beginning of a call with one
        text = await serving.rendered(request, reasoning_effort=request.reasoning_effort)
        return [await serving.tokenize_prompt(text, request.add_special_tokens)]

    def opening(self) -> Iterator[Json]:
        """Return the first event of each choice, which names the role, and what it echoes."""
        for index in range(self.n):
            delta = {"role": self._role, "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            yield {**self.event(choice, 0), "prompt_token_ids": self._prompt_token_ids()}
            if self._echo:
                yield self.event({**choice, "delta": {"content": self._echo}}, 0)

    def about_prompt(self, output: RequestOutput) -> Json:
        return {
            "prompt_logprobs": prompt_logprobs(output.prompt_logprobs),
            "prompt_token_ids": self._prompt_token_ids(),
        }

    def _prompt_token_ids(self) -> list[int] | None:
        return self.prompts[0]["prompt_token_ids"] if self.request.return_token_ids else None

    def delta(self, number: int, output: RequestOutput, completion: CompletionOutput) -> Json:
        content, calls = self.new_parts(number, completion)
        delta: Json = {"tool_calls": calls} if calls else {}
        if content or not (self._tools or completion.finish_reason):
            delta["content"] = content
        choice = self._choice(number, "delta", delta, completion)
        if completion.finish_reason is not None:
            choice["stop_reason"] = completion.stop_reason
        return choice

    def choice(self, number: int, output: RequestOutput, completion: CompletionOutput) -> Json:
        content, calls = self.parts(number, completion)
        content = self._echo + content
        message: Json = {"role": self._role, "content": content if not self._tools else content or None}
        if calls:
            message["tool_calls"] = calls
        choice = self._choice(number, "message", message, completion)
        return choice | {"stop_reason": completion.stop_reason}

    def new_parts(self, number: int, completion: CompletionOutput) -> tuple[str, list[Json]]:
        """Return the content, and the deltas of tool calls, that a piece of a choice adds."""
        if not self._tools:
            return completion.text, []
        content, calls = self._tools[number].new(completion.text, completion.finish_reason is not None)
        return content, [call for call in calls if call["index"] == 0 or self.request.parallel_tool_calls is not False]

    def parts(self, number: int, completion: CompletionOutput) -> tuple[str, list[Json]]:
        """Return the content and the tool calls of a whole choice."""
        # An answer that is cut off makes no forced call.
        if not self._tools or (self.request.forced_tools and completion.finish_reason != "stop"):
            return completion.text, []
        content, calls = self._tools[number].whole(completion.text)
        return content, calls[:1] if self.request.parallel_tool_calls is False else calls

    def logprobs(self, completion: CompletionOutput) -> Json | None:
        """Return the log probabilities of a completion, if the request wants them."""
        request = self.request
        if not request.logprobs:
            return None
        shows_ids = bool(request.return_tokens_as_token_ids)
        return chat_logprobs(completion.token_ids, completion.logprobs or [], request.top_logprobs or 0, shows_ids)

    def _choice(self, number: int, name: str, content: Json, completion: CompletionOutput) -> Json:
        finish_reason = completion.finish_reason
        # A tool that the request names keeps "stop", as OpenAI's clients expect.
        named = self.request.forced_tools and not self._must_call_any
        if finish_reason == "stop" and self._tools and self._tools[number].num_calls and not named:
            finish_reason = "tool_calls"
        return {
            "index": number,
            name: content,
            "logprobs": self.logprobs(completion),
            "finish_reason": finish_reason,
            "token_ids": self.token_ids(completion),
        }
