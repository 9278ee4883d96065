"""A client in a process of its own, which loads a server and notes when each event of a stream
arrives.

It must not share a process with the server: the two would wait for each other's Python. It imports
nothing large. The work is one JSON object on standard input (`Work`), the result one on standard
output: a list of `Answer`.

    answers = load(port, [Ask({"prompt": "def", "max_tokens": 8})], clients=1)    # closed: each asks when answered
    answers = load(port, [Ask({...}, at=0.5), Ask({...}, at=0.7)])                # open: at these times, in seconds
    chats, answers = load_beside(port, chats, asks)  # one after another while chats are under way; these then leave
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from minivllm.errors import MinivllmError

HOME = str(Path(__file__).resolve().parents[2])


@dataclass
class Ask:
    """A request's body and, in an open load, the time in seconds at which it is sent."""

    body: dict[str, Any]
    at: float = 0.0


@dataclass
class Answer:
    """The moments at which a request was due, sent, and answered piece by piece, in seconds of
    `time.monotonic()`, which all processes share.

    A closed load's request is due when it is sent. `failed` says what went wrong; the times of a
    failed answer are meaningless. `token_ids` is filled if the body has `return_token_ids`.
    """

    due: float
    sent: float
    connected: float = 0.0
    events: list[float] = field(default_factory=list)
    failed: str = ""
    token_ids: list[int] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        """Time to first token, from when the request was due."""
        return self.events[0] - self.due

    @property
    def latency(self) -> float:
        """Seconds from when the request was due to its last event."""
        return self.events[-1] - self.due

    @property
    def itls(self) -> list[float]:
        """The gaps between events."""
        return [later - earlier for earlier, later in zip(self.events, self.events[1:], strict=False)]

    def tpot(self, tokens: int) -> float:
        """Return the time per output token after the first."""
        return (self.events[-1] - self.events[0]) / max(1, tokens - 1)


def start_load(port: int, asks: Sequence[Ask], clients: int | None = None, path: str = "/") -> subprocess.Popen[str]:
    """Start a client process and return it. `clients` is the number of concurrent clients of a
    closed load; None means an open load, sent at the times of `asks`.
    """
    return _start({"port": port, "path": path, "clients": clients, "asks": [asdict(ask) for ask in asks]})


def load_beside(
    port: int, chats: Sequence[Ask], asks: Sequence[Ask], path: str = "/", quiet: int = 16, burst: int = 1
) -> tuple[list[Answer], list[Answer]]:
    """Run chats throughout, and send the other requests in bursts of `burst`, each after the chats
    have had `quiet` events undisturbed.

    A burst is sent only when all requests of the previous one are answered. After the last burst,
    each chat has `quiet` more events and then disconnects, so the chats' answers must be long
    enough. Returns the answers to both. Raises the same errors as `answers_of`.
    """
    work = {
        "port": port,
        "path": path,
        "chats": [asdict(chat) for chat in chats],
        "asks": [asdict(ask) for ask in asks],
    }
    answers = answers_of(_start({**work, "quiet": quiet, "burst": burst}))
    return answers[: len(chats)], answers[len(chats) :]


def _start(work: dict[str, Any]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "minivllm_lab.engines.http_load"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=HOME)
    assert process.stdin is not None
    process.stdin.write(json.dumps(work) + "\n")
    process.stdin.flush()
    return process


def answers_of(process: subprocess.Popen[str]) -> list[Answer]:
    """Wait for a started client to end, and return its answers.

    Raises:
        MinivllmError: a request was refused or cut off.
    """
    out, _ = process.communicate()
    answers = [Answer(**fields) for fields in json.loads(out)]
    if failed := [answer.failed for answer in answers if answer.failed]:
        raise MinivllmError(f"{len(failed)} of {len(answers)} requests failed: {failed[0]}")
    return answers


def load(port: int, asks: Sequence[Ask], clients: int | None = None, path: str = "/") -> list[Answer]:
    """Load a server and wait until all requests are answered. Raises the same errors as
    `answers_of`.
    """
    return answers_of(start_load(port, asks, clients, path))


