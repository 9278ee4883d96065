"""The engine for an event loop: any number of requests at once, each an async generator of its
outputs.

Each core runs in a process of its own, or in a thread if the caller supplies `Parts`. One task
receives the outputs and hands them to the requests' collectors; if a reader is slow, its request's
outputs are merged in the collector, and no other request is held up.

In vLLM v0.33.0: `vllm/v1/engine/async_llm.py` (`AsyncLLM`), `RequestOutputCollector` in
`vllm/v1/engine/output_processor.py`.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from minivllm.core.engine_messages import EngineCoreOutputs, EngineCoreRequest
from minivllm.core.lora_request import LoRARequest
from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.async_mp_client import AsyncMPClient
from minivllm.engine.front_end import FrontEnd
from minivllm.errors import EngineDeadError, EngineStoppedError, WorkerDiedError
from minivllm.inputs import Prompt
from minivllm.logger import init_logger
from minivllm.outputs import RequestOutput
from minivllm.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from minivllm.engine.async_thread_client import AsyncThreadClient

logger = init_logger(__name__)
OUTPUTS_AT_ONCE = 128
"""Outputs that are processed, or requests that are added, before the event loop's other tasks get a turn."""
SECONDS_WITHOUT_ANSWER, SECONDS_FOR_A_STEP = 5.0, 300.0
"""A core is not healthy if its process has not answered for so long, or has not finished a step. The
second limit is vLLM's `VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS`: on a CPU, a long prompt takes a while.
"""


class RequestOutputCollector:
    """A buffer between the task that receives outputs and the reader of one request: it holds
    everything unread as one output.
    """

    def __init__(self, kind: RequestOutputKind) -> None:
        self._merges = kind is RequestOutputKind.DELTA
        self._unread: RequestOutput | None = None
        self._error: Exception | None = None
        self._ready = asyncio.Event()

    def put(self, output: RequestOutput | Exception) -> None:
        """Add an output: a delta is merged into the unread output, and any other kind replaces it.

        An exception is raised after everything that was put before it, and again for every later
        reader; whatever is put after it is dropped.
        """
        if self._error is not None:
            return
        if isinstance(output, Exception):
            self._error = output
        elif self._merges and self._unread is not None:
            self._unread.add(output)
        else:
            self._unread = output
        self._ready.set()

    async def get(self) -> RequestOutput:
        """Return everything that arrived since the last call, or wait for something to arrive.

        Raises:
            EngineDeadError: the engine has ended.
        """
        await self._ready.wait()
        output, self._unread = self._unread, None
        if output is not None:
            if self._error is None:  # otherwise the next reader must get the error at once
                self._ready.clear()
            return output
        assert self._error is not None
        raise self._error


class Collector:
    """One request's unread outputs, in the engine's own collector or in the part
    `output_collector`.

    `on_ready` is called whenever the collector stops being empty.
    """

    def __init__(self, unread: Any, request_id: str, on_ready: Callable[[], None] | None = None) -> None:
        self.request_id = request_id
        self._unread = unread
        self._on_ready = on_ready
        self._has_called = False

    def put(self, output: RequestOutput | Exception) -> None:
        """Add an output, or the exception that ends the request."""
        self._unread.put(output)
        # An error is read after an output, by a second call of `get`, so it needs a call of its
        # own.
        if self._on_ready is not None and (not self._has_called or isinstance(output, Exception)):
            self._has_called = True
            self._on_ready()

    async def get(self) -> RequestOutput:
        """Return what is unread, or wait for it; raise the exception that was put."""
        self._has_called = False
        return await self._unread.get()


