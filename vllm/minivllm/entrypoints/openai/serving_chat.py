"""`POST /v1/chat/completions`. In vLLM v0.33.0:
`vllm/entrypoints/openai/chat_completion/serving.py`.
"""

from collections.abc import Iterator
from typing import Any

from minivllm.entrypoints.openai.answer import Answer, TokenizedPrompt
from minivllm.entrypoints.openai.constraints import forced_tools
from minivllm.entrypoints.openai.logprobs import chat_logprobs, prompt_logprobs
from minivllm.entrypoints.openai.protocol import (
    ChatCompletionLogProbs,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
    ChatMessage,
    DeltaMessage,
    StreamEvent,
)
from minivllm.entrypoints.openai.serving_engine import OpenAIServing
from minivllm.entrypoints.openai.tool_calls import CalledTools
from minivllm.errors import MinivllmError
from minivllm.outputs import CompletionOutput, RequestOutput


class ChatAnswer(Answer):
    """A renderer for the answers of a chat."""

    whole_form, event_form, event_kind = ChatCompletionResponse, ChatCompletionStreamResponse, "chat.completion.chunk"

    def prepare(self) -> None:
        request = self.request
        last = request.messages[-1]
        self._role = self.serving.settings.response_role if request.add_generation_prompt else last["role"]
        """Who speaks. A message that goes on may be echoed, so that the reply has it whole."""
        said = last.get("content") if request.echo and last["role"] == self._role else ""
        self._said_before = said if isinstance(said, str) else ""
        tools = forced_tools(request)
        name = tools[0].function.name if tools and request.tool_choice != "required" else None
        self._tools = [CalledTools(name) for _ in range(self.n)] if tools else []
        """One for each choice, if a tool must be called."""

    def opening(self) -> Iterator[StreamEvent]:
        """Return the first event of each choice, which names the role, and the echoed message, if
        any.
        """
        for index in range(self.n):
            first = self._event_of(index, DeltaMessage(role=self._role, content=""))
            for name, value in self._about_prompt().items():
                setattr(first, name, value)
            yield first
            if self._said_before:
                yield self._event_of(index, DeltaMessage(content=self._said_before))

    def about_prompt(self, output: RequestOutput) -> dict[str, Any]:
        return {"prompt_logprobs": prompt_logprobs(output.prompt_logprobs), **self._about_prompt()}

    def _about_prompt(self) -> dict[str, Any]:
        return {
            "prompt_token_ids": self.prompts[0].token_ids if self.request.return_token_ids else None,
            "prompt_text": self.prompts[0].text if self.request.return_prompt_text else None,
        }

    def _event_of(self, index: int, said: DeltaMessage) -> StreamEvent:
        choice = ChatCompletionResponseStreamChoice(index=index, delta=said, logprobs=None, finish_reason=None)
        return self.event([choice], index, 0)

    def delta(
        self, number: int, output: RequestOutput, completion: CompletionOutput
    ) -> ChatCompletionResponseStreamChoice:
        says_something = completion.text or completion.finish_reason is None
        said = DeltaMessage(content=completion.text) if says_something else DeltaMessage()
        if self._tools:
            # The text is constrained to calls of tools, so none of it is content.
            calls = self._tools[completion.index].new(completion.text)
            said = DeltaMessage(tool_calls=calls) if calls else DeltaMessage()
        choice = ChatCompletionResponseStreamChoice(
            index=number,
            delta=said,
            logprobs=self._logprobs(completion),
            finish_reason=self._finish_reason(completion),
            token_ids=completion.token_ids if self.request.return_token_ids else None,
        )
        if completion.finish_reason is not None:
            choice.stop_reason = completion.stop_reason
        return choice

    def choice(self, number: int, output: RequestOutput, completion: CompletionOutput) -> ChatCompletionResponseChoice:
        message = ChatMessage(role=self._role, content=self._said_before + completion.text)
        if self._tools and completion.finish_reason == "stop":  # else it is cut off, and no call
            message.content = None
            message.tool_calls = self._tools[completion.index].whole(completion.text)
        return ChatCompletionResponseChoice(
            index=number,
            message=message,
            logprobs=self._logprobs(completion),
            finish_reason=self._finish_reason(completion),
            stop_reason=completion.stop_reason,
            token_ids=completion.token_ids if self.request.return_token_ids else None,
        )

    def _finish_reason(self, completion: CompletionOutput) -> str | None:
        """Return the finish reason: "tool_calls" if a tool is "required", as OpenAI's clients
        expect; a named tool keeps "stop".
        """
        calls = bool(self._tools) and self.request.tool_choice == "required"
        return "tool_calls" if calls and completion.finish_reason == "stop" else completion.finish_reason

    def _logprobs(self, completion: CompletionOutput) -> ChatCompletionLogProbs | None:
        if not self.request.logprobs:
            return None
        shows_ids = self.serving.shows_ids(self.request)
        return chat_logprobs(completion.token_ids, completion.logprobs or [], self.request.top_logprobs or 0, shows_ids)


class OpenAIServingChat(OpenAIServing):
    """The chat endpoint: one conversation per request, answered `n` times."""

    id_prefix, renderer = "chatcmpl", ChatAnswer

    async def prompts_of(self, request: ChatCompletionRequest) -> tuple[list[TokenizedPrompt], int | None]:
        self.check(request, 1)
        if request.tool_choice == "auto" and not (
            self.settings.enable_auto_tool_choice and self.settings.tool_call_parser
        ):
            raise MinivllmError('tool_choice "auto" needs the flags --enable-auto-tool-choice and --tool-call-parser')
        text = self.rendered(request, reasoning_effort=request.reasoning_effort)
        asked = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        return [await self.tokenize_prompt(text, request)], asked
