"""`minivllm chat`: talk to a server in the terminal.

Without `--url`, and where no server answers at the default address, it starts one for the embedded
model and ends it again.

In vLLM v0.33.0: `vllm/entrypoints/cli/openai.py` (`ChatCommand`).
"""

import json
import os
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import Any

from minivllm.config.checks import require
from minivllm.errors import MinivllmError
from minivllm.logger import LEVEL_VARIABLE
from minivllm.platforms.child_processes import start_process

DEFAULT_PORT = 8000
SECONDS_TO_ANSWER = 600.0
"""Most seconds from a request to its first token, and from one token to the next."""
OWN_MAX_TOKENS = 128
"""Most tokens in an answer of the embedded model, which seldom ends one by itself."""
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens addresses without the environment's proxy, which would not find this machine's servers."""


@dataclass(frozen=True)
class ChatArgs:
    """Settings of a chat.

    - `url`: address of the server; by default http://localhost:8000, or if none answers there, a
      server that is started for the embedded model.
    - `model_name`: the model or adapter to ask; by default the server's first.
    - `api_key`: the server's key; by default OPENAI_API_KEY from the environment.
    - `system_prompt`: instructions that stand above the conversation.
    - `quick`: send this one message, print the answer, and exit.
    """

    url: str | None = None
    model_name: str | None = None
    api_key: str | None = None
    system_prompt: str | None = None
    quick: str | None = None


def chat(settings: ChatArgs) -> int:
    """Answer messages until the user leaves; return the exit code.

    Raises:
        MinivllmError: no server answers, or it refuses the one message of `quick`.
    """
    with suppress(KeyboardInterrupt):  # while a server starts
        if settings.url is None and not _listens(DEFAULT_PORT):
            with own_server() as url:
                _converse(Conversation(url, settings, max_tokens=OWN_MAX_TOKENS), settings.quick)
        else:
            _converse(Conversation(settings.url or f"http://localhost:{DEFAULT_PORT}", settings), settings.quick)
    return 0


class Conversation:
    """The messages so far, and the server that answers them. `options` go with each request."""

    def __init__(self, url: str, settings: ChatArgs, **options: Any) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._key = settings.api_key or os.environ.get("OPENAI_API_KEY", "EMPTY")
        prompt = settings.system_prompt
        self._messages = [{"role": "system", "content": prompt}] if prompt else []
        with self._reply_to("/v1/models") as reply:
            self._options = {"model": settings.model_name or json.load(reply)["data"][0]["id"], **options}

    def say(self, text: str) -> None:
        """Send a message, and print the answer as it arrives; Ctrl-C ends it.

        Raises:
            MinivllmError: the server fails or refuses, and the message is forgotten.
        """
        messages = [*self._messages, {"role": "user", "content": text}]
        answer = ""
        try:
            with closing(self._pieces(messages)) as pieces, suppress(KeyboardInterrupt):
                for piece in pieces:
                    print(piece, end="", flush=True)
                    answer += piece
        finally:
            print(end="\n" if answer else "")
        self._messages = [*messages, {"role": "assistant", "content": answer}]

    def _pieces(self, messages: list[dict[str, str]]) -> Generator[str, None, None]:
        body = {"messages": messages, "stream": True, **self._options}
        with self._reply_to("/v1/chat/completions", json.dumps(body).encode()) as reply:
            for line in reply:
                if line.startswith(b"data: {"):
                    event = json.loads(line.removeprefix(b"data: "))
                    if "error" in event:
                        raise MinivllmError(event["error"]["message"])
                    yield event["choices"][0]["delta"].get("content") or ""
                elif line.startswith(b"data: [DONE]"):
                    return
        raise MinivllmError("the answer has broken off")

    @contextmanager
    def _reply_to(self, path: str, body: bytes | None = None) -> Iterator[HTTPResponse]:
        """Yield the reply to a request. A failure, also while the reply is read, is one line."""
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        try:
            request = urllib.request.Request(self._url + path, body, headers)
            with _direct.open(request, timeout=SECONDS_TO_ANSWER) as reply:
                yield reply
        except urllib.error.HTTPError as error:
            text = error.read(2000).decode(errors="replace")
            with suppress(ValueError, LookupError, TypeError):
                text = json.loads(text)["error"]["message"]
            raise MinivllmError(f"{self._url} refuses with status {error.code}: {text}") from None
        except (OSError, ValueError, LookupError, TypeError, HTTPException) as error:
            if isinstance(error, MinivllmError):
                raise
            raise MinivllmError(f"{self._url} does not answer as a server of chats: {error}") from None


def _converse(conversation: Conversation, quick: str | None) -> None:
    if quick is not None:
        conversation.say(quick)
        return
    print("Write a message. Ctrl-C ends an answer; /quit or Ctrl-D leaves.")
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if text == "/quit":
            return
        try:
            if text:
                conversation.say(text)
        except MinivllmError as error:
            print(f"minivllm: {error}", file=sys.stderr)


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("localhost", port)):
        return True
    return False


@contextmanager
def own_server() -> Iterator[str]:
    """Yield the address of a server for the embedded model, which ends with the block.

    Raises:
        MinivllmError: it does not start.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    print(f"Nothing listens on port {DEFAULT_PORT}: starting a server for the embedded model", file=sys.stderr)
    own_end, process = start_process(__name__, str(port), environment=os.environ | {LEVEL_VARIABLE: "ERROR"})
    with own_end, process:
        try:
            # It listens before it has loaded the model, and answers as soon as it can.
            while not _listens(port):
                require(process.poll() is None, "the server for the embedded model has not started")
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def serve(_: socket.socket, port: str) -> int:
    """Serve the embedded model, in the process that `own_server` has started; return the exit code."""
    from minivllm.entrypoints.cli.main import main

    flags = ("--disable-uvicorn-access-log", "--uvicorn-log-level", "error")
    return main(["serve", "--host", "127.0.0.1", "--port", port, *flags])
