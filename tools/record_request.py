"""Record one request of a real server, from its HTTP body to its last token, for the site's page
*One request* and for the page `/xray` of a server that has nothing to do.

    uv run python tools/record_request.py

The server is `minivllm serve` with a small pool, a small budget, adapters and n-gram drafts, so that
one request meets all that the lessons are about. It is recorded until it did: `missing` says what a
run lacks. The first line of the file is a header with what the client sent and received; then comes
a line for each step, as `minivllm.engine.step_recorder` describes it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from minivllm.errors import MinivllmError

ROOT = Path(__file__).resolve().parents[1]
RECORDING = ROOT / "vllm" / "minivllm" / "entrypoints" / "xray" / "recorded.jsonl"
MODELS = ROOT / "vllm" / "models"
PORT = 8765
TRIES = 5
SECONDS_TO_START = 120
FLAGS = [
    *("--served-model-name", "tiny-python", "--enable-lora", "--max-loras", "2", "--lora-modules"),
    *(f"{name}={MODELS / 'adapters' / name}" for name in ("braces", "stubs")),
    *("--num-gpu-blocks-override", "20", "--max-num-batched-tokens", "32", "--max-num-seqs", "4"),
    *("--max-model-len", "256", "--enable-prompt-tokens-details", "--xray"),
    *("--speculative-config", json.dumps({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2})),
]
HEAD = '''class Stack:
    """A last-in, first-out stack."""

    def __init__(self):
        """Create an empty stack."""
        self.items = []

    def push(self, item):
        """Put an item on top of the stack."""
        self.items.append(item)
'''
PROMPT = f'''{HEAD}
    def pop(self):
        """Remove the top item and return it."""
        return self.items.pop()

    def peek(self):
        """Return the top item."""
        return self.items[-1]

    def size(self):
'''
BODY = {"model": "braces", "prompt": PROMPT, "max_tokens": 60, "temperature": 0, "logprobs": 3, "stream": True}
"""The request that is recorded."""
EARLIER = {"model": "braces", "prompt": HEAD, "max_tokens": 2, "temperature": 0}
"""A request with the same beginning: its blocks are in the prefix cache."""
BESIDE = [
    {"model": "tiny-python", "prompt": "def read(path):\n", "max_tokens": 64, "temperature": 0.8, "seed": 1},
    {"model": "stubs", "prompt": "class Queue:\n", "max_tokens": 64, "temperature": 0.8, "seed": 2},
]
"""The requests that run when it comes."""


@contextmanager
def server() -> Iterator[httpx.Client]:
    """Start a server, yield a client of it, and stop it."""
    command = [sys.executable, "-m", "minivllm", "serve", str(MODELS / "tiny-python")]
    command += ["--host", "127.0.0.1", "--port", str(PORT), *FLAGS]
    process = subprocess.Popen(command)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=60) as client:
            wait_for(client)
            yield client
    finally:
        process.terminate()
        process.wait()


def wait_for(client: httpx.Client) -> None:
    """Wait until the server answers."""
    end = time.monotonic() + SECONDS_TO_START
    while time.monotonic() < end:
        try:
            if client.get("/health").is_success:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise MinivllmError(f"the server did not start within {SECONDS_TO_START} s: see its log above")


def record(client: httpx.Client) -> list[dict[str, Any]]:
    """Send the requests; return the header and the steps."""
    lines: list[dict[str, Any]] = []
    opened = threading.Event()

    def watch() -> None:
        with httpx.stream("GET", f"{client.base_url}/xray/events", timeout=None) as events:
            for line in events.iter_lines():
                if line.startswith("data: "):
                    lines.append(json.loads(line.removeprefix("data: ")))
                    opened.set()

    threading.Thread(target=watch, daemon=True).start()
    opened.wait()
    client.post("/v1/completions", json=EARLIER).raise_for_status()
    begin = len(lines)
    beside = [threading.Thread(target=client.post, args=("/v1/completions",), kwargs={"json": body}) for body in BESIDE]
    for thread in beside:
        thread.start()
    while not any(len(line["running"]) == len(BESIDE) for line in lines[begin:]):
        time.sleep(0.001)
    events = list(stream(client))
    for thread in beside:
        thread.join()
    pieces = client.post("/tokenize", json={"prompt": PROMPT, "return_token_strs": True}).json()
    time.sleep(1)  # the last step's line comes after its answer
    header, *steps = lines
    sent = {"flags": [flag.replace(f"{ROOT}/", "") for flag in FLAGS], "body": BODY, "prompt": pieces["token_strs"]}
    return [{**header, "request": {**sent, "events": events}}, *steps]


def stream(client: httpx.Client) -> Iterator[str]:
    """Send the request; yield its server-sent events."""
    with client.stream("POST", "/v1/completions", json=BODY, headers={"X-Request-Id": "yours"}) as answer:
        for line in answer.iter_lines():
            if line:
                yield line.removeprefix("data: ")


def missing(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what a run lacks for a page on which the request meets every mechanism."""
    mine = [entry for step in steps for entry in step["batch"] if entry[0] == number(steps)]
    facts = {
        "a prefix-cache hit": any(cached > 0 for *_, cached in mine),
        "a prompt in two chunks": sum(tokens > 1 and not drafts for _, tokens, drafts, *_ in mine) > 1,
        "an accepted draft": any(drafts and sampled > 1 for _, _, drafts, sampled, _ in mine),
        "a rejected draft": any(drafts and sampled <= drafts for _, _, drafts, sampled, _ in mine),
        "two preemptions": sum(number(steps) in step["preempted"] for step in steps) == len(BESIDE),
        "hits on its returns": sum(cached > 0 for *_, cached in mine) > len(BESIDE),
        "three requests in a step": any(len(step["batch"]) > len(BESIDE) for step in steps),
    }
    return [name for name, holds in facts.items() if not holds]


def number(steps: Sequence[Mapping[str, Any]]) -> int:
    """Return the number that the recorder gave the request."""
    return next(request["number"] for step in steps for request in step["running"] if "yours" in request["id"])


def main() -> None:
    """Record until nothing is missing, and write the file."""
    for attempt in range(TRIES):
        with server() as client:
            header, *steps = record(client)
        lacking = missing(steps)
        if not lacking:
            RECORDING.write_text("".join(f"{json.dumps(line, separators=(',', ':'))}\n" for line in (header, *steps)))
            print(f"{RECORDING.relative_to(ROOT)}: {len(steps)} steps, {RECORDING.stat().st_size:,} bytes")
            return
        print(f"try {attempt + 1} of {TRIES} lacks {', '.join(lacking)}")
    raise MinivllmError(f"no run of {TRIES} had everything: change the pool or the lengths in this file")


if __name__ == "__main__":
    main()
