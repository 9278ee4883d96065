"""Cores on two hosts, which Ray has placed: the tokens of one host, and what is said when one vanishes."""

import time

import pytest
from cluster.hosts import Hosts, two_hosts
from cluster.placed import GREEDY, PROMPTS, SETTINGS, found_on_both, tokens_of_one_host

PROGRAM = f"""
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


@pytest.mark.two_hosts
def test_two_cores_on_two_hosts():
    with two_hosts() as hosts:
        program = hosts.run("a", PROGRAM)
        lines = iter(program.stdout or ())
        expected = tokens_of_one_host()
        assert found_on_both(lines) == [expected, expected]
        hosts.cut_cable()
        since = time.monotonic()
        lost = next(line for line in lines if line.startswith("lost"))
        assert time.monotonic() - since < 20, "Ray itself takes a minute"
        assert "lost EngineDeadError" in lost
        assert "has ended, or its machine cannot be reached" in lost
        assert program.wait(30) == 0
