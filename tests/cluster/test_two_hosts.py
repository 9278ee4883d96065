"""Test ranks and cores that Ray places on two hosts: the tokens of one host, and an error when a
host vanishes.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

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
CORES = f"""
import asyncio, json, os, socket
from minivllm import AsyncLLM, EngineArgs, SamplingParams
from minivllm.config import EMBEDDED_MODEL

def peer(lifeline):
    with socket.socket(fileno=os.dup(lifeline)) as sock:
        return sock.getpeername()[0]

async def main():
    settings = dict(model=EMBEDDED_MODEL, **{SETTINGS}, data_parallel_backend="ray")
    try:
        AsyncLLM(EngineArgs(**settings, data_parallel_size=4))
    except Exception as error:
        print("refused", type(error).__name__, error)
    engine = AsyncLLM(EngineArgs(**settings, data_parallel_size=2))
    numbers = iter(range(10**9))

    async def tokens(rank=None):
        found = []
        for prompt in {PROMPTS}:
            async for output in engine.generate(prompt, {GREEDY}, str(next(numbers)), data_parallel_rank=rank):
                pass
            found.append(output.outputs[0].token_ids)
        return found

    hosts = [peer(lifeline) for lifeline in engine.engine_core.cores.lifelines]
    print(json.dumps([hosts, await tokens(0), await tokens(1)]))
    far = next(rank for rank, host in enumerate(hosts) if host != "{Hosts.address("a")}")
    try:
        while True:
            await tokens(far)
    except Exception as error:
        print("lost", type(error).__name__, error)
    os._exit(0)

asyncio.run(main())
"""


@contextmanager
def placed(program: str, num_copies: int) -> Iterator[str]:
    """Run a program that needs both hosts, cut the cable, and yield the line that it prints about
    the loss.
    """
    with two_hosts() as hosts:
        process = hosts.run("a", program)
        lines = iter(process.stdout or ())
        outputs = LLM(EMBEDDED_MODEL, **SETTINGS).generate(PROMPTS, SamplingParams(temperature=0, max_tokens=16))
        expected = [output.outputs[0].token_ids for output in outputs]
        refused = next(line for line in lines if line.startswith("refused"))
        assert "MinivllmError" in refused
        assert "no room for 4 processes" in refused
        addresses, *placements = json.loads(next(line for line in lines if line.startswith("[[")))
        assert sorted(addresses) == [Hosts.address("a"), Hosts.address("b")]
        assert placements == [expected] * num_copies
        hosts.cut_cable()
        since = time.monotonic()
        yield next(line for line in lines if line.startswith("lost"))
        assert time.monotonic() - since < 40, "Ray itself takes a minute"
        assert process.wait(30) == 0


@pytest.mark.two_hosts
def test_two_ranks_on_two_hosts():
    with placed(RANKS, num_copies=1) as lost:
        assert "lost WorkerDiedError" in lost


@pytest.mark.two_hosts
def test_two_cores_on_two_hosts():
    with placed(CORES, num_copies=2) as lost:
        assert "lost EngineDeadError" in lost
        assert "has ended, or its machine cannot be reached" in lost
