"""Where the lines of `minivllm.core.step_events` go: the last steps into a ring for pages, all of them into a file."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from minivllm.core.step_events import HeaderLine
from minivllm.errors import MinivllmError
from minivllm.logger import init_logger

logger = init_logger(__name__)
STEPS_KEPT = 1000
"""A page can go back so many steps."""
MOST_KEPT_BYTES = 64 * 2**20
MOST_FILE_BYTES = 64 * 2**20
"""A recording ends here, and the engine goes on: what reads it takes no more."""


def is_key(line: bytes) -> bool:
    """Whether a line has the whole state."""
    return line.startswith(b'{"key"')


class StepRing:
    """The last lines, by serial numbers from 0 on. It begins with a key line; `STEPS_KEPT` or more follow."""

    def __init__(self, most_lines: int = STEPS_KEPT, most_bytes: int = MOST_KEPT_BYTES) -> None:
        self._most_lines, self._most_bytes = most_lines, most_bytes
        self._lines: deque[bytes] = deque()
        self._keys: deque[int] = deque()
        self._first = 0
        self._num_bytes = 0
        self._came = asyncio.Event()

    @property
    def end(self) -> int:
        """The serial number of the next line."""
        return self._first + len(self._lines)

    def put(self, lines: Sequence[bytes]) -> None:
        """Adds lines; the oldest ones go where nobody needs them."""
        for line in lines:
            if is_key(line):
                self._keys.append(self.end)
            self._lines.append(line)
            self._num_bytes += len(line)
        while len(self._keys) > 1 and self._has_too_much():
            self._drop_until(self._keys[1])
        self._came.set()

    def read(self, start: int) -> tuple[int, list[bytes]]:
        """Returns the serial number after the last line, and the lines from `start` on.

        A reader that comes too late, or from another ring, gets all that is kept.
        """
        if not self._first <= start <= self.end:
            start = self._first
        return self.end, list(islice(self._lines, start - self._first, None))

    async def wait(self, start: int, seconds: float) -> None:
        """Returns when there is a line from `start` on, or after so many seconds."""
        if start >= self.end:
            self._came.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._came.wait(), seconds)

    def _has_too_much(self) -> bool:
        return self.end - self._keys[1] > self._most_lines or self._num_bytes > self._most_bytes

    def _drop_until(self, serial: int) -> None:
        while self._first < serial:
            self._num_bytes -= len(self._lines.popleft())
            self._first += 1
        self._keys.popleft()


class RecordingFile:
    """A file of lines that grows with the steps. Give it back with `close`, or use it as a context.

    Raises:
        MinivllmError: the file cannot be written.
    """

    def __init__(self, path: str | Path, header: HeaderLine, most_bytes: int = MOST_FILE_BYTES) -> None:
        try:
            # Without a buffer: whatever happens to the engine, the steps that it has told of are there.
            self._file = Path(path).open("wb", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise MinivllmError(f"cannot record to {path}: {error.strerror}; name another file") from None
        self._path = path
        self._left = most_bytes
        self.write([msgspec.json.encode(header)])

    def write(self, lines: Sequence[bytes]) -> None:
        """Adds lines. Once the file is full, or the disk is, it is left as it is, and the log says so."""
        if not lines or self._file.closed:
            return
        content = b"\n".join(lines) + b"\n"
        self._left -= len(content)
        try:
            if self._left < 0:
                self._file.close()
                logger.warning("The recording %s is full; its last steps are missing", self._path)
            else:
                self._file.write(content)
        except OSError as error:
            logger.warning("The recording %s ends here: %s", self._path, error.strerror)
            self._file.close()

    def close(self) -> None:
        """The file gets no more lines."""
        self._file.close()

    def __enter__(self) -> RecordingFile:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
