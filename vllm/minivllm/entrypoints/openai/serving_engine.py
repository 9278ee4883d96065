"""Turn a client's request into engine requests, for completions and chats alike.

In vLLM v0.33.0: `vllm/entrypoints/generate/base/serving.py`,
`vllm/entrypoints/serve/utils/api_utils.py`.
"""

import asyncio
import itertools
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from minivllm.config.checks import encodable
from minivllm.engine.async_llm import AsyncLLM
from minivllm.engine.socket_messages import encode
from minivllm.entrypoints.openai.answer import Answer, EngineRequests, TokenizedPrompt, as_stream
from minivllm.entrypoints.openai.chat_template import no_template, render, special_tokens
from minivllm.entrypoints.openai.constraints import constraint_of
from minivllm.entrypoints.openai.errors import unavailable
from minivllm.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    ChatTemplateRequest,
    CompletionRequest,
    GenerationRequest,
    WholeReply,
)
from minivllm.entrypoints.openai.serving_models import OpenAIServingModels
from minivllm.entrypoints.openai.settings import FrontendArgs
from minivllm.entrypoints.openai.stream import EventStream
from minivllm.errors import MinivllmError
from minivllm.inputs import TokensPrompt
from minivllm.sampling_params import MAX_N, SamplingParams
from minivllm.structured_output.grammar_text import check_grammar

CHARACTERS_IN_LOOP = 4096
"""A longer text is tokenized in a thread, so that it holds up nobody; as many tokens are turned
into text there.
"""
MAX_RANK_DIGITS = 6
NOT_SERVED = ("use_beam_search", "logprob_token_ids", "repetition_detection", "thinking_token_budget")
"""Fields of vLLM's that are not ignored, as unknown ones are: the answer would be another than
was asked for.
"""


