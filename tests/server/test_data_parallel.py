"""A server with two cores: both are used, shown, and reset; one of them dies."""

import json
import re
import threading
from collections.abc import Iterator

import psutil
import pytest
from server.serving import Server, eventually, running
from server.test_clients import is_idle, raw_request

LONG = {"prompt": "def add(a, b):\n", "max_tokens": 480, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def pair() -> Iterator[Server]:
    flags = ("--data-parallel-size", "2", "--max-num-seqs", "2")
    with running(*flags, env={"VLLM_SERVER_DEV_MODE": "1", "OMP_NUM_THREADS": "1"}) as server:
        yield server


def by_engine(server: Server, name: str) -> dict[str, float]:
    """A metric's values by core."""
    rows = re.findall(rf'^{name}\{{.*engine="(\d)".*\}} (\S+)$', server.client.get("/metrics").text, re.MULTILINE)
    return {engine: float(value) for engine, value in rows}


def test_requests_and_their_aborts_go_to_both_cores(pair: Server):
    connections = [raw_request(pair, json.dumps(LONG | {"stream": True}).encode()) for _ in range(4)]
    both = {"0": 2.0, "1": 2.0}
    assert eventually(lambda: by_engine(pair, "vllm:num_requests_running") == both)
    for connection in connections:
        connection.close()
    assert eventually(lambda: is_idle(pair), 2)
    assert by_engine(pair, "vllm:generation_tokens_total").keys() == both.keys()
    assert min(by_engine(pair, "vllm:generation_tokens_total").values()) > 0
    pattern = r'request_success_total\{engine="(\d)",finished_reason="abort",.*\} (\S+)'
    assert dict(re.findall(pattern, pair.client.get("/metrics").text)) == {"0": "2.0", "1": "2.0"}


def test_a_reset_reaches_all_caches(pair: Server):
    def hits() -> dict[str, float]:
        """What each core finds of a prompt, which is sent to both."""
        before = by_engine(pair, "vllm:prefix_cache_hits_total")
        for rank in before:
            headers = {"X-data-parallel-rank": rank}
            reply = pair.client.post("/v1/completions", json={"prompt": [7] * 64, "max_tokens": 1}, headers=headers)
            assert reply.status_code == 200
        after = by_engine(pair, "vllm:prefix_cache_hits_total")
        return {rank: after[rank] - before[rank] for rank in before}

    assert hits() == {"0": 0, "1": 0}
    assert hits() == {"0": 48, "1": 48}
    assert pair.client.post("/reset_prefix_cache").json() == {"success": True}
    assert hits() == {"0": 0, "1": 0}
    for wrong in ("2", "-1", "all", "9" * 5000):
        headers = {"X-data-parallel-rank": wrong}
        assert pair.client.post("/v1/completions", json=LONG, headers=headers).status_code == 400


def test_a_killed_core_takes_with_it_only_what_it_had_begun(pair: Server):
    """The last of the tests of this server: two requests run on each core, and two wait."""
    answers: list[tuple[int, str]] = []

    def ask(stream: bool) -> None:
        reply = pair.client.post("/v1/completions", json=LONG | {"stream": stream})
        answers.append((reply.status_code, reply.text))

    threads = [threading.Thread(target=ask, args=(index % 2 == 0,)) for index in range(8)]
    for state, some in (("running", threads[:4]), ("waiting", threads[4:])):
        for thread in some:
            thread.start()
        assert eventually(lambda: by_engine(pair, f"vllm:num_requests_{state}") == {"0": 2.0, "1": 2.0})  # noqa: B023
    cores = [one for one in pair.processes() if "minivllm.engine.core_entry" in one.cmdline()]
    victim = next(one for one in cores if one.cmdline()[-1] == "1")
    victim.kill()
    for thread in threads:
        thread.join(60)
    assert sum(is_whole(*answer) for answer in answers) == 6
    failed = [body for status, body in answers if not is_whole(status, body)]
    assert all('"code":500' in body for body in failed)
    assert all(body.endswith("data: [DONE]\n\n") for body in failed if body.startswith("data: "))
    assert pair.client.get("/health").status_code == 503
    assert by_engine(pair, "vllm:num_requests_running") == {"0": 0.0, "1": 0.0}
    assert pair.client.post("/v1/completions", json=LONG).status_code == 200, "the other core goes on"
    assert pair.client.post("/reset_prefix_cache").json() == {"success": True}
    processes = pair.processes()
    next(one for one in cores if one != victim).kill()
    assert pair.process.wait(30) not in (0, None), "no core is left"
    assert not psutil.wait_procs(processes, 2)[1]
    assert "core 1 of 2" in pair.said()
    assert "Traceback" not in pair.said(), pair.said()[pair.said().index("Traceback") - 1500 :][:6000]


def is_whole(status: int, body: str) -> bool:
    return status == 200 and '"error"' not in body and '"length"' in body
