"""`POST /v1/completions`: any number of prompts per request, each completed `n` times.

In vLLM v0.33.0: `vllm/entrypoints/openai/completion/serving.py`.
"""

import asyncio
from collections import Counter
from typing import Any

from minivllm.entrypoints.openai.answer import Answer, Json
from minivllm.entrypoints.openai.logprobs import completion_logprobs, prompt_logprobs
from minivllm.inputs import TokensPrompt
from minivllm.outputs import CompletionOutput, RequestOutput


class CompletionAnswer(Answer):
    """The answer to a `CompletionRequest`."""

    id_prefix, kind, event_kind = "cmpl-", "text_completion", "text_completion"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # By choice: how many characters were sent.
        self._num_characters: Counter[int] = Counter()

    async def prompts_of(self) -> list[TokensPrompt]:
        prompts = []
        for prompt in self.request.prompts:
            if isinstance(prompt, str):
                prompts.append(await self.serving.tokenize_prompt(prompt, self.request.add_special_tokens))
            else:
                text = await self.serving.detokenize(prompt) if self.request.echo else ""
                prompts.append(TokensPrompt(prompt_token_ids=prompt, prompt=text))
            await asyncio.sleep(0)
        return prompts

    def choice(self, number: int, output: RequestOutput, completion: CompletionOutput) -> Json:
        """Return a choice, which is one big delta."""
        choice = self.delta(number, output, completion)
        choice["prompt_token_ids"] = self.shown(self.prompts[number // self.n]["prompt_token_ids"])
        return choice | {"prompt_logprobs": prompt_logprobs(output.prompt_logprobs)}

    def delta(self, number: int, output: RequestOutput, completion: CompletionOutput) -> Json:
        request = self.request
        prompt = self.prompts[number // self.n]
        is_first = number not in self._num_characters
        offset = self._num_characters[number]
        text, token_ids, rows = completion.text, completion.token_ids, completion.logprobs or []
        if request.echo and request.max_tokens == 0:
            text, token_ids, rows = "", [], []
        if is_first and request.echo:
            # A prompt that is returned as token ids is not repeated as text.
            text = text if request.return_token_ids else prompt.get("prompt", "") + text
            # One list for prompt and completion, as OpenAI's completions have it.
            token_ids = prompt["prompt_token_ids"] + token_ids
            rows = (output.prompt_logprobs or []) + rows
        self._num_characters[number] += len(text)
        logprobs = None
        if request.logprobs is not None:
            shows_ids = bool(request.return_tokens_as_token_ids)
            logprobs = completion_logprobs(self.serving.tokenizer, token_ids, rows, request.logprobs, offset, shows_ids)
        shows_prompt = is_first and (request.echo or request.return_token_ids)
        end = {"finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}
        ids = {"prompt_token_ids": prompt["prompt_token_ids"] if shows_prompt else None}
        ids["token_ids"] = self.shown(completion.token_ids)
        return {"index": number, "text": text, "logprobs": logprobs, **end, **ids}
