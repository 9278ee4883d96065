"""The engine, driven step by step: prompts in, outputs so far out.

In vLLM v0.33.0: `vllm/v1/engine/llm_engine.py` (`LLMEngine`).
"""

from collections.abc import Iterable

from minivllm.core.messages import EngineCoreOutputs
from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.core_client import EngineCoreClient, InprocClient
from minivllm.engine.front_end import FrontEnd
from minivllm.inputs import Prompt
from minivllm.outputs import RequestOutput
from minivllm.platforms.interrupts import InterruptsHeld
from minivllm.sampling_params import SamplingParams


class LLMEngine(FrontEnd):
    """A front end and a client of the core. For a single caller: it has no locks."""

    def __init__(self, args: EngineArgs) -> None:
        self.engine_core = make_client(args)
        super().__init__(args, self.engine_core)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> "LLMEngine":
        """Same as the constructor, under vLLM's name."""
        return cls(engine_args)

    def add_request(self, request_id: str, prompt: Prompt, params: SamplingParams, *, priority: int = 0) -> None:
        """Adds a prompt to the queue, to be completed `params.n` times.

        Raises:
            MinivllmError: the request is invalid; nothing was added to the queue.
        """
        text, request = self._processed(request_id, prompt, params, priority)
        with InterruptsHeld():
            try:
                for child in self._registered(request_id, text, request):
                    self.engine_core.add_request(child)
            except BaseException:
                self.abort_request([request_id])
                raise

    def abort_request(self, request_ids: Iterable[str]) -> None:
        """Ends requests without further output; unknown ids are ignored."""
        with InterruptsHeld(clean_up=True):
            self.engine_core.abort_requests(self._forgotten(request_ids))

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
        self.output_processor.note_scheduled(outputs.scheduled_req_ids, outputs.timestamp)
        shown, to_abort = self.output_processor.process_outputs(outputs.outputs)
        if to_abort:
            self.engine_core.abort_requests(to_abort)
        self._finish(shown, outputs)
        return shown

    def _give_up(self, child_ids: set[str]) -> None:
        parents = [parent for parent, children in self._children.items() if not child_ids.isdisjoint(children)]
        self.abort_request(parents)


def make_client(args: EngineArgs) -> EngineCoreClient:
    """Starts a core and returns its client once it is ready: in this process, or with `multiprocess` in its own.

    Several cores are always processes.

    Raises:
        MinivllmError: the core rejects the arguments.
        WorkerDiedError: a rank died before it was ready.
        EngineDeadError: the core's process died before it was ready.
    """
    if not args.multiprocess and args.data_parallel_size == 1:
        return InprocClient(args)
    from minivllm.engine.mp_client import SyncMPClient  # msgspec and ZeroMQ are needed only here

    return SyncMPClient(args)
