"""`LLM`: a model, prompts, completions. In vLLM v0.33.0: `vllm/entrypoints/llm.py` (`LLM`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from tqdm.auto import tqdm

from minivllm.config import EMBEDDED_MODEL
from minivllm.config.checks import require
from minivllm.config.model_files import local_path
from minivllm.core.lora_request import LoRARequest
from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.call_lock import CallLock
from minivllm.engine.llm_engine import LLMEngine
from minivllm.errors import MinivllmError
from minivllm.inputs import Prompt, TokensPrompt, as_prompts
from minivllm.logger import init_logger
from minivllm.outputs import RequestOutput
from minivllm.platforms.interrupts import InterruptsHeld
from minivllm.sampling_params import RequestOutputKind, SamplingParams

logger = init_logger(__name__)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
LoraRequests = LoRARequest | Sequence[LoRARequest | None] | None
Params = SamplingParams | Sequence[SamplingParams] | None
UseTqdm = bool | Callable[..., Any]
Row = tuple[Any, SamplingParams, int, LoRARequest | None]
"""A prompt, its parameters, its priority and its adapter."""


class LLM:
    """Offline generation.

    llm = LLM("path/to/model", max_model_len=1024)
    for output in llm.generate(["def add(a, b):"], SamplingParams(temperature=0.0, max_tokens=32)):
        print(output.outputs[0].text)

    It serves one call at a time. A call that fails leaves nothing queued.
    """

    def __init__(self, model: str | Path, *, chat_template: str | Path | None = None, **engine_args: Any) -> None:
        """Load the model, allocate the KV cache and log where the memory goes.

        Args:
            model: a local directory, or a model's name on the Hugging Face Hub.
            chat_template: a file or a template, in place of the model's own.
            engine_args: see `minivllm.engine.arg_utils.EngineArgs`.

        Raises:
            MinivllmError: an argument is invalid, or one request of `max_model_len` does not fit
                into the KV cache.
            UnsupportedModelError: the decoder does not support this model.
        """
        self.llm_engine = LLMEngine(EngineArgs(model=model, **engine_args))
        self._chat_template = chat_template
        self._request_ids = itertools.count()
        self._call_lock = CallLock()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLM:
        """Create an `LLM` from engine arguments."""
        return cls(**{field.name: getattr(engine_args, field.name) for field in fields(engine_args)})

    # Generating

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoraRequests = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Return the completions of all prompts, in order.

        Args:
            prompts: one or several; each a string, a list of token ids, {"prompt": …} or
                {"prompt_token_ids": …}.
            sampling_params: one for all prompts, or one for each; None: the model's own defaults.
            use_tqdm: whether to show a progress bar, or a class that makes one, such as tqdm.
            priority: one number for all or for each prompt, for the scheduling policy "priority";
                lower goes first.
            lora_request: the adapter of all prompts, or one (or None) for each; the engine needs
                `enable_lora`.

        Raises:
            MinivllmError: a prompt or its parameters are invalid, and nothing was computed; or no
                prompt has an answer, because each failed while it ran. If only some did, nothing is
                raised: the others keep their answers, and the completions of those that failed have
                the finish reason "error" and the message in `error`.
        """
        each = as_prompts(prompts)
        columns = {
            "sampling_params": self.get_default_sampling_params() if sampling_params is None else sampling_params,
            "priority": 0 if priority is None else priority,
            "lora_request": lora_request,
        }
        rows = list(zip(each, *(_one_each(name, value, each) for name, value in columns.items()), strict=True))
        # Ctrl-C is held for the call, and let through between two steps.
        with self._call_lock.held() as interrupts, closing(_bar(use_tqdm, "prompts", len(rows))) as bar:
            return _answers(self._complete(rows, bar, interrupts))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoraRequests = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: Literal["auto", "string", "openai"] = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Return the answers to one or more conversations, in order. Everything else is as in
        `generate`.

        Args:
            messages: a list of messages such as {"role": "user", "content": "…"}, or several such
                lists.
            chat_template: turns messages into a prompt, in Jinja; by default the model's own. As in
                the constructor.
            chat_template_content_format: a message's content is "string" or (parts) "openai";
                "auto": as the template expects it.
            add_generation_prompt: let the template add the beginning of an answer.
            continue_final_message: leave the last message open, so that the answer continues it.
            tools: definitions of functions that the template shows to the model.
            chat_template_kwargs: further variables for the template.

        Raises:
            MinivllmError: there is no template, or it rejects the messages; or as in `generate`.
        """
        # They bring Jinja.
        from minivllm.entrypoints.openai.chat_template import NO_TEMPLATE, PLAIN, read_template, render, special_tokens

        is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
        require(is_list, f"messages are {type(messages).__name__}; they must be a list of messages, or of lists")
        wrong = f"chat_template_kwargs are {type(chat_template_kwargs).__name__}; they must be a dictionary or None"
        require(isinstance(chat_template_kwargs, Mapping | None), wrong)
        template = self._chat_template if chat_template is None else chat_template
        wrong = f"chat_template is {type(template).__name__}; it must be a template or a file's name"
        require(isinstance(template, str | Path | None), wrong)
        args = self.llm_engine.engine_args
        source = args.tokenizer or args.model
        plain = PLAIN if local_path(args.model) == EMBEDDED_MODEL else None
        text = read_template(None if template is None else str(template), source) or plain
        if text is None:
            raise MinivllmError(NO_TEMPLATE)
        seen = {**special_tokens(source), **(chat_template_kwargs or {})}
        seen |= {"add_generation_prompt": add_generation_prompt, "tools": tools}
        conversations: list[Any] = [messages] if not messages or isinstance(messages[0], Mapping) else list(messages)
        form, encode = chat_template_content_format, self.llm_engine.input_processor.encode
        prompts = [render(text, each, seen, continue_final_message, form) for each in conversations]
        return self.generate(
            # The template has written the special tokens.
            [TokensPrompt(prompt=prompt, prompt_token_ids=encode(prompt, False)) for prompt in prompts],
            sampling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            priority=priority,
        )

    # What there is besides

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the transformers tokenizer. The engine's own is `llm_engine.tokenizer`."""
        return self.llm_engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters that `generate` uses by default: the model's generation
        config.
        """
        return self.llm_engine.generation_config.default_sampling_params()

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached blocks; return whether it succeeded. See
        `LLMEngine.reset_prefix_cache`.
        """
        with self._call_lock.held():
            return self.llm_engine.reset_prefix_cache(reset_running_requests, reset_connector)

    def shutdown(self) -> None:
        """Stop this LLM's processes now; it cannot be used afterwards. Without this call, they end
        when the LLM is deleted or Python exits.

        An LLM that runs entirely in this process has no processes to stop, and remains usable.
        """
        with self._call_lock.held():
            self.llm_engine.shutdown()

    def __repr__(self) -> str:
        return f"LLM({str(self.llm_engine.engine_args.model)!r})"

    # Requests

    def _complete(self, rows: list[Row], bar: Any, interrupts: InterruptsHeld) -> list[RequestOutput]:
        """Queue all prompts, and run steps until all have ended. If anything fails, none stays queued."""
        request_ids = [str(next(self._request_ids)) for _ in rows]
        finished: dict[str, RequestOutput] = {}
        try:
            self._add_requests(request_ids, rows, interrupts)
            while self.llm_engine.has_unfinished_requests():
                interrupts.deliver()
                for output in self.llm_engine.step():
                    finished[output.request_id] = output
                    bar.update(1)
        except BaseException:
            self.llm_engine.abort_request(request_ids)
            raise
        return [finished[request_id] for request_id in request_ids]

    def _add_requests(self, request_ids: list[str], rows: list[Row], interrupts: InterruptsHeld) -> None:
        for index, (prompt, params, priority, adapter) in enumerate(rows):
            interrupts.deliver()
            if isinstance(params, SamplingParams):
                # Intermediate outputs would be made and thrown away.
                params = replace(params, output_kind=RequestOutputKind.FINAL_ONLY)
            try:
                self.llm_engine.add_request(request_ids[index], prompt, params, lora_request=adapter, priority=priority)
            except MinivllmError as error:
                raise type(error)(f"prompt {index}: {error}") from None


