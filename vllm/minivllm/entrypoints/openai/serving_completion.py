"""`POST /v1/completions`. In vLLM v0.33.0: `vllm/entrypoints/openai/completion/serving.py`."""

from minivllm.entrypoints.openai.answer import Answer, TokenizedPrompt
from minivllm.entrypoints.openai.logprobs import completion_logprobs, prompt_logprobs
from minivllm.entrypoints.openai.protocol import (
    CompletionLogProbs,
    CompletionRequest,
    CompletionResponse,
    CompletionResponseChoice,
    CompletionResponseStreamChoice,
    CompletionStreamResponse,
)
from minivllm.entrypoints.openai.serving_engine import OpenAIServing
from minivllm.errors import MinivllmError
from minivllm.outputs import CompletionOutput, RequestOutput


class CompletionAnswer(Answer):
    """A renderer for the choices of completions."""

    whole_form, event_form, event_kind = CompletionResponse, CompletionStreamResponse, "text_completion"

    def prepare(self) -> None:
        self._num_characters: dict[int, int] = {}
        """How many characters of each choice were sent."""

    def choice(self, number: int, output: RequestOutput, completion: CompletionOutput) -> CompletionResponseChoice:
        prompt = self.prompts[number // self.n]
        shows_ids = self.request.return_token_ids
        return CompletionResponseChoice(
            index=number,
            text=self._text(prompt, completion, self.request.echo),
            logprobs=self._logprobs(prompt, output, completion, self.request.echo),
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            token_ids=completion.token_ids if shows_ids else None,
            prompt_token_ids=prompt.token_ids if shows_ids else None,
            prompt_logprobs=prompt_logprobs(output.prompt_logprobs),
        )

    def delta(self, number: int, output: RequestOutput, completion: CompletionOutput) -> CompletionResponseStreamChoice:
        request = self.request
        prompt = self.prompts[number // self.n]
        first = number not in self._num_characters
        echoes = bool(request.echo) and first
        before = self._num_characters.get(number, 0)
        choice = CompletionResponseStreamChoice(
            index=number,
            text=self._text(prompt, completion, echoes),
            logprobs=self._logprobs(prompt, output, completion, echoes, before),
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            prompt_token_ids=prompt.token_ids if echoes or (first and request.return_token_ids) else None,
            token_ids=completion.token_ids if request.return_token_ids else None,
        )
        self._num_characters[number] = before + len(choice.text)
        return choice

    def _text(self, prompt: TokenizedPrompt, completion: CompletionOutput, echoes: bool | None) -> str:
        """Return a completion's text, preceded by the prompt's text for an echo, unless the prompt
        is returned as token ids.
        """
        said_before = prompt.text if echoes and not self.request.return_token_ids else ""
        return (said_before or "") + ("" if self.request.only_echoes else completion.text)

    def _logprobs(
        self,
        prompt: TokenizedPrompt,
        output: RequestOutput,
        completion: CompletionOutput,
        echoes: bool | None,
        offset: int = 0,
    ) -> CompletionLogProbs | None:
        """Return the log probabilities of tokens whose text begins `offset` characters after the
        prompt's.
        """
        if self.request.logprobs is None:
            return None
        token_ids, rows = ([], []) if self.request.only_echoes else (completion.token_ids, completion.logprobs or [])
        if echoes:
            # One list for prompt and completion, as OpenAI's completions have it.
            token_ids, rows = prompt.token_ids + token_ids, (output.prompt_logprobs or []) + rows
        serving = self.serving
        most = self.request.logprobs
        return completion_logprobs(serving.tokenizer, token_ids, rows, most, offset, serving.shows_ids(self.request))


class OpenAIServingCompletion(OpenAIServing):
    """The completions endpoint: any number of prompts per request, each completed `n` times."""

    id_prefix, renderer = "cmpl", CompletionAnswer

    async def prompts_of(self, request: CompletionRequest) -> tuple[list[TokenizedPrompt], int | None]:
        for name in ("suffix", "prompt_embeds"):
            if getattr(request, name) is not None:
                raise MinivllmError(f"{name} is not served here", None if name == "suffix" else name)
        raw_prompts = _prompts_of(request)
        self.check(request, len(raw_prompts))
        prompts = [await self._tokenized(prompt, request) for prompt in raw_prompts]
        return prompts, 1 if request.only_echoes else request.max_tokens

    async def _tokenized(self, prompt: str | list[int], request: CompletionRequest) -> TokenizedPrompt:
        if isinstance(prompt, str):
            return await self.tokenize_prompt(prompt, request)
        token_ids = self.truncated(prompt, request)
        text = self.tokenizer.decode(token_ids, skip_special_tokens=False) if request.echo else None
        return TokenizedPrompt(token_ids, text)


def _prompts_of(request: CompletionRequest) -> list[str | list[int]]:
    prompt = request.prompt
    assert prompt is not None
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise MinivllmError("the list of prompts is empty; give at least one")
    return [prompt] if isinstance(prompt[0], int) else list(prompt)  # type: ignore[list-item]
