"""The engine, driven step by step: prompts in, outputs so far out.

In vLLM v0.33.0: `vllm/v1/engine/llm_engine.py` (`LLMEngine`).
"""

from collections.abc import Iterable

from minivllm.config import ModelConfig
from minivllm.core.messages import EngineCoreOutputs
from minivllm.core.stats import SchedulerStats
from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.core_client import EngineCoreClient, InprocClient
from minivllm.engine.generation_config import GenerationConfig
from minivllm.engine.input_processor import InputProcessor
from minivllm.engine.output_processor import OutputProcessor
from minivllm.engine.parallel_sampling import ParentRequest, child_requests
from minivllm.engine.throughput_log import ThroughputLog
from minivllm.errors import MinivllmError
from minivllm.inputs import Prompt
from minivllm.models.tokenizer import load_tokenizer
from minivllm.outputs import RequestOutput
from minivllm.platforms.interrupts import InterruptsHeld
from minivllm.sampling_params import SamplingParams


class LLMEngine:
    """Input processor, client of the core, output processor. For a single caller: it has no locks."""

    def __init__(self, args: EngineArgs) -> None:
        self.model_config = ModelConfig.from_pretrained(args.model)
        self.tokenizer = None if args.skip_tokenizer_init else load_tokenizer(args.tokenizer or args.model)
        self.generation_config = GenerationConfig.of(args.model, self.model_config, self.tokenizer)
        self.engine_core = make_client(args)
        self.stats: SchedulerStats = self.engine_core.ready.scheduler_stats
        """The scheduler's state after the last step. Reading it resets nothing."""
        self.input_processor = InputProcessor(
            self.model_config,
            self.tokenizer,
            self.engine_core.ready.limits,
            self.generation_config.eos_token_ids,
            args.seed,
        )
        self.output_processor = OutputProcessor(self.tokenizer)
        self._children: dict[str, list[str]] = {}
        """The core's ids of each unfinished request, by the user's id."""
        self._throughput_log = ThroughputLog()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> "LLMEngine":
        """Same as the constructor, under vLLM's name."""
        return cls(engine_args)

    def add_request(self, request_id: str, prompt: Prompt, params: SamplingParams, *, priority: int = 0) -> None:
        """Adds a prompt to the queue, to be completed `params.n` times.

        Raises:
            MinivllmError: the request is invalid; nothing was added to the queue.
        """
        if not isinstance(request_id, str):
            raise MinivllmError(f"the request id is {request_id!r}; it must be a text")
        if request_id in self._children:
            raise MinivllmError(f"request {request_id!r} exists already; ids must be unique among unfinished requests")
        text, request = self.input_processor.process_inputs(request_id, prompt, params, priority=priority)
        parent = ParentRequest(request_id, params.n)
        children = child_requests(request)
        with InterruptsHeld():
            try:
                if not self.has_unfinished_requests():
                    self._throughput_log.begin()
                self._children[request_id] = [child.request_id for child in children]
                for index, child in enumerate(children):
                    self.output_processor.add_request(child, text, index, parent)
                    self.engine_core.add_request(child)
            except BaseException:
                self.abort_request([request_id])
                raise

    def abort_request(self, request_ids: Iterable[str]) -> None:
        """Ends requests without further output; unknown ids are ignored."""
        with InterruptsHeld(clean_up=True):
            children = [child for request_id in request_ids for child in self._children.pop(request_id, ())]
            self.output_processor.abort_requests(children)
            self.engine_core.abort_requests(children)

    def has_unfinished_requests(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.output_processor.states)

    def get_num_unfinished_requests(self) -> int:
        """Returns the number of unfinished requests, counting each of `n` completions."""
        return len(self.output_processor.states)

    def step(self) -> list[RequestOutput]:
        """Runs one step of the core; returns the outputs of requests that have something new.

        All or nothing: Ctrl-C waits for the end of the step, and if processing the outputs fails, their requests are
        aborted.
        """
        outputs: EngineCoreOutputs | None = None
        with InterruptsHeld():
            try:
                outputs = self.engine_core.get_output()
                return self._take_in(outputs)
            except BaseException:
                if outputs is not None:
                    self._give_up({output.request_id for output in outputs.outputs})
                raise

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached blocks. Does nothing and returns False while any request holds a block."""
        with InterruptsHeld():
            return self.engine_core.call_utility("reset_prefix_cache")

    def shutdown(self) -> None:
        """Ends the processes that the engine has started, if any; without them it cannot be used any more."""
        self.engine_core.shutdown()

    def _take_in(self, outputs: EngineCoreOutputs) -> list[RequestOutput]:
        shown, to_abort = self.output_processor.process_outputs(outputs.outputs)
        if to_abort:
            self.engine_core.abort_requests(to_abort)
        for output in shown:
            if output.finished:
                del self._children[output.request_id]
        if outputs.scheduler_stats is not None:
            self.stats = outputs.scheduler_stats
            self._throughput_log.observe(*self.output_processor.take_counts(), self.stats)
        return shown

    def _give_up(self, child_ids: set[str]) -> None:
        parents = [parent for parent, children in self._children.items() if not child_ids.isdisjoint(children)]
        self.abort_request(parents)


def make_client(args: EngineArgs) -> EngineCoreClient:
    """Starts a core and returns its client once it is ready: in this process, or with `multiprocess` in its own.

    Raises:
        MinivllmError: the core rejects the arguments.
        WorkerDiedError: a rank died before it was ready.
        EngineDeadError: the core's process died before it was ready.
    """
    if not args.multiprocess:
        return InprocClient(args)
    from minivllm.engine.mp_client import SyncMPClient  # msgspec and ZeroMQ are needed only here

    return SyncMPClient(args)
