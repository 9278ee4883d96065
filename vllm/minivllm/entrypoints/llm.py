"""`LLM`: a model, prompts, completions. In vLLM v0.33.0: `vllm/entrypoints/llm.py` (`LLM.generate`)."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich import get_console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tokenizers import Tokenizer

from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.llm_engine import LLMEngine
from minivllm.engine.one_caller import OneCaller
from minivllm.errors import MinivllmError
from minivllm.inputs import Prompt, as_prompts
from minivllm.outputs import RequestOutput
from minivllm.platforms.interrupts import InterruptsHeld
from minivllm.sampling_params import RequestOutputKind, SamplingParams

POOLING = "minivllm generates text; models that embed, score or classify are not served"
NOT_SERVED = {
    "chat": "put the messages into a prompt yourself, and call generate",
    "beam_search": "minivllm.lab.beam_search has it for lesson 02",
    "get_metrics": "llm.llm_engine.stats has the scheduler's state and counts",
    **dict.fromkeys(("encode", "embed", "classify", "score", "reward"), POOLING),
    **dict.fromkeys(("sleep", "wake_up", "collective_rpc", "apply_model"), "there is nothing like it here"),
}
"""Methods of vLLM's `LLM` that this one lacks, and what there is instead."""


class LLM:
    """Offline generation.

    llm = LLM("path/to/model", max_model_len=1024)
    for output in llm.generate(["def add(a, b):"], SamplingParams(temperature=0.0, max_tokens=32)):
        print(output.outputs[0].text)
    """

    def __init__(self, model: str | Path, **engine_args: Any) -> None:
        """Loads the model, allocates the KV cache and logs where the memory goes.

        Args:
            model: a local directory, or a model's name on the Hugging Face Hub.
            engine_args: see `minivllm.engine.arg_utils.EngineArgs`.

        Raises:
            MinivllmError: an argument is invalid, or one request of `max_model_len` does not fit into the KV cache.
            UnsupportedModelError: the decoder does not support this model.
        """
        self.llm_engine = LLMEngine(EngineArgs(model=model, **engine_args))
        self._request_ids = itertools.count()
        self._caller = OneCaller()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Returns the completions of all prompts, in order.

        Args:
            prompts: one or several; each a string, a list of token ids, {"prompt": …} or {"prompt_token_ids": …}.
            sampling_params: one for all prompts, or one for each; None: the model's own defaults.
            use_tqdm: show a progress bar. (The name is vLLM's; the bar is rich's.)
            priority: one number per prompt, for the scheduling policy "priority"; lower goes first.

        Raises:
            MinivllmError: a prompt or its parameters are invalid, and nothing was computed; or a request failed while
                it ran. Either way, nothing stays queued.
        """
        with self._caller.alone() as interrupts:
            items = as_prompts(prompts)
            wanted = self.get_default_sampling_params() if sampling_params is None else sampling_params
            params = _one_each("sampling_params", wanted, items)
            priorities = _one_each("priority", 0 if priority is None else priority, items)
            request_ids = [str(next(self._request_ids)) for _ in items]
            try:
                for index, request_id in enumerate(request_ids):
                    interrupts.deliver()
                    self._add_request(index, request_id, items[index], params[index], priorities[index])
                return self._run(request_ids, use_tqdm, interrupts)
            except BaseException:
                self.llm_engine.abort_request(request_ids)
                raise

    def __getattr__(self, name: str) -> Any:
        hint = f"; {NOT_SERVED[name]}" if name in NOT_SERVED else ""
        raise AttributeError(f"minivllm's LLM has no attribute {name!r}{hint}")

    def get_tokenizer(self) -> Tokenizer | None:
        """Returns the tokenizer; None with `skip_tokenizer_init`."""
        return self.llm_engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns what `generate` uses if it is given no sampling parameters: the model's generation config."""
        return self.llm_engine.generation_config.default_sampling_params()

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached blocks; returns whether it did."""
        with self._caller.alone():
            return self.llm_engine.reset_prefix_cache()

    def shutdown(self) -> None:
        """Ends this LLM's processes now, and with them this LLM. Without this call they end with it or with Python.

        An LLM that runs in this process only has none to end, and can still be used.
        """
        with self._caller.alone():
            self.llm_engine.shutdown()

    def _add_request(self, index: int, request_id: str, prompt: Prompt, params: SamplingParams, priority: int) -> None:
        if isinstance(params, SamplingParams):
            params = replace(params, output_kind=RequestOutputKind.FINAL_ONLY)
        try:
            self.llm_engine.add_request(request_id, prompt, params, priority=priority)
        except MinivllmError as error:
            raise type(error)(f"prompt {index}: {error}") from None

    def _run(self, request_ids: Sequence[str], use_tqdm: bool, interrupts: InterruptsHeld) -> list[RequestOutput]:
        finished: dict[str, RequestOutput] = {}
        console = get_console()
        bar = _progress(disable=not (use_tqdm and (console.is_terminal or console.is_jupyter)))
        with bar:
            task = bar.add_task("prompts", total=len(request_ids), tokens=0)
            while self.llm_engine.has_unfinished_requests():
                interrupts.deliver()
                for output in self.llm_engine.step():
                    _raise_error(request_ids, output)
                    finished[output.request_id] = output
                    tokens = sum(len(completion.token_ids) for completion in output.outputs)
                    bar.update(task, advance=1, tokens=bar.tasks[task].fields["tokens"] + tokens)
        return [finished[request_id] for request_id in request_ids]


def _progress(disable: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
        TimeElapsedColumn(),
        transient=True,
        disable=disable,
    )


def _raise_error(request_ids: Sequence[str], output: RequestOutput) -> None:
    """Raises an error if a completion has ended with one."""
    error = next((completion.error for completion in output.outputs if completion.error), None)
    if error is not None:
        raise MinivllmError(f"prompt {request_ids.index(output.request_id)}: {error}")


def _one_each(name: str, value: Any, prompts: Sequence[Prompt]) -> list[Any]:
    """Returns one value per prompt, repeating a single value; raises if a list has another length than `prompts`."""
    if isinstance(value, list | tuple):
        if len(value) != len(prompts):
            raise MinivllmError(
                f"there are {len(prompts)} prompts, but {len(value)} in {name}: give one for each, or one for all"
            )
        return list(value)
    return [value] * len(prompts)
