"""The engine's core as the front end sees it, in the same process or in one of its own.

What crosses is the plain data of `minivllm.core.messages`. The front end never reads the core's scheduler: `ready` says
once what it needs to know, and each `get_output` brings the state after a step.

In vLLM v0.33.0: `vllm/v1/engine/core_client.py` (`EngineCoreClient`, `InprocClient`, `SyncMPClient`).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from minivllm.core.messages import EngineCoreOutputs, EngineCoreReady, EngineCoreRequest
from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.core import EngineCore

UTILITIES = ("reset_prefix_cache",)
"""Methods of `EngineCore` that a front end may call by name."""


class EngineCoreClient(ABC):
    """Requests in, outputs out. `ready` is what the core said when it was."""

    ready: EngineCoreReady

    @abstractmethod
    def add_request(self, request: EngineCoreRequest) -> None:
        """Sends a request. One that the core refuses comes back as an output with an error."""

    @abstractmethod
    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """Ends requests without further output; unknown ids are ignored."""

    @abstractmethod
    def get_output(self) -> EngineCoreOutputs:
        """What the next step made of the requests; to be asked only while some are unfinished.

        Raises:
            EngineDeadError: the core's process has ended.
        """

    @abstractmethod
    def call_utility(self, method: str) -> Any:
        """What one of `UTILITIES` returns."""

    @abstractmethod
    def shutdown(self) -> None:
        """Ends what was started; a second time it does nothing."""


def make_client(args: EngineArgs) -> EngineCoreClient:
    """A core, started and ready: in this process, or in its own with `multiprocess`.

    Raises:
        MinivllmError: what the core refuses.
        WorkerDiedError: a rank ended before it was ready.
        EngineDeadError: the core's process ended before it was ready.
    """
    if not args.multiprocess:
        return InprocClient(args)
    from minivllm.engine.mp_client import SyncMPClient  # msgspec and ZeroMQ are needed only here

    return SyncMPClient(args)


class InprocClient(EngineCoreClient):
    """The core is an object of this process. `get_output` is a step."""

    def __init__(self, args: EngineArgs) -> None:
        self.engine_core = EngineCore(args)
        self.ready = self.engine_core.ready

    def add_request(self, request: EngineCoreRequest) -> None:
        """As `EngineCoreClient`."""
        self.engine_core.add_request(request)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """As `EngineCoreClient`."""
        self.engine_core.abort_requests(request_ids)

    def get_output(self) -> EngineCoreOutputs:
        """As `EngineCoreClient`; what is raised in the step is raised here, too."""
        return self.engine_core.step()

    def call_utility(self, method: str) -> Any:
        """As `EngineCoreClient`."""
        assert method in UTILITIES
        return getattr(self.engine_core, method)()

    def shutdown(self) -> None:
        """As `EngineCoreClient`."""
        self.engine_core.shutdown()
