"""The engine, driven step by step: prompts in, the outputs so far out.

In vLLM v0.33.0: `vllm/v1/engine/llm_engine.py` (`LLMEngine`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from minivllm.core.engine_messages import EngineCoreOutputs
from minivllm.core.lora_request import LoRARequest
from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.front_end import FrontEnd
from minivllm.inputs import Prompt
from minivllm.outputs import RequestOutput
from minivllm.platforms.interrupts import InterruptsHeld
from minivllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from minivllm.engine.inproc_client import InprocClient
    from minivllm.engine.mp_client import SyncMPClient


class LLMEngine(FrontEnd):
    """A front end and a client of the core. For a single caller: it has no locks."""

    def __init__(self, args: EngineArgs) -> None:
        args = replace(args)  # checks what was assigned since
        self.engine_core = make_client(args)
        super().__init__(args, self.engine_core)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, *, enable_multiprocessing: bool = False) -> LLMEngine:
        """Create an engine; this is vLLM's name for the constructor."""
        multiprocess = engine_args.multiprocess or enable_multiprocessing
        return cls(replace(engine_args, multiprocess=multiprocess))

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        *,
        priority: int = 0,
        prompt_text: str | None = None,
    ) -> str:
        """Add a prompt to the queue, to be completed `params.n` times; return its id.

        `arrival_time` changes nothing: a request arrives when it is added.
        `prompt_text`: the text of a prompt of token ids, for the output.

        Raises:
            MinivllmError: the request is invalid; nothing was added to the queue.
        """
        text, request = self._process_inputs(request_id, prompt, params, priority, lora_request)
        with InterruptsHeld():
            try:
                for child in self._register(request_id, prompt_text if text is None else text, request):
                    self.engine_core.add_request(child)
            except BaseException:
                # Some of the completions may be in the core's queue already.
                self.abort_request([request_id])
                raise
        return request_id

    def abort_request(self, request_ids: Iterable[str]) -> None:
        """Abort requests without further output; unknown ids are ignored."""
        with InterruptsHeld(clean_up=True):
            self.engine_core.abort_requests(self._forget(request_ids))

    def step(self) -> list[RequestOutput]:
        """Run one step of the core; return the outputs of requests that have something new.

        The step is all or nothing: Ctrl-C waits for its end, and if processing the outputs fails,
        their requests are aborted.
        """
        outputs: EngineCoreOutputs | None = None
        with InterruptsHeld():
            try:
                outputs = self.engine_core.get_output()
                return self._take_in(outputs)
            except BaseException:
                # If the step itself failed, the core has ended its requests already.
                if outputs is not None:
                    self._give_up({output.request_id for output in outputs.outputs})
                raise

    def list_loras(self) -> set[int]:
        """Return the ids of the adapters in host memory."""
        return set(self._utility("list_loras"))

    def shutdown(self) -> None:
        """Stop the processes that the engine has started, if any; it cannot be used afterwards."""
        self.engine_core.shutdown()

    def _utility(self, method: str, *arguments: Any) -> Any:
        with InterruptsHeld():
            return self.engine_core.call_utility(method, *arguments)

    def _take_in(self, outputs: EngineCoreOutputs) -> list[RequestOutput]:
        self.output_processor.note_scheduled(outputs.scheduled_req_ids, outputs.timestamp)
        shown, to_abort = self.output_processor.process_outputs(outputs.outputs)
        if to_abort:
            self.engine_core.abort_requests(to_abort)
        self._finish(shown, outputs)
        return shown

    def _give_up(self, child_ids: set[str]) -> None:
        # The core knows the completions, the user only their prompt.
        parents = [parent for parent, children in self._children.items() if not child_ids.isdisjoint(children)]
        self.abort_request(parents)


def make_client(args: EngineArgs) -> InprocClient | SyncMPClient:
    """Start a core and return its client once it is ready: in this process, or with `multiprocess`
    in its own.

    Several cores always run as processes.

    Raises:
        MinivllmError: the core rejects the arguments.
        WorkerDiedError: a rank died before it was ready.
        EngineDeadError: the core's process died before it was ready.
    """
    if not args.multiprocess and args.data_parallel_size == 1:
        from minivllm.engine.inproc_client import InprocClient  # only here are torch and the model's code needed

        return InprocClient(args)
    from minivllm.engine.mp_client import SyncMPClient  # msgspec and ZeroMQ are needed only here

    return SyncMPClient(args)
