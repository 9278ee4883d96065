"""Two servers for all tests of a worker: one as it is, and one with a chat template and keys."""

from collections.abc import Iterator

import pytest
from server.serving import CHAT_TEMPLATE, Server, running

KEYS = ("first-key", "second-key")


@pytest.fixture(scope="session")
def base() -> Iterator[Server]:
    with running(env={"VLLM_SERVER_DEV_MODE": "1"}) as server:
        yield server


@pytest.fixture(scope="session")
def chat() -> Iterator[Server]:
    flags = ("--chat-template", str(CHAT_TEMPLATE), "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with running(*flags, "--api-key", *KEYS) as server:
        server.client.headers["Authorization"] = f"Bearer {KEYS[1]}"
        yield server
