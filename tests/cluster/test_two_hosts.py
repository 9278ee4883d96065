"""Test ranks that Ray places on two hosts: the tokens of one host, and an error when a
host vanishes.
"""

import json
import time

import pytest
from cluster.hosts import Hosts, two_hosts

from minivllm import LLM, SamplingParams
from minivllm.config import EMBEDDED_MODEL

SETTINGS = {"device": "cpu", "max_model_len": 128, "max_num_seqs": 4, "num_gpu_blocks_override": 40}
PROMPTS = ["import os\n", "def add(a, b):\n", "class Node:\n"]
GREEDY = "SamplingParams(temperature=0, max_tokens=16)"
RANKS = f"""
import json, os
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
    print("lost", type(error).__name__, error)
os._exit(0)
"""


@pytest.mark.two_hosts
def test_two_ranks_on_two_hosts():
    """Run an engine whose ranks need both hosts, then cut the cable."""
    with two_hosts() as hosts:
        process = hosts.run("a", RANKS)
        lines = iter(process.stdout or ())
        outputs = LLM(EMBEDDED_MODEL, **SETTINGS).generate(PROMPTS, SamplingParams(temperature=0, max_tokens=16))
        expected = [output.outputs[0].token_ids for output in outputs]
        refused = next(line for line in lines if line.startswith("refused"))
        assert "MinivllmError" in refused
        assert "no room for 4 processes" in refused
        addresses, tokens = json.loads(next(line for line in lines if line.startswith("[[")))
        assert sorted(addresses) == [Hosts.address("a"), Hosts.address("b")]
        assert tokens == expected
        hosts.cut_cable()
        since = time.monotonic()
        assert "lost WorkerDiedError" in next(line for line in lines if line.startswith("lost"))
        assert time.monotonic() - since < 40, "Ray itself takes a minute"
        assert process.wait(30) == 0
