"""Two servers for all tests: one as it is, and one with a chat template, keys and the x-ray."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from server.serving import CHAT_TEMPLATE, Server, running

KEYS = ("first-key", "second-key")


@pytest.fixture(scope="session")
def base() -> Iterator[Server]:
    with running(env={"VLLM_SERVER_DEV_MODE": "1"}) as server:
        yield server


@pytest.fixture(scope="session")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file in which the second server records its steps."""
    return tmp_path_factory.mktemp("recording") / "run.jsonl"


@pytest.fixture(scope="session")
def chat(recording: Path) -> Iterator[Server]:
    flags = ("--chat-template", str(CHAT_TEMPLATE), "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with running(*flags, "--api-key", *KEYS, "--xray", "--record", str(recording)) as server:
        server.client.headers["Authorization"] = f"Bearer {KEYS[1]}"
        yield server
