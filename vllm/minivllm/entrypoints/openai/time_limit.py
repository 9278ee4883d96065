"""Run Python code that a model or a client has written, in a thread and for a limited time."""

import asyncio
import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

from minivllm.errors import MinivllmError

Result = TypeVar("Result")


async def in_thread(function: Callable[[], Result], seconds: float, name: str) -> Result:
    """Return the function's result. While it runs, other tasks get their turns of the event loop.

    Raises:
        MinivllmError: it ran for longer than `seconds`; the message calls it `name`.
    """
    loop = asyncio.get_running_loop()
    lock = threading.Lock()
    running: list[int] = []

    def run() -> Result:
        running.append(threading.get_ident())
        try:
            return function()
        finally:
            with lock:
                running.clear()

    def interrupt() -> None:
        nonlocal timer
        with lock:  # so that the exception reaches this function, and not the thread's next one
            if running:
                thread, error = ctypes.c_ulong(running[0]), ctypes.py_object(TimeoutError)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, error)
        timer = loop.call_later(seconds, interrupt)  # it waits for a thread, or has caught the exception

    timer = loop.call_later(seconds, interrupt)
    try:
        return await loop.run_in_executor(None, run)
    except TimeoutError:
        raise MinivllmError(f"{name} ran for more than {seconds:g} seconds") from None
    finally:
        timer.cancel()
