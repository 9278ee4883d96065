"""`POST /v1/completions`: any number of prompts per request, each completed `n` times.

In vLLM v0.33.0: `vllm/entrypoints/openai/completion/serving.py`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

from minivllm.entrypoints.openai.answer import Answer, Json
from minivllm.entrypoints.openai.logprobs import completion_logprobs, prompt_logprobs
from minivllm.entrypoints.openai.protocol import CompletionRequest
from minivllm.inputs import TokensPrompt
from minivllm.outputs import CompletionOutput, RequestOutput

if TYPE_CHECKING:
    from minivllm.entrypoints.openai.serving_engine import OpenAIServing


class CompletionAnswer(Answer):
    """The answer to a `CompletionRequest`."""

    id_prefix, kind, event_kind = "cmpl-", "text_completion", "text_completion"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # By choice: how many characters were sent.
        self._num_characters: Counter[int] = Counter()

    @classmethod
    async def prompts_of(cls, serving: OpenAIServing, request: CompletionRequest) -> list[TokensPrompt]:
        prompts = []
        for prompt in request.prompts:
            if isinstance(prompt, str):
                prompts.append(await serving.tokenize_prompt(prompt, request.add_special_tokens))
            else:
                text = await serving.detokenize(prompt) if request.echo else ""
                prompts.append(TokensPrompt(prompt_token_ids=prompt, prompt=text))
            await asyncio.sleep(0)
        return prompts

    def choice(self, number: int, output: RequestOutput, completion: CompletionOutput) -> Json:
        choice = self._choice(number, output, completion, self.request.echo, 0)
        if self.request.return_token_ids:
            choice["prompt_token_ids"] = self.prompts[number // self.n]["prompt_token_ids"]
        return choice | {"prompt_logprobs": prompt_logprobs(output.prompt_logprobs)}

    def delta(self, number: int, output: RequestOutput, completion: CompletionOutput) -> Json:
        is_first = number not in self._num_characters
        echoes = is_first and self.request.echo
        choice = self._choice(number, output, completion, echoes, self._num_characters[number])
        if echoes or (is_first and self.request.return_token_ids):
            choice["prompt_token_ids"] = self.prompts[number // self.n]["prompt_token_ids"]
        self._num_characters[number] += len(choice["text"])
        return choice

    def _choice(
        self, number: int, output: RequestOutput, completion: CompletionOutput, echoes: bool | None, offset: int
    ) -> Json:
        """Return a completion, preceded by the prompt for an echo. Its text begins `offset`
        characters after the prompt's.
        """
        request = self.request
        prompt = self.prompts[number // self.n]
        text, token_ids, rows = completion.text, completion.token_ids, completion.logprobs or []
        if request.only_echoes:
            text, token_ids, rows = "", [], []
        # A prompt that is returned as token ids is not repeated as text.
        if echoes and not request.return_token_ids:
            text = prompt.get("prompt", "") + text
        logprobs = None
        if request.logprobs is not None:
            if echoes:
                # One list for prompt and completion, as OpenAI's completions have it.
                token_ids = prompt["prompt_token_ids"] + token_ids
                rows = (output.prompt_logprobs or []) + rows
            shows_ids = bool(request.return_tokens_as_token_ids)
            logprobs = completion_logprobs(self.serving.tokenizer, token_ids, rows, request.logprobs, offset, shows_ids)
        return {
            "index": number,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "prompt_token_ids": None,
            "token_ids": self.token_ids(completion),
        }
