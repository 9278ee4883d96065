"""The protocol between a benchmark and an engine in a process of its own: lines of JSON in both
directions. It needs only the standard library.

The engine's process sends {"ready": …} once it has warmed up; then, for each line on its standard
input (a number of requests, "all" or a name in `adapters`), it serves those requests and answers
with seconds and tokens.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# What libraries print goes to standard error from now on; standard output is for answers.
ANSWERS = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)


def workload() -> dict:
    """Read the work: model, dtype, device, the requests as {"prompt": token ids, "output": tokens},
    and the settings for drafts, if any.

    If it has `lora` (the settings for adapters), `adapters` maps each name to the requests' adapter
    folders, None for a request without one.
    """
    return json.loads(Path(sys.argv[1]).read_text())


def lora_ids(requests: list[dict]) -> list[tuple[int, str] | None]:
    """Return the id and folder of each request's adapter, or None; an adapter keeps its id."""
    folders = [request.get("adapter") for request in requests]
    for folder in folders:
        if folder:
            IDS.setdefault(folder, len(IDS) + 1)
    return [(IDS[folder], folder) if folder else None for folder in folders]


IDS: dict[str, int] = {}


def serve(generate: Callable[[list[dict]], list[list[int]]], **facts: Any) -> None:
    """Warm up, then answer until standard input ends. `generate` returns the output tokens of each
    request.
    """
    work = workload()
    requests = work["requests"]
    chosen_by_name = {
        name: [{**request, "adapter": folder} for request, folder in zip(requests, folders, strict=True)]
        for name, folders in work.get("adapters", {}).items()
    }
    generate(requests[:8])
    print(json.dumps({"ready": facts}), file=ANSWERS)
    for line in sys.stdin:
        asked = line.strip()
        chosen = chosen_by_name.get(asked) or (requests if asked == "all" else requests[: int(asked)])
        start = time.perf_counter()
        outputs = generate(chosen)
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "tokens": sum(map(len, outputs)), "outputs": outputs}), file=ANSWERS)
