"""Check clients' requests, and turn texts and conversations into prompts.

In vLLM v0.33.0: `vllm/entrypoints/generate/base/serving.py`,
`vllm/entrypoints/serve/tokenize/serving.py`, `vllm/entrypoints/serve/utils/api_utils.py`.
"""

import asyncio
import itertools
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from minivllm.config.checks import encodable, require
from minivllm.config.kv_offloading import is_tier
from minivllm.engine.async_llm import AsyncLLM
from minivllm.engine.socket_messages import encode
from minivllm.entrypoints.openai import protocol
from minivllm.entrypoints.openai.chat_template import NO_TEMPLATE, render_in_thread, special_tokens
from minivllm.entrypoints.openai.constraints import constraint_of
from minivllm.entrypoints.openai.errors import RequestError
from minivllm.entrypoints.openai.serving_models import OpenAIServingModels
from minivllm.entrypoints.openai.settings import FrontendArgs
from minivllm.entrypoints.openai.stream import Result
from minivllm.errors import MinivllmError
from minivllm.inputs import TokensPrompt
from minivllm.sampling_params import MAX_N, SamplingParams

CHARACTERS_IN_LOOP = 4096
"""A longer text is tokenized in a thread, so that other clients need not wait; as many tokens are
turned into text there.
"""
MIN_TOKENIZED_CHARACTERS, CHARACTERS_PER_TOKEN = 2**20, 8
"""A text may have as many characters as the longest prompt of tokens with eight characters each."""
SECONDS_TO_RENDER = 10.0