class AsyncLLM(FrontEnd):
    """The engine of one event loop. The constructor blocks until the core is ready.

    Raises:
        MinivllmError: the arguments are invalid.
        EngineDeadError: the core died before it was ready.
    """

    def __init__(self, args: EngineArgs, engine_core: "AsyncThreadClient | None" = None) -> None:
        """Start the cores, unless a client is given: each in a process, or in a thread if there are
        parts.
        """
        if engine_core is None and args.parts.names_in_core:  # which cannot be sent to another process
            from minivllm.engine.async_thread_client import AsyncThreadClient  # it loads the core, and torch with it

            engine_core = AsyncThreadClient(args)
        self.engine_core = engine_core or AsyncMPClient(args)
        super().__init__(args, self.engine_core)
        self._collectors: dict[str, Collector] = {}
        self._handler: asyncio.Task[None] | None = None
        self.dead_error: Exception | None = None
        self._ended = asyncio.Event()
        self._ping: tuple[asyncio.Future[Any], float] | None = None
        """A call to the cores, which they answer between two steps, and when it was made."""

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> "AsyncLLM":
        """Create an engine; this is vLLM's name for the constructor."""
        return cls(engine_args)

    @property
    def errored(self) -> bool:
        """Return whether the engine has ended, so that no request can be served any more."""
        return self.dead_error is not None

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of a prompt as they arrive. If the reader stops early, the request is
        aborted.

        `data_parallel_rank`: the core that computes it; None: the least loaded one.

        Raises:
            MinivllmError: the request is invalid.
            EngineDeadError: the engine has ended.
        """
        collector = await self.add_request(
            request_id,
            prompt,
            sampling_params,
            lora_request=lora_request,
            priority=priority,
            data_parallel_rank=data_parallel_rank,
        )
        try:
            finished = False
            while not finished:
                output = await collector.get()
                finished = output.finished
                yield output
        finally:
            self.abort_now([request_id])

    async def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        on_ready: Callable[[], None] | None = None,
    ) -> Collector:
        """Add a request whose outputs go to the collector. Its reader must end it with `abort_now`.

        Raises:
            MinivllmError: the request is invalid.
            EngineDeadError: the engine has ended.
        """
        self._check_alive()
        text, request = self._process_inputs(request_id, prompt, params, priority, lora_request)
        # Before the core gets the request: its first output may come at once.
        part = self.parts.output_collector if params.output_kind is RequestOutputKind.DELTA else None
        unread = part() if part is not None else RequestOutputCollector(params.output_kind)
        collector = self._collectors[request_id] = Collector(unread, request_id, on_ready)
        try:
            for index, child in enumerate(self._register(request_id, text, request)):
                if index % OUTPUTS_AT_ONCE == OUTPUTS_AT_ONCE - 1:
                    await asyncio.sleep(0)
                # All completions of a prompt go to one core, where they share its prefix.
                child.data_parallel_rank = data_parallel_rank
                self.engine_core.add_request(child)
        except BaseException:
            self.abort_now([request_id])
            raise
        return collector

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Abort requests: their readers get a last output with the finish reason "abort"."""
        for name in [request_id] if isinstance(request_id, str) else list(request_id):
            children = self._children.pop(name, [])
            for last in self.output_processor.aborted(children):
                if name in self._collectors:
                    self._collectors[name].put(last)
            self._abort_in_core(children)

    def abort_now(self, request_ids: Iterable[str]) -> None:
        """Abort requests that nobody reads any more; unknown ids are ignored."""
        request_ids = list(request_ids)
        for request_id in request_ids:
            self._collectors.pop(request_id, None)
        self._abort_in_core(self._forget(request_ids))

    def decline(self, kv_transfer_params: Any) -> None:
        """Tell the KV connector that a request was refused, so that the remote blocks held for it
        can be released.

        The core sees a request that ends before it begins. Params without `do_remote_prefill` are
        ignored.
        """
        if not isinstance(kv_transfer_params, dict) or kv_transfer_params.get("do_remote_prefill") is not True:
            return
        # The core has no message for this, but each connector gives back what an aborted request
        # would have read.
        name = f"declined-{uuid.uuid4()}"
        nothing = SamplingParams(max_tokens=1, seed=0)
        request = EngineCoreRequest(name, [0], nothing, (), time.monotonic(), kv_transfer_params=kv_transfer_params)
        with suppress(EngineDeadError, ValueError, OverflowError):  # the last two: values that no message can carry
            self.engine_core.add_request(request)
            self.engine_core.abort_requests([name])

    async def list_loras(self) -> set[int]:
        """Return the ids of the adapters in host memory."""
        return set(await self._utility("list_loras"))

    async def start_step_events(self) -> None:
        """Send `step_watchers` the current state now, and a snapshot of every step from now on (see
        `engine.step_recorder`).
        """
        await self._utility("start_step_events")

    async def stop_step_events(self) -> None:
        """Stop sending step snapshots."""
        with suppress(EngineDeadError, RuntimeError):
            await self._utility("stop_step_events")

    async def check_health(self) -> None:
        """Raise `EngineDeadError` if the engine has ended, if a core's process does not answer, or if
        its step does not end.

        This does not wait: it looks for answers to what an earlier call has asked.
        """
        self._check_alive()
        if self.engine_core.seconds_silent() > SECONDS_WITHOUT_ANSWER:
            raise EngineDeadError(f"a core's process has not answered for {SECONDS_WITHOUT_ANSWER:g} seconds")
        if self._ping is None or self._ping[0].done():
            ping = asyncio.ensure_future(self._utility("list_loras"))
            ping.add_done_callback(lambda done: done.cancelled() or done.exception())  # `_die` tells of it
            self._ping = ping, time.monotonic()
        elif time.monotonic() - self._ping[1] > SECONDS_FOR_A_STEP:
            raise EngineDeadError(f"a core has not finished a step for {SECONDS_FOR_A_STEP:g} seconds")

    async def wait_until_dead(self) -> None:
        """Wait until the engine has ended, for whatever reason."""
        self._listen()
        await self._ended.wait()

    def end_requests(self) -> None:
        """Fail all unfinished and future requests with `EngineStoppedError`. The core keeps
        running.
        """
        # Free their blocks; the front end answers their readers itself.
        self._abort_in_core(list(self.output_processor.states))
        self._die(EngineStoppedError("the server is shutting down"))

    def shutdown(self) -> None:
        """Stop the core's process. Unfinished requests fail with `EngineStoppedError`."""
        self.end_requests()
        if self._handler is not None and not self._handler.get_loop().is_closed():
            self._handler.cancel()
        self.engine_core.shutdown()

    def _abort_in_core(self, children: list[str]) -> None:
        if children and not self.errored:
            with suppress(EngineDeadError):
                self.engine_core.abort_requests(children)

    def _check_alive(self) -> None:
        self._listen()
        if self.dead_error is not None:
            raise self.dead_error

    async def _utility(self, method: str, *arguments: Any) -> Any:
        self._check_alive()
        return await self.engine_core.call_utility_async(method, *arguments)

    def _listen(self) -> None:
        """Start the task that receives outputs, in the event loop of the first caller."""
        if self._handler is None:
            # Not in the constructor, which may run before the loop.
            self._handler = asyncio.get_running_loop().create_task(self._receive_outputs())

    async def _receive_outputs(self) -> None:
        try:
            while True:
                await self._take_in(await self.engine_core.get_output_async())
        except asyncio.CancelledError:
            raise
        except Exception as error:
            # Those say in one line why; anything else is a bug and needs its traceback.
            if not isinstance(error, EngineDeadError | WorkerDiedError):
                logger.exception("The engine's outputs cannot be received any more")
            self._die(error)

    async def _take_in(self, outputs: EngineCoreOutputs) -> None:
        """Hand a step's outputs to their readers, in chunks, so that a large step does not hold up
        the event loop.
        """
        shown: list[RequestOutput] = []
        self.output_processor.note_scheduled(outputs.scheduled_req_ids, outputs.timestamp)
        # A step of a large batch has thousands of outputs, and the loop has other readers to serve.
        for start in range(0, len(outputs.outputs), OUTPUTS_AT_ONCE):
            if start:
                # Let readers and new requests run between the chunks of a large step.
                await asyncio.sleep(0)
            chunk, to_abort = self.output_processor.process_outputs(outputs.outputs[start : start + OUTPUTS_AT_ONCE])
            if to_abort:
                self.engine_core.abort_requests(to_abort)
            for output in chunk:
                if (collector := self._collectors.get(output.request_id)) is not None:
                    collector.put(output)
            shown += chunk
        self._finish(shown, outputs)

    def _die(self, error: Exception) -> None:
        """Tell all readers why there will be no further output."""
        if self.dead_error is not None:
            return
        # Readers get one kind of error, whatever has ended the engine.
        self.dead_error = error if isinstance(error, EngineDeadError) else EngineDeadError(str(error))
        self._ended.set()
        for collector in self._collectors.values():
            collector.put(self.dead_error)


AsyncLLMEngine = AsyncLLM
"""vLLM's older name."""
