"""Two servers for all tests: one as it is, and one with a chat template, keys and the x-ray."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from server.serving import CHAT_TEMPLATE, Server, running
from warm_processes import Template, forked

KEYS = ("first-key", "second-key")


@pytest.fixture(scope="session")
def base(template: Template | None) -> Iterator[Server]:
    with ExitStack() as until_the_end:
        with forked(template):
            server = until_the_end.enter_context(running(env={"VLLM_SERVER_DEV_MODE": "1"}))
        yield server


@pytest.fixture(scope="session")
def chat(template: Template | None) -> Iterator[Server]:
    flags = ("--chat-template", str(CHAT_TEMPLATE), "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with ExitStack() as until_the_end:
        with forked(template):
            keys = ("--api-key", *KEYS)
            server = until_the_end.enter_context(running(*flags, *keys, "--xray"))
        server.client.headers["Authorization"] = f"Bearer {KEYS[1]}"
        yield server
