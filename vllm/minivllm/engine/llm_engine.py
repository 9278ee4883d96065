"""The engine that one calls step by step: prompts in, what they have become so far out.

In vLLM v0.33.0: `vllm/v1/engine/llm_engine.py` (`LLMEngine`).
"""

from collections.abc import Iterable

from minivllm.core.stats import SchedulerStats
from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.core import EngineCore
from minivllm.engine.generation_config import GenerationConfig
from minivllm.engine.input_processor import InputProcessor
from minivllm.engine.output_processor import OutputProcessor
from minivllm.engine.parallel_sampling import ParentRequest, child_requests
from minivllm.errors import MinivllmError
from minivllm.inputs import Prompt
from minivllm.models.tokenizer import load_tokenizer
from minivllm.outputs import RequestOutput
from minivllm.sampling_params import SamplingParams


class LLMEngine:
    """Input processor, core and output processor, in one process; the model's ranks, if it has several, in others."""

    def __init__(self, args: EngineArgs) -> None:
        self.core = EngineCore(args)
        self.tokenizer = None if args.skip_tokenizer_init else load_tokenizer(args.tokenizer or args.model)
        self.model_config = self.core.model_config
        self.max_model_len = self.core.scheduler.config.max_model_len
        self.generation_config = GenerationConfig.of(args.model, self.model_config)
        self.input_processor = InputProcessor(
            self.model_config, self.tokenizer, self.max_model_len, self.generation_config.eos_token_ids, args.seed
        )
        self.output_processor = OutputProcessor(self.tokenizer)
        self._children: dict[str, list[str]] = {}

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
    ) -> None:
        """Puts a prompt into the queue; `params.n` completions of it.

        Raises:
            MinivllmError: it cannot be run; nothing of it is in the queue then.
        """
        if not isinstance(request_id, str):
            raise MinivllmError(f"the request id is {request_id!r}; it must be a text")
        text, request = self.input_processor.process_inputs(request_id, prompt, params, priority=priority)
        parent = ParentRequest(request_id, params.n)
        children = child_requests(request)
        ids = [child.request_id for child in children]
        in_use = self._children.keys() | self.output_processor.states.keys()
        taken = next((name for name in (request_id, *ids) if name in in_use), None)
        if taken is not None:
            raise MinivllmError(f"request {taken!r} exists already; ids must be unique among unfinished requests")
        self._children[request_id] = ids
        try:
            for index, child in enumerate(children):
                self.core.add_request(child)
                self.output_processor.add_request(child, text, index, parent)
        except BaseException:
            self.abort_requests([request_id])
            raise

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Ends requests without further output; unknown ids are ignored."""
        children = [child for request_id in request_ids for child in self._children.pop(request_id, ())]
        self.output_processor.abort_requests(children)
        self.core.abort_requests(children)

    def has_unfinished_requests(self) -> bool:
        """Whether any request still wants a step."""
        return self.core.has_unfinished_requests()

    def step(self) -> list[RequestOutput]:
        """One step of the core; returns the requests about which there is something to say."""
        shown, to_abort = self.output_processor.process_outputs(self.core.step())
        if to_abort:
            self.core.abort_requests(to_abort)
        for output in shown:
            if output.finished:
                del self._children[output.request_id]
        return shown

    def make_stats(self) -> SchedulerStats:
        """The scheduler's state now."""
        return self.core.make_stats()

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached blocks. Returns False, and does nothing, while any request runs."""
        return self.core.reset_prefix_cache()

    def shutdown(self) -> None:
        """Ends what the engine has started; it can do nothing after that."""
        self.core.shutdown()
