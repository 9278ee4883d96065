"""The core's loop, whichever thread or process it runs in.

In vLLM v0.33.0: `vllm/v1/engine/core.py` (`EngineCoreProc.run_busy_loop`).
"""

import queue
from collections.abc import Callable, Sequence
from typing import Any

from minivllm.core.engine_messages import EngineCoreOutputs, UtilityOutput
from minivllm.engine.core import EngineCore
from minivllm.errors import MinivllmError, WorkerDiedError
from minivllm.logger import init_logger

logger = init_logger(__name__)
Act = Callable[[], object]
Put = Callable[[EngineCoreOutputs], object]


def run_busy_loop(core: EngineCore, to_do: "queue.SimpleQueue[Act | Exception | None]", put: Put) -> None:
    """Run steps while there are unfinished requests, otherwise wait for the next action. A None in
    the queue ends the loop.

    Raises:
        WorkerDiedError: a rank has died, which the engine cannot survive.
        Exception: whatever exception is found in the queue.
    """
    while True:
        # Requests and aborts come first: an abort should not wait for another step.
        while not to_do.empty() or not core.has_unfinished_requests():
            act = to_do.get()
            if act is None:
                return
            if isinstance(act, Exception):
                raise act
            _guarded(act)
        _guarded(lambda: put(core.step()))


def abort_requests(core: EngineCore, request_ids: Sequence[str], put: Put) -> None:
    """Abort requests. If no step follows to report it, tell the front end that their blocks are
    free.
    """
    core.abort_requests(request_ids)
    if not core.has_unfinished_requests():
        put(core.state())


def tell_watchers(core: EngineCore, put: Put) -> None:
    """Send the state after a change that no step reports, if there are watchers."""
    if core.step_recorder is not None:
        put(core.state())


def answer_of(core: EngineCore, call_id: int, method: str, arguments: Sequence[Any]) -> UtilityOutput:
    """Return the result of one of the core's utilities, or its error."""
    try:
        return UtilityOutput(call_id, core.call_utility(method, *arguments))
    except MinivllmError as error:
        return UtilityOutput(call_id, error=str(error), invalid_request=True)
    except Exception as error:
        return UtilityOutput(call_id, error=f"{type(error).__name__}: {error}")


def _guarded(act: Act) -> None:
    """Run an action. Log any failure except a rank's death: the core has started over and goes on."""
    try:
        act()
    except WorkerDiedError:
        raise
    except Exception:
        logger.exception("The engine's core continues after a failure")
