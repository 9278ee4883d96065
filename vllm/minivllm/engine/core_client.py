"""The engine core as the front end sees it, in the same process or a separate one.

Front end and core exchange only the plain data of `minivllm.core.engine_messages`. The front end
never reads the core's scheduler: `ready` says once what it needs to know, and each `get_output`
brings the state after a step.

Nothing here loads torch: where the core is another process (`mp_client.py`, `async_mp_client.py`),
the front end starts without it.

In vLLM v0.33.0: `vllm/v1/engine/core_client.py` (`EngineCoreClient`).
"""

from collections.abc import Sequence
from typing import Any

from minivllm.core.engine_messages import EngineCoreReady, UtilityOutput
from minivllm.errors import MinivllmError


class EngineCoreClient:
    """A client of the core: requests in, outputs out. `engines` holds the message that each core
    sent when it was ready.

    - `add_request` sends a request. One that the core rejects comes back as an output with an
      error.
    - `abort_requests` aborts requests without further output; unknown ids are ignored.
    - `get_output` returns the outputs of the next step, and raises `EngineDeadError` if the core's
      process has died. Call it only while there are unfinished requests.
    - `call_utility` calls a method of `EngineCore`, or of its `LoRARegistry`, in every core
      (`joined_answers`).
    - `shutdown` stops the processes that were started, if any; a second call does nothing.

    The clients for an event loop have the coroutines `get_output_async` and `call_utility_async`
    instead. `seconds_silent` tells them for how long a core's process has not answered.
    """

    engines: list[EngineCoreReady]

    @property
    def ready(self) -> EngineCoreReady:
        """The ready message of the core with the fewest blocks: a request that fits there fits
        anywhere.
        """
        return min(self.engines, key=lambda engine: engine.num_gpu_blocks)


def joined_answers(method: str, answers: Sequence[UtilityOutput]) -> Any:
    """Merge the cores' answers to a call into one: whether all succeeded, or the first core's
    result.

    Raises:
        MinivllmError: the arguments are invalid.
        RuntimeError: the method failed.
    """
    for answer in answers:
        if answer.error is not None and answer.invalid_request:
            raise MinivllmError(answer.error)
        if answer.error is not None:
            raise RuntimeError(f"{method} failed in the engine's core: {answer.error}")
    results = [answer.result for answer in answers]
    # Cores agree on everything but success.
    return all(results) if isinstance(results[0], bool) else results[0]