def _bar(use_tqdm: UseTqdm, what: str, total: int) -> Any:
    if callable(use_tqdm):
        return use_tqdm(total=total, desc=what)
    if not use_tqdm:  # tqdm would start a thread even for a bar that is disabled
        return SimpleNamespace(update=lambda done: None, close=lambda: None)
    # None: only on a terminal and in a notebook. In a file, a bar would be thousands of lines.
    return tqdm(total=total, desc=what, leave=False, disable=None)


def _answers(outputs: list[RequestOutput]) -> list[RequestOutput]:
    """Return the outputs, and log a warning for each that has an error; raise if all of them
    failed.
    """
    # Some answers are worth returning; with none at all, an exception is clearer.
    nothing = all(completion.error for output in outputs for completion in output.outputs)
    for index, output in enumerate(outputs):
        error = next((completion.error for completion in output.outputs if completion.error), None)
        if error and nothing:
            raise MinivllmError(f"prompt {index}: {error}")
        if error:
            logger.warning("Prompt %d failed, and its output has the finish reason 'error': %s", index, error)
    return outputs


def _one_each(name: str, value: Any, prompts: Sequence[object]) -> list[Any]:
    """Return one value per prompt, repeating a single value; raise if a list's length differs from
    that of `prompts`.
    """
    if isinstance(value, list | tuple):
        if len(value) != len(prompts):
            raise MinivllmError(
                f"there are {len(prompts)} prompts, but {len(value)} in {name}: give one for each, or one for all"
            )
        return list(value)
    return [value] * len(prompts)
