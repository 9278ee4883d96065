"""Ranks on two hosts, which Ray has placed: the tokens of one host, and a host that vanishes."""

import time

import pytest
from cluster.hosts import two_hosts
from cluster.placed import GREEDY, PROMPTS, SETTINGS, found_on_both, tokens_of_one_host

PROGRAM = f"""
import json
from minivllm import LLM, SamplingParams
from minivllm.config import EMBEDDED_MODEL

def start(size):
    return LLM(EMBEDDED_MODEL, **{SETTINGS}, tensor_parallel_size=size, distributed_executor_backend="ray")

try:
    start(4)
except Exception as error:
    print("refused", type(error).__name__, error)
llm = start(2)
ranks = llm.llm_engine.engine_core.engine_core.executor.ranks
found = llm.generate({PROMPTS}, {GREEDY})
hosts = [sock.getpeername()[0] for sock in ranks._sockets]
print(json.dumps([hosts, [output.outputs[0].token_ids for output in found]]))
try:
    while True:
        llm.generate({PROMPTS}, {GREEDY})
except Exception as error:
    print(type(error).__name__)
    import os; os._exit(0)
"""


@pytest.mark.two_hosts
def test_two_ranks_on_two_hosts():
    with two_hosts() as hosts:
        program = hosts.run("a", PROGRAM)
        lines = iter(program.stdout or ())
        assert found_on_both(lines) == [tokens_of_one_host()]
        hosts.cut_cable()
        since = time.monotonic()
        assert next(lines).strip() == "WorkerDiedError"
        assert time.monotonic() - since < 40, "Ray itself takes a minute"
        assert program.wait(30) == 0
