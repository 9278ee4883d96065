"""The engine core as an object in the front end's process.

In vLLM v0.33.0: `vllm/v1/engine/core_client.py` (`InprocClient`).
"""

from collections.abc import Sequence
from typing import Any

from minivllm.core.engine_messages import EngineCoreOutputs, EngineCoreRequest
from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.core import EngineCore
from minivllm.engine.core_client import EngineCoreClient


class InprocClient(EngineCoreClient):
    """A client whose core is an object in this process. `get_output` runs a step."""

    def __init__(self, args: EngineArgs) -> None:
        self.engine_core = EngineCore(args)
        self.engines = [self.engine_core.ready]

    def add_request(self, request: EngineCoreRequest) -> None:
        self.engine_core.add_request(request)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        self.engine_core.abort_requests(request_ids)

    def get_output(self) -> EngineCoreOutputs:
        """Run a step and return its outputs; exceptions of the step propagate."""
        return self.engine_core.step()

    def call_utility(self, method: str, *arguments: Any) -> Any:
        return self.engine_core.call_utility(method, *arguments)

    def shutdown(self) -> None:
        self.engine_core.shutdown()
