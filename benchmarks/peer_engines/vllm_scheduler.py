"""Time vLLM's own scheduler for `benchmarks/scheduler.py`, which sends work on standard input and
reads figures from standard output.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

# What libraries print goes to standard error from now on; standard output is for the answer.
ANSWER = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

ROOT = Path(__file__).resolve().parents[2]
# For `record`, which sets vLLM's scheduler up as our traces need it, and `minivllm.core`, which
# needs no package.
sys.path += [str(ROOT / "tests" / "conformance"), str(ROOT / "vllm"), str(ROOT / "benchmarks")]

from record import make_request, make_scheduler  # noqa: E402
from scheduler_timing import fastest_run  # noqa: E402
from vllm.utils.hashing import sha256  # noqa: E402
from vllm.v1.core.kv_cache_utils import init_none_hash  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.outputs import ModelRunnerOutput  # noqa: E402

from vllm import __version__  # noqa: E402


def scheduler_for(work: dict[str, Any], model: Path) -> Scheduler:
    """Return vLLM's scheduler with the work's requests."""
    scheduler = make_scheduler(work["config"], model)
    for index, prompt in enumerate(work["prompts"]):
        entry = {"id": f"request-{index}", "prompt": prompt, "max_tokens": work["max_tokens"]}
        entry |= {"arrival_step": 0, "order": index, "priority": 0}
        scheduler.add_request(make_request(entry, work["config"]["block_size"]))
    return scheduler


def sampled(request_ids: list[str]) -> ModelRunnerOutput:
    """Return a model output with one token for each request."""
    return ModelRunnerOutput(
        req_ids=request_ids,
        req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
        sampled_token_ids=[[index] for index in range(len(request_ids))],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )


def main() -> None:
    """Time each work item and print the figures."""
    asked = json.loads(sys.stdin.read())
    init_none_hash(sha256)
    figures = []
    for work in asked["works"]:
        scheduler = scheduler_for(work, Path(asked["model"]))
        figures.append(fastest_run(scheduler, sampled, work["steps"], work["repeats"]))
    print(json.dumps({"version": __version__, "figures": figures}), file=ANSWER)


if __name__ == "__main__":
    main()
