"""The user's side of the engine: turn prompts into requests for the core, and its outputs into
text.

`LLMEngine` drives a core step by step, and `AsyncLLM` serves an event loop. Both are front ends
with a client of the core.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.config import ModelConfig
from minivllm.core.engine_messages import EngineCoreOutputs, EngineCoreRequest
from minivllm.core.lora_request import LoRARequest
from minivllm.core.stats import SchedulerStats, summed_stats
from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.core_client import EngineCoreClient
from minivllm.engine.generation_config import GenerationConfig
from minivllm.engine.input_processor import InputProcessor
from minivllm.engine.output_processor import OutputProcessor
from minivllm.engine.parallel_sampling import ParentRequest, child_requests
from minivllm.engine.throughput_log import ThroughputLog
from minivllm.errors import MinivllmError
from minivllm.inputs import Prompt
from minivllm.models.tokenizer import load_tokenizer, load_transformers_tokenizer
from minivllm.outputs import RequestOutput
from minivllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from minivllm.engine.prometheus import PrometheusStatLogger


class FrontEnd(ABC):
    """The input processor, the output processor, and the mapping from the user's requests to the
    core's. Methods that ask the cores return their answer, or with `AsyncLLM` an awaitable of it.
    """

    def __init__(self, args: EngineArgs, client: EngineCoreClient) -> None:
        self.engine_args = args
        self.model_name = Path(args.model).name
        self.model_config = ModelConfig.from_pretrained(args.model)
        self.tokenizer = None if args.skip_tokenizer_init else load_tokenizer(args.tokenizer or args.model)
        """The library's own, which is what the engine works with."""
        self._transformers_tokenizer: PreTrainedTokenizerBase | None = None
        self.generation_config = GenerationConfig.of(args.model, self.model_config, self.tokenizer)
        self.engine_stats: list[SchedulerStats] = [engine.scheduler_stats for engine in client.engines]
        """The state of each core's scheduler after its last step. Reading it resets nothing."""
        self.input_processor = InputProcessor(
            self.model_config, self.tokenizer, client.ready.limits, self.generation_config.eos_token_ids, args.seed
        )
        self.input_processor.enable_lora = args.enable_lora
        self.parts = args.parts
        self.output_processor = OutputProcessor(self.tokenizer, args.parts)
        self._children: dict[str, list[str]] = {}
        """The core's ids of each unfinished request, by the user's id."""
        self._throughput_log = ThroughputLog()
        self.stat_logger: PrometheusStatLogger | None = None
        """Records what was measured, after each step; None: nobody asks for metrics."""
        self.step_watchers: list[Callable[[int, str], None]] = []
        """Called with a core's index and a line of `engine.step_recorder`, after
        `start_step_events`.
        """

    @property
    def stats(self) -> SchedulerStats:
        """The state after the last step, of all cores' schedulers together. Reading it resets
        nothing.
        """
        return summed_stats(self.engine_stats)

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the transformers tokenizer, loading it on first use.

        Raises:
            MinivllmError: there is none, or transformers cannot load it.
        """
        if self.tokenizer is None:
            raise MinivllmError("there is no tokenizer: skip_tokenizer_init is on")
        if self._transformers_tokenizer is None:
            self._transformers_tokenizer = load_transformers_tokenizer(
                self.engine_args.tokenizer or self.engine_args.model
            )
        return self._transformers_tokenizer

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> Any:
        """Forget all cached blocks. Do nothing and return False while any request holds a block.

        With `reset_running_requests`, the requests that hold blocks wait again and are recomputed
        from their first token. With `reset_connector`, what the KV connector has stored elsewhere
        is forgotten too.
        """
        return self._utility("reset_prefix_cache", reset_running_requests, reset_connector)

    def add_lora(self, lora_request: LoRARequest) -> Any:
        """Load an adapter from its folder into host memory, unless it is already there; with
        `load_inplace`, load it again. A request that names an adapter loads it by itself.

        Raises:
            MinivllmError: it cannot be served.
        """
        self.input_processor.check_lora(lora_request)
        return self._utility("add_lora", lora_request)

    def remove_lora(self, lora_id: int) -> Any:
        """Remove an adapter once the requests that use it have ended; return whether it was loaded."""
        return self._utility("remove_lora", lora_id)

    def pin_lora(self, lora_id: int) -> Any:
        """Keep an adapter in its slot until it is removed.

        Raises:
            MinivllmError: it is not there, or no slot is free for it.
        """
        return self._utility("pin_lora", lora_id)

    def has_unfinished_requests(self) -> bool:
        """Return whether any request is unfinished."""
        return bool(self.output_processor.states)

    def get_num_unfinished_requests(self) -> int:
        """Return the number of unfinished requests, counting each of `n` completions."""
        return len(self.output_processor.states)

    @abstractmethod
    def _utility(self, method: str, *arguments: Any) -> Any:
        """Call a method of every core by name; return the result, or an awaitable of it."""

    def _process_inputs(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        priority: int,
        lora_request: LoRARequest | None = None,
    ) -> tuple[str | None, EngineCoreRequest]:
        """Return the prompt's text and its request, before it is split into `params.n`.

        Raises:
            MinivllmError: the request is invalid.
        """
        if not isinstance(request_id, str):
            raise MinivllmError(f"the request id is {request_id!r}; it must be a string")
        if request_id in self._children:
            raise MinivllmError(f"request {request_id!r} exists already; ids must be unique among unfinished requests")
        return self.input_processor.process_inputs(
            request_id, prompt, params, priority=priority, lora_request=lora_request
        )

    def _register(self, request_id: str, text: str | None, request: EngineCoreRequest) -> Iterator[EngineCoreRequest]:
        """Yield the core's requests for a request, and expect the outputs of each from then on."""
        if not self.has_unfinished_requests():
            # Idle time must not look like low throughput.
            self._throughput_log.begin()
        parent = ParentRequest(request_id, request.sampling_params.n)
        children = self._children[request_id] = []
        for index, child in enumerate(child_requests(request)):
            if self._children.get(request_id) is not children:
                return  # It was aborted meanwhile.
            children.append(child.request_id)
            self.output_processor.add_request(child, text, index, parent)
            yield child

    def _forget(self, request_ids: Iterable[str]) -> list[str]:
        """Stop expecting outputs of these requests; return the core's ids for them."""
        children = [child for request_id in request_ids for child in self._children.pop(request_id, ())]
        self.output_processor.abort_requests(children)
        return children

    def _finish(self, shown: list[RequestOutput], outputs: EngineCoreOutputs) -> None:
        """Record the requests that have ended, and the scheduler's state."""
        for output in shown:
            if output.finished:
                self._children.pop(output.request_id, None)
        if outputs.step_snapshot:
            for watcher in self.step_watchers:
                watcher(outputs.engine_index, outputs.step_snapshot)
        if outputs.scheduler_stats is not None:
            self._take_stats(outputs.scheduler_stats, outputs.engine_index)
        if outputs.kv_connector_stats and self.stat_logger is not None:
            self.stat_logger.record_kv_connector(outputs.kv_connector_stats, outputs.engine_index)

    def _take_stats(self, stats: SchedulerStats, engine_index: int) -> None:
        """Record a core's state, and the measurements of its requests."""
        self.engine_stats[engine_index] = stats
        iteration = self.output_processor.take_stats(engine_index)
        self._throughput_log.observe(iteration.num_prompt_tokens, iteration.num_generation_tokens, self.stats)
        if self.stat_logger is not None:
            self.stat_logger.record(stats, iteration, engine_index)
            if self.engine_args.enable_lora:
                self.stat_logger.record_loras(*self.output_processor.lora_names())
