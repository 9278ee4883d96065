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
    lock = threading.Lock()
    running: list[int] = []

    def run() -> Result:
        running.append(threading.get_ident())
        try:
            return function()
        finally:
            with lock:
                running.clear()

    work = asyncio.get_running_loop().run_in_executor(None, run)
    # More than once: it may wait for a thread, or catch the exception.
    while not (await asyncio.wait({work}, timeout=seconds))[0]:
        with lock:  # so that the exception reaches this function, and not the thread's next one
            for thread in running:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TimeoutError))
    try:
        return work.result()
    except TimeoutError:
        raise MinivllmError(f"{name} ran for more than {seconds:g} seconds") from None
