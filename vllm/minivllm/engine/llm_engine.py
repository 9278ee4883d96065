"""The engine, driven step by step: prompts in, the outputs so far out.

In vLLM v0.33.0: `vllm/v1/engine/llm_engine.py` (`LLMEngine`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from minivllm.core.engine_messages import EngineCoreOutputs
from minivllm.core.lora_request import LoRARequest
from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.core_client import SyncEngineCoreClient
from minivllm.engine.front_end import FrontEnd
from minivllm.errors import MinivllmError
from minivllm.inputs import Prompt
from minivllm.outputs import RequestOutput
from minivllm.platforms.interrupts import InterruptsHeld
from minivllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from minivllm.engine.metrics_reader import Metric
    from minivllm.engine.profiler import TorchProfiler
    from minivllm.engine.prometheus import PrometheusStatLogger


class LLMEngine(FrontEnd):
    """A front end and a client of the core. For a single caller: it has no locks."""

    def __init__(self, args: EngineArgs) -> None:
        args = replace(args)  # checks what was assigned since
        self.engine_core = make_client(args)
        super().__init__(args, self.engine_core)
        self._metrics: PrometheusStatLogger | None = None
        self._profiler: TorchProfiler | None = None
        if not args.disable_log_stats:
            self.stat_logger = self._metrics = self._make_metrics()

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
        text, request = self._processed(request_id, prompt, params, priority, lora_request)
        with InterruptsHeld():
            try:
                for child in self._registered(request_id, prompt_text if text is None else text, request):
                    self.engine_core.add_request(child)
            except BaseException:
                # Some of the completions may be in the core's queue already.
                self.abort_request([request_id])
                raise
        return request_id

    def abort_request(self, request_ids: Iterable[str]) -> None:
        """Abort requests without further output; unknown ids are ignored."""
        with InterruptsHeld(clean_up=True):
            self.engine_core.abort_requests(self._forgotten(request_ids))

    def step(self) -> list[RequestOutput]:
        """Run one step of the core; return the outputs of requests that have something new.

        The step is all or nothing: Ctrl-C waits for its end, and if processing the outputs fails,
        their requests are aborted.
        """
        outputs: EngineCoreOutputs | None = None
        with InterruptsHeld():
            try:
                with self._profiled():
                    outputs = self.engine_core.get_output()
                return self._take_in(outputs)
            except BaseException:
                # If the step itself failed, the core has ended its requests already.
                if outputs is not None:
                    self._give_up({output.request_id for output in outputs.outputs})
                raise

    def get_metrics(self) -> list[Metric]:
        """Return all metrics as they are now.

        Raises:
            MinivllmError: metrics are disabled.
        """
        from minivllm.engine.metrics_reader import get_metrics_snapshot

        if self._metrics is None:
            raise MinivllmError("metrics are disabled: create the engine with disable_log_stats=False")
        return get_metrics_snapshot(self._metrics.registry)

    def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """Record the steps from now until `stop_profile`. Arguments that are given override
        `profiler_config`'s.

        Raises:
            MinivllmError: the engine was made without `profiler_config`, is recording already, or
                computes in other processes.
        """
        from minivllm.engine.profiler import make_profiler  # brings torch

        if self._profiler is not None:
            raise MinivllmError("a profile is being recorded already; stop_profile ends it")
        limits = {"delay_iterations": delay_iterations, "max_iterations": max_iterations}
        self._profiler = make_profiler(self.engine_args, profile_prefix, limits)

    def stop_profile(self) -> None:
        """Stop recording, write the trace to a file, and log the file's name."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()

    def do_log_stats(self) -> None:
        """Do nothing: the engine logs its throughput every few seconds of work anyway."""

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached blocks. Do nothing and return False while any request holds a block.

        With `reset_running_requests`, the requests that hold blocks wait again and are recomputed
        from their first token. With `reset_connector`, what the KV connector has stored elsewhere
        is forgotten too.
        """
        method = "reset_prefix_cache_and_connector" if reset_connector else "reset_prefix_cache"
        return self._utility("reset_running_requests" if reset_running_requests else method)

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter from its folder into host memory, unless it is already there; with
        `load_inplace`, load it again.

        A request that names an adapter loads it by itself.

        Raises:
            MinivllmError: it cannot be served.
        """
        return self._utility("add_lora", lora_request)

    def remove_lora(self, lora_id: int) -> bool:
        """Remove an adapter once the requests that use it have ended; return whether it was loaded."""
        return self._utility("remove_lora", lora_id)

    def list_loras(self) -> set[int]:
        """Return the ids of the adapters in host memory."""
        return set(self._utility("list_loras"))

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter in its slot until it is removed.

        Raises:
            MinivllmError: it is not there, or no slot is free for it.
        """
        return self._utility("pin_lora", lora_id)

    def shutdown(self) -> None:
        """Stop the processes that the engine has started, if any; it cannot be used afterwards."""
        self.engine_core.shutdown()

    def _utility(self, method: str, *arguments: Any) -> Any:
        with InterruptsHeld():
            return self.engine_core.call_utility(method, *arguments)

    def _make_metrics(self) -> PrometheusStatLogger:
        from minivllm.engine.prometheus import PrometheusStatLogger  # prometheus_client is needed only here

        return PrometheusStatLogger(self.engine_args, self.engine_core.engines, str(self.engine_args.model))

    @contextmanager
    def _profiled(self) -> Iterator[None]:
        if self._profiler is None:
            yield
            return
        self._profiler.before_step()
        yield
        self._profiler.after_step()

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


def make_client(args: EngineArgs) -> SyncEngineCoreClient:
    """Start a core and return its client once it is ready: in this process, or with `multiprocess`
    in its own.

    Several cores always run as processes, and so do cores that Ray places.

    Raises:
        MinivllmError: the core rejects the arguments.
        WorkerDiedError: a rank died before it was ready.
        EngineDeadError: the core's process died before it was ready.
    """
    if not args.multiprocess and args.data_parallel_size == 1 and args.data_parallel_backend == "mp":
        from minivllm.engine.inproc_client import InprocClient  # only here are torch and the model's code needed

        return InprocClient(args)
    from minivllm.engine.mp_client import SyncMPClient  # msgspec and ZeroMQ are needed only here

    return SyncMPClient(args)
