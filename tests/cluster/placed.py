"""What holds for everything that Ray has placed on two hosts, ranks and cores alike."""

import json
from collections.abc import Iterator

from cluster.hosts import Hosts

from minivllm import LLM, SamplingParams
from minivllm.config import EMBEDDED_MODEL

SETTINGS = {"device": "cpu", "max_model_len": 128, "max_num_seqs": 4, "num_gpu_blocks_override": 40}
PROMPTS = ["import os\n", "def add(a, b):\n", "class Node:\n"]
GREEDY = "SamplingParams(temperature=0, max_tokens=16)"


def tokens_of_one_host() -> list[list[int]]:
    """What an engine without Ray answers."""
    outputs = LLM(EMBEDDED_MODEL, **SETTINGS).generate(PROMPTS, SamplingParams(temperature=0, max_tokens=16))
    return [output.outputs[0].token_ids for output in outputs]


def found_on_both(lines: Iterator[str]) -> list[list[list[int]]]:
    """What a program has found after it was refused four processes and got one on each host."""
    refused = next(line for line in lines if line.startswith("refused"))
    assert "MinivllmError" in refused
    assert "no room for 4 processes" in refused
    addresses, *found = results(lines)
    assert sorted(addresses) == [Hosts.address("a"), Hosts.address("b")]
    return found


def results(lines: Iterator[str]) -> list:
    """The next line of JSON."""
    return json.loads(next(line for line in lines if line.startswith("[[")))
