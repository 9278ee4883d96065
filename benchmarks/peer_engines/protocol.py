"""How the benchmark talks to an engine in a process of its own: lines of JSON, both ways. Standard library only.

The engine's process says {"ready": …} once it has warmed up; then, for each line on its standard input ("all" or
"one"), it serves those requests and answers with seconds and tokens.
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
    """Model, dtype, device, and the requests as {"prompt": token ids, "output": tokens}; settings of drafts, if any."""
    return json.loads(Path(sys.argv[1]).read_text())


def serve(generate: Callable[[list[dict]], list[list[int]]], **facts: Any) -> None:
    """Warm up, then answer until standard input ends. `generate` gives the output tokens of each request."""
    requests = workload()["requests"]
    generate(requests[:8])
    print(json.dumps({"ready": facts}), file=ANSWERS)
    for line in sys.stdin:
        chosen = requests if line.strip() == "all" else requests[:1]
        start = time.perf_counter()
        outputs = generate(chosen)
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "tokens": sum(map(len, outputs)), "outputs": outputs}), file=ANSWERS)