class OpenAIServing:
    """The base of the generating endpoints: the engine, the model's names, and the server's
    settings.

    Every generating request goes through `create`. Completions and chats differ in how they make
    prompts of a request (`prompts_of`), and in the shape of the answer (`renderer`).
    """

    id_prefix = ""
    renderer: type[Answer]

    def __init__(
        self, engine: AsyncLLM, models: OpenAIServingModels, settings: FrontendArgs, template: str | None
    ) -> None:
        self.engine = engine
        self.models = models
        self.settings = settings
        self.template = template
        self._special_tokens = special_tokens(engine.engine_args.model)
        self.limits = engine.input_processor.limits
        self.vocab_size = engine.input_processor.vocab_size
        self.fingerprint = f"minivllm-{uuid.uuid4().hex[:8]}"
        self._defaults = engine.generation_config.sampling
        self._numbers = itertools.count()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        if self.engine.tokenizer is None:
            raise MinivllmError("the server runs with skip_tokenizer_init; it cannot handle text")
        return self.engine.tokenizer

    async def create(self, request: Any, headers: Mapping[str, str]) -> WholeReply | EventStream:
        """Answer a request, as a whole reply or as a stream.

        Raises:
            MinivllmError: the request is invalid.
            EngineDeadError: the engine has ended.
        """
        # Everything is checked before the first request is added, so a refused one leaves nothing
        # behind.
        prompts, asked = await self.prompts_of(request)
        params = [self.sampling_params(request, asked, prompt) for prompt in prompts]
        request_id = self.request_id(request, headers)
        requests = await self.start(request, request_id, prompts, params, headers)
        answer = self.renderer(self, request, request_id, prompts)
        # Nothing has been awaited yet: an error up to here is a status, later ones are events.
        if request.stream:
            return EventStream(as_stream(answer.events(requests), requests), requests.close, self.engine.parts)
        try:
            return await answer.whole(requests)
        finally:
            requests.close()

    async def prompts_of(self, request: Any) -> tuple[list[TokenizedPrompt], int | None]:
        """Return the prompts of a request, and the number of tokens that it requests; None for as
        many as fit.

        Raises:
            MinivllmError: the request asks for something that is not served.
        """
        raise NotImplementedError

    # From a client's request to the engine's

    def check(self, request: GenerationRequest, num_prompts: int) -> None:
        """Check everything that can be checked before tokenization.

        Raises:
            MinivllmError: the request asks for something that is not served.
            RequestError: it names another model, or the queue is full.
        """
        self.models.check(request.model)
        for name in NOT_SERVED:
            if getattr(request, name):
                raise MinivllmError(f"{name} is not served here", name)
        if request.kv_transfer_params:
            self._check_transfer(request.kv_transfer_params, num_prompts)
        # Each completion is a request of its own in the engine.
        total = num_prompts * max(1, request.n or 1)
        if total > MAX_N:
            raise MinivllmError(f"prompts times n is {total}; the maximum is {MAX_N}")
        self._check_logprobs("logprobs", request.num_logprobs)
        self._check_logprobs("prompt_logprobs", request.num_prompt_logprobs)
        self._admit(total)

    def _check_transfer(self, params: Mapping[str, Any], num_prompts: int) -> None:
        """Refuse params that cannot be passed to a connector; the connector itself checks their
        values.
        """
        name = "kv_transfer_params"
        if self.engine.engine_args.kv_transfer_config is None:
            raise MinivllmError(f"{name} need a server with --kv-transfer-config", name)
        if num_prompts > 1:
            raise MinivllmError(f"{name} are for one prompt, and there are {num_prompts}: send each on its own", name)
        try:
            # The same encoder as on the way to the core, which would fail there.
            encode(params)
        except (ValueError, OverflowError):  # half a character, or a number beyond 64 bits
            raise MinivllmError(f"{name} have a value that cannot be sent on", name) from None

    def sampling_params(self, request: GenerationRequest, asked: int | None, prompt: TokenizedPrompt) -> SamplingParams:
        """Return the engine's parameters for a prompt. `asked` is the maximum number of tokens to
        generate; None for as many as fit.

        Raises:
            MinivllmError: the prompt is too long, or a parameter is invalid.
        """
        longest, length = self.limits.max_model_len, len(prompt.token_ids)
        if asked is not None and asked > longest:
            raise MinivllmError(f"max_tokens is {asked}; max_model_len is {longest}", "max_tokens")
        if length > longest:
            raise MinivllmError(
                f"the prompt has {length} tokens; the model's maximum context length is {longest} tokens",
                "input_tokens",
            )
        room = longest - length
        default = self._defaults.get("max_tokens")
        limits = [room, asked, default if asked is None else None]
        max_tokens = min(count for count in limits if count is not None)
        params = request.to_sampling_params(max_tokens, self._defaults, self.vocab_size)
        params.structured_outputs = constraint_of(request)
        return params

    async def start(
        self,
        request: GenerationRequest,
        request_id: str,
        prompts: Sequence[TokenizedPrompt],
        params: Sequence[SamplingParams],
        headers: Mapping[str, str],
    ) -> EngineRequests:
        """Add all prompts to the engine's queue, or none. The engine's ids are unique, whatever ids
        clients send.

        Raises:
            MinivllmError: a request is invalid.
            EngineDeadError: the engine has ended.
        """
        requests = EngineRequests(self.engine)
        constraint = params[0].structured_outputs
        if constraint is not None:  # all have the same; in a thread, for a long grammar takes a while to check
            await asyncio.to_thread(check_grammar, constraint)
        settings = {"priority": request.priority, "data_parallel_rank": _data_parallel_rank(headers)}
        settings["lora_request"] = self.models.check(request.model)  # it may have been unloaded since
        try:
            for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
                tokens = TokensPrompt(prompt_token_ids=prompt.token_ids)
                if request.cache_salt is not None:
                    tokens["cache_salt"] = request.cache_salt
                # As vLLM's: the client's id, the prompt's index, and what tells it from others of
                # the same id.
                engine_id = f"{request_id}-{index}-{next(self._numbers)}"
                await requests.add(engine_id, tokens, one, **settings)
                await asyncio.sleep(0)  # thousands of prompts in a row would hold up everybody
        except BaseException:
            requests.close()
            raise
        return requests

    def request_id(self, request: GenerationRequest, headers: Mapping[str, str]) -> str:
        """Return the reply's id, with a prefix: the header's id, the request's, or a new one."""
        client_id = headers.get("x-request-id") or request.request_id or uuid.uuid4().hex[:16]
        return f"{self.id_prefix}-{client_id.encode('utf8', 'replace').decode()[:1024]}"

    def shows_ids(self, request: GenerationRequest) -> bool:
        """Return whether log probabilities show tokens as their ids."""
        own = request.return_tokens_as_token_ids
        return self.settings.return_tokens_as_token_ids if own is None else own

    async def tokenize_prompt(self, text: str, request: CompletionRequest | ChatCompletionRequest) -> TokenizedPrompt:
        """Return a prompt, truncated as the request specifies. A text that cannot fit is not
        tokenized in full.

        Raises:
            MinivllmError: it is too long to fit.
        """
        whole = text
        if request.truncate_prompt_tokens is None:
            self.engine.input_processor.check_length(text)
        else:
            # A text of gigabytes may be fine if only its end is wanted, but must not be tokenized
            # as a whole.
            text = self._near_the_end_kept(text, request)
        return TokenizedPrompt(self.truncated(await self.tokenize(text, request.add_special_tokens), request), whole)

    async def tokenize(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text."""
        encodable(text, "the prompt")
        tokenizer = self.tokenizer

        def encode() -> list[int]:
            # The library gives up the GIL for batches only, and without that a thread holds up
            # everybody.
            return tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids

        # A thread costs about as much as tokenizing a short text.
        return encode() if len(text) < CHARACTERS_IN_LOOP else await asyncio.to_thread(encode)

    async def detokenize(self, token_ids: list[int]) -> str:
        """Return the text of token ids, special tokens included."""
        tokenizer = self.tokenizer

        def decode() -> str:
            return tokenizer.decode_batch([token_ids], skip_special_tokens=False)[0]  # as in `tokenize`

        return decode() if len(token_ids) < CHARACTERS_IN_LOOP else await asyncio.to_thread(decode)

    def truncated(self, token_ids: list[int], request: GenerationRequest) -> list[int]:
        """Return the tokens that `truncate_prompt_tokens` keeps, from either end of the prompt; -1
        keeps as many as fit.
        """
        most = request.truncate_prompt_tokens
        if most is None:
            return token_ids
        longest = self.limits.max_model_len
        if most == 0 or most > longest:
            raise MinivllmError(
                f"truncate_prompt_tokens is {most}; it must be from 1 to {longest}, or -1", "truncate_prompt_tokens"
            )
        kept = longest if most == -1 else most
        return token_ids[:kept] if request.truncation_side == "right" else token_ids[-kept:]

    def _near_the_end_kept(self, text: str, request: GenerationRequest) -> str:
        """Return the part of a very long text that holds all tokens to keep, plus a margin of the
        same length.

        Cutting the text changes its tokenization, but only next to the cut.
        """
        most = 2 * self.engine.input_processor.max_prompt_characters
        return text[:most] if request.truncation_side == "right" else text[-most:]

    def rendered(self, request: ChatTemplateRequest, **further: Any) -> str:
        """Return the prompt for a conversation.

        Raises:
            MinivllmError: there is no template, or it rejects the messages, or the request brings
                one of its own.
        """
        variables = request.chat_template_kwargs or {}
        own = request.chat_template or variables.get("chat_template")
        if own and not self.settings.trust_request_chat_template:
            raise MinivllmError("a request's own chat_template is served only with --trust-request-chat-template")
        template = own or self.template
        if template is None:
            raise MinivllmError(no_template(self.engine.engine_args.model))
        seen = {
            **self._special_tokens,
            "add_generation_prompt": request.add_generation_prompt,
            "tools": [tool.model_dump(exclude_none=True) for tool in request.tools] if request.tools else None,
            "documents": request.documents,
            **further,
            # A client may set any variable of the template but the messages.
            **{name: value for name, value in variables.items() if name not in ("messages", "chat_template")},
        }
        form = self.settings.chat_template_content_format
        return render(template, request.messages, seen, request.continue_final_message, form)

    def _check_logprobs(self, name: str, asked: int | None) -> None:
        most = self.vocab_size if self.settings.max_logprobs == -1 else self.settings.max_logprobs
        number = self.vocab_size if asked == -1 else asked or 0
        if number > most:
            raise MinivllmError(f"{name} asks for {number} tokens per position; the server allows {most}", name)

    def _admit(self, number: int) -> None:
        """Refuse new requests while too many are unfinished, and count the rejections."""
        settings = self.settings
        processor = self.engine.output_processor
        limits = (
            ("max_num_queued_reqs", settings.max_num_queued_reqs, lambda: len(processor.states) + number),
            ("max_num_queued_tokens", settings.max_num_queued_tokens, lambda: processor.num_prompt_tokens() + 1),
        )
        for name, most, would_be in limits:
            # Counting tokens goes through all requests, so it is done only where there is a limit.
            if most is not None and would_be() > most:
                if self.engine.stat_logger is not None:
                    self.engine.stat_logger.record_rejection(name)
                raise unavailable(f"the server's queue is full ({name} is {most}); try again later")


def _data_parallel_rank(headers: Mapping[str, str]) -> int | None:
    """Return the core that an upstream router has chosen, if any."""
    header = headers.get("x-data-parallel-rank")
    if header is None:
        return None
    # No core has a number that long, and Python refuses to convert thousands of digits.
    if not header.isdecimal() or len(header) > MAX_RANK_DIGITS:
        raise MinivllmError(f"the header X-data-parallel-rank is {header[:20]!r}; it must be a core's number")
    return int(header)