class OpenAIServing:
    """The engine, its limits, its tokenizer and its template, which every answer needs."""

    def __init__(self, engine: AsyncLLM, settings: FrontendArgs, template: str | None) -> None:
        self.engine, self.settings, self.template = engine, settings, template
        self.models = OpenAIServingModels(engine, settings)
        self._special_tokens = special_tokens(engine.engine_args.model)
        processor = engine.input_processor
        self.max_model_len, self.vocab_size = processor.limits.max_model_len, processor.vocab_size
        self.fingerprint = f"minivllm-{uuid.uuid4().hex[:8]}"
        self.numbers = itertools.count()
        """Counts the prompts: its numbers make the engine's ids unique, whatever ids clients send."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        if self.engine.tokenizer is None:
            raise MinivllmError("the server runs with skip_tokenizer_init; it cannot handle text")
        return self.engine.tokenizer

    async def create_tokenize(self, request: protocol.TokenizeRequest) -> dict[str, Any]:
        """Return the token ids of a text or of a conversation.

        Raises:
            MinivllmError: the request is invalid.
        """
        self.models.check(request.model)
        is_chat = isinstance(request, protocol.TokenizeChatRequest)
        text = await self.rendered(request) if is_chat else request.prompt
        token_ids = await self.tokenize(text, request.add_special_tokens)
        names = None
        if request.return_token_strs:
            spelling = self.tokenizer.id_to_token
            names = await asyncio.to_thread(lambda: [spelling(token) or "" for token in token_ids])
        return {"count": len(token_ids), "max_model_len": self.max_model_len, "tokens": token_ids, "token_strs": names}

    async def create_detokenize(self, request: protocol.DetokenizeRequest) -> dict[str, Any]:
        """Return the text of token ids."""
        self.models.check(request.model)
        return {"prompt": await self.detokenize(request.tokens)}

    # From a client's request to the engine's

    def check(self, request: protocol.GenerationRequest) -> None:
        """Check everything that can be checked before tokenization.

        Raises:
            MinivllmError: the request asks for something that is not served.
            RequestError: it names another model, or the queue is full.
        """
        self.models.check(request.model)
        num_prompts = len(request.prompts) if isinstance(request, protocol.CompletionRequest) else 1
        if request.kv_transfer_params:
            self.check_transfer(request.kv_transfer_params, num_prompts)
        # Each completion is a request of its own in the engine.
        total = num_prompts * max(1, request.n or 1)
        require(total <= MAX_N, f"prompts times n is {total}; the maximum is {MAX_N}")
        most = self.vocab_size if self.settings.max_logprobs == -1 else self.settings.max_logprobs
        for name, asked in zip(("logprobs", "prompt_logprobs"), request.num_logprobs, strict=True):
            number = self.vocab_size if asked == -1 else asked or 0
            require(number <= most, f"{name} asks for {number} tokens per position; the server allows {most}", name)
        self.check_queue(total)

    def check_queue(self, total: int) -> None:
        """Refuse this many more requests to the engine if its queue has no room.

        Raises:
            RequestError: the queue is full.
        """
        most = self.settings.max_num_queued_reqs
        if most is not None and len(self.engine.output_processor.states) + total > most:
            if self.engine.stat_logger is not None:
                self.engine.stat_logger.record_rejection("max_num_queued_reqs")
            raise RequestError(f"the server's queue is full (max_num_queued_reqs is {most}); try again later", 503)

    def check_transfer(self, params: Mapping[str, Any], num_prompts: int) -> None:
        """Refuse params that cannot be passed to a connector; the connector itself checks their
        values.

        Raises:
            MinivllmError: there is no connector to other engines, or the params are for several
                prompts, or cannot be sent to the core.
        """
        name = "kv_transfer_params"
        transfer = self.engine.engine_args.kv_transfer
        if transfer is None:
            raise MinivllmError(f"{name} need a server with --kv-transfer-config", name)
        is_peer = not is_tier(transfer)
        require(is_peer, f"{name} need a connector to other engines, and {transfer.kv_connector} has none", name)
        require(num_prompts == 1, f"{name} are for one prompt, and there are {num_prompts}: send each on its own", name)
        try:
            # The same encoder as on the way to the core, which would fail there.
            encode(params)
        except (ValueError, OverflowError):  # half a character, or a number beyond 64 bits
            raise MinivllmError(f"{name} have a value that cannot be sent on", name) from None

    def sampling_params(self, request: protocol.GenerationRequest, prompt: TokensPrompt) -> SamplingParams:
        """Return the engine's parameters for a prompt.

        Raises:
            MinivllmError: the prompt is too long, or a parameter is invalid.
        """
        longest, length = self.max_model_len, len(prompt["prompt_token_ids"])
        name, max_tokens = request.token_limit
        require((max_tokens or 0) <= longest, f"{name} is {max_tokens}; max_model_len is {longest}", name)
        message = f"the prompt has {length} tokens; the model's maximum context length is {longest} tokens"
        require(length <= longest, message, "input_tokens")
        room, defaults = longest - length, self.engine.generation_config.sampling
        if max_tokens is None:
            max_tokens = defaults.get("max_tokens", room)
        params = request.to_sampling_params(min(max_tokens, room), defaults, self.vocab_size)
        params.structured_outputs = constraint_of(request)
        return params

    # Prompts

    async def tokenize_prompt(self, text: str, add_special_tokens: bool) -> TokensPrompt:
        """Return a prompt. A text that cannot fit is not tokenized.

        Raises:
            MinivllmError: it is too long to fit.
        """
        self.engine.input_processor.check_length(text)
        token_ids = await self.tokenize(text, add_special_tokens)
        return TokensPrompt(prompt_token_ids=token_ids, prompt=text)

    async def tokenize(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text.

        Raises:
            MinivllmError: it is very long. The library frees a long text's tokens in one go, which
                holds up everybody.
        """
        most = max(MIN_TOKENIZED_CHARACTERS, CHARACTERS_PER_TOKEN * self.max_model_len)
        message = f"the text has {len(text):,} characters; at most {most:,} are tokenized here"
        require(len(text) <= most, message, "input_text")
        encodable(text, "the prompt")
        encode_batch = self.tokenizer.encode_batch
        # The library releases the GIL for batches only; without that, a thread blocks all others.
        return await _beside_the_loop(lambda: encode_batch([text], add_special_tokens=add_special_tokens)[0].ids, text)

    async def detokenize(self, token_ids: list[int]) -> str:
        """Return the text of token ids, special tokens included; ids outside the vocabulary add none."""
        decode_batch = self.tokenizer.decode_batch
        known = [token for token in token_ids if token < self.vocab_size]  # it would raise for others
        return await _beside_the_loop(lambda: decode_batch([known], skip_special_tokens=False)[0], token_ids)

    async def rendered(self, request: protocol.ChatTemplateRequest, **further: Any) -> str:
        """Return the prompt for a conversation.

        Raises:
            MinivllmError: there is no template, it rejects the messages, or it takes too long.
        """
        if self.template is None:
            raise MinivllmError(NO_TEMPLATE)
        tools = [tool.model_dump(exclude_none=True) for tool in request.tools or ()] or None
        variables = {**self._special_tokens, "add_generation_prompt": request.add_generation_prompt, "tools": tools}
        variables |= {"documents": request.documents, **further, **(request.chat_template_kwargs or {})}
        # A client may set any variable of the template but the messages.
        variables.pop("messages", None)
        goes_on, form = request.continue_final_message, self.settings.chat_template_content_format
        return await render_in_thread(SECONDS_TO_RENDER, self.template, request.messages, variables, goes_on, form)


async def _beside_the_loop(work: Callable[[], Result], size: Sequence[Any]) -> Result:
    """Return the result of work on something of this size. A thread costs about as much as
    tokenizing a short text.
    """
    return work() if len(size) < CHARACTERS_IN_LOOP else await asyncio.to_thread(work)
