"""`minivllm serve` with another scheduler: `python -P serve_with_scheduler.py first|own serve MODEL
--port N ...`.

`first` is `minivllm_lab.chunked_prefill.prefill_first.PREFILL_FIRST`, the policy of vLLM V0; `own`
is the engine's. Either one is plugged in as a part, so the core is a thread of the server, not a
process of its own: compare these two only with each other.
"""

import argparse
import sys

from minivllm.config import Parts
from minivllm.core.policy import SchedulingPolicy, running_then_waiting
from minivllm.engine.arg_utils import EngineArgs
from minivllm.entrypoints.openai.api_server import serve
from minivllm.entrypoints.openai.chat_template import PLAIN
from minivllm.entrypoints.openai.settings import FrontendArgs
from minivllm_lab.chunked_prefill.prefill_first import PREFILL_FIRST

POLICIES = {"first": PREFILL_FIRST, "own": SchedulingPolicy(schedule=lambda *step: running_then_waiting(*step))}


def main() -> int:
    flags = argparse.ArgumentParser()
    flags.add_argument("scheduler", choices=POLICIES)
    flags.add_argument("command", choices=("serve",))
    flags.add_argument("model")
    flags.add_argument("--port", type=int)
    flags.add_argument("--served-model-name")
    flags.add_argument("--max-num-batched-tokens", type=int)
    flags.add_argument("--max-num-seqs", type=int)
    flags.add_argument("--max-model-len", type=int)
    flags.add_argument("--num-gpu-blocks-override", type=int)
    given = vars(flags.parse_args())
    kind, name, port = given.pop("scheduler"), given.pop("served_model_name"), given.pop("port")
    given.pop("command")
    settings = {"device": "cpu", "dtype": "float32", "enable_prefix_caching": False}
    settings |= {"enable_chunked_prefill": kind != "first", "parts": Parts(policy=POLICIES[kind])}
    front_end = FrontendArgs(host="127.0.0.1", port=port, served_model_name=[name], disable_uvicorn_access_log=True)
    return serve(EngineArgs(**given, **settings), front_end, PLAIN)


if __name__ == "__main__":
    sys.exit(main())