def post(path: str, body: dict[str, Any]) -> bytes:
    """Return the bytes of a POST request that closes its connection afterwards."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", "Connection: close"
    return "\r\n".join((*head, f"Content-Length: {len(content)}", "", "")).encode() + content


async def ask(port: int, path: str, body: dict[str, Any], due: float, answer: Answer | None = None) -> Answer:
    """Send one request on a connection of its own. `answer` is filled as events arrive, so that
    others can follow it.
    """
    content, keeps = post(path, body), body.get("return_token_ids")
    answer = answer or Answer(due, due)
    answer.sent = time.monotonic()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        answer.connected = time.monotonic()
        writer.write(content)
        status = await reader.readline()
        if b" 200 " not in status:
            raise ConnectionError(_refusal(status + await reader.read(1000)))
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                answer.events.append(time.monotonic())
                if keeps:
                    answer.token_ids += token_ids_of(line)
        writer.close()
        if not answer.events:
            raise ConnectionError("the answer has no events")
    except OSError as error:
        answer.failed = f"{type(error).__name__}: {error}"
    return answer


def _refusal(said: bytes) -> str:
    """Return a server's response other than 200 in one line: its status and its body."""
    head, _, body = said.decode(errors="replace").partition("\r\n\r\n")
    status = head.splitlines()[0].partition(" ")[2] if head else "no answer"
    return " ".join(f"{status}: {body}".split()) if body else status


def token_ids_of(line: bytes) -> list[int]:
    """Return the token ids in an event of a stream, which may have none."""
    choices = json.loads(line.removeprefix(b"data: ")).get("choices")
    return (choices and choices[0].get("token_ids")) or []


async def closed(work: dict[str, Any]) -> list[Answer]:
    """Run a closed load: each client sends its next request when the previous one is answered."""
    asks, answers = iter(work["asks"]), []

    async def client() -> None:
        for request in asks:
            answers.append(await ask(work["port"], work["path"], request["body"], time.monotonic()))

    await asyncio.gather(*(client() for _ in range(work["clients"])))
    return answers


async def opened(work: dict[str, Any]) -> list[Answer]:
    """Send each request at its time, whether or not the others have been answered; return the
    answers.
    """
    begin = time.monotonic()

    async def one(due: float, body: dict[str, Any]) -> Answer:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        return await ask(work["port"], work["path"], body, due)

    return list(await asyncio.gather(*(one(begin + it["at"], it["body"]) for it in work["asks"])))


async def beside(work: dict[str, Any]) -> list[Answer]:
    """Send each burst of requests when the previous one is answered and all chats have gone on;
    then disconnect the chats.
    """
    port, path, now = work["port"], work["path"], time.monotonic()
    chats, answers = [Answer(now, now) for _ in work["chats"]], []
    running = [
        asyncio.create_task(ask(port, path, it["body"], now, chat))
        for it, chat in zip(work["chats"], chats, strict=True)
    ]
    for start in range(0, len(work["asks"]), work["burst"]):
        await gone_on(chats, running, work["quiet"])
        now, some = time.monotonic(), work["asks"][start : start + work["burst"]]
        answers += await asyncio.gather(*(ask(port, path, request["body"], now) for request in some))
    await gone_on(chats, running, work["quiet"])
    for task in running:
        task.cancel()
    return [*chats, *answers]


async def gone_on(chats: Sequence[Answer], running: Sequence[asyncio.Task[Answer]], events: int) -> None:
    """Wait until each chat has had `events` more events; if one ends before that, mark it as failed
    and return.
    """
    wanted = [len(chat.events) + events for chat in chats]
    while any(len(chat.events) < count for chat, count in zip(chats, wanted, strict=True)):
        for chat, task in zip(chats, running, strict=True):
            if task.done():
                chat.failed = chat.failed or "the chat ended before the load did: it must be longer"
                return
        await asyncio.sleep(0.001)


def main() -> None:
    """Read the work from standard input, do it, and write the answers to standard output."""
    work = json.loads(sys.stdin.readline())
    if "chats" in work:
        answers = asyncio.run(beside(work))
    else:
        answers = asyncio.run(opened(work) if work["clients"] is None else closed(work))
    json.dump([asdict(answer) for answer in answers], sys.stdout)


if __name__ == "__main__":
    main()
