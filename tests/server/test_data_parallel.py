"""Servers with two cores: both are used, shown, and reset, and have the same adapters; one
process is killed.
"""

import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import httpx
import psutil
import pytest
from patience import eventually
from server.serving import Server, running
from server.test_clients import raw_request
from server.test_lora import ADAPTERS, LOAD, PROMPT, UNLOAD

pytestmark = pytest.mark.usefixtures("warm_processes")
LONG = {"prompt": "def add(a, b):\n", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}
SHORT = {"prompt": [7] * 64, "max_tokens": 1}
FLAGS = (
    "--data-parallel-size", "2", "--distributed-executor-backend", "mp",
    "--max-num-seqs", "2", "--max-model-len", "2048",
)  # fmt: skip
CORE, RANK = "minivllm.engine.core_proc", "minivllm.executor.rank_loop"
RANKS = ("0", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return the folder that the server uses for its temporary files."""
    return tmp_path_factory.mktemp("sockets")


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[Server]:
    adapters = ("--enable-lora", "--lora-modules", f"a={ADAPTERS}/a", "--runtime-lora-path", str(ADAPTERS))
    env = {"VLLM_SERVER_DEV_MODE": "1", "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    with running(*FLAGS, "--xray", *adapters, env=env) as server:
        for rank in RANKS:  # their first step takes long
            assert post(server, {"prompt": "x", "max_tokens": 1}, rank).status_code == 200
        yield server


def by_engine(server: Server, name: str, *labels: str) -> list[float]:
    """Return a metric's values by core, summed over the rows that have the labels."""
    return [server.metric(name, f'engine="{rank}"', *labels) for rank in RANKS]


def test_requests_and_their_aborts_go_to_both_cores(pair: Server):
    """Some requests may end before their clients leave."""
    running, waiting, ended = "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:request_success_total"
    before, number = pair.metric(ended), 10
    with contextlib.ExitStack() as leaving:
        for _ in range(number):
            leaving.enter_context(raw_request(pair, json.dumps(LONG | {"stream": True}).encode()))
        assert eventually(lambda: by_engine(pair, running) == [2, 2])
        assert eventually(lambda: pair.metric(f"{running}|{waiting}|{ended}") == before + number)
        assert min(by_engine(pair, waiting)) >= 2
    assert eventually(pair.is_idle)
    assert min(by_engine(pair, "vllm:generation_tokens_total")) > 0
    assert eventually(lambda: pair.metric(ended) == before + number)
    assert min(by_engine(pair, ended, 'finished_reason="abort"')) >= 2


@pytest.mark.parametrize("core", [0, 1])
def test_a_page_sees_each_step_of_its_core(pair: Server, core: int):
    lines = []
    with pair.client.stream("GET", f"/xray/events?core={core}") as stream:
        events = (json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: "))
        header = next(events)
        lines.append(next(events))
        assert (header["core"], header["cores"]) == (core, 2)
        for rank in (str(core), str(1 - core)) * 2:
            body, headers = {"prompt": [5] * 40, "max_tokens": 3}, {"X-data-parallel-rank": rank}
            httpx.post(f"{pair.url}/v1/completions", json=body, headers=headers, timeout=60)
        while lines[-1]["step"] < 6 or lines[-1]["running"]:
            lines.append(next(events))
    assert pair.client.get("/xray/events?core=2").status_code == 400, "there are two"
    assert lines[-1]["step"] <= 8, "the other core's steps are not among them"
    assert {later["step"] - earlier["step"] for earlier, later in pairwise(lines)} <= {0, 1}, "a step is missing"


def test_a_reset_reaches_all_caches(pair: Server):
    def hits() -> list[float]:
        """Send a prompt to both cores; return how many tokens each finds in its cache."""
        asked, result = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"
        wanted, before = [tokens + len(SHORT["prompt"]) for tokens in by_engine(pair, asked)], by_engine(pair, result)
        assert [post(pair, SHORT, rank).status_code for rank in RANKS] == [200, 200]
        assert eventually(lambda: by_engine(pair, asked) == wanted)
        return [now - then for now, then in zip(by_engine(pair, result), before, strict=True)]

    assert hits() == [0, 0]
    assert hits() == [48, 48]
    assert pair.client.post("/reset_prefix_cache").json() == {"success": True}
    assert hits() == [0, 0]
    assert {post(pair, SHORT, wrong).status_code for wrong in ("2", "-1", "all", "9" * 5000)} == {400}


def test_both_cores_have_the_adapters_of_the_start_and_those_that_come_and_go(pair: Server):
    wanted = {
        "tiny-python": [289, 465, 309, 199, 199, 516, 415, 1071],
        "a": [289, 199, 199, 516, 309, 8, 66, 12],
        "c": [309, 199, 199, 3, 3, 3, 3, 3],
    }  # what PEFT and vLLM compute with them
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 8, "return_token_ids": True}
    assert pair.client.post(LOAD, json={"lora_name": "c", "lora_path": f"{ADAPTERS}/c"}).status_code == 200
    for rank in RANKS:
        for name, tokens in wanted.items():
            assert post(pair, body | {"model": name}, rank).json()["choices"][0]["token_ids"] == tokens
    assert pair.client.post(UNLOAD, json={"lora_name": "c"}).status_code == 200
    assert {post(pair, body | {"model": "c"}, rank).status_code for rank in RANKS} == {404}


def post(server: Server, body: dict, rank: str) -> httpx.Response:
    return server.client.post("/v1/completions", json=body, headers={"X-data-parallel-rank": rank})


def test_a_killed_rank_is_the_end_of_all(pair: Server, folder: Path):
    """Kill a rank of core 1 while each core computes a stream: both streams end with an error, and
    the server ends. So this test runs last.
    """
    processes = pair.processes()
    with ThreadPoolExecutor(2) as threads:
        answers = threads.map(lambda rank: post(pair, LONG | {"stream": True}, rank), RANKS)
        assert eventually(lambda: by_engine(pair, "vllm:num_requests_running") == [1, 1])
        core_1 = next(process for process in processes if CORE in process.cmdline() and process.cmdline()[-1] == "1")
        next(child for child in core_1.children() if any(RANK in word for word in child.cmdline())).kill()
    for answer in answers:
        assert answer.status_code == 200
        assert '"code":500' in answer.text
        assert answer.text.endswith("data: [DONE]\n\n")
    assert pair.client.get("/health").status_code == 503
    assert pair.process.wait(60) == 1
    assert not psutil.wait_procs(processes, 10)[1]
    assert "Traceback" not in pair.said()
    assert not list(folder.iterdir()), "no sockets are left"
