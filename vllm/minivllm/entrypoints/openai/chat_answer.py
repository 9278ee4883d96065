"""`POST /v1/chat/completions`: one conversation per request, answered `n` times.

In vLLM v0.33.0: `vllm/entrypoints/openai/chat_completion/serving.py`.
"""

from collections.abc import Iterator
from typing import Any, ClassVar

from minivllm.entrypoints.openai.answer import Answer, Json
from minivllm.entrypoints.openai.chat_template import normalize
from minivllm.entrypoints.openai.logprobs import chat_logprobs, prompt_logprobs
from minivllm.entrypoints.openai.tool_parsers import PARSERS, REQUIRED, NamedTool, ToolParser
from minivllm.errors import MinivllmError
from minivllm.inputs import TokensPrompt
from minivllm.outputs import CompletionOutput, RequestOutput


class ChatAnswer(Answer):
    """The answer to a `ChatCompletionRequest`."""

    id_prefix, kind, event_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    needs_parser: ClassVar[bool] = True
    """True if a tool_choice of "auto" is refused where no parser finds the calls."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._role, self._echo = "assistant", ""
        # One for each choice, if tools may be called.
        self._tools: list[NamedTool] | list[ToolParser] = []
        choice, settings = self.request.tool_choice, self.serving.settings
        parser = settings.tool_call_parser if settings.enable_auto_tool_choice else None
        if choice == "required":
            self._tools = [ToolParser(REQUIRED) for _ in range(self.n)]
        elif self.request.forced_tools:
            self._tools = [NamedTool(choice.function.name) for _ in range(self.n)]
        elif choice == "auto" and parser is not None:
            self._tools = [ToolParser(PARSERS[parser]) for _ in range(self.n)]
            self.request.skip_special_tokens = False  # some models mark the beginning of a call with one
        elif choice == "auto" and self.needs_parser:
            raise MinivllmError('tool_choice "auto" needs the flags --enable-auto-tool-choice and --tool-call-parser')

    async def prompts_of(self) -> list[TokensPrompt]:
        request = self.request
        text = await self.serving.rendered(request, reasoning_effort=request.reasoning_effort)
        last = request.messages[-1]
        # A message that the request leaves open keeps its role.
        if not request.add_generation_prompt:
            self._role = last["role"]
        # An echo repeats a message that the answer continues.
        if request.echo and last["role"] == self._role:
            self._echo = normalize(last, "string")["content"]
        return [await self.serving.tokenize_prompt(text, request.add_special_tokens)]

    def opening(self) -> Iterator[Json]:
        """Return the first event of each choice, which names the role, and what it echoes."""
        for index in range(self.n):
            delta = {"role": self._role, "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            yield self.event(choice, 0) | {"prompt_token_ids": self.shown(self.prompts[0]["prompt_token_ids"])}
            if self._echo:
                yield self.event({**choice, "delta": {"content": self._echo}}, 0)

    def about_prompt(self, output: RequestOutput) -> Json:
        prompt_token_ids = self.shown(self.prompts[0]["prompt_token_ids"])
        return {"prompt_logprobs": prompt_logprobs(output.prompt_logprobs), "prompt_token_ids": prompt_token_ids}

    def delta(self, number: int, output: RequestOutput, completion: CompletionOutput) -> Json:
        content, calls = self.parts(number, completion)
        delta: Json = {"tool_calls": calls} if calls else {}
        if content or not (self._tools or completion.finish_reason):
            delta["content"] = content
        return self._choice(number, "delta", delta, completion)

    def choice(self, number: int, output: RequestOutput, completion: CompletionOutput) -> Json:
        content, calls = self.parts(number, completion)
        content = self._echo + content
        message: Json = {"role": self._role, "content": content if not self._tools else content or None}
        return self._choice(number, "message", message | ({"tool_calls": calls} if calls else {}), completion)

    def parts(self, number: int, completion: CompletionOutput) -> tuple[str, list[Json]]:
        """Return the content and the tool calls of a whole choice; in a stream, what a piece of it
        adds to them.
        """
        streams, reason = self.request.stream, completion.finish_reason
        # An answer that is cut off makes no forced call.
        if not self._tools or (not streams and self.request.forced_tools and reason != "stop"):
            return completion.text, []
        tools = self._tools[number]
        content, calls = tools.new(completion.text, reason is not None) if streams else tools.whole(completion.text)
        is_one = self.request.parallel_tool_calls is False
        return content, [call for index, call in enumerate(calls) if not (is_one and call.get("index", index))]

    def logprobs(self, completion: CompletionOutput) -> Json | None:
        """Return the log probabilities of a completion, if the request wants them."""
        request = self.request
        if not request.logprobs:
            return None
        shows_ids = bool(request.return_tokens_as_token_ids)
        return chat_logprobs(completion.token_ids, completion.logprobs or [], request.top_logprobs or 0, shows_ids)

    def _choice(self, number: int, name: str, content: Json, completion: CompletionOutput) -> Json:
        reason = completion.finish_reason
        # A tool that the request names keeps "stop", as OpenAI's clients expect.
        if reason == "stop" and self._tools and not isinstance(tools := self._tools[number], NamedTool):
            reason = "tool_calls" if tools.num_calls else "stop"
        choice = {"index": number, name: content, "logprobs": self.logprobs(completion), "finish_reason": reason}
        choice["token_ids"] = self.shown(completion.token_ids)
        return choice if reason is None else choice | {"stop_reason": completion.stop_reason}
